"""Two hosts for the whole session, and runs of the `deepspeed` command on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import slurm
from tests.hosts.cluster import Cluster, cluster
from tests.hosts.runs import Runs


@pytest.fixture(autouse=True)
def _police() -> None:
    """Hosts are this process's children and may be started anew; `Runs.left` looks for what runs leave on them."""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def slurm_variables(two_hosts: Cluster) -> dict[str, str]:
    return slurm.start(two_hosts)


@pytest.fixture
def runs(two_hosts: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Runs from host h0, in a folder that all hosts see; nothing of them is left at the end."""
    made = Runs(two_hosts, tmp_path)
    if "slurm" in getattr(request.node, "callspec", request.node).__dict__.get("params", {}).values():
        made.environment.update(request.getfixturevalue("slurm_variables"))
    yield made
    made.close()
