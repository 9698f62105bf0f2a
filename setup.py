"""Builds `deepspeed/native/*.cpp` into one shared library where a compiler is; all else is in pyproject.toml.

`DS_BUILD_NATIVE` in the environment: 0 leaves the library out (the wheel is pure), 1 makes a failed build an error.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("deepspeed", "native")
SOURCES = sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")])
WANTED = os.environ.get("DS_BUILD_NATIVE", "")


class BuildLibrary(build_ext):
    """Builds a plain shared library: no Python in it, so its name carries no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where the loader in `deepspeed/native/__init__.py` looks."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))


COMMANDS: dict[str, type] = {"build_ext": BuildLibrary}

with contextlib.suppress(ImportError):  # setuptools before 70 builds in place, but no wheel
    from setuptools.command.bdist_wheel import bdist_wheel

    class Wheel(bdist_wheel):
        """Tags a wheel with the library by its platform alone: any Python 3 can load it."""

        def get_tag(self) -> tuple[str, str, str]:
            """The tag of Python, of its binary interface and of the platform."""
            _, _, platform = super().get_tag()
            return "py3", "none", platform

    COMMANDS["bdist_wheel"] = Wheel


def fingerprint() -> int:
    """A checksum of all sources, as the loader forms it, so that a library older than its sources is not used."""
    checksum = 0
    for source in SOURCES:
        checksum = zlib.crc32(source.read_bytes(), checksum)
    return checksum


# Contracted or reordered arithmetic would give other bits on each kind of processor; the two after that let the
# compiler use vectors for roots and choices, and change no bit.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-pthread",
]

# Not -fopenmp: the library takes the OpenMP that torch has loaded, whatever its file is called there; a second one
# would start threads of its own. What is not to be had then is told when the library is loaded, not at the first call.
LINK_FLAGS = ["-pthread", "-Wl,-z,now"]

library = Extension(
    "deepspeed.native.library",
    sources=[str(source) for source in SOURCES if source.suffix == ".cpp"],
    depends=[*map(str, SOURCES), "setup.py"],
    define_macros=[("DS_FINGERPRINT", f"{fingerprint()}u")],
    language="c++",
    extra_compile_args=FLAGS,
    extra_link_args=LINK_FLAGS,
    optional=WANTED != "1",
)

setup(ext_modules=[] if WANTED == "0" else [library], cmdclass=COMMANDS)
