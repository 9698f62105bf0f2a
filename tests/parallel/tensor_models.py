"""Every causal LM, encoder and encoder-decoder of the installed Transformers at toy size, cut and whole."""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from typing import Any

import torch

from tests.unit.compression.architectures import FAMILIES, architecture

LARGEST, SLOWEST = 5_000_000, 2.0  # parameters of a toy, seconds of its forward
# Numbers that configs have under these names.
SIZES = {
    "vocab_size": 64, "hidden_size": 96, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "n_embd": 96, "n_layer": 2, "n_head": 12, "n_positions": 64, "n_ctx": 64, "n_inner": 72,
    "d_model": 96, "d_ff": 72, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 12,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, "ffn_dim": 72, "ffn_hidden_size": 72, "max_seq_len": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "n_shared_experts": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "rotary_dim": 4, "embedding_size": 16, "dim": 96, "hidden_dim": 72, "n_layers": 2, "n_heads": 12,
    "state_size": 8, "sliding_window": 16, "decoder_start_token_id": 1, "word_embed_proj_dim": 96,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "attention_types": [[["global", "local"], 1]],
}  # fmt: skip


def names() -> dict[str, str]:
    """Model class names, by kind."""
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "causal LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    found: dict[str, str] = {}
    for kind, table in tables.items():
        for name in table.values():
            for one in name if isinstance(name, (list, tuple)) else [name]:
                found.setdefault(one, kind)
    return found


def _known(name: str) -> tuple[Any, Any] | None:
    for family in FAMILIES:
        try:
            made, config = architecture(family)
        except (AttributeError, TypeError, ValueError):
            continue
        if made.__name__ == name:
            return made, config
    return None


def toy(name: str) -> tuple[Any, Any]:
    """(model class, config) at toy size; whatever a class raises is why it has none."""
    import transformers

    kind = getattr(transformers, name)
    base = kind.config_class()
    said = {**base.to_dict(), **{key: 0 for key in getattr(base, "attribute_map", {})}}
    accepted = inspect.signature(type(base).__init__).parameters
    given = {key: value for key, value in SIZES.items() if key in said or key in accepted}
    for key in ("attention_types",):
        if key in given and "neo" not in name.lower():
            given.pop(key)
    return kind, type(base)(**given)


def build(name: str) -> tuple[Any, str]:
    """A toy in fp32 without dropout, or None and why."""
    reasons = []
    for find in (toy, _known):
        try:
            found = find(name)
            if found is None:
                continue
            kind, config = found
            if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = 1
            for key, value in vars(config).items():
                drops = "drop" in key or key.endswith("pdrop")
                if drops and isinstance(value, float):
                    setattr(config, key, 0.0)
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if count > LARGEST:
                reasons.append(f"{count:,} parameters")
                continue
            torch.manual_seed(0)
            model = kind(config).float()
            _values(model)
            started = time.process_time()
            run(model, step=0)
            if time.process_time() - started > SLOWEST:
                reasons.append("it takes long")
                continue
            return model, ""
        except Exception as error:  # a class may refuse a toy in any way it likes
            reasons.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}")
    return None, "; ".join(dict.fromkeys(reasons))


@torch.no_grad()
def _values(model: Any) -> None:
    """Values that hide nothing."""
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        if param.numel() and float(param.min()) == float(param.max()):
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)


def batch(model: Any, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 60, (2, 10), generator=generator)
    given = {"input_ids": ids, "labels": ids.clone()}
    if model.config.is_encoder_decoder:
        given["labels"] = ids[:, :7].clone()
    return given


def run(model: Any, step: int) -> torch.Tensor:
    out = model(**batch(model, step))
    loss = out.loss
    if loss is None or not torch.isfinite(loss):
        raise ValueError("it gives no loss")
    return loss


def cut_and_compare(name: str, ranks: int) -> dict[str, Any]:
    """One row of the table."""
    from deepspeed.comm.mesh import mesh_for
    from deepspeed.tensor_parallel.cut import cut_model

    warnings.simplefilter("ignore")
    model, why = build(name)
    if model is None:
        return {"name": name, "verdict": "no toy", "why": why}
    dense = copy.deepcopy(model)
    axis = mesh_for({"tp": ranks}).axis("tp")
    try:
        plan = cut_model(model, axis)
    except Exception as error:
        return {"name": name, "verdict": "refused", "why": f"{type(error).__name__}: {error}"[:300]}
    row = {"name": name, "part": plan.part(), "whole": next(iter(plan.whole.values()), "")}
    row.update(compare(model, dense))
    return row


def compare(model: Any, dense: Any) -> dict[str, Any]:
    """Losses, gradients and generated tokens of both."""
    from deepspeed.comm import all_reduce
    from deepspeed.comm.mesh import current_mesh
    from deepspeed.zero.placement import Relation, placement_of
    from tests.parallel.dense import share_of

    ours, theirs = run(model, 1), run(dense, 1)
    ours.backward()
    theirs.backward()
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
    tokens = generated(model, dense)
    equal = loss <= 1e-5 and gap <= 1e-5 and tokens in ("same", "–")
    return {"verdict": "equal" if equal else "WRONG", "loss": loss, "gradient": gap, "tokens": tokens, "why": ""}


def generated(model: Any, dense: Any) -> str:
    """Whether both generate the same tokens; "–" where the dense model generates none."""
    given = {"input_ids": batch(model, 5)["input_ids"], "max_new_tokens": 4, "do_sample": False}
    try:
        wanted = dense.eval().generate(**given)
    except Exception:
        return "–"
    found = model.eval().generate(**given)
    return "same" if torch.equal(wanted, found) else "others"
