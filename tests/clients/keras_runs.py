"""Keras 3 models on the torch backend under an engine, in one plain process, and under torch's DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.clients.common import close, imported, whole_values, zero

MICRO, UPDATES, CLASSES, LENGTH = 4, 8, 5, 6
Batch = tuple[torch.Tensor, torch.Tensor]


def keras() -> Any:
    """Keras over torch; its files go to a folder that goes away."""
    return imported("keras", KERAS_BACKEND="torch", KERAS_HOME="HERE")


def dense() -> Any:
    layers = keras().layers
    return keras().Sequential(
        [
            keras().Input((8,)),
            layers.Dense(32, activation="relu"),
            layers.Dense(32, activation="tanh"),
            layers.Dense(CLASSES),
        ]
    )


def convolutions() -> Any:
    layers = keras().layers
    inputs = keras().Input((8, 8, 1))
    x = layers.Conv2D(6, 3, padding="same", activation="relu")(inputs)
    short = x
    x = layers.SeparableConv2D(6, 3, padding="same", activation="relu")(x)
    x = layers.GroupNormalization(2)(layers.add([x, short]))
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    return keras().Model(inputs, layers.Dense(CLASSES)(x))


def recurrent() -> Any:
    layers = keras().layers
    return keras().Sequential(
        [
            keras().Input((LENGTH,), dtype="int32"),
            layers.Embedding(20, 12, mask_zero=True),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            layers.GRU(8),
            layers.Dense(CLASSES),
        ]
    )


def transformer() -> Any:
    layers = keras().layers
    tokens = keras().Input((LENGTH,), dtype="int32")
    x = layers.Embedding(20, 16)(tokens)
    for _ in range(2):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 8)(normed, normed, use_causal_mask=True)
        x = x + layers.Dense(16)(layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x)))
    return keras().Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def subclassed() -> Any:
    """A custom `call`, a layer with weights of its own, one layer used twice, and one that is frozen."""
    layers, ops = keras().layers, keras().ops

    class Scaled(layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
            self.inner = layers.Dense(shape[-1])
            self.inner.build(shape)

        def call(self, x: Any) -> Any:
            return ops.tanh(self.inner(x)) * self.scale

    class Net(keras().Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice, self.head = layers.Dense(16), Scaled(), layers.Dense(CLASSES)
            self.fixed = layers.Dense(16, trainable=False)

        def call(self, x: Any) -> Any:
            x = self.fixed(self.first(x))
            return self.head(self.twice(x) + self.twice(ops.sin(x)))

    model = Net()
    model(torch.zeros(1, 8))  # its variables are made by a call; `build` alone shows torch none of them
    return model


def wrapped() -> Any:
    """A torch module as a Keras layer, between Keras' own."""
    layers = keras().layers
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
    inner = layers.TorchModuleWrapper(module, output_shape=(None, 16))
    inputs = keras().Input((8,))
    x = layers.Dense(16)(inputs)
    return keras().Model(inputs, layers.Dense(CLASSES)(layers.add([inner(x), x])))


def normalised() -> Any:
    layers = keras().layers
    model = keras().Sequential([keras().Input((8, 8, 1))])
    for _ in range(2):
        model.add(layers.Conv2D(6, 3))
        model.add(layers.BatchNormalization(momentum=0.8))
        model.add(layers.ReLU())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(CLASSES))
    return model


def dropped() -> Any:
    """Dropout with seeds of its own, and without, which draws from torch's."""
    layers = keras().layers
    return keras().Sequential(
        [
            keras().Input((8,)),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.3, seed=11),
            layers.GaussianNoise(0.1, seed=5),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )


MODELS: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "convolutions": convolutions,
    "recurrent": recurrent,
    "transformer": transformer,
    "subclassed": subclassed,
    "wrapped": wrapped,
}
PER_RANK: dict[str, Callable[[], Any]] = {"normalised": normalised, "dropped": dropped}
SHAPES = {"convolutions": (8, 8, 1), "normalised": (8, 8, 1)}
WORDS = ("recurrent", "transformer")


def made(name: str, seed: int = 0, policy: str = "float32") -> Any:
    keras().utils.clear_session()  # names are counted, and parameters go by their names
    keras().mixed_precision.set_dtype_policy(policy)
    keras().utils.set_random_seed(seed)
    return (MODELS | PER_RANK)[name]()


def batches(name: str, rank: int) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(100 + rank)
    for _ in range(UPDATES):
        if name in WORDS:
            x = torch.randint(1, 20, (MICRO, LENGTH), generator=draw)
        else:
            x = torch.randn(MICRO, *SHAPES.get(name, (8,)), generator=draw)
        yield x, torch.randint(0, CLASSES, (MICRO,), generator=draw)


def adam(parameters: Any) -> torch.optim.Optimizer:
    # With torch's usual 1e-8, elements whose gradient is nothing but rounding would move as far as any other.
    trained = [param for param in parameters if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def engine_of(model: Any, stage: int, **keys: Any) -> Any:
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": zero(stage), "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model.parameters()), config=config | keys)
    return engine


def trained(engine: Any, name: str) -> list[float]:
    losses = []
    for x, y in batches(name, dist.get_rank()):
        loss = F.cross_entropy(engine(x, training=True).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def alone(name: str, ranks: int, policy: str = "float32", start: torch.dtype = torch.float32) -> list[list[float]]:
    """One plain process that replays every rank's batches, from weights rounded to `start`; losses by rank."""
    model = made(name, policy=policy)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(start).float()
    optimizer = adam(model.parameters())
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for together in zip(*(batches(name, rank) for rank in range(ranks)), strict=True):
        for mine, (x, y) in zip(losses, together, strict=True):
            loss = F.cross_entropy(model(x, training=True).float(), y)
            (loss / ranks).backward()
            mine.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def under_ddp(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of this rank under torch's DDP, and what the model has then."""
    model = made(name, seed=dist.get_rank())
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(7 + dist.get_rank())
    optimizer, losses = adam(model.parameters()), []
    for x, y in batches(name, dist.get_rank()):
        loss = F.cross_entropy(parallel(x, training=True), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def as_alone(name: str, stage: int) -> None:
    """On a worker: the engine's losses are those of one process."""
    wanted = alone(name, dist.get_world_size())[dist.get_rank()]
    with engine_of(made(name, seed=dist.get_rank()), stage) as engine:
        found = trained(engine, name)
    assert wanted[0] != wanted[-1]
    close(found, wanted, 1e-6, f"losses of {name}")


BF16 = {"bf16": {"enabled": True}}


def born(name: str, **keys: Any) -> Any:
    """A model made under `zero.Init`, on each rank from a seed of its own; rank 0's values count."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": zero(3)} | keys
    policy = "mixed_bfloat16" if "bf16" in keys else "float32"
    with deepspeed.zero.Init(config_dict_or_path=config):
        return made(name, seed=dist.get_rank(), policy=policy)


def born_as_alone(name: str) -> None:
    """On a worker: born sharded, at once and whole nowhere, with the losses of one process."""
    wanted = alone(name, dist.get_world_size())[dist.get_rank()]
    model = born(name)
    weights = [p for p in model.parameters() if p.requires_grad]
    assert weights and all(p.ds_status.name == "NOT_AVAILABLE" for p in weights)
    with engine_of(model, 3) as engine:
        close(trained(engine, name), wanted, 1e-6, f"losses of {name}")


def born_as_ddp(name: str) -> None:
    """On a worker: born sharded; statistics and seeds are whole, and each rank's own as under DDP."""
    wanted, state = under_ddp(name)
    model = born(name)
    with engine_of(model, 3) as engine:
        torch.manual_seed(7 + dist.get_rank())
        close(trained(engine, name), wanted, 1e-5, f"losses of {name}")
        found = whole_values(model)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def in_bf16(name: str, stage: int, under_init: bool = False) -> None:
    """On a worker: a bf16 block with the policy that goes with it, beside that policy over fp32 weights alone."""
    start = torch.bfloat16 if under_init else torch.float32  # born in bf16, masters have no other values to start from
    wanted = alone(name, dist.get_world_size(), "mixed_bfloat16", start)[dist.get_rank()]
    model = born(name, **BF16) if under_init else made(name, seed=dist.get_rank(), policy="mixed_bfloat16")
    with engine_of(model, stage, **BF16) as engine:
        kept = {p.dtype for p in model.parameters() if p.requires_grad}
        assert kept == {torch.bfloat16}, kept
        close(trained(engine, name), wanted, 2e-2, f"losses of {name}")


def refused_in_bf16() -> None:
    """On a worker: no layer computes in bf16, so the block has no meaning; said by name before anything moves."""
    from deepspeed.errors import DeepSpeedConfigError

    model = made("convolutions")
    try:
        engine_of(model, 2, **BF16)
    except DeepSpeedConfigError as error:
        assert "Keras layer 'conv2d' computes in float32" in str(error), error
        assert "set_dtype_policy('mixed_bfloat16')" in str(error), error
    else:
        raise AssertionError("was not refused")
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float32}
    with engine_of(model, 2) as engine:
        trained(engine, "convolutions")


def as_ddp(name: str, stage: int) -> None:
    """On a worker: losses, and each rank's own statistics and seeds, are those under DDP."""
    wanted, state = under_ddp(name)
    model = made(name, seed=dist.get_rank())
    with engine_of(model, stage) as engine:
        torch.manual_seed(7 + dist.get_rank())
        close(trained(engine, name), wanted, 1e-5, f"losses of {name}")
        found = whole_values(model)
        for key, value in state.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
        engine.eval()
        evaluated = _told(engine(next(batches(name, 0))[0], training=False))
    assert torch.equal(*evaluated), "all ranks evaluate with rank 0's statistics"


def _told(tensor: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(every, tensor.detach().contiguous())
    return every


def layer_by_layer(name: str) -> None:
    """On a worker: stage 3 gathers a Keras layer when it runs, not the whole model."""
    model = made(name)
    limits = {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    with engine_of(model, 3, zero_optimization=zero(3) | limits) as engine:
        lifecycle = engine.optimizer.parameter_offload
        named = {getattr(unit, "name", "?") for unit in lifecycle.units}
        whole, most = sum(group.numel for group in lifecycle.prefetcher.groups), 0

        def note(*_: Any) -> None:
            nonlocal most
            here = sum(g.numel for g in lifecycle.prefetcher.groups if g.state.name == "GATHERED")
            most = max(most, here)

        hooks = [layer.register_forward_pre_hook(note) for layer in lifecycle.units]
        trained(engine, name)
        for hook in hooks:
            hook.remove()
    assert len(named) >= 5, named
    assert 0 < most <= whole * 0.6, (most, whole)


def saved(name: str, stage: int, folder: str) -> None:
    """On a worker: trained, saved as `.keras` by rank 0, loaded by plain Keras, equal outputs."""
    import deepspeed

    model, path = made(name), Path(folder, f"{name}.keras")
    x = next(batches(name, 0))[0]
    with engine_of(model, stage) as engine:
        trained(engine, name)
        engine.eval()
        with torch.no_grad():
            wanted = engine(x, training=False).clone()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            if dist.get_rank() == 0:
                model.save(path)
    dist.barrier()
    loaded = keras().models.load_model(path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x, training=False), wanted, rtol=1e-5, atol=1e-6)


def resumed(name: str, stage: int, folder: str) -> None:
    """On a worker: what goes on from a checkpoint has the losses of what was never stopped, on every rank."""
    model = made(name)
    torch.manual_seed(3)
    with engine_of(model, stage) as engine:
        trained(engine, name)
        engine.save_checkpoint(folder, tag="here")
        drawn = torch.get_rng_state()
        wanted = trained(engine, name)
    with engine_of(made(name, seed=9), stage) as engine:
        engine.load_checkpoint(folder, tag="here")
        torch.set_rng_state(drawn)
        close(trained(engine, name), wanted, 1e-6, "losses after resuming")


def fitted(stage: int) -> None:
    """On a worker: `model.fit` with a train step that calls the engine, on each rank's share."""
    model = made("dense")
    engine = engine_of(model, stage)

    def train_step(data: Any) -> dict[str, Any]:
        x, y = data
        loss = F.cross_entropy(engine(x, training=True), y.long())
        engine.backward(loss)
        engine.step()
        return {"loss": loss.item()}

    model.train_step = train_step
    model.compile(loss=None, optimizer="sgd")
    rows = [(x.numpy(), y.numpy()) for x, y in batches("dense", dist.get_rank())]
    model.fit((row for row in rows), epochs=1, steps_per_epoch=len(rows), verbose=0)
    assert engine.global_steps == UPDATES
    found = whole_values(model)
    engine.destroy()
    plain = made("dense")
    with engine_of(plain, 0) as reference:
        trained(reference, "dense")
        wanted = whole_values(plain)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
