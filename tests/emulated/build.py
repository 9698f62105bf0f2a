"""Compiles the emulated device once per content of its sources, torch and Python; the result is kept outside of git."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
NAME = "_emulated_device"
FLAGS = [
    *["-std=c++20", "-O1", "-fPIC", "-w", "-shared"],
    *["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-D_GLIBCXX_USE_CXX11_ABI=1"],
]
LIBRARIES = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]


def compiler() -> str | None:
    """The path of g++, or None where there is none."""
    return shutil.which("g++")


def torch_folder() -> Path:
    """Where torch is installed; it must not be imported before the device is loaded."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise ImportError("torch is not installed")
    return Path(found.submodule_search_locations[0])


def cache() -> Path:
    """The folder of everything that was ever compiled here."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "deepspeed-tests"


def digest() -> str:
    """Names what the compiler is given."""
    found = hashlib.sha256(" ".join(FLAGS).encode())
    for path in (*sorted(SOURCES.glob("*.cpp")), *sorted(SOURCES.glob("*.h"))):
        found.update(path.name.encode() + path.read_bytes())
    found.update(str(torch_folder()).encode())  # it is linked by its path
    found.update((torch_folder() / "version.py").read_bytes())
    found.update(str(sysconfig.get_config_var("EXT_SUFFIX")).encode())
    return found.hexdigest()[:16]


def built() -> Path:
    """The shared library, compiled unless it is there.

    Raises:
        RuntimeError: the compiler refused; with its words.
    """
    folder = cache() / f"emulated-{digest()}"
    library = folder / f"{NAME}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    torch = torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [compiler() or "g++", *FLAGS, *(f"-I{folder}" for folder in includes), str(SOURCES / "all.cpp")]
        command += ["-o", str(made), f"-L{torch / 'lib'}", *LIBRARIES, f"-Wl,-rpath,{torch / 'lib'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the emulated device does not compile:\n{done.stderr[-4000:]}")
        made.rename(library)


if __name__ == "__main__":
    print(built())
