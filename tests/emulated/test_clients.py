"""Transformers, Accelerate and Lightning on the emulated device: the losses they have on CPU ranks, and no report."""

from __future__ import annotations

import pytest

from tests.clients import accelerate_runs, lightning_runs, transformers_runs
from tests.emulated import client_runs
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()

CLIENTS = {
    "accelerate": (accelerate_runs.train, client_runs.accelerate),
    "transformers": (transformers_runs.train, client_runs.transformers),
    "lightning": (lightning_runs.train, client_runs.lightning),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_trains_as_on_the_cpu(workers, emulated, client, stage):
    on_cpu, on_device = CLIENTS[client]
    theirs = workers(2).run(on_cpu, stage, "fp32", timeout=3 * LIMIT)
    for (ours, reports, counters), other in zip(
        emulated(2).run(client_runs.seen, on_device, stage, timeout=3 * LIMIT), theirs, strict=True
    ):
        assert reports == [] and counters["launch.nccl"]
        assert ours.updates == other.updates and ours.losses == pytest.approx(other.losses, rel=1e-5)
        assert ours.norms == pytest.approx(other.norms, rel=1e-4)
