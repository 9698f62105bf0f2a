"""The device mesh: coordinates of every rank, and the ranks along any of its dimensions.

Dims, outermost first: `pp` pipeline stages, `dp_replicate` replicas of the sharded state (hybrid sharding), `dp_shard`
ranks that shard one replica, `sp` parts of a sequence, `tp` slices of a matrix. Consecutive ranks differ in the
innermost dim first. Ranks that differ only in `dp_*` or `sp` have the same model slice. ZeRO shards over dp_shard x sp.

Expert parallelism divides `dp_shard x sp` into `edp x ep`: ranks along `ep` divide a layer's experts, and ranks along
`edp` have the same experts. Layers may have different `ep` sizes on one mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.process_groups.axis import Axis, axes_here, get_own_group, make_axes
from deepspeed.comm.shutdown import Phase, released_in
from deepspeed.errors import MeshError

DIMS = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
DATA = ("dp_replicate", "dp_shard")  # ranks along these see different samples
REPLICATED = (*DATA, "sp")  # ranks along these have the same model slice
SHARD = ("dp_shard", "sp")  # ranks along these share one copy of the state
EXPERT_DIMS = ("pp", "dp_replicate", "edp", "ep", "tp")  # dims for parameters of experts
MODEL = ("pp", "tp")  # ranks along these have different slices of the model

Asked = tuple[str, int, str]  # dim (or "dp", "shard"), size, origin for messages (such as a configuration key)


class Mesh:
    """Device mesh: the coordinates of every rank. All ranks must create it.

    A mesh can be passed as `mpu`: it has methods such as `get_tensor_model_parallel_group` (Megatron) and
    `get_slice_parallel_rank` (older units).

    Args:
        sizes: ranks along each dim; a missing dim has size 1.
        ranks: global ranks in the order of their coordinates, the last dim fastest; None: 0, 1, 2, …
        device: device of the tensors that are sent along the axes; None: CPU.

    Raises:
        MeshError: a dim is unknown, `ranks` is no permutation, or the sizes do not multiply to the started ranks.

    Example:
        >>> mesh = Mesh({"dp_shard": 2, "tp": 2})  # on rank 0 of 4
        >>> mesh.axis("tp").ranks
        (0, 1)
    """

    def __init__(
        self, sizes: Mapping[str, int], ranks: Sequence[int] | None = None, device: torch.device | None = None
    ) -> None:
        unknown = sorted(set(sizes) - set(DIMS))
        if unknown:
            raise MeshError(f"a mesh has no axis {unknown[0]!r}; its axes are {', '.join(DIMS)}")
        self.sizes = {dim: int(sizes.get(dim, 1)) for dim in DIMS}
        self.world = math.prod(self.sizes.values())
        self.ranks = tuple(range(self.world)) if ranks is None else tuple(ranks)
        here = ranks_started()
        if self.world != here or sorted(self.ranks) != list(range(here)):
            raise MeshError(f"a mesh of {self.describe()} has {self.world} ranks, and {here} were started")
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.device, self.world_axes = device, axes_here()
        self._at = {rank: self._coordinates(index) for index, rank in enumerate(self.ranks)}
        self._axes: dict[tuple[tuple[str, ...], frozenset[int] | None, int], Axis] = {}
        for dims in (DIMS, DATA, REPLICATED, SHARD, MODEL, *((dim,) for dim in DIMS)):
            self.axis(*dims)  # all ranks create all groups here, in the same order

    def _coordinates(self, index: int) -> dict[str, int]:
        coordinates = {}
        for dim in reversed(DIMS):
            index, coordinates[dim] = divmod(index, self.sizes[dim])
        return {dim: coordinates[dim] for dim in DIMS}

    @property
    def coordinates(self) -> dict[str, int]:
        """Return this rank's coordinate along each dim."""
        return self._at[self.rank]

    def coordinates_of(self, rank: int) -> dict[str, int]:
        return self._at[rank]

    def size(self, *dims: str) -> int:
        return math.prod(self.sizes[dim] for dim in dims)

    def axis(self, *dims: str, stages: frozenset[int] | None = None, ep: int | None = None) -> Axis:
        """Return the axis of ranks that differ from this one only in the named dims. Collective over the world.

        Args:
            stages: with "pp" among the dims, the participating stages; other ranks are alone. None: all stages.
            ep: number of ranks that divide the experts of a layer; `dims` are then from `EXPERT_DIMS`.

        Raises:
            MeshError: `ep` does not divide the ranks of dp_shard x sp.
        """
        key = (tuple(dim for dim in (DIMS if ep is None else EXPERT_DIMS) if dim in dims), stages, ep or 0)
        known = self._axes.get(key)
        if known is None:
            label = self._label(key[0]) if ep is None else "_".join(key[0]).replace("ep", f"ep{ep}", 1)
            known = self._axes[key] = make_axes(self.rows(*dims, stages=stages, ep=ep), label, self.device)
        return known

    def rows(self, *dims: str, stages: frozenset[int] | None = None, ep: int | None = None) -> list[tuple[int, ...]]:
        """Partition all ranks into rows whose ranks differ only in the named dims; arguments as in `axis`."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            coordinates = self._at[rank] if ep is None else self.expert_coordinates(rank, ep)
            alone = stages is not None and coordinates["pp"] not in stages
            rows.setdefault(tuple(i for dim, i in coordinates.items() if alone or dim not in dims), []).append(rank)
        return [tuple(sorted(row)) for row in rows.values()]

    def expert_coordinates(self, rank: int, ep: int) -> dict[str, int]:
        """Return a rank's coordinates along `EXPERT_DIMS`; raises MeshError unless `ep` divides dp_shard x sp."""
        length = self.size(*SHARD)
        if ep < 1 or length % ep:
            fits = [n for n in range(1, length + 1) if length % n == 0]
            raise MeshError(f"ep {ep} does not divide the {length} rank(s) of dp_shard x sp; sizes that do: {fits}")
        place = self._at[rank]
        edp, index = divmod(place["dp_shard"] * self.sizes["sp"] + place["sp"], ep)
        return {"pp": place["pp"], "dp_replicate": place["dp_replicate"], "edp": edp, "ep": index, "tp": place["tp"]}

    @property
    def is_data_parallel(self) -> bool:
        """Return whether pp and tp have size 1, so that every rank has the whole model (or its ZeRO shards)."""
        return self.size(*MODEL) == 1

    def describe(self) -> str:
        """Describe the sizes, for example "dp_shard 4 x tp 2"."""
        named = [f"{dim} {size}" for dim, size in self.sizes.items() if size > 1]
        return " x ".join(named) or "one rank"

    def table(self) -> str:
        """Describe every dim, outermost first: its size and the first rank's row along it."""
        first, cells = self.ranks[0], []
        for dim, size in self.sizes.items():
            row = next(row for row in self.rows(dim) if first in row)
            cells.append(f"{dim} {size}" + (f" ({self._shortened(row)})" if size > 1 else ""))
        return " | ".join(cells)

    @classmethod
    def of_unit(cls, mpu: Any, asked: Iterable[Asked] = (), device: torch.device | None = None) -> Mesh:
        """Return the mesh that a client's model-parallel unit describes. All ranks must call this.

        The unit is a `Mesh`, or has `get_data_parallel_group` and, for each other dim of several ranks, a method that
        returns the dim's group. `asked`: see `resolve`.

        Raises:
            MeshError: the unit lacks `get_data_parallel_group`, or its groups form no mesh or contradict `asked`.
        """
        if isinstance(mpu, cls):
            groups = [
                (dim, size, "mpu")
                for dim, size in mpu.sizes.items()
                if dim not in DATA or mpu.sizes["dp_replicate"] > 1
            ]
            return mesh_for(resolve(mpu.world, [*groups, *asked]), mpu.ranks, device)
        if not callable(getattr(mpu, "get_data_parallel_group", None)):
            raise MeshError(
                f"mpu is a {type(mpu).__name__} without get_data_parallel_group(): it says which ranks share the "
                "gradients"
            )
        ranks_by_dim = {dim: cls._ranks_of_unit(mpu, calls) for dim, calls in _GROUPS.items()}
        size = ranks_started()
        if mpu.get_data_parallel_group() is None:  # the remaining ranks are data-parallel
            named = [(dim, len(row), "mpu") for dim, row in ranks_by_dim.items() if dim != "dp"]
            return mesh_for(resolve(size, [*named, *asked]), None, device)
        everyone: list[Any] = [ranks_by_dim]
        if size > 1:
            everyone = [None] * size
            dist.all_gather_object(everyone, ranks_by_dim)
        places: dict[tuple[int, ...], int] = {}
        for rank, rows in enumerate(everyone):
            place = tuple(row.index(rank) for row in rows.values())
            if places.setdefault(place, rank) != rank or any(len(rows[dim]) != len(ranks_by_dim[dim]) for dim in rows):
                raise MeshError(
                    f"mpu ({type(mpu).__name__}) describes no mesh: ranks {places[place]} and {rank} both stand at "
                    f"{dict(zip(rows, place, strict=True))}, or their groups differ in size"
                )
        sizes = resolve(size, [*((dim, len(row), "mpu") for dim, row in ranks_by_dim.items()), *asked])
        order = sorted(places, key=lambda place: (place[1], place[3], place[2], place[0]))  # pp, dp, sp, tp
        return mesh_for(sizes, [places[place] for place in order], device)

    @staticmethod
    def _ranks_of_unit(mpu: Any, calls: Sequence[str]) -> list[int]:
        call: Any = next((method for name in calls if callable(method := getattr(mpu, name, None))), None)
        group = call() if call is not None else None
        if group is not None:
            return list(dist.get_process_group_ranks(group))
        if not dist.is_initialized():
            return [0]
        return list(range(dist.get_world_size())) if calls == _GROUPS["dp"] else [dist.get_rank()]

    # -- methods of a model-parallel unit (mpu) --------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[[], Any]:
        match = self._unit_name(name)
        if match is None:
            raise AttributeError(f"a mesh has no {name!r}")
        dims, what = match
        return lambda: self.answer(dims, what)

    def answer(self, dims: tuple[str, ...], question: str) -> Any:
        """Return the process group ("group"), this rank's position ("rank") or the size ("world_size") along `dims`."""
        axis = self.axis(*dims)
        if question == "group":
            return axis.group if axis.group is not None else get_own_group()
        return axis.rank if question == "rank" else axis.size

    @staticmethod
    def _unit_name(name: str) -> tuple[tuple[str, ...], str] | None:
        for question in _QUESTIONS:
            unit = name.removeprefix("get_").removesuffix("_" + question)
            if name == f"get_{unit}_{question}" and unit in UNITS:
                return UNITS[unit], question
        return None

    @staticmethod
    def _shortened(ranks: Sequence[int]) -> str:
        """Format ranks, with the middle of long rows omitted."""
        names = [str(rank) for rank in ranks]
        return ",".join(names if len(names) <= 4 else [*names[:2], "…", names[-1]])

    @staticmethod
    def _label(dims: tuple[str, ...]) -> str:
        named = {DIMS: "world", DATA: "dp", REPLICATED: "dp_sp", SHARD: "shard", MODEL: "model"}
        return named.get(dims) or {"dp_replicate": "replicate"}.get(dims[0], "_".join(dims))


# Dims by the name of a group in the methods of model-parallel units.
UNITS = {
    "data_parallel": DATA,
    "model_parallel": MODEL,
    "tensor_model_parallel": ("tp",),
    "tensor_parallel": ("tp",),
    "slice_parallel": ("tp",),
    "pipeline_model_parallel": ("pp",),
    "pipe_parallel": ("pp",),
    "sequence_parallel": ("sp",),
    "sequence_data_parallel": REPLICATED,
}
_QUESTIONS = ("group", "rank", "world_size")


def ask_current(unit: str, question: str) -> Callable[[], Any]:
    """Create a function such as `get_data_parallel_rank`: `Mesh.answer` of the current mesh for dims UNITS[unit]."""

    def ask() -> Any:
        return current_mesh().answer(UNITS[unit], question)

    ask.__name__ = f"get_{unit}_{question}"
    ask.__doc__ = f"The {question.replace('_', ' ')} of {unit.replace('_', ' ')} on the current mesh."
    return ask


def _broadcast_source() -> int:
    """Return the lowest global rank with this rank's model slice, which broadcasts the parameters."""
    return current_mesh().axis(*UNITS["sequence_data_parallel"]).ranks[0]


# functions that scripts import by name: `get_data_parallel_group()`, `_get_data_parallel_group()`, …
CURRENT_GROUPS = SimpleNamespace(
    _get_broadcast_src_rank=_broadcast_source,
    **{
        f"{prefix}get_{unit}_{question}": ask_current(unit, question)
        for prefix in ("", "_")
        for unit in UNITS
        for question in _QUESTIONS
    },
)


# -- one mesh for the process ---------------------------------------------------------------------------------------

_meshes: list[Mesh] = []  # the newest last


def mesh_for(sizes: Mapping[str, int], ranks: Sequence[int] | None = None, device: torch.device | None = None) -> Mesh:
    """Make the mesh of these sizes current and return it; equal arguments, same object. All ranks must call this."""
    _meshes[:] = [mesh for mesh in _meshes if mesh.world_axes is axes_here()]  # drop those of earlier process groups
    for known in _meshes:
        same = all(known.sizes[dim] == sizes.get(dim, 1) for dim in DIMS) and known.device == device
        if same and known.ranks == (tuple(range(known.world)) if ranks is None else tuple(ranks)):
            break
    else:
        known = Mesh(sizes, ranks, device)
    _meshes[:] = [*(mesh for mesh in _meshes if mesh is not known), known]
    return known


@released_in(Phase.MESHES)
def forget_meshes() -> None:
    _meshes.clear()


def current_mesh() -> Mesh:
    """Return the mesh of the newest engine or `zero.Init`; else all ranks together create a data-parallel mesh."""
    if _meshes and _meshes[-1].world_axes is axes_here():
        return _meshes[-1]
    return mesh_for({"dp_shard": ranks_started()})


def ranks_started() -> int:
    """Return the number of ranks of the process group; 1 if there is no group."""
    return dist.get_world_size() if dist.is_initialized() else 1


# -- from a client's unit to a mesh ----------------------------------------------------------------------------------

# Methods of a unit that return the group along a dim; the first that exists is called. Megatron's are first, then those
# of older units, whose only model group is the tensor-parallel one.
_GROUPS = {
    "tp": ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group"),
    "pp": ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"),
    "sp": ("get_sequence_parallel_group",),
    "dp": ("get_data_parallel_group",),
}


# -- from requested sizes to all sizes -------------------------------------------------------------------------------


def resolve(world: int, asked: Iterable[Asked]) -> dict[str, int]:
    """Compute the sizes of a mesh from requested sizes.

    Args:
        world: number of started ranks.
        asked: (dim, size, origin), where dim is one of `DIMS`, "dp" for both data-parallel dims together, or "shard"
            for `dp_shard x sp` together. One size may be -1: all remaining ranks.

    Returns:
        The size of each dim of `DIMS`.

    Raises:
        MeshError: a dim or size is invalid, two origins disagree, or the sizes do not fit the world.
    """
    return _Sizes(world, asked).resolve()


class _Sizes:
    """Requested sizes with their origins; `resolve` computes the sizes of all dims."""

    def __init__(self, world: int, asked: Iterable[Asked]) -> None:
        self.world = world
        self.sizes: dict[str, int] = {}
        self.origins: dict[str, str] = {}
        sizes, origins = self.sizes, self.origins
        for dim, size, origin in asked:
            if dim not in (*DIMS, "dp", "shard"):
                raise MeshError(f"{origin}: a mesh has no axis {dim!r}; its axes are {', '.join(DIMS)} (and dp)")
            if size < 1 and size != -1:
                raise MeshError(f"{origin}: axis {dim} has {size} ranks; a size is 1 or more, or -1 for what is left")
            if sizes.setdefault(dim, size) != size:
                raise MeshError(
                    f"axis {dim} is {sizes[dim]} by {origins[dim]} and {size} by {origin}; drop one of them"
                )
            origins.setdefault(dim, origin)

    def resolve(self) -> dict[str, int]:
        sizes = self.sizes
        open_ = [dim for dim, size in sizes.items() if size == -1]
        if len(open_) > 1:
            raise MeshError(f"only one axis of a mesh may be -1, and {' and '.join(open_)} are")
        for dim in ("pp", "sp", "tp"):
            sizes.setdefault(dim, 1)
        data = self._data_size()
        replicate = sizes.get("dp_replicate")
        if "shard" in sizes:
            self._fold_shard(data)
        shard = sizes.get("dp_shard", -1)
        if shard == -1 or replicate == -1:
            known_size = replicate if shard == -1 else shard
            known_size = known_size if known_size and known_size > 0 else 1
            if data % known_size:
                why = f"{data} data-parallel rank(s) do not divide into {known_size}"
                raise self._impossible(why, data, known_size)
            shard, replicate = (data // known_size, known_size) if shard == -1 else (known_size, data // known_size)
        replicate = data // shard if replicate is None and not data % shard else replicate
        if replicate is None or shard * replicate != data:
            raise self._impossible(f"dp_shard {shard} does not divide {data} data-parallel rank(s)", data, shard)
        return {"pp": sizes["pp"], "dp_replicate": replicate, "dp_shard": shard, "sp": sizes["sp"], "tp": sizes["tp"]}

    def _data_size(self) -> int:
        """Return the number of data-parallel ranks; replaces a size -1 of pp, sp or tp."""
        world, sizes = self.world, self.sizes
        model = [dim for dim in ("pp", "sp", "tp") if sizes[dim] != -1]
        known = math.prod(sizes[dim] for dim in model)
        open_ = next((dim for dim in ("pp", "sp", "tp") if sizes[dim] == -1), None)
        data = sizes.get("dp", -1)
        both = [sizes.get(dim, -1) for dim in DATA]
        if data == -1 and -1 not in both:
            data = math.prod(both)
            self.origins["dp"] = " and ".join(self.origins[dim] for dim in DATA)
        if open_ is not None:
            data = data if data != -1 else max(both[0], 1) * max(both[1], 1)
            if world % (known * data):
                raise self._impossible(f"{known * data} rank(s) of the other axes do not divide {world}", world, data)
            sizes[open_] = world // (known * data)
            return data
        if world % known:
            largest = max(model, key=lambda dim: sizes[dim])
            product = " x ".join(f"{dim} {sizes[dim]}" for dim in model if sizes[dim] > 1)
            raise self._impossible(f"{product} does not divide {world} rank(s)", world, sizes[largest], largest)
        if data not in (-1, world // known):
            raise MeshError(
                f"axis dp is {data} by {self.origins['dp']}, and {world} rank(s) leave {world // known} for it "
                f"(pp {sizes['pp']} x sp {sizes['sp']} x tp {sizes['tp']})"
            )
        return world // known

    def _fold_shard(self, data: int) -> None:
        """Replace the size of "shard" (`mics_shard_size`) by dp_shard: that size divided by sp, at most `data`."""
        sizes, origins = self.sizes, self.origins
        asked, sp = sizes.pop("shard"), sizes["sp"]
        if asked % sp:
            raise MeshError(
                f"{origins['shard']} {asked} counts the {sp} rank(s) of a sequence, so it is a multiple of {sp}"
            )
        shard = min(asked // sp, data)
        if sizes.setdefault("dp_shard", shard) not in (shard, -1):
            raise MeshError(
                f"axis dp_shard is {sizes['dp_shard']} by {origins['dp_shard']} and {shard} by {origins['shard']}; "
                "drop one"
            )
        sizes["dp_shard"] = shard
        origins.setdefault("dp_shard", origins["shard"])

    def _impossible(self, why: str, of: int, near: int, dim: str = "") -> MeshError:
        """Create the error for a size that does not divide `of`; the message names the divisors nearest to `near`."""
        fits = sorted((d for d in range(1, of + 1) if of % d == 0), key=lambda d: (abs(d - near), d))[:2]
        known = [(name, size) for name, size in self.sizes.items() if name in self.origins]
        asked = ", ".join(f"{name} {size} (by {self.origins[name]})" for name, size in known)
        return MeshError(
            f"no mesh of {self.world} rank(s) has {asked}: {why}; the nearest sizes that fit"
            f"{' for ' + dim if dim else ''} are {' and '.join(map(str, sorted(fits)))}"
        )
