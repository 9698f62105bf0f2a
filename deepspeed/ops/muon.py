"""Muon: matrices are updated with their orthogonalised momentum, all other parameters with AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import OptimizerError
from deepspeed.ops.adam.fused_adam import adam_update
from deepspeed.ops.group_optimizer import GroupOptimizer, State

__all__ = ["Muon", "orthogonalize"]

NS_METHODS = ("gram", "standard")
# The quintic of Jordan et al. 2024: steepest at zero, at the price of singular values in about [0.7, 1.2].
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


def orthogonalize(matrix: Tensor, ns_method: str = "gram") -> Tensor:
    """Approximate the nearest semi-orthogonal matrix by five Newton-Schulz steps (Jordan et al. 2024).

    X <- a X + b (X X') X + c (X X')^2 X, from X = matrix / |matrix|. "gram" iterates on the small Gram matrix X X' and
    multiplies along the long side only twice in total; "standard" does so in each step.

    Args:
        matrix: two dims, in fp32.
        ns_method: "gram" or "standard" (`optimizer.params.ns_method`).

    Returns:
        A matrix of the same shape with singular values near one.
    """
    a, b, c = NS_COEFFICIENTS
    wide = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    x = wide / (wide.norm() + 1e-7)
    if ns_method == "standard":
        for _ in range(NS_STEPS):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
    else:
        gram = x @ x.mT
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        product = eye
        for _ in range(NS_STEPS):
            factor = a * eye + b * gram + c * gram @ gram
            product = factor @ product
            gram = factor @ gram @ factor
        x = product @ x
    return x.mT if matrix.size(0) > matrix.size(1) else x


class Muon(GroupOptimizer):
    """Muon (Jordan et al. 2024) with Nesterov momentum and decoupled decay for matrices; AdamW for other parameters.

    A parameter with two or more dims is a matrix (further dims are flattened into the second), unless its group, or
    else the parameter itself, has `use_muon=False`, as embeddings and output heads should. With the gradient g and its
    running mean m: p -= lr * sqrt(max(1, rows / columns)) * orthogonalize(momentum * m + (1 - momentum) * g).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        ns_method: str = "gram",
    ) -> None:
        """Create the optimizer; states are allocated at the first step.

        Args:
            params: whole tensors or group dicts (`optimizer.params.*` sets the other arguments).
            lr: learning rate, for all parameters unless muon_lr or adam_lr is given.
            momentum: decay rate of the matrices' momentum.
            weight_decay: weight decay, multiplied by the learning rate.
            betas: decay rates of Adam's moments.
            eps: added to the square root of Adam's second moment.
            muon_lr: learning rate of matrices; None: `lr`.
            adam_lr: learning rate of other parameters; None: `lr`. The group's `lr`, which schedules change, is that of
                matrices; the other rate stays proportional to it.
            ns_method: "gram" or "standard"; see `orthogonalize`.

        Raises:
            OptimizerError: a value is out of range, or the method is unknown.
        """
        if ns_method not in NS_METHODS:
            raise OptimizerError(f"Muon: ns_method is {ns_method!r}; use one of {', '.join(NS_METHODS)}")
        matrix_lr = lr if muon_lr is None else muon_lr
        rest_lr = lr if adam_lr is None else adam_lr
        if matrix_lr <= 0 or rest_lr < 0:
            raise OptimizerError(f"Muon: learning rates are {matrix_lr} (matrices) and {rest_lr}; they must be > 0")
        super().__init__(
            params,
            lr=matrix_lr,
            adam_lr_ratio=rest_lr / matrix_lr,
            momentum=momentum,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            ns_method=ns_method,
            use_muon=None,
        )

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Update matrices by the class's equation and other parameters by AdamW, in place."""
        rest = []
        for entry in zip(params, grads, states, strict=True):
            param = entry[0]
            chosen = group["use_muon"] if group["use_muon"] is not None else getattr(param, "use_muon", True)
            if chosen and param.ndim >= 2:
                self._update_matrix(group, *entry)
            else:
                rest.append(entry)
        if rest:
            params, grads, states = (list(column) for column in zip(*rest, strict=True))
            lr = group["lr"] * group["adam_lr_ratio"]
            adam_update(group, params, grads, states, lr=lr, decoupled=True)

    @staticmethod
    def _update_matrix(group: State, param: Tensor, grad: Tensor, state: State) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        direction = grad.lerp(momentum, group["momentum"]).flatten(1).float()
        scale = max(1.0, direction.size(0) / direction.size(1)) ** 0.5
        step = orthogonalize(direction, group["ns_method"]).reshape(param.shape).to(param.dtype)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(step.mul_(group["lr"] * scale))
