"""A rank that the kernel ends for its container's memory: it has said before what for, and what it suggests fits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel.exhaustion_plants import WIDE, laid_over, suggestion

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = {"train_micro_batch_size_per_gpu": 16384, "zero_optimization": {"stage": 1}}
ROOM = 256  # MiB beside what a process that has imported everything takes
SCRIPT = """
import json, sys, torch, deepspeed
from tests.parallel.exhaustion_plants import Blocks, train
config, sizes, limit, room = sys.argv[-4:]  # behind what the launcher passes
config, sizes = json.loads(config), json.loads(sizes)
torch.set_num_threads(1)
def engine(model, config):
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
with engine(Blocks(8, 2), {**config, "train_micro_batch_size_per_gpu": 1}) as warm:
    train(warm, warm.module, 1, 1)
used = int(open(f"{limit}/memory.usage_in_bytes").read())
open(f"{limit}/memory.limit_in_bytes", "w").write(str(used + int(room) * 2**20))
model = Blocks(**sizes)
with engine(model, config) as made:
    train(made, model, config["train_micro_batch_size_per_gpu"], 2)
print("trained")
"""


@contextlib.contextmanager
def group_of_memory() -> Iterator[Path]:
    """A memory group (cgroup, version 1) inside the one that this process is in, whose limits go on to hold; gone at
    the end. Skips where none can be made, and says why."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    root = Path("/sys/fs/cgroup/memory", *Path(own or "/").parts[1:])
    if own is None or not (root / "memory.limit_in_bytes").exists():
        pytest.skip(f"this process is in no memory group of version 1 that can be seen at {root}")
    if (root / "memory.use_hierarchy").read_text().strip() != "1":
        pytest.skip(f"a group inside {root} would not count there: memory.use_hierarchy is 0")
    made = root / f"deepspeed-test-{uuid.uuid4().hex[:12]}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group can be made: {error}")
    try:
        yield made
    finally:
        made.rmdir()


def run(config: dict[str, object], group: Path) -> subprocess.CompletedProcess[str]:
    """The script through the launcher, in the group, under a limit from the moment on when it is warm."""
    program = "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid())); "
    program += "os.execv(sys.executable, [sys.executable, '-m', 'deepspeed.launcher.runner', *sys.argv[2:]])"
    script = group_script()
    arguments = ["--num_gpus", "1", str(script), json.dumps(config), json.dumps(WIDE[1]), str(group), str(ROOM)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program, str(group), *arguments], env=environment, cwd=REPOSITORY,
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip


def group_script() -> Path:
    """The script as a file."""
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"deepspeed-killed-{os.getpid()}.py")
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_the_killer_of_a_container_and_what_was_said_before_it() -> None:
    try:
        with group_of_memory() as group:
            killed = run(CONFIG, group)
        text = killed.stdout + killed.stderr
        assert killed.returncode != 0 and "trained" not in text
        assert "by the kernel's out-of-memory killer" in text, text[-3000:]
        assert "memory of the container runs out for activations (" in text, text[-3000:]
        assert "Before that it said: memory of the container runs out for activations" in text, text[-3000:]
        change = suggestion(text)
        with group_of_memory() as group:
            again = run(laid_over(CONFIG, change), group)
        assert again.returncode == 0 and "trained" in again.stdout, (change, (again.stdout + again.stderr)[-3000:])
    finally:
        group_script().unlink()
