"""A backward in two gives autograd's bits, whatever a model does with its weights, and puts off what it says."""

from __future__ import annotations

import copy
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import PipelineError
from deepspeed.pipe.split_backward import SplitBackward

WIDTH, ROWS = 8, 6


class Enters(torch.autograd.Function):
    """As what a stage receives enters its graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, seen: list[Any], value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.seen = seen
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.seen.append(gradient)
        return None, None, None


class Model(nn.Module):
    """Some parameters, and a function of them and of an input."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias)


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)


def chain(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + m.two(torch.tanh(m.one(x)))


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def tied_to_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.one(x) @ m.table.weight.t() + m.table(torch.arange(ROWS) % 3)


def merged(m: Any) -> torch.Tensor:
    return m.base + m.b @ m.a


def often(once: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A merged adapter in more products than are put off together."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        weight = merged(m)
        for _ in range(5):
            x = torch.tanh(x @ (weight if once else merged(m)))
        return m.one(x)

    return function


def three_ways(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(m.one(x) @ m.weight)
    x = torch.tanh(x @ m.weight)
    return torch.tanh(x @ (m.weight * 0.7)) @ m.weight


def by_hand(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention of two-dimensional products, some of whose right factors are activations."""
    keys = m.two(x)
    return torch.softmax(m.one(x) @ keys.t(), -1) @ m.three(x)


def aside(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A branch that only weights get a gradient from."""
    return m.one(x) + m.two(torch.ones_like(x))


def normed() -> Model:
    part = torch.nn.utils.parametrizations.weight_norm(linear(False))
    return Model(lambda m, x: m.one(x) + m.two(x), one=part, two=linear())


def again(reentrant: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda m, x: m.two(checkpoint(m.one, x, use_reentrant=reentrant).tanh())


def called(m: Any, x: torch.Tensor) -> torch.Tensor:
    made = {"weight": m.weight * 2, "bias": m.one.bias}
    each = torch.func.vmap(lambda row: torch.func.functional_call(m.one, made, row))
    return torch.func.functional_call(m.one, made, x) + each(x)


PARTS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "linear": (lambda: Model(chain, one=linear(), two=linear(False)), ["one.weight", "two.weight"]),
    "addmm": (
        lambda: Model(lambda m, x: torch.addmm(m.bias, x, m.one), bias=nn.Parameter(torch.ones(WIDTH)), one=matrix()),
        ["one"],
    ),
    "scaled addmm": (lambda: Model(lambda m, x: torch.addmm(x, x, m.one, alpha=2), one=matrix()), []),
    "weight on the left": (lambda: Model(lambda m, x: (m.one @ x.t()).t(), one=matrix()), []),
    "twice": (lambda: Model(lambda m, x: m.one(torch.tanh(m.one(x))), one=linear(False)), ["one.weight"]),
    "four times": (lambda: Model(lambda m, x: m.one(m.one(m.one(m.one(x).tanh()).tanh()).tanh()), one=linear()),
                   ["one.weight"]),
    "five times": (lambda: Model(lambda m, x: m.one(m.one(m.one(m.one(m.one(x))))), one=linear()), []),
    "tied in two ways": (
        lambda: Model(lambda m, x: (m.one(x) @ m.weight).tanh() @ m.weight.t(), one=linear(), weight=matrix()),
        ["one.weight", "weight"],
    ),
    "tied in three ways": (  # autograd adds what comes through the scaled weight between the two others
        lambda: Model(three_ways, one=linear(), weight=matrix()), ["one.weight"]),
    "tied to a table": (
        lambda: Model(tied_to_table, one=linear(), table=nn.Embedding(WIDTH, WIDTH)), ["one.weight"]),
    "used besides": (lambda: Model(lambda m, x: m.one(x) * m.one.weight.norm(), one=linear()), []),
    "frozen bias": (lambda: frozen(Model(chain, one=linear(), two=linear()), "one.bias"), ["one.weight", "two.weight"]),
    "frozen weight": (lambda: frozen(Model(chain, one=linear(), two=linear()), "one.weight"), ["two.weight"]),
    "adapter": (
        lambda: frozen(
            Model(lambda m, x: m.base(x) + m.b(m.a(x)), base=linear(False), a=nn.Linear(WIDTH, 2, False),
                  b=nn.Linear(2, WIDTH, False)),
            "base.weight",
        ),
        ["a.weight", "b.weight"],
    ),
    "merged adapter": (
        lambda: Model(lambda m, x: x @ (m.base + m.b @ m.a).t(), base=matrix(), a=matrix(), b=matrix()),
        ["base", "a", "b"],
    ),
    "merged, and used besides": (
        lambda: Model(lambda m, x: x @ (m.base + m.b @ m.a).t() * m.base.mean(), base=matrix(), a=matrix(), b=matrix()),
        ["a"],  # the sum is formed now, and of the product that it needs the right factor comes later
    ),
    "merged once, used five times": (
        lambda: Model(often(True), one=linear(), base=matrix(), a=matrix(), b=matrix()), ["one.weight", "a"]),
    "merged five times": (
        lambda: Model(often(False), one=linear(), base=matrix(), a=matrix(), b=matrix()), ["one.weight"]),
    "attention by hand": (
        lambda: Model(by_hand, one=linear(), two=linear(), three=linear(False)),
        ["one.weight", "two.weight", "three.weight"],
    ),
    "a branch of weights": (lambda: Model(aside, one=linear(), two=linear()), ["one.weight", "two.weight"]),
    "a branch of one weight": (lambda: Model(aside, one=linear(), two=linear(False)), ["one.weight"]),
    "computed weight": (normed, ["one.parametrizations.weight.original0", "one.parametrizations.weight.original1",
                                 "two.weight"]),
    "computed again": (lambda: Model(again(False), one=linear(), two=linear()), ["two.weight"]),
    "computed again the older way": (lambda: Model(again(True), one=linear(), two=linear()), []),
    "functional": (lambda: Model(called, one=frozen(linear(), "weight"), weight=matrix()), ["weight"]),
    "sparse": (
        lambda: Model(lambda m, x: m.one(x) + torch.mm(x, m.weight.to_sparse_coo()), one=linear(), weight=matrix()),
        ["one.weight"],
    ),
    "no product": (lambda: Model(lambda m, x: m.one(x), one=nn.LayerNorm(WIDTH)), []),
    "not a matrix": (lambda: Model(lambda m, x: torch.bmm(x[None], m.one[None])[0], one=matrix()), []),
    "rows in three dims": (lambda: Model(lambda m, x: chain(m, x.view(2, 3, WIDTH)), one=linear(), two=linear(False)),
                           ["one.weight", "two.weight"]),
}  # fmt: skip


def both(model: nn.Module, micros: int = 2, autocast: bool = False) -> tuple[Any, Any, set[str]]:
    """Gradients of parameters and inputs at once, and in two with weights behind; names that were put off."""
    dtype = next(model.parameters()).dtype
    other, names = copy.deepcopy(model), set[str]()

    def run(model: nn.Module, in_two: bool) -> list[Any]:
        seen: list[Any] = []
        params, waiting = dict(model.named_parameters()), list[SplitBackward]()
        for micro in range(micros):
            generator = torch.Generator().manual_seed(micro)
            anchor = torch.empty((), requires_grad=True)
            x: Any = Enters.apply(anchor, seen, torch.randn(ROWS, WIDTH, generator=generator).to(dtype))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                made = model(x * 1)
            given, roots = torch.randn(made.shape, generator=generator).to(made.dtype), [get_gradient_edge(made)]
            del made, x
            if not in_two:
                torch.autograd.backward(roots, [given])
                continue
            split = SplitBackward(anchor)
            split.read(roots)
            assert not any(split.overtakes(one) and one.kept for one in waiting)
            before = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in params.items()}
            split.backward(roots, [given])
            for name, param in params.items():
                changed = param.grad is not None and not torch.equal(param.grad, before[name])
                assert not (id(param) in split._later and changed), name
                names.update({name} if id(param) in split._later else ())
            waiting.append(split)
        for split in waiting:
            split.weights()
            assert split.kept == 0
            split.weights()  # finds nothing
        return [*(p.grad for p in params.values()), *seen]

    return run(model, False), run(other, True), names


@pytest.mark.drawn(29)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_two_halves_are_the_whole(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    build, wanted = PARTS[name]
    expect_same(*both(build().to(dtype)), wanted)


@pytest.mark.parametrize("name", ["linear", "twice", "merged adapter", "tied in two ways", "rows in three dims"])
def test_two_halves_are_the_whole_under_autocast(name: str) -> None:
    torch.manual_seed(3)
    build, wanted = PARTS[name]
    expect_same(*both(build(), autocast=True), wanted)


def expect_same(whole: list[Any], halves: list[Any], names: set[str], wanted: list[str]) -> None:
    assert len(whole) == len(halves)
    for one, other in zip(whole, halves, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert names == set(wanted)


def test_hooks_of_parameters_and_tensors_see_what_they_always_see() -> None:
    torch.manual_seed(3)
    told: list[list[Any]] = []

    def hooked() -> nn.Module:
        model, seen = Model(lambda m, x: m.two(noted(m.one(x))), one=linear(), two=linear()), list[Any]()
        told.append(seen)

        def noted(made: torch.Tensor) -> torch.Tensor:
            made.register_hook(lambda gradient: gradient * 3)  # of the product, before it is used
            return made.tanh()

        for param in model.parameters():
            param.register_hook(lambda gradient: gradient * 2)
            param.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        model.get_submodule("one").register_full_backward_hook(lambda *_: seen.append(torch.zeros(1)))
        return model

    gradients = []
    for in_two in (False, True):
        torch.manual_seed(5)
        model, anchor = hooked(), torch.empty((), requires_grad=True)
        root = model(Enters.apply(anchor, [], torch.ones(ROWS, WIDTH))).sum()
        if in_two:
            split = SplitBackward(anchor)
            split.read([root])
            split.backward([root])
            split.weights()
        else:
            root.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(told[0]) == len(told[1]) == 5  # four parameters, and one module, each once
    assert sorted(float(t.sum()) for t in told[0]) == sorted(float(t.sum()) for t in told[1])


@pytest.mark.parametrize("where", ["input", "gradient"])
def test_what_weights_need_must_not_change_in_place(where: str) -> None:
    model, anchor, kept = linear(), torch.empty((), requires_grad=True), torch.ones(ROWS, WIDTH)
    given = torch.ones(ROWS, WIDTH)
    made = model(Enters.apply(anchor, [], kept))
    split = SplitBackward(anchor)
    split.read([made])
    split.backward([made], [given])
    (kept if where == "input" else given).add_(1)
    with pytest.raises(PipelineError, match="changed in place"):
        split.weights()


def test_what_is_computed_again_the_older_way_may_use_any_weight() -> None:
    model = linear(False)

    def split_of(function: Callable[[torch.Tensor], torch.Tensor]) -> SplitBackward:
        anchor = torch.empty((), requires_grad=True)
        split = SplitBackward(anchor)
        split.read([function(Enters.apply(anchor, [], torch.ones(ROWS, WIDTH))).sum()])
        return split

    one = split_of(model)
    assert split_of(lambda x: checkpoint(model, x, use_reentrant=True)).overtakes(one)
    assert not split_of(lambda x: checkpoint(linear(), x, use_reentrant=False)).overtakes(one)


def test_a_weight_that_is_used_otherwise_next_time_comes_in_turn() -> None:
    model = linear(False)

    def split_of(function: Callable[[torch.Tensor], torch.Tensor], anchored: bool = True) -> SplitBackward:
        anchor = torch.empty((), requires_grad=True)
        split = SplitBackward(anchor if anchored else None)
        split.read([function(Enters.apply(anchor, [], torch.ones(ROWS, WIDTH))).sum()])
        return split

    one = split_of(model)
    assert not split_of(model).overtakes(one)
    assert split_of(lambda x: model(x) * model.weight.norm()).overtakes(one)
    assert split_of(model, anchored=False).overtakes(one)
    one.weights()
    assert not split_of(lambda x: model(x) * model.weight.norm()).overtakes(one)


def test_nothing_is_held_that_weights_do_not_need() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())
    values, nodes = list[Any](), list[Any]()

    def noted(_m: Any, _a: Any, made: torch.Tensor) -> None:
        values.append(weakref.ref(made.untyped_storage()))
        made.grad_fn.metadata["here"] = held = Held()  # type: ignore[union-attr]
        nodes.append(weakref.ref(held))

    for layer in model:
        layer.register_forward_hook(noted)
    anchor = torch.empty((), requires_grad=True)
    roots = [get_gradient_edge(model(Enters.apply(anchor, [], torch.ones(ROWS, WIDTH))))]
    split = SplitBackward(anchor)
    split.read(roots)
    split.backward(roots, [torch.ones(ROWS, WIDTH)])
    del roots
    assert [one() is not None for one in nodes] == [False] * 5, "the graph is held"
    assert [one() is not None for one in values] == [False, True, False, True, False]  # what the linear layers took
    assert split.kept == 2 * 3 * ROWS * WIDTH * 4
    split.weights()
    assert [one() is not None for one in values] == [False] * 5


class Held:
    """Lives as long as a node of the graph."""


def activations(layers: int) -> Callable[[Any], torch.Tensor]:
    """Every right factor is one."""

    def function(x: Any) -> torch.Tensor:
        for weight in [matrix() for _ in range(layers)]:
            x = weight @ x
        return x

    return function


def rolling(layers: int) -> Callable[[Any], torch.Tensor]:
    """Each weight is tied to the next one, and the first is used besides: all are formed at once."""

    def function(x: Any) -> torch.Tensor:
        weights = [matrix() for _ in range(layers + 1)]
        x = x * weights[0].mean()
        for one, other in itertools.pairwise(weights):
            x = x @ (one + other)
        return x

    return function


def grown(layers: int) -> Callable[[Any], torch.Tensor]:
    """Each weight is made of the one before it: gradients of all of them meet."""

    def function(x: Any) -> torch.Tensor:
        weight: torch.Tensor = matrix()
        for _ in range(layers):
            weight = weight * 0.5
            x = x @ weight
        return x

    return function


@pytest.mark.parametrize("of", [activations, rolling, grown])
def test_a_graph_is_read_in_time_that_grows_with_it(of: Callable[[int], Callable[[Any], torch.Tensor]]) -> None:
    def seconds(layers: int) -> float:
        anchor = torch.empty((), requires_grad=True)
        root = of(layers)(Enters.apply(anchor, [], torch.ones(WIDTH, WIDTH))).sum()
        begun = time.process_time()
        SplitBackward(anchor).read([root])
        return time.process_time() - begun

    few = min(seconds(100) for _ in range(3))
    assert min(seconds(1600) for _ in range(2)) < 16 * 4 * few


@pytest.mark.slow
def test_compiled_pieces_stay_in_one() -> None:
    torch.manual_seed(3)

    def build() -> Model:
        return Model(lambda m, x: m.two(m.fast(x)), one=linear(), two=linear())

    model, other = build(), build()
    other.load_state_dict(model.state_dict())
    found: list[Any] = []
    for each, in_two in ((model, False), (other, True)):
        object.__setattr__(each, "fast", torch.compile(each.get_submodule("one"), backend="aot_eager"))
        anchor, seen = torch.empty((), requires_grad=True), list[Any]()
        root = each(Enters.apply(anchor, seen, torch.ones(ROWS, WIDTH))).square().sum()
        split = SplitBackward(anchor if in_two else None)
        split.read([root])
        split.backward([root])
        assert split.kept == (2 * ROWS * WIDTH * 4 if in_two else 0)  # of what is not compiled
        split.weights()
        found.append([*(param.grad for param in each.parameters()), *seen])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
