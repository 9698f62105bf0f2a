"""Saves that fail, are cut or killed at every operation; disks that fill up; bits that flip; names that lead astray."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.compat.upstream_write import SCRIPTS
from deepspeed.checkpoint.format import filesystem
from deepspeed.checkpoint.format.manifest import read_manifest
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import CheckpointError, CheckpointMissingError, UsageError
from tests.harness.pool import free_port
from tests.parallel.checkpointing import differences, everything, make, train
from tests.parallel.tiny import raises, said, with_words

OPERATIONS = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove")


class Planted(filesystem.FileSystem):
    """The real operations up to the n-th, which fails, writes half of its bytes and fails, or kills the process."""

    def __init__(self, at: int, how: str) -> None:
        self.count, self._at, self._how = 0, at, how

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATIONS:
            return found

        def operation(*args: Any) -> Any:
            self.count += 1
            if self.count != self._at:
                return found(*args)
            if name == "write" and self._how != "fail":
                found(args[0], args[1][: len(args[1]) // 2], *args[2:])
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "planted")

        return operation


def save_with(engine: Any, folder: str, tag: str, at: int, how: str) -> bool:
    """Save with a fault planted at one operation; whether it went through."""
    filesystem.current = Planted(at, how)
    try:
        if how == "kill":
            child = os.fork()
            if not child:
                try:
                    engine.save_checkpoint(folder, tag)
                finally:
                    os._exit(0)
            return os.waitpid(child, 0)[1] == 0
        engine.save_checkpoint(folder, tag)
        return True
    except (OSError, CheckpointError):
        return False
    finally:
        filesystem.current = filesystem.FileSystem()


def every_operation(folder: str, how: str, tag: str, victim: int) -> int:
    """A fault at the first, second, … operation of one rank in a save, until one goes through."""
    before, after = f"{folder}/before", f"{folder}/after"
    with make(2) as engine:
        rank, ranks = dist.get_rank(), Ranks(engine._axes.dp_sp_group)
        batches = iter(engine.training_dataloader)
        train(engine, batches, 2)
        engine.save_checkpoint(before, "first")
        old = everything(engine)
        train(engine, batches, 2)
        engine.save_checkpoint(after)
        new = everything(engine)
        for at in range(1, 100):
            work = f"{folder}/{at}"
            with ranks.together("copying"):
                rank or shutil.copytree(before, work)
            every = ranks.gather(save_with(engine, work, tag, at if rank == victim else 0, how))
            through = all(every)
            assert through or not any(every), "a save failed on some ranks only"
            engine.load_checkpoint(work)
            now = everything(engine)
            assert not differences(now, new) or not (through or differences(now, old)), at
            assert not through or not differences(now, new), at
            engine.load_checkpoint(after)
            engine.save_checkpoint(work, tag)  # whatever was left behind is out of the way now
            assert {path.name for path in Path(work).iterdir()} == {"first", tag, "latest", *SCRIPTS}, at
            engine.load_checkpoint(work, tag)
            assert not differences(everything(engine), new), at
            with ranks.together("removing"):
                rank or shutil.rmtree(work)
            if through:
                return at
    raise AssertionError("no save went through")


@pytest.mark.drawn(3)
@pytest.mark.parametrize("tag", ["first", "second"])
@pytest.mark.parametrize("how", ["fail", "cut", "kill"])
def test_a_fault_at_any_operation_costs_no_checkpoint(workers: Any, tmp_path: Path, how: str, tag: str) -> None:
    assert workers(1).run(every_operation, str(tmp_path), how, tag, 0, timeout=120)[0] > 15


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["first", "second"])
@pytest.mark.parametrize("how", ["fail", "cut"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_fault_of_one_of_two_ranks(workers: Any, tmp_path: Path, how: str, tag: str, victim: int) -> None:
    tried = workers(2).run(every_operation, str(tmp_path), how, tag, victim, timeout=280)[0]
    assert tried > (3 if victim else 15)  # the other rank writes its tensors and nothing else


# -- what is found broken, and what is loaded instead -----------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[-3] ^= 4
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)


def broken_ones_are_passed_over(folder: str, name: str, how: str, stage: int) -> None:
    with make(stage) as engine:
        batches = iter(engine.training_dataloader)
        train(engine, batches, 1)
        engine.save_checkpoint(folder, "good")
        good = everything(engine)
        train(engine, batches, 1)
        engine.save_checkpoint(folder, "bad")
        path = Path(folder, "bad", name)
        if dist.get_rank() == 0:
            path.unlink() if how == "gone" else damage(path, how)
        dist.barrier()
        with said() as lines:
            loaded, _ = engine.load_checkpoint(folder)
        assert Path(loaded).name == "good" and not differences(everything(engine), good)
        assert dist.get_rank() or with_words(lines, "'bad' is skipped")
        with raises(CheckpointError, "bad"):
            engine.load_checkpoint(folder, "bad")
        if name.startswith("rank") and how == "flip":  # found while tensors are replaced
            stays_unusable_until_a_load_goes_through(engine, folder)
        else:
            assert not differences(everything(engine), good)


def stays_unusable_until_a_load_goes_through(engine: Any, folder: str) -> None:
    batches = iter(engine.training_dataloader)
    with raises(UsageError, "the last load failed in the middle", "rank-00001.safetensors", "load another checkpoint"):
        engine(next(batches))
    with raises(UsageError, "the last load failed in the middle"):
        engine.save_checkpoint(folder, "mixed")
    assert not Path(folder, "mixed").exists()
    engine.load_checkpoint(folder, "good", load_module_only=True)
    with raises(UsageError, "optimizer included"):
        engine(next(batches))
    engine.load_checkpoint(folder, "good")
    train(engine, batches, 1)
    engine.save_checkpoint(folder, "whole")


BROKEN = list(
    itertools.product(("manifest.json", "state.json", "rank-00001.safetensors"), ("flip", "cut", "gone"), (2,))
)
# A flip in a tensor is found last, while tensors are replaced; at stage 3 only by the rank that reads its own shard.
FLIPPED = ("rank-00001.safetensors", "flip", 3)
FAST = {BROKEN[0], BROKEN[4], FLIPPED, BROKEN[8]}


@pytest.mark.parametrize(
    ("name", "how", "stage"),
    [pytest.param(*one, marks=() if one in FAST else pytest.mark.slow) for one in (*BROKEN, FLIPPED)],
)
def test_the_newest_complete_one_is_loaded(workers: Any, tmp_path: Path, name: str, how: str, stage: int) -> None:
    workers(2).run(broken_ones_are_passed_over, str(tmp_path), name, how, stage, timeout=120)


def latest_is_not_needed(folder: str) -> None:
    with make(1) as engine:
        assert engine.load_checkpoint(f"{folder}/nothing") == (None, None)
        with raises(CheckpointMissingError, "there is no folder", "gone"):
            engine.load_checkpoint(folder, "gone")
        train(engine, iter(engine.training_dataloader), 1)
        engine.save_checkpoint(folder, "one")
        engine.save_checkpoint(folder, "two", save_latest=False)
        assert Path(engine.load_checkpoint(folder)[0]).name == "one"
        latest = Path(folder, "latest")
        for text in ("", "missing", "../one", "/etc"):
            latest.write_text(text)
            assert Path(engine.load_checkpoint(folder)[0]).name == "two", text
        latest.unlink()
        assert Path(engine.load_checkpoint(folder)[0]).name == "two"


def test_a_missing_or_wrong_latest(workers: Any, tmp_path: Path) -> None:
    workers(1).run(latest_is_not_needed, str(tmp_path), timeout=120)


def fails_on_one_rank(folder: str) -> None:
    with make(3) as engine:
        train(engine, iter(engine.training_dataloader), 1)
        engine.save_checkpoint(folder, "first")
        if dist.get_rank() == 1:
            filesystem.current = Planted(1, "fail")
        try:
            with raises((OSError, CheckpointError), "No space left"):
                engine.save_checkpoint(folder, "second")
        finally:
            filesystem.current = filesystem.FileSystem()
        assert Path(engine.load_checkpoint(folder)[0]).name == "first"


def test_a_failure_of_one_rank_is_one_of_all(workers: Any, tmp_path: Path) -> None:
    workers(2).run(fails_on_one_rank, str(tmp_path), timeout=120)


class Roomless(filesystem.FileSystem):
    def free_bytes(self, path: Path) -> int:
        return 1000


class Boastful(filesystem.FileSystem):
    def free_bytes(self, path: Path) -> int:
        return 1 << 40


def full_disk(folder: str) -> None:
    with make(0) as engine:
        filesystem.current = Roomless()
        with raises(CheckpointError, "MiB free", "nothing was written"):
            engine.save_checkpoint(folder, "first")
        assert not [path for path in Path(folder).iterdir() if path.name != "filler"]
        filesystem.current = Boastful()
        engine.save_checkpoint(folder, "first")
        Path(folder, "filler").write_bytes(bytes(os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize - 8192))
        with raises(OSError, "No space left"):
            engine.save_checkpoint(folder, "second")
        filesystem.current = filesystem.FileSystem()
        assert Path(engine.load_checkpoint(folder)[0]).name == "first"


@pytest.mark.slow  # the same error at each operation is above; a disk that is really full: test_disk.py
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """On a file system of 2 MiB, which a name space of our own may mount."""
    inside = (
        "import sys; from pathlib import Path; import deepspeed; from tests.faults.test_checkpoint import full_disk;"
        "deepspeed.init_distributed('gloo'); full_disk(sys.argv[1])"
    )
    command = f'mount -t tmpfs -o size=2m none {tmp_path} && exec {sys.executable} -c "{inside}" {tmp_path}'
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(free_port())
    where = Path(__file__).parents[2]
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], env=environment, cwd=where, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


# -- names and pickles from strangers ---------------------------------------------------------------------------------

EVIL_PATH = [""]


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, (f"touch {EVIL_PATH[0]}",))


def evil_files(folder: str) -> None:
    EVIL_PATH[0] = f"{folder}/executed"
    with make(2) as engine:
        train(engine, iter(engine.training_dataloader), 1)
        for tag in ("../out", "a/b", "", ".hidden", "..", "latest", "a\0b"):
            with raises(CheckpointError, "tag"):
                engine.save_checkpoint(f"{folder}/native", tag)
            with raises(CheckpointError, "tag"):
                engine.load_checkpoint(f"{folder}/native", tag)
        engine.save_checkpoint(f"{folder}/native", "one")
        path, _ = engine.load_checkpoint(f"{folder}/native")
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            torch.save(Evil(), Path(path, name))
        torch.save({"a": Evil()}, f"{folder}/native/one/state.pickle")
        with raises(CheckpointError, "mp_rank_00_model_states.pt"):  # not what was written
            engine.load_checkpoint(f"{folder}/native")
        for where, value in {
            "model": {"module": {"x": Evil()}},
            "whole": Evil(),
            "client": {"module": {}, "client": Evil()},
            "scaler": {"module": {}, "param_shapes": [{}]},
        }.items():
            upstream = Path(folder, where, "tag")
            upstream.mkdir(parents=True)
            torch.save(value, upstream / "mp_rank_00_model_states.pt")
            for rank in range(2):
                torch.save(
                    {"optimizer_state_dict": Evil()}, upstream / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
                )
            with raises(CheckpointError, "is refused"):
                engine.load_checkpoint(upstream.parent, "tag")
    assert not Path(EVIL_PATH[0]).exists()
    assert {entry.name for entry in Path(folder).iterdir()} == {"native", "model", "whole", "client", "scaler"}


def test_nothing_of_a_strangers_file_is_executed(workers: Any, tmp_path: Path) -> None:
    workers(1).run(evil_files, str(tmp_path), timeout=120)


def pickled_client_state(folder: str) -> None:
    EVIL_PATH[0] = f"{folder}/executed"
    with make(1) as engine:
        with raises(CheckpointError, "client_state['x'][0]", "client_state_pickle"):
            engine.save_checkpoint(folder, "one", client_state={"x": [Evil()]})
        assert not Path(folder, "one").exists()
    with make(1, checkpoint={"client_state_pickle": True}) as engine:
        engine.save_checkpoint(folder, "one", client_state={"x": [len]})
        assert engine.load_checkpoint(folder)[1]["x"] == [len]
    with make(1) as engine:
        before = everything(engine)
        with raises(CheckpointError, "client_state_pickle: true"):
            engine.load_checkpoint(folder, "one")
        assert not differences(everything(engine), before)


def test_pickles_need_leave_on_both_sides(workers: Any, tmp_path: Path) -> None:
    workers(1).run(pickled_client_state, str(tmp_path), timeout=120)


def manifest_names(folder: str) -> None:
    with make(1) as engine:
        engine.save_checkpoint(folder, "one")
        path = Path(folder, "one", "manifest.json")
        manifest = read_manifest(path.parent)
        manifest.files["../../secret"] = manifest.files["state.json"]
        path.write_bytes(manifest.to_bytes())
        with raises(CheckpointError, "outside"):
            engine.load_checkpoint(folder, "one")


def test_a_manifest_cannot_name_files_elsewhere(workers: Any, tmp_path: Path) -> None:
    workers(1).run(manifest_names, str(tmp_path), timeout=120)
