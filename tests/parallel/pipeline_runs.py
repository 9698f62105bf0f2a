"""Models trained as pipelines of stages, beside the dense model on one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.comm.mesh import Mesh, current_mesh
from deepspeed.utils import safe_get_full_fp32_param
from tests.parallel.dense import Dense, adamw, momentum
from tests.parallel.tensor_runs import batch_of, loss_of, model_of

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def deep(family: str, layers: int, **changes: Any) -> Any:
    """A toy of so many blocks, without dropout."""
    counts = dict.fromkeys(LAYERS, layers)
    if family == "GPTNeo":
        halves = layers // 2
        counts = {"num_layers": layers, "attention_layers": ["global", "local"] * halves}
        changes.setdefault("attention_types", [[["global", "local"], halves]])
    return model_of(family, **counts, **changes)


def config_of(stage: int, pp: int, accumulation: int = 4, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "pipeline": {"stages": pp, **more.pop("pipeline", {})},
        **more,
    }


def replica(mesh: Mesh) -> int:
    at = mesh.coordinates
    return at["dp_replicate"] * mesh.size("dp_shard") + at["dp_shard"]


def batches(model: Any, first: int, count: int, rank: int, lengths: bool = False) -> Iterator[Any]:
    return iter(batch_of(model, first + at, rank, 9 + (at % 3 if lengths else 0)) for at in range(count))


def apart(engine: Any, dense: Dense) -> float:
    """The largest difference of this stage's parameters over the largest norm."""
    whole = dense.parameters()
    largest, worst = max(float(t.norm()) for t in whole.values()), 0.0
    for name, param in engine.module.named_parameters():
        ours = safe_get_full_fp32_param(param)
        if ours is not None:
            worst = max(worst, float((ours - whole[name]).norm()))
    return worst / largest


def trained(
    family: str, layers: int, pp: int, dp: int, stage: int, accumulation: int, settings: Any = None, windows: int = 2,
    clip: float = 0.0,
) -> list[tuple[float, float, float]]:  # fmt: skip
    """Relative distances of loss, norm and parameters, by window."""
    import deepspeed

    model = deep(family, layers)
    dense = Dense(model, momentum, dp, accumulation, clip)
    config = config_of(stage, pp, accumulation, clip, **(settings or {}))
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
    found = []
    with engine:
        for window in range(windows):
            theirs = dense.window(window * accumulation, loss_of)
            dense.step()
            rank = replica(current_mesh())
            ours = engine.train_batch(batches(engine.module, window * accumulation, accumulation, rank))
            wanted = sum(theirs) / len(theirs)
            norm = abs(float(engine.get_global_grad_norm()) - dense.norm) / dense.norm
            found.append((abs(float(ours) - wanted) / wanted, norm, apart(engine, dense)))
    return found


def skipped(precision: str) -> list[Any]:
    """An overflow that is planted on the last stage skips the step on every stage, and what follows trains."""
    import deepspeed

    scaled = {"initial_scale_power": 4, "loss_scale_window": 1000}
    block = {"fp16": {"enabled": True, **scaled}} if precision == "fp16" else {
        "bf16": {"enabled": True, "check_grad_overflow": True}
    }  # fmt: skip
    model = deep("GPTNeo", 2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=momentum(model.parameters()), config=config_of(1, 2, 2, **block)
    )
    with engine:
        losses = [float(engine.train_batch(batches(engine.module, 0, 2, 0)))]
        before = {n: safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
        handle = None
        if engine.is_last_stage():
            home: Any = engine.module.transformer.ln_f
            handle = home.register_forward_hook(lambda _m, _a, out: out * float("inf"))
        engine.train_batch(batches(engine.module, 2, 2, 0))
        if handle is not None:
            handle.remove()
        same = all(torch.equal(before[n], safe_get_full_fp32_param(p)) for n, p in engine.module.named_parameters())
        losses += [float(engine.train_batch(batches(engine.module, 0, 2, 0))) for _ in range(3)]
        return [engine.skipped_steps, same, engine.loss_scale(), losses]


def reshaped(schedule: str, stage: int) -> list[Any]:
    """Lengths that change from micro-batch to micro-batch; messages, headers and losses of training and evaluation."""
    import deepspeed

    model = deep("Llama", 4)
    dense = Dense(model, momentum, 1, 4)
    settings = {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    config = config_of(stage, 2, pipeline=settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
    with engine:
        wanted = [float(dense.model(**one).loss) for one in batches(model, 0, 4, 0, True)]
        evaluated = float(engine.eval_batch(batches(model, 0, 4, 0, True)))
        losses, outputs = engine.eval_batch(batches(model, 0, 2, 0), True, reduce_output=None, num_micro_batches=2)
        mean = float(engine.train_batch(batches(model, 0, 4, 0, True)))
        shapes = [tuple(out.logits.shape) for out in outputs] if outputs is not None else None
        sent = engine._executor.bytes_sent, engine._executor.headers_sent
        assert engine.training and len(losses) == 2
        return [abs(evaluated - sum(wanted) / 4), abs(mean - sum(wanted) / 4), shapes, sent]


def saved(folder: str, pp: int, stage: int, layers: int = 4) -> None:
    """Train two windows and save."""
    engine = started(pp, stage, layers)
    with engine:
        for window in range(2):
            engine.train_batch(batches(engine.module, 2 * window, 2, replica(current_mesh())))
        engine.save_checkpoint(folder, tag="two")


def started(pp: int, stage: int, layers: int = 4, seed: int = 0) -> Any:
    import deepspeed

    model = deep("GPTNeo", layers, seed=seed)
    return deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config_of(stage, pp, 2))[0]


def loaded(folder: str, pp: int, stage: int) -> tuple[dict[str, Any], float]:
    """Masters and moments by name after loading, and the next loss."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = started(pp, stage, seed=5)
    with engine:
        engine.load_checkpoint(folder, tag="two")
        found = {}
        for name, param in engine.module.named_parameters():
            found[name] = safe_get_full_fp32_param(param).clone()
            found[f"{name} moment"] = safe_get_full_optimizer_state(param, "exp_avg").clone()
        rank = replica(current_mesh())
        if pp > 1:
            return found, float(engine.train_batch(batches(engine.module, 4, 2, rank)))
        losses = []
        for one in batches(engine.module, 4, 2, rank):
            loss = engine(**one).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        mean = torch.tensor(sum(losses) / 2)
        torch.distributed.all_reduce(mean)
        return found, float(mean) / torch.distributed.get_world_size()
