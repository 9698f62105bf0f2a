"""Comms logger: count, bytes, time and bandwidth of each collective."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError
from deepspeed.foundation.log import log_rank0, logger
from deepspeed.foundation.spans import now
from deepspeed.foundation.timer import trimmed_mean

_SETTINGS = ("enabled", "prof_all", "prof_ops", "verbose", "debug", "curve")
# Operations whose message is one rank's part of the gathered or scattered tensor.
_OF_PARTS = {"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}

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


_KEPT = 1 << 13  # number of newest calls of one operation and size whose times are stored individually


class CallTimes(deque[float]):
    """Milliseconds of recent calls of one operation and size, and totals of calls, milliseconds and received bytes."""

    def __init__(self) -> None:
        super().__init__(maxlen=_KEPT)
        self.calls, self.total, self.received = 0, 0.0, 0

    def note(self, milliseconds: float, received: int = 0) -> None:
        self.append(milliseconds)
        self.calls += 1
        self.total += milliseconds
        self.received += received


@dataclass
class EncodedMessages:
    """Totals of the messages of one operation that this rank has encoded.

    Attributes:
        codec: name of the codec.
        count: number of messages.
        bytes_before: bytes of the values.
        bytes_after: bytes of the encoded messages.
        milliseconds: time of encoding.
        largest_error: largest difference of a value and its decoded form.
        squares_of_errors, squares: sums over all values.
    """

    codec: str
    count: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    milliseconds: float = 0.0
    largest_error: float = 0.0
    squares_of_errors: float = 0.0
    squares: float = 0.0

    def note(self, values: torch.Tensor, decoded: torch.Tensor, after: int, milliseconds: float) -> None:
        self.count += 1
        self.bytes_before += values.nbytes
        self.bytes_after += after
        self.milliseconds += milliseconds
        exact = values.float()
        error = exact - decoded
        if not bool(error.isfinite().all()):  # an overflow, whose step is skipped
            return
        self.largest_error = max(self.largest_error, float(error.abs().max()))
        self.squares_of_errors += float(error.double().square().sum())
        self.squares += float(exact.double().square().sum())

    def add(self, other: EncodedMessages) -> None:
        """Add the totals of other messages."""
        self.largest_error = max(self.largest_error, other.largest_error)
        for name in ("count", "bytes_before", "bytes_after", "milliseconds", "squares_of_errors", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def relative_error(self) -> float:
        """Norm of the errors over the norm of the values; 0 for zeros."""
        return math.sqrt(self.squares_of_errors / self.squares) if self.squares else 0.0


@dataclass
class CommsLogger:
    """Times of collectives by operation and message size.

    Args:
        enabled: time collectives (`comms_logger.enabled`). Timing never blocks: device work is timed by events that are
            read after completion.
        prof_all: time every operation (`comms_logger.prof_all`).
        prof_ops: names of the operations to time if `prof_all` is false (`comms_logger.prof_ops`).
        verbose: log a line for each operation (`comms_logger.verbose`).
        debug: add the caller to that line (`comms_logger.debug`).
        curve: file of `ds_bench`; its bandwidth is printed for comparison (`comms_logger.curve`).
    """

    enabled: bool = False
    prof_all: bool = True
    prof_ops: Sequence[str] = ()
    verbose: bool = False
    debug: bool = False
    curve: str | None = None
    # operation → (bytes of the message, ranks) → its calls
    times: dict[str, dict[tuple[int, int], CallTimes]] = field(default_factory=dict)
    # participating global ranks → bytes that came from the others
    received: dict[tuple[int, ...], int] = field(default_factory=dict)
    # operation → its encoded messages
    encoded: dict[str, EncodedMessages] = field(default_factory=dict)
    _underway: deque[tuple[Any, ...]] = field(default_factory=deque)  # calls that a device has not finished
    _kinds: dict[str, str] = field(default_factory=dict)  # operation of each name that `append` recorded

    def configure(self, comms_config: Any = None, **settings: Any) -> None:
        """Change settings; None leaves a setting unchanged.

        Args:
            comms_config: an object with a `comms_logger` block, or the block itself; `settings` override it.
            settings: settings by name.
        """
        block = getattr(comms_config, "comms_logger", comms_config)
        of_block = {} if block is None else {name: getattr(block, name, None) for name in _SETTINGS}
        for name, value in (*of_block.items(), *settings.items()):
            if value is not None:
                setattr(self, name, value)

    def start_profiling_comms(self) -> None:
        """Time every operation from now on."""
        self.enabled = self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Time only the operations in `prof_ops`, and calls with `prof=True`, from now on."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Add operations, such as "all_reduce", to `prof_ops`; does not change `enabled`."""
        self.prof_ops = [*self.prof_ops, *(name for name in op_name_list if name not in self.prof_ops)]

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Remove operations from `prof_ops`; with `prof_all` they are still timed."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def wants(self, operation: str, asked: bool) -> bool:
        """Return whether to time `operation`; `asked`: the caller requested it (`prof=True`)."""
        return self.enabled and (self.prof_all or asked or operation in self.prof_ops)

    def begin(self, message: Any) -> Any:
        """Start timing a call and return the start for `end`: an event for a device tensor, else nanoseconds."""
        if not isinstance(message, torch.Tensor) or message.device.type in ("cpu", "meta"):
            return now()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def end(self, begun: Any, operation: str, size: int, ranks: int, note: str, received: int = 0) -> None:
        """Record the call that started at `begun` (on a device, once it has finished). Other arguments: `record`."""
        if isinstance(begun, int):
            self.record(operation, size, ranks, (now() - begun) / 1e9, note, received)
            return
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        self._underway.append((begun, event, operation, size, ranks, note, received))
        while self._underway and self._underway[0][1].query():
            self._read_oldest()

    def _read_oldest(self) -> None:
        begun, ended, operation, size, ranks, note, received = self._underway.popleft()
        ended.synchronize()
        self.record(operation, size, ranks, begun.elapsed_time(ended) / 1e3, note, received)

    def settle(self) -> None:
        """Wait until the device has finished every call that was passed to `end`, and record these calls."""
        while self._underway:
            self._read_oldest()

    def record(self, operation: str, size: int, ranks: int, seconds: float, note: str, received: int = 0) -> None:
        """Record a finished call.

        Args:
            operation: name of the operation in the table.
            size: bytes of the message.
            ranks: number of participating ranks.
            seconds: duration of the call.
            note: text of the line that `verbose` logs.
            received: bytes that came from other ranks.
        """
        self.times.setdefault(operation, {}).setdefault((size, ranks), CallTimes()).note(seconds * 1e3, received)
        if self.verbose:
            logger.info("%s: %.3f ms, %.3f GB/s", note, seconds * 1e3, size / max(seconds, 1e-9) / 1e9)

    def arrived(self, ranks: Sequence[int], nbytes: int) -> None:
        """Add received bytes to the count of a set of global ranks, which identifies the mesh axis."""
        self.received[tuple(ranks)] = self.received.get(tuple(ranks), 0) + nbytes

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Record a call of all ranks; the caller has measured its duration.

        Args:
            raw_name: name of the operation, which determines the bandwidth formula.
            record_name: name in the table.
            latency: milliseconds.
            msg_size: bytes.
        """
        self._kinds[record_name] = raw_name
        self.record(record_name, msg_size, _world_size(), latency / 1e3, record_name)

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        """Return operation → bytes → [count, milliseconds, algbw in Gbit/s, busbw in Gbit/s].

        All but the count are lists with one entry for each of the newest calls.
        """
        self.settle()
        by_operation: dict[str, dict[int, list[Any]]] = {}
        for operation, sizes in self.times.items():
            of_op = by_operation.setdefault(operation, {})
            for (size, ranks), times in sizes.items():
                row = of_op.setdefault(size, [0, [], [], []])
                # `append` has the size of one rank's part, the messages of `deepspeed.comm` that of the whole tensor.
                in_parts = operation in _OF_PARTS and operation not in self._kinds
                part, kind = size // ranks if in_parts else size, self._kinds.get(operation, operation)
                speeds = [calc_bw_log(kind, part, ms, ranks) for ms in times]
                row[0] += times.calls
                row[1] += times
                row[2] += [algorithm_speed for algorithm_speed, _ in speeds]
                row[3] += [bus for _, bus in speeds]
        return by_operation

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """Return `comms_dict`, which is computed at each call."""
        return self.comms_dict

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Log a table of the timed calls on rank 0.

        Args:
            print_log: False: do not log.
            show_straggler: add a table of the time lost to waiting for the slowest rank; makes the call collective.
            return_dict: return the figures.

        Returns:
            None, or with `return_dict`: "summary" (operation → bytes → count, total_latency_ms, avg_latency_ms,
            tput_avg_gbps, busbw_avg_gbps, msg_size_bytes, msg_size_str), "straggler_analysis" (None, or operation →
            bytes → count, total_comm_lat_ms, total_straggler_ms, avg_comm_lat_ms, avg_straggler_ms and the size) and
            "metadata" (world_size, rank, timestamp). Speeds are Gbit/s, averages without smallest and largest tenth.

        Raises:
            ArgumentError: the file `curve` cannot be read (with `print_log`).
        """
        self.settle()
        waits = self._straggling(self._fastest(self.times)) if show_straggler else None
        summary = {
            op: {size: self._figures(size, *row) for size, row in rows.items()} for op, rows in self.comms_dict.items()
        }
        for operation, sizes in self.times.items():
            for figures in summary[operation].values():
                figures["total_latency_ms"] = 0.0
            for (size, _), times in sizes.items():  # total over all calls, like the count; averages are of the newest
                summary[operation][size]["total_latency_ms"] += times.total
        if print_log:
            rows = self._rows(summary)
            if self.curve:
                curve = Curve.read(self.curve)
                sizes = [(op, size) for op, figures in sorted(summary.items()) for size in sorted(figures)]
                for row, (op, size) in zip(rows, sizes, strict=True):
                    row["ds_bench busbw (Gbps)"] = 8 * curve.busbw(self._kinds.get(op, op), size)
            log_rank0("collectives of this rank\n" + self.as_table(rows))
            if self.encoded:
                log_rank0("encoded messages of this rank\n" + self.as_table(self.encoding_rows()))
            if waits is not None:
                log_rank0("time lost to waiting\n" + self.as_table(self._rows(waits)))
        if not return_dict:
            return None
        when = datetime.now().astimezone().isoformat()
        about = {
            "world_size": _world_size(),
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "timestamp": when,
        }
        return {"summary": summary, "straggler_analysis": waits, "metadata": about}

    def _straggling(self, fastest: Mapping[tuple[str, int, int], Sequence[float]]) -> dict[str, dict[int, Any]]:
        """Return waiting times by operation and bytes: a call's time on this rank minus the shortest on any rank."""
        by_operation: dict[str, dict[int, Any]] = {}
        for operation, sizes in self.times.items():
            for size in dict.fromkeys(size for size, _ in sizes):
                alike = [(ranks, times) for (other, ranks), times in sizes.items() if other == size]
                shortest, lost = list[float](), list[float]()
                for ranks, times in alike:  # groups of several sizes, as in `comms_dict`
                    least = fastest[operation, size, ranks]
                    shortest += least
                    lost += [local - fast for local, fast in zip(times, least, strict=False)]
                by_operation.setdefault(operation, {})[size] = {
                    "count": sum(times.calls for _, times in alike),
                    "total_comm_lat_ms": sum(shortest),
                    "total_straggler_ms": sum(lost),
                    "avg_comm_lat_ms": trimmed_mean(shortest),
                    "avg_straggler_ms": trimmed_mean(lost),
                    "msg_size_bytes": size,
                    "msg_size_str": convert_size(size),
                }
        return by_operation

    def summary(self, fastest: Mapping[tuple[str, int, int], Sequence[float]] | None = None) -> list[dict[str, Any]]:
        """Return one row per operation, message size and number of ranks.

        Args:
            fastest: by (operation, bytes, ranks), each call's shortest milliseconds on any rank; None: no straggler_ms.

        Returns:
            Rows with op, bytes, ranks, count, total_ms, mean_ms, algbw_gbs, busbw_gbs (10⁹ bytes per second),
            received_bytes (from other ranks, in the engine's own messages) and, with `fastest`, straggler_ms.
        """
        self.settle()
        rows = []
        for operation in sorted(self.times):
            for (size, ranks), times in sorted(self.times[operation].items()):
                total = times.total
                speed = size * times.calls / max(total, 1e-9) / 1e6
                factor = _BUS_FACTOR.get(operation, 0) * (ranks - 1) / ranks or 1.0
                row = {"op": operation, "bytes": size, "ranks": ranks, "count": times.calls, "total_ms": total}
                row |= {"mean_ms": total / times.calls, "algbw_gbs": speed, "busbw_gbs": speed * factor}
                row["received_bytes"] = times.received
                if fastest is not None:
                    row["straggler_ms"] = sum(times) - sum(fastest[operation, size, ranks])
                rows.append(row)
        return rows

    def encoding_rows(self) -> list[dict[str, Any]]:
        """Return a row for each operation with encoded messages: bytes before and after, time and errors."""
        return [
            {
                "Comm. Op": operation,
                "Codec": row.codec,
                "Count": row.count,
                "Before": convert_size(row.bytes_before),
                "After": convert_size(row.bytes_after),
                "Encoding (ms)": row.milliseconds,
                "Relative error": row.relative_error,
                "Largest error": row.largest_error,
            }
            for operation, row in sorted(self.encoded.items())
        ]

    def reset(self) -> None:
        self.encoded.clear()
        self.times.clear()
        self.received.clear()
        self._underway.clear()
        self._kinds.clear()

    @staticmethod
    def _figures(size: int, count: int, times: list[float], speeds: list[float], bus: list[float]) -> dict[str, Any]:
        return {
            "count": count,
            "total_latency_ms": sum(times),
            "avg_latency_ms": trimmed_mean(times),
            "tput_avg_gbps": trimmed_mean(speeds),
            "busbw_avg_gbps": trimmed_mean(bus),
            "msg_size_bytes": size,
            "msg_size_str": convert_size(size),
        }

    @staticmethod
    def _rows(figures: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
        return [
            {"Comm. Op": op, "Message Size": row["msg_size_str"], **{t: row[n] for n, t in _TITLES.items() if n in row}}
            for op, sizes in sorted(figures.items())
            for _, row in sorted(sizes.items())
        ]

    @staticmethod
    def received_in(operation: str, size: int, ranks: int) -> int:
        """Return the bytes that a rank receives for a message of `size` bytes, as in nccl-tests; 0 if undefined."""
        if operation in ("broadcast", "recv", "irecv"):
            return size
        return size * _BUS_FACTOR.get(operation, 0) * (ranks - 1) // ranks

    @staticmethod
    def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
        """Format rows as a text table, with the keys of the first row as the heading."""
        if not rows:
            return "no collective was timed"
        columns = list(rows[0])
        cells = [columns, *([f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        )

    @staticmethod
    def _fastest(
        times: Mapping[str, Mapping[tuple[int, int], Sequence[float]]],
    ) -> dict[tuple[str, int, int], list[float]]:
        """Return each call's shortest ms on any rank, by (operation, bytes, ranks). All ranks must call this."""
        local_times = {
            (operation, *key): list(calls) for operation, sizes in times.items() for key, calls in sizes.items()
        }
        everyone: list[Any] = [local_times]
        if _world_size() > 1:
            everyone *= _world_size()
            dist.all_gather_object(everyone, local_times)
        return {
            key: [min(calls) for calls in zip(*(other[key] for other in everyone if key in other), strict=False)]
            for key in local_times
        }


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


_TITLES = {
    "count": "Count", "total_latency_ms": "Total Latency(ms)", "avg_latency_ms": "Avg Latency(ms)",
    "tput_avg_gbps": "tput_avg (Gbps)", "busbw_avg_gbps": "busbw_avg (Gbps)", "total_comm_lat_ms": "Total comm lat(ms)",
    "total_straggler_ms": "Total straggler(ms)", "avg_comm_lat_ms": "Avg comm lat(ms)",
    "avg_straggler_ms": "Avg straggler(ms)",
}  # fmt: skip


class Curve:
    """Bandwidths measured by `ds_bench`: rows by operation with bytes and busbw (10⁹ B/s), in ascending size."""

    def __init__(self, rows: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
        self._rows = rows

    @classmethod
    def read(cls, path: str) -> Curve:
        """Read the curve from a file of `ds_bench`; raises ArgumentError for other files."""
        try:
            return cls(json.loads(Path(path).read_text())["curve"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"comms_logger.curve {path!r} is no file that ds_bench has written: {error}") from None

    def busbw(self, operation: str, size: int) -> float:
        """Return the bus bandwidth for `size` bytes in 10⁹ B/s, interpolated or of the nearest size; 0: unknown."""
        rows = self._rows.get(_LIKE.get(operation, operation), ())
        below = [row for row in rows if row["bytes"] <= size]
        above = [row for row in rows if row["bytes"] >= size]
        if not rows or not below or not above:
            return float((below[-1] if below else above[0])["busbw"]) if rows else 0.0
        low, high = below[-1], above[0]
        if low["bytes"] == high["bytes"]:
            return float(low["busbw"])
        part = math.log(size / low["bytes"]) / math.log(high["bytes"] / low["bytes"])
        return float(low["busbw"] ** (1 - part) * high["busbw"] ** part)


# Operation of ds_bench whose bandwidth is compared with a message's.
_LIKE = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "send": "pt2pt", "recv": "pt2pt", "reduce": "reduce_scatter",
    "gather": "all_gather", "publish": "all_gather", "share": "all_gather", "agreement": "all_gather",
}  # fmt: skip


def convert_size(size_bytes: float) -> str:
    """Format bytes with a unit: `1.5 KB` (powers of 1024)."""
    units = ("B", "KB", "MB", "GB", "TB", "PB")
    place = min(int(math.log(size_bytes, 1024)), len(units) - 1) if size_bytes >= 1 else 0
    return f"{round(size_bytes / 1024**place, 2)} {units[place]}"


def calc_bw_log(comm_op: str, size: int, duration: float, ranks: int | None = None) -> tuple[float, float]:
    """Return (algorithm bandwidth, bus bandwidth) of a collective in Gbit/s.

    Algorithm bandwidth counts the message of an all-reduce twice, and the whole gathered or scattered tensor. Bus
    bandwidth is that of the busiest link, as in nccl-tests.

    Args:
        comm_op: name of the collective.
        size: bytes of the message on one rank; for all-gather and reduce-scatter, of that rank's part.
        duration: milliseconds.
        ranks: number of participating ranks; None: all ranks.
    """
    n = _world_size() if ranks is None else ranks
    moved = {"all_reduce": 2.0}.get(comm_op, float(n) if comm_op in _OF_PARTS else 1.0)
    share = (n - 1) / n if comm_op in _BUS_FACTOR else 1.0
    speed = moved * size * 8 / max(duration, 1e-9) / 1e6
    return speed, speed * share


comms_logger = CommsLogger()  # of this process


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Change settings of the comms logger; None leaves a setting unchanged.

    Args:
        deepspeed_config: a dict or parsed configuration with a `comms_logger` block, which other arguments override.
        enabled: time collectives.
        prof_all: time all operations.
        prof_ops: names of the operations to time.
        verbose: log a line for each call.
        debug: add the caller to the line.
    """
    settings = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    names = [*settings, "curve"]
    parsed = not isinstance(deepspeed_config, Mapping)
    block = getattr(deepspeed_config, "comms_logger", None) if parsed else deepspeed_config.get("comms_logger")
    if block is not None:
        of_block = dict(block) if isinstance(block, Mapping) else {k: getattr(block, k, None) for k in names}
        comms_logger.configure(**{k: of_block.get(k) for k in names})
    comms_logger.configure(**settings)
