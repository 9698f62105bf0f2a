"""Which keys make training state fit that did not: by what is held, what is free, and what each setting takes.

[Note: what counts as near] Near is the memory that ran out: a device's, or on a CPU the process's own, where host
buffers lie too. What rests on a disk is never near; what rests on the host is, on a CPU.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from torch.nn.parameter import is_lazy

from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.categories import GRADIENTS, MASTERS, PARAMETERS, frames_of, innermost
from deepspeed.engine.offloading import accumulator_dtype, master_dtype, moments_bytes
from deepspeed.errors import MemoryExhaustedError
from deepspeed.foundation.container import Memory
from deepspeed.optim.precision import DTYPES
from deepspeed.zero.estimate import DEVICE, HOST, NVME, GroupState, rest_bytes
from deepspeed.zero.exhaustion import exhausted, is_exhaustion
from deepspeed.zero.policy import policy_for

REGION = 1 << 26  # bytes of the regions in which ranks of a machine share memory
_MARGIN = 1.05  # on what a setting is computed to take
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_AWAY = "masters, gradient sums and optimizer state leave it"


@dataclass(frozen=True)
class Advice:
    """Keys that would fit.

    Args:
        settings: a part of the JSON, to be laid over the user's; empty where no key helps.
        why: what they do, or why there are none.
    """

    settings: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"What would fit: {json.dumps(self.settings)}: {self.why}" if self.settings else self.why


@dataclass(frozen=True)
class Setting:
    """What decides how much state is near.

    Args:
        stage: of ZeRO.
        optimizer: place of masters, gradient sums and optimizer state.
        parameters: place of split parameters.
        buffers: `buffer_count` of the disk.
        live: most elements that are gathered at once (`stage3_max_live_parameters`); 0: two modules at a time.
    """

    stage: int
    optimizer: str = DEVICE
    parameters: str = DEVICE
    buffers: int = 4
    live: int = 0


@dataclass(frozen=True)
class Holding:
    """What a model makes state of.

    Args:
        trained: elements that are updated.
        frozen: the others.
        largest: elements of its two largest modules that are gathered at once, and of its largest one.
        widths: bytes of an element of parameters, master and accumulator.
        moments: bytes of optimizer state per element.
        ranks: that split it.
        accumulates: windows have several micro-batches.
        bucket: `reduce_bucket_size`.
        near: places that are the memory that ran out.
        addresses: what is limited are addresses of this process: what it maps of its neighbours' memory counts.
    """

    trained: int
    frozen: int
    largest: tuple[int, int]
    widths: tuple[int, int, int]
    moments: float
    ranks: int
    accumulates: bool
    bucket: int
    near: frozenset[str] = field(default_factory=lambda: frozenset((DEVICE,)))
    addresses: bool = False

    def needs(self, setting: Setting) -> float:
        """Bytes near, under a setting, at its fullest between micro-batches."""
        policy, (itemsize, master, accumulator) = policy_for(setting.stage), self.widths
        slices = self.ranks if policy.owns_a_slice else 1
        whole = not policy.owns_a_slice or (self.accumulates and not policy.reduces_as_gradients_arrive)
        state = GroupState(
            self.trained, self.trained / slices, policy.gathers_before_use, itemsize, master, accumulator,
            self.moments, whole,
        )  # fmt: skip
        found = rest_bytes(state, setting.optimizer, setting.parameters)
        total = sum(found.at(place) for place in self.near)
        total += self.frozen * itemsize / (self.ranks if policy.gathers_before_use else 1)
        pair, single = self.largest
        if self.addresses and self.ranks > 1:
            posted = state.own * itemsize if policy.gathers_before_use else 0.0
            posted += self.trained * accumulator if not policy.owns_a_slice else 3 * self.bucket * itemsize
            total += self.ranks * -(-posted // REGION) * REGION - (posted if not policy.owns_a_slice else 0.0)
        if policy.gathers_before_use:  # and gradients of such modules: filled, sent, received
            total += (max(pair, min(setting.live, self.trained)) + 3 * single * (self.ranks > 1)) * itemsize
        elif policy.owns_a_slice or itemsize < accumulator:
            total += min(2 * self.bucket, self.trained) * itemsize * (self.ranks > 1)
        if NVME in (setting.optimizer, setting.parameters) and HOST in self.near:
            # What is read ahead, what is written behind, the three tensors of the group that is updated, and what a
            # backward leaves of sums, and the first update of masters, before the disk has them.
            total += self.trained / slices * (accumulator + master)
            slice_ = max(single if policy.gathers_before_use else self.trained / 8, single) / slices
            total += (2 * setting.buffers + 3) * slice_ * max(master, accumulator, self.moments)
        return total


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take: of the device, or on a CPU under the limits of process and container."""
    free = get_accelerator().available_memory()
    if device.type != "cpu":
        return free
    container, held = Memory(), psutil.Process().memory_info()
    bounds = [free]
    if container.limit():
        bounds.append(container.limit() - container.used())
    for kind, taken in ((resource.RLIMIT_AS, held.vms), (resource.RLIMIT_DATA, getattr(held, "data", 0))):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            bounds.append(limit - taken)
    return max(0, min(bounds))


def near_places(device: torch.device) -> frozenset[str]:
    """See the note."""
    return frozenset((DEVICE, HOST) if device.type == "cpu" else (DEVICE,))


def _folder(config: DeepSpeedConfig) -> str:
    """A folder on a disk: the JSON's own, else one for temporary files that does not lie in memory, or ""."""
    zero = config.zero
    named = [str(part.nvme_path) for part in (zero.offload_optimizer, zero.offload_param) if part.nvme_path]
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    for folder in (*named, tempfile.gettempdir(), os.getcwd()):
        path = os.path.realpath(folder)
        while path not in mounted and path != os.path.dirname(path):
            path = os.path.dirname(path)
        if mounted.get(path, "") not in _IN_MEMORY and os.access(folder, os.W_OK):
            return folder
    return ""


def setting_of(config: DeepSpeedConfig) -> Setting:
    """What a configuration has."""
    places, zero = {"none": DEVICE, "cpu": HOST, "nvme": NVME}, config.zero
    split = policy_for(zero.stage).gathers_before_use
    parameters = places[zero.offload_param.device] if split else DEVICE
    optimizer = places[zero.offload_optimizer.device]
    live = zero.max_live_parameters if split else 0
    return Setting(zero.stage, optimizer, parameters, zero.offload_optimizer.buffer_count, live)


def _others(now: Setting, holding: Holding, stages: bool, disk: bool) -> Iterator[Setting]:
    """Settings that take less than `now`, those that change least first."""
    far = HOST if HOST not in holding.near else NVME
    top = [stage for stage in range(now.stage + 1, 4) if stages and holding.ranks > 1]
    yield from (replace(now, stage=stage) for stage in top)
    for place in dict.fromkeys((far, NVME)):
        if place == NVME and not disk:
            continue
        for buffers in dict.fromkeys((now.buffers, 1)) if place == NVME else (now.buffers,):
            for stage in (now.stage, *top):
                if policy_for(stage).owns_a_slice and (now.optimizer, now.buffers) != (place, buffers):
                    yield replace(now, stage=stage, optimizer=place, buffers=buffers)
        if stages or now.stage == 3:
            yield replace(now, stage=3, optimizer=place, parameters=place, buffers=1)


def advise_on_state(
    config: DeepSpeedConfig, holding: Holding, room: float, stages: bool = True, asked: str = "state"
) -> Advice:
    """The least change under which a model's state fits.

    Args:
        config: the user's.
        holding: what there is state of.
        room: bytes near that it may take.
        stages: a higher stage may be suggested (a pipeline has none).
        asked: what memory was asked for.
    """
    now, folder = setting_of(config), _folder(config)
    near, mib = "device" if HOST not in holding.near else "memory", 2**20
    least: tuple[float, Setting] | None = None
    for setting in _others(now, holding, stages, bool(folder)):
        if not _as_json(now, setting, folder, holding.largest[0]):
            continue
        need = holding.needs(setting) * _MARGIN
        if least is None or need < least[0]:
            least = need, setting
        if need <= room:
            zero = _as_json(now, setting, folder, holding.largest[0])
            split = f"stage {setting.stage} splits over {holding.ranks} ranks" if setting.stage > now.stage else ""
            moved = _AWAY if setting.optimizer != now.optimizer else ""
            what = "; ".join(part for part in (split, moved) if part) or "fewer buffers"
            takes = f"{asked} and the rest of the state take {need / mib:,.0f} MiB then, of {room / mib:,.0f}"
            return Advice({"zero_optimization": zero}, f"{what}: {takes}")
    if least is None:
        return Advice(
            {}, f"No stage and no place is left that leaves less of the state in this {near}: more ranks would"
        )
    keys = json.dumps(_as_json(now, least[1], folder, holding.largest[0]))
    return Advice(
        {},
        f"No stage and no place for state fits: the least, {keys} in zero_optimization, "
        f"takes {least[0] / mib:,.0f} MiB of the {near}, and {room / mib:,.0f} are there; "
        f"more ranks, or a cut of the model (tensor_parallel, pipeline), would",
    )


def _as_json(now: Setting, then: Setting, folder: str, pair: int) -> dict[str, Any]:
    """The keys of `zero_optimization` that lead from one setting to another."""
    names, found = {HOST: "cpu", NVME: "nvme"}, dict[str, Any]()
    if then.stage != now.stage:
        found["stage"] = then.stage
        if policy_for(then.stage).gathers_before_use:
            found |= {"stage3_max_live_parameters": pair, "stage3_max_reuse_distance": 0}
            found |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    changed = then.buffers != now.buffers
    for key, was, place in (
        ("offload_optimizer", now.optimizer, then.optimizer), ("offload_param", now.parameters, then.parameters)
    ):  # fmt: skip
        if place != DEVICE and (place != was or changed):
            found[key] = {"device": names[place]}
            if place == NVME:
                found[key] |= {"nvme_path": folder, **({"buffer_count": then.buffers} if changed else {})}
                found[key] |= {"max_in_cpu": 0} if key == "offload_param" else {}
    return found


def holding_of(
    config: DeepSpeedConfig, parts: Sequence[tuple[int, bool]], largest: tuple[int, int], ranks: int,
    optimizer: torch.optim.Optimizer | None, device: torch.device,
) -> Holding:  # fmt: skip
    """What a model makes state of.

    Args:
        config: resolved.
        parts: elements of each parameter, and whether it is updated.
        largest: see `Holding`.
        ranks: that split it.
        optimizer: that updates it.
        device: where it computes.
    """
    low = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    dtype = DTYPES[low]
    master = master_dtype(config, dtype)
    return Holding(
        trained=sum(numel for numel, updated in parts if updated),
        frozen=sum(numel for numel, updated in parts if not updated),
        largest=largest,
        widths=(dtype.itemsize, master.itemsize, accumulator_dtype(config).itemsize),
        moments=moments_bytes(optimizer, master),
        ranks=ranks,
        accumulates=config.gradient_accumulation_steps > 1,
        bucket=config.zero.reduce_bucket_size,
        near=near_places(device),
        addresses=device.type == "cpu" and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY,
    )


def tells_what_fits(build: Callable[..., Any]) -> Callable[..., Any]:
    """`build`, whose running out of memory comes as an error with the keys under which the state would fit."""

    @functools.wraps(build)
    def told(model: Any, optimizer: Any, config: DeepSpeedConfig, axes: Any, device: torch.device, *more: Any) -> Any:
        # The model's own parameters become state: their room is there too.
        own = [
            p for p in model.parameters() if p.device == device and not is_lazy(p)
        ]  # lazy ones are refused by `build`
        room = free_bytes(device) + sum(p.numel() * p.element_size() for p in own)
        try:
            made = build(model, optimizer, config, axes, device, *more)
            made.room = room
            return made
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_exhaustion(error):
                raise
            trained = {p for group in optimizer.param_groups for p in group["params"]} if optimizer else set()
            parts = [(p.numel(), p in trained) for p in model.parameters()]
            sizes = sorted((numel for numel, _ in parts), reverse=True) or [0]
            holding = holding_of(config, parts, (sum(sizes[:2]), sizes[0]), axes.same_slice.size, optimizer, device)
            category = innermost(list(frames_of(error)), PARAMETERS)
            category = category if category in (MASTERS, GRADIENTS) else PARAMETERS
            advice = advise_on_state(config, holding, room, axes.mesh.size("pp") == 1, category)
            generic = exhausted("the training state of an engine was made", error)
            found = MemoryExhaustedError(f"memory ran out for {category}. {advice}. {generic}")
            found.category, found.suggestion = category, advice.settings
            raise found from error

    return told
