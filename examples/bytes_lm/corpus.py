"""The text of Python's own standard library as windows of bytes, split by file into training and held-out text."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 256
# Installed packages are not the library; test data holds files in odd encodings.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_END_OF_FILE = b"\0"


def library_files() -> list[bytes]:
    """The UTF-8 text of every `.py` file of the standard library, in the order of the relative paths."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda found: found.relative_to(root).as_posix()):
        if _EXCLUDED.isdisjoint(path.relative_to(root).parts):
            text = path.read_bytes()
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                continue
            files.append(text)
    return files


def split(files: list[bytes], every: int = 20) -> tuple[Tensor, Tensor]:
    """Training and held-out text as uint8 tensors `[bytes]`; one file in `every` is held out.

    The side is drawn from the hash of a file's content, so it is the same on every rank and machine, and a file that is
    there twice cannot be on both sides.
    """
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for text in files:
        held_out = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % every == 0
        sides[held_out].append(text + _END_OF_FILE)
    training, heldout = (torch.frombuffer(bytearray(b"".join(side)), dtype=torch.uint8) for side in sides)
    return training, heldout


class Windows(Dataset[Tensor]):
    """Non-overlapping windows of `length` bytes to predict, each with the byte before it: int64 `[length + 1]`.

    Args:
        text: uint8 `[bytes]`.
        length: bytes predicted per window.
        limit: bytes to predict in all (default: the whole text).
        seed: of the order of the windows.
    """

    def __init__(self, text: Tensor, length: int, limit: int | None = None, seed: int = 0) -> None:
        self.text = text
        self.length = length
        count = (len(text) - 1) // length
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self.order = order if limit is None else order[: limit // length]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.order[index]) * self.length
        return self.text[start : start + self.length + 1].long()


def bigram_loss(training: Tensor, windows: Windows) -> float:
    """Nats per byte that a byte-bigram model counted on `training` (plus one in every cell) pays for `windows`."""
    pairs = training[:-1].long() * VOCABULARY + training[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double() + 1.0
    cost = -(counts / counts.sum(dim=1, keepdim=True)).log()
    held_out = torch.stack([windows[index] for index in range(len(windows))])
    return cost[held_out[:, :-1], held_out[:, 1:]].mean().item()
