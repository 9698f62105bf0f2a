"""`make wheels`: the source distribution and both wheels, the same bytes from the same files.

python -m tools.wheels [--out dist]

The source distribution is made of the files that git knows, and both wheels of nothing but the source distribution.
Times are the commit's (`SOURCE_DATE_EPOCH` overrides it), archives are sorted, owners and modes are left out. What is
made is then looked at: `twine check --strict`, `auditwheel show`, sizes, contents.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# The floor of torch's own wheels; what the library asks for is less, which `auditwheel show` confirms below.
PLATFORM = f"manylinux_2_28_{os.uname().machine}"
LARGEST = 2_000_000  # bytes of a wheel
NATIVE = "deepspeed/native/library.so"
_BUILD = """
import sys
from setuptools import build_meta
kind, out, *options = sys.argv[1:]
settings = {"--build-option": options} if options else None
name = build_meta.build_sdist(out) if kind == "sdist" else build_meta.build_wheel(out, settings)
"""


class BuildError(RuntimeError):
    """A distribution could not be made, or is not what it should be; says which and why."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist", help="folder; what lies in it is replaced")
    options = parser.parse_args()
    try:
        made = build(options.out)
        remarks = {file: inspect(file) for file in made}
    except BuildError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    for file, remark in remarks.items():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{file.name}: {file.stat().st_size:,} bytes{remark}\n  sha256 {digest}")
    return 0


def build(out: Path) -> list[Path]:
    """Make the source distribution, the pure wheel and the wheel with the native library in `out`.

    Raises:
        BuildError: the build of one failed; carries its output.
    """
    epoch = _epoch()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        folder = Path(name)
        _export(folder / "tree")
        sources = _same_tar(_run("sdist", folder / "tree", folder / "sdist", epoch), out, epoch)
        made = [sources]
        for native, options in (("0", []), ("1", ["--plat-name", PLATFORM])):
            with tarfile.open(sources) as archive:
                archive.extractall(folder / native, filter="data")
            (tree,) = (folder / native).iterdir()
            wheel = _run("wheel", tree, folder / f"wheel{native}", epoch, native, *options)
            made.append(_same_zip(wheel, out, epoch))
    return made


def inspect(file: Path) -> str:
    """Look at one distribution; returns what there is to say of it.

    Raises:
        BuildError: something is missing in it, too much, or not portable.
    """
    _tool("twine", "check", "--strict", str(file))
    if file.suffix != ".whl":
        return ""
    if file.stat().st_size > LARGEST:
        raise BuildError(f"{file.name} has {file.stat().st_size:,} bytes; at most {LARGEST:,} are wanted")
    with zipfile.ZipFile(file) as archive:
        inside = set(archive.namelist())
        library = archive.read(NATIVE) if NATIVE in inside else b""
    wanted = {path for path in _tracked() if path.startswith("deepspeed/") and path.endswith((".py", "py.typed"))}
    if wanted - inside:
        raise BuildError(f"{file.name} lacks {', '.join(sorted(wanted - inside))}")
    if extra := [path for path in inside - wanted - {NATIVE} if ".dist-info/" not in path]:
        raise BuildError(f"{file.name} has files that git does not know: {', '.join(sorted(extra))}")
    if file.name.endswith("-none-any.whl") == bool(library):
        raise BuildError(f"{file.name} has {'a' if library else 'no'} native library")
    if not library:
        return ", pure"
    if tempfile.gettempdir().encode() in library or str(REPOSITORY).encode() in library:
        raise BuildError(f"{NATIVE} carries a path of the machine it was built on")
    shown = re.findall(r'"(\w+)"', _tool("auditwheel", "show", str(file)))
    oldest = _floor(shown)
    if oldest is None or oldest > _floor([PLATFORM]):  # type: ignore[operator]
        raise BuildError(f"{file.name} asks for more than {PLATFORM}: auditwheel says {' '.join(shown)}")
    return f", with the native library, loads on glibc {oldest[0]}.{oldest[1]} and later"


def _floor(tags: Iterable[str]) -> tuple[int, int] | None:
    """The lowest glibc among manylinux tags."""
    found = [re.match(r"manylinux_(\d+)_(\d+)_", tag) for tag in tags]
    return min(((int(one[1]), int(one[2])) for one in found if one), default=None)


def _git(*arguments: str) -> str | None:
    """What git says; None where this tree is no checkout."""
    if not (REPOSITORY / ".git").exists():
        return None
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def _epoch() -> int:
    """Seconds since 1970 that every file is given: the commit's, or those of an unpacked source distribution."""
    given = os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct")
    return int(given) if given else int((REPOSITORY / "setup.py").stat().st_mtime)


def _tracked() -> list[str]:
    listed = _git("ls-files", "-z")
    if listed is not None:
        return sorted(path for path in listed.split("\0") if path and (REPOSITORY / path).is_file())
    manifest = next(REPOSITORY.glob("*.egg-info/SOURCES.txt"), None)
    if manifest is None:
        raise BuildError(f"{REPOSITORY} is neither a git checkout nor an unpacked source distribution")
    return sorted(path for path in manifest.read_text().splitlines() if (REPOSITORY / path).is_file())


def _export(tree: Path) -> None:
    """Copy what git knows, so that leavings of earlier builds have no say."""
    for path in _tracked():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / path, tree / path)


def _run(kind: str, tree: Path, out: Path, epoch: int, native: str = "0", *options: str) -> Path:
    """Run setuptools on a tree; returns the one file it made."""
    out.mkdir()
    environment = os.environ | {
        "SOURCE_DATE_EPOCH": str(epoch),
        "DS_BUILD_NATIVE": native,
        "PYTHONHASHSEED": "0",
        "LC_ALL": "C.UTF-8",
    }
    command = [sys.executable, "-c", _BUILD, kind, str(out), *options]
    done = subprocess.run(
        command, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise BuildError(f"the {kind} (DS_BUILD_NATIVE={native}) could not be built:\n{done.stdout[-4000:]}")
    return next(out.iterdir())


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", name, *arguments], text=True, capture_output=True)
    if done.returncode:
        raise BuildError(f"{name} {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done.stdout.replace("\n", " ")


def _mode(path: str) -> int:
    return 0o755 if path.endswith(".so") else 0o644


def _same_tar(source: Path, out: Path, epoch: int) -> Path:
    """The archive with its members sorted, and of nobody."""
    made, packed = out / source.name, io.BytesIO()
    with tarfile.open(source) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted((one for one in old.getmembers() if one.isfile()), key=lambda one: one.name):
            kept = tarfile.TarInfo(member.name)
            kept.size, kept.mtime, kept.mode = member.size, epoch, _mode(member.name)
            new.addfile(kept, old.extractfile(member))
    with made.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as zipped:
        zipped.write(packed.getvalue())
    return made


def _same_zip(source: Path, out: Path, epoch: int) -> Path:
    """The wheel with its files sorted, and its own list of them last, as wheels have it."""
    made, moment = out / source.name, time.gmtime(max(epoch, 315_532_800))[:6]  # zip begins in 1980
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        files = (name for name in old.namelist() if not name.endswith("/"))
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name.endswith("/RECORD"), name)):
            kept = zipfile.ZipInfo(name, moment)
            kept.compress_type, kept.create_system = zipfile.ZIP_DEFLATED, 3
            kept.external_attr = (0o100000 | _mode(name)) << 16
            new.writestr(kept, old.read(name))
    return made


if __name__ == "__main__":
    sys.exit(main())
