"""Failures of a training run: overflow, unequal loaders, dead ranks, lone reads, models that differ between ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness.pool import PATIENCE, WORKER_IMPORTS
from tests.parallel.tiny import STAGES, WIDTH, adamw, expect_close, loss_of, masters, micro_step, said, start, tiny
from tests.parity.reference import Reference
from tests.unit.comm.ranks import run_ranks

ROOT = Path(__file__).parents[2]
TIMEOUT = 3.0  # seconds of one collective
MARGIN = 5.0  # seconds after it within which every rank has ended or told why


# -- overflow ---------------------------------------------------------------------------------------------------------


def planted_inf(stage: int, precision: str, guilty: int) -> list[str]:
    with start(stage, precision=precision, optimizer=adamw) as engine, said() as lines:
        before = masters(engine)
        weight = engine.module.layers[1][0].weight
        if dist.get_rank() == guilty:
            handle = weight.register_hook(lambda grad: grad * float("inf"))
        micro_step(engine, 0)
        assert engine.skipped_steps == 1 and not engine.was_step_applied()
        expect_close(masters(engine), before, 0.0)
        if dist.get_rank() == guilty:
            handle.remove()
        for step in range(1, 4):
            micro_step(engine, step)
        assert engine.skipped_steps == 1 and engine.was_step_applied()
        assert all(value.isfinite().all() for value in masters(engine).values())
        return list(lines)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_skipped_step_names_parameter_module_and_rank(workers: Any, precision: str, stage: int) -> None:
    for guilty in (0, 1):
        told = workers(2).run(planted_inf, stage, precision, guilty)[0]
        line = next(line for line in told if "skipped" in line)
        assert all(word in line for word in ("'layers.1.0.weight'", "module 'layers.1.0'", f"rank {guilty}")), line


# -- loaders of unequal length ----------------------------------------------------------------------------------------

LENGTHS = (4, 4, 8, 4)


def batches(rank: int) -> list[torch.Tensor]:
    """The loader of a rank: its last batch is smaller than the others."""
    make = torch.Generator().manual_seed(rank)
    sizes = [3] * (LENGTHS[rank] - 1) + [1 + rank % 2]
    return [torch.randn(size, WIDTH, generator=make) for size in sizes]


def what_ranks_read(policy: str) -> list[list[tuple[torch.Tensor, int]]]:
    """By step and rank: the batch, and how many samples it counts for."""
    steps = min(LENGTHS) if policy == "drop" else max(LENGTHS)
    made: list[list[tuple[torch.Tensor, int]]] = []
    for step in range(steps):
        made.append([])
        for rank in range(len(LENGTHS)):
            own = batches(rank)
            padded = policy == "pad" and step >= len(own)
            batch = own[-1] if padded else own[step % len(own)]
            made[-1].append((batch, 0 if padded else len(batch)))
    return made


def looped(stage: int, accumulation: int) -> None:
    for policy in ("drop", "pad", "cycle"):
        twin = Reference(tiny(), lambda p: torch.optim.SGD(p, lr=0.1), len(LENGTHS))
        twin.accumulation = 1
        read = what_ranks_read(policy)
        for first in range(0, len(read), accumulation):
            window = read[first : first + accumulation]
            count = sum(samples for step in window for _, samples in step)
            for step in window:
                for rank, (batch, samples) in enumerate(step):
                    # The reference takes the mean over ranks; what counts is the mean over samples.
                    weighed = loss_of(twin.copies[rank], batch) * samples / count * len(LENGTHS)
                    twin.backward(rank, weighed)
            twin.step()
        with start(stage, accumulation=accumulation) as engine:
            steps = 0
            for batch in engine.loop(batches(dist.get_rank()), policy=policy):
                engine.backward(loss_of(engine, batch))
                engine.step()
                steps += 1
            assert steps == len(read), (policy, steps)
            expect_close(masters(engine), twin.parameters(), 1e-6, at=(policy, stage, accumulation))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_loops_end_and_weigh_real_samples(workers: Any, stage: int) -> None:
    workers(4).run(looped, stage, 3 if stage % 2 else 1, timeout=60)


# -- ranks that die or diverge ----------------------------------------------------------------------------------------

TRAIN = """
    import os, signal, time, torch, deepspeed
    from torch import nn
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    zero = {"stage": STAGE, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero})
    for step in range(10_000):
        if step == 5 and rank == 1:
            print("killed at", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()
"""


@pytest.mark.slow  # what it joins is in `make test`: a killed rank in test_comm.py and in test_launcher.py
@pytest.mark.parametrize("stage", [0, 3])
def test_a_killed_rank_ends_the_run_under_the_launcher(tmp_path: Path, stage: int) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN).replace("STAGE", str(stage)))
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    added = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "DEEPSPEED_TIMEOUT": str(TIMEOUT / 60)}
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "train.py"],
        cwd=tmp_path, env=inherited | added, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    ended = time.time()
    (killed,) = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if "killed at" in line]
    assert done.returncode != 0
    assert ended - killed < TIMEOUT + MARGIN, (ended - killed, done.stderr)
    assert "SIGKILL" in done.stderr and "rank 1" in done.stderr, done.stderr
    left = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not left, left


MODEL = """
import deepspeed
from torch import nn
def engine_of(width):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)])
    zero = {"stage": STAGE, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
dist.init_distributed(verbose=False)
rank = dist.get_rank()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_with_different_models_end_with_a_report(stage: int) -> None:
    snippet = MODEL.replace("STAGE", str(stage)) + textwrap.dedent("""
        print(time.monotonic(), flush=True)
        engine = engine_of(8 + 8 * rank)
        engine.backward(engine(torch.randn(2, 8 + 8 * rank)).sum())
        engine.step()
    """)
    ends = run_ranks(snippet, 2, limit=60, DEEPSPEED_TIMEOUT=str(TIMEOUT / 60))
    assert all(end.code for end in ends), ends
    assert any("The last collective of each rank:" in end.err or "differ" in end.err for end in ends), ends
    assert all(end.last_word - float(end.out) < 2 * TIMEOUT + MARGIN for end in ends), ends


@pytest.mark.slow
def test_a_rank_that_dies_among_slices_ends_the_others_by_layer_and_axis() -> None:
    snippet = textwrap.dedent(f"""
        import deepspeed
        from tests.parallel.tensor_runs import config_of, loss_of, model_of
        dist.init_distributed(verbose=False)
        rank, model = dist.get_rank(), model_of("Llama")
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={{
            **config_of(1, 2), "optimizer": {{"type": "AdamW"}}}})[0]
        def die(*_):
            print(time.monotonic(), flush=True)
            if rank == 1:
                os._exit(9)
        model.model.layers[1].mlp.down_proj.register_forward_pre_hook(die)
        loss_of(engine, 0, 0)
        time.sleep({TIMEOUT + MARGIN})
    """)
    ends = run_ranks(snippet, 2, limit=90, DEEPSPEED_TIMEOUT=str(TIMEOUT / 60))
    assert ends[1].code == 9 and ends[0].code, ends
    assert "sum of model.layers.1.mlp.down_proj" in ends[0].err and "rank 1" in ends[0].err, ends[0].err
    assert ends[0].last_word - float(ends[0].out.split()[-1]) < TIMEOUT + MARGIN


SEQUENCE = """
import deepspeed
from tests.parallel.sequence_runs import batch_of, config_of
from tests.parallel.tensor_runs import model_of
model = model_of("Llama")
dist.init_distributed(verbose=False)
rank = dist.get_rank()
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    **config_of({"sp": 2}, 1), "optimizer": {"type": "AdamW"}})[0]
for step in range(11):
    engine.backward(engine(**batch_of(step, 0)).loss)
    engine.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sp_end", ["dies", "shape"])
def test_a_rank_that_fails_in_a_sequence_ends_the_others_by_layer_and_axis(sp_end: str) -> None:
    """One dies in a layer; or is given a longer sequence, after batches are compared."""
    limit = TIMEOUT * PATIENCE
    snippet = f"sp_end = {sp_end!r}\n{SEQUENCE}" + textwrap.dedent(f"""
        def die(*_):
            print(time.monotonic(), flush=True)
            if rank == 1:
                os._exit(9)
        if sp_end == "dies":
            model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(die)
        print(time.monotonic(), flush=True)
        engine(**batch_of(11, 0, 12 if sp_end == "dies" or rank == 0 else 16))
        time.sleep({limit + MARGIN})
    """)
    ends = run_ranks(snippet, 2, limit=90 * PATIENCE, DEEPSPEED_TIMEOUT=str(limit / 60))
    assert all(end.code for end in ends), ends
    said = [ends[0]] if sp_end == "dies" else ends
    for end in said:
        words = ["model.layers.1.self_attn", "sp"] if sp_end == "dies" else ["positions of a sequence", "sp"]
        assert all(word in end.err for word in [*words, "rank 1"]), end.err
        assert end.last_word - float(end.out.split()[-1]) < limit + MARGIN


SLOWER = """
engine = engine_of(8)
with torch.no_grad():
    for _ in range(1 if rank == 0 else 4):
        engine(torch.ones(2, 8))
        time.sleep(0.2 * rank)
if ENDS == "ends the groups":
    torch.distributed.destroy_process_group()
if ENDS == "waits" and rank == 1:
    print(time.monotonic(), flush=True)
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("ends", "device"),
    [
        ("exits", "none"),
        ("ends the groups", "cpu"),
        pytest.param("exits", "cpu", marks=pytest.mark.slow),
        pytest.param("ends the groups", "none", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_serves_those_that_still_gather(ends: str, device: str) -> None:
    model = MODEL.replace("STAGE", f'3, "offload_param": {{"device": "{device}"}}')
    snippet = f"ENDS = {ends!r}\n{model}{SLOWER}"
    done = run_ranks(snippet, 2, limit=60 * PATIENCE, imported=WORKER_IMPORTS)
    assert [end.code for end in done] == [0, 0], done
    assert done[1].ended - done[0].ended < MARGIN * PATIENCE, done


def test_a_rank_that_ends_does_not_keep_one_in_a_collective_waiting() -> None:
    snippet = f"ENDS = 'waits'\n{MODEL.replace('STAGE', '3')}{SLOWER}"
    done = run_ranks(snippet, 2, limit=60 * PATIENCE, imported=WORKER_IMPORTS)
    assert done[0].code == 0 and done[1].code, done
    assert "rank 0: has ended" in done[1].err, done[1].err
    assert done[1].last_word - float(done[1].out) < MARGIN * PATIENCE
