"""Hosts without a hostfile: what SLURM, PBS, SageMaker, PyTorchJob or an MPI operator says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher.hosts import DLTS_HOSTFILE, find, nodes_of_slurm

SALLOC = {"SLURM_JOB_NODELIST": "gpu[08-09],login1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
STEP = {**SALLOC, "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
PODS = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-master-0"}
TOOLKIT = {"SM_HOSTS": '["algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-10", "SM_NUM_GPUS": "4"}


def found(environment, root, num_gpus=2):
    return find(DLTS_HOSTFILE, num_gpus, {"DS_ACCELERATOR": "cpu", **environment}, str(root))


@pytest.mark.parametrize(
    ("environment", "hosts", "ranks", "own", "launcher", "address"),
    [
        (SALLOC, ["gpu08", "gpu09", "login1"], 2, None, "slurm", ""),
        ({**SALLOC, "SLURM_GPUS_ON_NODE": "8"}, ["gpu08", "gpu09", "login1"], 8, None, "slurm", ""),
        (STEP, ["gpu08", "gpu09"], 2, 1, "ssh", "gpu08"),
        (PODS, ["pod0", "pod1", "pod2"], 2, 2, "ssh", "job-master-0"),
        (TOOLKIT, ["algo-2", "algo-10"], 4, 1, "ssh", "algo-2"),
        ({}, ["localhost"], 2, None, "ssh", ""),
        ({"SLURM_JOB_NODELIST": "gpu08"}, ["localhost"], 2, None, "ssh", ""),
    ],
)
def test_the_scheduler_names_the_hosts(tmp_path: Path, environment, hosts, ranks, own, launcher, address):
    pool = found(environment, tmp_path)
    assert list(pool.hosts) == hosts
    assert all(slots == list(range(ranks)) for slots in pool.hosts.values())
    assert (pool.own, pool.launcher, pool.address) == (own, launcher, address)


def test_a_pbs_job_names_a_host_once_per_slot(tmp_path: Path):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    pool = found({"PBS_NODEFILE": str(tmp_path / "nodes")}, tmp_path)
    assert (pool.source, pool.hosts, pool.own) == ("PBS", {"n1": [0, 1], "n2": [0, 1]}, None)


def test_a_pbs_job_may_name_hosts_by_ranges(tmp_path: Path):
    (tmp_path / "nodes").write_text("n[1-2]\nn3\n")
    assert list(found({"PBS_NODEFILE": str(tmp_path / "nodes")}, tmp_path).hosts) == ["n1", "n2", "n3"]
    (tmp_path / "nodes").write_text("n[2-1]\n")
    with pytest.raises(LaunchError, match="'2-1' in 'n\\[2-1\\]' is not a range"):
        found({"PBS_NODEFILE": str(tmp_path / "nodes")}, tmp_path)


def test_an_mpi_operator_writes_a_hostfile(tmp_path: Path):
    (tmp_path / "etc/mpi").mkdir(parents=True)
    (tmp_path / "etc/mpi/hostfile").write_text("worker-0 slots=1\nworker-1 slots=3\n")
    assert found({}, tmp_path).hosts == {"worker-0": [0], "worker-1": [0, 1, 2]}


def test_a_sagemaker_container_has_only_the_file(tmp_path: Path):
    folder = tmp_path / "opt/ml/input/config"
    folder.mkdir(parents=True)
    told = {"hosts": ["algo-2", "algo-1"], "current_host": "algo-2"}
    (folder / "resourceconfig.json").write_text(json.dumps(told))
    pool = found({}, tmp_path)
    assert (list(pool.hosts), pool.own, pool.address) == (["algo-1", "algo-2"], 1, "algo-1")
    with pytest.raises(LaunchError, match="SM_CURRENT_HOST=algo-1 contradicts"):
        found({"SM_CURRENT_HOST": "algo-1"}, tmp_path)
    with pytest.raises(LaunchError, match="SageMaker: SM_HOSTS is not valid JSON"):
        found({"SM_HOSTS": "algo-1,algo-2"}, tmp_path)


def test_a_hostfile_outranks_the_scheduler(tmp_path: Path):
    (tmp_path / "hostfile").write_text("a slots=1\n")
    assert find(str(tmp_path / "hostfile"), 2, SALLOC, str(tmp_path)).hosts == {"a": [0]}


def test_a_task_per_rank_is_refused_by_the_variable(tmp_path: Path):
    with pytest.raises(LaunchError, match="SLURM_STEP_NUM_TASKS=4 on 2 nodes: start the command once per node"):
        found({**STEP, "SLURM_STEP_NUM_TASKS": "4"}, tmp_path)


def test_slurms_compressed_lists():
    assert nodes_of_slurm("gpu[003-004,12],login1,r[1-2]n[1-2]") == [
        "gpu003", "gpu004", "gpu12", "login1", "r1n1", "r1n2", "r2n1", "r2n2",
    ]  # fmt: skip
    with pytest.raises(LaunchError, match="SLURM's list of nodes"):
        nodes_of_slurm("gpu[4-3]")
