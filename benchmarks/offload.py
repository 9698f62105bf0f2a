"""Offload in bytes: state where the prediction says, nothing allocated once settled, and models larger than memory.

`offload.py memory` trains a model of 300 M parameters with its optimizer state on the host and on NVMe; `offload.py
scale` trains from NVMe under a limit on the process's data (RLIMIT_DATA) that the state exceeds.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from common import GPT, Shape, batch_of, print_table, write_json

LARGE = Shape(layers=23, width=1024, vocabulary=8192, sequence=16, batch=1)
SMALL = Shape(layers=3, width=512, vocabulary=4096, sequence=16, batch=1)  # for the many steps
STEPS = 100
HEAD = ["M parameters", "steps", "stage", "offload_optimizer", "offload_param", "B predicted", "live", "RSS growth"]
HEAD += ["transit", "NVMe buffers", "RSS drift", "groups gathered", "MB allocated by the last step"]
# Bytes of data (heap, stacks and anonymous maps) that a process of the scale table may have in all.
LIMIT = 1_600_000_000
SCALE = {
    "optimizer state": Shape(layers=12, width=1024, vocabulary=4096, sequence=16, batch=1),
    "parameters": Shape(layers=36, width=1024, vocabulary=4096, sequence=16, batch=1),
}


def config_of(stage: int, optimizer: str, parameters: str, folder: str, dtype: str) -> dict[str, Any]:
    """The JSON; at stage 3 every group is sharded and two groups may be gathered."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 4_200_000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 26_000_000}
        zero |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 13_000_000}
    for name, device in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if device != "none":
            zero[name] = {"device": device, "nvme_path": folder, "buffer_count": 3}
    if parameters == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def status(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name + ":")).split()[1]) * 1024


def live_bytes() -> int:
    """Bytes of all tensors alive, each storage once."""
    gc.collect()
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor) and found.device.type != "meta":
                storages[found.untyped_storage()._cdata] = found.untyped_storage().nbytes()
    return sum(storages.values())


def allocations(engine: Any, shape: Shape, step: int) -> int:
    """Bytes that one step of the engine asks the allocator for, without forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    engine.backward(engine(batch_of(shape, step, 0)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        engine.step()
    return sum(event.self_cpu_memory_usage for event in trace.key_averages() if event.self_cpu_memory_usage > 0)


def memory(case: dict[str, Any]) -> dict[str, Any]:
    """Train one case; bytes at rest against the prediction, and what moves afterwards."""
    import deepspeed
    from deepspeed.engine import offload_plan
    from deepspeed.zero.api.memory_estimate import DEVICE, HOST

    predictions: list[dict[str, float]] = []
    announce = offload_plan.Offload.announce

    def note(self: Any, groups: Any) -> dict[str, float]:
        predictions.append(announce(self, groups))
        return predictions[-1]

    offload_plan.Offload.announce = note  # type: ignore[method-assign]
    before_live, before_rss = live_bytes(), psutil.Process().memory_info().rss
    torch.manual_seed(0)
    shape = LARGE if case["large"] else SMALL
    config = config_of(case["stage"], case["optimizer"], case["parameters"], case["folder"], case["dtype"])
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=case["stage"] == 3):
        model = GPT(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    peaks: list[int] = []
    rss: list[int] = []
    for step in range(case["steps"]):
        engine.backward(engine(batch_of(shape, step, 0)))
        engine.step()
        rss.append(psutil.Process().memory_info().rss)
        peaks.append(engine.zero_report()["peak"])
    asked = allocations(engine, shape, case["steps"])
    predicted = predictions[0]
    pools = {
        id(tier.pool): tier.pool for g in engine._components.groups for tier in vars(g.tiers).values() if tier.pool
    }
    buffers = sum(pool.nbytes for pool in pools.values()) if case["optimizer"] == "nvme" else 0
    transit = sum(b.nbytes for free in engine._components.reducer.reduce_scatter._pool.values() for b in free)
    at_rest = predicted[DEVICE] + predicted[HOST]
    parameters = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return {
        **{name: case[name] for name in ("stage", "optimizer", "dtype", "steps")},
        "offload_param": case["parameters"],
        "parameters": parameters,
        "predicted": at_rest / parameters,
        "live": (live_bytes() - before_live - transit - buffers) / parameters,
        "grown": (rss[1] - before_rss) / parameters,
        "buffers": buffers / parameters,
        "transit": transit / parameters,
        "asked": asked,
        "drift": (rss[-1] - rss[1]) / parameters,
        "groups": max(peaks) / block,
        "breakdown": engine.state_bytes(),
    }


def scale(case: dict[str, Any]) -> dict[str, Any]:
    """Train one case under the limit; the peak, or the error."""
    import deepspeed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = SCALE[case["exceeds"]]
    deepspeed.init_distributed()
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    config = config_of(case["stage"], case["optimizer"], case["parameters"], case["folder"], case["dtype"])
    said = {name: case[name] for name in ("exceeds", "stage", "optimizer", "dtype")} | {"limit": LIMIT}
    said["offload_param"] = case["parameters"]
    losses = []
    try:
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=case["stage"] == 3):
            model = GPT(shape)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step in range(case["steps"]):
            loss = engine(batch_of(shape, step, 0))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    except (RuntimeError, MemoryError) as error:
        return {**said, "error": f"{type(error).__name__}: {error}"}
    parameters = sum(p.numel() for p in model.parameters())
    peak = status("VmHWM")
    return {**said, "losses": losses, "parameters": parameters, "peak": peak, "data": status("VmData")}


def run(what: str, case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in a process of its own."""
    # Blocks that torch frees go back to the system, as the limit counts what a process has mapped.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory(dir=case.pop("under", None)) as folder:
        message = json.dumps({**case, "folder": folder})
        command = [sys.executable, __file__, "--case", what, message]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if not lines:
        raise SystemExit(f"{case}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    print("\n".join(line for line in done.stdout.splitlines() + done.stderr.splitlines() if "predicted" in line))
    return json.loads(lines[0].removeprefix("result "))


def memory_table(under: str) -> None:
    """Measure, print, write."""
    cases = [
        {"stage": 2, "optimizer": "cpu", "parameters": "none", "dtype": "bf16", "steps": 4, "large": True},
        {"stage": 3, "optimizer": "cpu", "parameters": "cpu", "dtype": "bf16", "steps": 4, "large": True},
        {"stage": 3, "optimizer": "nvme", "parameters": "nvme", "dtype": "bf16", "steps": 4, "large": True},
        {"stage": 2, "optimizer": "cpu", "parameters": "none", "dtype": "bf16", "steps": STEPS, "large": False},
        {"stage": 3, "optimizer": "nvme", "parameters": "nvme", "dtype": "bf16", "steps": STEPS, "large": False},
    ]
    rows, records = [], []
    for case in cases:
        found = run("memory", {**case, "under": under})
        records.append(found)
        numbers = [f"{found[name]:.2f}" for name in ("predicted", "live", "grown", "transit", "buffers", "drift")]
        where = [f"{found['parameters'] / 1e6:.0f}", str(case["steps"]), str(case["stage"])]
        rest = [f"{found['groups']:.2f}", f"{found['asked'] / 1e6:.1f}"]
        rows.append([*where, case["optimizer"], case["parameters"], *numbers, *rest])
        print_table(HEAD, [rows[-1]])
    print_table(HEAD, rows)
    print(f"written: {write_json('offload_memory.json', records)}")


def scale_table(under: str) -> None:
    """Measure, print, write."""
    cases = [
        {"exceeds": "optimizer state", "stage": 2, "optimizer": "nvme", "parameters": "none", "dtype": "bf16"},
        {"exceeds": "optimizer state", "stage": 2, "optimizer": "none", "parameters": "none", "dtype": "bf16"},
        {"exceeds": "parameters", "stage": 3, "optimizer": "nvme", "parameters": "nvme", "dtype": "fp32"},
        {"exceeds": "parameters", "stage": 3, "optimizer": "none", "parameters": "none", "dtype": "fp32"},
    ]
    rows, records = [], []
    for case in cases:
        found = run("scale", {**case, "steps": 3, "under": under})
        records.append(found)
        if "error" in found:
            outcome = [found["error"][:100]]
        else:
            sizes = f"{found['parameters'] / 1e6:.0f} M parameters, peak RSS {found['peak'] / 1e9:.2f} GB"
            outcome = [f"{sizes}, losses {', '.join(f'{loss:.3f}' for loss in found['losses'])}"]
        rows.append([case["exceeds"], case["optimizer"], case["parameters"], *outcome])
    print(f"limit on data: {LIMIT / 1e9:.2f} GB")
    print_table(["exceeds the limit", "offload_optimizer", "offload_param", "outcome"], rows)
    print(f"written: {write_json('offload_scale.json', records)}")


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        print("result " + json.dumps({"memory": memory, "scale": scale}[sys.argv[2]](json.loads(sys.argv[3]))))
    else:
        {"memory": memory_table, "scale": scale_table}[sys.argv[1]](*(sys.argv[2:] or [tempfile.gettempdir()]))
