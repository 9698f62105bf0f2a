"""A model trained twice in the same stages, by 1F1B and by the zero-bubble schedule: every bit is to be the same."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import DeepSpeedError, NotAvailableError
from deepspeed.foundation.pytree import tensors_in
from deepspeed.pipe.split_backward import SplitBackward
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.parallel.dense import adamw
from tests.parallel.pipeline_runs import _items, _Sums, batches, config_of, deep, engine_of, replica
from tests.parallel.tiny import raises

WINDOWS = 3
SCALED = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": SCALED},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def beside(
    family: str, pp: int, stage: int, accumulation: int, precision: str = "fp32", settings: Any = None, how: str = ""
) -> tuple[int, int]:
    """Bytes that were put off on this rank, and parameters whose masters and moments were compared; equal bit by bit.

    Args:
        family: of the model, with tied embeddings where it has them.
        pp: stages.
        stage: of ZeRO.
        accumulation: micro-batches.
        precision: one of `PRECISIONS`; with fp16, one window overflows on the last stage.
        settings: more of the JSON.
        how: what is done to the model besides.
    """
    plain, _ = _followed(family, "1f1b", pp, stage, accumulation, precision, settings or {}, how)
    ours, kept = _followed(family, "zero_bubble", pp, stage, accumulation, precision, settings or {}, how)
    assert plain.keys() == ours.keys()
    apart = [name for name in plain if not torch.equal(plain[name], ours[name])]
    assert not apart, apart
    return kept, len(plain)


def _followed(
    family: str, schedule: str, pp: int, stage: int, accumulation: int, precision: str, settings: Any, how: str
) -> tuple[dict[str, torch.Tensor], int]:
    """What there is after some windows, by name."""
    model = deep(family, max(4, pp))
    home = model.model.norm if family == "Llama" else model.transformer.ln_f
    model = _changed(model, how)
    config = config_of(
        stage, pp, accumulation, 0.5, pipeline={"schedule": schedule}, **PRECISIONS[precision], **settings
    )
    engine = engine_of(model, config, adamw)
    found: dict[str, torch.Tensor] = {}
    with engine, _watched() as kept:
        told = _hooked(engine.module) if how == "hooks" else []
        for window in range(WINDOWS):
            planted = None
            if precision == "fp16" and window == 1 and engine.is_last_stage():
                planted = home.register_forward_hook(lambda _m, _a, out: out * float("inf"))
            here = replica(current_mesh())
            given = batches(
                _inner(engine.module), window * accumulation, accumulation, here, how in ("lengths", "fickle")
            )
            items = {"num_items": _items} if how == "items" else {}
            found[f"loss {window}"] = engine.train_batch(given, **items).nan_to_num(-1.0)
            found[f"norm {window}"] = torch.tensor(float(engine.get_global_grad_norm())).nan_to_num(-1.0)
            if planted is not None:
                planted.remove()
        found["skipped, scale"] = torch.tensor([engine.skipped_steps, engine.loss_scale()])
        for at, one in enumerate(told):
            found[f"seen {at}"] = one
        for name, param in engine.module.named_parameters():
            master = safe_get_full_fp32_param(param)
            if master is not None:
                found[name] = master.clone()
                moment = safe_get_full_optimizer_state(param, "exp_avg")
                if moment is not None:
                    found[f"{name} moment"] = moment.clone()
        assert precision != "fp16" or engine.skipped_steps == 1
    return found, sum(kept)


def _changed(model: Any, how: str) -> Any:
    if how == "adapters":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        made = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
        return get_peft_model(model, made)
    if how == "frozen":
        for name, param in model.named_parameters():
            param.requires_grad = not (name.endswith("bias") or ".2." in name)
    if how == "fickle":  # a weight that is a factor of a product, and with every second length something besides
        layer = model.model.layers[-1].mlp.down_proj
        plain, weight = layer.forward, layer.weight
        layer.forward = lambda x: plain(x) * (1 + weight.mean() if x.shape[1] % 2 else 1)
    if how.startswith("checkpointed"):
        older = how.endswith("older")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": older})
        model.train()
    return _Sums(model) if how == "items" else model


def _inner(module: Any) -> Any:
    return getattr(module, "inner", module)


def _hooked(module: torch.nn.Module) -> list[torch.Tensor]:
    """Hooks of the user's on parameters: what they saw, in a fixed order; some change the gradient."""
    seen: dict[str, torch.Tensor] = {}
    order = list[torch.Tensor]()
    for name, param in module.named_parameters():
        seen[name] = torch.zeros(param.shape)
        order.append(seen[name])

        def look(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            seen[name].mul_(3).add_(gradient)  # the order of micro-batches counts
            return gradient * 0.5

        param.register_hook(look)
    return order


@contextlib.contextmanager
def _watched() -> Iterator[list[int]]:
    """Bytes that are kept for weights, each time they are formed."""
    plain, kept = SplitBackward.weights, list[int]()

    def weights(split: SplitBackward) -> None:
        kept.append(split.kept)
        plain(split)

    SplitBackward.weights = weights  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        SplitBackward.weights = plain  # type: ignore[method-assign]


class Live(TorchDispatchMode):
    """Bytes of what is computed and still held, at the begin of everything that a stage computes."""

    def __init__(self, driver: Any) -> None:
        super().__init__()
        self.now, self.seen = 0, list[tuple[str, int]]()
        self._known: set[int] = set()
        for name in ("forward", "backward", "weights"):
            setattr(driver, name, functools.partial(self._noted, name[0].upper(), getattr(driver, name)))

    def _noted(self, op: str, run: Any, *args: Any) -> Any:
        self.seen.append((op, self.now))
        with self:
            return run(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            held = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
            if storage.data_ptr() not in held | self._known:
                self._known.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.data_ptr(), storage.nbytes())
        return made

    def _freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def held(schedule: str, pp: int, micros: int) -> tuple[list[int], list[tuple[str, int]], int, int]:
    """Most that each stage holds by simulation and how many of it are put off; bytes seen here, and this stage."""
    model = deep("Llama", 4)
    config = config_of(1, pp, micros, pipeline={"schedule": schedule})
    engine = engine_of(model, config, adamw)
    with engine:
        engine.train_batch(batches(engine.module, 0, micros, 0))
        live = Live(engine._driver)
        engine.train_batch(batches(engine.module, micros, micros, 0))
        found = engine.simulated(micros)
        return [found.peaks[engine.stage_id], found.put_off[engine.stage_id]], live.seen, live.now, engine.stage_id


class _Static(torch.autograd.Function):
    """A buffer that every micro-batch overwrites, as captured graphs have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return buffer.copy_(x).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def overwritten(schedule: str) -> tuple[str, str]:
    """The error of each rank, where the last stage overwrites what a weight needs once the next micro-batch comes."""
    model, buffers = deep("Llama", 4), list[torch.Tensor]()
    layer = model.model.layers[-1].mlp.down_proj
    plain = layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        buffers.append(buffers[0] if buffers else torch.empty_like(x.detach()))
        return plain(_Static.apply(x, buffers[0]))

    config = config_of(1, 2, 3, pipeline={"schedule": schedule})
    engine = engine_of(model, config, adamw)
    layer.forward = forward
    try:
        engine.train_batch(batches(engine.module, 0, 3, 0))
    except DeepSpeedError as error:
        return type(error).__name__, str(error)
    return "", ""


def refused() -> None:
    """Stage 3 names what is nearest; so do several chunks."""

    def start(stage: int, **pipeline: Any) -> None:
        config = config_of(stage, 2, 2, pipeline={"schedule": "zero_bubble", **pipeline})
        deepspeed.initialize(model=deep("Llama", 4), config=config)

    with raises(NotAvailableError, "zero_bubble", "ZeRO stage 3", "stage 1", "1f1b"):
        start(3)
    with raises(Exception, "zero_bubble has one chunk", "interleaved"):
        start(1, chunks=2)
