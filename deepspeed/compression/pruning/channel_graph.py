"""Coupled channels of convolutional networks, from torch-pruning's dependency graph, verified on a model copy."""

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
    """Return the dependency groups of convolution channels, across norms, sums, concatenations and later modules.

    Channels of the model's outputs are excluded, and groups for which removal and masking give different outputs.

    Args:
        model: plain or sharded model; an unsharded copy with random weights is traced.
        example: inputs of forward: a tensor or a tuple.
        refused: filled with {name of an excluded convolution: reason}; None: reasons are dropped.

    Raises:
        NotAvailableError: torch-pruning is not installed.
    """
    if importlib.util.find_spec("torch_pruning") is None:
        raise NotAvailableError("channels are coupled by torch-pruning: pip install 'deepspeed[compression]'")
    torch_pruning: Any = importlib.import_module("torch_pruning")
    twin = whole_twin(model)
    run = _runner_of(example)
    graph: Any = torch_pruning.DependencyGraph().build_dependency(twin, example_inputs=_cpu_inputs(example))
    names = {id(module): name for name, module in twin.named_modules()}
    families: list[Family] = []
    taken: set[tuple[str, int]] = set()
    for name, module in twin.named_modules():
        if not isinstance(module, CONV) or (f"{name}.weight", 0) in taken:
            continue
        prune = torch_pruning.prune_conv_out_channels
        if module.groups > 1 and module.groups == module.in_channels:
            continue  # depthwise: it follows its inputs
        group = graph.get_pruning_group(module, prune, idxs=list(range(module.out_channels)))
        slots, blocks = _slots(group, names)
        taken |= {(slot.name, slot.axes[-1]) for slot in slots}
        family = Family("channels", name, module.out_channels, slots, blocks, None)
        reason = not_proven(twin, family, run)
        if not reason:
            families.append(family)
        elif refused is not None:
            refused[name] = reason
    return families


def _cpu_inputs(example: Any) -> Any:
    """Move inputs to the CPU; floating-point tensors become fp32."""
    if isinstance(example, tuple):
        return tuple(map(_cpu_inputs, example))
    return example.detach().cpu().float() if example.is_floating_point() else example.detach().cpu()


def whole_twin(model: nn.Module) -> Any:
    """Return a copy of a model on the CPU, in fp32, unsharded, with random parameters; nothing is communicated."""
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


def _slots(group: Any, names: dict[int, str]) -> tuple[list[ParameterSlice], int]:
    """Return the parameter slices of a torch-pruning group, and its number of blocks.

    Each block (the groups of a grouped convolution) must keep the same number of channels.

    Args:
        group: a group of torch-pruning.
        names: names of the modules by id.
    """
    tables: dict[tuple[str, int], torch.Tensor] = {}
    grouped: dict[str, Any] = {}  # grouped convolutions, in which an output reads some of the inputs, by weight
    for item in group:
        module, handler = item.dep.target.module, item.dep.handler.__name__
        name = names.get(id(module))
        if name is None:
            continue
        out, groups = handler.endswith("out_channels"), getattr(module, "groups", 1)
        several = groups if isinstance(module, CONV) and 1 < groups < module.in_channels else 1
        for last, param in module.named_parameters(recurse=False):
            if not out and (param.dim() == 1 or (several == 1 and groups > 1)):
                continue  # bias of a reading module; a depthwise convolution has no input axis
            axis = 0 if param.dim() == 1 else int(out == isinstance(module, TRANSPOSED))
            size = param.shape[axis] * (several if axis == 1 else 1)
            table = tables.setdefault((f"{name}.{last}", axis), torch.full((size,), -1, dtype=torch.int64))
            roots = getattr(item, "root_idxs", None) or item.idxs
            for index, root in zip(item.idxs, roots, strict=True):
                table[index] = root
        if several > 1:
            grouped[f"{name}.weight"] = module
    slots = []
    for (name, axis), table in tables.items():
        if axis == 1 and name in grouped:  # every output reads the inputs of its own group
            conv = grouped[name]
            table = table.view(conv.groups, -1).repeat_interleave(conv.out_channels // conv.groups, 0)
            slots.append(ParameterSlice(name, (0, 1), table))
        else:
            slots.append(ParameterSlice(name, (axis,), table))
    return slots, math.lcm(1, *(module.groups for module in grouped.values()))


def not_proven(model: nn.Module, family: Family, run: Run) -> str:
    """Compare the outputs after removal and after masking of half of the units.

    Args:
        model: a result of `whole_twin`.
        family: a dependency group of that model.
        run: function that computes the outputs of such a model.

    Returns:
        "" if the outputs are equal, else the reason why the group cannot be removed.
    """
    if family.size // family.blocks < 2:
        return "it has one unit per group"
    generator = torch.Generator().manual_seed(5)
    kept_units = max(family.size // family.blocks // 2, 1) * family.blocks
    keep = family.choose(torch.rand(family.size, generator=generator, dtype=torch.float64), kept_units)
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
        expected = run(masked)
        try:
            remove_from(small, removal)
            actual = run(small)
        except (RuntimeError, ValueError, IndexError, CompressionError) as error:
            return f"the smaller model fails: {error}"
    if expected.shape != actual.shape:
        return f"they leave the model: outputs {tuple(expected.shape)} would be {tuple(actual.shape)}"
    difference = relative_difference(actual, expected, floor=FLOOR)
    return "" if difference <= TOLERANCE else f"removed is not masked: they differ by {difference:.2g} of the output"


def runner(model: nn.Module) -> Run | None:
    """Return a function that computes the outputs of copies of a model; None if its inputs are unknown.

    Inputs are known for models with an `example_input_array` (a tensor or a tuple) and for models of Transformers up to
    `LARGEST` parameters.
    """
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return _runner_of(example)
    config = config_of(model)
    if config is None or sum(shape.numel() for shape in shapes_of(model).values()) > LARGEST:
        return None
    try:
        inputs = inputs_for(model, config)
    except CompressionError:
        return None
    return lambda twin: outputs(twin, inputs)


def _runner_of(example: Any) -> Run:
    inputs = _cpu_inputs(example if isinstance(example, tuple) else (example,))

    def run(twin: Any) -> torch.Tensor:
        output = twin(*inputs)
        values = output if isinstance(output, (tuple, list)) else (output,)
        return values[0] if len(values) == 1 else torch.cat([value.reshape(-1) for value in values])

    return run
