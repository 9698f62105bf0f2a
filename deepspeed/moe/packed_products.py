"""Products of packed experts, computed here: one matrix product per expert and matrix, without copies in expert order.

The results are those of Transformers' experts: for each pair of a row and an expert that it has chosen,
weight × down(inner(up(row))), summed by row. `inner` is an activation function, or a gate that halves the width.
Experts are computed one after the other, so that what one of them needs besides its matrices stays in the CPU's caches:
rows are gathered, multiplied, gated, multiplied, weighted and added to the result before the next expert begins.
Backward recomputes everything but the first products. All operations are torch's, and any number of threads may run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

MULTIPLE = 8
"""Rows of an expert in a product are a multiple of this on CPUs, where other kernels compute the last rows of a matrix
product, and products of few rows, and round differently: without padding, a token's result would depend on the number
of other tokens that have chosen its expert."""

Inner = Callable[[torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor], torch.Tensor]


class Workspace:
    """Tensors that one expert after the other is computed in: new memory would cost more than the arithmetic on it.

    Args:
        like: tensor whose dtype they have.
        rows: most rows of an expert.
    """

    def __init__(self, like: torch.Tensor, rows: int) -> None:
        self._like, self._rows = like, rows
        self._tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Return the tensor (rows, width) of this name, with the values that it was left with."""
        if name not in self._tensors:
            self._tensors[name] = self._like.new_empty(self._rows, width)
        return self._tensors[name][:rows]

    def gather(self, name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this name with the rows (R, H) at `index` (n,)."""
        return torch.index_select(rows, 0, index, out=self.get(name, len(index), rows.shape[1]))


class Activation:
    """What is between the two products, with its gradient from autograd.

    Args:
        function: maps (P, F') results of the first product to (P, F) inputs of the second.
        module: module whose mode, training or evaluation, the function may read: backward calls it in the mode that
            the module has now. None: the function reads none.
    """

    def __init__(self, function: Inner, module: nn.Module | None = None) -> None:
        self._function, self._module = function, module
        self._training = module is not None and module.training

    def run(self, hidden: torch.Tensor, work: Workspace) -> torch.Tensor:
        """Return the (P, F) values for (P, F') `hidden`."""
        return self._function(hidden)

    def replay(self, hidden: torch.Tensor, work: Workspace) -> tuple[torch.Tensor, Backward]:
        """Return the (P, F) values for (P, F') `hidden`, and a function from their gradient, which it may overwrite, to
        that of `hidden`."""
        with torch.enable_grad(), self._mode():
            hidden = hidden.detach().requires_grad_()
            values = self._function(hidden)
        return values.detach(), lambda gradient: torch.autograd.grad(values, hidden, gradient)[0]

    @contextmanager
    def _mode(self) -> Generator[None]:
        changed = [] if self._module is None or self._module.training == self._training else [*self._module.modules()]
        before = [inner.training for inner in changed]
        for inner in changed:
            inner.training = self._training
        try:
            yield
        finally:
            for inner, training in zip(changed, before, strict=True):
                inner.training = training


class SwiGLU(Activation):
    """silu(gate) × up for the halves (gate, up) of the columns, in fewer passes than autograd's."""

    def __init__(self) -> None:
        super().__init__(swiglu)

    def run(self, hidden: torch.Tensor, work: Workspace) -> torch.Tensor:
        gate, up = hidden.chunk(2, -1)
        return torch.ops.aten.silu.out(gate, out=work.get("inner", *gate.shape)).mul_(up)

    def replay(self, hidden: torch.Tensor, work: Workspace) -> tuple[torch.Tensor, Backward]:
        gate, up = hidden.chunk(2, -1)
        activated = torch.ops.aten.silu.out(gate, out=work.get("activated", *gate.shape))

        def backward(gradient: torch.Tensor) -> torch.Tensor:
            result = work.get("gradient of hidden", *hidden.shape)
            of_gate, of_up = result.chunk(2, -1)
            torch.mul(gradient, activated, out=of_up)
            torch.ops.aten.silu_backward.grad_input(gradient.mul_(up), gate, grad_input=of_gate)
            return result

        return torch.mul(activated, up, out=work.get("inner", *gate.shape)), backward


def swiglu(hidden: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) × up (P, F) for the halves (gate, up) of (P, 2 F) columns."""
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@dataclass(frozen=True)
class ExpertMatrices:
    """Parameters of the experts of this rank.

    Args:
        up: (E, F', H), or (E, H, F') if transposed: first matrices.
        down: (E, H', F), or (E, F, H') if transposed: second matrices.
        up_bias: (E, F') or None.
        down_bias: (E, H') or None.
        transposed: whether matrices are (inputs, outputs).
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    transposed: bool = False


@dataclass(frozen=True)
class _Span:
    """Pairs of one expert: positions `start` to `stop` of the sorted pairs; padding begins at `used`."""

    expert: int
    start: int
    used: int
    stop: int


@dataclass(frozen=True)
class _Order:
    """Pairs of a row and an expert, sorted by expert and padded.

    Args:
        pairs: (P,) int64: positions in the flattened (R, k) choices; padding repeats a pair of the same expert.
        rows: (P,) int64: row of each pair.
        spans: the pairs of each expert that has any.
        absent: experts without pairs.
    """

    pairs: torch.Tensor
    rows: torch.Tensor
    spans: list[_Span]
    absent: list[int]

    @property
    def most(self) -> int:
        """Most pairs of an expert, with padding."""
        return max((span.stop - span.start for span in self.spans), default=0)

    @classmethod
    def of(cls, index: torch.Tensor, count: int) -> _Order:
        """Sort the choices (R, k) among `count` experts; -1 is no choice."""
        flat = index.flatten()
        order = flat.argsort(stable=True)
        sizes = torch.bincount(flat + 1, minlength=count + 1)
        padded = sizes + -sizes % MULTIPLE
        ends = sizes.cumsum(0)
        expert_of = torch.arange(1, count + 1, device=flat.device).repeat_interleave(padded[1:])
        starts = padded[1:].cumsum(0) - padded[1:]
        place = torch.arange(len(expert_of), device=flat.device) - starts[expert_of - 1]
        place = torch.where(place < sizes[expert_of], place, 0)  # the first pair again
        pairs = order[ends[expert_of - 1] + place]
        spans, absent, start = list[_Span](), list[int](), 0
        for expert, size in enumerate(sizes[1:].tolist()):
            stop = start + size + -size % MULTIPLE
            if size:
                spans.append(_Span(expert, start, start + size, stop))
            else:
                absent.append(expert)
            start = stop
        return cls(pairs, pairs.div(index.shape[1], rounding_mode="floor"), spans, absent)


class _PackedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, *rest: Any) -> torch.Tensor:  # type: ignore[override]
        up, down, up_bias, down_bias, transposed, activation, order = rest
        matrices = ExpertMatrices(up, down, up_bias, down_bias, transposed)
        weight_of = weights.flatten()[order.pairs].unsqueeze(1)
        ups, downs = _by_inputs(matrices.up, transposed), _by_inputs(matrices.down, transposed)
        hidden = rows.new_empty(len(order.pairs), ups[0].shape[1])
        total = _zeros(rows, len(rows), downs[0].shape[1])

        work, outputs = Workspace(rows, order.most), total.shape[1]
        for span in order.spans:
            expert, size, used = span.expert, span.stop - span.start, span.used - span.start
            own, source = hidden[span.start : span.stop], order.rows[span.start : span.stop]
            torch.mm(work.gather("inputs", rows, source), ups[expert], out=own)
            if matrices.up_bias is not None:
                own += matrices.up_bias[expert]
            out = torch.mm(activation.run(own, work), downs[expert], out=work.get("outputs", size, outputs))
            if matrices.down_bias is not None:
                out += matrices.down_bias[expert]
            _add_rows(total, source[:used], _weighted(out[:used], weight_of[span.start : span.used]))
        ctx.save_for_backward(rows, weights, up, down, up_bias, down_bias, hidden)
        ctx.rest = transposed, activation, order
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, weights, up, down, up_bias, down_bias, hidden = ctx.saved_tensors
        transposed, activation, order = ctx.rest
        matrices, needed = ExpertMatrices(up, down, up_bias, down_bias, transposed), ctx.needs_input_grad
        sums = _Gradients(rows, weights, matrices, order, needed)
        weight_of = weights.flatten()[order.pairs].unsqueeze(1)
        with torch.autocast("cpu", enabled=False):
            for span in order.spans:
                own = slice(span.start, span.stop)
                sums.add(span, gradient, hidden[own], weight_of[own], activation)
        return *sums.results(), None, None, None


class _Gradients:
    """Gradients of all inputs, summed up expert by expert; None for those that nobody needs."""

    def __init__(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        matrices: ExpertMatrices,
        order: _Order,
        needed: tuple[bool, ...],
    ) -> None:
        self._matrices, self._order, self._inputs = matrices, order, rows
        self._ups, self._downs = (_by_inputs(each, matrices.transposed) for each in (matrices.up, matrices.down))
        self._work = Workspace(rows, order.most)
        self._rows = _zeros(rows, *rows.shape) if needed[0] else None
        self._weights = _zeros(weights, len(order.pairs), 1) if needed[1] else None
        tensors = (matrices.up, matrices.down, matrices.up_bias, matrices.down_bias)
        self._sums = [
            tensor.new_empty(tensor.shape) if tensor is not None and need else None
            for tensor, need in zip(tensors, needed[2:6], strict=True)
        ]
        self._shape, self._dtypes = weights.shape, (rows.dtype, weights.dtype)
        for total in (total for total in self._sums if total is not None):
            for expert in order.absent:
                total[expert].zero_()

    def add(
        self,
        span: _Span,
        gradient: torch.Tensor,
        hidden: torch.Tensor,
        weight_of: torch.Tensor,
        activation: Activation,
    ) -> None:
        """Add the part of one expert: `gradient` of the result (R, H'), `hidden` and `weight_of` of its pairs."""
        expert, size, used, work = span.expert, span.stop - span.start, span.used - span.start, self._work
        up, down, up_bias, down_bias = self._sums
        source = self._order.rows[span.start : span.stop]
        of_out = work.gather("gradient of outputs", gradient, source)
        of_out[used:] = 0
        inner, backward = activation.replay(hidden, work)
        of_inner = work.get("gradient of inner", size, inner.shape[1])
        torch.mm(of_out, self._downs[expert].T, out=of_inner)  # not weighted yet
        if self._weights is not None:
            self._weights[span.start : span.stop, 0] = self._of_weights(expert, of_inner, inner, of_out)  # padding: 0
        of_out = of_out.mul_(weight_of)
        if down is not None:
            self._multiply(of_out, inner, down[expert])
        if down_bias is not None:
            torch.sum(of_out, 0, out=down_bias[expert])
        if self._rows is None and up is None and up_bias is None:
            return
        of_hidden = backward(of_inner.mul_(weight_of))
        if up is not None:
            self._multiply(of_hidden, work.gather("inputs", self._inputs, source), up[expert])
        if up_bias is not None:
            torch.sum(of_hidden, 0, out=up_bias[expert])
        if self._rows is not None:
            of_rows = torch.mm(of_hidden, self._ups[expert].T, out=work.get("inputs", size, self._inputs.shape[1]))
            _add_rows(self._rows, source[:used], of_rows[:used])

    def _of_weights(
        self, expert: int, of_inner: torch.Tensor, inner: torch.Tensor, of_out: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradients of the weights of an expert's pairs."""
        wide, bias = _wide(of_inner.dtype), self._matrices.down_bias
        product = torch.mul(of_inner, inner, out=self._work.get("product", *inner.shape))
        total = product.sum(1, dtype=wide)
        return total if bias is None else total + (of_out * bias[expert]).sum(1, dtype=wide)

    def _multiply(self, of_outputs: torch.Tensor, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient of a matrix, in the order of its dims, into `out`."""
        pair = (inputs, of_outputs) if self._matrices.transposed else (of_outputs, inputs)
        torch.mm(pair[0].T, pair[1], out=out)

    def results(self) -> Iterator[torch.Tensor | None]:
        """Yield the gradients of rows, weights, and the four fields of `ExpertMatrices`."""
        yield None if self._rows is None else self._rows.to(self._dtypes[0])
        if self._weights is None:
            yield None
        else:
            of_weights = self._weights.new_zeros(self._shape.numel())
            of_weights.index_add_(0, self._order.pairs, self._weights.squeeze(1))
            yield of_weights.view(self._shape).to(self._dtypes[1])
        yield from self._sums


def run_packed(
    rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, matrices: ExpertMatrices, activation: Activation
) -> torch.Tensor:
    """Compute the weighted sums of the results of each row's experts.

    Args:
        rows: (R, H) rows on the CPU.
        index: (R, k) int64: chosen experts of each row; -1: none.
        weights: (R, k) weights of the chosen experts.
        matrices: the experts' parameters, of one dtype; rows are cast to it.
        activation: what is between the two products.

    Returns:
        (R, H') sums in the dtype of `rows`; in 16 bits, results of the experts are added in fp32.
    """
    order = _Order.of(index, len(matrices.up))
    tensors = (matrices.up, matrices.down, matrices.up_bias, matrices.down_bias)
    with torch.autocast("cpu", enabled=False):
        cast = rows.to(matrices.up.dtype)
        out = _PackedExperts.apply(cast, weights, *tensors, matrices.transposed, activation, order)
    return out.to(rows.dtype)  # type: ignore[union-attr]


def _by_inputs(matrices: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, ...]:
    """Return a view (inputs, outputs) of each expert's matrix."""
    return (matrices if transposed else matrices.transpose(1, 2)).unbind(0)


def _weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return rows × weights (n, 1), in the wider dtype of both; overwrites `rows` if it has this dtype."""
    return rows.mul_(weights) if torch.promote_types(rows.dtype, weights.dtype) == rows.dtype else rows * weights


def _add_rows(total: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    total.index_add_(0, index, rows.to(total.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: fp32 for 16 bits."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_zeros(shape, dtype=_wide(like.dtype))
