"""The old calls, the recipes that circulate, and what must not happen again."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.compression import (
    convert_conv1d_to_linear,
    init_compression,
    redundancy_clean,
    student_initialization,
)
from deepspeed.compression.basic_layer import LinearLayer_Compress
from deepspeed.compression.compress import get_module_name
from deepspeed.compression.distill import Distiller, divergence
from deepspeed.compression.pruning.layer_selection import block_influence, by_influence
from deepspeed.config.sections.compression import Distillation
from deepspeed.errors import CompressionError, DeepSpeedConfigError, UsageError
from tests.unit.compression.architectures import architecture


def technique(name: str, groups: dict[str, Any], **shared: Any) -> dict[str, Any]:
    enabled = {"enabled": True, "schedule_offset": 0, **shared}
    return {name: {"shared_parameters": enabled, "different_groups": groups}}


def config(*techniques: dict[str, Any]) -> dict[str, Any]:
    return {"compression_training": {key: value for one in techniques for key, value in one.items()}}


def bert(layers: int = 2) -> Any:
    model_class, settings = architecture("Bert")
    settings.num_hidden_layers = layers
    torch.manual_seed(0)
    return model_class(settings).eval()


class Branch(nn.Module):
    """Two row patterns in one group, a tied pair, a frozen weight, a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.up = nn.ModuleList(nn.Linear(8, 12) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(12, 8) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.emb.weight
        self.down[1].weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(x)


ROWS = technique(
    "row_pruning",
    {
        "g": {
            "params": {"dense_ratio": 0.5},
            "modules": [r"up\.0", r"up\.1"],
            "related_modules": [[r"down\.0"], [r"down\.1"]],
        }
    },
    method="l1",
)


def test_init_compression_keeps_what_the_model_was() -> None:
    torch.manual_seed(0)
    model = Branch()
    called: list[int] = []
    model.up[0].register_forward_hook(lambda *_: called.append(1))
    before = {id(p) for p in model.parameters()}
    assert init_compression(model, config(ROWS)) is model
    assert isinstance(model.up[0], LinearLayer_Compress)
    assert {id(p) for p in model.parameters()} == before
    assert model.head.weight is model.emb.weight and not model.down[1].weight.requires_grad
    model(torch.arange(4))
    assert called == [1]


def test_two_patterns_of_a_group_are_cleaned_apart() -> None:
    torch.manual_seed(0)
    model = Branch()
    masked = copy.deepcopy(model)
    for up, down in zip(masked.up, masked.down, strict=True):
        keep = torch.zeros(12)
        keep[up.weight.abs().sum(1).topk(6).indices] = 1
        up.weight.data.mul_(keep[:, None])
        up.bias.data.mul_(keep)
        down.weight.data.mul_(keep)
    init_compression(model, config(ROWS))
    redundancy_clean(model, config(ROWS))
    assert [m.weight.shape[0] for m in model.up] == [6, 6] and model.up[1].out_features == 6
    assert type(model.up[0]) is nn.Linear
    assert torch.allclose(model(torch.arange(9)), masked(torch.arange(9)), atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_is_cleaned_where_an_engine_trained_it(stage: int, alone: None) -> None:
    """As a fresh model is that was given the trained weights; the examples clean the one they have."""
    settings = config(ROWS) | {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    torch.manual_seed(0)
    model = init_compression(Branch(), settings)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    for _ in range(2):
        engine.backward(engine(torch.arange(4)).square().mean())
        engine.step()
    fresh = init_compression(Branch(), settings)
    fresh.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    expected = redundancy_clean(fresh, settings)
    cleaned = redundancy_clean(model, settings)
    assert [up.weight.shape[0] for up in cleaned.up] == [6, 6]
    assert cleaned.head.weight is cleaned.emb.weight and not cleaned.down[1].weight.requires_grad
    assert torch.equal(cleaned(torch.arange(9)), expected(torch.arange(9)))


def test_xtc_and_zeroquant_recipes() -> None:
    modules = ["attention.self", "intermediate", "output.dense", "word_embeddings"]
    for start, period in ((1, 0), (2, 0), (8, 0)):
        groups = {
            "g": {
                "params": {"start_bits": start, "target_bits": start, "quantization_period": period},
                "modules": modules,
            }
        }
        weights = technique("weight_quantization", groups, quantize_weight_in_forward=True, quantize_groups=1)
        inputs = technique(
            "activation_quantization",
            {"g": {"params": {"bits": 8}, "modules": ["attention.self", "intermediate", "output.dense"]}},
            range_calibration="dynamic",
        )
        model = init_compression(bert(), config(weights, inputs))
        redundancy_clean(model, config(weights, inputs))
        levels = model.bert.encoder.layer[0].intermediate.dense.weight.unique().numel()
        assert levels <= 2**start + (start == 2), (start, levels)
        model(torch.arange(8)[None]).logits.sum().backward()


def test_rows_and_heads_recipes() -> None:
    """As they circulate for BERT, partners by hand."""
    ids = torch.arange(8)[None]
    rows = technique(
        "row_pruning",
        {
            "rp1": {
                "params": {"dense_ratio": 0.5},
                "modules": ["intermediate.dense"],
                "related_modules": [["layer.\\w+.output.dense"]],
            }
        },
        method="l1",
    )
    model = bert()
    masked = copy.deepcopy(model)
    for layer in masked.bert.encoder.layer:
        keep = torch.zeros(48)
        keep[layer.intermediate.dense.weight.abs().sum(1).topk(24).indices] = 1
        layer.output.dense.weight.data.mul_(keep)
    redundancy_clean(init_compression(model, config(rows)), config(rows))
    assert [layer.intermediate.dense.out_features for layer in model.bert.encoder.layer] == [24, 24]
    assert torch.allclose(model(ids).logits, masked(ids).logits, atol=1e-5)
    heads = technique(
        "head_pruning",
        {
            "rp1": {
                "params": {"dense_ratio": 0.5},
                "modules": ["attention.output.dense"],
                "related_modules": [["self.query", "self.key", "self.value"]],
            }
        },
        num_heads=4,
    )
    model = redundancy_clean(init_compression(bert(), config(heads)), config(heads))
    for layer in model.bert.encoder.layer:
        whole = layer.attention.output.dense.weight.view(32, 4, 8).abs().sum((0, 2)) > 0
        assert whole.sum() == 2, "two of four heads are masked; a config of BERT cannot say fewer"
        for name in ("query", "key", "value"):
            part = layer.attention.self.get_submodule(name).weight.view(4, 8, 32).abs().sum((1, 2)) > 0
            assert torch.equal(part, whole)


def test_layer_reduction_copies_what_is_named() -> None:
    section = {"enabled": True, "keep_number_layer": 2, "module_name_prefix": "bert.encoder.layer",
               "teacher_layer": [1, 3], "other_module_name": ["bert.embeddings", "cls"]}  # fmt: skip
    teacher, student = bert(4), bert(2)
    for param in student.parameters():
        param.data.add_(1)
    student_initialization(student, teacher, {"compression_training": {"layer_reduction": section}})
    wanted, found = teacher.state_dict(), student.state_dict()
    for key, value in found.items():
        source = key.replace("layer.1.", "layer.3.").replace("layer.0.", "layer.1.")
        assert torch.equal(value, wanted[source]), key
    with pytest.raises(CompressionError, match="layer.9"):
        wrong = {**section, "teacher_layer": [1, 9]}
        student_initialization(student, teacher, {"compression_training": {"layer_reduction": wrong}})


def test_conv1d_becomes_linear_with_ties() -> None:
    from transformers.pytorch_utils import Conv1D

    model_class, settings = architecture("GPT2")
    torch.manual_seed(0)
    model = model_class(settings).eval()
    before = model(torch.arange(6)[None]).logits
    assert convert_conv1d_to_linear(model, Conv1D) is model
    assert not any(isinstance(m, Conv1D) for m in model.modules())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.allclose(model(torch.arange(6)[None]).logits, before, atol=1e-6)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (technique("row_pruning", {}), "different_groups is missing"),
        (technique("row_pruning", {"g": {"modules": ["x"]}}), "dense_ratio is missing"),
        (technique("row_pruning", {"g": {"params": {"dense_ratio": 0.0}, "modules": ["x"]}}), "must be above 0"),
        (technique("row_pruning", {"g": {"params": {"dense_ratio": 0.5}, "modules": ["("]}}), "no regular expression"),
        (
            technique("row_pruning", {"g": {"params": {"dense_ratio": 0.5}}}, schedule="cubic"),
            "schedule_offset_end is missing",
        ),
        (
            technique("weight_quantization", {"g": {"params": {"start_bits": 4, "target_bits": 8}}}),
            "is above start_bits",
        ),
        (
            technique("weight_quantization", {"g": {"params": {"start_bits": 8, "target_bits": -1}}}),
            "must be at least 1",
        ),
        (technique("sparse_pruning", {"g": {"params": {"dense_ratio": 0.5}}}, block_pattern="two"), "write N:M"),
    ],
)
def test_every_wrong_block_is_an_error(one: dict[str, Any], text: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=text):
        init_compression(Branch(), config(one))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe"])
def test_packed_experts_are_named_by_their_module(name: str) -> None:
    """Experts keep equally many units, each its own; a shared expert beside them is a width of its own."""
    model_class, settings = architecture(name)
    torch.manual_seed(0)
    model = model_class(settings).eval()
    experts = model.model.layers[0].mlp.experts
    before = experts.down_proj.shape
    section = config(technique("row_pruning", {"g": {"params": {"dense_ratio": 0.5}, "modules": [r"mlp\.experts$"]}}))
    redundancy_clean(init_compression(model, section), section)
    assert experts.down_proj.shape == (*before[:2], before[2] // 2)
    assert experts.gate_up_proj.shape == (before[0], before[2], before[1])
    assert torch.isfinite(model(torch.arange(6)[None]).logits).all()
    assert getattr(model.config, "shared_expert_intermediate_size", 40) == 40
    with pytest.raises(CompressionError, match="is packed, and no units"):
        wrong = nn.ModuleDict({"experts": nn.Module()})
        wrong["experts"].weights = nn.Parameter(torch.randn(2, 3, 4))
        group = {"g": {"params": {"dense_ratio": 0.5}, "modules": ["experts"]}}
        init_compression(wrong, config(technique("row_pruning", group)))


def test_modules_that_are_not_there_or_are_named_twice() -> None:
    half = {"params": {"dense_ratio": 0.5}}
    with pytest.raises(CompressionError, match="finds no Linear"):
        init_compression(Branch(), config(technique("row_pruning", {"g": {**half, "modules": ["nowhere"]}})))
    twice = technique("sparse_pruning", {"a": {**half, "modules": ["up"]}, "b": {**half, "modules": [r"up\.0"]}})
    with pytest.raises(CompressionError, match="name it once"):
        init_compression(Branch(), config(twice))
    with pytest.raises(ValueError, match="already added"):
        get_module_name("g", Branch(), "up", {"up.0"})


# -- layers and distillation ------------------------------------------------------------------------------------------


def test_block_influence_keeps_the_first_layer_and_drops_an_idle_one() -> None:
    model = bert(4)
    for param in model.bert.encoder.layer[2].parameters():
        param.data.mul_(1e-3)
    for name in ("attention.output", "output"):
        model.bert.encoder.layer[2].get_submodule(name).LayerNorm.weight.data.fill_(1.0)
    found = block_influence(model, "bert.encoder.layer", [{"input_ids": torch.arange(12)[None]}])
    assert min(range(4), key=found.__getitem__) == 2
    assert by_influence(found, 2)[0] == 0 and 2 not in by_influence(found, 3)


def llama(seed: int, layers: int) -> Any:
    model_class, settings = architecture("Llama")
    settings.num_hidden_layers, settings._attn_implementation = layers, "eager"
    torch.manual_seed(seed)
    return model_class(settings)


def test_distillation_is_the_sum_written_by_hand() -> None:
    student, teacher = llama(0, 2), llama(1, 4)
    section = Distillation(enabled=True, temperature=2.0, hard=0.5, logits=0.3, hidden=0.1, attention=0.2)
    distiller = Distiller(student.train(), section)
    ids = torch.arange(10)[None]
    with pytest.raises(UsageError, match="set_teacher"):
        student(input_ids=ids, labels=ids)
    teacher.train()  # it is asked in evaluation mode all the same
    teacher.config.attention_dropout = 0.5
    for layer in teacher.model.layers:
        layer.self_attn.attention_dropout = 0.5
    distiller.set_teacher(teacher)
    found = student(input_ids=ids, labels=ids).loss
    assert teacher.training
    distiller.remove()
    kwargs = {"input_ids": ids, "output_hidden_states": True, "output_attentions": True}
    mine = student(**kwargs, labels=ids)
    with torch.no_grad():
        theirs = teacher.eval()(**kwargs)
    states = [(mine.hidden_states[a], theirs.hidden_states[b]) for a, b in ((0, 0), (1, 2), (2, 4))]
    maps = [(mine.attentions[a], theirs.attentions[b]) for a, b in ((0, 1), (1, 3))]
    hidden, attention = (torch.stack([(x - y).square().mean() for x, y in one]).mean() for one in (states, maps))
    logs = [torch.log_softmax(one.logits / 2, -1) for one in (mine, theirs)]
    logs = [log[:, :-1] for log in logs]  # the last position has no label
    soft = 4 * nn.functional.kl_div(*logs, log_target=True, reduction="none").sum(-1).mean()
    expected = 0.5 * mine.loss + 0.3 * soft + 0.1 * hidden + 0.2 * attention
    assert torch.allclose(found, expected, rtol=1e-5)
    labels = torch.full((1, 10), -100)
    assert divergence(mine.logits, theirs.logits, 1.0, labels) == 0


@pytest.mark.parametrize(
    ("remaining", "before", "pairs"),
    [
        (None, None, [0, 2, 4]),  # evenly
        ([0, 3], 4, [0, 3, 4]),  # layers 1 and 2 left: the first one answers for them
        ([0, 3], None, [0, 3, 4]),
        ([0, 3], 8, [0, 2, 4]),  # of a model of another depth than the teacher
        ([1, 2], 4, [0, 2, 4]),
        ([0, 1, 2], 4, [0, 2, 4]),  # of another model
        ([0, 5], None, [0, 2, 4]),
        ([3, 0], 4, [0, 2, 4]),  # no order in which one answers for others
        ([0, 5, 2], None, [0, 2, 4]),
    ],
)
@pytest.mark.parametrize("distance", ["squared", "cosine"])
def test_hidden_states_are_paired_by_removed_layers(
    remaining: list[int] | None, before: int | None, pairs: list[int], distance: str
) -> None:
    student, teacher = llama(0, 2).train(), llama(1, 4)
    section = Distillation(enabled=True, hard=0.0, logits=0.0, hidden=2.0, hidden_distance=distance)
    distiller = Distiller(student, section)
    distiller.set_teacher(teacher)
    if remaining is not None:
        distiller.layers_left(remaining, before)
    ids = torch.arange(1, 11)[None]  # row 0 is zero, and has no direction
    result = student(input_ids=ids, labels=ids).loss
    distiller.remove()
    with torch.no_grad():
        own = student(input_ids=ids, output_hidden_states=True).hidden_states
        theirs = teacher.eval()(input_ids=ids, output_hidden_states=True).hidden_states
    states = [(own[index], theirs[other]) for index, other in enumerate(pairs)]
    if distance == "squared":
        errors = [(x - y).square().mean() for x, y in states]
    else:
        errors = [(1 - (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))).mean() for x, y in states]
    assert torch.allclose(result, 2 * torch.stack(errors).mean(), rtol=1e-4)


@pytest.mark.parametrize("distance", ["squared", "cosine"])
def test_an_encoder_and_a_decoder_learn_by_the_decoders_states(distance: str) -> None:
    model_class, settings = architecture("T5")
    settings.decoder_start_token_id, settings.pad_token_id = 0, 0
    settings._attn_implementation = "eager"
    student, teacher = model_class(settings).train(), model_class(settings).eval()
    section = Distillation(enabled=True, hard=0.0, logits=0.5, hidden=2.0, hidden_distance=distance, attention=0.1)
    ids, labels = torch.arange(1, 9)[None], torch.arange(1, 5)[None]
    for module in student.modules():
        if hasattr(module, "dropout"):
            module.dropout = nn.Identity() if isinstance(module.dropout, nn.Module) else 0.0
    distiller = Distiller(student, section)
    distiller.set_teacher(teacher)
    result = student(input_ids=ids, labels=labels).loss
    distiller.remove()
    call = {"input_ids": ids, "labels": labels, "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        own, theirs = student(**call), teacher(**call)
    states = [*zip(own.decoder_hidden_states, theirs.decoder_hidden_states, strict=True)]
    errors = [
        (x - y).square().mean() if distance == "squared" else (1 - nn.functional.cosine_similarity(x, y, -1)).mean()
        for x, y in states
    ]
    maps = [(x - y).square().mean() for x, y in zip(own.decoder_attentions, theirs.decoder_attentions, strict=True)]
    logs = [torch.log_softmax(each.logits, -1) for each in (own, theirs)]
    soft = nn.functional.kl_div(*logs, log_target=True, reduction="none").sum(-1).mean()
    expected = 0.5 * soft + 2 * torch.stack(errors).mean() + 0.1 * torch.stack(maps).mean()
    assert torch.allclose(result, expected, rtol=1e-4)


def test_hidden_states_of_another_width_are_refused() -> None:
    student = llama(0, 2).train()
    model_class, settings = architecture("Llama")
    settings.hidden_size, settings.num_hidden_layers = 2 * settings.hidden_size, 2
    distiller = Distiller(student, Distillation(enabled=True, hard=1.0, logits=0.0, hidden=1.0))
    distiller.set_teacher(model_class(settings))
    ids = torch.arange(1, 6)[None]
    with pytest.raises(CompressionError, match="hidden states of student and teacher differ"):
        student(input_ids=ids, labels=ids)
    distiller.remove()


@pytest.mark.parametrize("wrapped", [False, True])
def test_distillation_counts_what_labels_count(wrapped: bool) -> None:
    """A prompt is left out, and the first token of the answer counts: the logits of the prompt's last token say it."""
    student, teacher = llama(0, 2).train(), llama(1, 2).eval()
    ids, labels = torch.arange(10)[None], torch.arange(10)[None].clone()
    labels[:, :6] = labels[:, 9:] = -100
    with torch.no_grad():
        logs = [torch.log_softmax(model(input_ids=ids).logits[:, 5:8], -1) for model in (student, teacher)]
    module = nn.Sequential(student) if wrapped else student
    distiller = Distiller(module, Distillation(enabled=True, hard=0.0, logits=1.0, temperature=1.0))
    distiller.set_teacher(teacher)
    output = student(input_ids=ids)
    found = distiller.loss(output, teacher(input_ids=ids), labels, torch.zeros(()))
    distiller.remove()
    soft = nn.functional.kl_div(*logs, log_target=True, reduction="none").sum(-1).mean()
    assert torch.allclose(found, soft, rtol=1e-5)


def by_position(model: Any, **given: Any) -> list[Any]:
    """Arguments of a forward without their names."""
    names = list(inspect.signature(model.forward).parameters)
    return [given.get(name) for name in names[: max(map(names.index, given)) + 1]]


def test_labels_by_position_are_labels_and_a_forward_without_a_loss_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("deepspeed.compression.distill.warn_once", lambda text, key: warnings.append(text))
    student = llama(0, 2).train()
    distiller = Distiller(student, Distillation(enabled=True, hard=0.5, logits=0.5, temperature=1.0))
    distiller.set_teacher(llama(1, 2))
    ids, labels = torch.arange(10)[None], torch.arange(10)[None].clone()
    labels[:, :6] = -100
    named = student(input_ids=ids, labels=labels).loss
    assert torch.equal(student(*by_position(student, input_ids=ids, labels=labels)).loss, named)
    assert not warnings
    student(input_ids=ids)
    student(input_ids=ids, labels=labels, return_dict=False)
    assert len(warnings) == 2 and all("nothing is distilled" in text for text in warnings)
    distiller.remove()


def test_layer_by_layer_is_the_sum_written_by_hand() -> None:
    student, teacher = llama(0, 2), llama(1, 4).eval()
    section = Distillation(enabled=True, hard=0.0, logits=0.0, layerwise=2.0)
    distiller = Distiller(student.train(), section)
    distiller.set_teacher(teacher)
    ids = torch.arange(10)[None]
    found = student(input_ids=ids, labels=ids).loss
    assert not any(layer._forward_hooks for layer in teacher.model.layers)
    found.backward()
    distiller.remove()
    with torch.no_grad():
        states = teacher(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[:-1]
        places = torch.arange(10)[None]
        rotary = teacher.model.rotary_emb(states[0], places)
    mask = torch.full((10, 10), torch.finfo(torch.float32).min).triu(1)[None, None]
    given = {"position_embeddings": rotary, "attention_mask": mask}
    errors = []
    for mine, theirs in ((0, 1), (1, 3)):
        wanted = teacher.model.layers[theirs](states[theirs], **given).detach()
        errors.append((student.model.layers[mine](states[theirs], **given) - wanted).square().mean())
    expected = 2 * torch.stack(errors).mean()
    assert torch.allclose(found, expected, rtol=1e-5), (found, expected)
    grads = torch.autograd.grad(expected, list(student.model.layers.parameters()))
    for param, grad in zip(student.model.layers.parameters(), grads, strict=True):
        assert torch.allclose(param.grad, grad, rtol=1e-4, atol=1e-7)


# -- convolutions -----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A stem, a residual pair, a depthwise pair, a concatenation, a pooled head; norms with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.one, self.norm1 = nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.two, self.norm2 = nn.Conv2d(12, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.point = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(14, 5)
        self.example_input_array = torch.randn(2, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.norm2(self.two(torch.relu(self.norm1(self.one(x))))))
        y = torch.relu(self.point(self.deep(x)))
        return self.head(torch.cat([x, y], 1).mean((2, 3)))


def test_channels_leave_with_their_norms() -> None:
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = Residual().eval()
    for norm in (model.norm, model.norm1, model.norm2):
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    groups = {"g": {"params": {"dense_ratio": 0.5}, "modules": ["stem", "one", "point"]}}
    section = config(technique("channel_pruning", groups, method="l1"))
    masked = copy.deepcopy(model)
    init_compression(model, section)
    redundancy_clean(model, section)
    assert [model.stem.out_channels, model.one.out_channels, model.two.in_channels] == [4, 6, 6]
    assert [model.norm1.num_features, model.deep.groups, model.head.in_features] == [6, 4, 7]
    keep = {name: masked.get_submodule(name).weight.abs().sum((1, 2, 3)) for name in ("stem", "one", "point")}
    flags = {name: torch.zeros(len(s)).index_fill_(0, s.topk(len(s) // 2).indices, 1) for name, s in keep.items()}
    for names, flag in ((("stem", "norm", "two", "norm2", "deep"), flags["stem"]), (("one", "norm1"), flags["one"]),
                        (("point",), flags["point"])):  # fmt: skip
        for name in names:
            for param in masked.get_submodule(name).parameters(recurse=False):
                param.data.mul_(flag.view(-1, *[1] * (param.dim() - 1)))
    x = torch.randn(3, 3, 8, 8)
    assert torch.allclose(model(x), masked(x), atol=1e-5)
