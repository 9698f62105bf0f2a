"""Native executor: runs common decoder structures (such as Llama's) by a few calls of the native CPU library."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.apply import BlockForward
from deepspeed.errors import PackingError, RequestError
from deepspeed.foundation.log import warn_once
from deepspeed.foundation.replaced_forward import TrainingOnlyForward
from deepspeed.inference.adapters import LoraAdapter
from deepspeed.inference.executors.engine_weights import EngineWeights, is_sharded
from deepspeed.inference.executors.mask_shape import mask_shape
from deepspeed.inference.executors.native_adapters import adapted_rows, bind
from deepspeed.inference.executors.native_experts import clear_rows, experts_of, is_mixture, routing_of
from deepspeed.inference.executors.native_tensors import (
    GROUP,
    GatedMlp,
    Heads,
    Layer,
    Matrix,
    Norm,
    Pass,
    functions,
    matrix_of,
    rows_of,
)
from deepspeed.inference.executors.paged import KVCache, Mask, PagedExecutor
from deepspeed.inference.executors.ragged_batch import RaggedBatch
from deepspeed.inference.quantization.layers import PackedEmbedding, PackedLinear
from deepspeed.inference.quantization.lossless_bf16 import Room
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.inference.quantization.quantization import pack_lossless
from deepspeed.inference.request import packed_limit
from deepspeed.inference.trained_lora import TrainedLora, base_of, is_lora
from deepspeed.native import KINDS, threads
from deepspeed.zero.parameters.parameter import is_managed

LARGEST_HEAD = 512  # maximum head size of attention.cpp
TABLE = 512  # positions per rotary call
ATTENTION, FEED_FORWARD, BOTH = 1, 2, 3
EMBEDDING, HEAD = -1, -2  # parts of a `Structure` besides its layers
REQUIRE_GRADS = {"make_inputs_require_grads", "make_inputs_require_grad"}  # hooks of Transformers and PEFT
MOVED = 32 << 20  # bytes after which freed memory is returned to the system
# Tolerances of a part's change to the residual stream: relative to its size, and to the rounding of the stream.
TOLERANCE = {torch.float32: (1e-3, 1e-5), torch.bfloat16: (0.03, 0.003)}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj")
FEED_FORWARD_MATRICES = ("gate_proj", "up_proj")
# Joined matrix for these matrices, in this order of rows.
JOINED = {ATTENTION_MATRICES: "qkv_proj", FEED_FORWARD_MATRICES: "gate_up_proj"}
FUNCTIONS = ("act_fn", "activation_fn")
SHARED = ("shared_expert", "shared_expert_gate")
# In the order of `Activation` in decoder.cpp.
ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu,
)  # fmt: skip


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


def _stored(owner: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`, or the name of the joined matrix if the module `owner` has one instead."""
    return (JOINED[names],) if JOINED[names] in owner._modules else names


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


@dataclass
class Structure:
    """Parts of a model that the native library runs.

    Parts are numbered: the decoder layers from 0, then `EMBEDDING` and `HEAD` (final norm and LM head).

    Args:
        base: model under the head.
        lm_head: module of the head.
        blocks: decoder layers.
        layers: array of `Layer` for the native library; `FusedExecutor` sets the field `heads`.
    """

    base: Any
    lm_head: Any
    blocks: list[Any]
    layers: Any
    norm: Norm = field(default_factory=Norm)
    head: Matrix = field(default_factory=Matrix)
    table: Matrix | None = None  # the embedding, if its rows can be read natively
    kind: int = 0  # dtype code of a packed table's rows
    uneven: list[nn.Module] = field(default_factory=list)  # modules with parts of matrices at uneven rows
    experts: dict[int, Any] = field(default_factory=dict)  # arrays to which entries of `layers` point
    seen: StructureSnapshot = field(default_factory=StructureSnapshot)
    # Weights among its values, and their addresses; without those that are gathered before use.
    tensors: tuple[list[torch.Tensor], list[int]] = field(default_factory=lambda: ([], []))
    sharded: dict[int, list[Any]] = field(default_factory=dict)  # by part: parameters that are gathered before use
    addresses: dict[int, list[int]] = field(default_factory=dict)  # of these parameters when the part was read

    def changed(self) -> bool:
        """Whether modules were replaced or weights were moved in memory since `Reader.read`.

        Changed values need no detection, because native passes read the weights in place. Parameters that are gathered
        before use are looked at by `moved`, each time they are gathered.
        """
        if self.seen.changed():
            return True
        weights, addresses = self.tensors
        if any(map(is_sharded, weights)):  # an engine has taken them over
            return True
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


class Reader:
    """Reader that recognizes the parts of a decoder by its modules, for forward passes in the native library."""

    def __init__(self, model: nn.Module, weights: EngineWeights) -> None:
        self.model, self._weights = model, weights
        self.seen: dict[int, dict[Any, Any]] = {}
        self.uneven: list[nn.Module] = []
        self.experts: dict[int, Any] = {}

    def read(self) -> Structure:
        """Return the parts of the model.

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
        structure = Structure(base, self.model._modules["lm_head"], blocks, (Layer * len(blocks))())
        for part in (EMBEDDING, HEAD, *range(len(blocks))):
            sharded = [param for param in structure.parameters(part) if is_sharded(param)]
            if sharded:
                structure.sharded[part] = sharded
            with self._weights.gathered(sharded):
                self.read_part(structure, part)
        structure.uneven = self.uneven
        structure.seen = StructureSnapshot(self.seen.values())
        held = {id(value): value for value in structure.seen.values if isinstance(value, torch.Tensor)}
        tensors = [tensor for tensor in held.values() if not is_sharded(tensor)]
        structure.tensors = tensors, [tensor.data_ptr() for tensor in tensors]
        return structure

    def read_part(self, structure: Structure, part: int) -> None:
        """Read one part of the model into `structure`; its parameters are gathered. PackingError as in `read`."""
        if part == EMBEDDING:
            self._weight(structure.base.embed_tokens)
            structure.table, structure.kind = self.table_of(structure.base.embed_tokens)
        elif part == HEAD:
            structure.head = self._matrix(self.model, "lm_head")
            structure.norm = self._norm(structure.base, "norm")
        else:
            self._block(structure.blocks[part], structure.layers[part])
            structure.experts.update(self.experts)
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

    def _block(self, block: Any, layer: Any) -> None:
        self._only(block, LAYER)
        layer.before, layer.after = self._norm(block, "input_layernorm"), self._norm(block, "post_attention_layernorm")
        self._attention(block.self_attn, layer)
        if is_mixture(block.mlp):
            layer.activation = self._mixture(block.mlp, layer)
        else:
            layer.mlp, layer.activation = self._gated(block.mlp)

    def _attention(self, attention: Any, layer: Any) -> None:
        if getattr(getattr(attention, "config", None), "clip_qkv", None) is not None:
            raise PackingError("its queries, keys and values are clipped")
        names = _stored(attention, ATTENTION_MATRICES)
        own = self._only(attention, {*names, "o_proj"}, frozenset({"q_norm", "k_norm"}))
        layer.out = self._matrix(attention, "o_proj")
        layer.q, layer.k, layer.v = self._matrices(attention, names, 3, layer.out.inputs)
        for name, kind, matrix in (("query", "q_norm", layer.q), ("key", "k_norm", layer.k)):
            if kind in own:
                norm = self._norm(attention, kind)
                norm.joint = own[kind].weight.numel() == matrix.outputs  # else of each head
                setattr(layer, name, norm)

    def _gated(self, mlp: Any) -> tuple[GatedMlp, int]:
        """Return a gated feed-forward network, and the index of its activation in `ACTIVATIONS`."""
        names = _stored(mlp, FEED_FORWARD_MATRICES)
        function = next((name for name in FUNCTIONS if name in mlp._modules), FUNCTIONS[0])
        activation = self._activation(self._only(mlp, {*names, "down_proj", function})[function])
        down = self._matrix(mlp, "down_proj")
        gate, up = self._matrices(mlp, names, 2, down.inputs)
        return GatedMlp(gate, up, down), activation

    def _mixture(self, mlp: Any, layer: Any) -> int:
        """Set router, experts and shared expert of `layer`; return the activation's index. PackingError for others."""
        own = self._only(mlp, {"gate", "experts"}, frozenset(SHARED))
        router, experts = own["gate"], own["experts"]
        for module in (router, experts, *(child for child in experts.children() if child is not experts.act_fn)):
            self._see(module._modules)
            self._weight(module)
        self._see(vars(router))  # its settings: experts of a row, whether weights add up to 1
        weight, layer.experts.chosen, layer.experts.normalized = routing_of(router)
        matrix = matrix_of(weight)
        if isinstance(matrix, str):
            raise PackingError(f"its router: {matrix}")
        each, even = experts_of(experts, len(weight))
        if not even:
            self.uneven.append(experts)
        layer.experts.router, layer.experts.each, layer.experts.count = matrix, each, len(weight)
        self.experts[id(mlp)] = each
        activation = self._activation(experts.act_fn)
        if len(own) > 2:
            if set(own) != {"gate", "experts", *SHARED}:
                raise PackingError("its shared expert has no gate")
            layer.mlp, other = self._gated(own["shared_expert"])
            layer.experts.shared_gate = self._matrix(mlp, "shared_expert_gate")
            if other != activation or layer.experts.shared_gate.outputs != 1:
                raise PackingError("its shared expert has another activation or gate than the native one")
        return activation

    def _matrices(self, owner: nn.Module, names: tuple[str, ...], count: int, first: int) -> list[Matrix]:
        """Return `count` matrices, which are stored separately or fused in one.

        Args:
            owner: module with the matrices.
            names: `count` names, or one name of a fused matrix.
            count: number of matrices.
            first: number of rows of the first matrix in a fused one; the others have equal shares of the rest,
                else PackingError is raised.
        """
        matrices = [self._matrix(owner, name) for name in names]
        if len(matrices) == count:
            return matrices
        joined = matrices[0]
        rest, odd = divmod(joined.outputs - first, count - 1)
        if odd or rest <= 0:
            raise PackingError(f"{names[0]} has {joined.outputs} rows, {first} of them of the first matrix")
        if first % GROUP or rest % GROUP:
            self.uneven.append(owner.get_submodule(names[0]))
        return [rows_of(joined, 0, first), *(rows_of(joined, first + i * rest, rest) for i in range(count - 1))]

    def _matrix(self, owner: nn.Module, name: str) -> Matrix:
        module: Any = owner._modules[name]
        if is_lora(module):  # its changes are those of `TrainedLora`
            self._see(module._modules)
            module = base_of(module)
        packed = isinstance(module, PackedLinear)
        if not packed and type(module).forward is not nn.Linear.forward:
            raise PackingError(f"{name} is a {type(module).__name__}")
        self._weight(module)
        matrix = matrix_of(module.packed if packed else module.weight, module.bias)
        if isinstance(matrix, str):
            raise PackingError(f"{name}: {matrix}")
        return matrix

    def _norm(self, owner: nn.Module, name: str) -> Norm:
        module: Any = owner._modules[name]
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        eps = next((getattr(module, kind) for kind in ("variance_epsilon", "eps") if hasattr(module, kind)), None)
        if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or set(module._modules):
            raise PackingError(f"{name} is a {type(module).__name__}")
        self._weight(module)
        if weight.dtype not in (torch.float32, torch.bfloat16) or (bias is not None and bias.dtype != weight.dtype):
            raise PackingError(f"{name} has weights of {weight.dtype}")
        norm = Norm(weight=weight.data_ptr(), kind=KINDS[weight.dtype], eps=eps)
        norm.bias = None if bias is None else bias.data_ptr()
        norm.centred = isinstance(module, nn.LayerNorm)
        return norm

    @staticmethod
    def table_of(module: Any) -> tuple[Matrix | None, int]:
        """Return an embedding table as a native matrix, and the dtype code of its rows; (None, 0) if unsupported."""
        if isinstance(module, PackedEmbedding):
            weight: Any = module.packed if module.embed_scale is None else None
        else:
            plain = type(module).forward is nn.Embedding.forward and module.max_norm is None
            weight = module.weight if plain else None
        if weight is None or weight.dtype not in KINDS:
            return None, 0
        matrix = matrix_of(weight)
        return (matrix, KINDS[weight.dtype]) if isinstance(matrix, Matrix) else (None, 0)

    @staticmethod
    def _activation(module: nn.Module) -> int:
        """Return the index in `ACTIVATIONS` of a function with equal values; PackingError if there is none."""
        grid = torch.linspace(-6, 6, 241)
        values = module(grid)
        for which, function in enumerate(ACTIVATIONS):
            if values.shape == grid.shape and torch.allclose(values, function(grid), rtol=1e-5, atol=1e-6):
                return which
        raise PackingError(f"its activation is {type(module).__name__}")


class FusedExecutor:
    """Native form of a `PagedExecutor`, with the same pages.

    Args:
        paged: executor that has already run a pass, in which it recorded the masks and scales of the attention layers.

    Raises:
        PackingError: the native library is missing, or the model's structure or a mask is unsupported.
    """

    kind = "packed"

    def __init__(self, paged: PagedExecutor) -> None:
        if functions() is None:
            raise PackingError("the native library is not there")
        self.plain, self.model, self.store = paged, paged.model, paged.store
        self.weights, self._lora = EngineWeights(self.model), TrainedLora(self.model)
        self._scales = dict(paged.scales)
        self._windows = {layer: _window(rule, self.model) for layer, rule in paged.rules.items()}
        self._bound: tuple[Any, ...] = ()
        self._cosines = self._sines = torch.empty(0, 0)
        self._furthest = packed_limit(self.model)
        self.structure = self._read()

    def _read(self) -> Structure:
        self.weights.look()
        self.weights.settle()
        structure, scales = Reader(self.model, self.weights).read(), self._scales
        if set(self.store.layers) != set(range(len(structure.blocks))) or set(scales) != set(self.store.layers):
            raise PackingError("its layers and those of its cache differ")
        self._turn(structure.base.rotary_emb, 1)
        for number, layer in enumerate(structure.layers):
            keys, values = self.store.layers[number]
            _, cached, size = keys.shape
            count = layer.q.outputs // size
            fits = keys.shape == values.shape and keys.dtype in (torch.float32, torch.bfloat16) and size % 16 == 0
            rows = [layer.q.outputs, layer.k.outputs, layer.v.outputs, layer.out.inputs]
            fits = fits and rows == [count * size, cached * size, cached * size, count * size] and size <= LARGEST_HEAD
            if not fits or count % cached or not (scales[number] or 0) > 0:
                raise PackingError(f"layer {number} attends with heads of {size} in a way that the native one does not")
            layer.heads = Heads(count=count, cached=cached, size=size, rotary=self._cosines.shape[1])
            layer.heads.window, layer.heads.scale = self._windows[number], scales[number]
            layer.heads.kind = KINDS[keys.dtype]
        self._bound = ()
        self._lora.read(self.weights, structure.blocks, structure.layers)
        return structure

    @contextmanager
    def _in_memory(self, part: int) -> Iterator[None]:
        """Context in which the parameters of a part are gathered, and `structure` has their addresses."""
        sharded = self.structure.sharded.get(part)
        if sharded is None:
            yield
            return
        with self.weights.gathered(sharded):
            if self.structure.moved(part):
                Reader(self.model, self.weights).read_part(self.structure, part)
            yield

    def _bind(self) -> None:
        """Set the cache pointers of all layers to the current pages."""
        pools = tuple(self.store.layers[number] for number in range(len(self.structure.blocks)))
        if len(pools) == len(self._bound) and all(a is b for a, b in zip(pools, self._bound, strict=True)):
            return
        for layer, (keys, values) in zip(self.structure.layers, pools, strict=True):
            layer.heads.keys, layer.heads.values = keys.data_ptr(), values.data_ptr()
        self._bound = pools

    def _turn(self, rotary: Any, end: int) -> None:
        """Extend cosines and sines by `rotary` to at least `end` positions; PackingError for unsupported shapes."""
        have = len(self._cosines)
        if end <= have:
            return
        most = max(end, 2 * have, TABLE)
        most = min(most, max(end, self._furthest)) if self._furthest else most  # longer ones would change all rotations
        tables = [[self._cosines], [self._sines]] if have else [[], []]
        rotary(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))  # undoes what a longer text has changed
        for start in range(have, most, TABLE):
            positions = torch.arange(start, min(start + TABLE, most))[None]
            for parts, rotations in zip(tables, rotary(torch.zeros(1), positions), strict=True):
                parts.append(rotations[0].float())
        self._cosines, self._sines = (torch.cat(parts).contiguous() for parts in tables)
        if self._cosines.dim() != 2 or self._cosines.shape != self._sines.shape or self._cosines.shape[1] % 2:
            raise PackingError(f"its rotations have shape {tuple(self._cosines.shape)}")

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Run a batch and return the requested logits, [rows with logits, vocabulary].

        Native logits are fp32, and bit by bit independent of the batch's other sequences. If the model's structure has
        become unsupported, the `PagedExecutor` runs the batch.

        Raises:
            RequestError: a token is outside of the embedding table.
        """
        self.weights.settle()
        if self.structure.changed() or self._lora.replaced():
            self._read_again()
        self.plain.store = self.store
        if not self.structure.blocks:
            return self.plain.run(batch)
        with self.weights.one_pass() if self.structure.sharded else nullcontext():
            return self._run(batch)

    def _run(self, batch: RaggedBatch) -> torch.Tensor:
        x = self._embedded(batch)
        self.layers(batch, x, 0, len(self.structure.blocks), BOTH)
        if batch.wants_hidden:
            batch.hidden = self._normalized(x)
        if any(span.wanted < len(span.tokens) for span in batch.spans):
            x = x[batch.wanted]
        out = x.new_empty(len(x), self.structure.head.outputs)
        with self._in_memory(HEAD):
            functions().ds_head(  # type: ignore[union-attr]
                self.structure.norm, self.structure.head, x.data_ptr(), len(x), out.data_ptr(), threads()
            )
        return out

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows [rows, width] behind the model's final norm, as its base model returns them."""
        norm: Any = self.model.base_model.norm
        return norm(x.to(norm.weight.dtype)).float()

    def _embedded(self, batch: RaggedBatch) -> torch.Tensor:
        """Return the embeddings of the batch's tokens, fp32 [rows, width]; RequestError for unknown tokens."""
        table = self.structure.table
        if table is None:
            return self.structure.base.embed_tokens(batch.tokens).float()
        tokens = array("q")
        for span in batch.spans:
            tokens.extend(span.tokens)
        if not 0 <= min(tokens) <= max(tokens) < table.outputs:
            raise RequestError(f"tokens are from 0 to {table.outputs - 1}, not {min(tokens)} to {max(tokens)}")
        x = torch.empty(len(tokens), table.inputs)
        with self._in_memory(EMBEDDING):
            functions().ds_rows(  # type: ignore[union-attr]
                self.structure.table, tokens.buffer_info()[0], len(tokens), self.structure.kind, x.data_ptr()
            )
        return x

    def layers(self, batch: RaggedBatch, x: torch.Tensor, first: int, count: int, parts: int) -> None:
        """Run layers on hidden states, in place; attention writes keys and values to the cache.

        Args:
            batch: batch with the rows.
            x: hidden states, fp32 [rows, width].
            first: index of the first layer.
            count: number of layers.
            parts: `ATTENTION`, `FEED_FORWARD` or `BOTH`.
        """
        self._bind()
        self._turn(self.structure.base.rotary_emb, max(span.end for span in batch.spans))
        spans, pages, row = array("q"), array("q"), 0
        for span in batch.spans:
            spans.extend((row, len(span.tokens), span.start, len(pages)))
            pages.extend(span.pages)
            row += len(span.tokens)
        own = self._lora.current(self.weights)
        description = Pass(
            x=x.data_ptr(), spans=spans.buffer_info()[0], pages=pages.buffer_info()[0],
            cosines=self._cosines.data_ptr(), sines=self._sines.data_ptr(),
            rows=row, sequences=len(batch.spans), page_size=batch.page_size, threads=threads(),
        )  # fmt: skip
        # Layers that are gathered before use run one by one.
        runs = [(layer, 1) for layer in range(first, first + count)] if self.structure.sharded else [(first, count)]
        for start, number in runs:
            adapted = adapted_rows(batch, start, own)
            description.adapters, description.adapted = ctypes.addressof(adapted), len(adapted)
            with self._in_memory(start):
                layers = ctypes.addressof(self.structure.layers[start])
                functions().ds_layers(layers, number, ctypes.byref(description), parts)  # type: ignore[union-attr]

    def bind(self, adapter: LoraAdapter) -> None:
        """Prepare an adapter for native passes; PackingError if it changes a module whose changes are not native."""
        if self.structure.blocks:
            bind(adapter, self.model, self.structure.blocks, self.structure.layers)

    def settle(self) -> None:
        """Move `PackedWeight` modules of the model to huge pages, which are faster to read, if the system has any."""
        room, moved = Room(), 0
        for module in self.model.modules() if room.huge else ():
            moved += module.settle(room.take) if isinstance(module, PackedWeight) else 0
            if moved > MOVED:  # otherwise the freed memory stays with the process
                get_accelerator().empty_cache()
                moved = 0
        if moved:
            get_accelerator().empty_cache()

    def pack(self) -> None:
        """Pack the model's bf16 matrices in place, in 12 bits per element: 25 % fewer bytes, with unchanged logits.

        Raises:
            ArgumentError: a parameter belongs to an engine or has a gradient.
        """
        self.structure.seen, self.structure.tensors = StructureSnapshot(), ([], [])  # would keep the unpacked weights
        self.weights.forget()
        try:
            pack_lossless(self.model, self.structure.uneven)
        finally:
            self._read_again()
        get_accelerator().empty_cache()

    def _read_again(self) -> None:
        """Read the changed structure of the model; if it is unsupported, later passes use the `PagedExecutor`."""
        try:
            self.structure = self._read()
        except PackingError as error:
            warn_once(f"{type(self.model).__name__} runs through its own modules, not in native passes: {error}")
            self.structure.blocks, self.structure.seen, self.structure.tensors = [], StructureSnapshot(), ([], [])


def _window(rule: Mask, model: nn.Module) -> int:
    """Return the window of a sliding-window mask, or 0 for a causal mask; raise PackingError for other masks."""
    shape = mask_shape(rule.function, model)
    if shape.chunk:
        raise PackingError("its rows see others than the last keys")
    return shape.window


# -- proof -------------------------------------------------------------------------------------------------------------


@contextmanager
def _record_streams(blocks: list[Any], streams: list[list[torch.Tensor]]) -> Iterator[None]:
    """Context that records the residual stream of each layer: at its start, between attention and MLP, and at its end.

    Args:
        blocks: decoder layers.
        streams: a list of three elements for each layer, set to the recorded fp32 tensors [rows, width].
    """

    def before(layer: int, place: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            streams[layer][place] = (args[0] if args else kwargs["hidden_states"])[0].float().clone()

        return hook

    def after(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            streams[layer][2] = (output[0] if isinstance(output, tuple) else output)[0].float().clone()

        return hook

    handles = []
    for layer, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(before(layer, 0), with_kwargs=True))
        handles.append(block.post_attention_layernorm.register_forward_pre_hook(before(layer, 1), with_kwargs=True))
        handles.append(block.register_forward_hook(after(layer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def prove(executor: FusedExecutor, batch: RaggedBatch) -> str | None:
    """Compare attention and MLP of each layer in the native library with those of the model's modules.

    Args:
        executor: native executor.
        batch: batch that runs through the modules; each native part then runs on the recorded input of its module, and
            overwrites the batch's pages in the cache.

    Returns:
        None if the outputs agree within tolerances on the rows of `clear_rows`, else the reason: the first difference,
        or a layer with too few such rows.
    """
    blocks = executor.structure.blocks
    streams = [[torch.empty(0)] * 3 for _ in blocks]
    store = executor.store
    executor.plain.store = KVCache.resized(store, store.pages, store.size)
    with _record_streams(blocks, streams):
        executor.plain.run(batch)
    executor.plain.store = store
    dtype = store.layers[0][0].dtype
    share, rounding = TOLERANCE[dtype]
    for layer, of_layer in enumerate(streams):
        for part, name in ((ATTENTION, "attention"), (FEED_FORWARD, "feed-forward part")):
            before, right = of_layer[part - 1], of_layer[part]
            x = before.clone()
            executor.layers(batch, x, layer, 1, part)
            if part == FEED_FORWARD:
                clear = clear_rows(blocks[layer], before)
                if 4 * len(clear) < len(before):
                    return f"the router of layer {layer} decides by less than a rounding"
                x, right, before = x[clear], right[clear], before[clear]
            error, change = float((x - right).norm()), float((right - before).norm())
            if not error <= share * change + rounding * float(right.norm()):
                stream = f"changes the stream by {change:.3g}, the native one is {error:.3g} off"
                return f"the {name} of layer {layer} {stream}"
    return None
