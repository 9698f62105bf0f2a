"""Steps of one card: this package at each stage beside DDP and FSDP2, all from the same random weights."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

import deepspeed
from benchmarks import simulated_models
from benchmarks.gpu.plan import TINY, Setting
from benchmarks.gpu.rounds import compare, timed
from benchmarks.simulated_models import SHAPES, Decoder, package_config

CLIP = 1.0
SAME = 2e-2  # relative difference of the first step's losses: bf16 in other places


@dataclass
class Side:
    """One way to train.

    Args:
        step: runs a whole step and returns its loss, a tensor.
        end: gives back what it holds.
        losses: of all steps.
        nbytes: device memory that it holds between steps.
    """

    step: Callable[[torch.Tensor], torch.Tensor]
    end: Callable[[], None]
    losses: list[float]
    nbytes: int = 0


@dataclass(frozen=True)
class Case:
    """What the sides of a row have in common; as in `benchmarks.simulated_device`."""

    model: str
    micro: int
    length: int
    recompute: bool = False

    def decoder(self) -> Decoder:
        """The model on the card, in fp32, with weights that depend on nothing."""
        torch.manual_seed(0)
        with torch.device("cuda"):
            return Decoder(SHAPES[self.model], self.recompute)


def _package(case: Case, stage: int, offload: str) -> Side:
    config = package_config(stage, case.micro, offload) | {"gradient_clipping": CLIP, "steps_per_print": 10**6}
    model = case.decoder()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Side(step, engine.destroy, [])


def _plain(model: Any, autocast: bool) -> Side:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Side(step, lambda: None, [])


def _fsdp2(case: Case, offload: bool) -> Side:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (1,))
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = case.decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    return _plain(fully_shard(model, mesh=mesh, mp_policy=policy, **options), False)


class _Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def _ddp(case: Case, silent: bool) -> Side:
    wrapped: Any = torch.nn.parallel.DistributedDataParallel(case.decoder(), device_ids=[0])
    if silent:
        wrapped.logger = _Silent()  # DDP's own wants a timer that a build without CUDA lacks
    return _plain(wrapped, True)


def side_of(name: str, case: Case, setting: Setting) -> Side:
    """A side by its name: `ddp`, `fsdp2`, `fsdp2-offload`, `stage0` … `stage3`, with `-optimizer-cpu` or `-all-cpu`."""
    if name == "ddp":
        return _ddp(case, setting.rehearse)
    if name.startswith("fsdp2"):
        return _fsdp2(case, name.endswith("offload"))
    return _package(case, int(name[5]), name[7:])


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor]:
    """Stands in for the card's kernel, which a CPU does not have."""
    return (F.scaled_dot_product_attention(q, k, v, is_causal=True),)


def measure(
    setting: Setting, sides: list[str], model: str, micro: int, length: int, recompute: bool = False
) -> dict[str, Any]:
    """The part `training`: seconds of a step, the first side is the reference; losses are compared first."""
    case = Case(*setting.pick((model, micro, length), TINY), recompute and not setting.rehearse)
    deepspeed.init_distributed()
    stand_in = mock.patch.object(simulated_models, "attention", _attention)
    with stand_in if setting.rehearse else contextlib.nullcontext():
        return _compared(setting, sides, case)


def _compared(setting: Setting, names: list[str], case: Case) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPES[case.model].vocabulary, (case.micro, case.length), generator=draws).cuda()
    built: dict[str, Side] = {}
    try:
        for name in names:
            before = torch.cuda.memory_allocated()
            side = built[name] = side_of(name, case, setting)
            side.losses += [float(side.step(tokens)) for _ in range(2)]
            gc.collect()
            side.nbytes = torch.cuda.memory_allocated() - before
        turns = {name: functools.partial(_turn, side, tokens) for name, side in built.items()}
        records = compare(turns, names[0], setting.pick(setting.seconds / 3, 0.5), setting.fewest)
    finally:
        for side in built.values():
            side.end()
    firsts = [side.losses[0] for side in built.values()]
    same = max(firsts) - min(firsts) <= SAME * min(firsts)
    falls = all(side.losses[-1] < side.losses[0] for side in built.values())
    for record in records:
        side = built[record["side"]]
        record |= {"GiB": side.nbytes / 2**30, "losses": side.losses,
                   "tokens per second": case.micro * case.length / record["ms"] * 1e3}  # fmt: skip
    says = ", ".join(f"{each['side']} {each['ms']:.1f} ms ({each['ratio']:.3f})" for each in records)
    losses = "" if same else f"; first losses DIFFER: {firsts}"
    return {"says": says + losses + ("" if falls else "; losses do NOT fall"), "ok": same and falls, "sides": records}


def _turn(side: Side, tokens: torch.Tensor) -> float:
    """The untimed step leaves behind what a side defers to its next forward, so that the timed one pays for it."""
    side.losses.append(float(side.step(tokens)))
    return timed(lambda: side.step(tokens))
