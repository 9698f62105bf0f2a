"""Builds `deepspeed/native/*.cpp` into one shared library where a compiler is; all else is in pyproject.toml."""

from __future__ import annotations

import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("deepspeed", "native")
SOURCES = sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")])


class BuildLibrary(build_ext):
    """Builds a plain shared library: no Python in it, so its name carries no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where the loader in `deepspeed/native/__init__.py` looks."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))


def fingerprint() -> int:
    """A checksum of all sources, as the loader forms it, so that a library older than its sources is not used."""
    checksum = 0
    for source in SOURCES:
        checksum = zlib.crc32(source.read_bytes(), checksum)
    return checksum


# Contracted or reordered arithmetic would give other bits on each kind of processor; the two after that let the
# compiler use vectors for roots and choices, and change no bit.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]

library = Extension(
    "deepspeed.native.library",
    sources=[str(source) for source in SOURCES if source.suffix == ".cpp"],
    depends=[*map(str, SOURCES), "setup.py"],
    define_macros=[("DS_FINGERPRINT", f"{fingerprint()}u")],
    language="c++",
    extra_compile_args=FLAGS,
    extra_link_args=["-fopenmp"],
    optional=True,
)

setup(ext_modules=[library], cmdclass={"build_ext": BuildLibrary})
