"""Builds the mesh of a run from the JSON, `mesh_param` and a client's `mpu`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deepspeed.comm.process_groups.mesh import MODEL, Asked, Mesh, mesh_for, mesh_of_unit, ranks_started, resolve
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError


def find_mesh(
    config: DeepSpeedConfig | None, mpu: Any, mesh_param: Any, device: torch.device, also: Iterable[Asked] = ()
) -> Mesh:
    """The mesh of an engine, from its JSON, `mesh_param` and `mpu` together. All ranks call together.

    Args:
        config: as `DeepSpeedConfig.for_init` reads it, or None.
        mpu: a client's model-parallel unit, or None.
        mesh_param: sizes by axis name, or (data-parallel ranks, ranks of a sequence), or None.
        device: where messages start.
        also: what was asked for besides.

    Raises:
        MeshError: they contradict one another, or the ranks do not make such a mesh.
    """
    asked = [*(config.mesh_sizes() if config is not None else ()), *_asked_by(mesh_param), *also]
    if mpu is not None:
        return mesh_of_unit(mpu, asked, device)
    return mesh_for(resolve(ranks_started(), asked), None, device)


def _asked_by(mesh_param: Any) -> list[Asked]:
    if mesh_param is None:
        return []
    if isinstance(mesh_param, (tuple, list)) and len(mesh_param) == 2:
        mesh_param = dict(zip(("dp", "sp"), mesh_param, strict=True))
    if not isinstance(mesh_param, Mapping) or not all(type(size) is int for size in mesh_param.values()):
        raise ArgumentError(
            f"mesh_param is {mesh_param!r}; it takes sizes by axis name, as {{'dp_shard': 4}}, or (data-parallel "
            f"ranks, ranks of a sequence)"
        )
    return [(str(dim), size, "mesh_param") for dim, size in mesh_param.items() if size != 1 or dim not in MODEL]
