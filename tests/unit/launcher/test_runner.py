"""What the `deepspeed` command decides before it starts anything."""

from __future__ import annotations

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher import runner
from deepspeed.launcher.arguments import parse, program


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hostfile").write_text("a slots=4\nb slots=4\n")


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ([], LaunchError, "no script was given"),
        (["gone.py"], LaunchError, "'gone.py' does not exist in"),
        (["--include", "localhost:0", "--num_gpus", "1", "train.py"], LaunchError, "leave --num_nodes and --num_gpus"),
        (["--no_ssh", "train.py"], LaunchError, "--no_ssh needs --node_rank N and --master_addr"),
        (["--min_elastic_nodes", "1", "train.py"], LaunchError, "need --elastic_training"),
        (["--num_nodes", "2", "train.py"], LaunchError, "--num_nodes 2, but the hostfile"),
        (["-H", "hostfile", "--num_gpus", "5", "train.py"], LaunchError, "--num_gpus 5, but there are only"),
        (["-i", "localhost:0", "-e", "localhost:1", "train.py"], LaunchError, "exclude each other"),
        (["--force_multi", "--no_ssh_check", "--launcher", "none", "train.py"], LaunchError, "'none' is not known"),
        (["--module", "--no_python", "train"], LaunchError, "exclude each other"),
    ],
)
def test_what_cannot_be_started_is_refused_by_name(args, error, message):
    with pytest.raises(error, match=message):
        runner.run(parse(args))


def test_main_prints_the_error_alone_and_returns_2(capsys):
    assert runner.main(["gone.py"]) == 2
    assert capsys.readouterr().err.startswith("deepspeed: script 'gone.py' does not exist")


@pytest.mark.parametrize(
    ("args", "hosts"),
    [
        ([], {"localhost": [0]}),
        (["--num_gpus", "3"], {"localhost": [0, 1, 2]}),
        (["--num_accelerators", "2"], {"localhost": [0, 1]}),
        (["-H", "hostfile"], {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}),
        (["-H", "hostfile", "--num_nodes", "1", "--num_gpus", "2"], {"a": [0, 1]}),
        (["-H", "hostfile", "-i", "b:1,3"], {"b": [1, 3]}),
        (["-H", "hostfile", "-e", "a@b:0"], {"b": [1, 2, 3]}),
    ],
)
def test_hosts(args, hosts):
    assert runner.choose_hosts(parse([*args, "train.py"])) == hosts


def test_a_named_hostfile_that_is_missing_means_this_machine():
    assert runner.choose_hosts(parse(["-H", "gone", "train.py"])) == {"localhost": [0]}


def test_arguments_of_the_script_are_left_alone():
    options = parse(["--num_gpus", "2", "train.py", "--num_gpus", "7", "-q", "--deepspeed_config", "x.json"])
    assert (options.num_gpus, options.quiet) == (2, False)
    assert options.user_args == ["--num_gpus", "7", "-q", "--deepspeed_config", "x.json"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["PYTHON", "-u", "train.py", "--lr", "1"]),
        (["--module"], ["PYTHON", "-u", "-m", "train.py", "--lr", "1"]),
        (["--no_python"], ["train.py", "--lr", "1"]),
    ],
)
def test_program(monkeypatch, flags, expected):
    monkeypatch.setattr("sys.executable", "PYTHON")
    assert program(parse([*flags, "train.py"]), ["--lr", "1"]) == expected


def test_environment_files_and_prefixes_say_what_goes_to_every_node(monkeypatch, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET", "1")
    (home / ".deepspeed_env").write_text("# for all\nMODE=home\nPATHS=a=b\n")
    (tmp_path / ".deepspeed_env").write_text("MODE=here\n")
    exported = runner.exported_variables()
    assert (exported["MODE"], exported["PATHS"], exported["NCCL_DEBUG"]) == ("here", "a=b", "INFO")
    assert "SECRET" not in exported


def test_a_bad_environment_file_is_refused_with_its_line(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("OK=1\nexport BAD=1\n")
    with pytest.raises(LaunchError, match=r"\.deepspeed_env:2: 'export BAD=…' is not of the form NAME=VALUE"):
        runner.exported_variables()


def test_names_that_clients_import():
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert runner.DLTS_HOSTFILE == "/job/hostfile"
    assert {"MLFLOW", "PYTHON", "MV2", "UCX"} <= set(runner.EXPORT_ENVS)
    assert runner.PDSH_MAX_FAN_OUT == 1024
