"""Copy of a model in training whose matrices are this rank's slices, for generation that several ranks do together.

The copy has modules of its own and no weights between generations. For a generation, parameters of the model that are
whole on this rank are sliced in place: a slice that lies in one piece of a dimension is a view, any other is copied.
Parameters that ZeRO shards are gathered some layers at a time, and the slices are kept until the generation ends.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.same_error import raise_together
from deepspeed.comm.process_groups.mesh import DIMS, Mesh
from deepspeed.errors import TensorParallelError
from deepspeed.foundation.log import describe_error
from deepspeed.foundation.malloc import LARGE, mapped
from deepspeed.inference.executors.engine_weights import groups_of, is_sharded
from deepspeed.inference.executors.select import difference_of_logits
from deepspeed.inference.trained_lora import WATCHED, has_adapters, is_lora, watched_weights
from deepspeed.tensor_parallel.channel_dependencies import same_draws
from deepspeed.tensor_parallel.layers import slice_of
from deepspeed.tensor_parallel.parallelize import cut_over
from deepspeed.zero.layout.placement import placement_of

# Attributes of LoRA layers (PEFT, DeepSpeed-Chat) that say which of their matrices are used now.
_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling", "lora_scaling", "fuse_lora")


class _Unset(nn.Parameter):
    """Parameter with a shape and the memory of a few elements; a deep copy has all elements."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            values = self.detach().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
            memo[id(self)] = nn.Parameter(values, requires_grad=False)
        return memo[id(self)]


def _without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _drawn(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of drawn values, each used many times, with the memory of about one row and one column.

    The search for what can be split runs the model, and would find that equal channels depend on each other.
    """
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(max(sum(shape), 1), generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)
    return values.to(device, dtype).as_strided(shape, [1] * len(shape))


def _contiguous_copy(part: torch.Tensor) -> torch.Tensor:
    """Return a copy; a large one on a CPU has memory of its own, which the heap does not keep when it is freed."""
    if part.device.type != "cpu" or part.numel() * part.itemsize < LARGE:
        return part.clone(memory_format=torch.contiguous_format)
    return mapped(part.shape, part.dtype).copy_(part)


class SlicedCopy:
    """Copy of a model in training, sliced over the ranks of a mesh's axis `tp`. All ranks make it together.

    Args:
        source: the model of Transformers that an engine trains.
        mesh: mesh of all ranks; those along `tp` generate together.
        layers_at_a_time: number of units of stage 3 that are gathered at a time.

    Attributes:
        model: the copy.
        weights: access to the weights of `source`.

    Raises:
        TensorParallelError: the model cannot be split, or its slices do not compute its logits.
    """

    def __init__(self, source: nn.Module, mesh: Mesh, layers_at_a_time: int = 8) -> None:
        self.source, self.axis = source, mesh.axis("tp")
        self._layers = layers_at_a_time
        self.weights = watched_weights(source)
        self._shapes = self._shapes_now()
        self.model = self._split(mesh)
        self._own = dict(self.model.named_parameters())
        self._attached = False
        with self.attached():
            raise_together(
                mesh.axis(*DIMS),
                self._compare,
                lambda rank, text: TensorParallelError(f"generation over several ranks failed on rank {rank}: {text}"),
            )

    def _shapes_now(self) -> list[Any]:
        params = [(name, param.shape, param.dtype) for name, param in self.source.named_parameters()]
        return [*params, *map(id, self.source.modules())]

    def fits(self) -> bool:
        """Return whether the model still has the modules and parameters that it had when the copy was made."""
        return self._shapes == self._shapes_now()

    def _split(self, mesh: Mesh) -> nn.Module:
        """Copy the modules, without weights, and slice them; random states stay as they are."""
        memo = {id(owner): owner for module in self.source.modules() for owner in _owners_of_hooks(module)}
        # Ranks in training draw other numbers than each other, and go on with them; plans are found by gradients.
        with torch.inference_mode(False), same_draws(), torch.enable_grad():
            for param in self.source.parameters():
                memo[id(param)] = _Unset(_drawn(param.shape, param.dtype, param.device), requires_grad=False)
            try:
                model = copy.deepcopy(self.source, memo).eval()
            except Exception as error:
                raise TensorParallelError(
                    f"the modules of {type(self.source).__name__} cannot be copied for generation by several ranks "
                    f"({describe_error(error)}): set hybrid_engine.inference_tp_size to 1"
                ) from error
            cut_over(mesh, model, check="shapes", settle=_drop_values)
        object.__setattr__(model, WATCHED, self.weights)
        return model

    def _compare(self) -> None:
        difference = difference_of_logits(self.source, self.model)
        if difference is not None:
            raise TensorParallelError(
                f"{type(self.source).__name__} sliced over {self.axis.size} ranks for generation computes other "
                f"logits ({difference}): set hybrid_engine.inference_tp_size to 1"
            )

    # -- weights --------------------------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the copy has its weights. Where gathers need all ranks, all of them enter it together."""
        self.attach()
        try:
            yield
        finally:
            self.detach()

    def attach(self) -> None:
        """Give the copy its slices of the present weights; see `attached`."""
        if self._attached:
            return
        self._attached = True
        with torch.inference_mode(False), torch.no_grad():
            self._attach()

    def _attach(self) -> None:
        weights = self.weights
        weights.settle()
        params = dict(self.source.named_parameters())
        for name, param in params.items():
            if not is_sharded(param):  # copied each time if it is no view: nothing tells of all changes (`p.data.mul_`)
                self._own[name].data = slice_of(param.detach(), placement_of(self._own[name]).cuts)
        sharded = {name: param for name, param in params.items() if is_sharded(param)}
        for chunk in self._chunks(sharded):
            with weights.gathered(sharded[name] for name in chunk):
                for name in chunk:
                    part = slice_of(sharded[name].detach(), placement_of(self._own[name]).cuts)
                    self._own[name].data = _contiguous_copy(part)
        self._follow_modules()

    def _chunks(self, sharded: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        """Yield the names of sharded parameters that are gathered together, in the model's order."""
        order: dict[int, list[str]] = {id(group): [] for group in groups_of(sharded.values())}
        for name, param in sharded.items():
            order[id(param._ds_member.group)].append(name)
        units = list(order.values())
        for first in range(0, len(units), self._layers):
            yield tuple(itertools.chain(*units[first : first + self._layers]))

    def _follow_modules(self) -> None:
        """Copy persistent buffers, and which adapters are used, from the model."""
        own = dict(self.model.named_modules())
        for name, module in self.source.named_modules():
            if has_adapters(module) or is_lora(module):
                state = {key: vars(module)[key] for key in _SWITCHES if key in vars(module)}
                vars(own[name]).update(copy.deepcopy(state))
            for key, buffer in module._buffers.items():
                target = own[name]._buffers.get(key)
                if buffer is None or target is None or key in module._non_persistent_buffers_set:
                    continue
                part = slice_of(buffer, placement_of(target).cuts)
                if part.shape == target.shape:
                    target.copy_(part)

    def detach(self) -> None:
        """Drop the copy's slices."""
        self._attached = False
        with torch.inference_mode(False):
            for param in self.model.parameters():
                param.data = _without_memory(param.shape, param.dtype, param.device)


def _owners_of_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the objects whose methods are hooks of a module: the hooks of a copy are methods of the same objects."""
    for members in (module._forward_hooks, module._forward_pre_hooks):
        for hook in members.values():
            owner = getattr(getattr(hook, "func", hook), "__self__", None)
            if owner is not None and not isinstance(owner, nn.Module):
                yield owner


def _drop_values(unit: nn.Module) -> None:
    """Free the slices of a unit's parameters, which have no values yet."""
    for param in unit.parameters():
        param.data = _without_memory(param.shape, param.dtype, param.device)
