"""Ragged engine: maps sequence ids and their new tokens to the logits of each sequence's last token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import nn

from deepspeed.errors import ArgumentError, MemoryExhaustedError, NotAvailableError
from deepspeed.foundation.log import logger
from deepspeed.foundation.transformers_model import vocabulary_size
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.executors.select import device_of, exclusive_pass, select_executor, settle_attention, warn_of
from deepspeed.inference.kv_cache import BlockPool
from deepspeed.inference.request import length_limit, packed_limit
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig, check_supported
from deepspeed.inference.v2.scheduling_utils import SchedulingError, SchedulingResult

BLOCK = 64  # tokens per block
ENGINE_FILE = "ds_engine.json"


@dataclass
class DSSequenceDescriptor:
    """State of one sequence.

    Args:
        uid: id chosen by the caller.
        seen_tokens: number of tokens in the KV cache.
        in_flight_tokens: number of tokens in the current pass.
        blocks: numbers of its cache blocks.
        max_context: maximum number of tokens.
    """

    uid: int
    seen_tokens: int = 0
    in_flight_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    max_context: int = 0

    @property
    def cur_allocated_blocks(self) -> int:
        return len(self.blocks)


class InferenceEngineV2:
    """Engine that runs ragged batches over a paged KV cache, with 64 tokens per block.

    Args:
        model: a causal LM of Transformers that can be batched; set to evaluation mode.
        engine_config: limits and memory; None: defaults.

    Raises:
        NotAvailableError: the model cannot be batched, or a key requests a feature that this version does not have.
        MemoryExhaustedError: no memory is left for the KV cache.
    """

    def __init__(self, model: nn.Module, engine_config: RaggedInferenceEngineConfig | None = None) -> None:
        self._config = engine_config or RaggedInferenceEngineConfig()
        check_supported(self._config)
        self._model = model.eval()
        executor, why = select_executor(model, packed=bool(self._config.lossless_weights))
        if executor is None:
            raise NotAvailableError(f"{type(model).__name__} cannot be batched over pages: {why}; use its generate")
        warn_of(model, executor, why)
        own = [limit for limit in (length_limit(model), packed_limit(model)) if limit is not None]
        self._max_context = min([self._config.state_manager.max_context, *own])
        probed = executor.store
        self._blocks = BlockPool(self._count(probed.bytes_per_page() // probed.size * BLOCK), BLOCK, reuse=False)
        executor.store = probed.resized(self._blocks.count, BLOCK)
        self._executor = settle_attention(executor, BLOCK)
        self._sequences: dict[int, DSSequenceDescriptor] = {}
        size = vocabulary_size(model, decoder=True)
        config = SimpleNamespace(max_seq_length=length_limit(model) or self._max_context, vocab_size=size)
        self._policy = SimpleNamespace(_checkpoint_engine=SimpleNamespace(model_config=config))

    @property
    def free_blocks(self) -> torch.Tensor:
        """Number of free blocks of each cache group: int64 [groups]."""
        return torch.tensor([self._blocks.available])

    @property
    def n_kv_cache_groups(self) -> int:
        """Number of cache groups (layers that share a block table); always 1."""
        return 1

    def model(self) -> nn.Module:
        return self._model

    def put(
        self, batch_uids: Iterable[int], batch_tokens: Iterable[torch.Tensor], do_checks: bool = True
    ) -> torch.Tensor:
        """Run one pass over the new tokens of sequences; unknown ids start new sequences.

        Args:
            batch_uids: distinct ids of the sequences.
            batch_tokens: new tokens of each, as 1-D integer tensors.
            do_checks: call `can_schedule` first.

        Returns:
            Logits of each sequence's last token, [sequences, vocabulary].

        Raises:
            SchedulingError: the batch exceeds a limit (only with `do_checks`).
            MemoryExhaustedError: too few blocks are free (only without `do_checks`).
            ArgumentError: no or duplicate uids, another number of token tensors, or invalid tokens.
        """
        uids, tokens = list(batch_uids), [self._check_tokens(new) for new in batch_tokens]
        if len(uids) != len(tokens) or len(set(uids)) != len(uids) or not uids:
            raise ArgumentError(f"put takes each uid once, with its tokens: {len(uids)} uids, {len(tokens)} of tokens")
        if do_checks and (result := self.can_schedule(uids, [len(new) for new in tokens])) != SchedulingResult.Success:
            raise SchedulingError(result)
        spans = []
        needed = sum(self._more(uid, len(new)) for uid, new in zip(uids, tokens, strict=True))
        if needed > self._blocks.available:
            raise MemoryExhaustedError(f"{needed} blocks are needed and {self._blocks.available} are free; flush some")
        for uid, new in zip(uids, tokens, strict=True):
            known = self._sequences.setdefault(uid, DSSequenceDescriptor(uid, max_context=self._max_context))
            known.blocks += [self._blocks.take() for _ in range(self._more(uid, len(new)))]
            spans.append(BatchSlice(new, known.seen_tokens, known.blocks))
            known.in_flight_tokens = len(new)
        even = getattr(self._executor, "even", False)
        with exclusive_pass(self._model):
            logits = self._executor.run(RaggedBatch(spans, BLOCK, device_of(self._model), even))
        for uid in uids:
            known = self._sequences[uid]
            known.seen_tokens, known.in_flight_tokens = known.seen_tokens + known.in_flight_tokens, 0
        return logits

    def query(self, uid: int, max_request_tokens: int, max_request_blocks: int) -> tuple[int, int]:
        """Return the number of new tokens that a sequence could run, and the number of new blocks for them.

        Args:
            uid: id of the sequence, which may be new.
            max_request_tokens: maximum number of new tokens.
            max_request_blocks: maximum number of new blocks.

        Returns:
            (tokens, blocks); (0, 0) if the sequence is new and the engine already tracks its maximum of sequences.
        """
        manager = self._config.state_manager
        if uid not in self._sequences and len(self._sequences) >= manager.max_tracked_sequences:
            return 0, 0
        known = self._sequences.get(uid)
        seen, held = (known.seen_tokens, len(known.blocks)) if known is not None else (0, 0)
        room = (held + max_request_blocks) * BLOCK - seen
        tokens = max(0, min(max_request_tokens, room, self._max_context - seen))
        return tokens, self._more(uid, tokens)

    def can_schedule(self, uids: Iterable[int], lengths: Iterable[int]) -> SchedulingResult:
        """Check whether a batch of the sequences `uids` with `lengths` new tokens each can run.

        Returns:
            `SchedulingResult.Success`, or the limit that the batch exceeds.
        """
        uids, lengths = list(uids), list(lengths)
        manager = self._config.state_manager
        if len(uids) > manager.max_ragged_sequence_count:
            return SchedulingResult.BatchSequenceLimitExceeded
        if len(self._sequences) + sum(uid not in self._sequences for uid in uids) > manager.max_tracked_sequences:
            return SchedulingResult.EngineSequenceLimitExceeded
        if sum(lengths) > manager.max_ragged_batch_size:
            return SchedulingResult.BatchTokenLimitExceeded
        for uid, length in zip(uids, lengths, strict=True):
            if self._seen(uid) + length > self._max_context:
                return SchedulingResult.SequenceTokenLimitExceeded
        if sum(self._more(uid, length) for uid, length in zip(uids, lengths, strict=True)) > self._blocks.available:
            return SchedulingResult.KVCacheLimitExceeded
        return SchedulingResult.Success

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Return the number of tokens that still fit into the blocks of a sequence; 0 for an unknown sequence."""
        known = self._sequences.get(uid)
        return 0 if known is None else len(known.blocks) * BLOCK - known.seen_tokens

    def flush(self, uid: int) -> None:
        """Remove a sequence and free its blocks; an unknown id only logs a warning."""
        known = self._sequences.pop(uid, None)
        if known is None:
            logger.warning("flush: sequence %s is not known", uid)
            return
        for block in known.blocks:
            self._blocks.release(block)

    def serialize(self, save_path: str) -> None:
        """Write the model, its Transformers config and its dtype to the folder `save_path`.

        `build_engine_from_ds_checkpoint` reads them. The engine's own config is not written.
        """
        folder = Path(save_path)
        self._model.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
        entries = {"version": 1, "dtype": str(next(self._model.parameters()).dtype).removeprefix("torch.")}
        (folder / ENGINE_FILE).write_text(json.dumps(entries))

    def _count(self, each: int) -> int:
        """Return the number of blocks of `each` bytes for the KV cache; MemoryExhaustedError if no memory is left."""
        manager = self._config.state_manager
        if manager.memory_config.mode in ("allocate",):
            return manager.memory_config.size
        free = psutil.virtual_memory().available - manager.memory_config.size
        useful = manager.max_tracked_sequences * -(-self._max_context // BLOCK)
        if free < each:
            raise MemoryExhaustedError(
                f"memory_config reserves {manager.memory_config.size} bytes of {free + manager.memory_config.size}: "
                f"no block of {each} is left for the cache"
            )
        return min(free // each, useful)

    def _seen(self, uid: int) -> int:
        return self._sequences[uid].seen_tokens if uid in self._sequences else 0

    def _more(self, uid: int, tokens: int) -> int:
        """Return the number of blocks that a sequence lacks for `tokens` more tokens."""
        held = len(self._sequences[uid].blocks) if uid in self._sequences else 0
        return max(0, -(-(self._seen(uid) + tokens) // BLOCK) - held)

    def _check_tokens(self, tokens: Any) -> list[int]:
        new = torch.as_tensor(tokens)
        if new.dim() != 1 or not len(new) or new.is_floating_point():
            raise ArgumentError(f"tokens are 1-D integers, at least one, not {tuple(new.shape)} of {new.dtype}")
        most = vocabulary_size(self._model, decoder=True)
        if int(new.min()) < 0 or (most is not None and int(new.max()) >= most):
            raise ArgumentError(f"tokens have to be from 0 to {most}, not {int(new.min())} to {int(new.max())}")
        return new.tolist()
