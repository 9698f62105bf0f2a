"""Where a process finds its rank: every launcher's variables, and what contradicts itself."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from deepspeed.comm.process_groups import init
from deepspeed.comm.process_groups.init import choose_backend, default_timeout
from deepspeed.comm.process_groups.launch_env import World, discover
from deepspeed.errors import ArgumentError, NotAvailableError
from tests.unit.comm.ranks import LAUNCHERS


@pytest.fixture
def variables(monkeypatch):
    """Sets exactly these launcher variables; what `discover` writes is undone."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)})
    return lambda **values: os.environ.update({name: str(value) for name, value in values.items()})


def found(rank=-1, size=-1, port=29500, look_further=True):
    return discover(rank, size, port, look_further)


def test_without_variables_a_world_of_one(variables):
    variables()
    assert found() == World()


def test_torchrun(variables):
    variables(RANK=1, WORLD_SIZE=4, LOCAL_RANK=0, MASTER_ADDR="head", MASTER_PORT=1234)
    assert found() == World(1, 4, 0, "head", 1234, "RANK and WORLD_SIZE")


def test_open_mpi_sets_the_variables_other_code_reads(variables):
    variables(OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK=1)
    assert found(port=7000) == World(1, 2, 1, "127.0.0.1", 7000, "Open MPI")
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("1", "2", "1")


def test_azure_names_its_master(variables):
    variables(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2, AZ_BATCH_MASTER_NODE="10.0.0.4:6105")
    assert (found().address, found().port) == ("10.0.0.4", 6105)


def test_sagemaker(variables):
    variables(SM_TRAINING_ENV="{}", SM_HOSTS='["algo-1", "algo-2"]', SM_CURRENT_HOST="algo-2")
    variables(OMPI_COMM_WORLD_RANK=8, OMPI_COMM_WORLD_SIZE=16, OMPI_COMM_WORLD_LOCAL_RANK=0)
    assert found() == World(8, 16, 0, "algo-1", 29500, "SageMaker")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-007,12]", "gpu003"), ("n1,n2", "n1"), ("solo", "solo"), ("rack-1-n[7]", "rack-1-n7")],
)
def test_slurm_begins_at_the_first_node(variables, nodes, first):
    variables(SLURM_PROCID=3, SLURM_NTASKS=8, SLURM_LOCALID=1, SLURM_JOB_NODELIST=nodes)
    assert found() == World(3, 8, 1, first, 29500, "SLURM")


def test_what_the_user_sets_outranks_what_is_derived(variables):
    variables(
        SLURM_PROCID=0,
        SLURM_NTASKS=2,
        SLURM_STEP_ID=0,
        SLURM_JOB_NODELIST="n1,n2",
        MASTER_ADDR="10.1.1.1",
        MASTER_PORT=9,
    )
    assert (found().address, found().port) == ("10.1.1.1", 9)


def test_without_discovery_only_rank_and_world_size_count(variables):
    variables(SLURM_PROCID=1, SLURM_NTASKS=2)
    assert found(look_further=False) == World()


def test_the_arguments_alone_are_enough(variables):
    variables()
    assert (found(1, 2).rank, found(1, 2).size) == (1, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'", "whole number"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK='-1'", "whole number"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2", "0 to size - 1"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["RANK=0", "WORLD_SIZE=0"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "65535"]),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, ["RANK='x'", "SLURM"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["RANK is not set", "Open MPI"]),
    ],
)
def test_bad_variables_are_named(variables, values, words):
    variables(**values)
    with pytest.raises(ArgumentError) as error:
        found()
    assert [word for word in words if word not in str(error.value)] == []


def test_arguments_that_contradict_the_environment(variables):
    variables(RANK=0, WORLD_SIZE=2)
    with pytest.raises(ArgumentError, match=r"world_size=4\) contradicts the environment .*rank 0 of 2"):
        found(-1, 4)


@pytest.mark.parametrize(("minutes", "seconds"), [("0.5", 30.0), ("2", 120.0), ("", 600.0)])
def test_the_timeout_is_in_minutes(variables, minutes, seconds):
    variables(DEEPSPEED_TIMEOUT=minutes)
    assert default_timeout() == timedelta(seconds=seconds)


@pytest.mark.parametrize("minutes", ["soon", "0", "-1", "nan", "1e99"])
def test_a_timeout_that_is_none(variables, minutes):
    variables(DEEPSPEED_TIMEOUT=minutes)
    with pytest.raises(ArgumentError, match="DEEPSPEED_TIMEOUT"):
        default_timeout()


class FakeAccelerator:
    def __init__(self, name, backend):
        self.device_name, self.communication_backend_name = (lambda: name), (lambda: backend)


def test_nccl_without_cuda_is_gloo(monkeypatch):
    monkeypatch.setattr(init, "get_accelerator", lambda: FakeAccelerator("cpu", "gloo"))
    assert [choose_backend(asked) for asked in (None, "nccl", "cpu:gloo,cuda:nccl", "gloo")] == ["gloo"] * 4


def test_cuda_has_a_backend_for_both_kinds_of_tensors(monkeypatch):
    monkeypatch.setattr(init, "get_accelerator", lambda: FakeAccelerator("cuda", "nccl"))
    monkeypatch.setattr(init.dist, "is_backend_available", lambda name: name in ("gloo", "nccl"))
    assert choose_backend(None) == "cpu:gloo,cuda:nccl"
    assert choose_backend("NCCL") == "nccl"


def test_a_backend_that_is_not_there():
    with pytest.raises(NotAvailableError, match="'carrier-pigeon'.*gloo"):
        choose_backend("carrier-pigeon")
