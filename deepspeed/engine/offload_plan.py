"""Choice of the storage tiers of an engine's state, from `offload_optimizer` and `offload_param`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.foundation.log import log_rank0
from deepspeed.optim.precision import DTYPES
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.storage.host_tier import HostTier
from deepspeed.storage.nvme_tier import NvmeTier
from deepspeed.storage.tensor_file import disks
from deepspeed.storage.tier import Tier
from deepspeed.zero.api.memory_estimate import DEVICE, HOST, NVME, GroupState
from deepspeed.zero.layout.layout import ShardLayout
from deepspeed.zero.layout.stages import Policy, policy_for
from deepspeed.zero.parameters.record import Tiers

_PLACES = {"none": DEVICE, "cpu": HOST, "nvme": NVME}


class Offload:
    """Storage tiers of one engine. All state in the same place shares one tier and the tier's buffers."""

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.config = config
        self.optimizer, self.parameters = config.zero.offload_optimizer, config.zero.offload_param
        self._hosts: dict[bool, HostTier] = {}
        self._disks: dict[str, NvmeTier] = {}
        self._offloaded = self._seen = 0.0  # elements whose optimizer state is offloaded, and all so far
        self._in_cpu = 0.0  # elements of slices kept in host memory with NVMe

    @cached_property
    def active(self) -> bool:
        """Return whether the JSON offloads optimizer state, or parameters at stage 3."""
        gathers = policy_for(self.config.zero.stage).gathers_before_use
        return self.optimizer.device != "none" or (gathers and self.parameters.device != "none")

    def place(self, state: GroupState) -> Tiers:
        """Return the tiers for the optimizer state and the parameters of the next group, described by `state`."""
        offloads = state.master and self._offloads(state.numel)
        optimizer = self._tier(self.optimizer.device, for_optimizer=True) if offloads else RESIDENT
        parameters: Tier = RESIDENT
        if state.gathered:
            device = self.parameters.device
            if device == "nvme" and self._in_cpu + state.own <= self.parameters.max_in_cpu:
                device, self._in_cpu = "cpu", self._in_cpu + state.own
            parameters = self._tier(device, for_optimizer=False)
        return Tiers(optimizer, parameters)

    def _offloads(self, numel: float) -> bool:
        """Return whether to offload the next group of `numel` elements, so that the offloaded share is near `ratio`."""
        self._seen += numel
        chosen = self._offloaded + numel / 2 < self.optimizer.ratio * self._seen
        chosen |= self.optimizer.ratio == 1.0
        self._offloaded += numel * chosen
        return chosen and self.optimizer.device != "none"

    def _tier(self, device: str, for_optimizer: bool) -> Tier:
        section = self.optimizer if for_optimizer else self.parameters
        if device == "none":
            return RESIDENT
        if device == "cpu":
            if section.pin_memory not in self._hosts:
                self._hosts[section.pin_memory] = HostTier(BufferPool(pin=section.pin_memory))
            return self._hosts[section.pin_memory]
        path = str(section.nvme_path)
        if path not in self._disks:
            sections = [s for s in (self.optimizer, self.parameters) if s.device == "nvme" and s.nvme_path == path]
            self._disks[path] = NvmeTier(
                disks.current(path, settings=self.config.top.aio),
                BufferPool(pin=any(s.pin_memory for s in sections)),
                sum(s.buffer_count for s in sections),
                self.optimizer.pipeline_read,
                self.optimizer.pipeline_write,
            )
        return self._disks[path]

    def announce(self, groups: Sequence[tuple[GroupState, Tiers]]) -> dict[str, float]:
        """With offload, log the bytes of all groups by place, check the disks' free space and measure their speed.

        Returns:
            Bytes on this rank between steps, by place: "device", "host" and "nvme".

        Raises:
            StorageError: a disk has too little free space.
        """
        needs: dict[str, float] = dict.fromkeys((DEVICE, HOST, NVME), 0.0)
        on_disk: dict[int, float] = defaultdict(float)
        for state, places in groups:
            nbytes = state.rest_bytes(_PLACES[places.optimizer.name], _PLACES[places.parameters.name])
            for place in needs:
                needs[place] += nbytes.at(place)
            on_disk[id(places.optimizer)] += nbytes.optimizer.get(NVME, 0.0) + nbytes.gradients.get(NVME, 0.0)
            on_disk[id(places.parameters)] += nbytes.params.get(NVME, 0.0)
        if not self.active:
            return needs
        total = sum(state.numel for state, _ in groups) or 1
        unit, name = (1e9, "GB") if sum(needs.values()) >= 1e9 else (1e6, "MB")
        shown = [
            f"{place} {held / unit:.2f} {name} ({held / total:.2f} B per parameter)" for place, held in needs.items()
        ]
        log_rank0(f"predicted for each rank at rest: {', '.join(shown)}")
        if self.parameters.device == "nvme" and any(s.gathered for s, _ in groups) and not needs[NVME]:
            log_rank0(
                "nothing rests on nvme: all of it is within offload_param.max_in_cpu; 0 there puts it on the disk"
            )
        for tier in self._disks.values():
            tier.disk.preflight(int(on_disk[id(tier)]))
        return needs


def _low_master(config: DeepSpeedConfig) -> torch.dtype | None:
    """Return the 16-bit dtype for masters and gradient sums if the JSON requests one, else None."""
    if config.fp16.enabled and config.fp16.fp16_master_weights_and_grads:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled and config.bf16.bf16_master_weights_and_grads else None


def master_dtype(config: DeepSpeedConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of masters for parameters of `dtype`: fp64 for fp64, else fp32 or the JSON's 16-bit dtype."""
    return dtype if dtype in (_low_master(config), torch.float64) else torch.float32


def accumulator_dtype(config: DeepSpeedConfig) -> torch.dtype:
    """Return the dtype in which the JSON lets gradients accumulate."""
    return _low_master(config) or DTYPES[config.data_types.grad_accum_dtype]


def state_of_group(
    config: DeepSpeedConfig,
    cut: tuple[Policy, ShardLayout],
    rank: int,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    optimizer: torch.optim.Optimizer | None,
) -> GroupState:
    """Return the sizes of a group's training state on this rank.

    Args:
        cut: policy and layout of the group.
        rank: position among the ranks that shard the group.
        dtypes: of the parameters and of the master; None without a master.
        optimizer: the inner optimizer; None: no optimizer state.
    """
    (policy, layout), (dtype, master) = cut, dtypes
    own = layout.shard_numel(rank) if policy.owns_a_shard else layout.padded
    widths = dtype.itemsize, 0 if master is None else master.itemsize, accumulator_dtype(config).itemsize
    accumulates = config.gradient_accumulation_steps > 1
    return GroupState.of(policy, layout.padded, own, widths, moments_bytes(optimizer, master), accumulates)


_MOMENTS = {"SGD": 1, "Lion": 1, "FusedLion": 1, "DeepSpeedCPULion": 1, "Adagrad": 1, "DeepSpeedCPUAdagrad": 1}


def moments_bytes(optimizer: torch.optim.Optimizer | None, master: torch.dtype | None) -> float:
    """Return the bytes of optimizer state per element: two moments, unless the class is known to have fewer.

    0 without an optimizer or if `master`, the dtype of the master, is None.
    """
    if optimizer is None or master is None:
        return 0.0
    count = _MOMENTS.get(type(optimizer).__name__, 2)
    if type(optimizer) is torch.optim.SGD and not optimizer.defaults["momentum"]:
        count = 0
    wide = getattr(optimizer, "fp32_optimizer_states", False)
    return float(count * (torch.float32.itemsize if wide else master.itemsize))
