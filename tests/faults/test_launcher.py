"""Real runs of the launcher with small scripts that do not import torch: ends good and bad."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
ALL_GONE_WITHIN = 5.0  # seconds
STARTED_AND_GONE_WITHIN = 4 * ALL_GONE_WITHIN  # the command's own start counts too; ranks sleep for 300

SHOW_RANK = """
    import os, sys
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR OMP_NUM_THREADS".split()
    line = " ".join([*(os.environ[name] for name in names), *sys.argv[1:]])
    sys.stdout.write(line + "\\n")  # print writes twice: the lines of two ranks may mix
"""
WAIT_FOREVER = """
    import os, subprocess, sys, time
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    os.write(1, f"ready {os.getpid()} {helper.pid}\\n".encode())  # one write: the lines of two ranks never mix
    time.sleep(300)
"""


class Run:
    """Starts the launcher on a script in a fresh folder; whatever is left of it is killed at the end."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.environment = {**inherited, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}

    def command(self, script, flags, args=()):
        (self.folder / "train.py").write_text(textwrap.dedent(script))
        return [sys.executable, "-m", "deepspeed.launcher.runner", *flags, "train.py", *args]

    def to_end(self, script, *flags, args=()):
        return subprocess.run(
            self.command(script, flags or ("--num_gpus", "2"), args),
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def start(self, script, *flags):
        """The running launcher, and the processes of its ranks and of their helpers once all ranks are ready."""
        launcher = subprocess.Popen(
            self.command(script, flags or ("--num_gpus", "2")),
            cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(launcher)
        lines = sorted(launcher.stdout.readline() for _ in range(2))
        return launcher, [psutil.Process(int(pid)) for line in lines for pid in line.split()[1:]]

    def close(self):
        for launcher in self.started:
            launcher.kill()
            launcher.communicate()


@pytest.fixture
def run(tmp_path):
    runs = Run(tmp_path)
    yield runs
    runs.close()


def _gone(processes, since):
    """True when all of them end within the time allowed."""
    _, alive = psutil.wait_procs(processes, timeout=max(0.0, since + ALL_GONE_WITHIN - time.monotonic()))
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return not alive


def test_ranks_know_their_place(run):
    done = run.to_end(SHOW_RANK, args=["--lr", "1"])
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} {rank} 2 2 0 1 127.0.0.1 {threads} --local_rank={rank} --lr 1" for rank in range(2)
    ]


def test_without_a_number_one_rank_runs_on_the_cpu_and_a_line_says_so(run):
    done = run.to_end(SHOW_RANK, "--no_local_rank")
    assert done.stdout.startswith("0 0 1 1 0 1 127.0.0.1")
    assert "--local_rank" not in done.stdout
    assert "1 rank(s) on the CPU with gloo: this machine has no accelerator; --num_gpus N starts N ranks" in done.stderr


def test_a_live_line_is_asked_for_of_every_rank(run):
    script = "import os; os.write(1, os.environ['DEEPSPEED_PROGRESS'].encode() + b'\\n')"
    assert run.to_end(script, "--progress", "--num_gpus", "2").stdout == "1\n1\n"


def test_module_and_no_python(run):
    done = run.to_end(SHOW_RANK, "--no_local_rank", "--no_python", "--quiet", sys.executable)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "0", "")
    (run.folder / "package.py").write_text("print(__spec__.name)")
    done = run.to_end("", "--module", "package")
    assert (done.returncode, done.stdout) == (0, "package\n")


def test_a_program_that_cannot_be_started_is_named(run):
    done = run.to_end("", "--no_python", "./gone")
    assert done.returncode == 2
    assert "rank 0: './gone' cannot be started" in done.stderr


def test_each_rank_can_have_its_own_cores(run):
    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    script = "import os, sys; sys.stdout.write(f'{sorted(os.sched_getaffinity(0))}\\n')"
    done = run.to_end(script, "--num_gpus", "2", "--bind_cores_to_rank", "--bind_core_list", f"{first},{last}")
    assert sorted(done.stdout.splitlines()) == sorted([f"[{first}]", f"[{last}]"])
    refused = run.to_end(script, "--num_gpus", "2", "--bind_cores_to_rank", "--bind_core_list", str(first))
    assert f"2 ranks cannot each have one of the 1 cores [{first}]" in refused.stderr


def test_the_traceback_of_the_first_failing_rank_comes_last_and_alone(run):
    script = """
        import os, pathlib, sys, time
        raised = pathlib.Path(sys.argv[0] + ".raised")
        if os.environ["RANK"] == "1":
            raised.touch()
            raise ValueError("boom")
        while not raised.exists():  # ranks may start far apart
            time.sleep(0.01)
        time.sleep(0.5)
        print("Traceback (most recent call last):\\nConnectionError: lost rank 1", file=sys.stderr)
        sys.exit(7)
    """
    done = run.to_end(script)
    assert done.returncode == 1
    _, _, report = done.stderr.rpartition("[deepspeed] ")
    head, *traceback = report.splitlines()
    assert head.startswith("rank 1 of 2 failed first (host ") and head.endswith("): exit code 1")
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: boom"
    assert "lost rank 1" not in report


def test_a_slow_end_after_a_traceback_still_counts_as_first(run):
    script = """
        import atexit, os, pathlib, sys, time
        raised = pathlib.Path(sys.argv[0] + ".raised")
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 0.5)
            raised.touch()
            raise ValueError("the cause")
        while not raised.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        raise ConnectionError("lost rank 1")
    """
    done = run.to_end(script)
    assert done.stderr.splitlines()[-1] == "ValueError: the cause"


def test_the_exit_code_is_that_of_the_first_failing_rank(run):
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("no disk", file=sys.stderr)
            sys.exit(3)
        time.sleep(300)
    """
    since = time.monotonic()
    done = run.to_end(script)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "no disk"
    assert time.monotonic() - since < STARTED_AND_GONE_WITHIN


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGSEGV", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_and_its_signal_is_explained(run, name):
    launcher, processes = run.start(WAIT_FOREVER)
    since = time.monotonic()
    number = signal.Signals[name]
    processes[0].send_signal(number)
    _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + number
    assert f"ended by {name} (signal {number.value})" in errors
    assert "its peak memory was 0.0" in errors
    assert _gone(processes, since)


def test_ranks_that_ignore_sigterm_are_killed(run):
    script = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, f"ready {os.getpid()}\\n".encode())  # one write: the lines of two ranks never mix
        if os.environ["RANK"] == "1":
            sys.exit(5)
        time.sleep(300)
    """
    since = time.monotonic()
    assert run.to_end(script).returncode == 5
    assert time.monotonic() - since < STARTED_AND_GONE_WITHIN


def test_killing_the_launcher_leaves_no_process(run):
    launcher, processes = run.start(WAIT_FOREVER)
    processes += psutil.Process(launcher.pid).children(recursive=True)
    since = time.monotonic()
    launcher.send_signal(signal.SIGKILL)
    assert _gone(processes, since)


def _of_the_launcher(launcher, processes):
    """Its own processes, parents first: what shows the output, what runs the job, the agent, the guard."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [psutil.Process(launcher.pid), *(child for child in children if child not in processes)]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("which", [[1], [2], [3], [0, 1], [1, 2], [3, 2]])
def test_no_rank_outlives_any_part_of_the_launcher(run, which):
    launcher, processes = run.start(WAIT_FOREVER)
    parts = _of_the_launcher(launcher, processes)
    assert len(parts) == 4
    since = time.monotonic()
    for index in which:
        parts[index].kill()
    if which == [3]:  # the guard alone is nobody's end
        parts[0].kill()
        processes = processes[::2]  # it is what reaches the ranks' helpers
    launcher.communicate(timeout=20)
    assert launcher.returncode not in (0, None)
    assert _gone(processes + parts[1:], since)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(run.folder):
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_ranks(run, number):
    script = """
        import os, signal, sys, time
        def stop(number, frame):
            os.write(1, f"saved on {number}\\n".encode())
            sys.exit(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        os.write(1, f"ready {os.getpid()}\\n".encode())  # one write: the lines of two ranks never mix
        time.sleep(300)
    """
    launcher, processes = run.start(script)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=20)
    assert output.splitlines() == [f"saved on {number.value}"] * 2
    assert launcher.returncode == 0


def test_a_stop_by_the_user_is_not_called_a_failure(run):
    launcher, processes = run.start(WAIT_FOREVER)
    since = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=20)
    assert errors.splitlines()[-1] == "[deepspeed] stopped by SIGTERM, exit code 143"
    assert launcher.returncode == 143
    assert _gone(processes, since)


def test_a_second_ctrl_c_ends_ranks_that_ignore_the_first(run):
    script = """
        import os, signal, time
        signal.signal(signal.SIGINT, lambda *_: os.write(1, b"not now\\n"))
        os.write(1, f"ready {os.getpid()}\\n".encode())  # one write: the lines of two ranks never mix
        time.sleep(300)
    """
    launcher, processes = run.start(script)
    launcher.send_signal(signal.SIGINT)
    assert [launcher.stdout.readline() for _ in processes] == ["not now\n"] * 2
    since = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=20)
    assert errors.splitlines()[-1] == "[deepspeed] stopped by SIGINT, exit code 137"
    assert _gone(processes, since)


def test_a_stop_ends_ranks_that_ignore_it_also_after_a_request_to_save(run):
    """SLURM sends SIGUSR1 first, and SIGTERM when the time is up."""
    script = """
        import os, signal, time
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"saving\\n"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, f"ready {os.getpid()}\\n".encode())  # one write: the lines of two ranks never mix
        time.sleep(300)
    """
    launcher, processes = run.start(script, "--num_gpus", "2", "--grace", "1")
    launcher.send_signal(signal.SIGUSR1)
    assert [launcher.stdout.readline() for _ in processes] == ["saving\n"] * 2
    since = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=20)
    assert errors.splitlines()[-1] == "[deepspeed] stopped by SIGTERM, exit code 137"
    assert _gone(processes, since)


def test_a_log_file_per_rank(run):
    script = """
        import os, sys
        print("out", os.environ["RANK"], flush=True)
        print("err", os.environ["RANK"], file=sys.stderr)
    """
    done = run.to_end(script, "--num_gpus", "2", "--enable_each_rank_log", "logs")
    for rank in range(2):
        log = (run.folder / "logs" / "attempt0" / f"rank{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"err {rank}", f"out {rank}"]
        assert f"[rank {rank}] out {rank}" in done.stdout.splitlines()
        assert f"[rank {rank}] err {rank}" in done.stderr.splitlines()


def test_process_ids_are_kept_while_it_runs(run):
    script = """
        import os, pathlib, tempfile, time
        while not (found := list(pathlib.Path(tempfile.gettempdir()).glob("*.deepspeed"))) or not found[0].read_text():
            time.sleep(0.01)
        print(found[0].stem, found[0].read_text(), os.getpid())
    """
    run.environment["TMPDIR"] = str(run.folder)
    with subprocess.Popen(
        run.command(script, ("--save_pid",)), cwd=run.folder, env=run.environment, text=True, stdout=subprocess.PIPE
    ) as launcher:
        name, listed, own = launcher.stdout.read().split()
    assert (name, listed) == (str(launcher.pid), f"[{own}]")
    assert not list(run.folder.glob("*.deepspeed"))


def test_two_launches_at_once_both_finish(run):
    script = """
        import os, socket, time
        with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
            time.sleep(0.5)
    """
    command = run.command(script, ())
    launchers = [subprocess.Popen(command, cwd=run.folder, env=run.environment) for _ in range(2)]
    for launcher in launchers:
        assert launcher.wait(timeout=20) == 0


def test_a_terminal_stays_a_terminal_for_progress_bars(run):
    controller, terminal = pty.openpty()
    script = "import sys; print(sys.stderr.isatty(), file=sys.stderr)"
    command = run.command(script, ("--quiet",))
    done = subprocess.run(command, cwd=run.folder, env=run.environment, stderr=terminal, timeout=60, check=False)
    os.close(terminal)
    shown = os.read(controller, 4096)
    os.close(controller)
    assert (done.returncode, shown.strip()) == (0, b"True")
