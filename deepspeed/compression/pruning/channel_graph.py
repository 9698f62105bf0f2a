"""Channel groups of convolutional networks, from torch-pruning's graph."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import CONV, TRANSPOSED, Family, ParameterSlice
from deepspeed.compression.pruning.structured_removal import Removal, remove_from
from deepspeed.compression.pruning.transformers_groups import shapes_of
from deepspeed.compression.pruning.verify import FLOOR, LARGEST, TOLERANCE, inputs_for, outputs
from deepspeed.errors import CompressionError, NotAvailableError
from deepspeed.foundation.equivalence import relative_difference
from deepspeed.foundation.transformers_model import config_of

Run = Callable[[Any], torch.Tensor]


def channel_families(model: nn.Module, example: Any, refused: dict[str, str] | None = None) -> list[Family]:
    """Coupled channels: of convolutions, their norms, and what reads them; sums and concatenations couple too.

    Channels of the model's outputs are left alone. Families whose removal is not their masking are left out.

    Args:
        model: plain or sharded; a whole copy is traced.
        example: inputs of forward: a tensor or a tuple.
        refused: takes the reason for every convolution that is left out.

    Raises:
        NotAvailableError: torch-pruning is not installed.
    """
    if importlib.util.find_spec("torch_pruning") is None:
        raise NotAvailableError("channels are coupled by torch-pruning: pip install 'deepspeed[compression]'")
    torch_pruning: Any = importlib.import_module("torch_pruning")
    twin = whole_twin(model)
    run = _on(example)
    graph: Any = torch_pruning.DependencyGraph().build_dependency(twin, example_inputs=_example(example))
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
        slots, blocks = _slots(twin, group, names)
        taken |= {(slot.name, slot.axes[-1]) for slot in slots}
        family = Family("channels", name, module.out_channels, slots, blocks, None)
        reason = not_proven(twin, family, run)
        if not reason:
            found.append(family)
        elif refused is not None:
            refused[name] = reason
    return found


def _example(given: Any) -> Any:
    """Inputs as the twin takes them: on the CPU, floating ones in fp32."""
    if isinstance(given, tuple):
        return tuple(map(_example, given))
    return given.detach().cpu().float() if given.is_floating_point() else given.detach().cpu()


def whole_twin(model: nn.Module) -> Any:
    """A copy in fp32 on the CPU with values that hide nothing, no zeros and no ones; no parameter is gathered."""
    generator = torch.Generator().manual_seed(4)
    copied: dict[int, Any] = {}
    for name, param in model.named_parameters():
        shape = torch.Size(getattr(param, "ds_shape", param.shape))
        noise = torch.randn(shape, generator=generator)
        scaled = noise * 0.2 if len(shape) < 2 else noise * (2 / max(shape[1:].numel(), 1)) ** 0.5
        values = 1 + scaled if len(shape) < 2 and name.endswith("weight") else scaled
        copied[id(param)] = nn.Parameter(values, requires_grad=param.requires_grad)
    twin = copy.deepcopy(model, copied).float().cpu().eval()
    for name, buffer in twin.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return twin


def _slots(model: nn.Module, group: Any, names: dict[int, str]) -> tuple[list[ParameterSlice], int]:
    """The coupled elements, and in how many equal runs as many channels have to stay."""
    tables: dict[tuple[str, int], torch.Tensor] = {}
    grouped: dict[str, Any] = {}
    for item in group:
        module, handler = item.dep.target.module, item.dep.handler.__name__
        name = names.get(id(module))
        if name is None:
            continue
        out, several = handler.endswith("out_channels"), _groups(module)
        for last, param in module.named_parameters(recurse=False):
            if not out and (param.dim() == 1 or (several == 1 and getattr(module, "groups", 1) > 1)):
                continue  # the bias of what reads the channels; a depthwise convolution has no axis of inputs
            axis = 0 if param.dim() == 1 else int(out == isinstance(module, TRANSPOSED))
            size = param.shape[axis] * (several if axis == 1 else 1)
            table = tables.setdefault((f"{name}.{last}", axis), torch.full((size,), -1, dtype=torch.int64))
            roots = getattr(item, "root_idxs", None) or item.idxs
            for index, root in zip(item.idxs, roots, strict=True):
                table[index] = root
        if several > 1:
            grouped[f"{name}.weight"] = module
    slots = [
        _by_group(name, table, grouped[name]) if axis == 1 and name in grouped else ParameterSlice(name, (axis,), table)
        for (name, axis), table in tables.items()
    ]
    return slots, math.lcm(1, *(module.groups for module in grouped.values()))


def _groups(module: nn.Module) -> int:
    """Groups of a convolution whose outputs read some of its inputs each; 1 for all others."""
    groups = getattr(module, "groups", 1)
    return groups if isinstance(module, CONV) and 1 < groups < module.in_channels else 1


def _by_group(name: str, table: torch.Tensor, module: Any) -> ParameterSlice:
    """The inputs of a grouped convolution: every output has those of its own group."""
    rows = table.view(module.groups, -1).repeat_interleave(module.out_channels // module.groups, 0)
    return ParameterSlice(name, (0, 1), rows)


def not_proven(model: nn.Module, family: Family, run: Run) -> str:
    """Why removal is not masking: channels that leave the model, or coupled tensors that are not known; else empty.

    Args:
        model: of `whole_twin`.
        family: what is tried on it, half of the units.
        run: gives the outputs of such a model.
    """
    if family.size // family.blocks < 2:
        return "it has one unit per group"
    generator = torch.Generator().manual_seed(5)
    kept = max(family.size // family.blocks // 2, 1) * family.blocks
    keep = family.choose(torch.rand(family.size, generator=generator, dtype=torch.float64), kept)
    masked, small = copy.deepcopy(model), copy.deepcopy(model)
    params = dict(masked.named_parameters(remove_duplicate=False))
    removal = Removal()
    for slot in family.slots:
        removal.cut_slot(slot, keep)
    removal.cut_running_statistics(small)
    with torch.no_grad():
        for name in family.names():
            flat = params[name].view(-1)
            flat.mul_(family.flags(name, params[name].shape, (0, flat.numel()), keep))
        one = run(masked)
        try:
            remove_from(small, removal)
            two = run(small)
        except (RuntimeError, ValueError, IndexError, CompressionError) as error:
            return f"the smaller model fails: {error}"
    if one.shape != two.shape:
        return f"they leave the model: outputs {tuple(one.shape)} would be {tuple(two.shape)}"
    apart = relative_difference(two, one, floor=FLOOR)
    return "" if apart <= TOLERANCE else f"removed is not masked: they differ by {apart:.2g} of the output"


def runner(model: nn.Module) -> Run | None:
    """What gives the outputs of a copy of the model, on inputs that it says of itself; None where nothing says them.

    Args:
        model: with `example_input_array`, a tensor or a tuple, or of Transformers.
    """
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return _on(example)
    config = config_of(model)
    if config is None or sum(shape.numel() for shape in shapes_of(model).values()) > LARGEST:
        return None
    try:
        asked = inputs_for(model, config)
    except CompressionError:
        return None
    return lambda made: outputs(made, asked)


def _on(example: Any) -> Run:
    inputs = _example(example if isinstance(example, tuple) else (example,))
    return lambda made: _flat(made(*inputs))


def _flat(found: Any) -> torch.Tensor:
    values = found if isinstance(found, (tuple, list)) else (found,)
    return values[0] if len(values) == 1 else torch.cat([value.reshape(-1) for value in values])
