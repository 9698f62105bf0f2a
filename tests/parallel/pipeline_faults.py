"""Pipelines in which one rank is fed, made or updated in another way than the others."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm import get_rank
from deepspeed.errors import DataError, PipelineError
from deepspeed.pipe.split_model import ModelSplit
from deepspeed.zero.layout.placement import Relation, placement_of
from tests.parallel.pipeline_layers import batch_of as labelled
from tests.parallel.pipeline_layers import start
from tests.parallel.pipeline_runs import batches, config_of, deep, engine_of
from tests.parallel.tiny import raises


def begun(stage: int = 1, family: str = "GPTNeo", **changes: Any) -> Any:

    model = deep(family, 2, **changes)
    return engine_of(model, config_of(stage, 2, 2))


def other_batches() -> None:
    """A loader that shuffles on each rank for itself, for a model and for layers."""
    with begun() as engine, raises(DataError, "ranks 0 and 1", "stages of one pipeline (pp)", "micro-batch 1"):
        engine.train_batch(batches(engine.module, 0, 2, get_rank()))
    with start(1, 2, 2) as engine:
        engine.train_batch(iter([(ids, None) if get_rank() == 0 else (None, labels) for ids, labels in _feed(0, 0)]))
        with raises(DataError, "ranks 0 and 1", "entry 0"):
            engine.train_batch(iter(_feed(2, get_rank())))


def _feed(first: int, rank: int) -> list[Any]:
    return [labelled(first + at, rank) for at in range(2)]


def other_models() -> None:
    """A rank with another model ends all before anything is cut."""
    with raises(PipelineError, "rank 0 (stage 0) and rank 1 (stage 1) were given different models", "transformer.h.0"):
        begun(intermediate_size=64 + 32 * get_rank())
    with raises(PipelineError, "different models", "lm_head"):
        begun(tie_word_embeddings=get_rank() == 0)
    words = "layer 0 Embedding(12, 8) tied as 'table', part 0 there"
    with raises(PipelineError, "different models", words, "layer 0 Mixed(8"):
        from tests.parallel import pipeline_layers

        before = pipeline_layers.rows
        pipeline_layers.rows = lambda fault="": before(fault)[get_rank() :]
        try:
            start(1, 2, 2)
        finally:
            pipeline_layers.rows = before


def dropped() -> None:
    """A block that belongs to no stage."""
    from deepspeed.pipe import split_model

    before = split_model.deal
    split_model.deal = lambda costs, stages, chunks: [0, 1, 3]
    try:
        with raises(PipelineError, "bounds [0, 1, 3] do not deal the 4 blocks"):
            deep_cut()
    finally:
        split_model.deal = before


def deep_cut() -> None:

    model = deep("GPTNeo", 4)
    engine_of(model, config_of(1, 2, 2))


def untied(stage: int) -> None:
    """A head that no longer is the embedding: not placed as a copy, or a copy that goes its own way."""
    before = ModelSplit.place_shared
    ModelSplit.place_shared = lambda layout, model, modules: None
    try:
        with raises(PipelineError, "transformer.wte.weight", "stages 0 and 1", "nothing ties it"):
            begun(stage)
    finally:
        ModelSplit.place_shared = before
    with begun(stage) as engine:
        if engine.is_last_stage():
            table = next(p for n, p in engine.module.named_parameters() if n == "transformer.wte.weight")
            assert placement_of(table).relations["pp"] is Relation.PARTIAL
            from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

            safe_set_full_fp32_param(table, safe_get_full_fp32_param(table) + 0.5)
        with raises(PipelineError, "transformer.wte.weight", "stages 0 and 1", "no longer tied"):
            engine.train_batch(batches(engine.module, 0, 2, 0))


def stale() -> None:
    """A stage that missed an update; a stage that ran a micro-batch twice; a loss on two stages."""
    with begun() as engine:
        engine.train_batch(batches(engine.module, 0, 2, 0))
        engine.global_steps -= engine.is_last_stage()
        with raises(PipelineError, "rank 1 (stage 1) has made 0 updates and rank 0 (stage 0) 1"):
            engine.train_batch(batches(engine.module, 2, 2, 0))
    with begun() as engine:
        run, driver = engine._driver.backward, engine._driver

        def twice(micro: int, roots: Any, gradients: Any, through: Any) -> None:
            driver.ran["backward"] += engine.is_first_stage() and micro == 0
            run(micro, roots, gradients, through)

        driver.backward = twice
        with raises(PipelineError, "rank 0 (stage 0) ran 3 times backward in a window of 2 micro-batches"):
            engine.train_batch(batches(engine.module, 0, 2, 0))
    with begun() as engine:
        window = engine._run
        engine._run = lambda made, training: window(made, training) or [torch.ones(())] * 2
        with raises(PipelineError, "rank 0 (stage 0) counted 2 losses", "no other stage any"):
            engine.train_batch(batches(engine.module, 0, 2, 0))


def many_lengths() -> list[int]:
    """Buffers that a stage keeps after messages of many sizes."""
    with begun(0, "Llama") as engine:
        found = []
        for window in range(6):
            for turn in range(4):
                lengths = [5 + 3 * window + turn] * 2
                engine.train_batch(iter([sized(engine.module, length) for length in lengths]))
            senders = [sender for sender in engine._executor._sends.values() if sender is not None]
            found.append(sum(len(one._idle) + len(one._underway) for one in senders))
        return found


def sized(model: Any, length: int) -> Any:
    ids = torch.arange(length).remainder(7).expand(2, -1).contiguous()
    return {"input_ids": ids, "labels": ids}
