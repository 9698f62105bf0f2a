"""The naive twin of data-parallel training: one plain process that replays every rank's micro-batches.

It imports nothing of the package. Masters are fp32; each rank computes on its own cast copy of the model (so that
every rank has its own BatchNorm statistics), and the fp32 gradients of all copies are summed in rank order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class LossScale:
    """The dynamic loss scale of mixed-precision training (Micikevicius et al. 2018, section 3.2), with hysteresis."""

    value: float = 256.0
    window: int = 5
    hysteresis: int = 2
    minimum: float = 1.0
    spare: int = 2
    clean: int = 0

    def update(self, overflow: bool) -> None:
        """Halve after `hysteresis` overflows, double after `window` clean steps since the last overflow."""
        if overflow:
            self.clean = 0
            if self.spare > 1:
                self.spare -= 1
            else:
                self.value = max(self.value / 2, self.minimum)
            return
        self.clean += 1
        if self.clean % self.window == 0:
            self.spare = self.hysteresis
            self.value *= 2


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters to `dtype` in place; buffers, and modules that pair buffers with parameters, keep theirs.

    Floating inputs are cast where they enter a module whose own parameters were cast.
    """
    if dtype == torch.float32:
        return

    def cast_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        def one(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}

    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if not own or isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        for parameter in own:
            parameter.data = parameter.data.to(dtype)
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True)


class Reference:
    """One model trained as `ranks` processes would train it.

    Args:
        model: the fp32 model; it becomes the master copy.
        make_optimizer: called with the master parameters that are to be trained.
        ranks: data-parallel processes to stand for.
        accumulation: micro-batches per step of each rank.
        precision: "fp32", "bf16" or "fp16", the dtype of computation.
        clip: largest global gradient norm; 0 switches clipping off.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: OptimizerFactory,
        ranks: int = 1,
        accumulation: int = 1,
        precision: str = "fp32",
        clip: float = 0.0,
    ) -> None:
        self.master = model
        self.copies = [copy.deepcopy(model) for _ in range(ranks)]
        for replica in self.copies:
            cast(replica, DTYPES[precision])
        self.optimizer = make_optimizer(list(model.parameters()))
        self.scale = LossScale() if precision == "fp16" else LossScale(value=1.0)
        self.fp16 = precision == "fp16"
        self.accumulation = accumulation
        self.clip = clip
        self.norm = 0.0
        self.skipped = 0
        self._sums: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]

    def backward(self, rank: int, *losses: torch.Tensor) -> None:
        """Add the gradients of one micro-batch of one rank to its fp32 sum.

        Args:
            rank: whose micro-batch it was.
            losses: scalars, differentiated in this order; all but the last keep their graph.
        """
        for index, loss in enumerate(losses):
            (loss * self.scale.value).backward(retain_graph=index < len(losses) - 1)
            self.collect(rank)

    def collect(self, rank: int) -> None:
        """Move the `.grad` of one rank's copy into its fp32 sum."""
        sums = self._sums[rank]
        for name, parameter in self.copies[rank].named_parameters():
            if parameter.grad is not None:
                sums[name] = sums[name] + parameter.grad.float() if name in sums else parameter.grad.float()
                parameter.grad = None

    def discard(self) -> None:
        """Forget all gradients since the last step."""
        for replica, sums in zip(self.copies, self._sums, strict=True):
            replica.zero_grad()
            sums.clear()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Mean gradients over window and ranks, summed in rank order, before clipping; by name."""
        means = {}
        for name, _ in self.master.named_parameters():
            found = [sums[name] for sums in self._sums if name in sums]
            if found:
                total = found[0].clone()
                for gradient in found[1:]:
                    total += gradient
                means[name] = total / (len(self._sums) * self.accumulation * self.scale.value)
        return means

    def step(self) -> None:
        """Clip, step the optimizer unless a gradient is not finite, and publish the masters into every copy."""
        gradients = self.gradients()
        overflow = self.fp16 and not all(bool(g.isfinite().all()) for g in gradients.values())
        if overflow:
            self.skipped += 1
        else:
            self._apply(gradients)
        if self.fp16:
            self.scale.update(overflow)
        self.discard()

    def _apply(self, gradients: dict[str, torch.Tensor]) -> None:
        norms = torch.stack([gradient.norm() for gradient in gradients.values()]) if gradients else torch.zeros(1)
        self.norm = norms.norm().item()
        factor = min(1.0, self.clip / (self.norm + 1e-6)) if self.clip else 1.0
        for name, parameter in self.master.named_parameters():
            parameter.grad = gradients[name] * factor if name in gradients else None
        self.optimizer.step()
        self.master.zero_grad()
        for replica in self.copies:
            with torch.no_grad():
                for ours, theirs in zip(self.master.parameters(), replica.parameters(), strict=True):
                    theirs.copy_(ours)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the fp32 masters of what is trained now, by name."""
        return {name: p.detach().clone() for name, p in self.master.named_parameters() if p.requires_grad}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference over two sets of tensors with the same names."""
    if ours.keys() != theirs.keys():
        raise AssertionError(f"only on one side: {sorted(ours.keys() ^ theirs.keys())}")
    return max((distance(ours[name], theirs[name]) for name in ours), default=0.0)


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest absolute difference; infinite when one side is not finite where the other is."""
    if ours.shape != theirs.shape:
        raise AssertionError(f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}")
    gap = (ours.float() - theirs.float()).abs()
    return gap.nan_to_num(nan=float("inf")).max().item() if gap.numel() else 0.0


def largest_entry(tensors: Iterable[torch.Tensor]) -> float:
    """The largest absolute entry over tensors."""
    return max((tensor.abs().max().item() for tensor in tensors), default=0.0)
