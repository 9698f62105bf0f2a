"""Channels of convolutional networks, by torch-pruning's graph: it proposes, and a twin proves."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from deepspeed.compression.units import CONV, Family, Slot
from deepspeed.errors import CompressionError, NotAvailableError

TOLERANCE = 1e-5


def channel_families(model: nn.Module, example: Any) -> list[Family]:
    """Coupled channels: of convolutions, their norms, and what reads them; sums and concatenations couple too.

    Channels of the model's outputs are left alone. Families whose removal is not their masking are left out.

    Args:
        model: plain or sharded; a whole copy is traced.
        example: inputs of forward: a tensor or a tuple.

    Raises:
        NotAvailableError: torch-pruning is not installed.
    """
    if importlib.util.find_spec("torch_pruning") is None:
        raise NotAvailableError("channels are coupled by torch-pruning: pip install 'deepspeed[compression]'")
    torch_pruning: Any = importlib.import_module("torch_pruning")
    twin = copy.deepcopy(model).float().eval()
    graph: Any = torch_pruning.DependencyGraph().build_dependency(twin, example_inputs=example)
    names = {id(module): name for name, module in twin.named_modules()}
    found: list[Family] = []
    taken: set[tuple[str, int]] = set()
    for name, module in twin.named_modules():
        if not isinstance(module, CONV) or (f"{name}.weight", 0) in taken:
            continue
        prune = torch_pruning.prune_conv_out_channels
        if module.groups > 1 and module.groups == module.in_channels:
            continue  # depthwise: it follows what it reads
        group = graph.get_pruning_group(module, prune, idxs=list(range(module.out_channels)))
        slots = _slots(twin, group, names)
        taken |= {(slot.name, slot.axes[-1]) for slot in slots}
        found.append(Family("channels", name, module.out_channels, slots, 1, None))
    return [family for family in found if not _not_proven(twin, family, example)]


def _slots(model: nn.Module, group: Any, names: dict[int, str]) -> list[Slot]:
    tables: dict[tuple[str, int], torch.Tensor] = {}
    for item in group:
        module, handler = item.dep.target.module, item.dep.handler.__name__
        name = names.get(id(module))
        if name is None:
            continue
        out = handler.endswith("out_channels")
        for last, param in module.named_parameters(recurse=False):
            if param.dim() == 1:
                if not out:
                    continue  # the bias of what reads the channels
                axis = 0
            else:
                axis = 0 if out else 1
                if not out and isinstance(module, CONV) and module.groups > 1:
                    continue
            key = (f"{name}.{last}", axis)
            table = tables.setdefault(key, torch.full((param.shape[axis],), -1, dtype=torch.int64))
            roots = getattr(item, "root_idxs", None) or item.idxs
            for index, root in zip(item.idxs, roots, strict=True):
                table[index] = root
    return [Slot(name, (axis,), table) for (name, axis), table in tables.items()]


def _not_proven(model: nn.Module, family: Family, example: Any) -> bool:
    """Whether removal is not masking: channels that leave the model, or a graph that was not understood."""
    from deepspeed.compression.remove import Removal, cut_with_buffers, remove_from

    generator = torch.Generator().manual_seed(5)
    keep = family.choose(torch.rand(family.size, generator=generator, dtype=torch.float64), max(family.size // 2, 1))
    masked, small = copy.deepcopy(model), copy.deepcopy(model)
    params = dict(masked.named_parameters())
    removal = Removal()
    for slot in family.slots:
        removal.cut(slot.name, slot.axes[-1], slot.indices(keep))
    cut_with_buffers(small, removal)
    inputs = example if isinstance(example, tuple) else (example,)
    with torch.no_grad():
        for name in family.names():
            flat = params[name].view(-1)
            flat.mul_(family.flags(name, params[name].shape, (0, flat.numel()), keep))
        try:
            remove_from(small, removal)
            one, two = masked(*inputs), small(*inputs)
        except (RuntimeError, ValueError, IndexError, CompressionError):
            return True
    return one.shape != two.shape or bool((one - two).abs().max() > TOLERANCE * one.abs().max().clamp(min=1e-12))
