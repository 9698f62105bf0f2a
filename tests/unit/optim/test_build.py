"""Optimizers by name: which class and values come out, which names and keys are refused, and what may be cut."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import NotAvailableError, OptimizerError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import Muon
from deepspeed.optim.build import ELEMENTWISE, build_optimizer, check_supported, needs_whole_tensors

SHAPES = [(7, 5), (33,), (4, 3, 2)]
VARIANTS = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True, "maximize": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.Adamax, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"t0": 2, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "fused": True}),
    (FusedAdam, {"weight_decay": 0.1}),
    (DeepSpeedCPUAdam, {"amsgrad": True, "adamw_mode": False, "weight_decay": 0.1, "bias_correction": False}),
    (FusedLion, {"weight_decay": 0.1}),
    (DeepSpeedCPULion, {}),
    (DeepSpeedCPUAdagrad, {"weight_decay": 0.1}),
]


def params(count: int = 1) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(count)]


def whole_and_cut_difference(cls: type, arguments: dict, shapes: list[tuple[int, ...]] = SHAPES) -> float:
    """The largest difference after five steps between whole tensors and the same tensors cut into 1-D pieces."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    pieces = [
        [torch.nn.Parameter(piece.clone()) for piece in p.detach().flatten().tensor_split([3, 10])] for p in whole
    ]
    one = cls(whole, **arguments)
    other = cls([piece for cut in pieces for piece in cut], **arguments)
    for _ in range(5):
        for param, cut in zip(whole, pieces, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            for piece, grad in zip(cut, param.grad.flatten().tensor_split([3, 10]), strict=True):
                piece.grad = grad.clone()
        one.step()
        other.step()
    differences = [(p.flatten() - torch.cat(cut)).abs().max() for p, cut in zip(whole, pieces, strict=True)]
    return torch.stack(differences).max().item()


@pytest.mark.parametrize(("cls", "arguments"), VARIANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_elementwise_classes_may_be_cut(cls: type, arguments: dict) -> None:
    assert whole_and_cut_difference(cls, arguments) <= 1e-7


def test_every_elementwise_class_is_proven() -> None:
    assert {cls for cls, _ in VARIANTS} == ELEMENTWISE


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, FusedLamb, Muon])
def test_the_proof_notices_classes_that_may_not(cls: type) -> None:
    assert whole_and_cut_difference(cls, {}, [(7, 5)]) > 1e-5


def test_every_torch_class_has_its_place() -> None:
    def made(name: str) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(params())

    names = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type)} - {"Optimizer"}
    whole = {name for name in names - {"LBFGS", "SparseAdam"} if needs_whole_tensors(made(name))}
    assert whole == {"Adafactor", "Muon"}


def test_a_subclass_counts_as_whole() -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert needs_whole_tensors(Mine(params()))
    assert not needs_whole_tensors(torch.optim.AdamW(params()))
    assert needs_whole_tensors(FusedLamb(params()))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_unsupported_classes_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(OptimizerError, match=f"{name} cannot be used: it .* Use AdamW"):
        check_supported(getattr(torch.optim, name)(params()))
    with pytest.raises(OptimizerError, match=f"{name} cannot be used"):
        build_optimizer(name, {}, params())


@pytest.mark.parametrize(
    ("name", "arguments", "cls", "values"),
    [
        ("Adam", {"lr": 0.1}, FusedAdam, {"lr": 0.1, "weight_decay": 0.0}),
        ("adamw", {"betas": [0, 0.9]}, FusedAdam, {"betas": (0.0, 0.9)}),
        ("ADAMW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01, "fused": True}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {"fused": True}),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, {}),
        ("AdamW", {"torch_adam": True, "foreach": True}, torch.optim.AdamW, {"foreach": True, "fused": None}),
        ("AdamW", {"amsgrad": True, "bias_correction": True}, torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0}),
        ("AdamW", {"amsgrad": False, "foreach": False}, FusedAdam, {}),
        ("Adam", {"bias_correction": False}, FusedAdam, {"bias_correction": False}),
        ("Adagrad", {"lr": 0.3}, torch.optim.Adagrad, {"lr": 0.3}),
        ("lion", {"betas": [0.9, 0.99]}, FusedLion, {"betas": (0.9, 0.99)}),
        ("Lamb", {"max_coeff": 5.0}, FusedLamb, {"max_coeff": 5.0}),
        ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9, "fused": None}),
        ("sgd", {"weight_decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1, "fused": True}),
        ("Muon", {"muon_lr": 0.02, "adam_lr": 0.001}, Muon, {"lr": 0.02, "adam_lr_ratio": 0.05}),
        ("NAdam", {}, torch.optim.NAdam, {}),
        ("Adafactor", {}, torch.optim.Adafactor, {}),
    ],
)
def test_names(name: str, arguments: dict, cls: type, values: dict) -> None:
    given = dict(arguments)
    optimizer = build_optimizer(name, arguments, params())
    assert type(optimizer) is cls
    assert arguments == given
    assert {key: optimizer.param_groups[0][key] for key in values} == values


def test_adam_decay_is_decoupled_unless_told() -> None:
    modes = [({}, True), ({"adam_w_mode": True}, True), ({"adam_w_mode": False}, False)]
    assert [build_optimizer("Adam", given, params()).adam_w_mode for given, _ in modes] == [mode for _, mode in modes]


def test_groups_are_kept_as_objects_with_their_own_values() -> None:
    first, second = params(2)
    groups = [{"params": first, "lr": 0.5, "name": "a"}, {"params": (p for p in [second])}]
    for name in ("AdamW", "SGD", "Lion", "Muon", "RMSprop"):
        optimizer = build_optimizer(name, {"lr": 0.1}, [dict(group) for group in groups][:1])
        assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer = build_optimizer("AdamW", {"lr": 0.1}, groups)
    assert all(made is given for made, given in zip(optimizer.param_groups, groups, strict=True))
    assert [(group["lr"], group["params"]) for group in groups] == [(0.5, [first]), (0.1, [second])]


def test_fused_only_where_torch_can() -> None:
    meta = [torch.nn.Parameter(torch.ones(4, device="meta"))]
    assert not build_optimizer("SGD", {}, meta).param_groups[0]["fused"]
    optimizer = build_optimizer("AdamW", {}, meta)
    meta[0].grad = torch.ones(4, device="meta")
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("AdamV", {}, r"'AdamV' is unknown \(did you mean 'Adam.*'\?\)"),
        ("rmsprop", {}, "did you mean 'RMSprop'"),
        ("AdamW", {"beta": [0.9, 0.99]}, "optimizer.params.beta is not a parameter .*did you mean 'betas'"),
        ("SGD", {"eps": 1e-8}, "optimizer.params.eps is not a parameter of SGD"),
        ("AdamW", {"max_grad_norm": 1.0}, "set gradient_clipping"),
        ("AdamW", {"adam_w_mode": False}, 'write "type": "Adam"'),
        ("Adam", {"torch_adam": True, "bias_correction": False}, "leave out torch_adam"),
        ("AdamW", {"lr": -1.0}, "lr is -1.0; it must not be negative"),
        ("Adagrad", {"lr": -1.0}, "optimizer.type Adagrad with params .*Invalid learning rate"),
        ("Lion", {"betas": [0.9, 1.0]}, r"betas is \(0.9, 1.0\); it must lie in \[0, 1\)"),
        ("Muon", {"ns_method": "other"}, "use one of gram, standard"),
        ("Muon", {"lr": 0.0}, "must be > 0"),
    ],
)
def test_errors(name: str, arguments: dict, text: str) -> None:
    with pytest.raises(OptimizerError, match=text):
        build_optimizer(name, arguments, params())


def test_refused_names() -> None:
    with pytest.raises(NotAvailableError, match="'OneBitAdam' is refused for good: .*ended the one-bit optimizers"):
        build_optimizer("OneBitAdam", {}, params())
