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


def _starter(request: pytest.FixtureRequest) -> str:
    return getattr(request.node, "callspec", None) and request.node.callspec.params.get("by", "") or ""


@pytest.fixture
def runs(two_hosts: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Runs from host h0, in a folder that all hosts see; nothing of them is left at the end."""
    made = Runs(two_hosts, tmp_path)
    if _starter(request) == "slurm":
        variables = request.getfixturevalue("slurm_variables")
        slurm.settle(two_hosts, variables)
        made.environment.update(variables)
    yield made
    made.close()


@pytest.fixture
def fragile(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The same on two hosts of its own, one of which may be lost."""
    with cluster(2) as own:
        made = Runs(own, tmp_path)
        if _starter(request) == "slurm":
            made.environment.update(slurm.start(own))
        yield made
        made.close()
