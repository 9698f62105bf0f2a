"""Fake quantizers of a model's weights and inputs, with their schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.compression.basic_layer import QuantAct, WeightQuantizer, compress_module, plain_module
from deepspeed.compression.pruning.rules import compressible, matched
from deepspeed.config.sections.compression import CompressionTraining, QuantizeTraining
from deepspeed.errors import CompressionError
from deepspeed.foundation.log import log_rank0


@dataclass(eq=False)
class _WeightGroup:
    """Group of quantized weights, with its schedule.

    Args:
        name: name of the group.
        quantizers: quantizers of its modules.
        bits: (start, target); equal if the number of bits is constant.
        offset: number of applied steps before quantization starts.
        period: steps until the first decrease by one bit; each further period is twice as long.
        mixed: decrease per step of the fraction of full-precision weights in the result; None: no mixing.
        verbose: log changes of the bits.
    """

    name: str
    quantizers: list[WeightQuantizer]
    bits: tuple[int, int]
    offset: int
    period: int
    mixed: float | None
    verbose: bool

    def at(self, step: int) -> tuple[int, float]:
        """Return (bits, fraction of full-precision weights) after `step` applied steps; 0 bits: off."""
        start, target = self.bits
        if step < self.offset:
            return 0, 0.0
        bits, changed, period = start, self.offset, max(self.period, 1)
        while bits > target and step >= changed + period:
            changed, period, bits = changed + period, period * 2, bits - 1
        share = 0.0 if self.mixed is None else max(1.0 - self.mixed * (step - changed), 0.0)
        return bits, share

    @property
    def last(self) -> int:
        """Last step at which bits or fraction change."""
        start, target = self.bits
        falls = self.offset + max(self.period, 1) * (2 ** (start - target) - 1)
        if not self.mixed:
            return falls
        steps = math.ceil(1.0 / self.mixed)
        return falls + steps + (self.mixed * steps < 1.0)  # the quotient may have been rounded down to a whole number


class FakeQuantizers:
    """Fake quantizers of a model's modules (quantization-aware training), off until their scheduled steps.

    Args:
        model: plain or sharded model; the classes of its modules are changed by `compress_module`.
        section: `compression_training`.
        training: `quantize_training`.

    Raises:
        CompressionError: a module is missing or selected twice, has no weight, or its weight does not divide into
            `quantize_groups`.
    """

    def __init__(self, model: nn.Module, section: CompressionTraining, training: QuantizeTraining) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._weights: list[_WeightGroup] = []
        self._inputs: list[tuple[int, list[QuantAct]]] = []
        self._step = 0
        if section.weight_quantization.shared_parameters.enabled:
            self._add_weights(section)
        if training.enabled:
            self._add_all(training)
        if section.activation_quantization.shared_parameters.enabled:
            self._add_inputs(section)
        self._log_shared_weights()

    def _log_shared_weights(self) -> None:
        """Log weights that are shared by modules with and without quantization: exports store them quantized."""
        users: dict[int, list[str]] = {}
        quantized: set[str] = set()
        for name, module in self._model.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                users.setdefault(id(weight), []).append(name)
                quantized |= {name} if "_weight_quantizer" in module.__dict__ else set()
        for names in users.values():
            first = next((name for name in names if name in quantized), None)
            others = ", ".join(name for name in names if name not in quantized)
            if first is not None and others:
                log_rank0(
                    f"{first} is quantized and shares its weight with {others}: exports hold it quantized for all"
                )

    def _add_weights(self, section: CompressionTraining) -> None:
        shared = section.weight_quantization.shared_parameters
        taken: dict[str, str] = {}
        for name, group in section.weight_quantization.different_groups.items():
            quantizers = []
            for path, module in dict.fromkeys((n, m) for _, n, m in matched(self._model, group.modules)):
                if path in taken:
                    raise CompressionError(
                        f"{path} is in weight_quantization.{taken[path]} and in {name}: name it once"
                    )
                taken[path] = name
                quantizers.append(
                    self._quantizer(module, path, shared.quantization_type, shared.quantize_groups, shared.rounding)
                )
            start, target = group.params.start_bits or 8, group.params.target_bits or 8
            mixed = shared.fp16_mixed_quantize
            self._weights.append(
                _WeightGroup(
                    name,
                    quantizers,
                    (target if shared.quantize_weight_in_forward else start, target),
                    shared.schedule_offset,
                    group.params.quantization_period,
                    mixed.quantize_change_ratio if mixed.enabled and not shared.quantize_weight_in_forward else None,
                    shared.quantize_verbose,
                )
            )

    def _add_all(self, training: QuantizeTraining) -> None:
        algorithm = training.quantize_algo
        kind = training.quantize_type if training.quantize_type != "symmetric" else algorithm.q_type
        quantizers = [
            self._quantizer(module, name, kind, training.quantize_groups, algorithm.rounding)
            for name, module in self._model.named_modules()
            if compressible(module)
        ]
        mixed, when = training.fp16_mixed_quantize, training.quantize_schedule
        bits = (training.quantize_bits.start_bits, training.quantize_bits.target_bits)
        share = mixed.quantize_change_ratio if mixed.enabled else None
        offset, period, verbose = when.schedule_offset, when.quantize_period, training.quantize_verbose
        self._weights.append(_WeightGroup("all", quantizers, bits, offset, period, share, verbose))

    def _quantizer(self, module: nn.Module, name: str, kind: str, groups: int, rounding: str) -> WeightQuantizer:
        weight = module._parameters.get("weight")
        if weight is None:
            raise CompressionError(f"{name} has no weight of its own to quantize")
        shape = getattr(weight, "ds_shape", weight.shape)
        if isinstance(module, nn.Embedding):
            groups = shape[0]  # one scale per row
        if shape.numel() % groups:
            raise CompressionError(
                f"{name}.weight of {shape.numel()} elements is no multiple of {groups} quantize_groups"
            )
        self._modules.append(compress_module(module))
        quantizer = module.__dict__["_weight_quantizer"] = WeightQuantizer(kind, groups, rounding == "stochastic")
        return quantizer

    def _add_inputs(self, section: CompressionTraining) -> None:
        shared, taken = section.activation_quantization.shared_parameters, set[str]()
        for group in section.activation_quantization.different_groups.values():
            quantizers = []
            for _, name, module in matched(self._model, group.modules):
                if isinstance(module, nn.Embedding):
                    continue  # its inputs are indices
                if name in taken:
                    raise CompressionError(f"{name} is named twice in activation_quantization")
                taken.add(name)
                self._modules.append(compress_module(module))
                running = shared.range_calibration == "static"
                quantizer = QuantAct(group.params.bits or 8, shared.quantization_type, running, module)
                module.__dict__["_activation"] = quantizer
                quantizers.append(quantizer)
            self._inputs.append((shared.schedule_offset, quantizers))

    def at_step(self, step: int) -> None:
        """Set bits, fractions and switches of all quantizers for `step` applied optimizer steps."""
        self._step = step
        for group in self._weights:
            bits, share = group.at(step)
            for quantizer in group.quantizers:
                if group.verbose and quantizer is group.quantizers[0] and quantizer.bits != bits:
                    log_rank0(f"weight quantization '{group.name}': {bits} bits after {step} steps")
                quantizer.bits, quantizer.dense_share = bits if bits < 16 or share else 0, share
        for offset, quantizers in self._inputs:
            for input_quantizer in quantizers:
                input_quantizer.on = step >= offset

    def bake(self, state: dict[str, Any]) -> None:
        """Replace weights in an unsharded state dict by their quantized values, under all names of a shared weight."""
        names: dict[int, list[str]] = {}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        for module in self._model.modules():
            quantizer = module.__dict__.get("_weight_quantizer")
            if quantizer is not None and quantizer.bits:
                stored = [name for name in names[id(module._parameters["weight"])] if name in state]
                quantized = quantizer(state[stored[0]].detach()) if stored else None
                state.update(dict.fromkeys(stored, quantized))

    @property
    def ended(self) -> bool:
        weights = all(self._step >= group.last for group in self._weights)
        return weights and all(self._step >= offset for offset, _ in self._inputs)

    def state_dict(self) -> dict[str, Any]:
        """Return {"step": number of applied steps}, which determines all other state."""
        return {"step": self._step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.at_step(saved["step"])

    def remove(self) -> None:
        for module in self._modules:
            plain_module(module)
        self._modules.clear()
