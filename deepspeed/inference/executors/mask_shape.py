"""What the rows of a layer see, read from the mask function of Transformers by its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed.errors import PackingError
from deepspeed.inference.request import length_limit

FURTHEST = 1 << 17  # position at which masks are probed for models without length limit


@dataclass(frozen=True)
class MaskShape:
    """A causal mask.

    Args:
        window: number of last keys that a row sees; 0: all.
        chunk: positions of one chunk, whose rows see only keys of the same; 0: no chunks.
    """

    window: int = 0
    chunk: int = 0


def mask_shape(
    function: Callable[..., torch.Tensor], model: nn.Module, device: torch.device | None = None
) -> MaskShape:
    """Return the shape of a mask function with arguments (batch, head, query position, key position).

    Args:
        function: the function.
        model: model of the layer, for the furthest position.
        device: device of the positions; None: the CPU.

    Raises:
        PackingError: rows see other keys than the last ones, all of them or all of a chunk.
    """
    zero = torch.zeros((), dtype=torch.long, device=device)

    def seen(query: int) -> torch.Tensor:
        keys = torch.arange(query + 1, device=device)
        return function(zero, zero, torch.tensor(query, device=device), keys).reshape(-1)

    furthest = min(length_limit(model) or FURTHEST, FURTHEST)
    for shape in _candidates(seen, furthest):
        size = shape.window or shape.chunk
        places = {0, 1, size - 1, size, size + 1, size + size // 2, 2 * size - 1, 2 * size, furthest // 2, furthest - 1}
        if all(_fits(seen(query), query, shape) for query in sorted(places) if 0 <= query < furthest):
            return shape
    raise PackingError("its rows see others than the last keys")


def _candidates(seen: Callable[[int], torch.Tensor], furthest: int) -> list[MaskShape]:
    """Return the shapes that the last row's keys allow."""
    window = int(seen(furthest - 1).sum())
    if window >= furthest:
        return [MaskShape()]
    # The first row of the second chunk is the first one that does not see key 0.
    low, high = 0, furthest - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bool(seen(middle)[0]) else (low, middle)
    return [MaskShape(window=window), MaskShape(chunk=high)]


def _fits(visible: torch.Tensor, query: int, shape: MaskShape) -> bool:
    keys = torch.arange(query + 1, device=visible.device)
    wanted = keys > query - shape.window if shape.window else keys >= 0
    if shape.chunk:
        wanted = wanted & (keys >= query // shape.chunk * shape.chunk)
    return visible.shape == wanted.shape and torch.equal(visible, wanted)
