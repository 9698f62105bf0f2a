"""Profiler of parameters, floating-point operations (counted at operator dispatch) and time of a model, by module."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.ops.dispatch import DispatchMode
from deepspeed.ops.flop_formulas import computed_again, formulas
from deepspeed.profiling.flops_profiler.report import (
    Report,
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from deepspeed.profiling.module_attribution import AGAIN, OUTSIDE, Attribution

__all__ = [
    "FlopsProfiler",
    "ModuleProfile",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]


class _Mode(DispatchMode):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter, self._formulas = counter, formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = func._overloadpacket
        formula = self._formulas.get(operator)
        if formula is None and func._can_decompose() and torch.is_inference_mode_enabled():
            with self:  # inference mode disables autograd, which would decompose composite operators
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        began = time.perf_counter()
        out = func(*args, **kwargs)
        took = time.perf_counter() - began
        if formula is None:
            self._counter.uncounted[str(operator)] += took
        else:
            self._counter.add(formula(*args, **kwargs, out_val=out), computed_again(operator, args))
        self._counter.seconds_in_operators += took
        return out


class Counter(Attribution):
    """Counter of floating-point operations and seconds by module, between `attach` and `detach`.

    Args:
        model: the model.
        ignore: types of modules; operations inside of them are not counted.

    Attributes:
        own: operations of forward, backward and recomputation, by module name, without submodules.
        uncounted: seconds in operators without a formula, by operator; only while operations are counted.
    """

    def __init__(self, model: nn.Module, ignore: Iterable[type[nn.Module]] = ()) -> None:
        super().__init__(model, ignore)
        self.own: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        self.uncounted: dict[str, float] = defaultdict(float)
        self.seconds_in_operators = 0.0
        self._mode: _Mode | None = None

    def attach(self, counting: bool = True) -> None:
        """Start measuring times and, with `counting`, operations; counting costs microseconds per operator."""
        self.hook()
        if counting:
            self._mode = _Mode(self)
            self._mode.__enter__()

    def detach(self) -> None:
        """Stop measuring; the results remain."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        self.unhook()

    def add(self, flops: int, again: int) -> None:
        """Add an operator's `flops` operations; `again` of them are recomputation."""
        whose, phase = self.where()
        if whose is None:
            return
        self.own[whose][phase] += flops - again
        self.own[whose][AGAIN] += again

    def totals(self) -> dict[str, list[int]]:
        """Return [forward, backward, recomputed] operations by module name, with descendants; "" is the model."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for name, counts in self.own.items():
            if name != OUTSIDE:
                parts = name.split(".") if name else []
                for end in range(len(parts) + 1):  # from the model down to the module itself
                    above = ".".join(parts[:end])
                    sums[above] = [a + b for a, b in zip(sums[above], counts, strict=True)]
        return sums

    def time_of(self, name: str) -> float:
        """Return the forward seconds of the module `name`; for a container that is not called, of its descendants."""
        if name in self.seconds:
            return self.seconds[name]
        below = f"{name}." if name else ""
        inside = [n for n in self.seconds if n.startswith(below)]
        top = [n for n in inside if not any(n != other and n.startswith(f"{other}.") for other in inside)]
        return sum(self.seconds[n] for n in top)

    def without_formula(self, least: float = 0.01) -> list[tuple[str, float]]:
        """Return (operator, share of all operator time) of operators without a formula, from `least` up."""
        shares = {name: took / self.seconds_in_operators for name, took in self.uncounted.items()}
        return sorted(((n, s) for n, s in shares.items() if s >= least), key=lambda row: -row[1])


@dataclass(frozen=True)
class ModuleProfile:
    """Measurements of one module including its descendants.

    Attributes:
        params: elements of distinct parameters before sharding.
        forward: floating-point operations of forward.
        backward: floating-point operations of backward, without recomputation.
        again: recomputed forward operations in backward: checkpoints, and the scores of fused attention.
        own: (forward, backward, again) of the module without its descendants.
        seconds: forward seconds on the host's clock.
    """

    params: int
    forward: int
    backward: int
    again: int
    own: tuple[int, int, int]
    seconds: float


class FlopsProfiler:
    """Profiler of a model: counts floating-point operations at operator dispatch, by module.

    Args:
        model: any module; sharded parameters count with their original sizes.
        ds_engine: the model's engine; the report then includes its batch, ranks and times.
        recompute_fwd_factor: accepted for old scripts without effect; recomputation is counted.

    Attributes:
        times: seconds of "backward" and "step", if an engine has measured them.

    Example:
        >>> profiler = FlopsProfiler(model)
        >>> profiler.start_profile(); model(x).sum().backward(); profiler.stop_profile()
        >>> profiler.get_total_flops(), profiler.rows()[""].backward
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started, self.times = False, dict[str, float]()
        self._ignore: tuple[type[nn.Module], ...] = ()
        self._counted: Counter | None = None
        self._timed: Counter | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start counting operations of forward and backward; earlier results are deleted.

        Args:
            ignore_list: types of modules; operations inside of them are not counted. None: all are counted.
        """
        self._ignore = tuple(ignore_list or ())
        self._start(counting=True)
        self._timed = self._counted

    def start_timing(self) -> None:
        """Start measuring times without counting, which would slow the model; earlier operation counts remain.

        Raises:
            UsageError: `start_profile` was not called before.
        """
        if self._counted is None:
            raise UsageError("start_timing() before start_profile(): nothing was counted yet")
        self._start(counting=False)

    def _start(self, counting: bool) -> None:
        self.stop_profile()
        self._timed = Counter(self.model, self._ignore)
        if counting:
            self._counted = self._timed
        self._timed.attach(counting)
        self.started = True

    def stop_profile(self) -> None:
        """Stop measuring; the results remain."""
        if self.started and self._timed is not None:
            self._timed.detach()
        self.started = False

    def reset_profile(self) -> None:
        """Delete the results; a running profile starts again."""
        if self.started:
            self._start(counting=True)
        else:
            self._counted = self._timed = None

    def end_profile(self) -> None:
        """Stop measuring and delete the results."""
        self.stop_profile()
        self._counted = self._timed = None

    def _profile(self, call: Callable[[], Any], warm_up: int, ignore: Sequence[type[nn.Module]] | None) -> None:
        """After `warm_up` calls, count one call and time another, in eval mode; then restore each module's mode."""
        was_training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                for _ in range(warm_up):
                    call()
                for start in (lambda: self.start_profile(ignore), self.start_timing):
                    start()
                    call()
                    self.stop_profile()
        finally:
            self.stop_profile()
            for module, training in was_training.items():
                module.training = training

    # -- the numbers ------------------------------------------------------------------------------------------------

    @property
    def _numbers(self) -> tuple[Counter, Counter]:
        if self._counted is None or self._timed is None:
            raise UsageError("nothing was profiled: call start_profile(), run the model, then stop_profile()")
        return self._counted, self._timed

    def rows(self) -> dict[str, ModuleProfile]:
        """Return the measurements by module name ("" is the model), each including the module's descendants.

        Raises:
            UsageError: nothing was profiled.
        """
        counted, timed = self._numbers
        totals = counted.totals()
        names = dict(self.model.named_modules(remove_duplicate=False))
        return {
            name: ModuleProfile(
                params=sum(p.numel() for p in names[name].parameters()) if name in names else 0,
                forward=totals[name][0],
                backward=totals[name][1],
                again=totals[name][2],
                own=(counted.own[name][0], counted.own[name][1], counted.own[name][2]),
                seconds=timed.time_of(name),
            )
            for name in dict.fromkeys([*names, *totals])
        }

    def outside(self) -> tuple[int, int, int]:
        """Return (forward, backward, recomputed) operations outside of modules, as of a loss; errors as in `rows`."""
        forward, backward, again = self._numbers[0].own[OUTSIDE]
        return forward, backward, again

    def without_formula(self) -> list[tuple[str, float]]:
        """Return (operator, share of operator time) of operators without a formula, which are not counted.

        Errors as in `rows`.
        """
        return self._numbers[0].without_formula()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the floating-point operations of forward on a rank, or text with `as_string`; errors as in `rows`."""
        flops = self.rows()[""].forward
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-adds of forward on this rank, or text with `as_string`; errors as in `rows`."""
        macs = self.rows()[""].forward // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of forward, or text with `as_string`; errors as in `rows`.

        Without `start_timing`, the seconds include the time for counting.
        """
        seconds = self.rows()[""].seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the elements of distinct parameters before sharding, or text with `as_string`."""
        params = sum(p.numel() for p in self.model.parameters())
        return params_to_string(params) if as_string else params

    # -- printing ---------------------------------------------------------------------------------------------------

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the summary, the largest module classes of each depth, and the tree of modules with their measurements.

        Args:
            profile_step: step number for the heading.
            module_depth: maximum depth of listed modules; -1: all.
            top_modules: number of module classes listed per depth and measurement.
            detailed: include the tree of modules.
            output_file: file to append to; None: standard output.

        Raises:
            UsageError: nothing was profiled.
        """
        text = Report(self, module_depth, top_modules).whole(profile_step, detailed)
        if output_file is None:
            print(text)
            return
        Path(output_file).absolute().parent.mkdir(parents=True, exist_ok=True)
        with open(output_file, "a") as file:
            print(text, file=file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the largest module classes of each depth; arguments and errors as in `print_model_profile`."""
        print(Report(self, module_depth, top_modules).aggregated())


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Profile one forward of a model, in eval mode and without gradients; the modes of modules are restored.

    Args:
        model: any module.
        input_shape: shape of one input tensor of zeros, with the model's dtype and device; None: no such tensor.
        args: positional inputs, instead of or after `input_shape`.
        kwargs: keyword inputs.
        print_profile: print the report.
        detailed: see `FlopsProfiler.print_model_profile`.
        module_depth: see `FlopsProfiler.print_model_profile`.
        top_modules: see `FlopsProfiler.print_model_profile`.
        warm_up: number of runs before the profile.
        as_string: return text instead of numbers.
        output_file: see `FlopsProfiler.print_model_profile`.
        ignore_modules: types of modules that are not counted.
        mode: "forward", or "generate" for `model.generate`.

    Returns:
        (operations, multiply-adds, parameters) of forward.

    Raises:
        ArgumentError: there is no input, or `mode` is unknown.
    """
    if input_shape is None and not args and not kwargs:
        raise ArgumentError("get_model_profile needs inputs: input_shape, args or kwargs")
    if mode not in ("forward", "generate"):
        raise ArgumentError(f'mode is "forward" or "generate", got {mode!r}')
    if input_shape is not None:
        like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device), *args]
    method: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    profiler._profile(lambda: method(*args, **(kwargs or {})), warm_up, ignore_modules)
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    flops, macs = profiler.get_total_flops(as_string), profiler.get_total_macs(as_string)
    params = profiler.get_total_params(as_string)
    profiler.end_profile()
    return flops, macs, params
