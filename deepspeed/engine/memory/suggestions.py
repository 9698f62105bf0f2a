"""Suggestions of keys of the JSON with which training state fits into memory.

[Note: what counts as near] Near memory is the memory that ran out: a device's, or on a CPU the process's own, which
also contains host buffers. State on a disk is never near; state on the host is near on a CPU.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from torch.nn.parameter import is_lazy

from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.memory.categories import GRADIENTS, MASTERS, PARAMETERS, POOLS, frames_of, innermost
from deepspeed.engine.offload_plan import accumulator_dtype, master_dtype, moments_bytes
from deepspeed.errors import MemoryExhaustedError
from deepspeed.foundation.cgroup import CgroupMemory
from deepspeed.foundation.malloc import IN_HEAP, heap, limits_addresses
from deepspeed.optim.precision import DTYPES
from deepspeed.zero.api.memory_estimate import DEVICE, HOST, NVME, GroupState
from deepspeed.zero.layout.stages import Policy, policy_for
from deepspeed.zero.layout.units import units_of
from deepspeed.zero.out_of_memory import is_exhaustion
from deepspeed.zero.parameters.grouping import MIN_BUCKET_NUMEL, MIN_BUCKETS, bins
from deepspeed.zero.parameters.parameter import ManagedParameter, is_managed

REGION = 1 << 26  # bytes of the regions in which ranks of a machine share memory
_MARGIN = 1.05  # factor on the computed memory of a setting
_TEMPORARIES = 2  # temporary tensors of a parameter's size that torch's optimizers allocate in an update
_HOLES = 1 << 26  # bytes that fragmentation of the heap is assumed to cost at most
_BROADCAST = 1 << 25  # bytes of the buffers in which a model is broadcast
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_AWAY = "masters, gradient sums and optimizer state leave it"


@dataclass(frozen=True)
class Advice:
    """Suggested keys of the JSON, or the reason why there are none."""

    settings: dict[str, Any]  # part of a JSON, to be merged into the user's; empty if no key helps
    why: str  # effect of these keys, or the reason why there are none

    def __str__(self) -> str:
        return f"What would fit: {json.dumps(self.settings)}: {self.why}" if self.settings else self.why


@dataclass(frozen=True)
class Setting:
    """Settings of the JSON that determine how much training state is in the memory that ran out."""

    stage: int  # ZeRO stage
    optimizer: str = DEVICE  # place of masters, gradient sums and optimizer state
    parameters: str = DEVICE  # place of sharded parameters
    buffers: int = 4  # `buffer_count` for the disk
    live: int = 0  # maximum of gathered elements (`stage3_max_live_parameters`); 0: two modules at a time

    @classmethod
    def of(cls, config: DeepSpeedConfig) -> Setting:
        places, zero = {"none": DEVICE, "cpu": HOST, "nvme": NVME}, config.zero
        split = policy_for(zero.stage).gathers_before_use
        parameters = places[zero.offload_param.device] if split else DEVICE
        optimizer = places[zero.offload_optimizer.device]
        live = zero.max_live_parameters if split else 0
        return cls(zero.stage, optimizer, parameters, zero.offload_optimizer.buffer_count, live)

    def smaller(self, holding: Holding, stages: bool, disk: bool) -> Iterator[Setting]:
        """Yield settings that may need less memory, the smallest changes first.

        Args:
            holding: sizes of the model.
            stages: also yield higher ZeRO stages.
            disk: a folder for NVMe offload exists.
        """
        now, far = self, HOST if HOST not in holding.near else NVME
        if policy_for(now.stage).gathers_before_use and now.live > holding.pair:
            yield (now := replace(now, live=0))
        top = [stage for stage in range(now.stage + 1, 4) if stages and holding.ranks > 1]
        yield from (replace(now, stage=stage) for stage in top)
        for place in dict.fromkeys((far, NVME)):
            if place == NVME and not disk:
                continue
            for buffers in dict.fromkeys((now.buffers, 1)) if place == NVME else (now.buffers,):
                for stage in (now.stage, *top):
                    if policy_for(stage).owns_a_shard and (now.optimizer, now.buffers) != (place, buffers):
                        yield replace(now, stage=stage, optimizer=place, buffers=buffers)
            if stages or now.stage == 3:
                yield replace(now, stage=3, optimizer=place, parameters=place, buffers=1)

    def keys_to(self, then: Setting, folder: str, pair: int) -> dict[str, Any]:
        """Return the keys of `zero_optimization` that change this setting to `then`.

        Args:
            folder: path for NVMe offload.
            pair: `Holding.pair` of the model.
        """
        names, keys = {HOST: "cpu", NVME: "nvme"}, dict[str, Any]()
        if then.stage != self.stage:
            keys["stage"] = then.stage
        if policy_for(then.stage).gathers_before_use and (then.stage, then.live) != (self.stage, self.live):
            keys |= {"stage3_max_live_parameters": pair, "stage3_max_reuse_distance": 0}
            keys |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
        changed = then.buffers != self.buffers
        for key, was, place in (
            ("offload_optimizer", self.optimizer, then.optimizer), ("offload_param", self.parameters, then.parameters)
        ):  # fmt: skip
            if place != DEVICE and (place != was or changed):
                keys[key] = {"device": names[place]}
                if place == NVME:
                    keys[key] |= {"nvme_path": folder, **({"buffer_count": then.buffers} if changed else {})}
                    keys[key] |= {"max_in_cpu": 0} if key == "offload_param" else {}
        return keys


@dataclass(frozen=True)
class Holding:
    """Sizes of a model that determine its training state.

    Args:
        trained: elements that are updated.
        frozen: elements that are not updated.
        tensors: elements of each updated parameter.
        units: elements of each module that is gathered as one.
        widths: bytes per element of parameters, masters and accumulators.
        moments: bytes of optimizer state per element.
        ranks: number of ranks that shard the state.
        accumulates: windows have several micro-batches.
        bucket: `reduce_bucket_size`.
        near: places that count as the memory that ran out.
        addresses: the limit is on this process's address space, so mapped memory of other ranks counts.
        birth: bytes of the user's model, which is whole before it is sharded.
    """

    trained: int
    frozen: int
    tensors: tuple[int, ...]
    units: tuple[int, ...]
    widths: tuple[int, int, int]
    moments: float
    ranks: int
    accumulates: bool
    bucket: int
    near: frozenset[str] = field(default_factory=lambda: frozenset((DEVICE,)))
    addresses: bool = False
    birth: int = 0

    @classmethod
    def of(
        cls,
        config: DeepSpeedConfig,
        parts: Sequence[tuple[int, bool]],
        units: tuple[int, ...],
        birth: int,
        ranks: int,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> Holding:
        """Create the sizes of a model; `parts` are (elements, whether updated) per parameter, in the model's order."""
        dtype = DTYPES["fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"]
        master = master_dtype(config, dtype)
        return cls(
            trained=sum(numel for numel, updated in parts if updated),
            frozen=sum(numel for numel, updated in parts if not updated),
            tensors=tuple(numel for numel, updated in parts if updated),
            units=units,
            widths=(dtype.itemsize, master.itemsize, accumulator_dtype(config).itemsize),
            moments=moments_bytes(optimizer, master),
            ranks=ranks,
            accumulates=config.gradient_accumulation_steps > 1,
            bucket=config.zero.reduce_bucket_size,
            near=near_places(device),
            addresses=device.type == "cpu" and limits_addresses(),
            birth=birth,
        )

    def needs(self, setting: Setting) -> float:
        """Return the peak bytes of the training state in the memory that ran out, under a setting; no activations."""
        policy = policy_for(setting.stage)
        groups = self._groups(policy)
        total = self._rest(setting, policy) + self._of_backward(setting, policy, max(groups, default=0))
        total += self._of_update(setting, policy, groups)
        # During `build`: buffers of the broadcast, then a group's buffers in addition to the tensors it replaces.
        first = max(groups, default=0) * (self.widths[0] + self.widths[1] * (self.widths[0] != self.widths[1]))
        staged = min(self.birth, 3 * _BROADCAST) if self.ranks > 1 else 0
        return max(total, self.birth + max(staged, first if self.birth else 0))

    def _slices(self, policy: Policy) -> int:
        return self.ranks if policy.owns_a_shard else 1

    @property
    def pair(self) -> int:
        """Return the total elements of the two largest units, which can be gathered at the same time."""
        return sum(sorted(self.units)[-2:])

    @property
    def _tensor(self) -> int:
        return max(self.tensors, default=0)

    def _groups(self, policy: Policy) -> list[int]:
        if policy.gathers_before_use:
            return list(self.units)
        limit = min(self.bucket, max((self.trained + self.frozen) // MIN_BUCKETS, MIN_BUCKET_NUMEL))
        return [sum(numels) for numels in bins(self.tensors[::-1], limit, int)]

    def _rest(self, setting: Setting, policy: Policy) -> float:
        own = self.trained / self._slices(policy)
        state = GroupState.of(policy, self.trained, own, self.widths, self.moments, self.accumulates)
        nbytes = state.rest_bytes(setting.optimizer, setting.parameters)
        total = sum(nbytes.at(place) for place in self.near)
        return total + self.frozen * self.widths[0] / (self.ranks if policy.gathers_before_use else 1)

    def _of_backward(self, setting: Setting, policy: Policy, group: int) -> float:
        """Return the bytes that backward needs: gathered parameters, gradients in autograd, buckets and messages."""
        itemsize, accumulator = self.widths[0], self.widths[2]
        total = float(self._tensor * itemsize)
        if policy.gathers_before_use:
            total += max(self.pair, min(setting.live, self.trained)) * itemsize
        if self.ranks == 1:  # the bucket is the sum itself, unless the sum is stored elsewhere or wider
            return total + (group * itemsize if setting.optimizer != DEVICE or itemsize < accumulator else 0)
        whole = not policy.owns_a_shard  # sums are sent in place
        rounds = min(self.trained, max(self.bucket, group)) + 2 * group  # elements filled, sent and received at once
        posted = self.trained * accumulator if whole else rounds * itemsize
        if not self.addresses:
            return total + (group * accumulator if whole else posted)
        own = self.trained / self.ranks * itemsize if policy.gathers_before_use and setting.parameters == DEVICE else 0
        mapped = self.ranks * -(-(posted + own) // REGION) * REGION
        return total + mapped - (posted if whole else own)

    def _of_update(self, setting: Setting, policy: Policy, groups: Sequence[int]) -> float:
        """Return the bytes that an update needs: the optimizer's temporaries, and buffers for state on a disk."""
        master, slices = self.widths[1], self._slices(policy)
        total = _TEMPORARIES * self._tensor / slices * master
        if NVME in (setting.optimizer, setting.parameters) and HOST in self.near:
            # Buffers for the groups that are read ahead, written behind and updated: each has master, sum and state.
            # Buffers are reused for tensors of equal size. The first update also allocates the state itself.
            of_one, widest = master + self.widths[2] + self.moments, max(master, self.widths[2], self.moments)
            counts = Counter(groups)
            of_size = (size * min((2 * setting.buffers + 2) * widest, count * of_one) for size, count in counts.items())
            total += (sum(of_size) + (self.moments + master) * max(groups, default=0)) / slices
        if HOST in self.near:
            # Fragmentation: free blocks of the heap that are too small for new tensors.
            widest = max(self.widths)
            total += min(self.trained * widest, _HOLES) + 2 * min(max(groups, default=0) * widest, IN_HEAP)
        return total


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on the device, or on a CPU under its limits."""
    free = get_accelerator().available_memory()
    if device.type != "cpu":
        return free
    container, held = CgroupMemory(), psutil.Process().memory_info()
    bounds = [free]
    if container.limit():
        bounds.append(container.limit() - container.used())
    for kind, taken in ((resource.RLIMIT_AS, held.vms), (resource.RLIMIT_DATA, getattr(held, "data", 0))):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            bounds.append(limit - taken)
    return max(0, min(bounds))


def near_places(device: torch.device) -> frozenset[str]:
    """Return the places of state that use the memory that ran out; see [Note: what counts as near]."""
    return frozenset((DEVICE, HOST) if device.type == "cpu" else (DEVICE,))


def _folder(config: DeepSpeedConfig) -> str:
    """Return a writable folder on a disk: the JSON's, else the one for temporary files or the current one, or ""."""
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


def advise_on_state(
    config: DeepSpeedConfig, holding: Holding, room: float, stages: bool = True, category: str = "state"
) -> Advice:
    """Return the smallest change of the JSON with which a model's state fits into the memory that ran out.

    Args:
        config: the current configuration.
        holding: sizes of the model.
        room: bytes of this memory for the training state.
        stages: allow a higher ZeRO stage (False for pipelines).
        category: category of the failed allocation, for the text.

    Returns:
        Advice, whose settings are empty if no setting fits.
    """
    now, folder = Setting.of(config), _folder(config)
    near, mib = "device" if HOST not in holding.near else "memory", 2**20
    least: tuple[float, Setting] | None = None
    for setting in now.smaller(holding, stages, bool(folder)):
        keys = now.keys_to(setting, folder, holding.pair)
        if not keys:
            continue
        need = holding.needs(setting) * _MARGIN
        if least is None or need < least[0]:
            least = need, setting
        if need <= room:
            split = f"stage {setting.stage} splits over {holding.ranks} ranks" if setting.stage > now.stage else ""
            moved = _AWAY if setting.optimizer != now.optimizer else ""
            fewer = "fewer buffers" if setting.buffers != now.buffers and not moved else ""
            remark = "two modules are gathered at a time" if setting.live != now.live else ""
            what = "; ".join(part for part in (split, moved, remark, fewer) if part)
            takes = f"{category} and the rest of the state take {need / mib:,.0f} MiB then, of {room / mib:,.0f}"
            return Advice({"zero_optimization": keys}, f"{what}: {takes}")
    if least is None:
        return Advice(
            {}, f"No stage and no place is left that leaves less of the state in this {near}: more ranks would"
        )
    nearest = json.dumps(now.keys_to(least[1], folder, holding.pair))
    return Advice(
        {},
        f"No stage and no place for state fits: the least, {nearest} in zero_optimization, "
        f"takes {least[0] / mib:,.0f} MiB of the {near}, and {room / mib:,.0f} are there; "
        f"more ranks, or a split of the model (tensor_parallel, pipeline), would",
    )


def units_in(model: torch.nn.Module, sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Return `Holding.units` of a model; `sizes`: elements by the id of a parameter, if they differ from `numel()`."""
    units: Counter[torch.nn.Module] = Counter()
    for param, unit in units_of(model).items():
        units[unit] += sizes.get(id(param), param.numel())
    return tuple(units.values())


def tells_what_fits(build: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `build`: out-of-memory errors become MemoryExhaustedError with keys that would help; sets `room`."""

    @functools.wraps(build)
    def build_or_advise(
        model: Any, optimizer: Any, config: DeepSpeedConfig, axes: Any, device: torch.device, *more: Any
    ) -> Any:
        # The state replaces the model's own parameters, so their memory counts as free. `build` refuses lazy ones.
        own = [p for p in model.parameters() if p.device == device and not (is_lazy(p) or is_managed(p))]
        limited = device.type == "cpu" and limits_addresses()
        stays = heap() if limited else range(0)  # memory freed in the heap cannot be used for larger tensors
        model_bytes = sum(p.numel() * p.element_size() for p in own if not limited or p.data_ptr() not in stays)
        room = free_bytes(device) + model_bytes
        trained = {p for group in optimizer.param_groups for p in group["params"]} if optimizer else set()
        # Sizes of the whole parameters, also of those that are sharded already.
        sizes = {
            id(p): 0 if is_lazy(p) else p.ds_numel if isinstance(p, ManagedParameter) else p.numel()
            for p in model.parameters()
        }
        parts = [(sizes[id(p)], p in trained) for p in model.parameters()]
        try:
            components = build(model, optimizer, config, axes, device, *more)
            components.room, components.model_bytes = room, model_bytes
            return components
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_exhaustion(error):
                raise
            ranks, units = axes.dp_sp_group.size, units_in(model, sizes)
            holding = Holding.of(config, parts, units, model_bytes, ranks, optimizer, device)
            category = innermost(list(frames_of(error)), PARAMETERS)
            category = category if category in (MASTERS, GRADIENTS, POOLS) else PARAMETERS
            advice = advise_on_state(config, holding, room, axes.mesh.size("pp") == 1, category)
            first_line = str(error).strip().splitlines()[0]
            exhausted = MemoryExhaustedError(
                f"memory ran out for {category} while the training state of an engine was made ({first_line}). {advice}"
            )
            exhausted.category, exhausted.suggestion = category, advice.settings
            raise exhausted from error

    return build_or_advise
