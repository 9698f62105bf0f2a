"""The timeline on two ranks: shares that sum to the step, and planted faults named by category, module and rank."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import NotAvailableError
from deepspeed.foundation.spans import recorder
from tests.harness.pool import WorkerPool
from tests.parallel import pipeline_layers
from tests.parallel.tiny import STAGES, loss_of, raises, start

Workers = Callable[[int], WorkerPool]
RANKS, SLEEP = 2, 0.1


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(SLEEP)
        return grad


class Slow(nn.Module):
    """A linear layer that may be slow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(width, width), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "forward":
            time.sleep(SLEEP)
        out = self.linear(x)
        return _Sleep.apply(out) if self.how == "backward" else out


class Deep(nn.Module):
    """Four blocks of Slow."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Slow(width), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Samples(torch.utils.data.Dataset):
    """Rows, given slowly."""

    def __init__(self, slow: bool, width: int = 24) -> None:
        self.slow, self.width = slow, width

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow:
            time.sleep(SLEEP / 2)
        return torch.randn(self.width, generator=torch.Generator().manual_seed(index))


@contextlib.contextmanager
def slow_collective(group: str) -> Iterator[None]:
    """What is sent of a group takes long to start."""
    from deepspeed.comm.collectives import collectives

    real = collectives.post

    def post(axis: Any, label: str, begin: Callable[[], Any]) -> Any:
        def slowly() -> Any:
            if label == f"reduce of {group}":
                time.sleep(SLEEP)
            return begin()

        return real(axis, label, slowly)

    collectives.post = post
    try:
        yield
    finally:
        collectives.post = real


@contextlib.contextmanager
def slow_disk(what: str) -> Iterator[None]:
    """Reads and writes of a tensor take long to end."""
    from deepspeed.storage import tensor_file

    real = tensor_file.Transfer.wait

    def wait(self: Any) -> None:
        if self._job is not None and what in self._extent.label:
            job, self._job = self._job, None

            class Slowly:
                def wait(self) -> Any:
                    time.sleep(SLEEP / 4)
                    return job.wait()

            self._job = Slowly()
        real(self)

    tensor_file.Transfer.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        tensor_file.Transfer.wait = real  # type: ignore[method-assign]


class SlowAdamW(torch.optim.AdamW):
    """Takes long, if asked to."""

    slow = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.slow:
            time.sleep(SLEEP)
        return super().step(closure)


PLANTS = ("forward", "backward", "collective", "loader", "disk", "update")


def planted(kind: str, block: int, whose: int | None, stage: int, folder: str) -> Any:
    """(category, module, rank) found, wanted; and the sum of shares over the step."""
    here = whose is None or whose == dist.get_rank()
    torch.manual_seed(0)
    model = Deep()
    if here and kind in PLANTS[:2]:
        model.layers[block][0].how = kind
    settings: dict[str, Any] = {"reduce_bucket_size": 600}  # a group for each block
    settings |= {"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if kind == "disk" else {}
    optimizer = SlowAdamW(model.parameters(), lr=1e-3)
    optimizer.slow = here and kind == "update"
    section = {"enabled": True, "start_step": 2, "steps": 3, "output_path": folder, "job_name": "run"}
    data = Samples(here and kind == "loader")
    engine = start(stage, model, optimizer, timeline=section, zero=settings, training_data=data)
    group = engine._components.groups[block % len(engine._components.groups)].name
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine)
        if here and kind == "collective":
            stack.enter_context(slow_collective(group))
        if here and kind == "disk":
            stack.enter_context(slow_disk(group))
        batches = iter(engine.training_dataloader)
        for _ in range(5):
            engine.backward(loss_of(engine, next(batches)))
            engine.step()
        assert not recorder.on
        timeline = engine.timeline
        if timeline is None:
            assert dist.get_rank()
            return None
    found = timeline.limit
    category = {"collective": "communication"}.get(kind, kind)
    module = {"forward": f"layers.{block}.0", "backward": f"layers.{block}.0", "collective": group}.get(kind, "")
    share = sum(timeline.shares().values()) / timeline.step_seconds
    return (found.category, found.module, found.rank), (category, module, whose), share, timeline.table()


def is_right(found: tuple[str, str, int | None], wanted: tuple[str, str, int | None]) -> bool:
    """The module of a disk transfer or an update is the group's, whose name says the tensor too."""
    return found[0] == wanted[0] and wanted[1] in found[1] and found[2] == wanted[2]


def stage_of(kind: str, stage: int) -> int:
    return max(stage, 1) if kind == "disk" else stage


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_fault_is_named(workers: Workers, tmp_path: Path, kind: str) -> None:
    number = PLANTS.index(kind)
    found, wanted, share, table = workers(RANKS).run(
        planted, kind, 1 + number % 3, number % 2, stage_of(kind, number % 4), str(tmp_path)
    )[0]
    assert is_right(found, wanted), (found, wanted, table)
    assert abs(share - 1) <= 0.01
    trace = json.loads(next(tmp_path.glob("run/timeline_step2.json")).read_text())["traceEvents"]
    assert {e["pid"] for e in trace} == {0, 1}
    nests(trace)
    assert next(tmp_path.glob("run/timeline_step2.txt")).read_text().strip() == table
    assert next(tmp_path.glob("run/timeline_step2.png")).stat().st_size > 5000


def nests(trace: list[dict[str, Any]]) -> None:
    """Slices of each track nest."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) > 4
    for spans in tracks.values():
        open_: list[float] = []
        for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-3
            open_.append(end)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_thirty_random_plants(workers: Workers, tmp_path: Path, seed: int) -> None:
    draw, wrong = random.Random(seed), []
    for number in range(30):
        kind, whose = draw.choice(PLANTS), draw.choice([0, 1, None])
        stage = stage_of(kind, draw.choice(STAGES))
        folder = tmp_path / str(number)
        folder.mkdir()
        found, wanted, share, table = workers(RANKS).run(
            planted, kind, draw.randrange(4), whose, stage, str(folder), timeout=60
        )[0]
        assert abs(share - 1) <= 0.01
        if not is_right(found, wanted):
            wrong.append((stage, found, wanted, table))
    print(f"{30 - len(wrong)} of 30 right")
    assert len(wrong) <= 2, "\n".join(map(str, wrong))


def staged(folder: str) -> Any:
    """What two stages of a pipeline recorded, and that what needs a window's forward is refused."""
    section = {"enabled": True, "start_step": 1, "steps": 2, "output_path": folder, "job_name": "run"}
    with pipeline_layers.start(1, 2, 4, settings={"timeline": section}) as engine:
        for step in range(3):
            engine.train_batch(pipeline_layers.feed(4 * step, 4, 0))
        timeline = engine.timeline
    with raises(NotAvailableError, "non_finite does not run the window of a pipeline again"):
        pipeline_layers.start(1, 2, 4, settings={"non_finite": {"enabled": True}})
    return None if timeline is None else (timeline.shares(), timeline.step_seconds, timeline.table())


def test_stages_of_a_pipeline_are_recorded(workers: Workers, tmp_path: Path) -> None:
    shares, step, table = workers(RANKS).run(staged, str(tmp_path))[0]
    assert sum(shares.values()) == pytest.approx(step, rel=0.01)
    assert all(shares[name] > 0 for name in ("forward", "backward", "update")), table
    assert shares["communication"] + shares["waiting"] > 0
