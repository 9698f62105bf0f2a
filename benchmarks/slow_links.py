"""Training over slow links: step time and bytes of plain, int8 and int4 messages beside DDP, its hooks and FSDP2.

The hosts are network namespaces of tests/hosts (root and `make hosts`); `tc … tbf` limits each host's link both ways.
All sides run in one process for each host, in random order by round. `exposed` is the step's time minus that of the
side `floor`, which trains without collectives. The side `wait` is `floor` with one all-reduce of four bytes before the
optimizer's step: what it exposes is time that ranks wait for each other, which no codec can save.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import GPT, REPOSITORY, Shape, batch_of, fully_sharded, median_interval, print_table, write_json
from torch import Tensor, nn

sys.path.append(str(REPOSITORY))  # last: `--upstream` has another package of the name deepspeed
from tests.hosts.cluster import Cluster, cluster, missing

SHAPES = {"20M": Shape(), "50M": Shape(layers=12, width=576, vocabulary=8192)}
PEERS = ["ddp", "ddp-fp16", "ddp-powersgd", "fsdp2", "fsdp2-bf16"]
OURS = ["stage2", "stage2-bf16", "stage2-int8", "stage2-int4", "stage0-int8", "stage3-int8", "auto"]
SIDES = ["floor", "wait", *PEERS, *OURS]
UPSTREAM = "upstream-stage2"
SIXTEEN_BITS = ["ddp-fp16", "fsdp2-bf16"]
LINKS = {"100mbit": "100mbit", "1gbit": "1gbit", "10gbit": "10gbit"}
HEAD = ["side", "s", "over DDP", "exposed s", "processor s of all ranks", "bytes/parameter", "loss"]
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


# ---- one rank


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def torch_step(wrapped: nn.Module, wait: bool = False) -> Callable[[Tensor], Tensor]:
    optimizer = adamw(wrapped.parameters())

    def step(windows: Tensor) -> Tensor:
        loss = wrapped(windows)
        loss.backward()
        if wait:
            torch.distributed.all_reduce(torch.zeros(1))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ddp_step(name: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "ddp-fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return torch_step(wrapped)


def wire_of(name: str) -> dict[str, Any]:
    stage, _, codec = name.partition("-")
    wires = {
        "": {},
        "bf16": {"gradients": "bf16", "weights": "bf16"},
        "int8": {"gradients": "int8", "weights": "int8"},
        "int4": {"gradients": "int4", "weights": "int8"},
    }
    wire = dict(wires[codec])
    if stage == "stage0":
        wire.pop("weights", None)
    return wire


def engine_step(name: str, model: nn.Module, shape: Shape) -> Callable[[Tensor], Tensor]:
    """A side of the `deepspeed` that this interpreter has; upstream's gets no key of ours."""
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    if name != UPSTREAM:
        config["zero_optimization"] = {"stage": 2 if name == "auto" else int(name[5]), "overlap_publish": True}
        config["wire"] = "auto" if name == "auto" else wire_of(name)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(windows: Tensor) -> Tensor:
        loss = engine(windows)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def make_step(name: str, shape: Shape) -> Callable[[Tensor], Tensor]:
    """The side of this name; all begin with the same weights."""
    torch.manual_seed(0)
    model = GPT(shape)
    if name in ("floor", "wait"):
        return torch_step(model, wait=name == "wait")
    if name.startswith("ddp"):
        return ddp_step(name, model)
    if name.startswith("fsdp2"):
        return torch_step(fully_sharded(model, name.endswith("bf16")))
    return engine_step(name, model, shape)


def run_rank(sides: list[str], shape: Shape, rounds: int) -> None:
    """Time the sides on this rank; rank 0 prints a line of JSON with seconds, bytes sent and losses by side."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    steps = {name: make_step(name, shape) for name in sides}
    count: dict[str, int] = dict.fromkeys(sides, 0)
    losses: dict[str, list[float]] = {name: [] for name in sides}

    def step(name: str) -> None:
        losses[name].append(steps[name](batch_of(shape, count[name], rank)).item())
        count[name] += 1

    def timed(name: str) -> tuple[float, int, float]:
        """Seconds, bytes and processor seconds of the second of two steps.

        The second one pays for what the first one leaves to its next step.
        """
        torch.distributed.barrier()
        step(name)
        sent, started = int(_SENT.read_text()), time.perf_counter()  # no barrier: it would wait for those messages
        worked = time.process_time()
        step(name)
        return time.perf_counter() - started, int(_SENT.read_text()) - sent, time.process_time() - worked

    order = random.Random(1)
    for name in sides * 2:  # warm up: buckets, order of gathers, start of PowerSGD
        step(name)
    for _ in range(6 if "auto" in sides else 0):  # it chooses after its first steps
        step("auto")
    rows: dict[str, list[tuple[float, int, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in order.sample(sides, len(sides)):
            rows[name].append(timed(name))
            if rank == 0:
                print(f"{name} {rows[name][-1][0]:.2f} s", file=sys.stderr, flush=True)
    every: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(every, (rows, losses))
    if rank == 0:
        result = {
            name: {
                "seconds": [max(others[name][turn][0] for others, _ in every) for turn in range(rounds)],
                "processor": [sum(others[name][turn][2] for others, _ in every) for turn in range(rounds)],
                "bytes": statistics.median(row[1] for row in rows[name]),
                "loss": statistics.mean(others[name][-1] for _, others in every),
            }
            for name in sides
        }
        result["parameters"] = sum(p.numel() for p in GPT(shape).parameters())
        print(json.dumps(result), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # engines of several libraries in one process: skip their competing teardowns


# ---- all hosts


def limit(hosts: Cluster, name: str, rate: str) -> None:
    """Limit what a host sends and receives."""
    switch_end = hosts.space(name)
    buffer = "4mb" if rate.startswith("10g") else "1mb" if rate.startswith("1g") else "256kb"
    shape = ["root", "tbf", "rate", rate, "burst", buffer, "latency", "50ms"]
    subprocess.run(["ip", "netns", "exec", switch_end, "tc", "qdisc", "replace", "dev", "eth0", *shape], check=True)


def measure(
    count: int, rate: str, sides: list[str], size: str, rounds: int, python: str = sys.executable
) -> dict[str, Any]:
    """Results by side of one number of hosts and one rate, in processes of the interpreter `python`."""
    with cluster(count) as hosts:
        for name in hosts.names:
            limit(hosts, name, rate)
        environment = {**os.environ, "PYTHONPATH": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        if python == sys.executable:
            environment["PYTHONPATH"] = str(REPOSITORY)
        environment |= {"MASTER_ADDR": hosts.address("h0"), "MASTER_PORT": "29555", "WORLD_SIZE": str(count)}
        environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        command = [python, str(Path(__file__).resolve()), "--rank", "--size", size, "--rounds", str(rounds)]
        command += ["--sides", *sides]
        started = []
        for rank, name in enumerate(hosts.names):
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            own = {**environment, "RANK": str(rank)}
            started.append(hosts.on(name, command, cwd=str(REPOSITORY / "benchmarks"), env=own, stdout=out, text=True))
        printed, _ = started[0].communicate()
        for process in started[1:]:
            process.wait(timeout=60)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{count} hosts at {rate}: rank 0 printed no result")
    return json.loads(lines[-1])


def table(result: dict[str, Any], sides: list[str]) -> list[list[str]]:
    """Rows: side, seconds, ratio to DDP, exposed seconds, processor seconds, bytes a parameter, loss."""
    seconds, rows = {name: result[name]["seconds"] for name in sides}, []
    floor = seconds.get("floor")
    for name in sides:
        pairs = list(zip(seconds[name], seconds.get("ddp", seconds[sides[0]]), strict=True))
        ratio = median_interval([own / other for own, other in pairs])
        exposed = (
            ""
            if floor is None
            else f"{statistics.median(a - b for a, b in zip(seconds[name], floor, strict=True)):.3f}"
        )
        rows.append([
            name, f"{statistics.median(seconds[name]):.3f}", str(ratio), exposed,
            f"{statistics.median(result[name].get('processor', [float('nan')])):.2f}",
            f"{result[name]['bytes'] / result['parameters']:.3f}", f"{result[name]['loss']:.4f}",
        ])  # fmt: skip
    return rows


def draw(results: dict[str, Any], path: Path) -> None:
    """Step times over DDP, a panel for each link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(3.6 * len(results), 3.4), squeeze=False)
    for axes, (link, result) in zip(panels[0], results.items(), strict=True):
        names = [name for name in [*SIDES, UPSTREAM] if name in result]
        pairs = {name: zip(result[name]["seconds"], result["ddp"]["seconds"], strict=True) for name in names}
        ratios = [statistics.median(own / other for own, other in pairs[name]) for name in names]
        colours = ["#1f6fbf" if name in OURS else "#a3a9b0" for name in names]
        axes.barh(names, ratios, color=colours)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(link)
        axes.set_xlabel("time of a step over DDP in fp32")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=[*SIDES, UPSTREAM])
    parser.add_argument("--upstream", help="interpreter that has upstream's package: its stage 2 beside DDP")
    parser.add_argument("--size", default="20M", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--picture", type=Path, help="file for a chart of the ratios, such as slow-links.svg")
    options = parser.parse_args()
    if options.rank:
        run_rank(options.sides, SHAPES[options.size], options.rounds)
        return 0
    if missing():
        print(missing())
        return 1
    results = {}
    for count in options.hosts:
        for rate in options.links:
            result = measure(count, LINKS[rate], options.sides, options.size, options.rounds)
            results[f"{count} hosts, {rate}"] = result
            print(f"\n{count} hosts, {rate}, {options.size}")
            print_table(HEAD, table(result, options.sides))
            if options.upstream:
                own_sides = ["floor", "ddp", UPSTREAM]
                theirs = measure(count, LINKS[rate], own_sides, options.size, options.rounds, options.upstream)
                results[f"{count} hosts, {rate}, upstream"] = theirs
                print_table(HEAD, table(theirs, own_sides))
    print(write_json("slow_links.json", results))
    if options.picture:
        draw(results, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
