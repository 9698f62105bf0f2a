"""The same job by every starter on two hosts: the world, what travels and what does not, failures, odd words."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

from tests.hosts.runs import STARTERS, Runs, need_hosts

need_hosts()

SHOW = """
    import json, os, socket, sys
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE LOCAL_WORLD_SIZE CROSS_RANK CROSS_SIZE GROUP_RANK MASTER_ADDR"
    names, shown = names.split(), ("ODD", "PYTHON", "UNDECL", "OMPI", "PMI", "SLURM_P")
    told = {"host": socket.gethostname(), "place": [os.environ[name] for name in names], "args": sys.argv[1:],
            "variables": {k: v for k, v in os.environ.items() if k.startswith(shown)},
            "folder": os.getcwd()}
    os.write(1, (json.dumps(told) + "\\n").encode())
"""
ODD = ['it\'s "q"', "$(touch pwned) `touch pwned`", "a\nb", "%h %n %%", "-b", "", "; touch pwned #", "\\ \t*", "ü€"]
NO_NAMES = ["^file", "h 0", "a,b", "h[0-1", "h[1-0]", "b;ls", "%h", "a@b@c"]
FOLDERS = [
    '-b it\'s "q" $(touch pwned) `touch pwned`',
    pytest.param("%h %n\n; touch pwned #\\ \t*ü€", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("by", STARTERS)
def test_the_world_and_what_travels(runs, by):
    runs.environment["UNDECLARED"] = "stays"
    runs.environment["PYTHON$(touch pwned)"] = "$(touch pwned)"
    exports = [f"ODD{index}={text}" for index, text in enumerate(ODD)]
    flags = [word for text in [*exports, "ODD@h1=%h"] for word in ("--export", text)]
    done = runs.to_end(SHOW, *flags, args=ODD, by=by)
    assert done.code == 0, done.err
    told = sorted((json.loads(line) for line in done.out.splitlines()), key=lambda one: int(one["place"][0]))
    assert [one["place"][:8] for one in told] == [
        ["0", "0", "4", "2", "2", "0", "2", "0"], ["1", "1", "4", "2", "2", "0", "2", "0"],
        ["2", "0", "4", "2", "2", "1", "2", "1"], ["3", "1", "4", "2", "2", "1", "2", "1"],
    ]  # fmt: skip
    assert [one["host"] for one in told] == ["h0", "h0", "h1", "h1"]
    assert {one["place"][8] for one in told} == {runs.cluster.address("h0")}
    for one in told:
        assert one["args"] == [f"--local_rank={one['place'][1]}", *ODD]
        variables = one["variables"]
        assert [variables[f"ODD{index}"] for index in range(len(ODD))] == ODD
        assert variables["PYTHON$(touch pwned)"] == "$(touch pwned)"
        assert variables.get("ODD") == ("%h" if one["host"] == "h1" else None)
        assert not [name for name in variables if name.startswith(("UNDECL", "OMPI", "PMI", "SLURM_PROCID"))]
        assert one["folder"] == str(runs.folder)
    assert not (runs.folder / "pwned").exists()
    assert len(done.err.splitlines()) <= 10


@pytest.mark.parametrize("by", STARTERS)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_any_name(runs, name, by):
    """The folder, the script in it, its environment file, the logs and the script that is sourced before it."""
    odd = runs.folder / name
    odd.mkdir()
    inside = Runs(runs.cluster, odd)
    inside.environment = {**runs.environment, "HOME": str(odd)}
    (odd / ".deepspeed_env").write_text("ODD='$(touch pwned) %h'\n")
    (odd / "ven'v $x").write_text("export ODDER=sourced\n")
    flags = ["--venv_script", "ven'v $x", "--enable_each_rank_log=-l $(touch pwned)"]
    done = inside.to_end(SHOW, *flags, by=by)
    assert done.code == 0, done.err
    told = [json.loads(line.partition("] ")[2]) for line in done.out.splitlines()]
    assert [one["folder"] for one in told] == [str(odd)] * 4
    assert [one["variables"]["ODD"] for one in told] == ["$(touch pwned) %h"] * 4
    assert [one["variables"]["ODDER"] for one in told] == ["sourced"] * 4
    assert {path.name for path in (odd / "-l $(touch pwned)/attempt0").iterdir()} == {f"rank{n}.log" for n in range(4)}
    assert not [path for folder in (odd, runs.folder) for path in folder.iterdir() if path.name == "pwned"]
    inside.close()


@pytest.mark.parametrize("by", STARTERS)
def test_the_first_failure_anywhere_ends_all_and_comes_last(runs, by):
    script = """
        import os, time
        if os.environ["RANK"] == "3":
            raise ValueError("boom")
        time.sleep(300)
    """
    done = runs.to_end(script, by=by)
    assert done.code == 1
    assert done.err.splitlines()[-1] == "ValueError: boom"
    assert "rank 3 of 4 failed first (host h1, " in done.err
    assert runs.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("by", STARTERS)
def test_the_exit_code_is_that_of_the_rank(runs, by):
    done = runs.to_end("import os, sys, time; os.environ['RANK'] == '2' and sys.exit(7); time.sleep(300)", by=by)
    assert done.code == 7
    assert runs.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("by", STARTERS)
def test_no_process_shows_a_secret(runs, by):
    runs.environment["SECRET_KEY"] = "s3cr3t-value"
    script = """
        import os, pathlib, time
        lines = [p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
        assert os.environ["SECRET_KEY"].startswith("s3cr3t")
        os.write(1, f"ready {sum(b's3cr3t' in line for line in lines)}\\n".encode())
        time.sleep(2)
    """
    started = runs.start(script, "--export", "SECRET_KEY", args=["--password", "s3cr3t-word"], by=by)
    said = runs.until_said(started, "ready", 4)
    agents = [p.cmdline() for name in ("h0", "h1") for p in runs.cluster.processes(name)]
    agents = [line for line in agents if "train.py" not in line]  # the user's own commands
    assert agents and not [line for line in agents if "s3cr3t" in " ".join(line)]
    tokens = [line for line in agents for word in line if "deepspeed.launcher.agent" in word]
    assert tokens
    _, err = started.communicate(timeout=30)
    assert said and "s3cr3t" not in err and started.returncode == 0


@pytest.mark.parametrize("host", ["exec:b", "-b", *(pytest.param(name, marks=pytest.mark.slow) for name in NO_NAMES)])
def test_a_name_that_is_none_is_refused(runs, host):
    (runs.folder / "hostfile").write_text(f"h0 slots=1\n{host} slots=1\n")
    done = runs.to_end("print('ran')")
    assert done.code == 2 and "ran" not in done.out
    assert "hostfile:2: " in done.err


def test_ranges_are_ours(runs):
    (runs.folder / "hostfile").write_text("h[0-1] slots=2\n")
    done = runs.to_end(SHOW, "-i", "h0:1@h1:0-1")
    told = [json.loads(line) for line in done.out.splitlines()]
    assert sorted((one["host"], one["place"][0]) for one in told) == [("h0", "0"), ("h1", "1"), ("h1", "2")]


@pytest.mark.slow
@pytest.mark.parametrize("by", STARTERS)
def test_a_single_other_host_runs_there(runs, by):
    done = runs.to_end(SHOW, "-i", "h1", by=by)
    assert {json.loads(line)["host"] for line in done.out.splitlines()} == {"h1"}


@pytest.mark.slow
def test_a_single_host_that_is_this_one_needs_no_ssh(runs):
    done = runs.to_end(SHOW, "-i", "h0:1", "--export", "ODD=1", "--ssh_port", "1")
    [told] = [json.loads(line) for line in done.out.splitlines()]
    assert (told["host"], told["place"][0], told["variables"]["ODD"]) == ("h0", "0", "1")


@pytest.mark.slow
def test_every_host_is_tried_before_any_starts(runs):
    (runs.folder / "hostfile").write_text("h0 slots=1\nnowhere slots=1\nh1 slots=1\n10.77.0.99 slots=1\n")
    done = runs.to_end("open('ran', 'w')")
    assert done.code == 2
    assert "2 of 4 hosts did not answer" in done.err and "nowhere: ssh ended" in done.err and "10.77.0.99: " in done.err
    assert not (runs.folder / "ran").exists()
    assert done.seconds < 13


@pytest.mark.slow
def test_the_folder_must_be_there(runs):
    script = "print('ran')"
    runs.command(script)
    hidden = runs.cluster.enter("h1", ["mount", "-t", "tmpfs", "none", str(runs.folder)])
    subprocess.run(hidden, check=True)
    try:
        done = runs.to_end(script)
    finally:
        subprocess.run(runs.cluster.enter("h1", ["umount", str(runs.folder)]), check=True)
    assert done.code != 0 and "host" in done.err and "h1" in done.err


@pytest.mark.slow
def test_two_jobs_at_once_both_finish(runs):
    script = """
        import os, socket, time
        if os.environ["RANK"] == "0":
            with socket.create_server(("", int(os.environ["MASTER_PORT"]))):
                time.sleep(1)
        os.write(1, (os.environ["DS_JOB_ID"] + "\\n").encode())
    """
    first, second = runs.start(script), runs.start(script)
    ends = [started.communicate(timeout=60)[0].split() for started in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert all(len(ids) == 4 and len(set(ids)) == 1 for ids in ends) and ends[0] != ends[1]


@pytest.mark.slow
def test_a_token_works_once(runs):
    """Somebody who reads pdsh's token from the process list and calls: the job ends."""
    started = runs.start("import time; time.sleep(30)", by="pdsh")
    end = time.monotonic() + 20
    call = []
    while not call and time.monotonic() < end:
        for process in runs.cluster.processes("h0"):
            line = " ".join(process.cmdline())
            if "pdsh" in line and "deepspeed.launcher.agent" in line:
                call = line.split()[-1].strip("'").split(",")
        time.sleep(0.02)
    time.sleep(4)
    token, port, *addresses = call
    spy = f"import socket; socket.create_connection(('{addresses[0]}', {port}), 5).sendall(b'{token}\\n')"
    called = runs.cluster.on("h1", ["python3", "-c", spy])
    assert called.wait(timeout=20) == 0
    _, err = started.communicate(timeout=30)
    assert started.returncode == 2 and "used twice" in err
    assert runs.left() == []
