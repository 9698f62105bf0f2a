"""Routers with a capacity for each expert (Switch, GShard), and the layer that sends tokens to their experts.

S tokens of a rank choose k of E experts each. An expert processes at most C of them (its slots); further choices are
dropped and add nothing to their tokens. With the mean probability m of each expert and its share c of the S tokens:

| k     | balance loss             | order in which tokens take slots         | weights                            |
|-------|--------------------------|------------------------------------------|------------------------------------|
| 1     | E sum(m c)               | random, or by position                   | the probability                    |
| 2     | E^2 mean(m c), 1st only  | first choices by position, then second   | normalised over choices with slots |
| other | E^2 / k mean(m c)        | by probability, or by position           | normalised over choices with slots |

k = 1: Switch Transformers (arXiv:2101.03961); k = 2: GShard (arXiv:2006.16668). Unlike in these papers, only tokens
with a slot are sent instead of a padded (E, C, H) buffer; results are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.comm import ReduceOp, all_reduce, get_world_size
from deepspeed.comm.collectives.same_error import alarmed
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.moe.balance import mean_product
from deepspeed.moe.exchange import Routing, combine, dispatch, expert_choices
from deepspeed.moe.expert_parallel import ExpertLocation

_POLICIES = (None, "None", "Jitter", "RSample")
_JITTER = 1e-2


@dataclass(frozen=True)
class CapacityRoutes:
    """Routes of S tokens to experts with capacity.

    Args:
        loss: 0-d balance loss of these tokens.
        counts: (E,) int64: number of tokens that chose each expert, dropped choices included.
        capacity: number of slots C of an expert.
        index: (S, k) int64: the chosen experts.
        slot: (S, k) int64: the token's slot in the chosen expert; undefined for dropped choices.
        has_slot: (S, k) bool: False for dropped choices.
        weights: (S, k): 0 for dropped choices.
    """

    loss: torch.Tensor
    counts: torch.Tensor
    capacity: int
    index: torch.Tensor
    slot: torch.Tensor
    has_slot: torch.Tensor
    weights: torch.Tensor

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss, weights (S, E, C), occupied slots (S, E, C) bool, and counts."""
        token = torch.arange(self.index.shape[0], device=self.index.device).unsqueeze(1).expand_as(self.index)
        places = token[self.has_slot], self.index[self.has_slot], self.slot[self.has_slot]
        shape = (self.index.shape[0], self.counts.numel(), self.capacity)
        taken = torch.zeros(shape, dtype=torch.bool, device=self.index.device)
        taken[places] = True
        combining = self.weights.new_zeros(shape).index_put(places, self.weights[self.has_slot])
        return self.loss, combining, taken, self.counts

    def sparse(self) -> tuple[Any, ...]:
        """Return the loss, C, E, experts (k, S) int32 (-1: dropped), slots (k, S), weights (k, S), and counts."""
        experts = self.index.masked_fill(~self.has_slot, -1).t().int()
        return self.loss, self.capacity, self.counts.numel(), experts, self.slot.t(), self.weights.t(), self.counts

    @classmethod
    def of(
        cls, probabilities: torch.Tensor, index: torch.Tensor, slots: torch.Tensor, has_slot: torch.Tensor, **rest: Any
    ) -> CapacityRoutes:
        """Create routes, with weights computed from the probabilities.

        Args:
            probabilities, index: (S, E) router probabilities, and (S, k) chosen experts.
            slots, has_slot: slot numbers, and whether there is a slot: (S, E) for all experts, or (S, k).
            rest: the fields `loss`, `counts` and `capacity`.
        """
        if slots.shape != index.shape:
            slots, has_slot = slots.gather(1, index), has_slot.gather(1, index)
        weights = probabilities.gather(1, index) * has_slot
        if index.shape[1] > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        return cls(index=index, slot=slots, has_slot=has_slot, weights=weights, **rest)


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Any:
    """Route each token to one expert.

    Args:
        logits: (S, E) router logits.
        capacity_factor: an expert has capacity_factor * S / E slots, rounded up.
        min_capacity: minimum number of slots of an expert.
        used_token: (S,) of 0 and 1: tokens with 0 go to no expert; None: all tokens are used.
        noisy_gate_policy: "RSample" adds Gumbel noise to the logits before the choice; other values add none.
        drop_tokens: whether capacity is limited; False: every expert has as many slots as the fullest one needs.
        use_rts: whether random tokens get the slots of a full expert, instead of the first tokens.
        ep_group: process group over which `drop_tokens=False` finds the fullest expert, so that its ranks call
            together; None: this rank alone.
        sparse_routes: whether choices are returned instead of dense tensors.
        use_tutel: no effect.

    Returns:
        Balance loss (0-d), weights (S, E, C), occupied slots (S, E, C) bool, counts (E,). With `sparse_routes`: loss,
        C, E, experts (1, S) int32 (-1: dropped), slots (1, S), weights (1, S), counts.

    Raises:
        ArgumentError: there are fewer tokens than `min_capacity`, with `drop_tokens=True`.
    """
    if drop_tokens and logits.shape[0] < min_capacity:
        raise ArgumentError(
            f"top-1 routing of {logits.shape[0]} token(s) with min_capacity {min_capacity}: every expert would have "
            f"more slots than there are tokens; lower min_capacity or route more tokens"
        )
    probabilities = logits.softmax(1)
    noisy = noisy_gate_policy == "RSample"
    index = (logits + _gumbel(logits) if noisy else probabilities).argmax(1, keepdim=True)
    mask = _mask(index, logits)
    if used_token is not None:
        mask = mask & (used_token.view(-1, 1) != 0)
    loss, counts = _balance(probabilities, mask) * logits.shape[1], mask.sum(0)
    if drop_tokens:
        capacity = _capacity(logits, capacity_factor, min_capacity)
        if use_rts:
            mask = mask & _largest(mask * (1 - torch.rand(mask.shape, device=mask.device)), capacity)
    else:
        capacity = _fullest(counts, ep_group)
    slots = mask.cumsum(0) - 1
    has_slot = mask & (slots < capacity)
    routes = CapacityRoutes.of(probabilities, index, slots, has_slot, loss=loss, counts=counts, capacity=capacity)
    return routes.sparse() if sparse_routes else routes.dense()


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Any:
    """Route each token to two experts; all first choices get slots before the second ones.

    Args:
        top2_2nd_expert_sampling: whether the second expert is sampled from the remaining probabilities (Gumbel-max).
        logits, capacity_factor, min_capacity, drop_tokens, ep_group: as in `top1gating`, with twice the slots.
        sparse_routes: whether choices are returned instead of dense tensors.

    Returns:
        The same as `top1gating`, with 2 rows of choices.
    """
    probabilities = logits.softmax(1)
    first = probabilities.argmax(1, keepdim=True)
    scores = logits + _gumbel(logits) if top2_2nd_expert_sampling else logits
    second = scores.masked_fill(_mask(first, logits), -math.inf).argmax(1, keepdim=True)
    masks = [_mask(first, logits), _mask(second, logits)]
    loss = _balance(probabilities, masks[0]) * logits.shape[1]
    counts = masks[0].sum(0) + masks[1].sum(0)
    capacity = _capacity(logits, 2 * capacity_factor, min_capacity) if drop_tokens else _fullest(counts, ep_group)
    ahead = masks[0].sum(0)
    in_order = [masks[0].cumsum(0) - 1, masks[1].cumsum(0) - 1 + ahead]
    index = torch.cat([first, second], 1)
    slots = torch.cat([in_order[0].gather(1, first), in_order[1].gather(1, second)], 1)
    has_slot = slots < capacity
    routes = CapacityRoutes.of(probabilities, index, slots, has_slot, loss=loss, counts=counts, capacity=capacity)
    return routes.sparse() if sparse_routes else routes.dense()


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Any:
    """Route each token to its k most probable experts.

    Args:
        k: number of experts per token.
        drop_policy: order in which tokens get the slots of a full expert: "probs" (by probability, largest first) or
            "position" (in the order of tokens).
        logits, capacity_factor, min_capacity, drop_tokens, ep_group: as in `top1gating`, with k times the slots.
        sparse_routes: whether choices are returned instead of dense tensors.

    Returns:
        The same as `top1gating`, with k rows of choices.

    Raises:
        ArgumentError: `drop_policy` has another value.
    """
    if drop_policy not in ("probs", "position"):
        raise ArgumentError(f"drop_policy is {drop_policy!r}; it is 'probs' or 'position'")
    probabilities = logits.softmax(1)
    index = probabilities.topk(k, dim=1).indices
    mask = _mask(index, logits)
    loss, counts = _balance(probabilities, mask) * logits.shape[1] / k, mask.sum(0)
    if drop_tokens:
        capacity = _capacity(logits, k * capacity_factor, min_capacity)
        if drop_policy == "probs":
            mask = mask & _largest(mask * probabilities.detach(), capacity)
    else:
        capacity = _fullest(counts, ep_group)
    slots = mask.cumsum(0) - 1
    has_slot = mask & (slots < capacity)
    routes = CapacityRoutes.of(probabilities, index, slots, has_slot, loss=loss, counts=counts, capacity=capacity)
    return routes.sparse() if sparse_routes else routes.dense()


def _balance(probabilities: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `mean_product` (0-d) of (S, E) router probabilities and a (S, E) mask of the choices."""
    return mean_product(mask.sum(0), probabilities.sum(0), mask.shape[0])


def _capacity(logits: torch.Tensor, factor: float, fewest: int) -> int:
    """Return the slots of an expert for (S, E) logits: `factor` * S / E, rounded up, but at least `fewest`."""
    tokens, experts = logits.shape
    return max(math.ceil(tokens / experts * factor), int(fewest))


def _fullest(counts: torch.Tensor, group: Any) -> int:
    """Return the largest token count of any expert, over all ranks of the group, a collective (None: this rank)."""
    most = counts.max()
    if group is not None and get_world_size(group) > 1:
        all_reduce(most, op=ReduceOp.MAX, group=group, log_name="slots of the fullest expert")
    return int(most)


def _mask(index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return (S, E) bool: True for the experts in `index` (S, k)."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, True)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return (S, E) bool: True for the `count` largest values of each expert."""
    best = values.topk(min(count, values.shape[0]), dim=0).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter_(0, best, True)


def _gumbel(logits: torch.Tensor) -> torch.Tensor:
    """Sample noise from the standard Gumbel distribution."""
    return -torch.empty_like(logits).exponential_().log()


class RouterLinear(nn.Linear):
    """Linear layer without bias that computes in float32 (float64 for float64 inputs), also under autocast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.to(wide), self.weight.to(wide))


class TopKGate(nn.Module):
    """Router: a linear layer and softmax, which choose the k experts of each token.

    Args:
        model_dim: width H of a token.
        num_experts: number of experts E on all ranks together.
        k: number of experts per token.
        capacity_factor: in training, an expert has capacity_factor * k S / E slots, rounded up.
        eval_capacity_factor: the same, in evaluation.
        min_capacity: minimum number of slots of an expert.
        noisy_gate_policy: in training "Jitter" (tokens times 1 ± 0.01), or "RSample" (k = 1: Gumbel noise on logits).
        drop_tokens: whether a full expert drops further tokens.
        use_rts: for k = 1, whether a full expert drops random tokens, instead of the last ones.
        ep_group: see `top1gating`.
        top2_2nd_expert_sampling: see `top2gating`.

    Raises:
        ArgumentError: the policy is unknown, or k is not in [1, num_experts].
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in _POLICIES:
            raise ArgumentError(f"noisy_gate_policy is {noisy_gate_policy!r}; it is one of {_POLICIES}")
        if not 1 <= k <= num_experts:
            raise ArgumentError(f"tokens cannot choose k = {k} of {num_experts} expert(s)")
        self.wg = RouterLinear(model_dim, num_experts, bias=False)
        self.k, self.capacity_factor, self.eval_capacity_factor = k, capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts, self.ep_group = drop_tokens, use_rts, ep_group
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def _set_ep_group(self, ep_group: Any) -> None:
        self.ep_group = ep_group

    def forward(
        self,
        input: torch.Tensor,
        used_token: torch.Tensor | None = None,
        use_tutel: bool = False,
        sparse_routes: bool = False,
    ) -> Any:
        """Route tokens and return the tuple described in `top1gating`.

        Args:
            input: (S, H) tokens.
            used_token: see `top1gating`; only for k = 1.
            use_tutel: no effect.
            sparse_routes: whether choices are returned; `ep_group` is then not used.
        """
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        policy = self.noisy_gate_policy if self.training else None
        if policy == "Jitter":
            wide = wide * torch.empty_like(wide).uniform_(1 - _JITTER, 1 + _JITTER)
        logits = self.wg(wide)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        group = None if sparse_routes else self.ep_group
        drop, fewest = self.drop_tokens, self.min_capacity
        if self.k == 1:
            return top1gating(
                logits, factor, fewest, used_token, policy, drop, self.use_rts, group, sparse_routes, use_tutel
            )
        if self.k == 2:
            return top2gating(logits, factor, fewest, drop, group, self.top2_2nd_expert_sampling, sparse_routes)
        return topkgating(logits, self.k, factor, fewest, drop, group, sparse_routes=sparse_routes)


class MOELayer(nn.Module):
    """Layer that sends tokens to their experts, on this and other ranks, and adds the results.

    Args:
        gate: a `TopKGate`.
        experts: the `Experts` of this rank.
        ep_group_name: name of the expert-parallel group.
        ep_size: number of ranks in the expert-parallel group.
        num_local_experts: number of experts on this rank.
        use_tutel: no effect.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        if use_tutel:
            warn_once("use_tutel has no effect: Tutel is not used, and results are the same")
        self.gate, self.experts = gate, experts
        self.ep_group_name, self.ep_size, self.num_local_experts = ep_group_name, ep_size, num_local_experts
        self.ep_group: Any = None
        self.location: ExpertLocation | None = None
        self.l_aux: Any = None
        self.exp_counts: Any = None
        self.time_falltoall = self.time_salltoall = self.time_moe = 0.0

    def _set_ep_group(self, ep_group: Any) -> None:
        self.ep_group = ep_group
        set_group = getattr(self.gate, "_set_ep_group", None)
        if set_group is not None:
            set_group(ep_group)

    def forward(self, *input: Any) -> torch.Tensor:
        """Run (…, H) tokens through their experts. All ranks of the expert-parallel group must call this.

        Args:
            input: the tokens and, for k = 1, an optional (S,) mask of the tokens to use.

        Returns:
            (…, H') weighted sums of the experts' results; 0 for a token dropped by all of its experts. The attributes
            `l_aux` and `exp_counts` are then the gate's balance loss and counts.

        Raises:
            UsageError: `ep_size` is above 1, and the experts are not divided yet.
        """
        hidden = input[0]
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routes = self.gate(tokens, *input[1:2], sparse_routes=True)
        self.l_aux, _, _, index, _, weights, self.exp_counts = routes
        index, weights = index.t(), weights.t().to(tokens.dtype)
        if self.ep_size == 1:
            return self.experts(tokens, index, weights).view(*hidden.shape[:-1], -1)
        location = self.location
        if location is None:
            raise UsageError(
                f"the experts of this layer are to be divided among {self.ep_size} ranks (ep_size): pass the model to "
                f"deepspeed.initialize, or call the layer's set_deepspeed_parallelism(), before its first forward"
            )
        slots = int(routes[1]) if getattr(self.gate, "drop_tokens", False) else 0
        index = expert_choices.current(index, location.owner, location.axis, slots)
        owner = torch.cat([location.owner, location.owner.new_tensor([-1])])  # no rank owns a dropped choice, -1
        routing = Routing.of(index.long(), owner, location.axis, location.name)
        chosen = index[routing.sent].masked_fill(~routing.choices, -1)
        rows, row_weights, chosen = dispatch(tokens, weights, chosen, routing)
        chosen = torch.where(chosen < 0, chosen, chosen - location.first)
        with alarmed(lambda: f"experts of {location.name}"):
            results = self.experts(rows, chosen, row_weights)
        return combine(results, routing).view(*hidden.shape[:-1], -1)
