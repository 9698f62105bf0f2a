"""Random-LTD on single models: layers on kept tokens against each sample's kept tokens alone, and the schedule."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.config.sections.data import RandomLtd
from deepspeed.data import draw_keys, kept_tokens, random_ltd
from deepspeed.data.kept_tokens import KeptTokens
from deepspeed.data.random_ltd import RandomLTD, RandomLTDScheduler, remove_random_ltd_state_dict
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, NotAvailableError, UsageError
from tests.unit.data.ltd_models import ALL_MODELS, LAYERS, WIDTH, batch, build, layers_of, ltd_config

LENGTH, KEPT, LAYER = 10, 6, 2


def scheduler(low: int = KEPT, high: int = KEPT, **more: Any) -> RandomLTDScheduler:
    return RandomLTDScheduler(RandomLtd(**ltd_config(low, high, **more)["data_routing"]["random_ltd"]))


class Drawn:
    """Random-LTD of one layer of a model, with its calls: inputs, arguments, positions and outputs."""

    def __init__(self, model: nn.Module, layer: int, kept: int = KEPT) -> None:
        self.layer = layers_of(model)[layer]
        self.whole = copy.deepcopy(self.layer)
        self.calls: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self.outputs: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.layer.register_forward_pre_hook(self._before, with_kwargs=True)
        self.layer.register_forward_hook(self._after)
        self.routing = RandomLTD(scheduler(kept, kept), {layer: self.layer}, lambda: (0, 0))
        original = self.routing.draw

        def draw(number: int, hidden: torch.Tensor) -> KeptTokens | None:
            tokens = original(number, hidden)
            if tokens is not None:
                self.positions.append(tokens.positions)
            return tokens

        self.routing.draw = draw  # type: ignore[method-assign]

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        named = layer.forward.named(args, kwargs)
        first = layer.forward.names[0]
        self.calls.append((named[first], {name: value for name, value in named.items() if name != first}))

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.outputs.append(output if isinstance(output, torch.Tensor) else output[0])


def rotary_of(model: nn.Module) -> nn.Module | None:
    return next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)


def alone(model: nn.Module, drawn: Drawn, kind: str, sample: int, real: torch.Tensor) -> torch.Tensor:
    """The layer's output for the kept tokens of one sample that are no padding, run without any other token."""
    hidden, given = drawn.calls[0]
    positions = drawn.positions[0][sample]
    positions = positions[real[sample, positions]]
    own: dict[str, Any] = {}
    if rotary_of(model) is not None:
        layer_type = {"layer_type": model.config.layer_types[LAYER]} if kind == "gemma3" else {}
        ids = positions.unsqueeze(0)
        own["position_embeddings"] = rotary_of(model)(hidden[sample : sample + 1], position_ids=ids, **layer_type)
    if model.config._attn_implementation == "eager" and kind in ("llama", "bloom"):  # causal by its mask alone
        square = torch.full((len(positions), len(positions)), torch.finfo(torch.float32).min)
        own["attention_mask"] = square.triu(1)[None, None]
    if kind == "bloom":  # the bias of a key is its place among the sample's tokens, times a slope for each head
        own["alibi"] = given["alibi"].unflatten(0, (len(hidden), -1))[sample][..., positions]
    output = drawn.whole(hidden[sample : sample + 1, positions], **own)
    return (output if isinstance(output, torch.Tensor) else output[0])[0]


def compare_with_alone(kind: str, attention: str = "sdpa") -> None:
    """Raise AssertionError unless each kept token has the output of its sample alone, and others pass unchanged."""
    model = build(kind, attention=attention).train()
    drawn = Drawn(model, LAYER)
    inputs = batch(0)
    model(**inputs)
    real, hidden, output = inputs["attention_mask"].bool(), drawn.calls[0][0], drawn.outputs[0]
    assert drawn.positions[0].shape == (4, KEPT)
    for sample, positions in enumerate(drawn.positions[0]):
        others = torch.ones(LENGTH, dtype=torch.bool)
        others[positions] = False
        assert torch.equal(output[sample, others], hidden[sample, others])
        kept = positions[real[sample, positions]]
        torch.testing.assert_close(output[sample, kept], alone(model, drawn, kind, sample, real), rtol=1e-5, atol=1e-5)
    assert not torch.equal(drawn.positions[0][0], drawn.positions[0][1])  # each sample has its own


CASES = [(kind, "eager" if kind == "bloom" else "sdpa") for kind in ALL_MODELS if kind != "t5"]
CASES += [("llama", "eager"), ("bert", "eager")]


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_kept_tokens_are_as_each_samples_alone(kind: str, attention: str) -> None:
    compare_with_alone(kind, attention)


def corner(self: KeptTokens, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Upstream's mask of decoders: its upper left corner."""
    kept = self._kept
    return tensor[..., :kept, :kept] if "mask" in name and tensor.dim() == 4 else real_gathered(self, name, tensor)


def no_rotation(self: KeptTokens, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, : self._kept] if name == "position_embeddings" else real_gathered(self, name, tensor)


real_gathered = KeptTokens._gathered
real_put = KeptTokens.put
PLANTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "corner of the mask": ("llama", "_gathered", corner),
    "rotations of the first tokens": ("llama", "_gathered", no_rotation),
    "mask of an encoder": ("bert", "_gathered", corner),
    "output one place on": (
        "gpt_neo", "put", lambda self, hidden, output: real_put(self, hidden, output.roll(1, dims=1))
    ),
    "others lost": ("gpt_neo", "put", lambda self, hidden, output: real_put(self, hidden * 0, output)),
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, wrong = PLANTS[plant]
    monkeypatch.setattr(KeptTokens, name, wrong)
    with pytest.raises(AssertionError):
        compare_with_alone(kind)


def test_a_first_layer_that_forms_the_bias_of_others_is_refused() -> None:
    for layer in (0, 1):
        model = build("t5").train()
        drawn = Drawn(model, layer)
        if layer == 0:
            with pytest.raises(UsageError, match="layer 0 forms 'position_bias'"):
                model(**batch(0))
        else:
            model(**batch(0))
            assert len(drawn.positions) == 1


class Biased(nn.Module):
    """A layer with an optional bias; it returns the bias that it has formed, an argument, or nothing more."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns, self.inner = returns, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: Any = None, attn_bias: Any = None) -> Any:
        output = x + self.inner(x)
        formed = torch.zeros(x.shape[1]) if attn_bias is None else attn_bias
        return {"nothing": output, "scale": (output, scale), "bias": (output, formed)}[self.returns]


@pytest.mark.parametrize("returns", ["nothing", "scale", "bias"])
def test_an_optional_bias_is_refused_only_where_a_layer_forms_it(returns: str) -> None:
    hidden, scale = torch.ones(2, 5, 4), torch.ones(7)
    layer = Biased(returns)
    RandomLTD(scheduler(2, 2), {0: layer}, lambda: (0, 0))
    if returns == "bias":
        with pytest.raises(UsageError, match="layer 0 forms 'attn_bias'"):
            layer(hidden, scale)
        layer = Biased(returns)
        RandomLTD(scheduler(2, 2), {0: layer}, lambda: (0, 0), whole=["attn_bias"])
    output = layer(hidden, scale)
    states = output if isinstance(output, torch.Tensor) else output[0]
    assert states.shape == hidden.shape
    if returns == "scale":
        assert output[1] is scale


@pytest.mark.parametrize("kind", ["gpt_neo", "llama", "bert", "t5"])
def test_all_tokens_evaluation_and_removal_are_the_model_itself(kind: str) -> None:
    model, inputs = build(kind).train(), batch(1)
    names = list(model.state_dict())
    plain = model(**inputs).logits
    layer = 1
    routing = RandomLTD(scheduler(LENGTH, LENGTH), {layer: layers_of(model)[layer]}, lambda: (0, 0))
    assert torch.equal(model(**inputs).logits, plain)
    routing.scheduler.set_current_seq(KEPT)
    assert not torch.equal(model(**inputs).logits, plain)
    assert list(model.state_dict()) == names
    twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (model.eval(), twin.train(), pickled.train()):
        assert torch.equal(other(**inputs).logits, plain)
    routing.remove()
    assert torch.equal(model.train()(**inputs).logits, plain)
    assert not any("forward" in vars(module) for module in model.modules())


def test_generation_may_leave_a_replaced_forward_out_in_evaluation_only() -> None:
    from deepspeed.inference.executors.structure import changes_its_call

    model = build("llama").train()
    layer = layers_of(model)[1]
    RandomLTD(scheduler(), {1: layer}, lambda: (0, 0))
    assert changes_its_call(layer) and not changes_its_call(layers_of(model)[0])
    assert not changes_its_call(layer.eval())


def test_generation_in_training_mode_runs_whole_layers() -> None:
    model = build("llama", use_cache=True, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # so that tokens depend on the context
    ids = batch(0, rows=2, padded=False)["input_ids"]
    want = model.eval().generate(ids, max_new_tokens=6, do_sample=False)
    RandomLTD(scheduler(4, 4), {layer: layers_of(model)[layer] for layer in (1, 2)}, lambda: (0, 0))
    assert torch.equal(model.train().generate(ids, max_new_tokens=6, do_sample=False), want)
    with torch.no_grad():  # without a cache, an evaluation of the loss in training mode is random-LTD's
        whole = model.eval()(ids, use_cache=False).logits
        assert not torch.equal(model.train()(ids, use_cache=False).logits, whole)


# -- draws ------------------------------------------------------------------------------------------------------------


def test_draws_are_uniform_sorted_and_of_their_key() -> None:
    position = [0, 0]
    layer = nn.Linear(1, 1)
    make = lambda *seeds: RandomLTD(scheduler(2, 2), {0: layer}, lambda: (position[0], position[1]), seeds)  # noqa: E731
    hidden, seen = torch.zeros(4, 5, 1), {}
    one, same, other = make(1, 0), make(1, 0), make(1, 1)
    counts = torch.zeros(5)
    for update in range(50):
        for micro in range(2):
            position[:] = [update, micro]
            kept = one.draw(0, hidden).positions  # type: ignore[union-attr]
            assert (kept.diff(dim=1) > 0).all() and kept.shape == (4, 2)
            assert torch.equal(kept, same.draw(0, hidden).positions)  # type: ignore[union-attr]
            assert not torch.equal(kept, one.draw(0, hidden).positions)  # type: ignore[union-attr]
            assert other.draw(0, hidden).positions.shape == kept.shape  # type: ignore[union-attr]
            counts += torch.bincount(kept.flatten(), minlength=5)
            seen[tuple(kept.flatten().tolist())] = True
    assert len(seen) > 90
    assert ((counts / counts.sum() - 0.2).abs() < 0.05).all(), counts


class Checkpointed(nn.Module):
    """Calls of layers inside torch's checkpoint, one layer or two to a checkpoint."""

    def __init__(self, together: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.together, self.reentrant = together, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls = [lambda x: self.layers[1](self.layers[0](x))] if self.together else list(self.layers)
        for call in calls:
            x = checkpoint(call, x, use_reentrant=self.reentrant) if self.training else call(x)
        return x


def gradients(model: Checkpointed, order: Callable[[list[torch.Tensor]], None], **how: Any) -> list[torch.Tensor]:
    """Gradients of three forwards, with backward passes in some order."""
    routing = RandomLTD(scheduler(3, 3, ids=(0, 1), layers=2), dict(enumerate(model.layers)), lambda: (0, 0))
    losses = [model(torch.linspace(-1, 1, 40).reshape(2, 5, 4).requires_grad_() + n).square().sum() for n in range(3)]
    order(losses)
    routing.remove()
    return [parameter.grad.clone() for parameter in model.parameters()]


ORDERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "first first": lambda losses: [loss.backward() for loss in losses],
    "last first": lambda losses: [loss.backward() for loss in reversed(losses)],
    "sum": lambda losses: sum(losses).backward(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_inside_torchs_checkpoint_draws_again_what_it_drew(order: str, reentrant: bool) -> None:
    plain = Checkpointed(together=False)
    again = copy.deepcopy(plain)
    again.reentrant = reentrant
    plain.training = False  # its layers train, its calls are not checkpointed
    for got, want in zip(gradients(again, ORDERS[order]), gradients(plain, ORDERS[order]), strict=True):
        assert torch.equal(got, want)


def test_two_forwards_of_one_input_are_not_told_apart() -> None:
    model = Checkpointed(together=False)
    RandomLTD(scheduler(3, 3, ids=(0, 1), layers=2), dict(enumerate(model.layers)), lambda: (0, 0))
    x = torch.linspace(-1, 1, 40).reshape(2, 5, 4).requires_grad_()
    losses = [model(x).square().sum() for _ in range(2)]
    with pytest.raises(UsageError, match="layer 0 is recomputed in backward, and 2 of its calls"):
        losses[0].backward()


def test_a_second_backward_draws_the_same_again() -> None:
    model = Checkpointed(together=False)
    RandomLTD(scheduler(3, 3, ids=(0, 1), layers=2), dict(enumerate(model.layers)), lambda: (0, 0))
    loss = model(torch.linspace(-1, 1, 40).reshape(2, 5, 4).requires_grad_()).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert all(torch.equal(parameter.grad, 2 * once) for parameter, once in zip(model.parameters(), first, strict=True))


def test_a_recomputation_of_an_unknown_call_is_refused() -> None:
    model = Checkpointed(together=True)
    with pytest.raises(UsageError, match="layer 1 is recomputed in backward, and 3 of its calls may be meant"):
        gradients(model, ORDERS["first first"])


@pytest.mark.parametrize("order", ORDERS)
def test_a_layer_inside_our_checkpoint_draws_again_what_it_drew(order: str, monkeypatch: Any) -> None:
    import deepspeed

    plain = Checkpointed(together=True)
    again = copy.deepcopy(plain)
    plain.training = False
    want = gradients(plain, ORDERS[order])
    ours = lambda call, x, use_reentrant: deepspeed.checkpointing.checkpoint(call, x)  # noqa: E731
    monkeypatch.setattr("tests.unit.data.test_random_ltd.checkpoint", ours)
    for got, wanted in zip(gradients(again, ORDERS[order]), want, strict=True):
        assert torch.equal(got, wanted)
    monkeypatch.setattr(draw_keys, "snapshot", dict)  # the planted fault: a recomputation without its counts
    with pytest.raises(UsageError):
        gradients(again, ORDERS[order])


# -- arguments --------------------------------------------------------------------------------------------------------


def tokens(rows: int = 2, length: int = 5, **how: Any) -> KeptTokens:
    positions = torch.tensor([[0, 2, 3], [1, 2, 4]])[:rows]
    return KeptTokens(positions, length, **how)


def gathered(name: str, *shape: int, dtype: torch.dtype = torch.float32, **how: Any) -> list[int]:
    return list(tokens(**how).arguments({name: torch.ones(shape, dtype=dtype)})[name].shape)


def test_arguments_are_cut_by_structure() -> None:
    ints = {"dtype": torch.int64}
    assert gathered("attention_mask", 2, 5, **ints) == [2, 3]
    assert gathered("attention_mask", 1, 1, 5, 5) == [2, 1, 3, 3]
    assert gathered("attention_mask", 2, 1, 1, 5) == [2, 1, 1, 3]
    assert gathered("attention_mask", 2, 4, 5, 5) == [2, 4, 3, 3]
    assert gathered("position_ids", 1, 5, **ints) == [2, 3]
    assert gathered("position_ids", 3, 1, 5, **ints) == [3, 2, 3]
    assert gathered("position_embeddings", 1, 5, 8) == [2, 3, 8]
    assert gathered("cos", 1, 1, 5, 8) == [2, 1, 3, 8]
    assert gathered("alibi", 8, 1, 5) == [8, 1, 3]
    assert gathered("encoder_hidden_states", 2, 5, 8) == [2, 5, 8]
    assert gathered("encoder_attention_mask", 2, 1, 5, 5) == [2, 1, 3, 5]
    assert gathered("per_layer_input", 2, 5, 7) == [2, 3, 7]
    assert gathered("layer_head_mask", 5) == [5]
    assert gathered("anything", 7, 6) == [7, 6]
    assert gathered("rotary_pos_emb", 5, 1, 1, 8, sequence_first=True) == [3, 2, 1, 8]
    assert gathered("freqs", 5, 8, rows=1) == [3, 8]
    nested = tokens().arguments({"position_embeddings": (torch.ones(1, 5, 4), {"sin": torch.ones(2, 5, 4)})})
    assert nested["position_embeddings"][1]["sin"].shape == (2, 3, 4)
    assert tokens(whole=("odd",)).arguments({"odd": torch.ones(2, 5, 5)})["odd"].shape == (2, 5, 5)


def test_the_memory_of_cross_attention_is_whole_however_long_it_is() -> None:
    for name in ("memory", "context", "enc_output", "image_hidden_states", "vision_feats", "cross_states"):
        assert gathered(name, 2, 5, 8, width=8) == [2, 5, 8]
    assert gathered("image_attention_mask", 2, 1, 5, 5) == [2, 1, 3, 5]
    assert gathered("memory_key_padding_mask", 2, 5) == [2, 5]
    assert gathered("image_rotary_emb", 2, 5, 8, width=8) == [2, 3, 8]  # of all tokens, in diffusion models
    assert gathered("residual", 2, 5, 8, width=8) == gathered("original_hidden_states", 2, 5, 8, width=8) == [2, 3, 8]
    assert gathered("anything", 2, 5, 7, width=8) == [2, 3, 7]
    with pytest.raises(UsageError, match="'anything'.*may be the memory of cross attention.*whole="):
        gathered("anything", 2, 5, 8, width=8)
    with pytest.raises(UsageError, match="'image_mask'.*may mask tokens or the memory"):
        gathered("image_mask", 2, 5)
    layer = nn.TransformerDecoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    lengths: list[int] = []
    layer.multihead_attn.register_forward_hook(lambda module, args, output: lengths.append(args[1].shape[1]))
    RandomLTD(scheduler(), {0: layer}, lambda: (0, 0))
    for length in (LENGTH, LENGTH + 1):
        layer(torch.randn(2, LENGTH, 8), torch.randn(2, length, 8))
    assert lengths == [LENGTH, LENGTH + 1]
    layer = Unknown()
    RandomLTD(scheduler(), {0: layer}, lambda: (0, 0))
    with pytest.raises(UsageError, match="'other'.*may be the memory"):
        layer(torch.randn(2, LENGTH, 8), torch.randn(2, LENGTH, 8))


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + other.mean(1, keepdim=True)


REFUSED = {
    "no batch": ("freqs", (5, 8), "no batch dim"),
    "two readings": ("odd", (2, 5, 5), "may be"),
    "two readings of two dims": ("key_padding_mask", (5, 5), "may be"),
    "keys of a cache": ("attention_mask", (2, 1, 5, 9), "other keys than queries"),
    "heads": ("position_bias", (4, 1, 5), "first dim is not the batch"),
    "positions alone": ("position_ids", (5,), "no batch dim"),
    "other rows": ("attention_mask", (3, 1, 5, 5), "first dim is not the batch"),
    "bounds": ("cu_seq_lens_q", (5,), "bounds of packed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_argument_that_may_be_read_in_two_ways_is_refused(case: str) -> None:
    name, shape, words = REFUSED[case]
    with pytest.raises(UsageError, match=f"'{name}'.*{words}"):
        gathered(name, *shape)


def test_masks_of_flex_attention_are_refused_and_empty_rows_are_finite() -> None:
    block = type("BlockMask", (), {})()
    with pytest.raises(UsageError, match="flex attention"):
        tokens().arguments({"attention_mask": block})
    mask = torch.zeros(2, 1, 5, 5)
    mask[..., :4] = -torch.inf  # all that row 0 keeps
    cut = tokens().arguments({"attention_mask": mask})["attention_mask"]
    assert cut.softmax(-1).isfinite().all() and (cut[1, ..., :2] == -torch.inf).all()


class Attention(nn.Module):
    """Attention of one head with a mask: additive, or True for the keys that a query sees."""

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        return x + self.attend(x, attn_mask)

    def attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1) @ x


class BiasedAttention(Attention):
    def forward(self, x: torch.Tensor, attn_bias: torch.Tensor) -> torch.Tensor:
        return x + self.attend(x, attn_bias[:, 0])


class InvertedAttention(Attention):
    """True for the keys that a query does not see, as in torch's layers."""

    def forward(self, x: torch.Tensor, src_mask: torch.Tensor) -> torch.Tensor:
        return x + self.attend(x, ~src_mask)


@pytest.mark.parametrize("kind", ["torch", "seen", "inverted", "mask", "bias"])
def test_padding_that_sees_no_kept_token_is_finite_and_real_tokens_are_as_alone(kind: str) -> None:
    torch.manual_seed(0)
    length, real = 16, torch.tensor([2, 16])
    hidden, padded = torch.randn(2, length, 8), torch.arange(length) >= real[:, None]
    seen = torch.ones(length, length).tril().bool() & ~padded[:, None, :]
    added = torch.zeros(2, length, length).masked_fill(~seen, -torch.inf)
    layer: nn.Module = Attention()
    if kind == "torch":
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    elif kind in ("bias", "inverted"):
        layer = BiasedAttention() if kind == "bias" else InvertedAttention()
    name = {"torch": "src_key_padding_mask", "bias": "attn_bias", "inverted": "src_mask"}.get(kind, "attn_mask")
    mask = {"torch": padded, "seen": seen, "inverted": ~seen}.get(kind, added)
    mask = mask[:, None] if kind == "bias" else mask
    whole, update = copy.deepcopy(layer), [0]
    routing = RandomLTD(scheduler(), {0: layer}, lambda: (update[0], 0))
    empty = 0
    for update[0] in range(12):
        positions = routing.draw(0, hidden).positions  # type: ignore[union-attr]
        routing.keys = draw_keys.DrawKeys(lambda: (update[0], 0))  # so that the layer draws the same
        output = layer(hidden, **{name: mask})
        assert output.isfinite().all()
        empty += int((positions[0] >= 2).all())
        kept = positions[1]
        causal = torch.ones(KEPT, KEPT).tril().bool()
        alone = {"torch": torch.zeros(1, KEPT, dtype=torch.bool), "seen": causal[None], "inverted": ~causal[None]}
        own = alone.get(kind, torch.zeros(1, KEPT, KEPT).masked_fill(~causal, -torch.inf))
        own = own[:, None] if kind == "bias" else own
        torch.testing.assert_close(output[1:, kept], whole(hidden[1:, kept], **{name: own}))
    assert empty  # some update kept no real token of the short sample


def test_boolean_arguments_that_mask_no_keys_stay_as_they_are() -> None:
    image = torch.tensor([[False, True, False, False, True]] * 2)
    cut = tokens().arguments({"is_image_token": image, "token_mask": image})
    for name in cut:
        assert torch.equal(cut[name], image[0][tokens().positions]), name
    assert tokens().arguments({"attention_mask": image})["attention_mask"].all(1).tolist() == [True, False]


def test_hidden_states_in_both_orders_and_outputs_of_all_forms() -> None:
    hidden = torch.arange(20.0).reshape(2, 5, 2)
    for swapped in (False, True):
        kept = tokens(sequence_first=swapped)
        states = hidden.transpose(0, 1) if swapped else hidden
        taken = kept.take(states)
        rows = taken.transpose(0, 1) if swapped else taken
        assert torch.equal(rows[0], hidden[0, [0, 2, 3]]) and torch.equal(rows[1], hidden[1, [1, 2, 4]])
        put = kept.put(states, taken + 100)
        rows = put.transpose(0, 1) if swapped else put
        assert torch.equal(rows[1] - hidden[1], torch.tensor([0, 100, 100, 0, 100.0])[:, None].expand(-1, 2))
    with pytest.raises(UsageError, match="only layers that keep the shape"):
        tokens().put(hidden, torch.zeros(2, 3, 4))
    from transformers.modeling_outputs import BaseModelOutput

    one = torch.ones(1)
    for output in (one, (one, 2), [one, 2], BaseModelOutput(last_hidden_state=one, attentions=(2,))):
        states, rest, form = kept_tokens.split_output(output)
        again = form.form(states * 3, rest)
        assert type(again) is type(output) and states is one
        assert (again if isinstance(again, torch.Tensor) else list(dict(enumerate(again)).values())[0]) is not None
    with pytest.raises(UsageError, match="without hidden states"):
        kept_tokens.split_output(None)


def test_a_layer_with_another_input_is_refused() -> None:
    layer = nn.Sequential(nn.Linear(4, 4))
    RandomLTD(scheduler(2, 2), {0: layer}, lambda: (0, 0))
    with pytest.raises(UsageError, match=r"layer 0 gets \[2, 4\] in the first place"):
        layer(torch.zeros(2, 4))


# -- schedule ---------------------------------------------------------------------------------------------------------


def test_the_schedule_is_the_formula_and_tokens_are_counted() -> None:
    section = RandomLtd(**ltd_config(16, 128, steps=100, ids=(1, 2))["data_routing"]["random_ltd"])
    section.random_ltd_schedule["schedule_config"]["seq_per_step"] = 16  # type: ignore[index]
    plan = RandomLTDScheduler(section, lambda: 32)
    want = [min(128, (16 + step * 112 // 100) // 16 * 16) for step in range(200)]
    assert [plan.get_value(step) for step in range(200)] == want and plan.get_current_seq() == 16
    total = sum(32 * (2 * kept + 2 * 128) for kept in want[:150])
    assert plan.get_total_layer_tokens(150) == total and plan.consumed_layer_tokens == 0
    for step in range(151):
        assert plan.update_seq(step) == plan.get_current_seq() == want[step]
    assert plan.consumed_layer_tokens == total and plan.get_random_ltd_layer_num() == 2
    other = RandomLTDScheduler(section, lambda: 32)
    other.load_state_dict(plan.state_dict())
    assert other.state_dict() == plan.state_dict()
    other.set_current_seq(48)
    assert other.update_seq(150) == 48 and other.update_seq(151) == want[151]
    other.reset_to_init()
    assert other.get_current_seq() == 16 and other.consumed_layer_tokens == 0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no schedule": ({"random_ltd_schedule": None}, "random_ltd_schedule"),
    "another schedule": ({"random_ltd_schedule": {"schedule_type": "fixed_root"}}, "schedule_type"),
    "no layers": ({"random_ltd_layer_id": None}, "random_ltd_layer_id"),
    "a layer twice": ({"random_ltd_layer_id": [1, 1]}, "random_ltd_layer_id"),
    "a layer beyond": ({"random_ltd_layer_id": [1, LAYERS]}, "random_ltd_layer_id"),
    "another number": ({"random_ltd_layer_num": 3}, "random_ltd_layer_num"),
    "no total": ({"total_layer_num": None}, "total_layer_num"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_configuration_is_refused(case: str) -> None:
    change, key = WRONG[case]
    with pytest.raises(DeepSpeedConfigError, match=rf"random_ltd\.(random_ltd_schedule\.)?{key}"):
        RandomLTDScheduler(RandomLtd(**ltd_config(4, 8)["data_routing"]["random_ltd"] | change))


@pytest.mark.parametrize(("low", "high", "every", "key"), [(8, 4, 1, "min_value"), (5, 8, 4, "min_value")])
def test_a_wrong_schedule_is_refused(low: int, high: int, every: int, key: str) -> None:
    section = RandomLtd(**ltd_config(low, high)["data_routing"]["random_ltd"])
    section.random_ltd_schedule["schedule_config"]["seq_per_step"] = every  # type: ignore[index]
    with pytest.raises(DeepSpeedConfigError, match=key):
        RandomLTDScheduler(section)


def test_the_schedule_of_learning_rates_is_refused() -> None:
    block = ltd_config(4, 8, layer_token_lr_schedule={"enabled": True})["data_routing"]["random_ltd"]
    with pytest.raises(NotAvailableError, match="layer_token_lr_schedule"):
        RandomLTDScheduler(RandomLtd(**block))


def test_upstreams_names_and_models_without_an_engine() -> None:
    assert remove_random_ltd_state_dict({"h.1.random_ltd_layer.w": 1, "h.0.w": 2}) == {"h.1.w": 1, "h.0.w": 2}
    module = nn.Linear(WIDTH, 2)
    assert random_ltd.save_without_random_ltd(module).keys() == module.state_dict().keys()
    with pytest.raises(ArgumentError, match="needs the engine"):
        random_ltd.convert_to_random_ltd(module, nn.Linear)
    with pytest.raises(ArgumentError, match="total_layer_num is 4, and the model has 1"):
        random_ltd.layers_to_convert(SimpleNamespace(modules=lambda: [module]), nn.Linear, scheduler())  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_attention_without_a_mask_that_can_be_cut_is_refused(attention: str, wrapped: bool) -> None:
    model = build("llama")
    kind = type(layers_of(model)[0])
    whole = nn.Sequential(model) if wrapped else model
    assert list(random_ltd.layers_to_convert(whole, kind, scheduler())) == [1, 2]
    model.config._attn_implementation_internal = attention  # the setter looks for installed kernels
    with pytest.raises(NotAvailableError, match=f"{attention} is not available"):
        random_ltd.layers_to_convert(whole, kind, scheduler())


def test_checkpointed_blocks_are_known_inside_random_ltd() -> None:
    from deepspeed.activation_checkpointing.apply import checkpointed_blocks, wrap
    from deepspeed.config.sections.memory import ActivationCheckpointing

    model = build("llama").train()
    wrapping = wrap(model, ActivationCheckpointing(enabled=True), None)
    routing = RandomLTD(scheduler(), {1: layers_of(model)[1]}, lambda: (0, 0))
    assert checkpointed_blocks(model) == layers_of(model)
    wrapping.remove()  # type: ignore[union-attr]
    assert not checkpointed_blocks(model)
    routing.remove()
