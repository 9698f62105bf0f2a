"""Assembles a global tensor from the regions of an axis's ranks, and splits it again."""

from __future__ import annotations

import torch

from deepspeed.comm.collectives.autograd import gathered
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.zero.layout.regions import Region, RegionRange, copies


def join_boxes(local: torch.Tensor | None, box: Region, axis: Axis, label: str) -> torch.Tensor | None:
    """The global tensor. All ranks of the axis call together."""
    everyone = all_gather_objects(axis, (box, None if local is None else (local.dtype, local.device.type)))
    known = next((kind for _, kind in everyone if kind is not None), None)
    if known is None:
        return None
    if local is None:
        local = torch.zeros(box.local_shape, dtype=known[0], device=known[1])
    sizes = [region.numel for region, _ in everyone]
    parts = gathered(local.reshape(-1), axis, 0, sizes, label).split(sizes)
    whole = local.new_zeros(box.shape)
    for (region, _), part in zip(everyone, parts, strict=True):
        _copy(part, region, whole, Region(box.shape))
    return whole


def take_box(whole: torch.Tensor, box: Region) -> torch.Tensor:
    """This rank's tensor of a global one; padding is zero."""
    local = whole.new_zeros(box.local_shape)
    _copy(whole.contiguous(), Region(box.shape), local, box)
    return local


def _copy(source: torch.Tensor, of: Region, into: torch.Tensor, to: Region) -> None:
    for copy in copies(RegionRange(of, 0, of.numel), RegionRange(to, 0, to.numel)):
        copy(source.reshape(-1), into.view(-1))
