"""LoRA adapters (PEFT) on packed experts (`target_parameters`): a rank keeps the adapters of its own experts.

An adapter of E experts and LoRA rank r has A (E r, in), with rows grouped by expert, and B (out, r E), where column
i E + e belongs to expert e. If the adapter treats the experts' parameter as one 2-d matrix, A (r, in) is shared by all
experts, and B (out, r) is divided like the parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from deepspeed.foundation.log import log_rank0
from deepspeed.moe.structure import ExpertStructure

Segments = list[tuple[int, int]]


class ExpertPart(NamedTuple):
    """Slice of a module's parameter for the experts of this rank: (start, length) segments of one dim."""

    owner: nn.Module
    key: str
    dim: int
    segments: Segments

    @property
    def param(self) -> nn.Parameter:
        """The parameter itself, before or after its division."""
        return self.owner.get_parameter(self.key)


def wrappers_of(model: nn.Module, experts: nn.Module) -> list[Any]:
    """Return the PEFT wrappers in a model that adapt the parameters of a module of experts."""
    layers = sys.modules.get("peft.tuners.lora.layer")  # not imported: then nothing is wrapped
    kind = getattr(layers, "ParamWrapper", ())
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    return [wrapper for wrapper in wrappers if wrapper.get_base_layer() is experts]


def adapters_of(wrapper: Any, structure: ExpertStructure, ep: int, part: int) -> Iterator[ExpertPart]:
    """Yield the slices of a wrapper's adapters for the experts of one rank.

    Args:
        wrapper: wrapper from `wrappers_of`, with the adapters of all experts.
        structure: structure of the module of experts.
        ep: number of ranks among which the experts are divided.
        part: index, among these ranks, of the share of experts.
    """
    packed, count = wrapper.get_param(), structure.count
    size = getattr(packed, "ds_shape", packed.shape)[0]
    for name, down in wrapper.lora_A.items():
        up, rank = wrapper.lora_B[name], wrapper.r[name]
        if wrapper.num_experts == count:
            experts = structure.segments(count, ep, part)
            yield ExpertPart(down, "weight", 0, [(start * rank, length * rank) for start, length in experts])
            columns = [(index * count + start, length) for index in range(rank) for start, length in experts]
            yield ExpertPart(up, "weight", 1, columns)
        else:
            yield ExpertPart(up, "weight", 0, structure.segments(size, ep, part))


def set_local_count(wrapper: Any, count: int, local_count: int) -> None:
    """Set a wrapper's `num_experts`, which shapes the adapters, to `local_count` if the value is `count`."""
    if wrapper.num_experts == count:
        wrapper.num_experts = local_count


def advise(model: nn.Module, experts: dict[str, nn.Module]) -> None:
    """Log a hint if a model has adapters, but one of its modules of experts is frozen and has none."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    if layers is None or not any(isinstance(module, layers.LoraLayer) for module in model.modules()):
        return
    for name, module in experts.items():
        params = dict(module.named_parameters())
        if not any(param.requires_grad for param in params.values()) and not wrappers_of(model, module):
            log_rank0(
                f"LoRA does not train the packed experts of '{name}': add target_parameters={sorted(params)} to "
                f"LoraConfig to adapt them"
            )
            return
