"""The variables that launchers, schedulers and platforms leave, for two hosts with two ranks each: one rank table."""

from __future__ import annotations

import json
import os
import socket

import pytest

from deepspeed.comm.process_groups.launch_env import World, discover
from deepspeed.errors import ArgumentError
from tests.unit.comm.ranks import LAUNCHERS

RANKS, HOSTS = range(4), ("h0", "h1")


def torchrun(rank):
    return {
        "RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2,
        "GROUP_WORLD_SIZE": 2, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": 4, "ROLE_NAME": "default", "MASTER_ADDR": "h0",
        "MASTER_PORT": 29500, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def deepspeed(rank):
    return {
        "RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_SIZE": 2, "CROSS_RANK": rank // 2,
        "CROSS_SIZE": 2, "MASTER_ADDR": "h0", "MASTER_PORT": 29500, "DS_JOB_ID": "a1",
    }  # fmt: skip


def srun(rank, nodes="h[0-1]"):
    return {
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2, "SLURM_NTASKS": 4,
        "SLURM_NPROCS": 4, "SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_ID": 0,
        "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": 17,
    }  # fmt: skip


def srun_step_of_a_larger_job(rank):
    return {**srun(rank), "SLURM_JOB_NODELIST": "g[0-9],h[0-1]", "SLURM_NTASKS": 24}


def srun_one_gpu_per_task(rank):
    return {**srun(rank), "SLURM_GPUS_PER_TASK": 1, "CUDA_VISIBLE_DEVICES": 0}


def srun_by_torchrun(rank):
    return {**torchrun(rank), **srun(rank // 2), "SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": 0}


def batch_script_by_torchrun(rank):
    return {**torchrun(rank), "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_NTASKS": 2}


def open_mpi(rank):
    return {
        "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_RANK": rank % 2,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMPI_COMM_WORLD_NODE_RANK": rank % 2, "OMPI_UNIVERSE_SIZE": 4,
        "PMIX_RANK": rank, "PMIX_NAMESPACE": "1234", "MASTER_ADDR": "h0",
    }  # fmt: skip


def open_mpi_that_also_sets_rank(rank):
    return {**open_mpi(rank), "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2}


def open_mpi_within_slurm(rank):
    batch = {
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_NODEID": 0,
        "SLURM_NTASKS": 4,
        "SLURM_JOB_NODELIST": "h[0-1]",
    }
    return {**open_mpi(rank), **batch}


def azure_ml_with_mpi(rank):
    found = open_mpi(rank)
    del found["MASTER_ADDR"]
    return {**found, "AZUREML_EXPERIMENT_ID": "x", "AZ_BATCH_MASTER_NODE": "h0:29500"}


def azure_ml_with_pytorch(rank):
    return {**deepspeed(rank), "NODE_RANK": rank // 2, "AZUREML_EXPERIMENT_ID": "x", "DS_JOB_ID": ""}


def hydra(rank):
    return {
        "PMI_RANK": rank, "PMI_SIZE": 4, "MPI_LOCALNRANKS": 2, "MPI_LOCALRANKID": rank % 2, "MASTER_ADDR": "h0",
    }  # fmt: skip


def mvapich(rank):
    place = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
    return {**{f"MV2_COMM_WORLD_{name}": value for name, value in place.items()}, "MASTER_ADDR": "h0"}


def pals(rank):
    place = {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank % 2, "PMI_RANK": rank, "PMI_SIZE": 4}
    return {**place, "MASTER_ADDR": "h0"}


def jsrun(rank):
    place = {"JSM_NAMESPACE_RANK": rank, "JSM_NAMESPACE_SIZE": 4, "JSM_NAMESPACE_LOCAL_RANK": rank % 2}
    return {**place, "LSB_MCPU_HOSTS": "batch1 1 h0 42 h1 42", "LSB_JOBID": 9}


def sagemaker_with_mpi(rank):
    found = open_mpi(rank)
    del found["MASTER_ADDR"]
    hosts = {"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": HOSTS[rank // 2], "SM_NUM_GPUS": 0}
    return {**found, **hosts, "SM_TRAINING_ENV": "{}"}


def by_hand(rank):
    return {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "MASTER_ADDR": "h0", "MASTER_PORT": 29500}


PLATFORMS = [
    torchrun, deepspeed, srun, srun_step_of_a_larger_job, srun_one_gpu_per_task, srun_by_torchrun,
    batch_script_by_torchrun, open_mpi, open_mpi_that_also_sets_rank, open_mpi_within_slurm, azure_ml_with_mpi,
    azure_ml_with_pytorch, hydra, mvapich, pals, jsrun, sagemaker_with_mpi, by_hand,
]  # fmt: skip


@pytest.fixture
def variables(monkeypatch):
    """Sets exactly these launcher variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "CUDA_VISIBLE"))}
    monkeypatch.setattr(os, "environ", kept)
    return lambda values: os.environ.update({name: str(value) for name, value in values.items() if value != ""})


def found(root="/"):
    world = discover(-1, -1, 29500, True, str(root))
    return (world.rank, world.size, world.local_rank, world.meeting_address(os.environ), world.port)


@pytest.mark.drawn(24)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda made: made.__name__)
def test_the_same_rank_table(variables, platform, rank):
    variables(platform(rank))
    assert found() == (rank, 4, rank % 2, "h0", 29500)


# -- platforms that start one process per host -------------------------------------------------------------------------


def sagemaker_file(root, hosts=HOSTS, current="h1"):
    folder = root / "opt/ml/input/config"
    folder.mkdir(parents=True, exist_ok=True)
    config = {"current_host": current, "hosts": list(hosts), "network_interface_name": "eth0"}
    (folder / "resourceconfig.json").write_text(json.dumps(config))


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("kind", ["file", "toolkit", "both", "pytorchjob", "indexed"])
def test_one_process_per_host(variables, tmp_path, monkeypatch, kind, host):
    if kind in ("file", "both"):
        sagemaker_file(tmp_path, reversed(HOSTS), HOSTS[host])
    if kind in ("toolkit", "both"):
        variables({"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": HOSTS[host], "SM_TRAINING_ENV": "{}"})
    if kind == "pytorchjob":
        pods = {"PET_NNODES": 2, "PET_NODE_RANK": host, "PET_NPROC_PER_NODE": 1, "PET_MASTER_ADDR": "h0"}
        variables({**pods, "RANK": host, "WORLD_SIZE": 2, "MASTER_ADDR": "h0", "MASTER_PORT": 29500})
    if kind == "indexed":
        monkeypatch.setattr(socket, "getfqdn", lambda: f"h-{host}.svc.cluster")
        variables({"JOB_COMPLETION_INDEX": host, "WORLD_SIZE": 2, "RANK": host})
        assert found() == (host, 2, 0, "h-0.svc.cluster", 29500)
        return
    assert found(tmp_path) == (host, 2, 0, "h0", 29500)


def test_an_index_alone_is_a_rank(variables, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "job-1.svc")
    variables({"JOB_COMPLETION_INDEX": 1, "WORLD_SIZE": 2})
    assert found() == (1, 2, 0, "job-0.svc", 29500)


def test_ten_containers_are_in_their_natural_order(variables, tmp_path):
    sagemaker_file(tmp_path, [f"algo-{n}" for n in range(1, 12)], "algo-10")
    assert found(tmp_path)[:2] == (9, 11)


def test_nothing_is_a_world_of_one(variables, tmp_path):
    variables({})
    assert discover(-1, -1, 29500, True, str(tmp_path)) == World()


# -- contradictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**open_mpi(1), "RANK": 2, "WORLD_SIZE": 4}, ["RANK=2", "OMPI_COMM_WORLD_RANK=1"]),
        ({**open_mpi(1), "RANK": 1, "WORLD_SIZE": 2}, ["WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=4"]),
        ({**open_mpi(1), "RANK": 0, "WORLD_SIZE": 1}, ["WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=4"]),
        ({**srun(3), "RANK": 0, "WORLD_SIZE": 4}, ["RANK=0", "SLURM_PROCID=3"]),
        ({**srun(0), "RANK": 0, "WORLD_SIZE": 8}, ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"]),
        ({**hydra(2), "RANK": 1, "WORLD_SIZE": 4}, ["RANK=1", "PMI_RANK=2"]),
        ({**mvapich(2), "RANK": 1, "WORLD_SIZE": 4}, ["RANK=1", "MV2_COMM_WORLD_RANK=2"]),
        ({**jsrun(2), "RANK": 1, "WORLD_SIZE": 4}, ["RANK=1", "JSM_NAMESPACE_RANK=2"]),
        ({**open_mpi(1), **srun(2)}, ["OMPI_COMM_WORLD_RANK=1", "SLURM_PROCID=2"]),
        ({"PET_NNODES": 2, "PET_NODE_RANK": 1, "RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "a"},
         ["RANK=0", "PET_NODE_RANK=1"]),
        ({"JOB_COMPLETION_INDEX": 1, "WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "a"},
         ["RANK=0", "JOB_COMPLETION_INDEX=1"]),
        ({"JOB_COMPLETION_INDEX": 1}, ["JOB_COMPLETION_INDEX=1", "WORLD_SIZE is not set"]),
        ({"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_NODELIST": "h[0-1]"},
         ["SLURM_NTASKS=4", "SLURM_STEP_ID", "srun"]),
        ({"RANK": 1, "WORLD_SIZE": 2}, ["MASTER_ADDR is not set", "WORLD_SIZE=2"]),
        ({"PMI_RANK": 1, "PMI_SIZE": 2, "MPI_LOCALNRANKS": 1}, ["MASTER_ADDR is not set", "hydra"]),
        ({**{k: v for k, v in open_mpi(1).items() if k != "MASTER_ADDR"}}, ["MASTER_ADDR is not set", "Open MPI"]),
        ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"}, ["SM_CURRENT_HOST='c'", "SM_HOSTS"]),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_by_name(variables, values, words):
    variables(values)
    with pytest.raises(ArgumentError) as error:
        found()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_sagemakers_variables_and_its_file_must_agree(variables, tmp_path):
    sagemaker_file(tmp_path, ["h0", "h1", "h2"])
    variables({"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": "h1"})
    with pytest.raises(ArgumentError, match=r"SM_HOSTS=.* contradicts the hosts of /opt/ml"):
        found(tmp_path)
