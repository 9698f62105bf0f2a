"""Toys of every causal LM, encoder and encoder-decoder of the installed Transformers, cut and whole."""

from __future__ import annotations

import copy
import math
import re
import time
import warnings
from typing import Any

import torch

from tests import zoo

SLOWEST = 5.0  # seconds of a toy's forward


def build(name: str, layers: int = 2, mixed: bool = True) -> tuple[Any, str]:
    """A toy in fp32 without dropout, or None and why.

    Args:
        name: of its class.
        layers: at the least.
        mixed: a layer of every kind that the class has.
    """
    import transformers

    reasons = []
    kind, decodes = getattr(transformers, name), zoo.names()[name] == "causal LM"
    for find in list(zoo.configs(name, layers=layers))[0 if mixed else 1 :]:
        try:
            config = find()
            if decodes and hasattr(config, "is_decoder"):
                config.is_decoder = True
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if count > zoo.LARGEST:
                raise ValueError(f"{count:,} parameters")
            torch.manual_seed(0)
            model = kind(config).float()
            _values(model)
            started = time.process_time()
            with torch.no_grad():
                run(copy.deepcopy(model), step=0)
            if time.process_time() - started > SLOWEST:
                raise ValueError("it takes long")
            return model, ""
        except Exception as error:  # a class may refuse a toy in any way it likes
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    return None, "; ".join(dict.fromkeys(reasons))


@torch.no_grad()
def _values(model: Any) -> None:
    """Values that hide nothing."""
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        if param.numel() and float(param.min()) == float(param.max()):
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)


def batch(model: Any, step: int) -> dict[str, torch.Tensor]:
    config, generator = model.config, torch.Generator().manual_seed(step)
    length = math.prod(config.axial_pos_shape) if getattr(config, "axial_pos_embds", False) else 10
    ids = torch.randint(3, 60, (2, length), generator=generator)
    given = {"input_ids": ids, "labels": ids.clone()}
    if config.is_encoder_decoder and config.model_type != "fsmt":  # which reads them unshifted
        given["labels"] = ids[:, :7].clone()
    if hasattr(config, "num_codebooks") and config.model_type != "moshi":  # whose labels are of the text
        given["labels"] = ids[..., None]
    return given


def run(model: Any, step: int) -> torch.Tensor:
    out = model(**batch(model, step))
    loss = out.loss
    if loss is None or not torch.isfinite(loss):
        raise ValueError("it gives no loss")
    return loss


def cut_and_compare(name: str, ranks: int) -> dict[str, Any]:
    """One row of the table, by a rank of a group."""
    model, why = build(name)
    return {"verdict": "no toy", "why": why} if model is None else compare_cut(model, ranks)


def compare_cut(model: Any, ranks: int) -> dict[str, Any]:
    """Cut a toy, by a rank of a group, and compare it with itself; in fp64 too where fp32 may only have rounded."""
    warnings.simplefilter("ignore")
    twin = copy.deepcopy(model)
    row = _compared(model, ranks)
    if row["verdict"] != "WRONG" or row["loss"] > 1e-4 or row["gradient"] > 1e-3:
        return row
    exact = _compared(twin.double(), ranks)  # rounding, or a mistake?
    said = (
        f"gradients in fp32 are apart by {row['gradient']:.0e}, which is rounding: in fp64 by {exact['gradient']:.0e}"
    )
    return {**exact, "why": said} if exact["verdict"] == "equal" else row


def _compared(model: Any, ranks: int) -> dict[str, Any]:
    from deepspeed.comm.process_groups.mesh import mesh_for
    from deepspeed.errors import DeepSpeedError
    from deepspeed.tensor_parallel.parallelize import cut_model

    dense, started = copy.deepcopy(model), time.process_time()
    axis = mesh_for({"tp": ranks}).axis("tp")
    try:
        plan = cut_model(model, axis)
    except DeepSpeedError as error:
        return {"verdict": "refused", "why": f"{type(error).__name__}: {error}"[:400]}
    row = {"plan": plan.part(), "part": part(model, dense), "whole": largest_whole(plan)}
    cut_in = time.process_time() - started
    row |= compare(model, dense)
    return row | {"seconds": [round(cut_in, 2), round(time.process_time() - started - cut_in, 2)]}


def largest_whole(plan: Any) -> tuple[str, str]:
    """The largest matrix of a block that each rank has all of, and why."""
    whole = dict(plan.whole)
    for name, how, _ in plan.rows():
        if how == "partial" and not name.partition(" ")[0].endswith(("norm.weight", "bias")):
            whole.setdefault(name, "several ranks use parts of it, such as shared heads")
    size = lambda name: math.prod(plan.shapes.get(name, (1,)))  # noqa: E731
    return max(whole.items(), key=lambda one: size(one[0]), default=("", ""))


def part(model: Any, dense: Any) -> float:
    """Numbers that this rank has of the matrices of blocks, over those of the dense model's."""
    sizes = {n: p.numel() for n, p in dense.named_parameters() if p.dim() > 1 and re.search(r"(^|\.)\d+\.", n)}
    held = sum(p.numel() for n, p in model.named_parameters() if n in sizes)
    return held / max(sum(sizes.values()), 1)


def compare(model: Any, dense: Any) -> dict[str, Any]:
    """Losses, gradients and generated tokens of both."""
    from deepspeed.comm import all_reduce
    from deepspeed.comm.process_groups.mesh import current_mesh
    from deepspeed.zero.layout.placement import Relation, placement_of
    from tests.parallel.dense import share_of

    losses = []
    for one in (model, dense):  # some draw numbers
        torch.manual_seed(17)
        losses.append(run(one, 1))
        losses[-1].backward()
    ours, theirs = losses
    wanted = {n: p.grad for n, p in dense.named_parameters() if p.grad is not None}
    largest = max(float(g.norm()) for g in wanted.values())
    gap = 0.0
    for n, p in model.named_parameters():
        if n not in wanted:
            continue
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if placement_of(p).relations.get("tp") is Relation.PARTIAL:
            all_reduce(grad, group=current_mesh().axis("tp").group)
        gap = max(gap, float((grad - share_of(p, wanted[n])).norm()) / largest)
    loss = abs(float(ours) - float(theirs)) / abs(float(theirs))
    tokens, why = generated(model, dense)
    equal = loss <= 1e-5 and gap <= 1e-5 and tokens in ("same", "–")
    return {"verdict": "equal" if equal else "WRONG", "loss": loss, "gradient": gap, "tokens": tokens, "why": why}


def generated(model: Any, dense: Any) -> tuple[str, str]:
    """Whether both generate the same tokens, from scores that are the same within 1e-4; "–" and why, where the dense
    model generates none."""
    if not hasattr(dense, "generate"):
        return "–", ""
    ids = batch(model, 5)["input_ids"][:, :10]
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    try:
        wanted = dense.eval().generate(ids, attention_mask=torch.ones_like(ids), **given)
    except Exception as error:
        return "–", f"generates nothing whole: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
    found = model.eval().generate(ids, attention_mask=torch.ones_like(ids), **given)
    gap = max(
        float((a - b).abs().max()) / float(b.abs().max()) for a, b in zip(found.logits, wanted.logits, strict=True)
    )
    same = torch.equal(wanted.sequences, found.sequences)
    if same and gap <= 1e-4:
        return "same", ""
    return "others", f"{'the same' if same else 'other'} tokens, logits apart by {gap:.1e}"
