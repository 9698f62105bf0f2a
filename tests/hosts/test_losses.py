"""The main example on several hosts by every starter: the losses of one host, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pool import PATIENCE
from tests.hosts import slurm
from tests.hosts.cluster import ROOT, Cluster, cluster
from tests.hosts.runs import STARTERS, Runs, need_hosts

need_hosts()

EXAMPLE = ROOT / "examples/bytes_lm"
STEPS, BATCH, SEQUENCE = 60, 12, 32
# The example itself, in the folder of the run; instead of a picture of the losses it leaves the losses.
RUN = f"""
    import json, sys
    sys.path.insert(0, {str(EXAMPLE)!r})
    import train
    train.draw_curve = lambda path, losses, *_: open("losses.json", "w").write(json.dumps([x.hex() for x in losses]))
    train.main()
"""
TINY = [
    "--deepspeed_config=ds.json", "--width=24", "--layers=2", "--heads=2", f"--sequence={SEQUENCE}",
    f"--train_bytes={STEPS * BATCH * SEQUENCE}", "--heldout_bytes=768", "--sample_bytes=1",
]  # fmt: skip


def losses_of(runs: Runs, stage: int, *flags: str, by: str) -> list[str]:
    """The losses of the example, each as the text of its bits."""
    config = json.loads((EXAMPLE / "ds_config.json").read_text())
    config.update(train_batch_size=BATCH, zero_optimization={"stage": stage})
    (runs.folder / "ds.json").write_text(json.dumps(config))
    (runs.folder / "losses.json").unlink(missing_ok=True)
    done = runs.to_end(RUN, *flags, args=TINY, by=by, limit=300 * PATIENCE)
    assert done.code == 0, done.err
    losses = json.loads((runs.folder / "losses.json").read_text())
    assert len(losses) == STEPS
    return losses


@pytest.fixture(scope="module", params=[2, 3])
def some_hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, dict[str, str]]]:
    with cluster(request.param) as made:
        yield made, slurm.start(made)


@pytest.fixture(scope="module")
def one_host(some_hosts: tuple[Cluster, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The losses of as many ranks on one host, at stages 2 and 3."""
    hosts, _ = some_hosts
    runs = Runs(hosts, tmp_path_factory.mktemp("one"))
    runs.hostfile({"h0": 2 * len(hosts.names)})
    found = [losses_of(runs, stage, by="ssh") for stage in (2, 3)]
    runs.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("by", STARTERS)
def test_the_losses_are_those_of_one_host(
    some_hosts: tuple[Cluster, dict[str, str]], one_host: list[list[str]], tmp_path: Path, by: str
) -> None:
    hosts, variables = some_hosts
    runs = Runs(hosts, tmp_path)
    runs.environment.update(variables if by == "slurm" else {})
    try:
        assert losses_of(runs, 2, by=by) == one_host[0]
        if by == "ssh":
            assert losses_of(runs, 3, by=by) == one_host[1]
        assert float.fromhex(one_host[0][-1]) < float.fromhex(one_host[0][0])
    finally:
        runs.close()
