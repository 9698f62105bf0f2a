"""Kernels compiled ahead of time without a GPU: what they take, and a loader that only loads (by a fake driver)."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.needs import need_triton

need_triton()

from deepspeed.errors import CheckpointCorruptError, NotAvailableError, UsageError  # noqa: E402
from deepspeed.ops.triton import paged_attention  # noqa: E402
from deepspeed.ops.triton.build import occupancy, table  # noqa: E402
from deepspeed.ops.triton.load import LoadedKernels, architecture_of, pack  # noqa: E402
from deepspeed.ops.triton.row_variants import ARGUMENTS  # noqa: E402
from deepspeed.ops.triton.variants import DTYPES, WGMMA, Variant, attention_variants  # noqa: E402
from tests.harness.pool import REPOSITORY  # noqa: E402
from tests.kernels.attention_cases import Case, attended, inputs_of  # noqa: E402
from tests.kernels.interpreter import InterpretedKernels, interpreted  # noqa: E402


def build(folder: Path, home: Path, *options: str) -> str:
    """Run the command in a process of its own, since kernels are interpreted in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "deepspeed.ops.triton.build", str(folder), *options]
    environment |= {"HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout + run.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder, home = tmp_path_factory.mktemp("compiled"), tmp_path_factory.mktemp("home")
    build(folder, home, "--dtype", "bf16")
    build(folder, home, "--dtype", "fp32", "--page-size", "16", "--caps", "without")
    assert list(home.iterdir()) == [], "the compiler's own cache was written to"
    manifest = json.loads((folder / "manifest.json").read_text())
    print("\n" + table(manifest))
    return folder, manifest


def test_kernels_of_next_tokens_spill_nothing(compiled: tuple[Path, dict[str, Any]]) -> None:
    _, manifest = compiled
    for architecture in ("sm_80", "sm_90"):
        entries = manifest["kernels"][architecture]
        tall = {name for name in entries if name.startswith("attend_whole") and not name.endswith("_few")}
        decode = {name: entry for name, entry in entries.items() if name not in tall}
        # heads × pages × caps and joins of bf16; heads and joins of fp32
        assert sum(name.startswith(("attend_split", "join_splits")) for name in decode) == 5 * 2 * 2 + 5 + 5 + 5
        kernels = {kernel for kernel in ARGUMENTS if any(name.startswith(kernel) for name in decode)}
        assert kernels == set(ARGUMENTS), "kernels of rows, sampling and products"
        assert {name: entry["stack"] for name, entry in decode.items() if entry["stack"]} == {}


def test_sums_over_keys_are_products(compiled: tuple[Path, dict[str, Any]]) -> None:
    """Products add keys in one order in tiles of any size; a sum over a row would follow the tile's layout."""
    _, manifest = compiled
    source = (Path(paged_attention.__file__)).read_text()
    assert source.count("tl.dot(") == 3 and "tl.sum(" not in source
    for architecture, entries in manifest["kernels"].items():
        layouts = {name: " ".join(entry["layouts"]) for name, entry in entries.items() if name.startswith("attend_")}
        small = [name for name in layouts if "split" in name or name.endswith("_few")]
        assert small and all("versionMajor = 3" not in layouts[name] for name in small)
        groups = [name for name in layouts if "versionMajor = 3" in layouts[name]]
        assert bool(groups) == (WGMMA and architecture == "sm_90"), groups


def test_what_is_there_is_not_compiled_again(compiled: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, manifest = compiled
    path = folder / manifest["kernels"]["sm_80"]["attend_split_bf16_64_page16"]["file"]
    before = path.stat().st_mtime_ns
    build(folder, tmp_path, "--arch", "sm_80", "--dtype", "bf16", "--head-size", "64", "--page-size", "16")
    assert path.stat().st_mtime_ns == before and json.loads((folder / "manifest.json").read_text()) == manifest


def test_occupancy_is_what_the_scarcest_resource_leaves() -> None:
    assert occupancy("sm_80", 4, 128, 0) == (4, 0.25)  # registers
    assert occupancy("sm_80", 4, 32, 40 << 10) == (4, 0.25)  # shared memory
    assert occupancy("sm_90", 8, 32, 0) == (8, 1.0)  # threads
    assert [architecture_of(each) for each in ((8, 0), (8, 9), (9, 0), (7, 5), (10, 0))] == [
        "sm_80", "sm_80", "sm_90", None, None,
    ]  # fmt: skip


class FakeDriver:
    """A driver that runs the interpreter on the arguments as a GPU would get them: addresses and numbers."""

    def __init__(self) -> None:
        self.kernels, self.loaded, self.tensors = interpreted("paged_attention"), {}, {}
        self.variants: dict[str, Variant] = {}

    def load(self, code: bytes, function: str, shared: int) -> Any:
        assert code[:4] == b"\x7fELF" and function.encode() in code
        self.loaded[len(self.loaded)] = (function, shared)
        return len(self.loaded) - 1

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, arguments: list[int]
    ) -> None:
        name, loaded_with = self.loaded[function]
        assert shared == loaded_with and threads % 32 == 0 and threads <= 1024
        variant = next(each for each in self.variants.values() if each.kernel == name)
        kinds = [kind for kind in variant.signature.values() if kind != "constexpr"]
        assert arguments[len(kinds) :] == [0, 0]
        values: list[Any] = []
        for word, kind in zip(arguments, kinds, strict=False):
            number = struct.unpack("<f" if kind == "fp32" else "<i", word.to_bytes(8, "little")[:4])[0]
            values.append(self.tensors[word] if kind.startswith("*") else number)
        self.kernels.launch(variant, grid, values)


class WatchedKernels(LoadedKernels):
    """Loaded kernels whose fake driver knows the tensors behind the addresses."""

    def launch(self, variant: Variant, grid: tuple[int, int, int], arguments: Any) -> None:
        driver: Any = self._driver
        driver.tensors = {each.data_ptr(): each for each in arguments if isinstance(each, torch.Tensor)}
        driver.variants[variant.kernel] = variant
        super().launch(variant, grid, arguments)


@pytest.mark.parametrize("split", [False, True])
def test_the_loader_with_a_fake_driver_hands_over_what_the_kernels_take(
    compiled: tuple[Path, dict[str, Any]], split: bool
) -> None:
    driver = FakeDriver()
    kernels = WatchedKernels(compiled[0], "sm_90", driver)
    case = Case(head=64, dtype=torch.bfloat16, group=4, cap=20.0, window=30, split=split, rows=((3, 40), (1, 600)))
    variants = attention_variants(case.dtype, case.head, page=case.page, capped=True).values()
    with pytest.raises(UsageError, match="is not loaded"):
        attended(kernels, case, inputs_of(case))
    kernels.prepare(variants)
    kernels.prepare(variants)
    assert len(driver.loaded) == 4
    plain = InterpretedKernels(driver.kernels.module)
    inputs = inputs_of(case)
    assert torch.equal(attended(kernels, case, inputs), attended(plain, case, inputs))


def test_a_fake_driver_gets_nothing_damaged_and_nothing_of_other_sources(
    compiled: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, manifest = compiled
    with pytest.raises(NotAvailableError, match="build makes them"):
        LoadedKernels(tmp_path, "sm_90", FakeDriver())
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest | {"sources": "others"}))
    with pytest.raises(NotAvailableError, match="other sources"):
        LoadedKernels(tmp_path, "sm_90", FakeDriver())
    path.write_text(json.dumps(manifest))
    with pytest.raises(NotAvailableError, match="no kernels for sm_100"):
        LoadedKernels(tmp_path, "sm_100", FakeDriver())
    kernels = LoadedKernels(tmp_path, "sm_90", FakeDriver())
    with pytest.raises(NotAvailableError, match="no kernel"):
        kernels.prepare([Variant("attend_split", torch.bfloat16, 48, 48, 16)])
    with pytest.raises(CheckpointCorruptError, match="missing or damaged"):
        kernels.prepare([Variant("attend_split", torch.bfloat16, 64, 64, 16)])


def test_arguments_of_another_kind_or_alignment_are_refused() -> None:
    tensor = torch.zeros(64)
    packed = pack("k", (tensor, 3, 0.5), ("*fp32", "i32", "fp32"), {0})
    assert packed == [tensor.data_ptr(), 3, int.from_bytes(struct.pack("<f", 0.5), "little"), 0, 0]
    assert pack("k", (-3,), ("i32",), set())[0].to_bytes(8, "little") == struct.pack("<iI", -3, 0)
    for arguments, message in (
        ((tensor, 3), "takes 3 arguments"), ((3, 3, 0.5), "is \\*fp32, not int"), ((tensor, tensor, 1.0), "is i32"),
        ((tensor[1:], 3, 0.5), "multiples of 16"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            pack("k", arguments, ("*fp32", "i32", "fp32"), {0})
    assert set(DTYPES.values()) == {"bf16", "fp16", "fp32"}


def test_what_runs_imports_no_triton_and_writes_no_cache(tmp_path: Path) -> None:
    """Also where Triton is installed, as with torch for CUDA."""
    program = (
        "import sys, deepspeed.ops.triton.load, deepspeed.ops.triton.rows, deepspeed.ops.triton.sampling;"
        "import deepspeed.inference.executors.attention_ways;"
        "print(*[name for name in sys.modules if name in ('triton', 'deepspeed.ops.triton.paged_attention')])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stdout + run.stderr[-2000:]
    assert not (tmp_path / ".triton").exists()
