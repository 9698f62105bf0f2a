"""Expert parallelism in a simulation: routers have no values there, so choices of experts are drawn, for a given load.

The load of a rank is the number of choices (pairs of a token and an expert) that its experts get, over the mean of all
ranks. At load 1 every set of k experts is equally likely. At another load L the experts of the simulated rank are more
likely: each of a token's choices is one of them with probability L / ranks on average, and the sets are those of
sampling without replacement with that bias (Fisher's noncentral hypergeometric distribution). All ranks choose alike.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Generator, Sequence

import numpy as np
import torch

from deepspeed.comm.collectives.collectives import all_to_all_rows
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import ArgumentError
from deepspeed.moe import exchange, structure

_SETS = 16_384  # of experts that are drawn; more tokens have the same again


@contextlib.contextmanager
def simulated_experts(load: float = 1.0) -> Generator[None]:
    """Draw the choices of experts inside the context, for a load of this rank; the other ranks do not exist.

    Raises:
        ArgumentError: the load is negative.
    """
    if not load >= 0:
        raise ArgumentError(
            f"expert_load is {load}: the choices that a rank's experts get, over the mean, is 0 or more"
        )

    def choices(index: torch.Tensor, owner: torch.Tensor, axis: Axis, slots: int) -> torch.Tensor:
        tokens, k = index.shape
        drawn = draw_choices(tokens, k, tuple((owner == axis.rank).tolist()), load / axis.size, slots)
        return torch.from_numpy(drawn).to(index.device, index.dtype)

    with (
        exchange.expert_choices.replaced(choices),
        exchange.row_exchange.replaced(_exchange_with_absent),
        structure.comparison.replaced(lambda _parts, _whole: 0.0),
    ):
        yield


def _exchange_with_absent(
    axis: Axis, parts: Sequence[tuple[str, torch.Tensor]], table: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Exchange rows with absent ranks; integer rows from an absent rank are copies of this rank's rows."""
    received = all_to_all_rows(axis, parts, table)
    before, own = sum(table[axis.rank][: axis.rank]), table[axis.rank][axis.rank]
    for (_, rows), tensor in zip(parts, received, strict=True):
        if not tensor.is_floating_point():
            tensor.copy_(rows[before : before + own].repeat(axis.size, *[1] * (rows.dim() - 1)))
    return received


@functools.lru_cache(maxsize=16)
def draw_choices(tokens: int, k: int, is_local: tuple[bool, ...], share: float, slots: int = 0) -> np.ndarray:
    """Draw the experts of tokens.

    NumPy is used, whose memory does not count as that of the simulated run. The result is cached: do not change it.

    Args:
        tokens: number T of tokens.
        k: number of choices of each token.
        is_local: for each expert, whether the simulated rank has it.
        share: share of all choices that this rank's experts get; the nearest possible one is taken.
        slots: maximum number of tokens of an expert; further choices become -1. 0: no limit.

    Returns:
        (T, k) int64, different experts in each row, or -1.
    """
    generator, own = np.random.default_rng(0), np.flatnonzero(is_local)
    others = np.flatnonzero(~np.array(is_local))
    bounds = np.cumsum(_own_of_token(len(own), len(others), k, share)) * tokens
    of_token = np.searchsorted(bounds, np.arange(tokens) + 0.5).clip(0, k)  # of each token's choices, those of `own`
    start = np.cumsum(of_token) - of_token
    column, drawn = np.arange(k), np.empty((tokens, k), np.int64)
    if len(own):  # evenly: a rank's experts get as many choices each
        drawn[:] = own[(start[:, None] + column) % len(own)]
    if len(others):
        sets = others[generator.random((min(tokens, _SETS), len(others))).argsort(1)[:, :k]]
        rest = np.resize(sets, (tokens, sets.shape[1]))
        place = np.clip(column - of_token[:, None], 0, max(rest.shape[1] - 1, 0))
        drawn = np.where(column < of_token[:, None], drawn, np.take_along_axis(rest, place, 1))
    if slots:
        drawn[_position_of_expert(drawn) >= slots] = -1
    return drawn


def _position_of_expert(drawn: np.ndarray) -> np.ndarray:
    """Return for each choice the number of earlier choices of the same expert."""
    flat = drawn.reshape(-1)
    order = flat.argsort(kind="stable")
    first = np.searchsorted(flat[order], flat[order])
    position = np.empty_like(flat)
    position[order] = np.arange(len(flat)) - first
    return position.reshape(drawn.shape)


def _own_of_token(own: int, others: int, k: int, share: float) -> np.ndarray:
    """Return the probabilities of 0 … k choices among `own` local experts, not `others`, with the mean `share` × k."""
    least, most = max(0, k - others), min(k, own)
    numbers = np.arange(k + 1)
    ways = np.array([
        math.log(math.comb(own, n)) + math.log(math.comb(others, k - n)) if least <= n <= most else -np.inf
        for n in numbers
    ])  # fmt: skip

    def odds(bias: float) -> np.ndarray:
        logs = ways + bias * numbers
        powers = np.exp(logs - logs[least : most + 1].max())
        return powers / powers.sum()

    low, high = -60.0, 60.0
    for _ in range(80):
        bias = (low + high) / 2
        low, high = (bias, high) if odds(bias) @ numbers < share * k else (low, bias)
    return odds((low + high) / 2)
