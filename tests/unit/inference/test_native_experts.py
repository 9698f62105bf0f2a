"""Mixtures of experts in native passes: tokens of the model's own `generate`, whatever the router and the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import ArgumentError, PackingError
from deepspeed.foundation.equivalence import relative_difference
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.executors import native as executors_native
from deepspeed.inference.executors.native_experts import routing_of
from deepspeed.inference.executors.native_tensors import functions
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.executors.select import select_executor
from deepspeed.inference.quantization.experts import LosslessExperts, PackedExperts, run_gated
from deepspeed.inference.quantization.layers import PackedEmbedding, PackedLinear
from deepspeed.inference.quantization.quantization import apply_section, quantize_linears
from tests.unit.inference.test_native import all_ways
from tests.unit.inference.toys import MIXTURES, alone, mixture, prompts, scale

pytestmark = pytest.mark.skipif(functions() is None, reason="the native library is not built, or off")
LENGTHS = (1, 5, 16, 33)
NEW = 12


def native(model: Any) -> Generator:
    """A generator that runs native passes."""
    generator = Generator(model, prefix_cache=False)
    assert isinstance(generator._executor, executors_native.FusedExecutor), generator._executor.unfused
    return generator


def new_tokens(generator: Generator, lengths: Any = LENGTHS) -> list[list[int]]:
    return generator.generate(prompts(lengths), SamplingParams(max_new_tokens=NEW, ignore_eos=True))


def own_tokens(model: Any, lengths: Any = LENGTHS) -> list[list[int]]:
    return [alone(model, prompt, NEW) for prompt in prompts(lengths)]


CELLS = [("Mixtral", 2, {}), ("Qwen3Moe", 3, {"norm_topk_prob": True}), ("Qwen2Moe", 2, {}), ("Olmoe", 3, {})]
MORE_CELLS = [
    *(("Mixtral", k, {}) for k in (1, 4, 8)),
    *(("Qwen3Moe", k, {"norm_topk_prob": norm}) for k in (1, 8) for norm in (False, True)),
    ("Qwen3Moe", 2, {"mlp_only_layers": [0]}),
    ("Qwen2Moe", 4, {"norm_topk_prob": True}),
    ("Olmoe", 2, {"norm_topk_prob": True, "num_key_value_heads": 4}),
]


@pytest.mark.parametrize(
    ("family", "chosen", "sizes"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE_CELLS)]
)
def test_tokens_are_those_of_generate(family: str, chosen: int, sizes: dict[str, Any]) -> None:
    model = mixture(family, num_experts_per_tok=chosen, **sizes)
    own = own_tokens(model)
    assert len({token for tokens in own for token in tokens}) > 12
    assert new_tokens(native(model)) == own


@pytest.mark.parametrize("family", ["Mixtral", pytest.param("Qwen3Moe", marks=pytest.mark.slow)])
def test_a_padded_batch(family: str) -> None:
    model, given = mixture(family), prompts(LENGTHS)
    ids = torch.tensor([[0] * (max(LENGTHS) - len(prompt)) + prompt for prompt in given])
    options: dict[str, Any] = {"attention_mask": (ids != 0).long(), "max_new_tokens": NEW, "do_sample": False}
    own = model.generate(ids, **options)
    engine = deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine._injected is not None
    assert torch.equal(engine.generate(ids, **options), own)
    engine.destroy()


def test_an_expert_that_nobody_chooses_is_not_read() -> None:
    """Its weights are no numbers, and its router sees it last in every row."""
    model, out = mixture(), 5
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 3  # and no layer changes it
        for block in model.model.layers:
            block.self_attn.o_proj.weight[0] = block.mlp.experts.down_proj[:, 0] = 0
            block.mlp.gate.weight[:, 0] = block.mlp.gate.weight[out] = 0
            block.mlp.gate.weight[out, 0] = -50
            block.mlp.experts.gate_up_proj[out] = block.mlp.experts.down_proj[out] = float("nan")
    assert new_tokens(native(model)) == own_tokens(model)


def test_logits_do_not_depend_on_the_batch() -> None:
    all_ways(mixture("Qwen3Moe", num_experts_per_tok=3), 12, 60, 4, 300, ("8 at once", "chunks"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_any_batch(dtype: torch.dtype) -> None:
    all_ways(mixture("Qwen3Moe", num_experts_per_tok=3).to(dtype), 32, 60, 6, 300)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_bf16_runs_in_native_passes(family: str) -> None:
    """Where the router decides by less than a rounding, the model and the native form may choose differently."""
    name = "num_local_experts" if family == "Mixtral" else "num_experts"
    model = scale(mixture(family, num_experts_per_tok=8, **{name: 64}), 0.1).bfloat16()
    assert len(new_tokens(native(model))) == len(LENGTHS)


def test_a_weight_that_changes_in_place_counts_at_once() -> None:
    model = mixture()
    generator = native(model)
    before = new_tokens(generator)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.neg_()
    assert new_tokens(generator) == own_tokens(model) != before
    model.model.layers[0].mlp.experts.gate_up_proj = nn.Parameter(model.model.layers[1].mlp.experts.gate_up_proj + 0.1)
    assert new_tokens(generator) == own_tokens(model)


def test_a_router_that_is_set_anew_counts_at_once() -> None:
    model = mixture("Qwen3Moe", num_experts_per_tok=2, norm_topk_prob=True)
    generator = native(model)
    before = new_tokens(generator)
    for name, value in (("top_k", 3), ("norm_topk_prob", False)):
        for block in model.model.layers:
            setattr(block.mlp.gate, name, value)
        assert new_tokens(generator) == own_tokens(model) != before
        before = own_tokens(model)


# -- packed weights ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def unpacked(packed: Any, twin: Any) -> Any:
    """`twin` with the values of the packed matrices."""
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear | PackedEmbedding):
            twin.get_submodule(name).weight.copy_(module.weight)
        elif isinstance(module, PackedExperts):
            whole = twin.get_submodule(name)
            whole.gate_up_proj.copy_(module.gate_up.dense().view_as(whole.gate_up_proj))
            whole.down_proj.copy_(module.down.dense().view_as(whole.down_proj))
    return twin


def logits_of(generator: Generator, prompt: list[int]) -> torch.Tensor:
    """Logits of all tokens of a prompt, in one native pass."""
    executor: Any = generator._executor
    batch = RaggedBatch([BatchSlice(prompt, 0, [2, 0, 1], len(prompt))], 16, torch.device("cpu"))
    return executor.run(batch)


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["Mixtral", pytest.param("Qwen2Moe", marks=pytest.mark.slow)])
def test_integers_are_their_values(family: str, bits: int) -> None:
    """Activations are integers of 15 bits, which is all that differs."""
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if family == "Qwen2Moe" else {}
    model = scale(mixture(family, **{"intermediate_size": 64, **sizes}), 0.12)
    twin, prompt = copy.deepcopy(model), prompts((33,))[0]
    quantize_linears(model, bits, 1, torch.float32)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, PackedExperts) and experts.down.form.num_bits == bits
    changed_by = float((twin(torch.tensor([prompt])).logits - model(torch.tensor([prompt])).logits).norm())
    right = unpacked(model, twin)(torch.tensor([prompt])).logits[0]
    error = float((logits_of(native(model), prompt) - right).norm())
    assert error < 1e-3 * float(right.norm()) and error < 0.1 * changed_by
    rows, index = torch.randn(5, 64), torch.tensor([[0, 1], [7, 3], [3, 2], [0, 7], [1, 2]])
    weights = torch.rand(5, 2)
    expected = twin.model.layers[0].mlp.experts(rows, index, weights)
    assert torch.allclose(experts(rows, index, weights), expected, rtol=1e-4, atol=1e-5)


def test_twelve_bits_change_no_bit() -> None:
    model = mixture(intermediate_size=64).bfloat16()
    twin, whole = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    tokens = new_tokens(native(model))
    generator = Generator(model, prefix_cache=False, lossless_weights=True)
    assert isinstance(generator._executor, executors_native.FusedExecutor)
    assert isinstance(model.model.layers[1].mlp.experts, LosslessExperts)
    assert new_tokens(generator) == tokens
    state = model.state_dict()
    assert state.keys() == whole.keys() and all(torch.equal(state[name], whole[name]) for name in whole)
    rows, index = torch.randn(6, 64).bfloat16(), torch.tensor([[0, 5]] * 6)
    weights = torch.rand(6, 2).bfloat16()
    one, other = (each.model.layers[1].mlp.experts for each in (model, twin))
    other.config._experts_implementation = "eager"
    assert torch.equal(one(rows, index, weights), other(rows, index, weights))
    with torch.no_grad():
        twin.model.layers[1].mlp.experts.down_proj.neg_()
    model.load_state_dict(twin.state_dict())
    assert new_tokens(generator) == new_tokens(native(twin)) != tokens


# -- other structures --------------------------------------------------------------------------------------------------


def changed(module: Any, forward: Any) -> None:
    module.__class__ = type(f"Odd{type(module).__name__}", (type(module),), {"forward": forward})


def with_doubled_weights(mlp: Any) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> Any:
        logits, scores, index = super(type(self), self).forward(hidden)
        return logits, 2 * scores, index

    changed(mlp.gate, forward)


def with_sigmoids(mlp: Any) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> Any:
        logits = hidden @ self.weight.T
        scores, index = logits.sigmoid().topk(2)
        return logits, scores, index

    changed(mlp.gate, forward)


def with_one_group(mlp: Any) -> None:
    """Experts of the better half only."""

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        logits = hidden @ self.weight.T
        halves = logits.unflatten(1, (2, -1))
        worse = halves.amax(-1, keepdim=True) < halves.amax((1, 2), keepdim=True)
        scores, index = halves.masked_fill(worse, -torch.inf).flatten(1).softmax(-1).topk(2)
        return logits, scores / scores.sum(-1, keepdim=True), index

    changed(mlp.gate, forward)


def with_limited_gates(mlp: Any) -> None:
    def forward(self: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(rows)
        for place in range(index.shape[1]):
            gate, up = torch.einsum("rh,rjh->rj", rows, self.gate_up_proj[index[:, place]]).chunk(2, -1)
            inner = self.act_fn(gate.clamp(max=50)) * up
            out += torch.einsum("ri,rhi->rh", inner, self.down_proj[index[:, place]]) * weights[:, place, None]
        return out

    changed(mlp.experts, forward)


def with_an_offset(mlp: Any) -> None:
    mlp.gate.register_buffer("offset", torch.zeros(8))


ODD = {
    with_doubled_weights: "weighs its experts", with_sigmoids: "weighs its experts",
    with_one_group: "does not choose the largest", with_limited_gates: "does not compute",
    with_an_offset: "other parts than one matrix",
}  # fmt: skip


@pytest.mark.parametrize("change", ODD, ids=lambda change: change.__name__)
def test_another_structure_goes_through_its_modules(change: Any) -> None:
    model = mixture()
    change(model.model.layers[1].mlp)
    executor, _ = select_executor(model)
    assert not isinstance(executor, executors_native.FusedExecutor) and ODD[change] in executor.unfused
    assert new_tokens(Generator(model, prefix_cache=False), (20,)) == own_tokens(model, (20,))


def test_clipped_heads_go_through_their_modules() -> None:
    """No probe has to reach the limit."""
    executor, _ = select_executor(mixture("Olmoe", clip_qkv=1e4))
    assert "clipped" in executor.unfused


def test_a_router_with_nan_chooses_nothing() -> None:
    model = mixture("Mixtral")
    generator = native(model)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[-1, 0] = float("nan")
    assert not logits_of(generator, [5, 6, 7, 8]).isfinite().any()


class Router(nn.Module):
    """The largest probabilities, of which those of row `wrong` are no numbers."""

    def __init__(self, wrong: int | None) -> None:
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.randn(4, 8)), wrong

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = rows @ self.weight.T
        scores, index = logits.softmax(-1).topk(2)
        if self.wrong is not None:
            scores[self.wrong] = float("nan")
        return logits, scores, index


def test_a_router_that_gives_nan_is_another_one() -> None:
    assert routing_of(Router(None))[1:] == (2, False)
    with pytest.raises(PackingError, match="something else than their probabilities"):
        routing_of(Router(3))


class Named(nn.Module):
    """Calls its experts by the names of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Renamed(mixture("Mixtral").model.layers[0].mlp.experts)

    def forward(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(rows, scores=weights, indices=index)


class Renamed(nn.Module):
    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = experts.gate_up_proj, experts.down_proj, experts.act_fn

    def forward(self, rows: torch.Tensor, indices: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        products = [lambda x, e, stack=stack: x @ stack[e].T for stack in (self.gate_up_proj, self.down_proj)]
        return run_gated(rows, indices, scores, *products, self.act_fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed_experts_take_the_names_of_their_arguments(dtype: torch.dtype) -> None:
    model = Named().to(dtype)
    width = model.experts.down_proj.shape[1]
    rows, index = torch.randn(3, width).to(dtype), torch.tensor([[0, 1], [1, 2], [0, 3]])
    weights = torch.rand(3, 2).to(dtype)
    with torch.no_grad():
        expected = model(rows, index, weights)
        assert apply_section(model, {"post_init_quant": {"experts": {"num_bits": 8}}}) == 1
        assert relative_difference(model(rows, index, weights), expected) < 0.05


def test_one_of_two_stacks_is_not_packed_alone() -> None:
    with pytest.raises(ArgumentError, match="name both of"):
        apply_section(Named(), {"post_init_quant": {"gate_up_proj": {"num_bits": 8}}})
