"""Exchange of tokens: to the ranks of their experts, and of the results back (all-to-all).

Each expert is on one rank of an axis. A token is sent once to every rank with at least one of its experts, along with
the weights of these experts; the token's own rank adds the results. No token is dropped, and buffers have no padding:
ranks first exchange their token counts. All ranks take part in every exchange, even with no tokens to send.

| step     | forward                              | backward                             |
|----------|--------------------------------------|--------------------------------------|
| dispatch | tokens and weights to the experts    | sum of their gradients to the tokens |
| combine  | sum of the results to the tokens     | gradient of the sum to the experts   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm.collectives import scalars
from deepspeed.comm.collectives.collectives import SMALL, all_to_all_rows
from deepspeed.comm.collectives.same_error import meet_before
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.foundation.fake_mode import Replaceable, message

Table = list[list[int]]  # rows that rank r sends to rank p

row_exchange = Replaceable(all_to_all_rows)
expert_choices: Replaceable[Callable[[torch.Tensor, torch.Tensor, Axis, int], torch.Tensor]] = Replaceable(
    lambda index, _owner, _axis, _slots: index
)
"""Experts that tokens go to, from those that the router has chosen (T, k), the position on the axis of each expert's
rank, the axis, and the slots of an expert (0: no limit). Simulations replace it."""


@dataclass(frozen=True)
class Routing:
    """Destination ranks of this rank's tokens, for one forward pass of a layer.

    Args:
        axis: the ranks among which the experts are divided.
        name: name of the layer in error messages.
        tokens: number of tokens T of this rank.
        sent: (S,) int64: token indices in send order; a token occurs once for each rank that receives it.
        choices: (S, k) bool: True where the receiving rank has the chosen expert.
        table: table[r][p] is the number of rows that rank r sends to rank p.
    """

    axis: Axis
    name: str
    tokens: int
    sent: torch.Tensor
    choices: torch.Tensor
    table: Table

    @classmethod
    def of(cls, index: torch.Tensor, owner: torch.Tensor, axis: Axis, name: str) -> Routing:
        """Compute the destinations of all tokens and exchange the counts. All ranks must call this.

        Args:
            index: (T, k) integer: the experts chosen by each token.
            owner: int64 position on the axis of each expert's rank; with -1 appended, index -1 goes to no rank.
            axis: the ranks among which the experts are divided.
            name: name of the layer in error messages.
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
        """Number of rows R that this rank receives."""
        return sum(row[self.axis.rank] for row in self.table)

    def to_experts(self, *parts: tuple[str, torch.Tensor]) -> list[torch.Tensor]:
        """Send (S, …) rows in the order of `sent`; return (R, …) rows, by source rank. All ranks must call this.

        Args:
            parts: (name in error messages, rows) of the tensors that are sent in one exchange.
        """
        return self._move(parts, self.table, "experts")

    def to_tokens(self, *parts: tuple[str, torch.Tensor]) -> list[torch.Tensor]:
        """Inverse of `to_experts`: send (R, …) rows back; return (S, …) rows in the order of `sent`. Collective."""
        back = [list(column) for column in zip(*self.table, strict=True)]
        return self._move(parts, back, "tokens")

    def _move(self, parts: Iterable[tuple[str, torch.Tensor]], table: Table, to: str) -> list[torch.Tensor]:
        labelled = [(f"{what} of {self.name} to {to}", rows) for what, rows in parts]
        if labelled:
            meet_before(self.axis, labelled[0][0])
        received = row_exchange.current(self.axis, labelled, table)
        sizes = (sum(rows.nbytes for rows in side) for side in ((rows for _, rows in labelled), received))
        message("all_to_all", max(sizes), self.axis.ranks)
        return received

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy (S, …) of the (T, …) tokens in the order of `sent`, in memory that other ranks can read."""
        count, width = len(self.sent), rows.shape[1:]
        copies = self.axis.empty(count * width.numel(), rows.dtype, rows.device).view(count, *width)
        return torch.index_select(rows, 0, self.sent, out=copies)

    def scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum the (S, H) rows of each token; return (T, H)."""
        return rows.new_zeros(self.tokens, *rows.shape[1:]).index_add_(0, self.sent, rows)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, routing: Routing
    ) -> Any:
        ctx.routing = routing
        of_choices = weights[routing.sent].masked_fill_(~routing.choices, 0)
        rows, row_weights, row_choices = routing.to_experts(
            ("rows", routing.gather(hidden)), ("weights", of_choices), ("choices", chosen)
        )
        ctx.mark_non_differentiable(row_choices)
        return rows, row_weights, row_choices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        routing, (to_hidden, to_weights, *_) = ctx.routing, ctx.needs_input_grad
        parts = [("gradients of rows", rows)] * to_hidden + [("gradients of weights", weights)] * to_weights
        received = routing.to_tokens(*parts)
        of_weights = routing.scatter(received.pop().masked_fill_(~routing.choices, 0)) if to_weights else None
        return routing.scatter(received.pop()) if to_hidden else None, of_weights, None, None


class _SameOnAllRanks(torch.autograd.Function):
    """Identity that saves a tensor, so that all ranks recompute at the same time in activation checkpointing.

    Recomputation begins when backward first reads a saved tensor. On a rank without rows, the experts save no tensors,
    so without this function the rank would recompute, and exchange rows, at another time or never.
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
        return routing.scatter(*routing.to_tokens(("results", rows)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return *ctx.routing.to_experts(("gradients of results", ctx.routing.gather(gradient))), None


def dispatch(
    hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send tokens to the ranks of their experts. All ranks must call this, in forward and in backward.

    Args:
        hidden: (T, H) tokens.
        weights: (T, k) weights of their chosen experts.
        chosen: (S, k) integer: indices of the chosen experts on the receiving rank, in send order.
        routing: destinations of these tokens.

    Returns:
        (R, H) tokens received from all ranks, their (R, k) weights (0 for experts on other ranks), and (R, k) `chosen`.
    """
    return _Dispatch.apply(hidden, weights, chosen, routing)  # type: ignore[return-value]


def combine(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Send (R, H) results back to the tokens' ranks; return their (T, H) sums by token. All ranks must call this."""
    return _Combine.apply(_SameOnAllRanks.apply(rows), routing)  # type: ignore[return-value]
