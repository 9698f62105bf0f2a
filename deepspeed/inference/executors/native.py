"""Native executor: a decoder of well-known structure in few native calls."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import PackingError, RequestError
from deepspeed.foundation.log import warn_once
from deepspeed.inference.executors.decoder_structure import Reader, Structure, address
from deepspeed.inference.executors.native_tensors import Heads, Pass, functions
from deepspeed.inference.executors.paged import KVCache, Mask, PagedExecutor
from deepspeed.inference.executors.ragged_batch import RaggedBatch
from deepspeed.inference.quantization.lossless_bf16 import Room
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.inference.quantization.quantization import pack_lossless
from deepspeed.inference.request import length_limit, packed_limit
from deepspeed.native import KINDS, threads

LARGEST_HEAD = 512  # elements, of attention.cpp
TABLE = 512  # positions whose rotations are computed at a time
ATTENTION, FEED_FORWARD, BOTH = 1, 2, 3
MOVED = 32 << 20  # bytes after which freed memory is given back
FURTHEST = 1 << 17  # position from which a row's window is looked for, where the model has no limit
# A part's change to the stream: how far ours may be off, of its size, and of the stream that rounds it.
TOLERANCE = {torch.float32: (1e-3, 1e-5), torch.bfloat16: (0.03, 0.003)}


class FusedExecutor:
    """Runs batches like the executor it is made of, whose pages it shares.

    Args:
        paged: the model's other way, after a pass, so that its layers have told what they ask of attention.

    Raises:
        PackingError: the model has another shape.
    """

    kind = "packed"

    def __init__(self, paged: PagedExecutor) -> None:
        if functions() is None:
            raise PackingError("the native library is not there")
        self.plain, self.model, self.store = paged, paged.model, paged.store
        self._asked = dict(paged.scales), dict(paged.rules)
        self._windows = {layer: _window(rule, self.model) for layer, rule in paged.rules.items()}
        self._bound: tuple[Any, ...] = ()
        self._cosines = self._sines = torch.empty(0, 0)
        self._furthest = packed_limit(self.model)
        self.structure = self._read()

    def _read(self) -> Structure:
        found = Reader(self.model).read()
        scales = self._asked[0]
        if set(self.store.layers) != set(range(len(found.blocks))) or set(scales) != set(self.store.layers):
            raise PackingError("its layers and those of its cache differ")
        self._turn(found.rotary, 1)
        for at, layer in enumerate(found.layers):
            keys, values = self.store.layers[at]
            _, cached, size = keys.shape
            count = layer.q.outputs // size
            fits = keys.shape == values.shape and keys.dtype in (torch.float32, torch.bfloat16) and size % 16 == 0
            rows = [layer.q.outputs, layer.k.outputs, layer.v.outputs, layer.out.inputs]
            fits = fits and rows == [count * size, cached * size, cached * size, count * size] and size <= LARGEST_HEAD
            if not fits or count % cached or not (scales[at] or 0) > 0:
                raise PackingError(f"layer {at} attends with heads of {size} in a way that the native one does not")
            layer.heads = Heads(count=count, cached=cached, size=size, rotary=self._cosines.shape[1])
            layer.heads.window, layer.heads.scale = self._windows[at], scales[at]
            layer.heads.kind = KINDS[keys.dtype]
        self._bound = ()
        return found

    def _bind(self) -> None:
        """Point the layers at the pages of the store."""
        pools = tuple(self.store.layers[at] for at in range(len(self.structure.blocks)))
        if len(pools) == len(self._bound) and all(a is b for a, b in zip(pools, self._bound, strict=True)):
            return
        for layer, (keys, values) in zip(self.structure.layers, pools, strict=True):
            layer.heads.keys, layer.heads.values = keys.data_ptr(), values.data_ptr()
        self._bound = pools

    def _turn(self, rotary: Any, end: int) -> None:
        """Rotations of all positions before `end`, as the model's own module gives them."""
        have = len(self._cosines)
        if end <= have:
            return
        most = max(end, 2 * have, TABLE)
        most = min(most, max(end, self._furthest)) if self._furthest else most  # farther ones change the others
        made = [[self._cosines], [self._sines]]
        for start in range(have, most, TABLE):
            at = torch.arange(start, min(start + TABLE, most))[None]
            for parts, found in zip(made, rotary(torch.zeros(1), at), strict=True):
                parts.append(found[0].float())
        if have == 0:
            made = [parts[1:] for parts in made]
        self._cosines, self._sines = (torch.cat(parts).contiguous() for parts in made)
        if self._cosines.dim() != 2 or self._cosines.shape != self._sines.shape or self._cosines.shape[1] % 2:
            raise PackingError(f"its rotations have shape {tuple(self._cosines.shape)}")

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits of the wanted rows in fp32, [wanted, vocabulary]; a row's bits depend on its own sequence alone."""
        if self.structure.changed():
            self._again()
        self.plain.store = self.store
        if not self.structure.blocks:
            return self.plain.run(batch)
        x = self._embedded(batch)
        self.layers(batch, x, 0, len(self.structure.blocks), BOTH)
        if any(span.wanted < len(span.tokens) for span in batch.spans):
            x = x[batch.wanted]
        out = x.new_empty(len(x), self.structure.head.outputs)
        functions().ds_head(  # type: ignore[union-attr]
            self.structure.norm, self.structure.head, x.data_ptr(), len(x), out.data_ptr(), threads()
        )
        return out

    def _embedded(self, batch: RaggedBatch) -> torch.Tensor:
        """Rows of the table for the tokens, [rows, width] of fp32."""
        table = self.structure.table
        if table is None:
            return self.structure.embedding(batch.tokens).float()
        tokens = array("q")
        for span in batch.spans:
            tokens.extend(span.tokens)
        if not 0 <= min(tokens) <= max(tokens) < table.outputs:
            raise RequestError(f"tokens are from 0 to {table.outputs - 1}, not {min(tokens)} to {max(tokens)}")
        x = torch.empty(len(tokens), table.inputs)
        functions().ds_rows(  # type: ignore[union-attr]
            table, tokens.buffer_info()[0], len(tokens), self.structure.kind, x.data_ptr()
        )
        return x

    def layers(self, batch: RaggedBatch, x: torch.Tensor, first: int, count: int, parts: int) -> None:
        """Take rows `x` [rows, width] of fp32 through layers, in place."""
        self._bind()
        self._turn(self.structure.rotary, max(span.end for span in batch.spans))
        spans, pages, row = array("q"), array("q"), 0
        for span in batch.spans:
            spans.extend((row, len(span.tokens), span.start, len(pages)))
            pages.extend(span.pages)
            row += len(span.tokens)
        made = Pass(
            x=x.data_ptr(), spans=spans.buffer_info()[0], pages=pages.buffer_info()[0],
            cosines=self._cosines.data_ptr(), sines=self._sines.data_ptr(),
            rows=row, sequences=len(batch.spans), page_size=batch.page_size, threads=threads(),
        )  # fmt: skip
        start = address(self.structure.layers[first])
        functions().ds_layers(start, count, ctypes.byref(made), parts)  # type: ignore[union-attr]

    def settle(self) -> None:
        """Have the model's packed integers in huge pages: they come from memory up to a third faster."""
        room, moved = Room(), 0
        for module in self.model.modules() if room.huge else ():
            moved += module.settle(room.take) if isinstance(module, PackedWeight) else 0
            if moved > MOVED:  # what they leave would stay with the process
                get_accelerator().empty_cache()
                moved = 0
        if moved:
            get_accelerator().empty_cache()

    def pack(self) -> None:
        """Hold the model's bf16 matrices in 12 bits from now on: a third fewer bytes to read, and the same logits.

        Raises:
            ArgumentError: its weights are trained.
        """
        self.structure.seen, self.structure.tensors = [], ([], [])  # which would keep them beside
        try:
            pack_lossless(self.model, self.structure.uneven)
        finally:
            self._again()
        get_accelerator().empty_cache()

    def _again(self) -> None:
        """Read the model anew: its modules or its memory are others than before."""
        try:
            self.structure = self._read()
        except PackingError as error:
            warn_once(f"{type(self.model).__name__} goes on through its own modules, not in native passes: {error}")
            self.structure.blocks, self.structure.seen, self.structure.tensors = [], [], ([], [])


def _window(rule: Mask, model: nn.Module) -> int:
    """How many keys a row sees, itself included; 0: all before it.

    Raises:
        PackingError: it sees others than the last ones.
    """
    zero = torch.zeros((), dtype=torch.long)

    def seen(query: int) -> torch.Tensor:
        return rule.function(zero, zero, torch.tensor(query), torch.arange(query + 1)).reshape(-1)

    furthest = min(length_limit(model) or FURTHEST, FURTHEST)
    window = int(seen(furthest - 1).sum())
    for query in {0, 1, window - 1, window, window + 1, window + window // 2, furthest // 2, furthest - 1}:
        if not 0 <= query < furthest:
            continue
        at = torch.arange(query + 1)
        found = seen(query)
        if found.shape != at.shape or not torch.equal(found, at > query - window):
            raise PackingError("its rows see others than the last keys")
    return 0 if window >= furthest else window


# -- proof -------------------------------------------------------------------------------------------------------------


@contextmanager
def _watched(blocks: list[Any], found: list[list[torch.Tensor]]) -> Iterator[None]:
    """Note the stream before each layer, between its parts, and after it."""

    def before(at: int, where: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            found[at][where] = (args[0] if args else kwargs["hidden_states"])[0].float().clone()

        return hook

    def after(at: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            found[at][2] = (out[0] if isinstance(out, tuple) else out)[0].float().clone()

        return hook

    handles = []
    for at, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(before(at, 0), with_kwargs=True))
        handles.append(block.post_attention_layernorm.register_forward_pre_hook(before(at, 1), with_kwargs=True))
        handles.append(block.register_forward_hook(after(at)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def prove(executor: FusedExecutor, batch: RaggedBatch) -> str | None:
    """None if each part of each layer changes the stream as the model's own modules do, else where it does not.

    Args:
        batch: run through the modules, and part by part on what these were given.
    """
    blocks = executor.structure.blocks
    empty = torch.empty(0)
    found = [[empty] * 3 for _ in blocks]
    store = executor.store
    executor.plain.store = KVCache.resized(store, store.pages, store.size)
    with _watched(blocks, found):
        executor.plain.run(batch)
    executor.plain.store = store
    dtype = store.layers[0][0].dtype
    share, rounding = TOLERANCE[dtype]
    for at, streams in enumerate(found):
        for part, name in ((ATTENTION, "attention"), (FEED_FORWARD, "feed-forward part")):
            before, right = streams[part - 1], streams[part]
            x = before.clone()
            executor.layers(batch, x, at, 1, part)
            error, change = float((x - right).norm()), float((right - before).norm())
            if not error <= share * change + rounding * float(right.norm()):
                return f"the {name} of layer {at} changes the stream by {change:.3g}, the native one is {error:.3g} off"
    return None
