"""Sizes of a mesh: what is asked together, what is left, what contradicts, what is nearest."""

from __future__ import annotations

import itertools
import math

import pytest

from deepspeed.comm.process_groups.mesh import DIMS, UNITS, Mesh, resolve
from deepspeed.errors import MeshError


@pytest.mark.parametrize(
    ("world", "asked", "wanted"),
    [
        (8, [], {"dp_shard": 8}),
        (8, [("tp", 2, "a")], {"tp": 2, "dp_shard": 4}),
        (8, [("tp", 2, "a"), ("pp", 2, "b"), ("sp", 2, "c")], {"tp": 2, "pp": 2, "sp": 2, "dp_shard": 1}),
        (8, [("tp", -1, "a"), ("dp", 2, "b")], {"tp": 4, "dp_shard": 2}),
        (8, [("pp", -1, "a"), ("dp_shard", 2, "b"), ("tp", 2, "c")], {"pp": 2, "tp": 2, "dp_shard": 2}),
        (8, [("dp_shard", 2, "a")], {"dp_shard": 2, "dp_replicate": 4}),
        (8, [("dp_replicate", 2, "a")], {"dp_shard": 4, "dp_replicate": 2}),
        (8, [("dp_replicate", 2, "a"), ("dp_shard", -1, "a")], {"dp_shard": 4, "dp_replicate": 2}),
        (8, [("shard", 4, "mics"), ("sp", 2, "b")], {"dp_shard": 2, "dp_replicate": 2, "sp": 2}),
        (8, [("shard", 99, "mics")], {"dp_shard": 8}),
        (8, [("dp", 8, "a"), ("dp", 8, "b")], {"dp_shard": 8}),
        (6, [("tp", 3, "mpu"), ("dp", 2, "mpu")], {"dp_shard": 2, "tp": 3}),
    ],
)
def test_sizes(world: int, asked: list, wanted: dict[str, int]) -> None:
    assert resolve(world, asked) == {dim: wanted.get(dim, 1) for dim in DIMS}


@pytest.mark.parametrize(
    ("world", "asked", "words"),
    [
        (8, [("tp", 2, "mpu"), ("tp", 4, "mesh.tp")], ["mpu", "mesh.tp", "2", "4"]),
        (8, [("dp", 4, "data_parallel_size")], ["data_parallel_size", "4", "8"]),
        (6, [("tp", 4, "mesh.tp")], ["mesh.tp", "3", "6"]),
        (8, [("dp_shard", 3, "mesh.dp_shard")], ["mesh.dp_shard", "2", "4"]),
        (8, [("tp", -1, "a"), ("pp", -1, "b")], ["-1", "pp", "tp"]),
        (8, [("tp", 0, "mesh.tp")], ["mesh.tp", "0"]),
        (8, [("ep", 2, "mesh.ep")], ["mesh.ep", "ep"]),
        (8, [("shard", 3, "mics_shard_size"), ("sp", 2, "b")], ["mics_shard_size", "3", "2"]),
        (8, [("shard", 4, "mics_shard_size"), ("dp_shard", 2, "mesh.dp_shard")], ["mics_shard_size", "mesh.dp_shard"]),
        (8, [("tp", -1, "a"), ("dp", 3, "b")], ["3", "8"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(world: int, asked: list, words: list[str]) -> None:
    with pytest.raises(MeshError) as found:
        resolve(world, asked)
    assert all(word in str(found.value) for word in words), str(found.value)


def test_every_product_that_is_asked_for_whole_is_had() -> None:
    for sizes in itertools.product((1, 2, 3), repeat=5):
        asked = [(dim, size, "a") for dim, size in zip(DIMS, sizes, strict=True)]
        found = resolve(math.prod(sizes), asked)
        assert tuple(found.values()) == sizes


def test_a_mesh_of_one_rank_answers_as_a_unit() -> None:
    mesh = Mesh({})
    for unit in UNITS:
        assert getattr(mesh, f"get_{unit}_rank")() == 0 and getattr(mesh, f"get_{unit}_world_size")() == 1
    with pytest.raises(AttributeError, match="get_nothing_rank"):
        mesh.get_nothing_rank()
    with pytest.raises(MeshError, match="2 ranks"):
        Mesh({"tp": 2})
    with pytest.raises(MeshError, match="rows"):
        Mesh({"rows": 1})
