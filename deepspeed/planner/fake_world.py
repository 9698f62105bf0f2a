"""Simulated world of a prediction: this process is one rank, the others do not exist, and tensors have no values.

`comm/fake_world.py` replaces the other ranks; this module replaces functions of other packages that would need
other ranks or values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

from deepspeed.comm.fake_world import fake_ranks
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.engine import pipeline_setup
from deepspeed.foundation.fake_mode import with_values
from deepspeed.moe.simulated import simulated_experts
from deepspeed.pipe import executor, partition_cost
from deepspeed.pipe.fake_stages import AbsentStages
from deepspeed.sequence import transformers_adapter
from deepspeed.storage import tensor_file
from deepspeed.storage.simulated import SimulatedDisk
from deepspeed.tensor_parallel import plan
from deepspeed.tensor_parallel.channel_dependencies import ModuleInputs
from deepspeed.zero.gradients import reducer, row_exchange
from deepspeed.zero.gradients.buckets import Bucket


@contextlib.contextmanager
def simulated_world(rank: int, size: int, expert_load: float = 1.0, **world: Any) -> Generator[None]:
    """Simulate rank `rank` of `size` in this process inside the context. Arguments and errors as in `fake_ranks` and
    `simulated_experts`."""
    with fake_ranks(rank, size, **world), without_values(expert_load):
        yield


@contextlib.contextmanager
def without_values(expert_load: float = 1.0) -> Generator[None]:
    """Let engines run without values and other pipeline stages in the context; `expert_load`: see `predict_memory`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(tensor_file.disks.replaced(SimulatedDisk))
        stack.enter_context(executor.other_stages.replaced(AbsentStages))
        stack.enter_context(partition_cost.clocks.replaced(partition_cost.operations_clock))
        stack.enter_context(pipeline_setup.meters.replaced(lambda _config, _mesh: None))
        stack.enter_context(transformers_adapter.position_gathers.replaced(_continued_positions))
        stack.enter_context(plan.probes.replaced(_drawn_calls))
        stack.enter_context(simulated_experts(expert_load))
        # Which rows are zero is not known without values.
        stack.enter_context(row_exchange.exchange_of.replaced(lambda _group, _whole: None))
        stack.enter_context(reducer.unlaunched_copies.replaced(_send_zeros_of_absent_stages))
        yield


def _continued_positions(own: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the position ids of the whole sequence, extrapolated from this rank's, since other ranks do not exist."""
    transformers_adapter.gather_positions(own, axis)  # records the message
    tokens = own.shape[1]
    before = torch.arange(-axis.rank * tokens, 0, device=own.device) + own[:, :1]
    after = torch.arange(1, 1 + (axis.size - 1 - axis.rank) * tokens, device=own.device) + own[:, -1:]
    return torch.cat([before, own, after], 1)


def _send_zeros_of_absent_stages(sender: reducer.Reducer, bucket: Bucket) -> None:
    """Reduce zeros for a bucket of tied parameters if only other pipeline stages compute their gradients."""
    if any(member.param.requires_grad for member in bucket.group.members) and not any(bucket.launches):
        bucket.prepare()
        bucket.touched = bytearray(b"\1" * len(bucket.touched))
        sender.send_zeros(bucket, int(bucket.sums_locally), bucket.factor)


_known_regions: plan.KnownRegions = {}  # shared by all simulations, which draw the same values


def _drawn_calls(calls: plan.Calls) -> tuple[plan.Calls, plan.KnownRegions]:
    """Replace recorded arguments, which have no values, by random values; also returns the cache of known regions."""
    return {home: list(map(_drawn, each)) for home, each in calls.items()}, _known_regions


def _drawn(call: ModuleInputs) -> ModuleInputs:
    generator = torch.Generator().manual_seed(13)

    def change(_path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        with with_values():
            return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    return call.mapped(change)
