"""Text report of a `FlopsProfiler`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

_NOTES = """Notations:
params: distinct parameters, in true sizes where they are split over ranks.
MACs, flops: multiply-adds and operations of matrix products, convolutions and attention; two operations are a MAC.
fwd, bwd: forward and backward; computed again: forward that backward computed once more (checkpoints, and the scores
of fused attention), which is no part of bwd.
latency: by the host's clock. FLOPS: operations per second."""


_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number with a unit.

    Args:
        num: any number.
        units: T, G, M, K, "", m or u; None: the largest unit that is not larger than the number, else u; 0: "".
        precision: digits after the decimal point.

    Example:
        >>> number_to_string(6.28e12)
        '6.28 T'
    """
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if abs(num) >= size), "" if num == 0 else "u")
    return f"{num / _UNITS[units]:.{precision}f} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Format multiply-adds: '3.14 TMACs'. Arguments as in `number_to_string`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Format operations or operations per second: '6.28 TFLOPS'. Arguments as in `number_to_string`."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Format bytes: '1.50 GB', with G for 1e9. Arguments as in `number_to_string`."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Format seconds: '76.39 ms'. Arguments as in `number_to_string`."""
    return f"{number_to_string(duration, units, precision)}s"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number of parameters: '336.23 M', with B for 1e9. Arguments as in `number_to_string`."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


class Report:
    """Text report of a profile.

    Args:
        profiler: profiler after `stop_profile`.
        depth: maximum depth of listed modules; -1: all.
        top: number of module classes listed per depth and measurement.
    """

    def __init__(self, profiler: Any, depth: int, top: int) -> None:
        self._profiler, self._depth, self._top = profiler, depth, top
        self._rows, self._all = profiler.rows(), profiler.rows()[""]

    @staticmethod
    def _per_second(flops: float, seconds: float) -> str:
        return flops_to_string(flops / seconds if seconds > 0 else 0.0)

    @staticmethod
    def _share(part: float, whole: float) -> str:
        return f"{100 * part / whole:.2f}%" if whole else "0.00%"

    def whole(self, step: int, detailed: bool) -> str:
        line = "-" * 26
        parts = [f"\n{line} DeepSpeed Flops Profiler {line}", f"Profile Summary at step {step}:", _NOTES, ""]
        parts += [f"{name + ':':<62}  {value}" for name, value in self._summary()]
        parts += ["", f"{line} Aggregated Profile per GPU {line}", self.aggregated()]
        if detailed:
            parts += ["", f"{line} Detailed Profile per GPU {line}", "\n".join(self._tree())]
        return "\n".join([*parts, "-" * 80])

    def _summary(self) -> Iterator[tuple[str, str]]:
        total, engine = self._all, self._profiler.ds_engine
        params, copies = self._profiler.get_total_params(), 1
        if engine is not None:
            copies = engine.mp_world_size
            yield "world size", str(engine.world_size)
            yield "data parallel size", str(engine.dp_world_size)
            yield "model parallel size", str(copies)
            yield "batch size per GPU", str(engine.train_micro_batch_size_per_gpu())
        yield "params per GPU", params_to_string(params)
        yield "params of model = params per GPU * mp_size", params_to_string(params * copies)
        yield "fwd MACs per GPU", macs_to_string(total.forward // 2)
        yield "fwd flops per GPU", number_to_string(total.forward)
        yield "fwd flops of model = fwd flops per GPU * mp_size", number_to_string(total.forward * copies)
        yield "bwd flops per GPU", number_to_string(total.backward)
        yield "computed again per GPU", number_to_string(total.again)
        yield "fwd latency", duration_to_string(total.seconds)
        yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", self._per_second(total.forward, total.seconds)
        if engine is not None:
            yield from self._times(self._profiler.times)
        for name, share in self._profiler.without_formula():
            yield f"no formula: {name}, share of time in operators", f"{100 * share:.1f}%"

    def _times(self, seconds: dict[str, float]) -> Iterator[tuple[str, str]]:
        """Yield rows (label, text) with the engine's measured times of a micro-batch."""
        model_row, engine = self._all, self._profiler.ds_engine
        back, step = seconds.get("backward", 0.0), seconds.get("step", 0.0)
        forward, model = model_row.seconds, model_row.forward + model_row.backward
        yield "bwd latency", duration_to_string(back)
        yield "bwd FLOPS per GPU = bwd flops per GPU / bwd latency", self._per_second(model_row.backward, back)
        yield "fwd+bwd FLOPS per GPU (model)", self._per_second(model, forward + back)
        yield (
            "fwd+bwd FLOPS per GPU (hardware, with what is computed again)",
            self._per_second(model + model_row.again, forward + back),
        )
        yield "step latency", duration_to_string(step)
        yield "iter latency", duration_to_string(forward + back + step)
        yield "FLOPS per GPU = fwd+bwd flops per GPU / iter latency", self._per_second(model, forward + back + step)
        samples = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
        yield "samples/second", f"{samples / max(forward + back + step, 1e-9):.2f}"

    def aggregated(self) -> str:
        """Return text with the module classes of each depth with most parameters, multiply-adds and time."""
        kinds = {name: type(module).__name__ for name, module in self._profiler.model.named_modules()}
        by_depth: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
        for name, kind in kinds.items():
            row, depth = self._rows[name], name.count(".") + 1 if name else 0
            if self._depth < 0 or depth <= self._depth:
                sums = by_depth[depth][kind]
                sums[:] = [sums[0] + row.params, sums[1] + row.forward // 2, sums[2] + row.seconds]
        shown = [("params", params_to_string), ("MACs", macs_to_string), ("fwd latency", duration_to_string)]
        lines = []
        for depth, kinds_at_depth in sorted(by_depth.items()):
            lines.append(f"depth {depth}:")
            for column, (what, text) in enumerate(shown):
                largest = sorted(kinds_at_depth.items(), key=lambda item: -item[1][column])[: self._top]
                listed = ", ".join(f"{kind}: {text(sums[column])}" for kind, sums in largest)
                lines.append(f"    {what:<12}- {listed}")
        return "\n".join(lines)

    def _tree(self) -> Iterator[str]:
        """Yield a line for each module under its parent, then the modules that were called outside of their parent."""
        modules, total = dict(self._profiler.model.named_modules(remove_duplicate=False)), self._all
        for name in self._rows:  # in the model's order
            row, depth = self._rows[name], name.count(".") + 1 if name else 0
            if 0 <= self._depth < depth:
                continue
            figures = (
                f"{params_to_string(row.params)}, {self._share(row.params, self._profiler.get_total_params())} Params",
                f"{macs_to_string(row.forward // 2)}, {self._share(row.forward, total.forward)} MACs",
                f"{duration_to_string(row.seconds)}, {self._share(row.seconds, total.seconds)} latency",
                self._per_second(row.forward, row.seconds),
                f"bwd {number_to_string(row.backward).strip()}, again {number_to_string(row.again).strip()}",
            )
            module = modules.get(name)
            kind = type(module).__name__ + (f", {module.extra_repr()}" if module and module.extra_repr() else "")
            label = name.rpartition(".")[2] or "model"
            yield f"{'  ' * depth}({label}): {kind if module else 'called here'}: {', '.join(figures)}"
