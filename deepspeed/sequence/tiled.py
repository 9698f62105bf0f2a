"""Tiled computation of tokenwise functions along the sequence (ALST; Bekman et al., 2025).

Only one tile's activations exist at a time. Forward saves no graph. Backward recomputes each tile with its graph, and
sums the parameters' gradients over the tiles. A parameter gets one gradient per backward, as from an ordinary layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError

SEQUENCE = 1  # dim of tokens: `[batch, sequence, …]`


@dataclass(frozen=True)
class _Tiling:
    """Tiling of a function: its first `cut` inputs are split into tiles of `lengths` tokens; the others are parameters.

    Results are concatenated along dim `join`, or summed with `weights`; a tile of weight 0 is not computed.
    """

    compute: Callable[..., torch.Tensor]
    lengths: Sequence[int]
    cut: int
    join: int | None
    weights: Sequence[float]

    def tiles(self, inputs: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, ...]]:
        """Yield the split inputs, tile by tile."""
        return zip(*(tensor.split(list(self.lengths), SEQUENCE) for tensor in inputs[: self.cut]), strict=True)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiling: _Tiling, *inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.tiling, ctx.params, ctx.states = tiling, inputs[tiling.cut :], []
        ctx.save_for_backward(*inputs[: tiling.cut])
        results = []
        for tile, weight in zip(tiling.tiles(inputs), tiling.weights, strict=True):
            ctx.states.append(get_accelerator().get_rng_state())
            if weight:
                result = tiling.compute(*tile)
                results.append(result if tiling.join is not None else result * weight)
        if tiling.join is None:
            return torch.stack(results).sum(0) if results else inputs[0].new_zeros(())
        ctx.sizes = [result.shape[tiling.join] for result in results]
        return torch.cat(results, tiling.join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tiling, accelerator = ctx.tiling, get_accelerator()
        needed = ctx.needs_input_grad[1:]
        params = [p for p, need in zip(ctx.params, needed[tiling.cut :], strict=True) if need]
        sums = [torch.zeros(p.shape, dtype=torch.float32, device=gradient.device) for p in params]
        tiled = [torch.zeros_like(t) if need else None for t, need in zip(ctx.saved_tensors, needed, strict=False)]
        slots = [t for t in tiled if t is not None]
        if tiling.join is None:
            cotangents = [gradient * weight for weight in tiling.weights]
        else:
            cotangents = list(gradient.split(ctx.sizes, tiling.join))
        after, start = accelerator.get_rng_state(), 0
        for index, tile in enumerate(tiling.tiles(ctx.saved_tensors)):
            first, start = start, start + tiling.lengths[index]
            if not tiling.weights[index]:
                continue
            accelerator.set_rng_state(ctx.states[index])
            leaves = [t.detach().requires_grad_(need) for t, need in zip(tile, needed, strict=False)]
            with torch.enable_grad():
                result = tiling.compute(*leaves)
            trained = [leaf for leaf in leaves if leaf.requires_grad] + params
            grads = torch.autograd.grad(result, trained, cotangents[index], allow_unused=True)
            for slot, grad in zip(slots, grads, strict=False):
                slot.narrow(SEQUENCE, first, tiling.lengths[index]).add_(0 if grad is None else grad)
            for total, grad in zip(sums, grads[len(slots) :], strict=True):
                total.add_(0 if grad is None else grad)
        accelerator.set_rng_state(after)
        totals = iter([total.to(p.dtype) for total, p in zip(sums, params, strict=True)])
        return None, *tiled, *(next(totals) if need else None for need in needed[tiling.cut :])


def _tiled(
    compute: Callable[..., torch.Tensor],
    cut: Sequence[torch.Tensor],
    params: Iterable[torch.Tensor],
    shards: int,
    join: int | None,
    weigh: Callable[[int, int], float],
) -> torch.Tensor:
    """Apply `compute` to tiles of the tensors `cut`, each `[batch, sequence, …]`; see `_Tiling`.

    `params` are further inputs with gradients; `weigh` maps a tile's (first token, end) to its weight. With fewer
    tokens than shards, each token is a tile. ArgumentError: lengths differ, or `shards` is below 1.
    """
    lengths = {tensor.shape[SEQUENCE] for tensor in cut}
    if len(lengths) != 1:
        raise ArgumentError(f"tiled tensors have {sorted(lengths)} tokens along dim {SEQUENCE}; they need as many each")
    tokens = lengths.pop()
    if shards < 1:
        raise ArgumentError(f"{tokens} token(s) cannot be computed in {shards} tiles: give a number from 1 on")
    shards = min(shards, max(tokens, 1))  # a tiled model also generates, token by token
    ends = [tokens * tile // shards for tile in range(shards + 1)]
    weights = [weigh(first, last) for first, last in zip(ends, ends[1:], strict=False)]
    sizes = [last - first for first, last in zip(ends, ends[1:], strict=False)]
    trained = [p for p in params if p.requires_grad]
    return _Tiled.apply(_Tiling(compute, sizes, len(cut), join, weights), *cut, *trained)  # type: ignore[no-any-return]


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, Any],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Compute `fn` of a long sequence, tile by tile.

    Args:
        fn: takes keyword arguments, returns a tensor; a token's result must not depend on other tokens.
        seqlen: number of tokens of the sequence, for the weights of "mean".
        shards: number of tiles.
        kwargs_to_shard: tensors `[batch, sequence, …]`, split into tiles, or None.
        kwargs_to_pass: passed unchanged to every tile.
        grad_requiring_tensor_key: a key of `kwargs_to_shard`; no effect, all tensors can get gradients.
        compute_params: parameters that `fn` reads, which get gradients; None: none.
        output_unshard_dimension: dim for concatenating results, if there is no reduction.
        output_reduction: "mean" (tiles weighted by their tokens) or "sum" over tiles; None: concatenate.

    Returns:
        The results of all tiles, reduced or concatenated.

    Raises:
        ArgumentError: lengths, number of tiles, reduction or `grad_requiring_tensor_key` are invalid.
    """
    if output_reduction not in ("mean", "sum", None):
        raise ArgumentError(f"output_reduction is {output_reduction!r}; it takes 'mean', 'sum' or None")
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise ArgumentError(
            f"grad_requiring_tensor_key {grad_requiring_tensor_key!r} is not among {[*kwargs_to_shard]}"
        )
    names = [name for name, value in kwargs_to_shard.items() if value is not None]
    constants = {**dict.fromkeys(kwargs_to_shard), **kwargs_to_pass}
    return _tiled(
        lambda *tiles: fn(**{**constants, **dict(zip(names, tiles, strict=True))}),
        [kwargs_to_shard[name] for name in names],
        compute_params or [],
        shards,
        output_unshard_dimension if output_reduction is None else None,
        lambda first, last: (last - first) / seqlen if output_reduction == "mean" else 1.0,
    )


class SequenceTiledCompute:
    """Form of `sequence_tiled_compute` for old scripts, with positional arguments."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """Call `sequence_tiled_compute`; `args` are the values of `keys_to_shard`, then those of `keys_to_pass`."""
        values = dict(zip([*keys_to_shard, *keys_to_pass], args, strict=True))
        cut, passed = ({key: values[key] for key in keys} for keys in (keys_to_shard, keys_to_pass))
        how = (grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction)
        return sequence_tiled_compute(fn, seqlen, shards, cut, passed, *how)


class TiledMLP:
    """Tiled computation of an MLP block: the wide activations of only one tile exist at a time."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        module: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute `fn(module, x)` in tiles; raises ArgumentError if `shards` is below 1.

        Args:
            fn: the block's own forward.
            module: the block.
            x: `[batch, sequence, width]`.
            shards: number of tiles.
            compute_params: parameters that `fn` reads; None: all parameters of the module.

        Example:
            >>> LlamaMLP.forward = lambda self, x, whole=LlamaMLP.forward: TiledMLP.apply(whole, self, x, 8)
        """
        params = list(module.parameters()) if compute_params is None else compute_params
        return _tiled(lambda tile: fn(module, tile), [x], params, shards, SEQUENCE, lambda *_: 1.0)


class TiledFusedLogitsLoss:
    """Tiled computation of logits and loss: only the logits of one tile exist at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        module: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """Compute the scalar `fn(module, x, y)` in tiles.

        Args:
            fn: loss of a tile's tokens: their mean or their sum, according to `output_reduction`.
            module: first argument of `fn`, such as the model with its output projection.
            x: `[batch, sequence, width]`, inputs of the output projection.
            y: `[batch, sequence]`, labels.
            mask: `[batch, sequence]`, tokens that the mean of `fn` includes; None: all.
            shards: number of tiles.
            compute_params: parameters that `fn` reads; None: all parameters of the module.
            output_reduction: "mean" or "sum".

        Raises ArgumentError if lengths, number of tiles or reduction are invalid.
        """
        if output_reduction not in ("mean", "sum"):
            raise ArgumentError(f"output_reduction is {output_reduction!r}; it takes 'mean' or 'sum'")
        counted = torch.ones_like(y, dtype=torch.bool) if mask is None else mask.bool()
        counts = torch.nn.functional.pad(counted.sum(0).cumsum(0), (1, 0)).tolist()

        def weigh(first: int, last: int) -> float:
            if output_reduction == "sum":
                return 1.0
            return (counts[last] - counts[first]) / max(counts[-1], 1)

        params = list(module.parameters()) if compute_params is None else compute_params
        return _tiled(lambda *tile: fn(module, *tile), [x, y], params, shards, None, weigh)
