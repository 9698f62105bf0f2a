"""The choice of how attention on pages is computed, and torch's way by a stand-in, since it has no CPU form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.errors import PackingError
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.executors import attention_ways, select
from deepspeed.inference.executors.attention_ways import FlashWay, KernelWay, LayerAttention, choose_ways, ways_of
from deepspeed.inference.executors.mask_shape import MaskShape, mask_shape
from deepspeed.ops.triton import load
from tests.unit.inference.toys import alone, llama, masked, prompts

LAYER = LayerAttention(torch.bfloat16, 128, 128, 8, 2, 0.1, None, False)


class Kernels:
    """Kernels that are compiled for heads of 128 and pages of 16 tokens."""

    def __init__(self) -> None:
        self.prepared: list[str] = []

    def has(self, variant: Any) -> bool:
        return variant.head == 128 and variant.page in (0, 16)

    def prepare(self, variants: Any) -> None:
        self.prepared += [variant.name for variant in variants]


@pytest.mark.parametrize(
    ("changes", "page", "name", "reason"),
    [
        ({}, 256, "flash", ""),
        ({"shape": MaskShape(window=9)}, 256, "flash", ""),
        ({}, 16, "kernels", "multiple of 256"),
        ({"cap": 30.0}, 16, "kernels", "soft caps"),
        ({"sinks": True}, 16, "kernels", "sinks"),
        ({"shape": MaskShape(chunk=9)}, 16, "kernels", "chunks"),
        ({"dtype": torch.float32}, 16, "kernels", "no torch.float32"),
        ({"value": 64, "head": 64}, 256, "flash", ""),
        ({"value": 64}, 256, "", "no heads of 128 and 64"),
        ({"head": 512, "value": 512}, 16, "", "heads of 1 to 256"),
        ({"dtype": torch.float64}, 16, "", "kernels have no torch.float64"),
        ({"cap": 30.0}, 64, "", "attend_whole_bf16_128_page64_capped is not compiled"),
    ],
)
def test_a_layer_takes_the_first_way_that_has_all_it_needs(changes: Any, page: int, name: str, reason: str) -> None:
    layer = LayerAttention(**{**vars(LAYER), **changes})
    kernels = Kernels()
    ways: Any = [FlashWay(mock.Mock()), KernelWay(kernels)]  # type: ignore[arg-type]
    chosen, reasons = choose_ways({3: layer}, ways, page)
    assert [way.name for way in chosen.values()] == [name] * bool(name)
    assert bool(reasons) == (not name) and (name == "kernels") == bool(kernels.prepared)
    refused = [way.why_not(layer, page) or "" for way in ways]
    assert any(reason in each for each in refused)


Function = Callable[..., torch.Tensor]
CHUNKED: Function = lambda b, h, q, k: (k <= q) & (k // 9 == q // 9)  # noqa: E731
MASKS: dict[str, tuple[Function, MaskShape | None]] = {
    "causal": (lambda b, h, q, k: k <= q, MaskShape()),
    "window": (lambda b, h, q, k: (k <= q) & (k > q - 7), MaskShape(window=7)),
    "one": (lambda b, h, q, k: k == q, MaskShape(window=1)),
    "chunks": (CHUNKED, MaskShape(chunk=9)),
    "prefix": (lambda b, h, q, k: (k <= q) & ((k < 4) | (k > q - 7)), None),
    "odd": (lambda b, h, q, k: (k <= q) & (k % 2 == q % 2), None),
    "both": (lambda b, h, q, k: CHUNKED(b, h, q, k) & (k > q - 5), None),
    "all": (lambda b, h, q, k: q.new_ones((), dtype=torch.bool), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_rows_see_is_read_from_the_mask(name: str) -> None:
    function, shape = MASKS[name]
    model = llama()
    if shape is not None:
        assert mask_shape(function, model) == shape
    else:
        with pytest.raises(PackingError, match="see others"):
            mask_shape(function, model)


def test_without_compiled_kernels_a_gpu_has_torchs_way_and_a_reason() -> None:
    assert ways_of(torch.device("cpu")) == ([], "")
    for capability, names, reason in (
        ((8, 0), ["flash"], "no compiled kernels in"), ((7, 5), [], "no kernels for GPUs of compute capability 7.5"),
    ):  # fmt: skip
        with (
            mock.patch.object(attention_ways, "compute_capability", lambda _, c=capability: c),
            mock.patch.object(load, "compute_capability", lambda _, c=capability: c),
        ):
            ways, missing = ways_of(torch.device("cuda"))
        assert [way.name for way in ways] == names and reason in missing


def varlen_stand_in(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, starts_of_keys: None,
    longest_query: int, longest: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
    seqused_k: torch.Tensor, block_table: torch.Tensor, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """What torch's documentation says that `varlen_attn` computes, in plain torch."""
    assert enable_gqa and num_splits == 1 and block_table.dtype == seqused_k.dtype == starts.dtype == torch.int32
    out, size = torch.empty_like(query), keys.shape[1]
    assert keys.dim() == 4 and size % 256 == 0 and longest >= int(seqused_k.max())
    for row, length in enumerate(seqused_k.tolist()):
        rows = slice(int(starts[row]), int(starts[row + 1]))
        pages = block_table[row, : -(-length // size)].long()
        k, v = (
            pool[pages].flatten(0, 1)[:length].repeat_interleave(query.shape[1] // pool.shape[2], 1)
            for pool in (keys, values)
        )
        count = rows.stop - rows.start
        assert count <= longest_query
        seen = torch.arange(length, device=query.device)
        at = seen[length - count :, None]
        mask = (seen <= at + window_size[1]) & ((seen >= at - window_size[0]) | (window_size[0] < 0))
        q, k, v = (each.transpose(0, 1)[None] for each in (query[rows], k, v))
        out[rows] = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("family", ["Llama", pytest.param("Mistral", marks=pytest.mark.slow)])
def test_tokens_of_torchs_way_by_a_stand_in_are_those_of_gathered_pages(family: str) -> None:
    model = llama() if family == "Llama" else masked(family)
    texts, new = prompts((3, 40)), 8
    calls = mock.Mock(side_effect=varlen_stand_in)
    with (
        mock.patch.object(attention_ways, "ways_of", lambda _: ([FlashWay(calls)], "")),
        mock.patch.object(attention_ways, "FLASH_DTYPES", (torch.float32,)),
        mock.patch.object(select, "_fused", lambda executor, *_: executor),
    ):
        generator = Generator(model, max_batch_tokens=24, page_size=256, cache_bytes=2 << 20)
    assert len(generator._executor.ways) == model.config.num_hidden_layers
    before = calls.call_count
    options = SamplingParams(max_new_tokens=new, ignore_eos=True)
    assert generator.generate(texts, options) == [alone(model, prompt, new) for prompt in texts]
    assert calls.call_count > before


def test_a_way_that_fails_or_is_wrong_is_not_used() -> None:
    for function, reason in (
        (mock.Mock(side_effect=RuntimeError("no kernel image")), "RuntimeError: no kernel image"),
        (lambda query, *_, **__: torch.zeros_like(query), "logits of mixed rows are off"),
    ):
        lines: list[str] = []
        with (
            mock.patch.object(attention_ways, "ways_of", lambda _, f=function: ([FlashWay(f)], "nothing compiled")),
            mock.patch.object(attention_ways, "FLASH_DTYPES", (torch.float32,)),
            mock.patch.object(select, "_fused", lambda executor, *_: executor),
            mock.patch.object(select, "warn_once", lines.append),
        ):
            generator = Generator(llama(), page_size=256, cache_bytes=1 << 20)
        assert generator._executor.ways == {}
        assert ["nothing compiled" in lines[0], reason in lines[-1], len(lines)] == [True, True, 2]


def test_a_layer_that_attends_otherwise_later_is_refused() -> None:
    model = llama()
    with (
        mock.patch.object(attention_ways, "ways_of", lambda _: ([FlashWay(varlen_stand_in)], "")),
        mock.patch.object(attention_ways, "FLASH_DTYPES", (torch.float32,)),
        mock.patch.object(select, "_fused", lambda executor, *_: executor),
    ):
        generator = Generator(model, page_size=256, cache_bytes=1 << 20)
    model.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(PackingError, match="otherwise than when its generator was created"):
        generator.generate(prompts((3,)), SamplingParams(max_new_tokens=2))
