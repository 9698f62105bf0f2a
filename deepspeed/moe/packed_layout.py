"""Recognition of packed experts that `packed_products` can compute: by their structure, and by their values on random
rows.

The structure is that of Transformers' experts: a parameter `gate_up_proj` or `up_proj` with the first matrices of all
experts, a parameter `down_proj` with the second ones, perhaps biases of both, and between the products the method
`_apply_gate`, or the activation function `act_fn`, with or without a gate.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.equivalence import largest_value, tolerance
from deepspeed.foundation.fake_mode import of_device
from deepspeed.foundation.log import describe_error
from deepspeed.moe.packed_products import Activation, ExpertMatrices, SwiGLU, run_packed, swiglu

UPS, DOWN, BIAS = ("gate_up_proj", "up_proj"), "down_proj", "_bias"
GATE, FUNCTION = "_apply_gate", "act_fn"
IMPLEMENTATIONS = (None, "eager", "grouped_mm")
"""Values of `config._experts_implementation` that say nothing but the formula; others are run as they are."""
SIZES = (1.0, 30.0, 1000.0)  # of the rows of a test: large ones reveal limits on values
TRIED = 3  # experts that a test runs
NO_MATRICES = "its parameters are not the first and second matrices of all experts"
ALL_ZERO = "its results on random rows are all 0"
Compare = Callable[[torch.Tensor, torch.Tensor], float]
Forward = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class PackedLayout:
    """Where packed experts have what `run_packed` computes with; the module may have some of the experts only.

    Args:
        up: name of the parameter with the first matrices.
        biases: names of the biases of the first and second matrices; "": none.
        transposed: whether matrices are (inputs, outputs).
        gated: whether the first product is twice as wide as the inputs of the second.
        inner: attribute of the module with the function between the products.
    """

    up: str
    biases: tuple[str, str]
    transposed: bool
    gated: bool
    inner: str

    @property
    def names(self) -> list[str]:
        """Names of all parameters."""
        return [name for name in (self.up, DOWN, *self.biases) if name]

    def matrices(self, get: Callable[[str], torch.Tensor]) -> ExpertMatrices:
        """Return the parameters; `get` gives them by name."""
        up_bias, down_bias = (get(name) if name else None for name in self.biases)
        return ExpertMatrices(get(self.up), get(DOWN), up_bias, down_bias, self.transposed)

    def function(self, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function between the products of `module`, from (P, F') to (P, F)."""
        inner = getattr(module, self.inner)
        if self.inner == GATE or not self.gated:
            return inner

        def gated(hidden: torch.Tensor) -> torch.Tensor:
            gate, up = hidden.chunk(2, -1)
            return inner(gate) * up

        return gated

    def activation(self, module: nn.Module, swiglu: bool) -> Activation:
        """Return what `module` has between the products; `swiglu`: see `is_swiglu`."""
        return SwiGLU() if swiglu else Activation(self.function(module))


def computes(module: nn.Module, device: torch.device) -> bool:
    """Return whether `run_packed` may take the place of a module's forward now, for rows on `device`.

    It is for CPUs. Not if somebody has hooks on the activation function, or if a model of Transformers has chosen an
    implementation of experts that is more than the formula. Under autocast, "eager" computes in the narrow dtype, and
    "grouped_mm" in that of the parameters, as `run_packed` does.
    """
    if device.type != "cpu" or of_device():
        return False
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if chosen not in IMPLEMENTATIONS or chosen != "grouped_mm" and torch.is_autocast_enabled("cpu"):
        return False
    function = module._modules.get(FUNCTION)
    return function is None or all(
        map(_is_instrument, (*function._forward_hooks.values(), *function._forward_pre_hooks.values()))
    )


def _is_instrument(hook: Any) -> bool:
    """Return whether a hook only looks on, as those of this package."""
    origin = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return getattr(hook, "transparent", origin.startswith("deepspeed."))


def recognize(
    module: nn.Module, run: Callable[..., torch.Tensor], params: dict[str, torch.Tensor], compare: Compare
) -> tuple[PackedLayout | None, str]:
    """Find the layout with which `run_packed` computes what a module of packed experts computes.

    Args:
        module: the module, with all experts, called in the form "choices".
        run: function (params, rows (R, H), experts (R,), weights (R,)) that runs the module with other parameters.
        params: the module's parameters by name, without gradients.
        compare: difference of two tensors, as of `relative_difference`.

    Returns:
        The layout and "", or None and the reason.
    """
    candidates, reason = list(_candidates(module, params)), NO_MATRICES
    if candidates and (list(module.buffers()) or any(key != FUNCTION for key, _ in module.named_children())):
        return None, f"it has buffers or other modules than {FUNCTION}"
    for layout in candidates:
        reason = ""
        for training in (False, True):  # dropout is no part of the formula
            with _mode(module, training):
                reason = reason or _unlike(module, layout, run, params, compare)
        if reason in ("", ALL_ZERO):
            return None if reason else layout, reason
    return None, reason


def _candidates(module: nn.Module, params: dict[str, torch.Tensor]) -> Iterator[PackedLayout]:
    """Yield the layouts that suit the names and shapes of a module's parameters."""
    up = next((name for name in UPS if name in params), "")
    biases = [name + BIAS if name + BIAS in params else "" for name in (up, DOWN)]
    names = {name for name in (up, DOWN, *biases) if name}
    if not up or set(params) != names or any(params[name].dim() != 3 for name in (up, DOWN) if name in params):
        return
    if len({(param.dtype, param.shape[0], param.device) for param in params.values()}) > 1:
        return
    for transposed, inner in itertools.product((False, True), (GATE, FUNCTION)):
        first, second = params[up], params[DOWN]
        if not transposed:
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        (width, outer), (inputs, outputs) = first.shape[1:], second.shape[1:]
        if outer not in (inputs, 2 * inputs) or outputs != width or not callable(getattr(module, inner, None)):
            continue
        if inner == GATE and outer == inputs or params[DOWN].is_meta:
            continue
        wide = {name: tensor.shape[1] for name, tensor in zip(biases, (first.mT, second.mT), strict=True) if name}
        if width and all(params[name].shape[1:] == (size,) for name, size in wide.items()):
            yield PackedLayout(up, (biases[0], biases[1]), transposed, outer != inputs, inner)


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Generator[None]:
    before = {inner: inner.training for inner in module.modules()}
    module.train(training)
    try:
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            yield
    finally:
        for inner, mode in before.items():
            inner.training = mode


def _unlike(
    module: nn.Module,
    layout: PackedLayout,
    run: Callable[..., torch.Tensor],
    params: dict[str, torch.Tensor],
    compare: Compare,
) -> str:
    """Return why `run_packed` does not compute what a module does; "" if it does, with gradients."""
    some = min(TRIED, params[DOWN].shape[0])
    matrices = layout.matrices(params.__getitem__)
    width = matrices.up.shape[1 if layout.transposed else 2]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3 * some, width, generator=generator).to(params[DOWN])
    weights = (0.25 + torch.rand(3 * some, generator=generator)).to(rows)
    index = torch.arange(3 * some, device=rows.device) % some
    try:
        activation = Activation(layout.function(module))
        for size in SIZES:
            expected = _with_gradients(lambda *inputs: run(params, inputs[0], index, inputs[1]), rows * size, weights)
            ours = _with_gradients(
                lambda *inputs: run_packed(inputs[0], index[:, None], inputs[1][:, None], matrices, activation),
                rows * size, weights,
            )  # fmt: skip
            if size == SIZES[0] and not largest_value(expected[0]):
                return ALL_ZERO
            if size != SIZES[0] and not all(bool(tensor.isfinite().all()) for tensor in expected):
                continue  # out of the range of 16 bits
            gap = max(compare(*pair) for pair in zip(ours, expected, strict=True))
            if not gap <= tolerance(rows.dtype):
                return f"it computes something else than two products and {layout.inner}: {gap:.1g} apart"
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AttributeError) as why:
        return describe_error(why)
    return ""


def _with_gradients(function: Forward, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        inputs = rows.detach().requires_grad_(), weights.detach().requires_grad_()
        out = function(*inputs)
        return out.detach(), *torch.autograd.grad(out.square().sum(), inputs)


def is_swiglu(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether a function of (P, 2 F) tensors and its gradient are those of `swiglu`, also in fp64."""
    factor = torch.linspace(0.5, 1.5, 32, dtype=torch.float64)
    for size in (0.5, 5.0, 50.0, 2000.0):
        hidden = (size * torch.linspace(-40, 40, 4 * 64, dtype=torch.float64).sin()).view(4, 64).requires_grad_()
        try:
            with torch.enable_grad():
                values = [each(hidden) for each in (function, swiglu)]
                gradients = [torch.autograd.grad((value * factor).sum(), hidden)[0] for value in values]
        except (RuntimeError, TypeError, NotImplementedError):
            return False
        if any(tensor.dtype != torch.float64 for tensor in values):
            return False
        if any(not torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in (values, gradients)):
            return False
    return True
