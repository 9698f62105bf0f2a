"""Native executor: runs common decoder structures (such as Llama's) by a few calls of the native CPU library."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import PackingError, RequestError
from deepspeed.foundation.log import warn_once
from deepspeed.inference.adapters import LoraAdapter
from deepspeed.inference.executors.engine_weights import EngineWeights
from deepspeed.inference.executors.mask_shape import mask_shape
from deepspeed.inference.executors.native_adapters import adapted_rows, bind
from deepspeed.inference.executors.native_experts import clear_rows
from deepspeed.inference.executors.native_structure import NativeStructure
from deepspeed.inference.executors.native_tensors import Heads, Pass, functions
from deepspeed.inference.executors.paged import KVCache, Mask, PagedExecutor
from deepspeed.inference.executors.ragged_batch import RaggedBatch
from deepspeed.inference.executors.rotation_table import CALL, rotations
from deepspeed.inference.executors.structure import EMBEDDING, HEAD, Reader
from deepspeed.inference.quantization.lossless_bf16 import Room
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.inference.quantization.quantization import pack_lossless
from deepspeed.inference.request import packed_limit
from deepspeed.inference.trained_lora import TrainedLora
from deepspeed.native import KINDS, threads

LARGEST_HEAD = 512  # maximum head size of attention.cpp
ATTENTION, FEED_FORWARD, BOTH = 1, 2, 3
MOVED = 32 << 20  # bytes after which freed memory is returned to the system
# Tolerances of a part's change to the residual stream: relative to its size, and to the rounding of the stream.
TOLERANCE = {torch.float32: (1e-3, 1e-5), torch.bfloat16: (0.03, 0.003)}


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

    def _read(self) -> NativeStructure:
        self.weights.look()
        self.weights.settle()
        structure, scales = Reader(self.model, self.weights).read(NativeStructure), self._scales
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
        most = max(end, 2 * have, CALL)
        most = min(most, max(end, self._furthest)) if self._furthest else most  # longer ones would change all rotations
        more = rotations(rotary, have, most)
        parts = zip((self._cosines, self._sines), more, strict=True) if have else ((new,) for new in more)
        self._cosines, self._sines = (torch.cat(part).contiguous() for part in parts)

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
        self.structure.forget()  # it would keep the unpacked weights
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
            self.structure.blocks = []
            self.structure.forget()


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
