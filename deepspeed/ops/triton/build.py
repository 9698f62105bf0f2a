"""Compile the GPU kernels ahead of time, without a GPU: `python -m deepspeed.ops.triton.build FOLDER`.

For each architecture and variant the folder gets a file of machine code, and `manifest.json` with the facts that the
loader needs, and what the compiler says of registers, spilled bytes and shared memory. Needs Triton, and its assembler
and disassembler, which come with it. Nothing is compiled at run time: the loader (`load.py`) only loads.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.errors import NotAvailableError
from deepspeed.foundation.log import log_rank0
from deepspeed.ops.triton.row_variants import block_variants, row_variants
from deepspeed.ops.triton.variants import DTYPES, WGMMA, KernelForm, all_variants

COMPILED = Path(__file__).parent / "compiled"  # default folder
MANIFEST = "manifest.json"
FORMAT = 1
ARCHITECTURES = {"sm_80": 80, "sm_90": 90}
# Per multiprocessor: registers, threads, bytes of shared memory. Of a program: bytes reserved by the driver.
LIMITS = {"sm_80": (65536, 2048, 164 << 10, 1024), "sm_90": (65536, 2048, 228 << 10, 1024)}
WARP = 32
SCRATCH = 2  # arguments that Triton adds after a kernel's own: two addresses of scratch memory, which is not used


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes.

    Args:
        registers: 32-bit registers of a thread.
        stack: bytes of a thread's stack, which spilled registers take.
        shared: bytes of shared memory of a program.
        programs: programs that one multiprocessor holds at once.
        occupancy: threads of these over the most that it holds.
    """

    registers: int
    stack: int
    shared: int
    programs: int
    occupancy: float


def occupancy(architecture: str, warps: int, registers: int, shared: int) -> tuple[int, float]:
    """Return how many programs a multiprocessor holds, and the share of its threads that they are.

    Registers are given to a warp in units of 256, that is eight of each thread.
    """
    all_registers, threads, memory, reserved = LIMITS[architecture]
    of_a_warp = -(-registers // 8) * 8 * WARP
    programs = min(all_registers // (of_a_warp * warps), threads // (warps * WARP), memory // (shared + reserved), 32)
    return programs, programs * warps * WARP / threads


def compile_variant(variant: KernelForm, architecture: str) -> tuple[bytes, dict[str, Any]]:
    """Compile one variant for "sm_80" or "sm_90".

    Returns:
        Machine code, and its entry of the manifest.

    Raises:
        NotAvailableError: Triton is missing or interprets kernels, the architecture is unknown, or the head size is no
            multiple of 16.
    """
    if architecture not in ARCHITECTURES:
        raise NotAvailableError(f"kernels are compiled for {', '.join(ARCHITECTURES)}, not for {architecture!r}")
    if not variant.even:
        raise NotAvailableError(f"kernels are compiled for sizes that are multiples of 16, not for {variant.name}")
    triton = _triton()
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    module = importlib.import_module(f"deepspeed.ops.triton.{variant.module}")
    names = list(variant.signature)
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in variant.aligned}
    warps, constants = variant.form_on(architecture)
    source = ASTSource(getattr(module, variant.kernel), variant.signature, constants, aligned)
    # Without fused multiply-add in sums, the same expression has the same bits in every kernel.
    options = {"num_warps": warps, "num_stages": variant.stages, "enable_fp_fusion": False}
    target = GPUTarget("cuda", ARCHITECTURES[architecture], WARP)
    with _environment("DISABLE_MMA_V3", None if WGMMA else "1"):  # the compiler reads it
        compiled = triton.compile(source, target=target, options=options)
    code, shared = compiled.asm["cubin"], compiled.metadata.shared
    registers, stack = _resources(code, triton)
    programs, share = occupancy(architecture, warps, registers, shared)
    usage = Usage(registers, stack, shared, programs, round(share, 3))
    types = [kind for kind in variant.signature.values() if kind != "constexpr"]
    _check_call(compiled, len(types) + SCRATCH)
    entry = {
        "file": f"{architecture}/{variant.name}.cubin",
        "function": compiled.metadata.name,
        "warps": warps,
        "types": types,
        "aligned": [
            i for i, name in enumerate(n for n in names if n not in variant.constants) if name in variant.aligned
        ],
        "sha256": hashlib.sha256(code).hexdigest(),
        "layouts": sorted(set(re.findall(r"#ttg\.nvidia_mma<\{[^}]*\}>", compiled.asm["ttgir"]))),
        **vars(usage),
    }
    return code, entry


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Context in which a variable of the environment has a value; None: is not set."""
    previous = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if previous is not None:
            os.environ[name] = previous


def _triton() -> Any:
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError as error:
        raise NotAvailableError("compiling kernels needs Triton: pip install triton") from error
    if triton.knobs.runtime.interpret:
        raise NotAvailableError("TRITON_INTERPRET is set: kernels are interpreted and cannot be compiled; unset it")
    return triton


def _check_call(compiled: Any, count: int) -> None:
    """Raise NotAvailableError unless a kernel takes `count` arguments and no scratch memory, as the loader assumes."""
    text = compiled.asm["ptx"]
    entry = text[text.index(".entry") :]
    parameters = entry[: entry.index("{")].count(".param")
    scratch = [getattr(compiled.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
    if parameters != count or any(scratch):
        raise NotAvailableError(
            f"this Triton passes {parameters} arguments instead of {count}, and {scratch} bytes of scratch memory: "
            "kernels that it compiles cannot be launched by the loader"
        )


def _resources(code: bytes, triton: Any) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread, by the disassembler."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise NotAvailableError(f"{tool} does not say what a kernel takes: {text[:200]!r}")
    return int(match[1]), int(match[2])


def build(folder: Path, architectures: Iterable[str], variants: Iterable[KernelForm]) -> dict[str, Any]:
    """Compile variants for architectures into a folder, and return its manifest.

    Code that is there from the same sources is kept. The compiler's own cache is not written to.

    Raises:
        NotAvailableError: as in `compile_variant`.
    """
    wanted = list(variants)
    sources = source_hash()
    path, known = folder / MANIFEST, {}
    if path.exists():
        before = json.loads(path.read_text())
        known = before["kernels"] if before.get("sources") == sources and before.get("format") == FORMAT else {}
    kernels: dict[str, dict[str, Any]] = {each: dict(known.get(each, {})) for each in {*known, *architectures}}
    with tempfile.TemporaryDirectory() as cache, _environment("TRITON_CACHE_DIR", cache):
        for architecture in architectures:
            (folder / architecture).mkdir(parents=True, exist_ok=True)
            for variant in wanted:
                if variant.name in kernels[architecture]:
                    continue
                code, entry = compile_variant(variant, architecture)
                (folder / entry["file"]).write_bytes(code)
                kernels[architecture][variant.name] = entry
    manifest = {"format": FORMAT, "sources": sources, "triton": _triton().__version__, "kernels": kernels}
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return manifest


def source_hash() -> str:
    """Return a hash of all Python files of this folder except `build.py`, `load.py`, `costs.py` and `__init__.py`.

    Kernels with another hash are not loaded. Raise `FORMAT` when compile options in `build.py` change.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in ("build.py", "load.py", "costs.py", "__init__.py"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def table(manifest: dict[str, Any]) -> str:
    """Return the kernels of a manifest as a table in Markdown."""
    lines = ["| card | kernel | registers | stack | shared | programs | occupancy |", "|---|---|--:|--:|--:|--:|--:|"]
    for architecture, entries in sorted(manifest["kernels"].items()):
        for name, entry in sorted(entries.items()):
            sizes = [entry[key] for key in ("registers", "stack", "shared", "programs")]
            lines.append(f"| {architecture} | {name} | {' | '.join(map(str, sizes))} | {entry['occupancy']:.0%} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; see the module."""
    names = {name: dtype for dtype, name in DTYPES.items()}
    parser = argparse.ArgumentParser(description="Compile the GPU kernels ahead of time.")
    parser.add_argument("folder", type=Path, nargs="?", default=COMPILED)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp16"], choices=list(names))
    parser.add_argument("--head-size", nargs="+", type=int, default=[64, 80, 96, 128, 256])
    parser.add_argument("--page-size", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--width", nargs="+", type=int, default=[2048, 4096, 8192], help="sizes of hidden states")
    parser.add_argument("--caps", choices=["with", "without", "both"], default="both", help="soft caps of scores")
    options = parser.parse_args(arguments)
    caps = {"with": (True,), "without": (False,), "both": (False, True)}[options.caps]
    dtypes = tuple(names[name] for name in options.dtype)
    heads = tuple(options.head_size)
    attention = all_variants(dtypes, heads, tuple(options.page_size), caps)
    rows = row_variants(dtypes, heads, tuple(options.width))
    manifest = build(options.folder, options.arch, [*attention, *rows, *block_variants()])
    log_rank0(f"{sum(map(len, manifest['kernels'].values()))} kernels in {options.folder}\n{table(manifest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
