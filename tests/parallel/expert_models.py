"""Toys of every class of the installed Transformers that may have experts: divided among ranks, and whole."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests import zoo

SLOWEST, LARGEST = 5.0, 30_000_000  # seconds of a toy's forward; parameters
MORE = {  # numbers that configs have under these names
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1,
    "zero_expert_num": 2, "moe_num_experts": 4, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "interleave_moe_layer_step": 1, "is_moe": True, "enable_moe_block": True, "top_k_experts": 2,
    "mlp_only_layers": [], "mlp_layer_types": ["sparse"] * 2,
}  # fmt: skip
EXPERTS = re.compile(r"xpert|MoE|Moe(?![a-z])|MOE")
HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForBlockDiffusion")
BAR, BAR_OF_STEP = 1e-5, 2e-5


def names() -> dict[str, str]:
    """Model class names, by kind: text models, models of images and text, and those whose file speaks of experts."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    found = dict(zoo.names())
    tables = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
    for table in tables:
        for name in getattr(auto, table, {}).values():
            for one in name if isinstance(name, (list, tuple)) else [name]:
                found.setdefault(one, "multimodal")
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if re.search(r"[Ee]xperts", file.read_text()):
            for name in _classes_of(file):
                found.setdefault(name, "base" if "For" not in name else "other head")
    return {name: kind for name, kind in found.items() if hasattr(transformers, name)}


def _classes_of(file: Path) -> list[str]:
    """Public models of a file that have a head of language, and text backbones; all of them where there are none."""
    from transformers import PreTrainedModel

    module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
    every = [
        name
        for name in getattr(module, "__all__", ())
        if inspect.isclass(kind := getattr(module, name)) and issubclass(kind, PreTrainedModel)
    ]
    every = [name for name in every if not name.endswith("PreTrainedModel")]
    return [name for name in every if name.endswith((*HEADS, "TextModel"))] or every


def speaks_of_experts(name: str) -> bool:
    """Whether the file of a class does."""
    import transformers

    return re.search(r"[Ee]xperts", Path(inspect.getfile(getattr(transformers, name))).read_text()) is not None


def build(name: str) -> tuple[Any, str]:
    """A toy in fp32 that draws no numbers, or None and why; "no experts" is a reason, too."""
    import transformers

    kind, reasons = getattr(transformers, name), []
    for find in zoo.configs(name, more=MORE):
        try:
            config = find()
            quiet(config)
            with torch.device("meta"):
                empty = kind(copy.deepcopy(config))
            if not any(EXPERTS.search(type(module).__name__) for module in empty.modules()):
                return None, "no experts"
            count = sum(param.numel() for param in empty.parameters())
            if count > LARGEST:
                raise ValueError(f"{count:,} parameters")
            torch.manual_seed(0)
            model = kind(config).float()
            _values(model)
            started = time.process_time()
            with torch.no_grad():
                output = run(copy.deepcopy(model), 0)
            if not torch.isfinite(output).all():
                raise ValueError("its output is not finite")
            if time.process_time() - started > SLOWEST:
                raise ValueError("it takes long")
            return model, ""
        except Exception as error:  # a class may refuse a toy in any way it likes
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    return None, "; ".join(dict.fromkeys(reasons))


def quiet(config: Any) -> None:
    """Routers without noise."""
    from transformers import PreTrainedConfig

    for key, value in vars(config).items():
        if "jitter" in key:
            setattr(config, key, 0.0)
        elif isinstance(value, PreTrainedConfig):
            quiet(value)


@torch.no_grad()
def _values(model: Any) -> None:
    """Values that hide nothing; routers in evaluation, since Phi's draws experts at random while it trains."""
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        if not torch.isfinite(param).all() or float(param.abs().max()) > 1e3:  # memory that nobody has initialised
            param.zero_()
        if param.numel() and float(param.min()) == float(param.max()):
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.eval()


def run(model: Any, rank: int) -> torch.Tensor:
    """The output for the tokens of a rank: another number of them on each."""
    config = getattr(model, "module", model).config
    generator = torch.Generator().manual_seed(100 + rank)
    length = 10 + 3 * rank
    given = {"input_ids": torch.randint(3, 60, (2, length), generator=generator)}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(3, 60, (2, 6), generator=generator)
    torch.manual_seed(17)
    out = model(**given)
    found = next((getattr(out, key) for key in ("logits", "last_hidden_state") if hasattr(out, key)), None)
    return found if found is not None else out[0]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (output * torch.randn(output.shape, generator=generator).to(output)).sum() / output.shape[:-1].numel()


def compare(model: Any) -> dict[str, Any]:
    """Divide a toy's experts among all ranks, by one of them, and compare it with itself; again in fp64 where fp32 may
    only have rounded."""
    warnings.simplefilter("ignore")
    twin = copy.deepcopy(model)
    row = _compared(model)
    if row["verdict"] != "WRONG" or row["worst"] > 1e-3:
        return row
    try:
        if hasattr(twin, "set_experts_implementation"):
            twin.set_experts_implementation("eager")  # grouped_mm knows no fp64
        exact = _compared(twin.double())
    except Exception as error:  # some cast their router to fp32
        return row | {"why": f"not in fp64: {type(error).__name__}: {error}"[:200]}
    why = f"in fp32 apart by {row['worst']:.0e}, which is rounding: in fp64 by {exact.get('worst', 1.0):.0e}"
    return {**exact, "why": why} if exact["verdict"] == "equal" else row


def _compared(model: Any) -> dict[str, Any]:
    import torch.distributed as dist

    import deepspeed
    from deepspeed.errors import DeepSpeedError
    from deepspeed.moe.expert_parallel import DividedExperts

    dense, ranks = copy.deepcopy(model), dist.get_world_size()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 1},
        "expert_parallel": {"size": ranks},
        "steps_per_print": None,
    }
    try:
        engine, *_ = deepspeed.initialize(model=model, config=settings)
    except DeepSpeedError as error:
        return {"verdict": "refused", "why": f"{type(error).__name__}: {error}"[:400]}
    layers = [module for module in engine.module.modules() if isinstance(module, DividedExperts)]
    row = {"layers": len(layers), "form": layers[0].structure.forms[0].name}
    row |= _distances(engine, dense, dist.get_rank(), ranks)
    row["worst"] = max(row["output"], row["gradient"], row["step"])
    equal = max(row["output"], row["gradient"]) <= BAR and row["step"] <= BAR_OF_STEP
    return row | {"verdict": "equal" if equal else "WRONG", "why": ""}


def _distances(engine: Any, dense: nn.Module, rank: int, ranks: int) -> dict[str, float]:
    from deepspeed.foundation.equivalence import relative_difference
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    output = run(engine, rank)
    engine.backward(loss_of(output))
    grads = {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
    engine.step()
    optimizer, apart = torch.optim.AdamW(dense.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0), 0.0
    for other in range(ranks):
        wanted = run(dense, other)
        if other == rank:
            apart = relative_difference(output, wanted)
        (loss_of(wanted) / ranks).backward()
    whole = dict(dense.named_parameters())
    largest = max(float(param.grad.norm()) for param in whole.values() if param.grad is not None)
    gradient = step = 0.0
    for name, found in grads.items():
        expected = whole[name].grad
        expected = torch.zeros_like(whole[name]) if expected is None else expected
        found = torch.zeros_like(expected) if found is None else found
        gradient = max(gradient, float((found - expected).norm()) / largest)
    optimizer.step()
    for name, param in engine.module.named_parameters():
        ours = safe_get_full_fp32_param(param)
        if ours is not None:
            step = max(step, relative_difference(ours, whole[name], floor=1e-3))
    return {"output": apart, "gradient": gradient, "step": step}
