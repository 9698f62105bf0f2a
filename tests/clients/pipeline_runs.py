"""Input pipelines of others, sharded by rank, that feed `engine.loop` with numpy batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.clients.common import imported, zero

SAMPLES, MICRO, EPOCHS = 21, 4, 2  # 11 and 10 samples on two ranks: the last batches have 3 and 2


def samples() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(SAMPLES, 6)).astype("float32"), draw.normal(size=(SAMPLES, 1)).astype("float32")


def numpy_batches(rank: int, ranks: int) -> Iterable[Any]:
    x, y = samples()
    x, y = x[rank::ranks], y[rank::ranks]
    return [(x[at : at + MICRO], y[at : at + MICRO]) for at in range(0, len(x), MICRO)]


def tf_batches(rank: int, ranks: int) -> Iterable[Any]:
    tf = imported("tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
    tf.config.set_visible_devices([], "GPU")
    data = tf.data.Dataset.from_tensor_slices(samples()).shard(ranks, rank)
    return data.batch(MICRO).prefetch(2).as_numpy_iterator()


def grain_batches(rank: int, ranks: int) -> Iterable[Any]:
    import grain

    x, y = samples()
    data = grain.MapDataset.source([(x[at], y[at]) for at in range(SAMPLES)])
    return iter(data[rank::ranks].to_iter_dataset().batch(MICRO))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)


def whole() -> dict[str, torch.Tensor]:
    """One plain process that takes the batches of both ranks together."""
    module = model()
    optimizer = adam(module)
    for _ in range(EPOCHS):
        for parts in zip(numpy_batches(0, 2), numpy_batches(1, 2), strict=True):
            x, y = (torch.from_numpy(np.concatenate(both)) for both in zip(*parts, strict=True))
            torch.nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


PIPELINES = {"numpy": numpy_batches, "tf.data": tf_batches, "grain": grain_batches}


def fed(pipeline: str, stage: int) -> None:
    """On a worker: two ranks, each with its share of the pipeline, end where one process ends."""
    import deepspeed

    module = model()
    config = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": zero(stage), "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=module, optimizer=adam(module), config=config)
    for _ in range(EPOCHS):
        for x, y in engine.loop(PIPELINES[pipeline](dist.get_rank(), dist.get_world_size())):
            assert isinstance(x, np.ndarray) and len(x) <= MICRO
            engine.backward(torch.nn.functional.mse_loss(engine(torch.tensor(x)), torch.tensor(y)))
            engine.step()
    assert engine.global_steps == EPOCHS * 3
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        for name, value in whole().items():
            torch.testing.assert_close(dict(module.named_parameters())[name].detach(), value, rtol=1e-5, atol=1e-6)
    engine.destroy()
