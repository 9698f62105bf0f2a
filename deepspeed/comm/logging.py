"""The comms logger: how often each collective ran, on how many bytes, for how long, and the bandwidth that makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.foundation.log import logger

# Bytes on the busiest link per byte of the message, times n / (n - 1); the convention of nccl-tests.
_BUS_FACTOR = {
    "all_reduce": 2,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all": 1,
    "all_to_all_single": 1,
}


@dataclass
class CommsLogger:
    """Times of collectives by operation and message size.

    Args:
        enabled: whether anything is timed (`comms_logger.enabled`). Timing waits for the device around each operation.
        prof_all: time every operation (`comms_logger.prof_all`).
        prof_ops: names of the operations to time when `prof_all` is false (`comms_logger.prof_ops`).
        verbose: log a line for each operation (`comms_logger.verbose`).
        debug: add the caller to that line (`comms_logger.debug`).
    """

    enabled: bool = False
    prof_all: bool = True
    prof_ops: Sequence[str] = ()
    verbose: bool = False
    debug: bool = False
    # operation → (bytes of the message, ranks) → milliseconds of each call
    times: dict[str, dict[tuple[int, int], list[float]]] = field(default_factory=dict)

    def configure(self, **settings: Any) -> None:
        """Change the settings that are given and not None."""
        for name, value in settings.items():
            if value is not None:
                setattr(self, name, value)

    def wants(self, operation: str, asked: bool) -> bool:
        """Whether `operation` is to be timed; `asked` is the caller's `prof`."""
        return self.enabled and (self.prof_all or asked or operation in self.prof_ops)

    def record(self, operation: str, size: int, ranks: int, seconds: float, note: str) -> None:
        """Keep one call on a message of `size` bytes."""
        sizes = self.times.setdefault(operation, defaultdict(list))
        sizes[size, ranks].append(seconds * 1e3)
        if self.verbose:
            logger.info("%s: %.3f ms, %.3f GB/s", note, seconds * 1e3, size / max(seconds, 1e-9) / 1e9)

    def summary(self, fastest: Mapping[tuple[str, int, int], Sequence[float]] | None = None) -> list[dict[str, Any]]:
        """One row per operation and size.

        Args:
            fastest: for each row, the shortest time any rank had for each call; adds what was lost to waiting.

        Returns:
            Rows with op, bytes, ranks, count, total_ms, mean_ms, algbw_gbs, busbw_gbs (10⁹ bytes per second) and,
            with `fastest`, straggler_ms.
        """
        rows = []
        for operation in sorted(self.times):
            for (size, ranks), times in sorted(self.times[operation].items()):
                total = sum(times)
                speed = size * len(times) / max(total, 1e-9) / 1e6
                factor = _BUS_FACTOR.get(operation, 0) * (ranks - 1) / ranks or 1.0
                row = {"op": operation, "bytes": size, "ranks": ranks, "count": len(times), "total_ms": total}
                row |= {"mean_ms": total / len(times), "algbw_gbs": speed, "busbw_gbs": speed * factor}
                if fastest is not None:
                    row["straggler_ms"] = total - sum(fastest[operation, size, ranks])
                rows.append(row)
        return rows

    def reset(self) -> None:
        """Forget every time."""
        self.times.clear()


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `CommsLogger.summary` as text, one line each under a heading."""
    if not rows:
        return "no collective was timed"
    columns = list(rows[0])
    cells = [columns, *([f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


comms_logger = CommsLogger()  # of this process


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set the comms logger.

    Args:
        deepspeed_config: a dict or parsed configuration with a `comms_logger` block; the other arguments outrank it.
        enabled: time collectives.
        prof_all: all of them.
        prof_ops: only these.
        verbose: a log line for each.
        debug: name the caller in it.
    """
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    parsed = not isinstance(deepspeed_config, Mapping)
    block = getattr(deepspeed_config, "comms_logger", None) if parsed else deepspeed_config.get("comms_logger")
    if block is not None:
        comms_logger.configure(**{k: block.get(k) if isinstance(block, Mapping) else getattr(block, k) for k in given})
    comms_logger.configure(**given)
