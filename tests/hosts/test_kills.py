"""Whatever is killed or cut, by whatever starter: nothing is left after five seconds, and the command ends."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.hosts.runs import STARTERS, need_hosts

need_hosts()

WAIT = """
    import os, subprocess, sys, time
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    os.write(1, f"ready {os.environ['RANK']}\\n".encode())
    time.sleep(300)
"""
SAVE = """
    import os, signal, sys, time
    def stop(number, frame):
        time.sleep(1)
        os.write(1, f"saved {os.environ['RANK']}\\n".encode())
        sys.exit(85)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, stop)
    os.write(1, f"ready {os.environ['RANK']}\\n".encode())
    time.sleep(300)
"""
GONE_WITHIN = 5.0


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def parts(runs, started, by):
    """Processes by name: the launcher, what runs the job, the starter, the agents."""
    front = runs.cluster.inner(started)
    while front.name() in ("env", "sh"):
        [front] = front.children()
    [middle] = front.children()
    names = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra", "slurm": "srun"}
    children = middle.children()
    starters = [child for child in children if child.name() == names.get(by, by)[:15]]
    everywhere = [p for name in runs.cluster.names for p in runs.cluster.processes(name)]
    agents = [p for p in everywhere if any("deepspeed.launcher.agent" in word for word in p.cmdline()[1:3])]
    guards = [p for p in agents if p.parent() in agents]
    return {"front": front, "middle": middle, "starter": (starters or children)[0],
            "agent": [p for p in agents if p not in guards and "exec" not in p.name()][-1]}  # fmt: skip


@pytest.mark.parametrize("by", STARTERS)
@pytest.mark.parametrize("part", ["front", "agent", *slow("middle", "starter")])
def test_sigkill_of_any_part_ends_all(runs, by, part):
    started = runs.start(WAIT, by=by)
    runs.until_said(started, "ready", 4)
    parts(runs, started, by)[part].send_signal(signal.SIGKILL)
    assert runs.left(GONE_WITHIN) == []
    started.communicate(timeout=5)
    assert started.returncode not in (0, None)


@pytest.mark.parametrize("by", STARTERS)
@pytest.mark.parametrize("name", ["SIGTERM", *slow("SIGINT", "SIGUSR1", "SIGHUP")])
def test_signals_let_ranks_save(runs, by, name):
    started = runs.start(SAVE, by=by)
    runs.until_said(started, "ready", 4)
    runs.cluster.inner(started).send_signal(signal.Signals[name])
    out, err = started.communicate(timeout=20)
    assert sorted(out.split()[1::2]) == ["0", "1", "2", "3"], err
    assert started.returncode == 85
    assert runs.left(GONE_WITHIN) == []
    assert f"stopped by {name}, exit code 85" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ssh", "pdsh", "openmpi", "mpich", "slurm"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("part", ["middle", "starter", "agent"])
def test_a_signal_to_any_part_reaches_all(runs, by, name, part):
    """Where a part hands it on, the ranks save; where it ends by it, they end with their connection."""
    if (part, by, name) == ("starter", "pdsh", "SIGINT"):
        return  # one alone is a question to pdsh, which goes on
    started = runs.start(SAVE, "--grace", "10", by=by)
    runs.until_said(started, "ready", 4)
    parts(runs, started, by)[part].send_signal(signal.Signals[name])
    started.communicate(timeout=20)
    assert started.returncode not in (0, None)
    assert runs.left(GONE_WITHIN) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_what_does_not_end_is_killed_after_the_grace(runs, name):
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(1, b"ready\\n")
        time.sleep(300)
    """
    started = runs.start(script, "--grace", "2")
    runs.until_said(started, "ready", 4)
    since = time.monotonic()
    runs.cluster.inner(started).send_signal(signal.Signals[name])
    _, err = started.communicate(timeout=20)
    assert started.returncode == 137 and f"stopped by {name}" in err
    assert 2 < time.monotonic() - since < 2 + GONE_WITHIN
    assert runs.left(GONE_WITHIN) == []


@pytest.mark.slow
@pytest.mark.parametrize("by", STARTERS)
def test_a_lost_host_ends_the_run(fragile, by):
    started = fragile.start(WAIT, "--heartbeat", "3", by=by)
    fragile.until_said(started, "ready", 4)
    since = time.monotonic()
    fragile.cluster.kill("h1")
    _, err = started.communicate(timeout=30)
    assert time.monotonic() - since < 3 + GONE_WITHIN
    assert started.returncode not in (0, None)
    assert "host h1 (ranks 2 to 3) was lost" in err.splitlines()[-1], err
    assert fragile.left(GONE_WITHIN, ["h0"]) == []


@pytest.mark.parametrize("by", STARTERS)
def test_a_cut_cable_ends_both_sides(fragile, by):
    started = fragile.start(WAIT, "--heartbeat", "3", by=by)
    fragile.until_said(started, "ready", 4)
    since = time.monotonic()
    fragile.cluster.cut("h1")
    _, err = started.communicate(timeout=30)
    assert "host h1 (ranks 2 to 3) was lost: it was silent for 3 s" in err.splitlines()[-1], err
    others = fragile.left(since + 3 + GONE_WITHIN - time.monotonic())
    ours = [" ".join(p.cmdline()) for p in others]
    assert [line for line in ours if "train.py" in line or "agent" in line] == []


@pytest.mark.slow
def test_a_stopped_terminal_is_not_silence(runs):
    """Ctrl-Z of the command for longer than the heartbeat: the ranks go on, and all is shown afterwards."""
    script = """
        import os, time
        for step in range(12):
            os.write(1, f"step {step}\\n".encode())
            time.sleep(0.5)
    """
    started = runs.start(script, "--heartbeat", "2")
    runs.until_said(started, "step 1", 4)
    front = runs.cluster.inner(started)
    front.send_signal(signal.SIGSTOP)
    time.sleep(5)
    started.send_signal(signal.SIGCONT)  # the command that entered the host stops with it
    front.send_signal(signal.SIGCONT)
    out, err = started.communicate(timeout=30)
    assert started.returncode == 0, err
    assert out.count("step 11") == 4


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["head", "full", "stuck"])
def test_output_that_nobody_takes_is_not_silence(runs, sink):
    script = f"""
        import os, time
        for step in range(30):
            os.write(1, (b"x" * 99 + b"\\n") * 2000)
            time.sleep(0.1)
        if os.environ["RANK"] == "3":
            open({str(runs.folder / "finished")!r}, "w").close()
    """
    reader, writer = os.pipe()
    target = open("/dev/full", "wb") if sink == "full" else None
    started = runs.start(script, "--heartbeat", "2", stdout=target or writer)
    os.close(writer)
    if sink == "head":
        os.read(reader, 100)
        os.close(reader)
    if sink == "stuck":
        time.sleep(8)
        assert started.poll() is None
        taken = 0
        while data := os.read(reader, 1 << 20):
            taken += len(data)
        assert taken == 4 * 30 * 2000 * 100
    started.communicate(timeout=30)
    assert started.returncode == 0
    assert (runs.folder / "finished").exists()
    if target is not None:
        target.close()
    if sink != "head":
        os.close(reader)
