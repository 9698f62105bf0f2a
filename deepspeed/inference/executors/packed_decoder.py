"""Device executor: passes of common decoder structures by the package's kernels and torch's products, without modules.

All integers of a pass go to the device in one copy. `PackedDecoder.compute` only launches, with grids and allocations
that follow from the sizes of its inputs, so a pass of fixed sizes can be captured as a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from deepspeed.errors import PackingError, RequestError
from deepspeed.foundation.log import warn_once
from deepspeed.foundation.transformers_model import text_config
from deepspeed.inference.executors.attention_ways import AttentionWay, LayerAttention
from deepspeed.inference.executors.device_structure import DeviceLayer, DeviceStructure
from deepspeed.inference.executors.engine_weights import EngineWeights
from deepspeed.inference.executors.paged import KVCache, PagedExecutor
from deepspeed.inference.executors.pass_inputs import PassInputs, PassSizes, Tiling
from deepspeed.inference.executors.ragged_batch import ChosenTokens, RaggedBatch, sent
from deepspeed.inference.executors.rotation_table import rotations
from deepspeed.inference.executors.single_row_pass import SingleRowPass
from deepspeed.inference.executors.structure import Reader
from deepspeed.inference.request import length_limit, packed_limit
from deepspeed.inference.trained_lora import TrainedLora
from deepspeed.ops.triton import rows, sampling
from deepspeed.ops.triton.attention import Kernels, tile_rows
from deepspeed.ops.triton.row_variants import rotation_variants, sampling_variants
from deepspeed.ops.triton.variants import KernelForm, attention_variants

LONGEST_TABLE = 1 << 17  # positions of the rotation table at the start, at most
STEP = 4096  # positions by which it grows for models without a limit
PAIRS = 8  # the two halves of its rows begin at multiples of so many elements: kernels read 16 bytes at once


class CapturedPasses(Protocol):
    """Captured passes of a `PackedDecoder`."""

    def run(self, batch: RaggedBatch) -> torch.Tensor | None:
        """Run a batch as `PackedDecoder.run`; None: this batch runs eagerly."""
        ...


class PackedDecoder:
    """Executor without modules, for a GPU; the pages are those of a `PagedExecutor`.

    A pass goes through the modules (`plain`) if a row has an adapter, if hidden states are requested, or if the model's
    structure has become unsupported.

    Args:
        paged: executor whose `ways` are settled: every layer has one.
        kernels: kernels of rows, packed products and sampling.
        block: rows of a product. Passes are padded to a multiple of it and multiplied block by block, so that a row's
            bits do not depend on the number of rows; 0: all rows of a pass in one product.
        interleaved: whether rotary embeddings rotate pairs of adjacent elements (as GPT-J); False: an element with the
            one half the rotary size after it (as GPT-NeoX and Llama).

    Attributes:
        samples: whether tokens can be chosen on the device.
        captured: captured passes, which `run` tries first; None: there are none.
        version: number that changes when `compute` uses other addresses than before: weights, pages or the rotation
            table were replaced. `native` brings it up to date.

    Raises:
        PackingError: the model's structure, a layer's attention or a kernel is not supported; the message says which.
    """

    kind = "packed"
    unfused = "its native form is for CPUs"

    def __init__(self, paged: PagedExecutor, kernels: Kernels, block: int = 0, interleaved: bool = False) -> None:
        self.plain, self.model, self.kernels = paged, paged.model, kernels
        self.block, self.interleaved = block, interleaved
        self.weights, self._lora = EngineWeights(self.model), TrainedLora(self.model)
        self.captured: CapturedPasses | None = None
        self.version = 0
        self._pools: list[weakref.ref[torch.Tensor]] = []  # a released cache is not kept
        self._attention: list[tuple[AttentionWay, LayerAttention]] = []
        self._table = torch.empty(0)
        self._rotary = self._start = 0  # rotated places, and where a row's sines begin
        self._cap: float | None = getattr(text_config(self.model, decoder=True), "final_logit_softcapping", None)
        limits = [limit for limit in (length_limit(self.model), packed_limit(self.model)) if limit is not None]
        self._limit = min(limits, default=None)
        self.structure = self._read()
        self.reserve(min(self._limit or STEP, LONGEST_TABLE))
        self._prepare()

    @property
    def store(self) -> KVCache:
        """Pages of keys and values, those of `plain`."""
        return self.plain.store

    @store.setter
    def store(self, store: KVCache) -> None:
        self.plain.store = store

    @property
    def ways(self) -> dict[int, tuple[AttentionWay, LayerAttention]]:
        """How the attention of each layer is computed."""
        return self.plain.ways

    @property
    def device(self) -> torch.device:
        """Device of the passes."""
        return self.store.layers[0][0].device

    # -- what the model has ----------------------------------------------------------------------------------------

    def _read(self) -> DeviceStructure:
        self.weights.look()
        self.weights.settle()
        if self._lora.switches():
            raise PackingError("it has LoRA layers")
        structure = Reader(self.model, self.weights, sandwich=True, sliced=True, float8=True).read(DeviceStructure)
        if structure.sharded:
            raise PackingError("an engine shards its weights")
        layers = range(len(structure.blocks))
        if set(self.store.layers) != set(layers):
            raise PackingError("its layers and those of its cache differ")
        if missing := [number for number in layers if number not in self.ways]:
            raise PackingError(f"layer {missing[0]} attends over gathered pages")
        self._attention = [self.ways[number] for number in layers]
        self.tiling = self._check_heads(structure)
        self.version += 1
        return structure

    def _check_heads(self, structure: DeviceStructure) -> Tiling:
        """Return the tiling of all layers; PackingError if heads do not fit the matrices or tilings differ."""
        tilings = set()
        for number, (layer, (_, attention)) in enumerate(zip(structure.layers, self._attention, strict=True)):
            keys, values = self.store.layers[number]
            heads, cached, size = attention.heads, attention.cached, attention.head
            same = keys.shape == values.shape and keys.dtype == structure.dtype == attention.dtype
            outputs = [size for part in layer.qkv.parts for size in part.sizes]
            if not same or attention.value != size or outputs != [heads * size, cached * size, cached * size]:
                raise PackingError(f"layer {number} attends with heads of {size} in a way that kernels do not")
            if attention.sinks:
                raise PackingError("it has attention sinks")
            variants = attention_variants(structure.dtype, size, size, self.store.size, attention.cap is not None)
            tilings.add(Tiling(*tile_rows(variants, heads, cached)))
        if len(tilings) != 1:
            raise PackingError("its layers have heads of several kinds")
        return tilings.pop()

    def _prepare(self) -> None:
        """Load the kernels. PackingError if one is missing; those of sampling may be."""
        structure = self.structure
        needed = structure.variants()
        for _, attention in self._attention:
            sizes = attention.head, attention.value
            needed.update(rotation_variants(structure.dtype, *sizes, self.interleaved, self._rotary))
        self._single: SingleRowPass | None = None
        rotary = 0 if self.interleaved else self._rotary
        if not self.block and SingleRowPass.fits(structure, self._attention, rotary):
            self._single = SingleRowPass(structure, self._attention)
            needed.update(self._single.variants())
        self._need(needed)
        choosing = set(sampling_variants(structure.dtype).values())
        self.samples = all(map(self.kernels.has, choosing))
        self.kernels.prepare(choosing if self.samples else ())

    def _need(self, variants: Iterable[KernelForm]) -> None:
        for variant in sorted(variants, key=lambda variant: variant.name):
            if not self.kernels.has(variant):
                raise PackingError(f"{variant.name} is not compiled")
        self.kernels.prepare(variants)

    @property
    def vocabulary(self) -> int:
        """Number of logits of a row."""
        return sum(size for part in self.structure.head.parts for size in part.sizes)

    @torch.no_grad()
    def reserve(self, length: int) -> None:
        """Make the rotation table long enough for contexts of `length` tokens."""
        have = len(self._table)
        if length <= have:
            return
        most = length if have == 0 else max(length, have + STEP)
        most = max(length, min(most, self._limit)) if self._limit else most
        cosines, sines = rotations(self.structure.base.rotary_emb, 0, most, self.device)
        rotary = cosines.shape[1]
        if rotary > self._attention[0][1].head:
            raise PackingError(f"its rotations have {rotary} places, more than its heads")
        if self.interleaved:
            cosines, sines = (each[:, : rotary // 2].repeat_interleave(2, 1) for each in (cosines, sines))
        start = -(-rotary // PAIRS) * PAIRS
        table = torch.zeros(most, 2 * start, dtype=self.structure.dtype, device=self.device)
        table[:, :rotary], table[:, start : start + rotary] = cosines, sines
        self._table, self._rotary, self._start = table, rotary, start
        self.version += 1

    # -- passes ----------------------------------------------------------------------------------------------------

    def inputs(self, sizes: PassSizes) -> PassInputs:
        """Return new inputs on the device."""
        return PassInputs(sizes, self.store.size, self.device)

    def native(self, batch: RaggedBatch) -> bool:
        """Bring weights, pages and rotations up to date; return whether the batch runs without modules.

        Raises:
            RequestError: a token is outside of the embedding table.
        """
        self.weights.settle()
        self.look()
        if not self.structure.blocks or batch.wants_hidden:
            return False
        if any(span.adapter is not None for span in batch.spans):
            warn_once(f"{type(self.model).__name__}: passes with rows of adapters go through the model's modules")
            return False
        tokens, most = [token for span in batch.spans for token in span.tokens], self.structure.entries
        if not 0 <= min(tokens) <= max(tokens) < most:
            raise RequestError(f"tokens are from 0 to {most - 1}, not {min(tokens)} to {max(tokens)}")
        pools = [pool for number in range(len(self._attention)) for pool in self.store.layers[number]]
        if len(pools) != len(self._pools) or any(a is not b() for a, b in zip(pools, self._pools, strict=True)):
            self._pools, self.version = list(map(weakref.ref, pools)), self.version + 1
        self.reserve(max(span.end for span in batch.spans))
        return True

    def look(self) -> None:
        """Read the model's structure again if modules, or weights in memory, were replaced."""
        if not (self.structure.blocks and (self.structure.changed() or self._lora.replaced())):
            return
        try:
            self.structure = self._read()
            self._prepare()
        except PackingError as error:
            warn_once(f"{type(self.model).__name__} runs through its own modules, not by kernels alone: {error}")
            self.structure.blocks = []
            self.structure.forget()

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Run a batch and return the requested logits, [rows with logits, vocabulary].

        With `batch.sampling`, tokens are chosen on the device; the host waits when it reads them.

        Raises:
            RequestError: a token is outside of the embedding table.
        """
        if not self.native(batch):
            batch.know_tokens()
            return self.plain.run(batch)
        if self.captured is not None and (logits := self.captured.run(batch)) is not None:
            return logits
        inputs = self.inputs(PassSizes.of(batch.spans, self.store.size, self.tiling, max(self.block, 1)))
        inputs.fill(batch, self.tiling)
        logits = self.compute(inputs)
        self.finish(batch, inputs, logits)
        return logits[: sum(span.wanted for span in batch.spans)]

    @torch.no_grad()
    def compute(self, inputs: PassInputs) -> torch.Tensor:
        """Launch a pass and return its logits, [wanted rows with padding, vocabulary] in the model's dtype.

        Nothing is read by the host, and grids and allocations depend on `inputs.sizes` alone.
        """
        structure, kernels = self.structure, self.kernels
        rotation = self._table.index_select(0, inputs.positions)
        places = rotation[:, : self._rotary], rotation[:, self._start : self._start + self._rotary]
        change = structure.base.embed_tokens(inputs.tokens)
        if self._single is not None and len(inputs.tokens) == 1:
            normed = self._single(kernels, change, places, inputs, self.store.layers)
        else:
            normed = self._layers(change, places, inputs)
        if not inputs.sizes.wanted:  # part of a prompt; kernels are not launched for no rows
            return normed.new_empty(0, self.vocabulary)
        wanted = normed if inputs.sizes.every else normed.index_select(0, inputs.wanted)
        (logits,) = structure.head(kernels, wanted, self.block)
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    def _layers(
        self, change: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], inputs: PassInputs
    ) -> torch.Tensor:
        """Return rows after the final norm, [rows, width], for embedded tokens."""
        structure, kernels, stream = self.structure, self.kernels, None
        for number, layer in enumerate(structure.layers):
            normed, stream = layer.before(kernels, change, stream)
            change = self._attend(number, layer, normed, places, inputs)
            if layer.after_attention is not None:
                change, _ = layer.after_attention(kernels, change)
            normed, stream = layer.after(kernels, change, stream)
            gate, up = layer.gate_up(kernels, normed, self.block)
            (change,) = layer.down(kernels, rows.gated(kernels, gate, up, layer.activation), self.block)
            if layer.after_mlp is not None:
                change, _ = layer.after_mlp(kernels, change)
        return structure.norm(kernels, change, stream)[0]

    def _attend(
        self,
        number: int,
        layer: DeviceLayer,
        x: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor],
        inputs: PassInputs,
    ) -> torch.Tensor:
        """Return the attention of a layer, [rows, width], for normed rows; keys and values go to their pages."""
        way, attention = self._attention[number]
        q, k, v = (part.unflatten(1, (-1, attention.head)) for part in layer.qkv(self.kernels, x, self.block))
        q = q if layer.query is None else _normed(self.kernels, layer.query, q)
        k = k if layer.key is None else _normed(self.kernels, layer.key, k)
        pools = self.store.layers[number]
        q = rows.rotate_into_pages(self.kernels, (q, k, v), places, pools, inputs.slots, self.interleaved)
        attended = way.attend(attention, q, pools, inputs, None)
        return layer.out(self.kernels, attended.flatten(1), self.block)[0]

    # -- tokens ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def choose(
        self, inputs: PassInputs, logits: torch.Tensor, seen: torch.Tensor | None = None, draws: bool = True
    ) -> torch.Tensor:
        """Launch the choice of the next tokens, int32 [wanted rows with padding] on the device; -1: not finite.

        Args:
            inputs: inputs of the pass, with options, seeds and counts.
            logits: what `compute` returned.
            seen: entries of `RowSampling.seen` on the device, for penalties; None: no row has any.
            draws: whether random numbers are drawn; False: all rows are greedy.
        """
        table = None
        if seen is not None:
            table = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
            table.index_put_((seen[0], seen[1]), seen[2].to(torch.int32))
        numbers = sampling.draw(self.kernels, inputs.seeds, inputs.counts) if draws else None
        return sampling.sample(self.kernels, logits, inputs.options, numbers, table)

    def finish(self, batch: RaggedBatch, inputs: PassInputs, logits: torch.Tensor) -> None:
        """Choose the tokens of a batch with `batch.sampling`, and begin to copy them to the host."""
        sampling = batch.sampling
        if sampling is None or not len(sampling.seeds) or not self.samples:
            return
        seen = None if sampling.seen is None else sent(sampling.seen, self.device)
        tokens = self.choose(inputs, logits, seen, bool(sampling.options[:, 0].any()))
        sampling.chosen = ChosenTokens(tokens[: len(sampling.seeds)])

    # -- other calls of executors ----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}, {self.structure.dtype}, block={self.block})"


def _normed(kernels: Kernels, norm: Any, heads: torch.Tensor) -> torch.Tensor:
    """Return queries or keys [rows, heads, size], normed head by head, or all heads of a row together."""
    if norm.part.joint:
        return norm(kernels, heads.flatten(1))[0].view(heads.shape)
    return norm(kernels, heads)[0]
