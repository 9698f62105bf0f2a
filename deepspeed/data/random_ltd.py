"""Random layerwise token dropping (random-LTD, arXiv:2211.11586): some layers process a random part of the tokens.

While training, such a layer gets r tokens of each sample in their order, drawn anew for each layer and micro-batch. Its
output takes the place of these tokens; the others pass unchanged. r grows by a schedule until layers are whole.

The layer's `forward` is replaced; class, parameters and names stay, so checkpoints and exports are those of the model.
Draws are keyed by seed, step, micro-batch, layer and data-parallel rank (`draw_keys.py`): ranks with the same samples
draw the same tokens, and so do a recomputation and a resumed run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.data.draw_keys import DrawKeys, number_of
from deepspeed.data.kept_tokens import KeptTokens, forms_bias, split_output
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, NotAvailableError, UsageError
from deepspeed.foundation.compiler import opaque
from deepspeed.foundation.hf_forward import caches_in
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.replaced_forward import TrainingOnlyForward, withdraw_all

_BLOCK = "data_efficiency.data_routing.random_ltd"
_INFIX = ".random_ltd_layer"  # of parameter names in upstream's models


def _wrong(key: str, value: object, why: str) -> DeepSpeedConfigError:
    return DeepSpeedConfigError(f"{_BLOCK}.{key} is {value!r}; {why}")


def _whole_number(where: Mapping[str, Any], key: str, path: str, least: int = 1) -> int:
    value = where.get(key)
    if isinstance(value, float) and value.is_integer():  # JSON writes large counts as 5e8
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(f"{path}{key}", value, f"it has to be an integer of at least {least}")
    return value


class RandomLTDScheduler:
    """Number of tokens that layers keep, by step.

    r(t) = min + (max - min) · t / T, rounded down to a multiple of s, at most max; t counts updates from 0, T is
    `require_steps`, s is `seq_per_step`.

    Args:
        section: the block `data_efficiency.data_routing.random_ltd`.
        samples: returns the number of samples of an update, over all ranks.

    Raises:
        DeepSpeedConfigError: a key is missing or contradicts another; the message has its name.
        NotAvailableError: `layer_token_lr_schedule.enabled` is true.
    """

    def __init__(self, section: Any, samples: Callable[[], int] = lambda: 1) -> None:
        self._samples = samples
        if (section.layer_token_lr_schedule or {}).get("enabled"):
            raise NotAvailableError(
                f"{_BLOCK}.layer_token_lr_schedule is not available (upstream does not have it either); use a scheduler"
            )
        values = section.model_dump()
        self.model_layer_num = _whole_number(values, "total_layer_num", "")
        self.layer_ids = self._layers(section.random_ltd_layer_id, values)
        self._read_schedule(section.random_ltd_schedule)
        self.reset_to_init()

    def _layers(self, ids: list[int] | None, values: Mapping[str, Any]) -> list[int]:
        number = _whole_number(values, "random_ltd_layer_num", "")
        if not ids or len(set(ids)) != len(ids) or not all(0 <= layer < self.model_layer_num for layer in ids):
            raise _wrong("random_ltd_layer_id", ids, f"name different layers from 0 to {self.model_layer_num - 1}")
        if len(ids) != number:
            raise _wrong("random_ltd_layer_num", number, f"random_ltd_layer_id names {len(ids)} layers")
        return sorted(ids)

    def _read_schedule(self, schedule: Mapping[str, Any] | None) -> None:
        path = "random_ltd_schedule."
        if not schedule:
            raise _wrong("random_ltd_schedule", schedule, "it has to say how many tokens layers keep")
        if schedule.get("schedule_type") != "fixed_linear":
            raise _wrong(f"{path}schedule_type", schedule.get("schedule_type"), 'there is only "fixed_linear"')
        self.min_value, self.max_value = (_whole_number(schedule, key, path) for key in ("min_value", "max_value"))
        numbers = schedule.get("schedule_config") or {}
        self.require_steps = _whole_number(numbers, "require_steps", f"{path}schedule_config.")
        self.seq_per_step = _whole_number(numbers, "seq_per_step", f"{path}schedule_config.")
        if self.min_value > self.max_value:
            raise _wrong(f"{path}min_value", self.min_value, f"it is above max_value, {self.max_value}")
        if self.min_value % self.seq_per_step:
            least = self.min_value - self.min_value % self.seq_per_step
            raise _wrong(
                f"{path}min_value", self.min_value,
                f"it is no multiple of seq_per_step, {self.seq_per_step}: layers would begin with {least} tokens",
            )  # fmt: skip

    def get_value(self, step: int) -> int:
        """Return the number of tokens at a step, without a change of state."""
        grown = math.floor(step / self.require_steps * (self.max_value - self.min_value) + self.min_value)
        return min(grown - grown % self.seq_per_step, self.max_value)

    def _layer_tokens(self, seq_length: int) -> int:
        whole = self.model_layer_num - len(self.layer_ids)
        return self._samples() * (seq_length * len(self.layer_ids) + self.max_value * whole)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Return the tokens that all layers process in the first `train_iters` updates, over all ranks.

        A layer that leaves no tokens out counts `max_value` tokens for each sample.
        """
        return sum(self._layer_tokens(self.get_value(step)) for step in range(train_iters))

    def get_current_seq(self) -> int:
        """Return the number of tokens that layers keep now."""
        return self.current_seq

    def set_current_seq(self, seq_length: int) -> None:
        """Set the number of tokens until the next update; all ranks must set the same."""
        self.current_seq = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Return the number of layers that leave tokens out."""
        return len(self.layer_ids)

    def update_seq(self, global_steps: int) -> int:
        """Move to a step: count the tokens of the updates since the last one, and return the new number of tokens."""
        if global_steps != self.current_step:
            passed = max(0, global_steps - self.current_step)
            self.consumed_layer_tokens += passed * self._layer_tokens(self.current_seq)
            self.current_step = global_steps
            self.current_seq = self.get_value(global_steps)
        return self.current_seq

    def reset_to_init(self) -> None:
        """Return to the first step."""
        self.current_step, self.consumed_layer_tokens = 0, 0
        self.current_seq = self.get_value(0)

    def state_dict(self) -> dict[str, Any]:
        """Return step, number of tokens, consumed layer tokens, and the bounds of the schedule."""
        return {
            "current_step": self.current_step,
            "current_seq": self.current_seq,
            "consumed_layer_tokens": self.consumed_layer_tokens,
            "min_value": self.min_value,
            "max_value": self.max_value,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; a schedule that the JSON has changed stays changed."""
        self.current_step = state_dict["current_step"]
        self.current_seq = state_dict["current_seq"]
        self.consumed_layer_tokens = state_dict["consumed_layer_tokens"]


class RandomLTD:
    """Random-LTD of one model.

    Args:
        scheduler: number of tokens by step.
        blocks: the layers that leave tokens out, by number.
        position: as in `DrawKeys`.
        seeds: integers that key the draws besides the position: seed, and rank among those with other samples.
        sequence_first: as in `KeptTokens`.
        whole: as in `KeptTokens`.
    """

    def __init__(
        self,
        scheduler: RandomLTDScheduler,
        blocks: Mapping[int, nn.Module],
        position: Callable[[], tuple[int, int]],
        seeds: tuple[int, ...] = (),
        sequence_first: bool = False,
        whole: Sequence[str] = (),
    ) -> None:
        self.scheduler, self.keys = scheduler, DrawKeys(position)
        self._position, self._seeds = position, seeds
        self.sequence_first, self.whole = sequence_first, tuple(whole)
        self._forwards: list[tuple[nn.Module, PartialForward]] = []
        for layer, block in blocks.items():
            forward = block.forward = PartialForward(block, layer, self)
            self._forwards.append((block, forward))

    def draw(self, layer: int, hidden: torch.Tensor) -> KeptTokens | None:
        """Draw the tokens that a layer keeps in a call that begins now; None: all.

        Args:
            layer: number of the layer.
            hidden: its input.

        Raises:
            UsageError: `hidden` is no tensor `[batch, sequence, width]` (or sequence first).
        """
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            shape = list(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            raise UsageError(f"random-LTD: layer {layer} gets {shape} in the first place, not [batch, sequence, width]")
        seq_axis = 0 if self.sequence_first else 1
        batch, length = hidden.shape[1 - seq_axis], hidden.shape[seq_axis]
        count = self.scheduler.update_seq(self._position()[0])
        if count >= length:
            return None
        key = self.keys.next(layer, hidden)
        generator = torch.Generator().manual_seed(number_of(*self._seeds, layer, *key) >> 1)
        order = torch.rand(batch, length, generator=generator).argsort(dim=1)
        positions = order[:, :count].sort(dim=1).values.to(hidden.device)
        return KeptTokens(positions, length, self.sequence_first, self.whole, hidden.shape[-1])

    def remove(self) -> None:
        """Give the layers their own `forward` again."""
        withdraw_all(self._forwards)


class PartialForward(TrainingOnlyForward):
    """A layer's `forward` on some of the tokens.

    Args:
        block: the layer.
        layer: its number.
        routing: draws the tokens.
    """

    def __init__(self, block: nn.Module, layer: int, routing: RandomLTD) -> None:
        super().__init__(block)
        self._block, self._layer, self._routing = block, layer, routing

    # Traced, it would be compiled anew for each draw; the layer itself is compiled.
    @functools.partial(opaque, inner=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._block.training or not self.active:
            return self.inner(*args, **kwargs)
        named = self.named(args, kwargs)
        first = self.names[0] if self.names else "hidden_states"
        if not torch.is_grad_enabled() and any(caches_in(named)):  # `generate`: a cache gets all tokens
            return self.inner(*args, **kwargs)
        hidden: Any = named.get(first)
        tokens = self._routing.draw(self._layer, hidden)
        if tokens is None:
            return self.inner(*args, **kwargs)
        rest = tokens.arguments({name: value for name, value in named.items() if name != first})
        changed = {name: tokens.take(hidden) if name == first else rest[name] for name in named}
        output, further, form = split_output(self.call(changed, len(args)))
        own = [name for name in self.names if name not in self._routing.whole]
        if (bias := forms_bias(own, named)) and any(tokens.is_new(entry) for entry in further):
            raise UsageError(
                f"random-LTD: layer {self._layer} forms {bias!r} for itself and later layers from the length of its "
                "input; leave it out of random_ltd_layer_id"
            )
        return form.form(tokens.put(hidden, output), [tokens.returned(entry) for entry in further])


# -- upstream's functions ---------------------------------------------------------------------------------------------


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module], whole: Sequence[str] = ()) -> Any:
    """Let layers of an engine's model leave tokens out, as the block `random_ltd` of the JSON says.

    Args:
        model: the engine.
        convert_type: class of the model's layers; a layer's number is its place among them, from 0.
        whole: names of arguments of the layers that do not depend on tokens although their shape looks like it.

    Returns:
        The engine.

    Raises:
        ArgumentError: `model` is no engine, or its layers of this class are not as many as the JSON says.
        NotAvailableError: a part of the model uses flash or flex attention.
        UsageError: the JSON does not enable random-LTD, or the layers are converted already.
    """
    convert = getattr(model, "_convert_to_random_ltd", None)
    if not callable(convert):
        raise ArgumentError(f"convert_to_random_ltd needs the engine, which has the JSON, not a {type(model).__name__}")
    convert(convert_type, tuple(whole))
    return model


def layers_to_convert(model: nn.Module, kind: type[nn.Module], scheduler: RandomLTDScheduler) -> dict[int, nn.Module]:
    """Return the layers that leave tokens out, by number; errors as in `convert_to_random_ltd`."""
    layers = [module for module in model.modules() if isinstance(module, kind)]
    if len(layers) != scheduler.model_layer_num:
        raise ArgumentError(
            f"{_BLOCK}.total_layer_num is {scheduler.model_layer_num}, and the model has {len(layers)} modules of the "
            f"class {kind.__name__}"
        )
    attention = next((name for name in sorted(_attentions(model)) if "flash" in name or "flex" in name), "")
    if attention:
        why = (
            "it takes gaps between positions for bounds of packed sequences"
            if "flash" in attention
            else "its masks are no tensors, which could be cut"
        )
        raise NotAvailableError(
            f'random-LTD with {attention} is not available: {why}; load the model with attn_implementation="sdpa"'
        )
    log_rank0(f"random-LTD: layers {scheduler.layer_ids} of {len(layers)} leave tokens out while training")
    return {layer: layers[layer] for layer in scheduler.layer_ids}


def _attentions(model: nn.Module) -> set[str]:
    """Return the attention implementations that configs in the model name; a wrapper has no config of its own."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return {str(getattr(config, "_attn_implementation", None)) for config in configs}


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """Return the state dict of an engine's model, or of a module, with the model's own names.

    With an engine, all ranks must call this (see `module_state_dict`).
    """
    whole: Any = getattr(model, "module_state_dict", None)
    return remove_random_ltd_state_dict(model.state_dict() if whole is None else whole())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the `.random_ltd_layer` that upstream adds to the names of converted layers."""
    return {name.replace(_INFIX, ""): value for name, value in state_dict.items()}
