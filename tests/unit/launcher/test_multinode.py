"""Command lines for several nodes, compared as text: none of these launchers is run by the tests."""

from __future__ import annotations

import os
import shlex

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher import runner
from deepspeed.launcher.launch import encode_world
from deepspeed.launcher.multinode import Job, build
from deepspeed.launcher.options import parse


def _job(hosts=None, **changes):
    values = {
        "hosts": hosts or {"a": [0, 1], "b": [0, 1]},
        "exports": {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "NOTE": "x y"},
        "supervisor": ["--master_port=29500", "train.py", "--name", "100% it's"],
        "program": ["python", "-u", "train.py", "--lr", "1"],
        "launcher_args": ["--verbose"],
    }
    return Job(**{**values, **changes})


def test_command_text_of_pdsh(monkeypatch):
    monkeypatch.setattr("sys.executable", "python")
    command, variables = build("pdsh", _job(ssh_port=2222, venv_script="venv/bin/activate"))
    assert command[:-1] == ["pdsh", "-S", "-f", "2", "-w", "a,b", "--verbose"]
    assert command[-1] == (
        "export MASTER_ADDR=a; export MASTER_PORT=29500; export NOTE='x y'; "
        f"cd {shlex.quote(os.getcwd())}; source venv/bin/activate; "
        "python -u -m deepspeed.launcher.launch --node_rank=%n "
        "--master_port=29500 train.py --name '100%% it'\"'\"'s'"
    )
    assert variables == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-p 2222"}


def test_command_text_of_pdsh_keeps_chosen_devices():
    command, _ = build("pdsh", _job(hosts={"a": [1, 3]}))
    assert command[0] == "pdsh"


def test_command_text_of_openmpi():
    command, variables = build("openmpi", _job(hosts={"a": [0, 1], "b": [0]}))
    assert shlex.join(command) == (
        "mpirun -n 3 --host a:2,b:1 --verbose -x MASTER_ADDR=a -x MASTER_PORT=29500 -x 'NOTE=x y' "
        "python -u train.py --lr 1"
    )
    assert variables == {}


@pytest.mark.parametrize(
    ("launcher", "expected"), [("mpich", {}), ("impi", {}), ("mvapich", {"MV2_ENABLE_AFFINITY": "0"})]
)
def test_command_text_of_hydra_launchers(launcher, expected):
    command, variables = build(launcher, _job(hosts={"a": [0, 1], "b": [0]}))
    head, *segments = shlex.join(command).split(" : ")
    assert head == (
        "mpirun --verbose -genv MASTER_ADDR a -genv MASTER_PORT 29500 -genv NOTE 'x y' "
        "-n 1 -host a -env RANK 0 -env WORLD_SIZE 3 -env LOCAL_RANK 0 -env LOCAL_SIZE 2 "
        "-env CROSS_RANK 0 -env CROSS_SIZE 2 python -u train.py --lr 1"
    )
    assert segments[1] == (
        "-n 1 -host b -env RANK 2 -env WORLD_SIZE 3 -env LOCAL_RANK 0 -env LOCAL_SIZE 1 "
        "-env CROSS_RANK 1 -env CROSS_SIZE 2 python -u train.py --lr 1"
    )
    assert len(segments) == 2
    assert variables == expected


def test_command_text_of_slurm():
    command, variables = build("slurm", _job())
    assert shlex.join(command) == (
        "srun -n 4 --nodes 2 --ntasks-per-node 2 --nodelist a,b --export=ALL --verbose python -u train.py --lr 1"
    )
    assert variables["NOTE"] == "x y"


@pytest.mark.parametrize(
    ("launcher", "changes", "message"),
    [
        ("torchrun", {}, "'torchrun' is not known; there is pdsh, openmpi"),
        ("openmpi", {"hosts": {"a": [1]}}, "takes devices from 0 up"),
        ("mpich", {"venv_script": "x"}, "works with --launcher pdsh only"),
        ("slurm", {"hosts": {"a": [0], "b": [0, 1]}}, "the same number of slots"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(launcher, changes, message):
    with pytest.raises(LaunchError, match=message):
        build(launcher, _job(**changes))


def test_command_text_of_a_whole_run(monkeypatch, tmp_path):
    (tmp_path / "hostfile").write_text("a slots=2\nb slots=2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", "python")
    started = []
    monkeypatch.setattr(runner, "_replace_process", lambda *command: started.append(command))
    runner.run(parse(["-H", "hostfile", "--no_ssh_check", "--module", "train", "--x"]))
    [(command, _)] = started
    world = encode_world({"a": [0, 1], "b": [0, 1]})
    assert command[-1].endswith(
        f"--node_rank=%n --master_addr=a --master_port=29500 --world_info={world} --module --log_level=info train --x"
    )
    assert "export MASTER_ADDR=a; export MASTER_PORT=29500" in command[-1]


def test_a_launcher_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="'pdsh' is not installed"):
        runner._replace_process(["pdsh"], {})
