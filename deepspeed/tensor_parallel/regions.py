"""Regions of a model that can be cut: matrices whose outputs only some other matrices of the same block read.

The outputs of q, k and v are read by o alone, those of gate and up by down: the channels between can be shared out to
ranks. What the output of o reaches is the stream that runs through all blocks, which stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from deepspeed.tensor_parallel.layers import is_linear
from deepspeed.tensor_parallel.trace import STREAM, Node

_STREAM = "it reads the stream that runs through all blocks"


@dataclass
class Region:
    """Channels that can be shared out.

    Args:
        home: the module around all its layers.
        columns: layers whose outputs are shared out.
        rows: layers that read them.
        inner: those of the columns that read other columns.
        tables: parameters that indices choose from, whose results the rows read too.
        packed: matrices are parameters of `home` itself, as of experts.
    """

    home: str
    columns: list[str]
    rows: list[str]
    inner: set[str] = field(default_factory=set)
    tables: list[str] = field(default_factory=list)
    packed: bool = False


def owner(param: str) -> str:
    """The module that holds a parameter."""
    return param.rpartition(".")[0]


def join(home: str, name: str) -> str:
    """The full name of what has a name inside a module; the model itself is ""."""
    return f"{home}.{name}" if home and name else home or name


def lies_in(name: str, home: str) -> bool:
    """Whether a name is that of a module, or of something inside it."""
    return not home or f"{name}.".startswith(f"{home}.")


def around(name: str) -> list[str]:
    """The modules around a module and the module itself, the outermost first."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]


def by_module(params: Iterable[str]) -> dict[str, list[str]]:
    """The names of parameters in each module."""
    found: dict[str, list[str]] = {}
    for param in params:
        for module in around(owner(param)):
            found.setdefault(module, []).append(param)
    return found


def common(names: Iterable[str]) -> str:
    """The module around all modules."""
    paths = [name.split(".") for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def find_regions(model: nn.Module, nodes: Mapping[str, Node]) -> tuple[list[Region], dict[str, str]]:
    """The regions of a model, and why other matrices in its blocks stay whole.

    Args:
        model: as it was traced.
        nodes: of the trace.
    """
    modules = dict(model.named_modules())
    why: dict[str, str] = {}
    found = []
    order = {name: at for at, name in enumerate(nodes)}
    for members in _spaces(nodes):
        region, reason = _region(modules, nodes, order, members)
        for name in members[1] if region is None else ():
            if block(name) and (reason != _STREAM or name not in why):
                why[name] = reason
        if region is not None:
            found.append(region)
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    sizes = {name: sizes.get(name, 0) for name in nodes}

    def weight(region: Region) -> int:
        return sum(sizes[name] for name in {*region.columns, *region.rows})

    taken: set[str] = set()
    chosen = []
    for region in sorted(found, key=lambda one: (-weight(one), one.home)):
        mine = {*region.columns, *region.rows}
        if mine & taken or all(".lora_" in name for name in region.columns):
            continue
        taken |= mine
        chosen.append(region)
    return sorted(chosen, key=lambda one: order[one.rows[0]]), {n: why[n] for n in why if n not in taken}


def _spaces(nodes: Mapping[str, Node]) -> list[tuple[set[str], set[str]]]:
    """Sets of (what writes, what reads) that belong together; tables that indices choose from join nothing."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def find(key: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(key, key) != key:
            parent[key] = key = parent[parent[key]]  # halves the path: chains of sources are long
        return key

    writers = {node.name for node in nodes.values() if not node.lookup}
    stream: set[str] = set()  # that were joined for one reader: each block reads all that were written before
    for node in nodes.values():
        sources = node.sources & writers
        known = bool(stream) and stream <= sources
        for source in [*(sources - stream), next(iter(stream))] if known else sources:
            parent[find(("out", source))] = find(("in", node.name))
        stream = sources if len(sources) > len(stream) else stream
    spaces: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for side, name in list(parent):
        writes, reads = spaces.setdefault(find((side, name)), (set(), set()))
        (writes if side == "out" else reads).add(name)
    return list(spaces.values())


def block(name: str) -> str:
    """The first numbered module around a parameter; empty outside of all."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return match.group(0) if match else ""


def _spans(names: Iterable[str]) -> bool:
    """Whether names lie in several entries of one list of modules: blocks, not layers in a row inside of one."""
    seen: dict[str, set[str]] = {}
    for name in names:
        for match in re.finditer(r"(?<=\.)\d+(?=\.)", name):
            if name[: match.end()] == owner(name) != block(name):
                continue  # a layer itself, as of `Sequential(Linear, GELU, Linear)` in a block
            seen.setdefault(name[: match.start()], set()).add(match.group(0))
    return any(len(entries) > 1 for entries in seen.values())


def _is_stream(modules: Mapping[str, nn.Module], table: str, rows: list[str]) -> bool:
    """Whether a table outside of all blocks begins the stream: as wide as what rows give, unlike one by heads."""
    width = modules[owner(table)].get_parameter(table.rpartition(".")[2]).shape[-1]
    written = {size for row in rows for size in modules[owner(row)].get_parameter(row.rpartition(".")[2]).shape}
    return width in written


def _region(
    modules: Mapping[str, nn.Module],
    nodes: Mapping[str, Node],
    order: Mapping[str, int],
    space: tuple[set[str], set[str]],
) -> tuple[Region | None, str]:
    columns, reads = (sorted(one, key=order.__getitem__) for one in space)
    sources = set().union(*(nodes[name].sources for name in reads))
    tables = sorted(name for name in sources if name in nodes and nodes[name].lookup)
    rows = [name for name in reads if name not in space[0]]
    inner = {name for name in reads if name in space[0]}
    everything = [*columns, *rows]
    if STREAM in sources or any(not block(name) for name in everything) or _spans(everything):
        return None, _STREAM
    if any(not block(name) and _is_stream(modules, name, rows) for name in tables):
        return None, _STREAM
    if not rows:
        return None, "its results go back into itself"
    owners = {owner(name) for name in everything}
    if len(owners) == 1 and all(nodes_of.count(".") for nodes_of in everything):
        home = owners.pop()
        if not is_linear(modules[home]):
            return Region(home, columns, rows, inner, tables, packed=True), ""
    odd = [name for name in everything if not is_linear(modules[owner(name)])]
    if odd:
        return None, f"{odd[0]} of the same channels belongs to no linear layer"
    home = common(map(owner, everything))
    while home and isinstance(modules[home], (nn.ModuleList, nn.ModuleDict)):
        home = owner(home)  # a container is never called
    return Region(home, columns, rows, inner, tables), ""
