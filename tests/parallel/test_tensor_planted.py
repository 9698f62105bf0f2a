"""Mistakes planted into the cutting: each is found at the start, by name."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.errors import TensorParallelError
from deepspeed.tensor_parallel import layers, parallelize, rng, vocab_parallel
from tests.parallel.tensor_runs import model_of
from tests.parallel.tiny import said

Patch = Callable[[Any], None]


@contextlib.contextmanager
def patched(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, made(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def swapped(right: Any) -> Any:
    """Query and key change places."""

    def cut_region(module: nn.Module, *args: Any) -> None:
        right(module, *args)
        params = dict(module.named_parameters())
        if "q_proj.weight" in params:
            q, k = params["q_proj.weight"], params["k_proj.weight"]
            q.data, k.data = k.data.clone(), q.data.clone()

    return cut_region


def changed(names: str, segments: Callable[[list[Any]], list[Any]]) -> Callable[[Any], Any]:
    """Matrices of these names are cut as `segments` makes of the right ones, by rank."""

    def patch(right: Any) -> Any:
        def cut_region(module: nn.Module, shares: Any, *args: Any) -> None:
            tensors = {
                name: replace(share, segments=segments(share.segments)) if re.search(names, name) else share
                for name, share in shares.tensors.items()
            }
            right(module, replace(shares, tensors=tensors), *args)

        return cut_region

    return patch


one_group_off = changed("k_proj|v_proj", lambda ranks: ranks[1:] + ranks[:1])
wrong_half = changed("gate_up", lambda ranks: [(one[0], two[1]) for one, two in zip(ranks, ranks[1:] + ranks[:1])])  # noqa: B905


def unreduced(right: Any) -> Any:
    def forward(self: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.linear(input, self._matrix(), self.bias)

    return forward


def bias_twice(right: Any) -> Any:
    def forward(self: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return layers.reduce_from(F.linear(input, self._matrix(), self.bias), self.slot.axis)

    return forward


def untransposed(right: Any) -> Any:
    return lambda module: False


def next_rows(right: Any) -> Any:
    def become(module: Any, slot: Any) -> None:
        right(module, slot)
        module.first = (module.first + module.num_embeddings) % module.whole

    return become


def alike(right: Any) -> Any:
    return lambda self, drawn: drawn


# what, family, changes of its config, where, how, words of the error
MISTAKES: dict[str, tuple[str, dict[str, Any], list[tuple[Any, str, Any]], tuple[str, ...]]] = {
    "query and key swapped": (
        "Llama", {"num_key_value_heads": 4}, [(parallelize, "cut_region", swapped)], ("model.layers.0.self_attn",
        "rank"),
    ),
    "heads off by one group": (
        "Llama", {}, [(parallelize, "cut_region", one_group_off)], ("model.layers.0.self_attn",),
    ),
    "row not summed": (
        "Llama", {}, [(layers.RowParallel, "forward", unreduced)], ("model.layers.0.self_attn", "output 0"),
    ),
    "bias added by each rank": (
        "GPTNeoX", {}, [(layers.RowParallel, "forward", bias_twice)], ("gpt_neox.layers.0.attention", "output 0"),
    ),
    "rows of another vocabulary": (
        "Llama", {}, [(vocab_parallel, "become_vocabulary_slice", next_rows)], ("model.embed_tokens",),
    ),
    "wrong half of gate and up": (
        "Phi3", {}, [(parallelize, "cut_region", wrong_half)], ("model.layers.0.mlp",),
    ),
    "Conv1D as a linear layer": (
        "GPT2", {}, [(layers, "is_transposed", untransposed)], ("transformer.h.0",),
    ),
    "equal seeds": (
        "GPT2", {"attn_pdrop": 0.1}, [(rng.Forks, "own_seed", alike)], ("ranks 0 and 1", "alike"),
    ),
}  # fmt: skip


def planted(what: str, dtype: torch.dtype) -> None:
    family, changes, patches, words = MISTAKES[what]
    model = model_of(family, **changes).to(dtype)
    if "attn_pdrop" in changes:
        for module in model.modules():
            if hasattr(module, "attn_dropout"):
                module.attn_dropout.p = 0.1
    axis = mesh_for({"tp": 2}).axis("tp")
    with contextlib.ExitStack() as stack:
        for owner, name, made in patches:
            stack.enter_context(patched(owner, name, made))
        try:
            parallelize.cut_model(model, axis, vocabulary=what == "rows of another vocabulary")
        except TensorParallelError as error:
            missing = [word for word in words if word not in str(error)]
            assert not missing, f"{missing} not in: {error}"
            return
    raise AssertionError(f"{what}: nothing was found")


@pytest.mark.parametrize("what", MISTAKES)
def test_a_planted_mistake_is_found(workers: Any, what: str) -> None:
    workers(2).run(planted, what, torch.float32, timeout=60)


@pytest.mark.parametrize("what", ["heads off by one group", "bias added by each rank"])
def test_low_precision_hides_no_mistake(workers: Any, what: str) -> None:
    workers(2).run(planted, what, torch.bfloat16, timeout=60)


def routed() -> None:
    """Rounding of bf16 would send tokens to other experts; what draws numbers draws the same; chaos is named."""
    axis = mesh_for({"tp": 2}).axis("tp")
    for seed in range(4):
        parallelize.cut_model(model_of("Mixtral", seed=seed).bfloat16(), axis)
    for kind in (Noisy, Chaotic):
        model = model_of("Llama")
        for layer in model.model.layers:
            layer.mlp.__class__ = kind
        with said() as lines:
            plan = parallelize.cut_model(model, axis)
        assert not plan.whole, plan.table()
        named = any("'model.layers.0.mlp' is not compared" in line for line in lines)
        assert named == (kind is Chaotic and axis.rank == 0), (kind, lines)


class Noisy(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * (1 + torch.rand(())))


class Chaotic(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + random.random())


def test_units_that_route_or_draw_are_compared_or_named(workers: Any) -> None:
    workers(2).run(routed, timeout=120)


def unplanted() -> None:
    """The same models, cut rightly, pass."""
    axis = mesh_for({"tp": 2}).axis("tp")
    for family in ("Llama", "GPTNeoX", "Phi3", "GPT2"):
        found = parallelize.cut_model(model_of(family), axis, check="model", vocabulary=family == "Llama")
        assert not found.whole and found.part() <= 0.55, found.table()


def test_what_is_right_passes(workers: Any) -> None:
    workers(2).run(unplanted, timeout=120)


def spoiled(right: Any) -> Any:
    """After all units have been compared."""

    def install(model: Any, *args: Any) -> Any:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1.01)
        return right(model, *args)

    return install


def compared_as_told() -> None:
    """`off` compares nothing, `units` each unit, `model` what is between them too."""
    axis = mesh_for({"tp": 2}).axis("tp")
    unit, between = (layers.RowParallel, "forward", unreduced), (parallelize, "install", spoiled)
    found = {}
    for check in ("off", "units", "model"):
        for what, (owner, name, made) in {"unit": unit, "between": between}.items():
            with patched(owner, name, made):
                try:
                    parallelize.cut_model(model_of("Llama"), axis, check=check)
                except TensorParallelError as error:
                    found[check, what] = str(error)
    assert sorted(found) == [("model", "between"), ("model", "unit"), ("units", "unit")], found
    assert "the model split over 2 ranks (tp) is not the dense one" in found["model", "between"]
    assert "rank 0" in found["model", "between"] and "'model.layers.0.self_attn'" in found["units", "unit"]


def test_what_is_compared_is_what_was_told(workers: Any) -> None:
    workers(2).run(compared_as_told, timeout=60)
