"""Progressive layer drop (arXiv:2010.13369): layers are skipped at random, more as training goes on.

At step t, layer i of L (from 1) is kept with probability p = 1 - (i / L) · (1 - θ(t)), where
θ(t) = (1 - θ̄) · exp(-γ · t) + θ̄ falls from 1 to θ̄. A skipped layer returns its input. A kept one returns
x + (f(x) - x) / p, so that the expected output is that of the whole layer.

`enable_layer_drop` skips the layers of any model with its layers in a ModuleList. Their `forward` is replaced; class,
parameters and names stay. All ranks skip the same layers, by draws that seed and step determine (`draw_keys.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.data.draw_keys import DrawKeys, uniform
from deepspeed.data.kept_tokens import OutputForm, forms_bias, split_output
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.foundation.compiler import opaque
from deepspeed.foundation.hf_forward import caches_in, uncached
from deepspeed.foundation.log import log_once, log_rank0
from deepspeed.foundation.pytree import tensors_in
from deepspeed.foundation.replaced_forward import TrainingOnlyForward, replacements, withdraw_all
from deepspeed.foundation.transformers_model import block_lists

THETA, GAMMA, SEED = 0.5, 0.001, 1234


class LayerDropSchedule:
    """The schedule θ(t); at the start θ is 1.

    Args:
        theta: θ̄, the value at the end, from 0 to 1.
        gamma: speed at which θ falls, at least 0, per update.

    Raises:
        ArgumentError: a value is out of range.
    """

    def __init__(self, theta: float = THETA, gamma: float = GAMMA) -> None:
        if not 0 <= theta <= 1 or not 0 <= gamma < math.inf:
            raise ArgumentError(f"layer drop: theta {theta} has to be from 0 to 1, and gamma {gamma} at least 0")
        self.theta, self.gamma = theta, gamma
        self.current_theta = 1.0

    def theta_at(self, step: int) -> float:
        """Return θ at a step, without a change of state."""
        return (1.0 - self.theta) * math.exp(-self.gamma * step) + self.theta

    def get_state(self) -> dict[str, Any]:
        """Return the keywords that a model which skips layers by itself gets."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Return the current θ."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Move to a step."""
        self.current_theta = self.theta_at(global_step)


class LayerDrop:
    """Layers of one model that are skipped at random.

    Attributes:
        update: number of the current update, from 0; for a model without an engine, set it before each step.
        micro_batch: number of the current micro-batch, likewise.

    Args:
        stacks: lists of layers, each in the order in which they run.
        schedule: θ by step.
        seed: seed of the draws.
        scale: whether the change by a kept layer is divided by its probability.
        position: as in `DrawKeys`; None: `update` and `micro_batch`.
    """

    def __init__(
        self,
        stacks: Sequence[Sequence[nn.Module]],
        schedule: LayerDropSchedule,
        seed: int = SEED,
        scale: bool = True,
        position: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.update = self.micro_batch = 0
        self.schedule, self._seed, self.scale = schedule, seed, scale
        self._keys = DrawKeys(position or (lambda: (self.update, self.micro_batch)))
        self._forwards: list[tuple[nn.Module, DroppedForward]] = []
        blocks = [block for stack in stacks for block in stack]
        if len({id(block) for block in blocks}) < len(blocks):
            raise ArgumentError("layer drop: a layer occurs several times in the lists; its calls cannot be told apart")
        if any(isinstance(forward, DroppedForward) for block in blocks for forward in replacements(block)):
            raise UsageError("layer drop: layers of this model are skipped already; remove() the earlier handle first")
        for stack in stacks:
            for index, block in enumerate(stack, start=1):
                number = len(self._forwards)
                forward = block.forward = DroppedForward(block, number, index / len(stack), self)
                self._forwards.append((block, forward))

    def draw(self, number: int, depth: float, hidden: torch.Tensor) -> tuple[bool, float]:
        """Draw whether a layer is kept in a call that begins now.

        Args:
            number: number of the layer.
            depth: its place in its stack, from above 0 to 1.
            hidden: its input.

        Returns:
            (whether it is kept, the probability of that).
        """
        key = self._keys.next(number, hidden)
        probability = 1.0 - depth * (1.0 - self.schedule.theta_at(key.update))
        return uniform(self._seed, number, *key) < probability, probability

    @property
    def installed(self) -> bool:
        """Return whether layers are skipped: `remove` was not called."""
        return bool(self._forwards)

    def remove(self) -> None:
        """Give the layers their own `forward` again."""
        withdraw_all(self._forwards)


class DroppedForward(TrainingOnlyForward):
    """A layer's `forward` that is skipped at random.

    Args:
        block: the layer.
        number: its number among all layers of the model that are skipped.
        depth: its place in its stack, from above 0 to 1.
        drop: draws which layers are skipped.
    """

    def __init__(self, block: nn.Module, number: int, depth: float, drop: LayerDrop) -> None:
        super().__init__(block)
        self._block, self._number, self._depth, self._drop = block, number, depth, drop
        self._form: OutputForm | None = None
        self._passed_on: list[str | None] = []  # the arguments that are further entries of the output
        self._new_entries = False  # whether further entries have tensors that are no arguments

    @functools.partial(opaque, inner=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._block.training or not self.active:
            return self.inner(*args, **kwargs)
        named = self.named(args, kwargs)
        if not torch.is_grad_enabled() and any(True for _ in caches_in(named)):
            return self.inner(*args, **kwargs)  # generation: a skipped layer's cache would stay behind the others
        first = "argument 0" if args else "hidden_states"
        hidden: Any = named.get(self.names[0] if self.names else first)
        if not isinstance(hidden, torch.Tensor):
            raise UsageError(
                f"layer drop: layer {self._number} gets a {type(hidden).__name__} in the first place, no hidden states"
            )
        if forms_bias(self.names, named) and self._returns_more(named, len(args)):
            log_once(f"layer drop: layer {self._number} forms a bias for later layers, so it is never skipped")
            return self.inner(*args, **kwargs)
        keeps, probability = self._drop.draw(self._number, self._depth, hidden)
        if not keeps:
            form = self._learn_form(named, len(args)) if self._form is None else self._form
            further = [None if name is None else named.get(name) for name in self._passed_on]
            # As a tensor of its own: hooks on a layer's input and output must not meet on the same one.
            return form.form(hidden.view_as(hidden), further)
        result = self.inner(*args, **kwargs)
        output, further, form = split_output(result)
        self._check_shape(output, hidden)
        if probability == 1.0 or not self._drop.scale:
            return result
        return form.form(hidden + (output - hidden) / probability, further)

    def _returns_more(self, named: dict[str, Any], positional: int) -> bool:
        """Return whether the layer's output has further tensors that are none of its arguments."""
        if self._form is None:
            self._learn_form(named, positional)
        return self._new_entries

    def _check_shape(self, output: torch.Tensor, hidden: Any) -> None:
        if output.shape != hidden.shape:
            raise UsageError(
                f"layer drop: layer {self._number} ({type(self._block).__name__}) returns {list(output.shape)} for "
                f"{list(hidden.shape)}, so it cannot be skipped; pass the layers that can as blocks="
            )

    def _learn_form(self, named: dict[str, Any], positional: int) -> OutputForm:
        """Run the layer once, without gradients and with random states restored, to see what it returns."""
        devices = {value.device for value in tensors_in(named) if not value.is_cpu}
        kind = next((device.type for device in devices), "cuda")
        numbers = [device.index or 0 for device in devices]
        with torch.no_grad(), torch.random.fork_rng(numbers, device_type=kind):
            output, further, self._form = split_output(self.call(uncached(named), positional))
        self._check_shape(output, next(iter(named.values())))
        sources = [(name, value) for name, value in named.items() if value is not None]
        self._passed_on = [next((name for name, value in sources if value is entry), None) for entry in further]
        pairs = zip(self._passed_on, further, strict=True)
        self._new_entries = any(name is None and any(True for _ in tensors_in(entry)) for name, entry in pairs)
        return self._form


def layer_stacks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of a model by stack: ModuleLists of two or more modules of one class that have children.

    Raises:
        ArgumentError: there is none.
    """
    lists = [list(blocks) for blocks in block_lists(model).values()]
    stacks = [blocks for blocks in lists if all(any(True for _ in block.children()) for block in blocks)]
    if not stacks:
        raise ArgumentError(
            f"layer drop: {type(model).__name__} has no ModuleList of layers of one class; pass the layers as blocks="
        )
    return stacks


def enable_layer_drop(
    model: Any,
    theta: float | None = None,
    gamma: float | None = None,
    *,
    seed: int = SEED,
    scale: bool = True,
    blocks: Sequence[nn.Module] | None = None,
) -> LayerDrop:
    """Skip layers of a model at random while it trains, without changes to the model.

    All ranks must call this with the same values. With an engine, the step is the engine's; without one, set the
    attribute `update` of the result before each step.

    Args:
        model: an engine or a module.
        theta: probability of keeping the last layer, in the end; None: that of the JSON's `progressive_layer_drop` if
            enabled (default there 1.0: no layer is skipped), else 0.5.
        gamma: speed, per update; None: the JSON's, else 0.001.
        seed: seed of the draws.
        scale: whether a kept layer's change of its input is divided by the probability of keeping it.
        blocks: the layers in their order; None: those in ModuleLists of layers of one class (`layer_stacks`).

    Returns:
        A handle; `remove()` ends it.

    Raises:
        ArgumentError: a value is out of range or differs from the JSON's, or the model has no such layers.
        NotAvailableError: the model is cut into pipeline stages.
        UsageError: layers of the engine are skipped already.
    """
    adopt: Any = getattr(model, "_enable_layer_drop", None)
    if adopt is not None:
        return adopt(theta, gamma, functools.partial(_drop, model.module, blocks, seed, scale))
    schedule = LayerDropSchedule(THETA if theta is None else theta, GAMMA if gamma is None else gamma)
    return _drop(model, blocks, seed, scale, schedule)


def _drop(
    module: nn.Module,
    blocks: Sequence[nn.Module] | None,
    seed: int,
    scale: bool,
    schedule: LayerDropSchedule,
    position: Callable[[], tuple[int, int]] | None = None,
) -> LayerDrop:
    stacks = layer_stacks(module) if blocks is None else [list(blocks)]
    sizes = " and ".join(str(len(stack)) for stack in stacks)
    log_rank0(f"layer drop: {sizes} layers are skipped at random, theta {schedule.theta}, gamma {schedule.gamma}")
    return LayerDrop(stacks, schedule, seed, scale, position)
