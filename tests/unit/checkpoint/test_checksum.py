"""The checksum is zlib's, whatever the length and the place, with the native library and without."""

from __future__ import annotations

import zlib

import pytest
import torch

from deepspeed.checkpoint.format import safetensors_file


@pytest.mark.parametrize("way", ["as it is here", "plain"])
def test_it_is_the_one_of_zlib(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "plain":
        monkeypatch.setattr(safetensors_file, "_native", lambda: None)
    data = torch.randint(0, 256, (100_003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    text = data.numpy().tobytes()
    for start in range(0, 40, 3):
        for length in (*range(300), 4095, 4096, 65_537, 99_000):
            assert safetensors_file.crc32(data[start : start + length]) == zlib.crc32(text[start : start + length])
