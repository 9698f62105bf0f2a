"""Steps of this package, FSDP2 and DDP, recorded by one recorder: one rank of a world that is not there, on an emulated
device whose operators have no values. Import it before torch."""

from __future__ import annotations

from tests.emulated import device as emulated  # isort: skip  before torch

import contextlib
import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from benchmarks.device_recorder import DeviceRecorder, RecordedKernels
from benchmarks.simulated_models import PER_HOST, SHAPES, Decoder, package_config
from deepspeed.comm.collectives import block_table, scalars
from deepspeed.comm.fake_world import absent_peers
from deepspeed.comm.process_groups.process_group import destroy_process_group
from deepspeed.foundation.log import logger
from deepspeed.ops.fake_tensors import Valueless
from deepspeed.ops.triton.blocks import BlockKernelLauncher
from deepspeed.planner.fake_world import without_values
from deepspeed.simulator.trace import Recording

PACKAGE, FSDP2, DDP = "package", "fsdp2", "ddp"
WARM = {PACKAGE: 2, FSDP2: 1, DDP: 2}  # steps before the one that is recorded


@dataclass(frozen=True)
class Case:
    """What is recorded.

    Args:
        model: of `SHAPES`.
        maker: `package`, `fsdp2`, `ddp`.
        ranks: of the world, eight on a host.
        micro: sequences of a micro-batch and rank.
        length: tokens of a sequence.
        accumulation: micro-batches of a step.
        recompute: blocks are computed again in backward.
        stage: of this package.
        hybrid: ranks that hold one copy of the state; 0: all.
        clip: of the gradients' norm; 0: none.
        offload: `optimizer-cpu`, `all-nvme`, "".
        sums: dtype in which FSDP2's gradients travel and are summed. This package's travel in bf16, summed in fp32.
        repeat: steps recorded, each with a mark `end` behind it: what one begins may end in the next.
        gradients: form of this package's gradients on the way: "int8", "int4"; "": as they are.
        weights: form of its weights, likewise.
        secondary: ranks that hold a second copy of the weights (`zero_hpz_partition_size`); 1: none.
        kernels: messages are encoded by the package's kernels, else by torch operators.
    """

    model: str
    maker: str
    ranks: int
    micro: int
    length: int = 2048
    accumulation: int = 1
    recompute: bool = False
    stage: int = 3
    hybrid: int = 0
    clip: float = 0.0
    offload: str = ""
    sums: str = "bf16"
    repeat: int = 1
    gradients: str = ""
    weights: str = ""
    secondary: int = 1
    kernels: bool = True

    @property
    def name(self) -> str:
        """For tables."""
        how = f"stage {self.stage}" if self.maker == PACKAGE else self.maker
        how += f", sums in {self.sums}" if self.maker == FSDP2 else ""
        hybrid = f", hybrid by {self.hybrid}" if self.hybrid else ""
        offload = f", {self.offload}" if self.offload else ""
        return f"{self.model}, {self.ranks} cards, {how}{hybrid}{offload}"


class _Numbers(scalars.FakeScalars):
    """One, read with a wait of the host, as it would be of a device."""

    device = torch.device("cuda", 0)

    def value(self, tensor: torch.Tensor) -> float:
        return float(tensor)


@contextlib.contextmanager
def world(size: int) -> Iterator[Valueless]:
    """Inside, this process is rank 0 of a world, and operators have no values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name, value in {"limit": 1 << 60, "poison": 0, "late": 0, "races": 0}.items():
        emulated.native.set(name, value)
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(min(size, PER_HOST)))
    level = logger.level
    logger.setLevel(logging.WARNING)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with absent_peers(_Numbers()), without_values(), Valueless() as valueless:
            yield valueless
    finally:
        destroy_process_group()
        logger.setLevel(level)


# What torch has one CUDA kernel for, and no other device does: without them they would be recorded in pieces.
_KERNELS = torch.library.Library("aten", "IMPL")
for _name in ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward"):
    _KERNELS.impl(_name, lambda *_args, **_kwargs: NotImplemented, "CUDA")

Step = Callable[[DeviceRecorder], None]


def _config(case: Case) -> dict[str, Any]:
    config = package_config(case.stage, case.micro, case.offload)
    config |= {"gradient_accumulation_steps": case.accumulation, "gradient_clipping": case.clip}
    zero = config["zero_optimization"]
    if case.hybrid:
        zero["mics_shard_size"] = case.hybrid
    if case.secondary > 1:
        zero["zero_hpz_partition_size"] = case.secondary
    forms = {"gradients": case.gradients, "weights": case.weights}
    if any(forms.values()):
        config["wire"] = {name: form for name, form in forms.items() if form}
    return config


def _package(case: Case) -> tuple[Step, Callable[[], None]]:
    config = _config(case)
    with deepspeed.zero.Init(config_dict_or_path=config) if case.stage == 3 else torch.device("cuda"):
        model = Decoder(SHAPES[case.model], case.recompute)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    tokens = torch.zeros(case.micro, case.length, dtype=torch.long, device="cuda")

    def step(recorder: DeviceRecorder) -> None:
        for _ in range(case.accumulation):
            recorder.mark("forward")
            loss = engine(tokens)
            recorder.mark("backward")
            engine.backward(loss)
            recorder.mark("step")
            engine.step()

    return step, engine.destroy


def _theirs(case: Case, model: Any, sync: Callable[[bool], Any]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.zeros(case.micro, case.length, dtype=torch.long, device="cuda")

    def step(recorder: DeviceRecorder) -> None:
        for micro in range(case.accumulation):
            with sync(micro == case.accumulation - 1):
                recorder.mark("forward")
                with torch.autocast("cuda", torch.bfloat16, enabled=case.maker == DDP):
                    loss = model(tokens)
                recorder.mark("backward")
                loss.backward()
        recorder.order_all()
        recorder.mark("step")
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


_SUMS = {"bf16": "bfloat16", "fp32": "float32"}


def _fsdp2(case: Case) -> tuple[Step, Callable[[], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = (case.ranks // case.hybrid, case.hybrid) if case.hybrid else (case.ranks,)
    names = ("replicate", "shard") if case.hybrid else ("shard",)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, _SUMS[case.sums]))
    with torch.device("meta"):
        model = Decoder(SHAPES[case.model], case.recompute)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")

    @contextlib.contextmanager
    def sync(_last: bool) -> Iterator[None]:
        yield  # gradients are reduced in each micro-batch, as the tables' runs did

    return _theirs(case, model, sync), lambda: None


class _Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def _ddp(case: Case) -> tuple[Step, Callable[[], None]]:
    with torch.device("meta"):
        model = Decoder(SHAPES[case.model], case.recompute)
    model.to_empty(device="cuda")
    wrapped: Any = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], init_sync=False)
    wrapped.logger = _Silent()  # DDP's own wants a timer that a build without CUDA lacks
    return _theirs(case, wrapped, lambda last: contextlib.nullcontext() if last else wrapped.no_sync()), lambda: None


MAKERS = {PACKAGE: _package, FSDP2: _fsdp2, DDP: _ddp}


def record(case: Case, steps: int = 0) -> Recording:
    """The recording of a case's third step (and those behind it), or of so many from the first on, each with a mark
    `end` behind it."""
    recording = Recording(case.name, 0, case.ranks)
    with world(case.ranks):
        recorder = DeviceRecorder(recording)
        recorder.on = False
        kernels = BlockKernelLauncher(RecordedKernels(recorder)) if case.kernels else None
        with recorder, block_table.kernels.replaced(kernels):
            step, end = MAKERS[case.maker](case)
            for _ in range(0 if steps else WARM[case.maker]):
                step(recorder)
            recorder.on = True
            for _ in range(steps or case.repeat):
                step(recorder)
                recorder.mark("end")
            recorder.on = False
            end()
        del step, end
    gc.collect()
    shape = SHAPES[case.model]
    recording.facts = {"tokens": case.micro * case.length * case.accumulation, "parameters": shape.parameters}
    return recording


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    record(Case(**{key: value for key, value in told.items() if key != "steps"}), told.get("steps", 0)).save(
        sys.argv[1]
    )
