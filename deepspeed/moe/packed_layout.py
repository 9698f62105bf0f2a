"""Recognition of packed experts that `packed_products` can compute: those whose code Transformers replaces by its own
grouped products.

Transformers decorates its classes of experts (`use_experts_implementation`). Where a model has the implementation
"grouped_mm", as by default, it runs `grouped_mm_experts_forward` in place of the class's forward: products of the
parameters `gate_up_proj` or `up_proj` and `down_proj`, perhaps with biases, and between them the method `_apply_gate`
or the activation function `act_fn`. `run_packed` computes the same with the same members, so nothing that a class or
an object changes is passed over. A comparison on random rows is a second net.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.equivalence import largest_value, tolerance
from deepspeed.foundation.fake_mode import of_device
from deepspeed.foundation.log import describe_error
from deepspeed.moe.packed_products import Activation, ExpertMatrices, SwiGLU, run_packed

UPS, DOWN, BIAS = ("gate_up_proj", "up_proj"), "down_proj", "_bias"
GATE, FUNCTION = "_apply_gate", "act_fn"
GROUPED = "grouped_mm"
_SILU = {"torch.nn.modules.activation": "SiLU", "transformers.activations": "SiLUActivation"}  # classes by module
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
        inner: attribute with the function between the products: `_apply_gate`, or `act_fn` without a gate.
    """

    up: str
    biases: tuple[str, str]
    transposed: bool
    inner: str

    def matrices(self, get: Callable[[str], torch.Tensor]) -> ExpertMatrices:
        """Return the parameters; `get` gives them by name."""
        up_bias, down_bias = (get(name) if name else None for name in self.biases)
        return ExpertMatrices(get(self.up), get(DOWN), up_bias, down_bias, self.transposed)

    def function(self, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function between the products of `module`, from (P, F') to (P, F)."""
        return getattr(module, self.inner)

    def activation(self, module: nn.Module) -> Activation:
        """Return what `module` has between the products now."""
        if self.inner == GATE and _has_swiglu(module):
            return SwiGLU()
        return Activation(self.function(module), module)


def computes(module: nn.Module, device: torch.device) -> bool:
    """Return whether `run_packed` may take the place of a module's forward now, for rows on `device`.

    It is for CPUs, where Transformers would run its grouped products in place of the class's code, and nobody has hooks
    on the activation function or on all modules.
    """
    if device.type != "cpu" or of_device() or not runs_grouped(module):
        return False
    function = module._modules.get(FUNCTION)
    hooks = [] if function is None else [hook for inner in function.modules() for hook in _hooks(vars(inner), "_")]
    return all(map(_is_instrument, (*hooks, *_hooks(dict(vars(torch.nn.modules.module)), "_global_"))))


def _hooks(members: dict[str, Any], prefix: str) -> Iterator[Any]:
    """Yield the hooks of a module, or of all modules, by the members that have them."""
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
        yield from members.get(prefix + kind, {}).values()


def _is_instrument(hook: Any) -> bool:
    """Return whether a hook only looks on, as those of this package."""
    origin = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return getattr(hook, "transparent", origin.startswith("deepspeed."))


def runs_grouped(module: nn.Module, chosen: bool = True) -> bool:
    """Return whether Transformers runs its own grouped products in place of the forward of a module's class.

    Args:
        module: the module; classes of this package above its own are passed over.
        chosen: False asks whether it would, if the model's configuration chose them.
    """
    transformers_moe = sys.modules.get("transformers.integrations.moe")
    if transformers_moe is None or chosen and _implementation(module) != GROUPED:
        return False
    kinds = (kind for kind in type(module).__mro__ if not kind.__module__.startswith("deepspeed."))
    forward = next((vars(kind)["forward"] for kind in kinds if "forward" in vars(kind)), None)
    code = getattr(forward, "__code__", None)
    if code is None or code.co_filename != transformers_moe.__file__ or "experts_interface" not in code.co_freevars:
        return False
    cells: Any = getattr(forward, "__closure__", ())
    interface = cells[code.co_freevars.index("experts_interface")].cell_contents
    return (
        interface.get(GROUPED) is getattr(transformers_moe, "grouped_mm_experts_forward", None)
        and getattr(module, "has_post_expert_norm", False) is False
        and getattr(module, "_is_expert_parallel", False) is False
    )


def _implementation(module: nn.Module) -> Any:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _has_swiglu(module: nn.Module) -> bool:
    """Return whether silu(gate) × up is between the products, by Transformers' own gate and a SiLU."""
    usual = getattr(sys.modules.get("transformers.integrations.moe"), "_default_apply_gate", None)
    function = getattr(module, FUNCTION, None)
    return (
        usual is not None
        and getattr(getattr(module, GATE), "__func__", None) is usual
        and getattr(module, "is_concatenated", False) is True
        and _SILU.get(type(function).__module__) == type(function).__name__
        and "forward" not in vars(function)
    )


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
    if not runs_grouped(module, chosen=False) or (layout := _candidate(module, params)) is None:
        return None, NO_MATRICES
    if list(module.buffers()) or any(key != FUNCTION for key, _ in module.named_children()):
        return None, f"it has buffers or other modules than {FUNCTION}"
    reason = ""
    for training in (False, True):  # dropout is no part of the formula
        with _mode(module, training):
            reason = reason or _unlike(module, layout, run, params, compare)
    return None if reason else layout, reason


def _candidate(module: nn.Module, params: dict[str, torch.Tensor]) -> PackedLayout | None:
    """Return the layout that a decorated module of Transformers names, if its parameters have such shapes."""
    flags = [getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")]
    if not all(isinstance(flag, bool) for flag in flags):  # other releases of Transformers do not say all of it
        return None
    gated, biased, transposed = map(bool, flags)
    up = UPS[0] if gated else UPS[1]
    biases = (up + BIAS, DOWN + BIAS) if biased else ("", "")
    names = {name for name in (up, DOWN, *biases) if name}
    if set(params) != names or any(params[name].dim() != 3 for name in (up, DOWN)) or params[DOWN].is_meta:
        return None
    if len({(param.dtype, param.shape[0], param.device) for param in params.values()}) > 1:
        return None
    first, second = params[up], params[DOWN]
    if not transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    (width, outer), (inputs, outputs) = first.shape[1:], second.shape[1:]
    if outer != (2 * inputs if gated else inputs) or outputs != width or not width:
        return None
    wide = {name: tensor.shape[1] for name, tensor in zip(biases, (first.mT, second.mT), strict=True) if name}
    if any(params[name].shape[1:] != (size,) for name, size in wide.items()):
        return None
    return PackedLayout(up, biases, transposed, GATE if gated else FUNCTION)


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
