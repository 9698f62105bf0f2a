"""Models trained as pipelines of stages, beside the dense model on one process."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepspeed.comm import get_rank
from deepspeed.comm.process_groups.mesh import Mesh, current_mesh
from deepspeed.utils import safe_get_full_fp32_param
from tests.parallel.dense import Dense, adamw, momentum
from tests.parallel.tensor_runs import batch_of, loss_of, model_of

INTERLEAVED = {"pipeline": {"schedule": "interleaved", "chunks": 2}}
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


def engine_of(model: Any, config: dict[str, Any], make: Callable[[Any], torch.optim.Optimizer] = momentum) -> Any:
    """An engine of a model, with an optimizer of its trained parameters."""
    import deepspeed

    trainable = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, optimizer=make(trainable), config=config)[0]


def beside_dense(engine: Any, dense: Dense, windows: int) -> list[tuple[float, float, float]]:
    """Relative distances of loss, norm and parameters from the dense model, by window of training."""
    found, steps = [], dense.accumulation
    for window in range(windows):
        theirs = dense.window(window * steps, loss_of)
        dense.step()
        ours = engine.train_batch(batches(engine.module, window * steps, steps, replica(current_mesh())))
        wanted = sum(theirs) / steps
        norm = abs(float(engine.get_global_grad_norm()) - dense.norm) / dense.norm
        found.append((abs(float(ours) - wanted) / wanted, norm, apart(engine, dense)))
    return found


def within(found: Any, bar: float = 1e-6) -> None:
    """Distances, or rows of them, are no larger than a bar."""
    rows = [row if isinstance(row, (list, tuple)) else (row,) for row in found]
    assert rows and all(gap <= bar for row in rows for gap in row), found


def trained(
    family: str, layers: int, pp: int, dp: int, stage: int, accumulation: int, settings: Any = None, windows: int = 2,
    clip: float = 0.0,
) -> list[tuple[float, float, float]]:  # fmt: skip
    """Relative distances of loss, norm and parameters, by window."""
    model = deep(family, layers)
    dense = Dense(model, momentum, dp, accumulation, clip)
    with engine_of(model, config_of(stage, pp, accumulation, clip, **(settings or {}))) as engine:
        return beside_dense(engine, dense, windows)


def skipped(precision: str) -> list[Any]:
    """An overflow that is planted on the last stage skips the step on every stage, and what follows trains."""

    scaled = {"initial_scale_power": 4, "loss_scale_window": 1000}
    block = {"fp16": {"enabled": True, **scaled}} if precision == "fp16" else {
        "bf16": {"enabled": True, "check_grad_overflow": True}
    }  # fmt: skip
    model = deep("GPTNeo", 2)
    engine = engine_of(model, config_of(1, 2, 2, **block))
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


def twice(precision: str, stage: int, schedule: dict[str, Any]) -> tuple[list[Any], list[Any], bool]:
    """Trains in stages, and whole on both ranks with the same samples, which changes no bit; one fp16 window overflows.

    Returns:
        Losses and what the loss scale did, of each; whether the masters are the same bit by bit.
    """
    block = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}}
    block = block if precision == "fp16" else {precision: {"enabled": True}} if precision == "bf16" else {}
    stages = _followed(config_of(stage, 2, 4, pipeline=schedule, **block), precision)
    whole = _followed({**config_of(stage, 1, 4, **block), "pipeline": {}}, precision)
    same = all(torch.equal(value, whole[1][name]) for name, value in stages[1].items())
    return stages[0], whole[0], same and bool(stages[1])


def _followed(config: dict[str, Any], precision: str) -> tuple[list[Any], dict[str, torch.Tensor]]:

    model = deep("Llama", 4)
    home: Any = model.model.norm
    engine = engine_of(model, config)
    with engine:
        found: list[Any] = []
        for window in range(4):
            planted = None
            if precision == "fp16" and window == 1 and home in list(engine.module.modules()):
                planted = home.register_forward_hook(lambda _m, _a, out: out * float("inf"))
            given = batches(engine.module, 4 * window, 4, 0)
            loss = float(engine.train_batch(given)) if hasattr(engine, "train_batch") else _loop(engine, given)
            if planted is not None:
                planted.remove()
            found.append((loss if loss - loss == 0 else None, engine.skipped_steps))
        found.append(engine.loss_scale())
        masters = ((n, safe_get_full_fp32_param(p)) for n, p in engine.module.named_parameters())
        return found, {name: value.clone() for name, value in masters if value is not None}


def _loop(engine: Any, given: Iterator[Any]) -> float:
    losses = []
    for one in given:
        loss = engine(**one).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def uncounted() -> None:
    """Interleaved runs in rounds of as many micro-batches as there are stages: 5 are refused, 6 run."""
    from deepspeed.errors import ArgumentError
    from tests.parallel.tiny import raises

    def start(steps: int) -> Any:
        model = deep("Llama", 4)
        config = config_of(1, 2, steps, **INTERLEAVED)
        return engine_of(model, config)

    with raises(ArgumentError, "rounds of 2", "5", "the next count is 6", "gradient_accumulation_steps"):
        start(5)
    with start(6) as engine:
        engine.train_batch(batches(engine.module, 0, 6, 0))


def reshaped(schedule: str, stage: int) -> list[Any]:
    """Lengths that change from micro-batch to micro-batch; messages, headers and losses of training and evaluation."""

    model = deep("Llama", 4)
    dense = Dense(model, momentum, 1, 4)
    settings = {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    config = config_of(stage, 2, pipeline=settings)
    engine = engine_of(model, config)
    with engine:
        wanted = [float(dense.model(**one).loss) for one in batches(model, 0, 4, 0, True)]
        evaluated = float(engine.eval_batch(batches(model, 0, 4, 0, True)))
        losses, outputs = engine.eval_batch(batches(model, 0, 2, 0), True, reduce_output=None, num_micro_batches=2)
        mean = float(engine.train_batch(batches(model, 0, 4, 0, True)))
        shapes = [tuple(out.logits.shape) for out in outputs] if outputs is not None else None
        sent = engine._executor.bytes_sent, engine._executor.headers_sent
        assert engine.training and len(losses) == 2
        return [abs(evaluated - sum(wanted) / 4), abs(mean - sum(wanted) / 4), shapes, sent]


def saved(folder: str, mesh: dict[str, Any]) -> None:
    """Train two windows and save."""
    with started(mesh) as engine:
        for window in range(2):
            train(engine, 2 * window)
        engine.save_checkpoint(folder, tag="two")


def started(mesh: dict[str, Any], seed: int = 0) -> Any:
    """An engine on a mesh: `pp`, `tp`, ZeRO `stage` and `tier` of the optimizer."""

    model = deep("GPTNeo", 4, seed=seed)
    zero = {"offload_optimizer": {"device": "cpu"}} if mesh.get("tier") == "cpu" else {}
    config = config_of(mesh["stage"], mesh["pp"], 2, zero=zero)
    if mesh.get("tp", 1) > 1:
        config["tensor_parallel"] = {"autotp_size": mesh["tp"]}
    return engine_of(model, config, adamw)


def train(engine: Any, first: int) -> float:
    """One window of two micro-batches; the mean loss over ranks."""
    given = batches(engine.module, first, 2, replica(current_mesh()))
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch(given))
    mean = torch.tensor(_loop(engine, given))
    torch.distributed.all_reduce(mean)
    return float(mean) / torch.distributed.get_world_size()


def loaded(folder: str, mesh: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Masters and moments by name after loading, and the next loss."""
    from deepspeed.utils import safe_get_full_optimizer_state

    with started(mesh, seed=5) as engine:
        engine.load_checkpoint(folder, tag="two")
        found = {}
        for name, param in engine.module.named_parameters():
            found[name] = safe_get_full_fp32_param(param).clone()
            found[f"{name} moment"] = safe_get_full_optimizer_state(param, "exp_avg").clone()
        return found, train(engine, 4)


def counted(stage: int, settings: Any = None, accumulation: int = 3) -> list[float]:
    """Losses that are sums over items, of unequal micro-batches: distances of the mean, and of parameters."""

    model = deep("GPTNeo", 4)
    dense = Dense(model, momentum, 1)
    config = config_of(stage, 2, accumulation, **(settings or {}))
    engine = engine_of(_Sums(model), config)
    with engine:
        found = []
        for window in range(2):
            ours = list(batches(model, accumulation * window, accumulation, 0, True))
            for at, one in enumerate(ours):
                one["labels"] = one["labels"].clone()
                one["labels"][:, : at + 1] = -100
            dense.optimizer.zero_grad()
            total = sum(_Sums(dense.model)(**one) for one in ours)
            items = sum(_items(one) for one in ours)
            (total / items).backward()
            dense.step()
            mean = engine.train_batch(iter(ours), num_items=_items)
            found.append(abs(float(mean) - float(total.detach()) / items))
        engine.module = engine.module.inner  # names are those of the inner model
        return [*found, apart(engine, dense)]


def _items(batch: Any) -> float:
    return float((batch["labels"][:, 1:] != -100).sum())


class _Sums(torch.nn.Module):
    """The loss of a model as a sum over its items."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.example_input_array = batch_of(inner, 0, 0, 9)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.inner(input_ids=input_ids).logits[:, :-1]
        flat = logits.reshape(-1, logits.shape[-1])
        return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum")


def written(stage: int) -> list[Any]:
    """What a model writes on stages, greedily and by draws, beside the whole model."""

    model = deep("Llama", 2)
    whole = copy.deepcopy(model).eval()
    engine = engine_of(model, config_of(stage, 2))
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    settings = {"max_new_tokens": 6, "use_cache": False, "pad_token_id": 0}
    with engine:
        torch.manual_seed(5 + get_rank())
        before = torch.get_rng_state()
        ours = [engine.generate(input_ids=prompt, do_sample=draws, **settings) for draws in (False, True)]
        assert torch.equal(before, torch.get_rng_state()) and engine.training and "forward" not in vars(engine.module)
        theirs = []
        for draws in (False, True):
            torch.manual_seed(5)
            theirs.append(whole.generate(input_ids=prompt, do_sample=draws, **settings))
        return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]


def measured(stage: int, schedule: str, micros: int, pp: int, gather: str = "auto") -> dict[str, Any]:
    """Bytes of state by kind and most bytes of activations that a stage held, beside the plan and the schedule."""

    model = deep("Llama", 4)
    config = config_of(stage, pp, micros, pipeline={"schedule": schedule, "stage3_gather": gather})
    engine = engine_of(model, config, adamw)
    with engine:
        rank = replica(current_mesh())
        engine.train_batch(batches(engine.module, 0, micros, rank))
        with Saved(engine._driver) as saved:
            engine.train_batch(batches(engine.module, micros, micros, rank))
        own = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in engine.module.parameters())
        return {
            "elements": own, "shards": engine.mesh.size("dp_shard"), "bytes": engine.state_bytes(),
            "most": saved.most, "one": saved.one, "peak": engine.simulated(micros).peaks[engine.stage_id],
        }  # fmt: skip


class Saved:
    """Counts bytes that autograd keeps for backward: most at a time, and of one micro-batch."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.now, self.most, self.one = driver, 0, 0, 0

    def __enter__(self) -> Saved:
        self.forward, self.driver.forward = self.driver.forward, self.run
        return self

    def __exit__(self, *_: Any) -> None:
        self.driver.forward = self.forward

    def run(self, *args: Any) -> Any:
        before = self.now
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.tensor):
            found = self.forward(*args)
        self.one = max(self.one, self.now - before)
        return found

    def pack(self, tensor: torch.Tensor) -> Any:
        kept = Kept(tensor)
        if not isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            size = tensor.numel() * tensor.element_size()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(kept, self.freed, size)
        return kept

    def freed(self, size: int) -> None:
        self.now -= size


class Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def profiled() -> tuple[str, float]:
    """Stages by measured time, where each rank finds another block slow: what this rank got, how far it is apart."""

    model = deep("GPTNeo", 4)
    dense = Dense(model, momentum, 1, 4, 0.0)
    blocks, rank = model.transformer.h, get_rank()
    slow = blocks[3 * rank].register_forward_pre_hook(lambda *_: time.sleep(0.3 + 0.6 * rank))
    config = config_of(1, 2, pipeline={"partition": "profile"})
    engine = engine_of(model, config)
    slow.remove()
    with engine:
        dense.window(0, loss_of)
        dense.step()
        engine.train_batch(batches(engine.module, 0, 4, 0))
        return engine._parts[0].words, apart(engine, dense)
