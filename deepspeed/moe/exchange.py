"""Sends the rows of tokens to the ranks that hold their experts, and their results back.

Every expert is held by one rank of an axis. A token is sent once to each rank that holds any of its experts, with the
weights of these experts; the results that come back are added. No token is dropped, and buffers hold what was sent:
ranks exchange their counts first, as one table. All ranks take part in every exchange, with or without rows.

| step     | forward                              | backward                             |
|----------|--------------------------------------|--------------------------------------|
| dispatch | rows and weights to the experts      | their gradients to the tokens, added |
| combine  | results to the tokens, added         | the tokens' gradient to the experts  |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm.collectives import scalars
from deepspeed.comm.collectives.collectives import SMALL, all_to_all_rows
from deepspeed.comm.collectives.same_error import meet_before
from deepspeed.comm.process_groups.axis import Axis

Table = list[list[int]]  # rows that rank r sends to rank p


@dataclass(frozen=True)
class Routing:
    """Which token is sent to which rank.

    Args:
        axis: the ranks that hold the experts.
        name: of the layer, for reports.
        tokens: number of tokens T of this rank.
        sent: (S,) int64: tokens in the order in which they are sent; a token stands once for each rank it goes to.
        choices: (S, k) bool: which of a sent token's choices are experts of the rank it goes to.
        table: numbers of rows that each rank sends to each.
    """

    axis: Axis
    name: str
    tokens: int
    sent: torch.Tensor
    choices: torch.Tensor
    table: Table

    @classmethod
    def of(cls, index: torch.Tensor, owner: torch.Tensor, axis: Axis, name: str) -> Routing:
        """Route tokens, and exchange the counts. All ranks call together.

        Args:
            index: (T, k) integer: the experts that each token has chosen.
            owner: (experts,) int64: position on the axis of the rank that holds an expert.
        """
        goes = owner.to(index.device)[index.long()]  # (T, k)
        choices = goes.unsqueeze(0) == torch.arange(axis.size, device=index.device).view(-1, 1, 1)  # (ranks, T, k)
        pairs = choices.any(-1)
        to, sent = pairs.nonzero(as_tuple=True)
        counts = [float(count) for count in pairs.sum(1).tolist()]
        label = f"token counts of {name}"
        meet_before(axis, label)
        table = scalars.current.table(axis, counts, axis.public_tag(SMALL), label, index.device)
        rows = [[int(count) for count in row] for row in table]
        return cls(axis, name, index.shape[0], sent, choices[to, sent], rows)

    @property
    def received(self) -> int:
        """Number of rows R that this rank gets."""
        return sum(row[self.axis.rank] for row in self.table)

    def to_experts(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        """Send (S, …) rows in the order of `sent`; returns the (R, …) rows that arrive here, in rank order."""
        return self._move(rows, self.table, f"{what} of {self.name} to experts")

    def to_tokens(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        """Send (R, …) rows back to where they came from; returns (S, …) rows in the order of `sent`."""
        back = [list(column) for column in zip(*self.table, strict=True)]
        return self._move(rows, back, f"{what} of {self.name} to tokens")

    def _move(self, rows: torch.Tensor, table: Table, label: str) -> torch.Tensor:
        meet_before(self.axis, label)
        return all_to_all_rows(self.axis, rows, table, label)

    def scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Add (S, H) rows up by token: (T, H)."""
        return rows.new_zeros(self.tokens, *rows.shape[1:]).index_add_(0, self.sent, rows)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weights: torch.Tensor, routing: Routing) -> Any:  # type: ignore[override]
        ctx.routing, ctx.k = routing, weights.shape[1]
        rows = routing.to_experts(hidden[routing.sent], "rows")
        chosen = weights[routing.sent].masked_fill_(~routing.choices, 0)
        return rows, routing.to_experts(chosen, "weights")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        routing, (to_hidden, to_weights, _) = ctx.routing, ctx.needs_input_grad
        of_hidden = of_weights = None
        if to_hidden:
            of_hidden = routing.scatter(routing.to_tokens(rows, "gradients of rows"))
        if to_weights:
            sent = routing.to_tokens(weights, "gradients of weights").masked_fill_(~routing.choices, 0)
            of_weights = routing.scatter(sent)
        return of_hidden, of_weights, None


class _SameOnAllRanks(torch.autograd.Function):
    """Saves a tensor between experts and combine, so that activation checkpointing recomputes alike on all ranks.

    Recomputation begins when backward first asks for a saved tensor, and ends with the last one that was saved. A rank
    without rows saves none in its experts: it would recompute, and so exchange, at another time or not at all.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows.new_empty(0))
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _ = ctx.saved_tensors
        return gradient


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, routing: Routing) -> torch.Tensor:  # type: ignore[override]
        ctx.routing = routing
        return routing.scatter(routing.to_tokens(rows, "results"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.routing.to_experts(gradient[ctx.routing.sent], "gradients of results"), None


def dispatch(hidden: torch.Tensor, weights: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Send tokens to the ranks of their experts. All ranks call together, forward and backward.

    Args:
        hidden: (T, H) tokens.
        weights: (T, k) weights of their choices.

    Returns:
        (R, H) rows of all ranks' tokens, and (R, k) weights: 0 for experts of other ranks.
    """
    return _Dispatch.apply(hidden, weights, routing)  # type: ignore[return-value]


def combine(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Send (R, H) results back and add them up by token: (T, H). All ranks call together, forward and backward."""
    return _Combine.apply(_SameOnAllRanks.apply(rows), routing)  # type: ignore[return-value]
