"""The build of the native library, and what its loader says when there is none."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed import native
from deepspeed.foundation import log

REPOSITORY = Path(__file__).parents[3]
SOURCES = REPOSITORY / "deepspeed" / "native"
COMPILER = shutil.which(os.environ.get("CXX") or "g++")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loader as in a new process, before and after."""
    native._load.cache_clear()
    monkeypatch.setattr(log, "_said", set())
    yield
    native._load.cache_clear()


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The build that pip runs, with its output under `folder`."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "o")]
    return subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=True
    )


def planted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the room's sources from which the loader now loads."""
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(native, "_FILE", folder / "library.so")
    return folder / "library.so"


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.partition("[deepspeed] ")[2] for line in capsys.readouterr().err.splitlines()]


def test_it_is_turned_off_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DS_NATIVE", "0")
    assert native.library() is None and native.library() is None
    assert said(capsys) == ["native library: off (DS_NATIVE=0); plain torch does its work"]


def test_what_is_missing_broken_or_old_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DS_NATIVE", raising=False)
    library = planted(tmp_path / "native", monkeypatch)
    assert native.library() is None
    (line,) = said(capsys)
    assert "not built; `python setup.py build_ext --inplace`" in line
    native._load.cache_clear()
    library.write_bytes(b"not a library")
    assert native.library() is None
    (line,) = said(capsys)
    assert "cannot be loaded" in line


def test_without_a_compiler_the_build_passes_with_one_line(tmp_path: Path) -> None:
    done = build(tmp_path, CC="/no/compiler", CXX="/no/compiler")
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "failed" in line]
    assert len(lines) == 1 and 'building extension "deepspeed.native.library" failed' in lines[0]
    assert not list(tmp_path.rglob("*.so"))


# torch gives its OpenMP to all; a build that keeps it to itself is had by taking that wish out of its import
_HIDDEN_OPENMP = """
import ctypes, re
wish, ctypes.RTLD_GLOBAL = ctypes.RTLD_GLOBAL, ctypes.RTLD_LOCAL
import torch
ctypes.RTLD_GLOBAL = wish
from deepspeed import native
try:
    ctypes.CDLL(str(native._FILE))
    print("open")
except OSError as error:
    print("hidden" if "undefined symbol" in str(error) else error)
assert native.library() is not None, native.state()
torch.ones(1 << 20).exp().sum()
print(len(set(re.findall(r"\\S*gomp\\S*", open("/proc/self/maps").read()))))
"""


@pytest.mark.skipif(not native._FILE.exists(), reason="the library is not built")
def test_openmp_is_torchs_also_where_torch_keeps_it_to_itself() -> None:
    done = subprocess.run([sys.executable, "-c", _HIDDEN_OPENMP], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["hidden", "1"], done.stderr


@pytest.mark.skipif(not native._FILE.exists() or not shutil.which("readelf"), reason="no library, or no binutils")
def test_the_library_needs_no_openmp_and_no_torch_of_its_own() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(native._FILE)], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]").split(".")[0] for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64", "ld-linux-aarch64"}


def test_a_wheel_without_the_library_says_which_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DS_NATIVE", raising=False)
    monkeypatch.setattr(native, "_FILE", tmp_path / "library.so")  # neither library nor sources, as installed
    assert native.library() is None
    assert "not in this wheel; the one for this platform" in said(capsys)[0]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_library_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DS_NATIVE", raising=False)
    library = planted(tmp_path / "native", monkeypatch)
    build(tmp_path / "built")
    (made,) = (tmp_path / "built").rglob("*.so")
    shutil.copy(made, library)
    assert isinstance(native.library(), ctypes.CDLL)
    assert "kernels on" in native.state() and said(capsys) == []
    native._load.cache_clear()
    with (library.parent / "norm.cpp").open("a") as source:
        source.write("// another\n")
    assert native.library() is None
    assert "built from other sources" in said(capsys)[0]


@pytest.mark.parametrize(
    ("environment", "torch_threads", "wanted"),
    [
        ({}, 8, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 8, 2),
        ({"LOCAL_SIZE": "4"}, 8, 2),
        ({"LOCAL_WORLD_SIZE": "100"}, 8, 1),
        ({}, 3, 3),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "5"}, 5, 5),
    ],
)
def test_threads_are_the_ranks_share_of_the_cores(
    environment: dict[str, str], torch_threads: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(native.torch, "get_num_threads", lambda: torch_threads)
    assert native.threads() == wanted


def run_driver(compiler: str, folder: Path, *runner: str) -> str:
    """Build the driver and all kernels into one program; returns what it prints."""
    program = folder / "driver"
    sources = [str(SOURCES / f"{name}.cpp") for name in ("library", "norm", "optimizers")]
    flags = ["-std=c++17", "-O3", "-Wall", "-Werror", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-static"]
    command = [compiler, *flags, "-DDS_FINGERPRINT=0u", f"-I{SOURCES}", "-o", str(program)]
    subprocess.run([*command, str(Path(__file__).with_name("driver.cpp")), *sources], check=True, timeout=300)
    return subprocess.run([*runner, str(program)], capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.slow
@pytest.mark.skipif(
    COMPILER is None or not shutil.which("aarch64-linux-gnu-g++") or not shutil.which("qemu-aarch64-static"),
    reason="no cross compiler and emulator for Arm",
)
def test_arm_gives_the_same_bits(tmp_path: Path) -> None:
    assert platform.machine() == "x86_64" and COMPILER is not None
    folders = [tmp_path / name for name in ("here", "arm")]
    for folder in folders:
        folder.mkdir()
    here = run_driver(COMPILER, folders[0])
    arm = run_driver("aarch64-linux-gnu-g++", folders[1], "qemu-aarch64-static")
    assert len(here.splitlines()) == 30 and here == arm


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="no cross compiler for Arm")
def test_every_source_compiles_for_arm(tmp_path: Path) -> None:
    for source in SOURCES.glob("*.cpp"):
        command = ["aarch64-linux-gnu-g++", "-std=c++17", "-O1", "-Wall", "-DDS_FINGERPRINT=0u", "-fopenmp", "-fPIC"]
        subprocess.run([*command, "-c", str(source), "-o", str(tmp_path / "o")], check=True, timeout=300)
