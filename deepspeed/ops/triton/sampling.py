"""Host's side of sampling on the device: options and random numbers of rows, and their next tokens by three launches.

If all rows are greedy, two launches do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import LIMITS, sampling_variants

COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_MASK = 0xFFFFFFFF
_LARGEST = 1 << 126  # of fp32; more than any vocabulary has tokens


def uniform(seed: int, count: int) -> float:
    """Return the random number, from 0 to below 1, of a draw: that of `draw_numbers` on a device.

    Philox 4x32-10 with the seed's 64 bits as key and `count`, the number of draws before it, as counter. Numbers need
    no state, so host and device can draw the same ones in any order.
    """
    key = [seed & _MASK, (seed >> 32) & _MASK]
    a, b, c, d = count & _MASK, 0, 0, 0
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ key[0], second & _MASK, (first >> 32) ^ d ^ key[1], first & _MASK
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return ((a >> 5) * 67108864.0 + (b >> 6)) / 9007199254740992.0


def option_row(sampling: object) -> tuple[float, ...]:
    """Return a row of `options_of`, 8 numbers, from an object with the attributes `COLUMNS` (`SamplingParams`)."""
    return (*(float(min(getattr(sampling, name), _LARGEST)) for name in COLUMNS), 0.0)


def options_of(samplings: Sequence[object]) -> torch.Tensor:
    """Return the options of rows, fp32 [rows, 8], one from each object (see `option_row`)."""
    return torch.tensor(list(map(option_row, samplings)), dtype=torch.float32).reshape(-1, 8)


def draw(kernels: Kernels, seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the random number of each row, fp64 [rows], from `seeds` (int64) and draws before (`counts`, int32).

    Raises:
        ArgumentError: shapes differ or dtypes are others.
    """
    if seeds.dtype != torch.int64 or counts.dtype != torch.int32 or seeds.shape != counts.shape:
        raise ArgumentError(f"seeds {seeds.dtype} {tuple(seeds.shape)}, counts {counts.dtype} {tuple(counts.shape)}")
    variant = sampling_variants(torch.float32)["draw_numbers"]
    numbers = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    kernels.launch(variant, (-(-len(seeds) // variant.constants["BLOCK"]), 1, 1), (seeds, counts, numbers, len(seeds)))
    return numbers


def sample(
    kernels: Kernels,
    logits: torch.Tensor,
    options: torch.Tensor,
    numbers: torch.Tensor | None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the next token of each row, int32 [rows] on the device.

    It is -1 where a logit is NaN or the largest is infinite.

    Nothing is read back. The choice is that of `deepspeed.inference.sampler.draw` with the same random number.

    Args:
        kernels: the kernels.
        logits: [rows, vocabulary].
        options: options of each row, from `options_of`.
        numbers: random number of each row, fp64 [rows]; not read where the temperature is 0. None: it is 0 in all rows.
        table: int32 [rows, vocabulary], for penalties: 1 for a token in prompt or output, plus 2 for each time in the
            output. It is changed in place: the chosen tokens are added. None: no row has penalties.

    Raises:
        ArgumentError: shapes or dtypes do not fit.
    """
    _check(logits, options, numbers, table)
    (rows, vocabulary), variants = logits.shape, sampling_variants(logits.dtype)
    sizes = variants["choose_tokens"].constants
    parts = -(-vocabulary // sizes["PART"])
    # Each row of scores is filled up to whole parts, and has one more block behind it, so that blocks need no mask.
    stride = parts * sizes["PART"] + sizes["BLOCK"]

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    scores, members = scratch(stride, dtype=torch.float32), scratch(stride, dtype=torch.int32)
    maxima, firsts = scratch(parts, dtype=torch.float32), scratch(parts, dtype=torch.int32)
    weights, counts = scratch(parts, LIMITS, dtype=torch.float64), scratch(parts, LIMITS, dtype=torch.int32)
    tokens, grid = scratch(dtype=torch.int32), (rows, parts, 1)
    entries, flag = (tokens, 0) if table is None else (table, 1)
    row = entries.stride(0)
    tensors = (logits, entries, scores, options, maxima, firsts)
    kernels.launch(variants["adjust_scores"], grid, (*tensors, logits.stride(0), row, stride, vocabulary, flag))
    if numbers is not None:
        tensors = (scores, options, maxima, firsts, weights, counts)
        kernels.launch(variants["weigh_parts"], grid, (*tensors, stride, vocabulary))
    numbers = weights if numbers is None else numbers  # no row reads it
    tensors = (scores, options, numbers, maxima, firsts, weights, counts, members, entries, tokens)
    kernels.launch(variants["choose_tokens"], (rows, 1, 1), (*tensors, row, stride, vocabulary, flag))
    return tokens


def _check(
    logits: torch.Tensor, options: torch.Tensor, numbers: torch.Tensor | None, table: torch.Tensor | None
) -> None:  # fmt: skip
    """Raise ArgumentError unless the arguments of `sample` fit together."""
    rows = len(logits)
    fits = options.shape == (rows, 8) and options.dtype == torch.float32 and options.is_contiguous()
    fits = fits and logits.stride(1) == 1
    fits = fits and (numbers is None or (numbers.shape == (rows,) and numbers.dtype == torch.float64))
    if table is not None:
        fits = fits and table.shape == logits.shape and table.dtype == torch.int32 and table.stride(1) == 1
    if not fits:
        drawn = "none" if numbers is None else f"{tuple(numbers.shape)} {numbers.dtype}"
        shapes = f"options {tuple(options.shape)}, numbers {drawn}"
        raise ArgumentError(f"sampling from logits {tuple(logits.shape)}: {shapes}, or the table, do not fit")
