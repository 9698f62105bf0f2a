"""Random states under tensor parallelism: equal for replicated activations, different for split ones.

Outside of dropout on split activations, all ranks have the same random state. A module with such dropout draws a number
from this common state and seeds its own state with the number and the rank. Restoring the common state (activation
checkpointing, resume) therefore reproduces the same masks.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.torch_api import all_gather_objects, broadcast, object_exchange
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import TensorParallelError
from deepspeed.foundation.log import log_rank0
from deepspeed.tensor_parallel.trace import OpTrace

_DROPS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_PRIME = 1_000_003


class Draws(OpTrace):
    """Trace (see `OpTrace`) that records the matrices that produce the activations under dropout.

    Attributes:
        dropped: names of these matrices, one set for each dropout, by the name of the module that runs it.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__(model, inputs)
        self.dropped: dict[str, list[frozenset[str]]] = {}
        self._inside: list[str] = [""]
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, name: str) -> Any:
        return lambda *_: self._inside.append(name)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DROPS or name == "scaled_dot_product_attention":
            if self._rate(name, args, kwargs) > 0:
                tensors = (value for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor))
                taints = [t for t in map(self._taint, tensors) if t is not None]
                sources = frozenset().union(*(t.sources for t in taints))
                self.dropped.setdefault(self._inside[-1], []).append(sources)
        return super().__torch_function__(func, types, args, kwargs)

    @staticmethod
    def _rate(name: str, args: Any, kwargs: Any) -> float:
        if name == "scaled_dot_product_attention":
            return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        return float(kwargs.get("p", args[1] if len(args) > 1 else 0.5)) if training else 0.0


class Forks:
    """Hooks that switch random states: equal ones on all ranks for whole activations, different ones for split ones."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._around: list[tuple[torch.Tensor, bool] | None] = []  # (state to restore, whether the inner one is own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forks:
        return self

    def own_seed(self, drawn: int) -> int:
        """Return the seed of this rank for a random number that is equal on all ranks."""
        return (drawn * self._axis.size + self._axis.rank) * _PRIME % (1 << 62)

    def check_apart(self) -> None:
        """Raise TensorParallelError if two ranks have equal seeds for split activations. All ranks must call this."""
        ranks, first = self._axis.ranks, dict[int, int]()  # the first rank by seed
        for place, seed in object_exchange.current.gather_present(self._axis, self.own_seed(1)).items():
            other = first.setdefault(seed, place)
            if other != place:
                raise TensorParallelError(
                    f"ranks {ranks[other]} and {ranks[place]} (tp) would drop their own channels "
                    f"alike: their random states are equal"
                )

    def enter_cut(self, module: nn.Module, *_: Any) -> None:
        """Forward pre-hook of modules with dropout on split activations: switch to this rank's own state."""
        inside = self._around[-1] if self._around else None
        if not module.training or (inside is not None and inside[1]):
            self._around.append(None)
            return
        accelerator = get_accelerator()
        device = accelerator.current_device_name() if accelerator.device_name() != "cpu" else "cpu"
        drawn = int(torch.randint(1 << 40, (), device=device))
        self._around.append((accelerator.get_rng_state(), True))
        accelerator.manual_seed(self.own_seed(drawn))

    def enter_whole(self, module: nn.Module, *_: Any) -> None:
        """Forward pre-hook of modules with dropout on whole activations: switch back to the ranks' common state."""
        outer = next((state for state in reversed(self._around) if state is not None), None)
        if outer is None or not outer[1]:
            self._around.append(None)
            return
        accelerator = get_accelerator()
        self._around.append((accelerator.get_rng_state(), False))
        accelerator.set_rng_state(outer[0])

    def leave(self, *_: Any) -> None:
        """Forward hook of both kinds of modules: restore the random state, even after an error."""
        left = self._around.pop()
        if left is None:
            return
        accelerator = get_accelerator()
        if not left[1]:  # the surrounding state has advanced
            depth = next(depth for depth in reversed(range(len(self._around))) if self._around[depth] is not None)
            self._around[depth] = (accelerator.get_rng_state(), True)
        accelerator.set_rng_state(left[0])


def install(model: nn.Module, dropped: dict[str, list[frozenset[str]]], columns: set[str], axis: Axis) -> Forks | None:
    """Register hooks for dropout, and copy the first rank's random state. All ranks of the axis must call this.

    Args:
        model: a split model.
        dropped: matrices that produce the activations under dropout, as recorded by `Draws`.
        columns: names of the matrices with split outputs.
        axis: the ranks.

    Returns:
        The hooks; None if nothing is dropped.

    Raises:
        TensorParallelError: a module applies dropout to both kinds, or ranks would draw equal masks for split ones.
    """
    kinds = {name: {bool(drop) and drop <= columns for drop in drops} for name, drops in dropped.items()}
    both = next((name for name, kind in kinds.items() if len(kind) > 1), None)
    if both is not None:
        raise TensorParallelError(
            f"'{both}' applies dropout to split and to unsplit activations in one forward: set one of its "
            f"dropout probabilities to 0, or leave its matrices whole (partition_config, partition_type skip)"
        )
    draw_alike(axis)  # modules may draw other random numbers than dropout, such as router noise
    if not kinds:
        return None
    forks = Forks(axis)
    if any(True in kind for kind in kinds.values()):
        forks.check_apart()
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        module.register_forward_pre_hook(forks.enter_cut if True in kind else forks.enter_whole)
        module.register_forward_hook(forks.leave, always_call=True)
    return forks


def draw_alike(axis: Axis) -> None:
    """Copy the first rank's random state to all ranks, so that they draw equal masks and samples; a collective."""
    accelerator = get_accelerator()
    state = accelerator.get_rng_state()
    everyone = all_gather_objects(axis, zlib.crc32(state.numpy().tobytes()))
    if len(set(everyone)) > 1:
        log_rank0("random states differ over tp: all ranks go on with that of the first, since they share activations")
        shared = state.clone().float()  # bytes, so the sum is exact
        broadcast(shared, axis.ranks[0], group=axis.group)
        accelerator.set_rng_state(shared.to(state.dtype))
