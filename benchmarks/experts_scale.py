"""Bytes that ranks send for the experts of a layer on 8 to 1,024 simulated cards, and where ZeRO 3 alone is faster.

`python -m benchmarks.experts_scale` writes tables and picture of docs/experts-scale.md. Bytes are counted: every
rank's `Routing` is built by the package from random choices, and forward and backward run `dispatch` and `combine` on
tensors without values (one process, no devices). They are compared with a formula:

    direction of a pass = sum over a rank's tokens of d × (H × itemsize + k × (itemsize + 8)) + 8 × (ranks - 1) × ranks

where d is the number of other ranks among a token's k choices.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.comm.collectives import scalars
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.moe import exchange
from deepspeed.moe.exchange import Routing, combine, dispatch
from deepspeed.ops.fake_tensors import Valueless
from deepspeed.simulator.machine import Machine

COUNT, NUMBER = 8, 8  # bytes of a token count, and of the number of an expert


@dataclass(frozen=True)
class Shape:
    """Published sizes of a model's layers of experts.

    Args:
        hidden: width of a token.
        inner: width of an expert.
        experts: routed experts of a layer.
        choices: experts of a token.
        layers: layers with experts.
        groups: groups of experts; 0: any expert may be chosen.
        of_groups: groups that a token's experts may be in.
    """

    hidden: int
    inner: int
    experts: int
    choices: int
    layers: int
    groups: int = 0
    of_groups: int = 0

    @property
    def layer_elements(self) -> int:
        """Elements of a layer's experts: gate, up and down of each."""
        return 3 * self.experts * self.hidden * self.inner

    def draw(self, tokens: int, seed: int) -> torch.Tensor:
        """Return (tokens, choices) experts, drawn with equal probability as the model's router may choose them."""
        scores = torch.rand(tokens, self.experts, generator=torch.Generator().manual_seed(seed))
        if self.groups:
            of_group = scores.view(tokens, self.groups, -1)
            best = of_group.topk(2, -1).values.sum(-1).topk(self.of_groups, -1).indices
            allowed = torch.zeros(tokens, self.groups, dtype=torch.bool).scatter_(1, best, True)
            scores = of_group.masked_fill(~allowed.unsqueeze(-1), -1.0).view(tokens, -1)
        return scores.topk(self.choices, -1).indices


SHAPES = {
    "Mixtral 8x7B": Shape(4096, 14_336, 8, 2, 32),
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8, 48),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8, 58, groups=8, of_groups=4),
}


@dataclass
class Sent:
    """Bytes that one rank sends to others in one pass through a layer, by direction.

    Args:
        to_experts: hidden states (or their gradients), weights, numbers of experts.
        to_tokens: results (or gradients of hidden states and weights).
        counts: token counts.
        rows: rows of this rank's tokens for other ranks.
        received: rows of other ranks' tokens for this rank.
    """

    to_experts: int = 0
    to_tokens: int = 0
    counts: int = 0
    rows: int = 0
    received: int = 0


class KnownCounts(scalars.Scalars):
    """Token counts of all ranks of an axis: recorded in a first round of calls, answered in a second."""

    def __init__(self) -> None:
        self.by_rank: dict[int, bytes] = {}
        self.sent = 0

    def rows(self, axis: Axis, row: bytes, tag: int, label: str, device: torch.device) -> list[bytes]:
        self.by_rank[axis.rank] = row
        self.sent += len(row) * (axis.size - 1)
        return [self.by_rank[rank] for rank in range(axis.size)] if len(self.by_rank) == axis.size else [row]


@contextlib.contextmanager
def counted(sent: dict[str, int]) -> Generator[None]:
    """Count the bytes of rows that leave the rank, by direction, in place of sending them."""

    def count(axis: Axis, parts: Any, table: Any) -> list[torch.Tensor]:
        me, received = axis.rank, []
        for label, rows in parts:
            assert rows.shape[0] == sum(table[me]), label
            leaving = rows.shape[0] - table[me][me]
            where = "to_experts" if label.endswith("to experts") else "to_tokens"
            sent[where] = sent.get(where, 0) + leaving * rows[:1].nbytes
            received.append(rows.new_zeros(sum(row[me] for row in table), *rows.shape[1:]))
        return received

    with exchange.row_exchange.replaced(count):
        yield


def axis_of(ranks: int, rank: int) -> Axis:
    """An axis whose other ranks do not exist."""
    return Axis("ep", tuple(range(ranks)), rank, None, False)


def count(
    shape: Shape, ep: int, tokens: int, ranks: list[int], dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Any], float]:
    """Count what some of `ep` ranks send in forward and in backward; every rank has tokens of its own.

    Returns:
        For each of `ranks`: (forward, backward, the rank's choices); the mean number of other ranks of a token.
    """
    owner = torch.arange(ep).repeat_interleave(shape.experts // ep)
    known, before = KnownCounts(), scalars.current
    scalars.current = known
    try:
        for rank in range(ep):
            Routing.of(shape.draw(tokens, rank), owner, axis_of(ep, rank), "a layer")
        counts = {rank: array("d", row) for rank, row in known.by_rank.items()}
        mean = sum(sum(row) - row[rank] for rank, row in counts.items()) / ep / tokens
        return [_of_rank(shape, tokens, dtype, owner, axis_of(ep, rank), known) for rank in ranks], mean
    finally:
        scalars.current = before


def _of_rank(
    shape: Shape, tokens: int, dtype: torch.dtype, owner: torch.Tensor, axis: Axis, known: KnownCounts
) -> tuple[Sent, Sent, torch.Tensor]:
    index, known.sent = shape.draw(tokens, axis.rank), 0
    forward, backward = dict[str, int](), dict[str, int]()
    with Valueless():
        hidden = torch.empty(tokens, shape.hidden, dtype=dtype).mul_(1).requires_grad_()
        weights = torch.empty(tokens, shape.choices, dtype=dtype).mul_(1).requires_grad_()
        with counted(forward):
            routing = Routing.of(index, owner, axis, "a layer")
            rows, of_rows, _ = dispatch(hidden, weights, index[routing.sent], routing)
            out = combine(rows * of_rows.sum(-1, keepdim=True), routing)
        counts = known.sent
        with counted(backward):
            out.backward(torch.empty_like(out).mul_(1))
    own = routing.table[axis.rank][axis.rank]
    there, back = len(routing.sent) - own, routing.received - own
    return Sent(**forward, counts=counts, rows=there, received=back), Sent(**backward, rows=there, received=back), index


def formula(shape: Shape, ep: int, index: torch.Tensor, rank: int, received: int, itemsize: int = 2) -> tuple[int, ...]:
    """Return the bytes (forward to experts, forward to tokens, backward to experts, backward to tokens, counts).

    Args:
        index: (T, k) the rank's choices.
        received: rows that come from other ranks, the same sum over their tokens.
    """
    each, rows = shape.experts // ep, 0
    for choices in index.tolist():
        rows += len({expert // each for expert in choices} - {rank})
    row, weights, numbers = shape.hidden * itemsize, shape.choices * itemsize, shape.choices * NUMBER
    to_experts, to_tokens = rows * (row + weights + numbers), received * row
    return to_experts, to_tokens, rows * row, received * (row + weights), COUNT * ep * (ep - 1)


# -- time of a layer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """Seconds of one layer, forward and backward, on one rank.

    Args:
        compute: products of attention and experts.
        hidden: messages that run beside the products: gathers and reductions of parameters.
        exposed: messages that the products wait for: tokens.
    """

    compute: float
    hidden: float
    exposed: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.hidden) + self.exposed


PASSES = 3  # forward counts once, backward twice: gradients of inputs and of weights


def side(shape: Shape, machine: Machine, ranks: int, ep: int, spread: float, tokens: int) -> Side:
    """Return the time of a layer at ZeRO 3 in bf16.

    Args:
        ranks: all ranks.
        ep: ranks that divide the experts; 1: none do.
        spread: other ranks that a token is sent to, on average.
        tokens: of a rank's micro-batch; as many arrive as are sent.
    """
    here, alike = shape.layer_elements / ep, tuple(range(0, ranks, ep))
    dense = 4 * shape.hidden**2
    flops = PASSES * 2.0 * tokens * (dense + 3 * shape.choices * shape.hidden * shape.inner)
    compute = machine.kernel("mm", flops, PASSES * 2 * (here + dense), "bf16")
    messages = [("all_gather", 2 * here)] * 2 + [("reduce_scatter", 2 * here)]
    hidden = sum(sum(machine.message(name, nbytes, alike)) for name, nbytes in messages)
    if ep == 1:
        return Side(compute, hidden, 0.0)
    group = tuple(range(ep))
    whole = 2.0 * tokens * shape.hidden * spread * ep / (ep - 1)  # with the rank's own part
    on_link, latency = machine.message("all_to_all", whole, group)
    return Side(compute, hidden, 4 * (on_link + latency) + latency)  # and the counts


def break_even(shape: Shape, machine: Machine, ranks: int, ep: int, spread: float, most: int = 2**22) -> int:
    """Return the largest number of tokens per rank at which divided experts take no longer than ZeRO 3 alone."""

    def is_faster(tokens: int) -> bool:
        whole = side(shape, machine, ranks, 1, 0.0, tokens)
        return side(shape, machine, ranks, ep, spread, tokens).seconds <= whole.seconds

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_faster(middle) else (low, middle - 1)
    return low


# -- the page ---------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[1] / "docs" / "experts-scale.md"
PICTURE = PAGE.parent / "images" / "experts-scale.svg"
BEGIN, END = "<!-- generated: `python -m benchmarks.experts_scale` -->", "<!-- end of what is generated -->"
CARD, TOKENS, PAGE_TOKENS = "H100-80GB", 64, 4096
SIZES = {"Mixtral 8x7B": (2, 4, 8), "Qwen3-30B-A3B": (8, 32, 128), "DeepSeek-V3": (8, 64, 256)}
RANKS = (64, 256, 1024)


def spreads() -> tuple[dict[tuple[str, int], float], list[str]]:
    """Count every shape and size; returns the mean number of other ranks of a token, and the lines of the table."""
    found = dict[tuple[str, int], float]()
    lines = ["| model | size | other ranks of a token | sent in a direction, MB per 4,096 tokens | over the formula |",
             "|---|--:|--:|--:|--:|"]  # fmt: skip
    for name, shape in SHAPES.items():
        for ep in SIZES[name]:
            ((forward, backward, index), *_), mean = count(shape, ep, TOKENS, [0])
            wanted = formula(shape, ep, index, 0, forward.received)
            got = (forward.to_experts, forward.to_tokens, backward.to_experts, backward.to_tokens, forward.counts)
            apart = max(abs(a / b - 1) for a, b in zip(got, wanted, strict=True))
            found[name, ep] = mean
            sent = mean * PAGE_TOKENS * (2 * shape.hidden + 10 * shape.choices) / 1e6
            lines.append(f"| {name} | {ep} | {mean:.2f} | {sent:,.0f} | {100 * apart:.2f} % |")
    return found, lines


def times(found: dict[tuple[str, int], float], machine: Machine) -> list[str]:
    """Lines of the table of break-even tokens."""
    lines = ["| model | size | " + " | ".join(f"{ranks:,} cards" for ranks in RANKS) + " |",
             "|---|--:|" + "--:|" * len(RANKS)]  # fmt: skip
    for (name, ep), spread in found.items():
        cells = [f"{break_even(SHAPES[name], machine, ranks, ep, spread):,}" for ranks in RANKS]
        lines.append(f"| {name} | {ep} | " + " | ".join(cells) + " |")
    return lines


def draw(found: dict[tuple[str, int], float], machine: Machine, path: Path, ranks: int = 256) -> None:
    """Draw the time of a layer by tokens, for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tokens = [2**power for power in range(8, 19)]
    with plt.rc_context({"svg.fonttype": "path", "svg.hashsalt": "experts-scale", "font.family": "DejaVu Sans"}):
        figure, panels = plt.subplots(1, len(SHAPES), figsize=(11, 3.6), layout="constrained")
        for axes, (name, shape) in zip(panels, SHAPES.items(), strict=True):
            whole = [1e3 * side(shape, machine, ranks, 1, 0.0, each).seconds for each in tokens]
            axes.loglog(tokens, whole, color="#1c2733", linestyle="--", label="ZeRO 3 alone")
            for ep, colour in zip(SIZES[name], ("#a9cdee", "#58a6ff", "#1f6fbf"), strict=True):
                sides = [side(shape, machine, ranks, ep, found[name, ep], each).seconds for each in tokens]
                axes.loglog(tokens, [1e3 * each for each in sides], color=colour, label=f"size {ep}")
            axes.set_title(name, loc="left", fontsize=11)
            axes.set_xlabel("tokens of a rank's micro-batch")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, frameon=False)
        panels[0].set_ylabel("ms for a layer, forward and backward")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main() -> None:
    """Write the page's tables and its picture."""
    machine = Machine.load(CARD)
    found, lines = spreads()
    block = "\n".join([BEGIN, "", *lines, "", f"Tokens of a rank's micro-batch up to which divided experts are faster "
                       f"({CARD}, 8 cards in a host):", "", *times(found, machine), "", END])  # fmt: skip
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN)], page[page.index(END) + len(END) :]
    PAGE.write_text(before + block + after)
    draw(found, machine, PICTURE)
    print(block)


if __name__ == "__main__":
    main()
