"""Models that answer on several ranks: matrices shared by `init_inference`."""

from __future__ import annotations

import os
from typing import Any

import torch

import deepspeed
from tests.unit.inference_surface.models import model, prompt


def _generated(one: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    kwargs = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), **kwargs}
    return one.generate(ids, **kwargs)


def _sliced(size: int) -> Any:
    torch.manual_seed(100 + int(os.environ["RANK"]))
    engine = deepspeed.init_inference(model("llama"), mp_size=size, dtype="fp32")
    drawn = torch.rand(1)
    out = _generated(engine, prompt())
    return out, drawn, engine.module.model.layers[0].mlp.up_proj.weight.shape, engine.mp_group is not None


def test_two_ranks_share_the_matrices(workers: Any) -> None:
    want = _generated(model("llama"), prompt())
    (one, first, shape, group), (two, second, _, _) = workers(2).run(_sliced, 2)
    assert torch.equal(one, want) and torch.equal(two, want)
    assert torch.equal(first, second) and tuple(shape) == (32, 32) and group
