"""What the benchmarks share: the GPT they train, rank processes, statistics of paired timings, where results go."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
_ADDRESS, _KEY = "BENCHMARK_ADDRESS", b"benchmark"


@dataclass(frozen=True)
class Shape:
    """Sizes of the benchmark's GPT; the defaults are the 20 M-parameter model of the speed table."""

    layers: int = 8
    width: int = 384
    vocabulary: int = 8192
    sequence: int = 128
    batch: int = 4


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: `[batch, sequence, width]`."""
        mixed = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in mixed.unbind(dim=2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """A causal language model that returns its loss, formed in fp32 whatever the compute dtype."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        """Mean nats per token of int64 windows `[batch, sequence + 1]`."""
        tokens, following = windows[:, :-1], windows[:, 1:]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), following.flatten())


def batch_of(shape: Shape, step: int, rank: int) -> Tensor:
    """The windows of one rank at one step: tokens drawn log-uniformly, so that there is something to learn."""
    draws = torch.rand(shape.batch, shape.sequence + 1, generator=torch.Generator().manual_seed(1_000 * step + rank))
    return (shape.vocabulary**draws).long().clamp(max=shape.vocabulary - 1)


def whole_bytes(module: nn.Module) -> int:
    """Bytes under the parameters that stand whole on this rank, each storage once."""
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for values in module.parameters():
            # A sharded parameter shows its true shape over a single element.
            if not isinstance(values, DTensor) and values.untyped_storage().nbytes() >= values.nbytes:
                storages[values.untyped_storage()._cdata] = values.untyped_storage().nbytes()
    return sum(storages.values())


def fully_sharded(model: GPT, low_precision: bool = False) -> GPT:
    """FSDP2's `fully_shard` of every block and of the rest; with `low_precision`, parameters in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low_precision else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def start_world(backend: str = "gloo") -> tuple[int, int]:
    """Join the process group named by the environment with one thread; returns (rank, world size)."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(backend)
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class World:
    """Rank processes of one interpreter running `script --worker`, spoken to over one pipe per rank.

    Args:
        script: a benchmark whose `--worker` answers through `serve`.
        ranks: number of processes.
        python: the interpreter; None is this one, with this repository's package first on its path.
        setup: passed to every worker as its first message.
    """

    def __init__(self, script: str, ranks: int, setup: dict[str, Any], python: str | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        if python is None:
            environment["PYTHONPATH"] = str(REPOSITORY)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        environment |= {"LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        with Listener(("127.0.0.1", 0), authkey=_KEY) as listener:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), _ADDRESS: str(listener.address[1])}
                command = [python or sys.executable, str(BENCHMARKS / script), "--worker"]
                # What engines print belongs on stderr: stdout is the benchmark's table.
                self.processes.append(subprocess.Popen(command, env=environment | own, stdout=sys.stderr))
                self.pipes.append(listener.accept())
        self.ask(**setup)

    def ask(self, **message: Any) -> list[Any]:
        """Send one message to all ranks; returns their answers by rank."""
        for pipe in self.pipes:
            pipe.send(message)
        answers = [pipe.recv() for pipe in self.pipes]
        for rank, answer in enumerate(answers):
            if isinstance(answer, dict) and "error" in answer:
                self.close()
                raise RuntimeError(f"rank {rank} failed at {message}:\n{answer['error']}")
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def serve(make_handler: Callable[..., Callable[..., Any]]) -> None:
    """A worker's life: `make_handler(**setup)` once, then `handler(**message)` per message until the pipe closes."""
    pipe = Client(("127.0.0.1", int(os.environ[_ADDRESS])), authkey=_KEY)
    handler: Callable[..., Any] | None = None
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            break
        try:
            if handler is None:
                handler = make_handler(**message)
                pipe.send(None)
            else:
                pipe.send(handler(**message))
        except Exception:
            pipe.send({"error": traceback.format_exc()})
            break
    os._exit(0)  # engines of several libraries in one process: skip their competing teardowns


@dataclass(frozen=True)
class Interval:
    """The median of a sample with its 95 % interval."""

    median: float
    low: float
    high: float
    count: int

    @property
    def half_width(self) -> float:
        """The larger distance from the median to an end, relative to the median."""
        return max(self.high - self.median, self.median - self.low) / self.median

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: list[float]) -> Interval:
    """The median and the order statistics that hold it with 95 % (binomial(n, 1/2), no assumption on the noise).

    Below six values no pair of order statistics reaches 95 %: the interval is then unbounded.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, outside = 0.0, 0
    while outside < count // 2 and tail + math.comb(count, outside) / 2**count <= 0.025:
        tail += math.comb(count, outside) / 2**count
        outside += 1
    median = statistics.median(ordered)
    if outside == 0:
        return Interval(median, 0.0, math.inf, count)
    return Interval(median, ordered[outside - 1], ordered[count - outside], count)


# -- sides of one comparison, in random order in every round ----------------------------------------------------------


def time_sides(
    steps: dict[str, Callable[[Tensor], float | None]], order: list[str], ids: Tensor
) -> dict[str, tuple[float, float | None]]:
    """Seconds and loss of one step of each side; what a side defers to its next step is paid for in the timed one."""
    found = {}
    for name in order:
        steps[name](ids)
        torch.distributed.barrier()
        started = time.perf_counter()
        loss = steps[name](ids)
        found[name] = (time.perf_counter() - started, loss)
    return found


def compare_sides(
    world: World, sides: list[str], reference: str, rounds: int, seed: int, same: float
) -> list[dict[str, Any]]:
    """Rounds of `time_sides` on all ranks of one world; see `compare_worlds`."""
    return compare_worlds([(world, sides)], reference, rounds, seed, same)


def compare_worlds(
    worlds: list[tuple[World, list[str]]], reference: str, rounds: int, seed: int, same: float
) -> list[dict[str, Any]]:
    """Rounds of `time_sides` of each world in turn; a row for each side: milliseconds, paired ratio to the reference.

    A rank without a loss answers None for it.

    Args:
        worlds: each with its sides, whose names are unlike; one of them is the reference.
        reference: the side that others are divided by, round by round.
        rounds: of all worlds.
        seed: of the orders.
        same: by how much of their size losses of the first round may differ.

    Raises:
        SystemExit: they differ by more.
    """
    times: dict[str, list[float]] = {name: [] for _, sides in worlds for name in sides}
    order, answers = random.Random(seed), {}
    for number in range(rounds):
        for world, sides in order.sample(worlds, len(worlds)):
            told = world.ask(what="round", order=order.sample(sides, len(sides)), number=number)
            for name in sides:
                answers[name] = [answer[name] for answer in told]
                times[name].append(max(seconds for seconds, *_ in answers[name]))
        if number == 0:
            check_losses([loss for rows in answers.values() for _, loss, *_ in rows], same)
    for world, _ in worlds:
        world.close()
    rows = []
    for name in times:
        ratio = median_interval([a / b for a, b in zip(times[name], times[reference], strict=True)])
        rows.append({"side": name, "ms": 1e3 * median_interval(times[name]).median, "ratio": ratio.median,
                     "low": ratio.low, "high": ratio.high})  # fmt: skip
        facts = [fact for answer in answers[name] for fact in answer[2:]]
        rows[-1] |= {"facts": facts} if facts else {}
    return rows


def check_losses(losses: list[float | None], same: float) -> None:
    """See that all sides compute the same; None: a rank has no loss.

    Raises:
        SystemExit: they differ by more than `same` of their size.
    """
    told = [loss for loss in losses if loss is not None]
    if max(told) - min(told) > same * min(told):
        raise SystemExit(f"the sides do not compute the same: losses {told}")


def machine_name() -> str:
    """The CPU model and core count as a file name; never a host name."""
    return re.sub(r"[^a-z0-9]+", "-", f"{_model()} {os.cpu_count()} cores".lower()).strip("-")


def _model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _information())
    return found.group(1) if found else platform.processor() or platform.machine()


def _information() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def results_folder() -> Path:
    """`benchmarks/results/<machine>-<date>/`, made if it is not there.

    Clouds give unlike processors one name without a number: of Intel's, those without matrix tiles say so.
    """
    unnamed = "Intel" in _model() and not re.search(r"\d", _model())
    kind = "-without-tiles" if unnamed and "amx_bf16" not in _information() else ""
    folder = BENCHMARKS / "results" / f"{machine_name()}{kind}-{datetime.date.today().isoformat()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_json(name: str, content: Any) -> Path:
    """Write one result; returns its path relative to the repository."""
    path = results_folder() / name
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path.relative_to(REPOSITORY)


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print columns aligned to the left."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def draw_ratios(names: list[str], rows: list[dict[str, Any]], label: str, path: Path) -> None:
    """Bars of median paired ratios with their intervals; 1.0 is marked.

    Args:
        names: one for each row.
        rows: `ratio`, `low` and `high` of each.
        label: what the ratio is of.
        path: the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.2))
    errors = [[row["ratio"] - row["low"] for row in rows], [row["high"] - row["ratio"] for row in rows]]
    axes.barh(names, [row["ratio"] for row in rows], xerr=errors, color="tab:blue", alpha=0.7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{label} (median paired ratio, 95 % interval)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
