"""Recognizes decoder layers of a well-known structure for the native executor."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.errors import PackingError
from deepspeed.inference.executors.native_tensors import GROUP, Layer, Matrix, Norm, matrix_of, rows_of
from deepspeed.inference.quantization.layers import PackedEmbedding, PackedLinear
from deepspeed.native import KINDS
from deepspeed.zero.parameters.parameter import is_managed

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = ("q_proj", "k_proj", "v_proj")
FEED_FORWARD = ("gate_proj", "up_proj")
JOINED = {ATTENTION: "qkv_proj", FEED_FORWARD: "gate_up_proj"}  # one matrix, in that order of its rows
FUNCTIONS = ("act_fn", "activation_fn")
# In the order of `Activation` in decoder.cpp.
ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu,
)  # fmt: skip


@dataclass
class Structure:
    """A model's parts. `layers` are filled but for their heads' cache, window and scale.

    Attributes:
        table: the embedding where its rows are those of a matrix, else None.
        kind: of the rows of a packed table.
        uneven: layers of one matrix for several, which begin at rows that are no multiple of four.
        seen: what the pointers stand on, as (dict of an owner, its values): see `changed`.
        tensors: the weights among them, and where they lie.
    """

    embedding: nn.Module
    rotary: nn.Module
    blocks: list[Any]
    layers: Any
    norm: Norm
    head: Matrix
    table: Matrix | None = None
    kind: int = 0
    uneven: list[nn.Module] = field(default_factory=list)
    seen: list[tuple[dict[str, Any], tuple[Any, ...]]] = field(default_factory=list)
    tensors: tuple[list[torch.Tensor], list[int]] = field(default_factory=lambda: ([], []))

    def changed(self) -> bool:
        """Whether a module or a weight's memory is another than the one that was read. Values may change freely.

        Asked before every pass, with all it looks at out of the caches: so few steps of Python are made of it.
        """
        for owner, was in self.seen:
            if len(owner) != len(was) or any(map(operator.is_not, owner.values(), was)):
                return True
        weights, addresses = self.tensors
        return list(map(torch.Tensor.data_ptr, weights)) != addresses


class Reader:
    """Reads one model.

    Raises:
        PackingError: it has another shape; the message says where.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: dict[int, dict[str, Any]] = {}
        self.uneven: list[nn.Module] = []

    def read(self) -> Structure:
        """The parts of the model."""
        base = getattr(self.model, getattr(self.model, "base_model_prefix", "") or "model", None)
        if not isinstance(base, nn.Module) or base is self.model:
            raise PackingError("it has no base model under a head")
        prefix = next((name for name, child in self.model.named_children() if child is base), None)
        if prefix is None:
            raise PackingError(f"{type(self.model).__name__} wraps a model")
        self._only(self.model, {prefix, "lm_head"})
        parts = self._only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
        for module in self.model.modules():
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                raise PackingError(f"the forward of {type(module).__name__} is hooked")
        blocks = list(parts["layers"])
        layers = (Layer * len(blocks))()
        self._see(parts["layers"]._modules)
        for at, block in enumerate(blocks):
            self._block(block, layers[at])
        head = self._matrix(self.model, "lm_head")
        made = Structure(parts["embed_tokens"], parts["rotary_emb"], blocks, layers, self._norm(base, "norm"), head)
        self._weight(base.embed_tokens)
        made.table, made.kind = _table(base.embed_tokens)
        made.uneven = self.uneven
        made.seen = [(owner, tuple(owner.values())) for owner in self.seen.values()]
        held = {id(one): one for _, found in made.seen for one in found if isinstance(one, torch.Tensor)}
        made.tensors = list(held.values()), [one.data_ptr() for one in held.values()]
        return made

    def _see(self, owner: dict[str, Any]) -> None:
        """What it holds is what the structure stands on."""
        self.seen[id(owner)] = owner

    def _weight(self, module: Any) -> None:
        """Note the tensors of a leaf."""
        home = module.packed if hasattr(module, "packed") else module
        for owner in (home, module) if home is not module else (module,):
            for held in (owner._parameters, owner._buffers):
                for tensor in held.values():
                    if tensor is None:
                        continue
                    if is_managed(tensor):
                        raise PackingError(
                            "an engine trains its parameters, and native passes read weights where they rest; tokens "
                            "are right, but slower: make the Generator of a copy of the model, or of saved weights"
                        )
                    if type(tensor.data) is not torch.Tensor:
                        raise PackingError(f"{type(module).__name__} has weights that are no plain tensors")
                    self._see(held)

    def _only(self, module: nn.Module, names: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Children by name; no others, and no weights beside them."""
        found = {name: child for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
        strange = sorted(set(found) - names - optional) + sorted(
            n for n, p in module._parameters.items() if p is not None
        )
        lacking = sorted(names - set(found))
        if strange or lacking:
            said = [f"has {name}" for name in strange] + [f"has no {name}" for name in lacking]
            raise PackingError(f"{type(module).__name__} {', '.join(said[:3])}")
        self._see(module._modules)
        return found

    def _block(self, block: Any, layer: Any) -> None:
        self._only(block, LAYER)
        attention, mlp = block.self_attn, block.mlp
        projections, inner = _named(attention, ATTENTION), _named(mlp, FEED_FORWARD)
        own = self._only(attention, {*projections, "o_proj"}, frozenset({"q_norm", "k_norm"}))
        function = next((name for name in FUNCTIONS if name in mlp._modules), FUNCTIONS[0])
        acts = self._only(mlp, {*inner, "down_proj", function})[function]
        layer.before, layer.after = self._norm(block, "input_layernorm"), self._norm(block, "post_attention_layernorm")
        for name, kind in (("query", "q_norm"), ("key", "k_norm")):
            if kind in own:
                setattr(layer, name, self._norm(attention, kind))
        layer.out, layer.down = self._matrix(attention, "o_proj"), self._matrix(mlp, "down_proj")
        layer.q, layer.k, layer.v = self._matrices(attention, projections, 3, layer.out.inputs)
        layer.gate, layer.up = self._matrices(mlp, inner, 2, layer.down.inputs)
        layer.activation = _activation(acts)

    def _matrices(self, owner: nn.Module, names: tuple[str, ...], count: int, first: int) -> list[Matrix]:
        """`count` matrices of one name each, or of one that joins them: `first` rows, then the others' equal shares."""
        made = [self._matrix(owner, name) for name in names]
        if len(made) == count:
            return made
        rest, odd = divmod(made[0].outputs - first, count - 1)
        if odd or rest <= 0:
            raise PackingError(f"{names[0]} has {made[0].outputs} rows, {first} of them of the first matrix")
        if first % GROUP or rest % GROUP:
            self.uneven.append(owner.get_submodule(names[0]))
        return [rows_of(made[0], 0, first), *(rows_of(made[0], first + at * rest, rest) for at in range(count - 1))]

    def _matrix(self, owner: nn.Module, name: str) -> Matrix:
        module: Any = owner._modules[name]
        packed = isinstance(module, PackedLinear)
        if not packed and type(module).forward is not nn.Linear.forward:
            raise PackingError(f"{name} is a {type(module).__name__}")
        self._weight(module)
        made = matrix_of(module.packed if packed else module.weight, module.bias)
        if isinstance(made, str):
            raise PackingError(f"{name}: {made}")
        return made

    def _norm(self, owner: nn.Module, name: str) -> Norm:
        module: Any = owner._modules[name]
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        eps = next((getattr(module, kind) for kind in ("variance_epsilon", "eps") if hasattr(module, kind)), None)
        if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or set(module._modules):
            raise PackingError(f"{name} is a {type(module).__name__}")
        self._weight(module)
        if weight.dtype not in (torch.float32, torch.bfloat16) or (bias is not None and bias.dtype != weight.dtype):
            raise PackingError(f"{name} has weights of {weight.dtype}")
        made = Norm(weight=weight.data_ptr(), kind=KINDS[weight.dtype], eps=eps)
        made.bias = None if bias is None else bias.data_ptr()
        made.centred = isinstance(module, nn.LayerNorm)
        return made


def _table(module: Any) -> tuple[Matrix | None, int]:
    """An embedding as a matrix of rows, and the kind that packed ones are rounded to; None if it does more."""
    if isinstance(module, PackedEmbedding):
        weight: Any = module.packed if module.embed_scale is None else None
    else:
        plain = type(module).forward is nn.Embedding.forward and module.max_norm is None
        weight = module.weight if plain else None
    if weight is None or weight.dtype not in KINDS:
        return None, 0
    made = matrix_of(weight)
    return (made, KINDS[weight.dtype]) if isinstance(made, Matrix) else (None, 0)


def _named(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """What a module calls its matrices: each of them, or the one that joins them."""
    return (JOINED[names],) if JOINED[names] in module._modules else names


def _activation(module: nn.Module) -> int:
    """Which of the known functions it is, by its values."""
    grid = torch.linspace(-6, 6, 241)
    made = module(grid)
    for which, function in enumerate(ACTIVATIONS):
        if made.shape == grid.shape and torch.allclose(made, function(grid), rtol=1e-5, atol=1e-6):
            return which
    raise PackingError(f"its activation is {type(module).__name__}")


def address(array: Any) -> int:
    """Of a ctypes object."""
    return ctypes.addressof(array)
