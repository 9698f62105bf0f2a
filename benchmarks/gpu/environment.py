"""What is on the machine, what its card reaches, and what has to be built there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.gpu.plan import MissingError, Setting
from benchmarks.gpu.rounds import timed
from benchmarks.gpu.work import REPOSITORY

NEEDED = ("torch", "pydantic", "hjson", "tqdm", "psutil", "safetensors", "numpy", "transformers")
OPTIONAL = ("triton", "vllm", "pytest", "hypothesis", "matplotlib", "accelerate")
HEAD, WIDTH = 64, 2048  # of the model of the part `generation`


def measure(setting: Setting, what: str) -> dict[str, Any]:
    """The part `environment`."""
    return {"machine": _machine, "native": _native, "kernels": _kernels, "ceilings": _ceilings}[what](setting)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "there" if importlib.util.find_spec(name) else ""


def _machine(setting: Setting) -> dict[str, Any]:
    import psutil
    import torch

    card = torch.cuda.get_device_properties(0)
    versions = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    missing = [name for name in NEEDED if not versions[name]]
    tools = {name: shutil.which(name) or "" for name in ("g++", "nvcc", "nvidia-smi")}
    facts = {
        "python": platform.python_version(), "cuda": torch.version.cuda, "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total, "card": torch.cuda.get_device_name(),
        "card memory": card.total_memory, "capability": list(torch.cuda.get_device_capability()),
        "driver": _driver() if tools["nvidia-smi"] else "", "versions": versions, "tools": tools,
    }  # fmt: skip
    absent = [name for name, place in {**versions, **tools}.items() if not place]
    says = f"{facts['card']}, {card.total_memory / 2**30:.0f} GiB, {facts['cores']} cores, Python {facts['python']}, "
    says += ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return {"says": says + (f"; not there: {', '.join(absent)}" if absent else ""), "ok": not missing, **facts}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


def _built(command: list[str], seconds: float, environment: dict[str, str] | None = None) -> None:
    """Run a build command; its output goes to the log.

    Raises:
        MissingError: it failed or took too long; with its last lines.
    """
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env={**os.environ, **(environment or {})}, timeout=seconds,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise MissingError(f"{' '.join(command[1:4])} was not over after {seconds:.0f} s") from error
    print(done.stdout)
    if done.returncode:
        raise MissingError(f"{' '.join(command[1:4])}: {' '.join(done.stdout.split()[-40:])}")


def _native(setting: Setting) -> dict[str, Any]:
    asked = [sys.executable, "-c", "from deepspeed import native; print(native.library() is not None, native.state())"]
    for attempt in (1, 2):
        told = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
        there, _, state = told.stdout.strip().splitlines()[-1].partition(" ")
        if there == "True" or attempt == 2:
            break
        if shutil.which("g++") is None:
            raise MissingError("no g++: the native library is not built, and plain torch does its work")
        _built([sys.executable, "setup.py", "build_ext", "--inplace"], setting.seconds)
    return {"says": state, "ok": there == "True"}


def _kernels(setting: Setting) -> dict[str, Any]:
    """Kernels of the part `generation`; further ones that were brought along are kept and used."""
    import torch

    from deepspeed.ops.triton.build import COMPILED, build  # noqa: F401  without Triton, its absence is said below
    from deepspeed.ops.triton.load import architecture_of

    architecture = architecture_of(torch.cuda.get_device_capability())
    if architecture is None:
        raise MissingError("kernels are compiled for compute capability 8.x and 9.0")
    sizes = ["--arch", architecture, "--dtype", "bf16", "--head-size", str(HEAD), "--page-size", "16",
             "--caps", "without", "--width", str(WIDTH)]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = scratch if setting.rehearse else str(COMPILED)  # a rehearsal leaves the package as it is
        if importlib.util.find_spec("triton") is None:
            raise MissingError(f"no Triton, so nothing is built{_brought(architecture)}")
        began = time.perf_counter()
        command = [sys.executable, "-m", "deepspeed.ops.triton.build", folder, *sizes]
        _built(command, setting.seconds, {"TRITON_INTERPRET": "0"})
        took = time.perf_counter() - began
    return {"says": f"built for {architecture} in {took:.0f} s{_brought(architecture)}"}


def _brought(architecture: str) -> str:
    from deepspeed.errors import DeepSpeedError
    from deepspeed.ops.triton.build import COMPILED
    from deepspeed.ops.triton.load import LoadedKernels

    try:
        return f"; {len(LoadedKernels(COMPILED, architecture, driver=_NoDriver())._entries)} kernels are in the package"
    except DeepSpeedError as error:
        return f"; {error}"


class _NoDriver:
    """Loads nothing: kernels are only counted."""

    def load(self, code: bytes, function: str, shared: int) -> Any:
        raise MissingError("kernels are only counted")

    def launch(self, function: Any, grid: Any, threads: int, shared: int, arguments: list[Any]) -> None:
        raise MissingError("kernels are only counted")


def _ceilings(setting: Setting) -> dict[str, Any]:
    """Bytes per second of a copy (read and written), operations per second of a bf16 product, both on random data."""
    import torch

    numbers, side = setting.pick(1 << 31, 1 << 16), setting.pick(8192, 64)
    source = torch.empty(numbers, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    copies = sorted(timed(lambda: target.copy_(source)) for _ in range(12))
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    products = sorted(timed(lambda: a @ b) for _ in range(12))
    bandwidth, rate = 2 * numbers / copies[5], 2 * side**3 / products[5]
    says = f"a copy moves {bandwidth / 1e12:.2f} TB/s, a bf16 product of {side} does {rate / 1e12:.0f} TFLOP/s"
    return {"says": says, "bandwidth": bandwidth, "rate": rate}
