"""Faults of compression, planted in the package for the length of a `with`: the tables must miss their bars."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


@contextlib.contextmanager
def stale_mask() -> Iterator[None]:
    """Masks are those of the weights that the model had at the start."""
    from deepspeed.compression.pruning.masks import Masks

    form, seen = Masks._form, {}

    def formed(self: Any, rule: Any, ratio: float) -> None:
        form(self, rule, ratio)
        for key, packed in list(self.kept.items()):
            self.kept[key] = seen.setdefault(key, packed)

    def init(self: Any, *args: Any, made: Any = Masks.__init__) -> None:
        made(self, *args)
        with torch.no_grad():
            for rule in self.rules:
                formed(self, rule, rule.ratio_at(rule.offset))
        self.kept.clear()

    with mock.patch.object(Masks, "__init__", init), mock.patch.object(Masks, "_form", formed):
        yield


@contextlib.contextmanager
def per_rank_top_k() -> Iterator[None]:
    """Every rank keeps the largest of its own slice."""
    from deepspeed.compression.pruning import masks
    from deepspeed.compression.pruning.distributed_topk import largest_units

    def own(sets: Any, keep: Any, score: Any, exchange: Any) -> Any:
        found: dict[str, torch.Tensor] = {}
        for some, wanted in zip(sets, keep, strict=True):
            share = wanted / sum(one.numel for one in some)
            flat = torch.cat([score(one) for one in some])
            flags = largest_units(flat, round(flat.numel() * share)).split([one.high - one.low for one in some])
            found |= {one.name: flag for one, flag in zip(some, flags, strict=True)}
        return found.items()

    with mock.patch.object(masks, "keep_largest", own):
        yield


@contextlib.contextmanager
def revival_by_momentum() -> Iterator[None]:
    """A mask acts once: on the weights of the moment, not on moments and what steps make of them."""
    from deepspeed.compression.pruning.masks import Masks
    from deepspeed.compression.pruning.sharded_view import Owned

    def updated(self: Any, groups: Any) -> None:
        self._updated |= {id(group) for group in groups}

    with (
        mock.patch.object(Masks, "on_update", updated),
        mock.patch.object(Masks, "on_gradients", lambda self: None),
        mock.patch.object(Owned, "moments", lambda self: iter(())),
    ):
        yield


@contextlib.contextmanager
def per_rank_scales() -> Iterator[None]:
    """The scale of a weight is taken from the part of it that a rank would own."""
    from deepspeed.compression.basic_layer import WeightQuantizer
    from deepspeed.compression.utils import straight_through

    def call(self: Any, weight: torch.Tensor) -> torch.Tensor:
        dense, bits = weight.detach(), self.bits
        scale = 2 * dense.view(-1).chunk(dist.get_world_size())[dist.get_rank()].abs().max() / 2**bits
        seen = (dense / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
        return straight_through(weight, seen)

    with mock.patch.object(WeightQuantizer, "__call__", call):
        yield
