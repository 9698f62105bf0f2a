"""Structure of a decoder of Transformers, recognized by its modules.

`Reader` describes each part by its tensors, without regard to what computes them. A form of the model that does not
call the modules is made from these descriptions: `native_structure.NativeStructure` for the native library of CPUs, and
`device_structure.DeviceStructure` for kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.activation_checkpointing.apply import BlockForward
from deepspeed.errors import PackingError
from deepspeed.foundation.replaced_forward import TrainingOnlyForward
from deepspeed.inference.executors.engine_weights import EngineWeights, is_sharded
from deepspeed.inference.quantization.float8 import Float8Linear
from deepspeed.inference.quantization.layers import PackedLinear
from deepspeed.inference.quantization.lossless_bf16 import GROUP, LosslessWeight
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.inference.trained_lora import base_of, is_lora
from deepspeed.tensor_parallel.layers import ColumnParallel, RowParallel
from deepspeed.zero.parameters.parameter import is_managed

EMBEDDING, HEAD = -1, -2  # parts of a `Structure` besides its layers
REQUIRE_GRADS = {"make_inputs_require_grads", "make_inputs_require_grad"}  # hooks of Transformers and PEFT
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SANDWICH = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}  # with them, norms also follow both sublayers
ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj")
FEED_FORWARD_MATRICES = ("gate_proj", "up_proj")
# Joined matrix for these matrices, in this order of rows.
JOINED = {ATTENTION_MATRICES: "qkv_proj", FEED_FORWARD_MATRICES: "gate_up_proj"}
COLUMNS = (*ATTENTION_MATRICES, *FEED_FORWARD_MATRICES, *JOINED.values())  # slices of them have some of the outputs
ROWS = ("o_proj", "down_proj")  # slices of them have some of the inputs
FUNCTIONS = ("act_fn", "activation_fn")
SHARED = ("shared_expert", "shared_expert_gate")
# In the order of `Activation` in decoder.cpp, and of `ops.triton.rows.ACTIVATIONS` as far as it goes.
ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu,
)  # fmt: skip

Weight = torch.Tensor | PackedWeight | LosslessWeight | Float8Linear
Mark = Callable[[nn.Module], None]


def changes_its_call(module: nn.Module) -> bool:
    """Whether hooks, or a replaced `forward`, may change what a call of a module returns."""
    forward: Any = vars(module).get("forward")
    while isinstance(forward, TrainingOnlyForward) and not module.training:
        forward = forward.inner
    own = forward is None or getattr(forward, "__func__", None) is type(module).forward
    if not own and not isinstance(forward, BlockForward):
        return True
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "transparent", getattr(hook, "__name__", "") in REQUIRE_GRADS) for hook in hooks)


# -- descriptions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormPart:
    """A norm: its module, weight [width], bias [width] or None, and what is added to the mean square.

    Args:
        name: its name in the module that has it.
        module: the module.
        eps: number added to the mean square.
        centred: whether it is a layer norm.
        joint: of queries or keys: whether all heads are normed together.
    """

    name: str
    module: Any
    eps: float
    centred: bool
    joint: bool = False

    @property
    def weight(self) -> torch.Tensor:
        return self.module.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return getattr(self.module, "bias", None)


@dataclass(frozen=True)
class MatrixPart:
    """A matrix [outputs, inputs] of a linear layer, or some of its rows. Of a sliced layer, it is this rank's slice.

    Args:
        name: name of the layer in the module that has it.
        module: the layer: `nn.Linear`, `PackedLinear`, `Float8Linear`, a sliced layer, or the layer inside of a LoRA
            layer.
        adapted: whether low-rank changes belong to it.
        first: first row.
        count: number of rows; None: all.
    """

    name: str
    module: Any
    adapted: bool = False
    first: int = 0
    count: int | None = None

    @property
    def weight(self) -> Weight:
        """The whole matrix, of which this is a part; of a layer in fp8, the layer."""
        if isinstance(self.module, Float8Linear):
            return self.module
        return self.module.packed if isinstance(self.module, PackedLinear) else self.module.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the whole matrix."""
        return self.module.bias

    @property
    def outputs(self) -> int:
        return self.weight.shape[0] if self.count is None else self.count

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True)
class GatedPart:
    """A gated feed-forward network; `activation`: index in `ACTIVATIONS`."""

    gate: MatrixPart
    up: MatrixPart
    down: MatrixPart
    activation: int


@dataclass(frozen=True)
class MixturePart:
    """A mixture of experts: modules of router and experts, index of their activation, shared expert and its gate."""

    module: Any
    router: Any
    experts: Any
    activation: int
    shared: GatedPart | None = None
    shared_gate: MatrixPart | None = None


@dataclass(frozen=True)
class LayerPart:
    """A decoder layer.

    Args:
        before: norm before attention.
        after: norm before the feed-forward part.
        q, k, v, out: matrices of attention.
        query, key: norms of queries and keys.
        mlp: feed-forward part.
        after_attention: norm of attention's output, before it is added to the residual stream.
        after_mlp: norm of the feed-forward part's output, likewise.
    """

    before: NormPart
    after: NormPart
    q: MatrixPart
    k: MatrixPart
    v: MatrixPart
    out: MatrixPart
    query: NormPart | None
    key: NormPart | None
    mlp: GatedPart | MixturePart
    after_attention: NormPart | None = None
    after_mlp: NormPart | None = None


@dataclass(frozen=True)
class HeadPart:
    """Final norm and matrix of the LM head."""

    norm: NormPart
    head: MatrixPart


# -- what was read -----------------------------------------------------------------------------------------------------


class StructureSnapshot:
    """Dicts of modules, tensors and settings, and their values when they were read; it keeps both alive."""

    def __init__(self, owners: Iterable[dict[Any, Any]] = ()) -> None:
        self._owners = list(owners)
        self.values = [value for owner in self._owners for value in owner.values()]
        self._ids, self._lengths = list(map(id, self.values)), list(map(len, self._owners))

    def changed(self) -> bool:
        """Whether a dict holds other objects now."""
        if list(map(len, self._owners)) != self._lengths:
            return True
        return list(map(id, chain.from_iterable(map(dict.values, self._owners)))) != self._ids


class Structure:
    """Parts of a model that run without its modules; a form of it has `take_embedding`, `take_head` and `take_layer`.

    Parts are numbered: the decoder layers from 0, then `EMBEDDING` and `HEAD` (final norm and LM head).

    Args:
        base: model under the head.
        lm_head: module of the head.
        blocks: decoder layers.

    Attributes:
        uneven: modules with a joined matrix in which a part does not begin at a multiple of 4 rows, the groups of the
            12-bit form; such a matrix is not packed in 12 bits.
        tensors: weights among the snapshot's values, and their addresses; without those that are gathered before use.
        sharded: by part: parameters that are gathered before use.
        addresses: addresses of these parameters when the part was read.
    """

    def __init__(self, base: Any, lm_head: Any, blocks: list[Any]) -> None:
        self.base, self.lm_head, self.blocks = base, lm_head, blocks
        self.uneven: list[nn.Module] = []
        self.sharded: dict[int, list[Any]] = {}
        self.addresses: dict[int, list[int]] = {}
        self.forget()

    def take_embedding(self, module: Any) -> None:
        """Take the embedding's module. PackingError if it is not supported."""

    def take_head(self, head: HeadPart) -> None:
        """Take final norm and LM head. PackingError if they are not supported."""

    def take_layer(self, number: int, layer: LayerPart) -> None:
        """Take a decoder layer. PackingError if it is not supported."""

    def mark_uneven(self, module: nn.Module) -> None:
        """Record a module with parts of matrices at uneven rows."""
        if all(module is not other for other in self.uneven):
            self.uneven.append(module)

    def forget(self) -> None:
        """Drop the snapshot, which keeps weights alive."""
        self.seen = StructureSnapshot()
        self.tensors: tuple[list[torch.Tensor], list[int]] = ([], [])

    def remember(self, owners: Iterable[dict[Any, Any]]) -> None:
        """Record dicts of modules, tensors and settings, for `changed`."""
        self.seen = StructureSnapshot(owners)
        held = {id(value): value for value in self.seen.values if isinstance(value, torch.Tensor)}
        tensors = [tensor for tensor in held.values() if not is_sharded(tensor)]
        self.tensors = tensors, [tensor.data_ptr() for tensor in tensors]

    def changed(self) -> bool:
        """Whether modules were replaced or weights were moved in memory since `Reader.read`.

        Changed values need no detection, because passes read the weights in place. Parameters that are gathered
        before use are looked at by `moved`, each time they are gathered.
        """
        if self.seen.changed():
            return True
        weights, addresses = self.tensors
        # `type` first: asking torch's class of parameters for each of hundreds of weights takes half a millisecond.
        if any(type(weight) is not nn.Parameter and is_sharded(weight) for weight in weights):
            return True  # an engine has taken them over
        return list(map(torch.Tensor.data_ptr, weights)) != addresses

    def parameters(self, part: int) -> list[Any]:
        """Return the parameters of a part."""
        if part == EMBEDDING:
            return list(self.base.embed_tokens.parameters())
        if part == HEAD:
            return [*self.base.norm.parameters(), *self.lm_head.parameters()]
        return list(self.blocks[part].parameters())

    def moved(self, part: int) -> bool:
        """Whether the gathered parameters of a part have other addresses than when it was read."""
        return list(map(torch.Tensor.data_ptr, self.sharded[part])) != self.addresses[part]


# -- reader ------------------------------------------------------------------------------------------------------------


class Reader:
    """Reader that recognizes the parts of a decoder by its modules.

    Args:
        model: causal LM.
        weights: access to its weights.
        sandwich: whether layers may have the norms `SANDWICH`.
        sliced: whether matrices of the layers may be slices of tensor parallelism: outputs of this rank, which stay
            split, or inputs of this rank (`MatrixPart.module` is a `RowParallel`), whose products are to be summed.
        float8: whether layers may be in fp8 (`MatrixPart.module` is a `Float8Linear`).
    """

    def __init__(
        self,
        model: nn.Module,
        weights: EngineWeights,
        sandwich: bool = False,
        sliced: bool = False,
        float8: bool = False,
    ) -> None:
        self.model, self._weights = model, weights
        self._sandwich, self._sliced, self._float8 = sandwich, sliced, float8
        self.seen: dict[int, dict[Any, Any]] = {}

    def read(self, form: type[Structure]) -> Any:
        """Return the parts of the model as a `form`.

        Raises:
            PackingError: a part is not supported; the message names it.
        """
        base = getattr(self.model, getattr(self.model, "base_model_prefix", "") or "model", None)
        if not isinstance(base, nn.Module) or base is self.model:
            raise PackingError("it has no base model under a head")
        prefix = next((name for name, child in self.model.named_children() if child is base), None)
        if prefix is None:
            raise PackingError(f"{type(self.model).__name__} wraps a model")
        self._only(self.model, {prefix, "lm_head"})
        parts = self._only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
        for module in self.model.modules():
            if changes_its_call(module):
                raise PackingError(f"the forward of {type(module).__name__} is hooked")
            self._see(module._forward_hooks)
            self._see(module._forward_pre_hooks)
        blocks = list(parts["layers"])
        self._see(parts["layers"]._modules)
        structure = form(base, self.model._modules["lm_head"], blocks)
        for part in (EMBEDDING, HEAD, *range(len(blocks))):
            sharded = [param for param in structure.parameters(part) if is_sharded(param)]
            if sharded:
                structure.sharded[part] = sharded
            with self._weights.gathered(sharded):
                self.read_part(structure, part)
        structure.remember(self.seen.values())
        return structure

    def read_part(self, structure: Structure, part: int) -> None:
        """Read one part of the model into `structure`; its parameters are gathered. PackingError as in `read`."""
        if part == EMBEDDING:
            self._weight(structure.base.embed_tokens)
            structure.take_embedding(structure.base.embed_tokens)
        elif part == HEAD:
            head = self._matrix(self.model, "lm_head")
            structure.take_head(HeadPart(self._norm(structure.base, "norm"), head))
        else:
            structure.take_layer(part, self._block(structure.blocks[part], structure.mark_uneven))
        if part in structure.sharded:
            structure.addresses[part] = list(map(torch.Tensor.data_ptr, structure.sharded[part]))

    def _see(self, owner: dict[Any, Any]) -> None:
        """Record a dict of modules, tensors or settings, for `Structure.changed`."""
        self.seen[id(owner)] = owner

    def _weight(self, module: Any) -> None:
        """Record the tensors of a leaf module; PackingError if an engine manages them, or for a tensor subclass."""
        home = module.packed if hasattr(module, "packed") else module
        for owner in (home, module) if home is not module else (module,):
            for held in (owner._parameters, owner._buffers):
                for tensor in held.values():
                    if tensor is None:
                        continue
                    if is_managed(tensor):
                        if home is not module:
                            raise PackingError("an engine holds its packed matrices")
                    elif type(tensor.data) is not torch.Tensor:
                        raise PackingError(f"{type(module).__name__} has weights that are no plain tensors")
                    self._see(held)

    def _only(self, module: nn.Module, names: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return a module's children by name; PackingError unless they are `names` and some of `optional`.

        Dropouts are ignored. The module must not have parameters itself.
        """
        children = {name: child for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
        strange = sorted(set(children) - names - optional)
        strange += sorted(n for n, p in module._parameters.items() if p is not None)
        differences = [f"has {name}" for name in strange]
        differences += [f"has no {name}" for name in sorted(names - set(children))]
        if differences:
            raise PackingError(f"{type(module).__name__} {', '.join(differences[:3])}")
        self._see(module._modules)
        return children

    def _block(self, block: Any, uneven: Mark) -> LayerPart:
        sandwich = self._sandwich and set(block._modules) >= SANDWICH
        self._only(block, LAYER | SANDWICH if sandwich else LAYER)
        names = ("input_layernorm", "post_attention_layernorm", *(sorted(SANDWICH) if sandwich else ()))
        norms = {name: self._norm(block, name) for name in names}
        before, second = norms["input_layernorm"], norms["post_attention_layernorm"]
        attention = self._attention(block.self_attn, uneven)
        mlp = self._mixture(block.mlp, uneven) if is_mixture(block.mlp) else self._gated(block.mlp, uneven)
        if not sandwich:
            return LayerPart(before, second, **attention, mlp=mlp)
        after, last = norms["pre_feedforward_layernorm"], norms["post_feedforward_layernorm"]
        return LayerPart(before, after, **attention, mlp=mlp, after_attention=second, after_mlp=last)

    def _attention(self, attention: Any, uneven: Mark) -> dict[str, Any]:
        """Return the parts of attention by their names in `LayerPart`."""
        if getattr(getattr(attention, "config", None), "clip_qkv", None) is not None:
            raise PackingError("its queries, keys and values are clipped")
        names = _stored(attention, ATTENTION_MATRICES)
        own = self._only(attention, {*names, "o_proj"}, frozenset({"q_norm", "k_norm"}))
        out = self._matrix(attention, "o_proj")
        q, k, v = self._matrices(attention, names, out.inputs, uneven)
        norms = []
        for kind, matrix in (("q_norm", q), ("k_norm", k)):
            joint = kind in own and own[kind].weight.numel() == matrix.outputs  # else of each head
            norms.append(self._norm(attention, kind, joint) if kind in own else None)
        return {"q": q, "k": k, "v": v, "out": out, "query": norms[0], "key": norms[1]}

    def _gated(self, mlp: Any, uneven: Mark) -> GatedPart:
        names = _stored(mlp, FEED_FORWARD_MATRICES)
        function = next((name for name in FUNCTIONS if name in mlp._modules), FUNCTIONS[0])
        activation = activation_of(self._only(mlp, {*names, "down_proj", function})[function])
        down = self._matrix(mlp, "down_proj")
        gate, up = self._matrices(mlp, names, down.inputs, uneven)
        return GatedPart(gate, up, down, activation)

    def _mixture(self, mlp: Any, uneven: Mark) -> MixturePart:
        """Return router, experts and shared expert of a feed-forward part. PackingError for others."""
        own = self._only(mlp, {"gate", "experts"}, frozenset(SHARED))
        router, experts = own["gate"], own["experts"]
        for module in (router, experts, *(child for child in experts.children() if child is not experts.act_fn)):
            self._see(module._modules)
            self._weight(module)
        self._see(vars(router))  # its settings: experts of a row, whether weights add up to 1
        activation = activation_of(experts.act_fn)
        if len(own) == 2:
            return MixturePart(mlp, router, experts, activation)
        if set(own) != {"gate", "experts", *SHARED}:
            raise PackingError("its shared expert has no gate")
        shared, gate = self._gated(own["shared_expert"], uneven), self._matrix(mlp, "shared_expert_gate")
        if shared.activation != activation or gate.outputs != 1:
            raise PackingError("its shared expert has another activation or gate than the native one")
        return MixturePart(mlp, router, experts, activation, shared, gate)

    def _matrices(self, owner: nn.Module, names: tuple[str, ...], first: int, uneven: Mark) -> list[MatrixPart]:
        """Return the matrices of `names`, or the parts of one that joins them.

        Args:
            owner: module with the matrices.
            names: names of the matrices, or one name of a joined matrix of `JOINED`.
            first: number of rows of the first matrix in a joined one; the others have equal shares of the rest,
                else PackingError is raised.
            uneven: called with the joined matrix's module if parts begin at uneven rows.
        """
        matrices = [self._matrix(owner, name) for name in names]
        if len(matrices) > 1:
            return matrices
        joined, count = matrices[0], next(len(parts) for parts, name in JOINED.items() if name == names[0])
        rest, odd = divmod(joined.outputs - first, count - 1)
        if odd or rest <= 0:
            raise PackingError(f"{names[0]} has {joined.outputs} rows, {first} of them of the first matrix")
        if first % GROUP or rest % GROUP:
            uneven(owner.get_submodule(names[0]))
        starts = [(0, first), *((first + i * rest, rest) for i in range(count - 1))]
        return [MatrixPart(joined.name, joined.module, joined.adapted, *part) for part in starts]

    def _matrix(self, owner: nn.Module, name: str) -> MatrixPart:
        module: Any = owner._modules[name]
        adapted = is_lora(module)
        if adapted:  # its changes are those of `TrainedLora`
            self._see(module._modules)
            module = base_of(module)
        plain = isinstance(module, PackedLinear) or type(module).forward is nn.Linear.forward
        plain = plain or (self._float8 and type(module).forward is Float8Linear.forward)
        if not plain and not (self._sliced and _is_slice(module, name)):
            raise PackingError(f"{name} is a {type(module).__name__}")
        self._weight(module)
        return MatrixPart(name, module, adapted)

    def _norm(self, owner: nn.Module, name: str, joint: bool = False) -> NormPart:
        module: Any = owner._modules[name]
        weight = getattr(module, "weight", None)
        eps = next((getattr(module, kind) for kind in ("variance_epsilon", "eps") if hasattr(module, kind)), None)
        if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or set(module._modules):
            raise PackingError(f"{name} is a {type(module).__name__}")
        self._weight(module)
        return NormPart(name, module, eps, isinstance(module, nn.LayerNorm), joint)


def _is_slice(module: Any, name: str) -> bool:
    """Whether a layer of this name has a slice of its matrix as `Reader` takes it."""
    if not isinstance(module, ColumnParallel | RowParallel) or module.transposed:
        return False
    if isinstance(module, RowParallel):
        return name in ROWS and type(module).forward is RowParallel.forward
    own = module.rows is None and module.sizes is None  # else heads of several ranks, or gathered outputs
    return own and name in COLUMNS and type(module).forward is ColumnParallel.forward


def is_mixture(mlp: nn.Module) -> bool:
    """Whether a feed-forward module has child modules `gate` (a router) and `experts`."""
    return {"gate", "experts"} <= set(mlp._modules)


def activation_of(module: nn.Module) -> int:
    """Return the index in `ACTIVATIONS` of a function with equal values; PackingError if there is none."""
    grid = torch.linspace(-6, 6, 241)
    values = module(grid)
    for which, function in enumerate(ACTIVATIONS):
        if values.shape == grid.shape and torch.allclose(values, function(grid), rtol=1e-5, atol=1e-6):
            return which
    raise PackingError(f"its activation is {type(module).__name__}")


def _stored(owner: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`, or the name of the joined matrix if the module `owner` has one instead."""
    return (JOINED[names],) if JOINED[names] in owner._modules else names
