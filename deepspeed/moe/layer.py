"""MoE layer for use in a model's own code, in place of a feed-forward block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import ArgumentError, ExpertParallelError
from deepspeed.foundation.log import log_rank0
from deepspeed.moe import groups
from deepspeed.moe.expert_parallel import ExpertLocation, order_of
from deepspeed.moe.experts import Experts, first_of
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.zero.api.reshard import shard_parameter
from deepspeed.zero.layout.placement import Relation, place, placement_of
from deepspeed.zero.parameters.grouping import unshard
from deepspeed.zero.parameters.parameter import is_managed


class MoE(nn.Module):
    """Mixture of experts: copies of one expert, with top-k routing; `sharded_moe.py` has the formulas.

    Args:
        hidden_size: width H of a token.
        expert: a module that maps (rows, H) to (rows, H), or to a tuple with this result first. It is copied, so all
            experts start equal unless they are initialised again.
        num_experts: number of experts on all ranks together.
        ep_size: number of ranks among which the experts are divided; divides num_experts and the data-parallel size.
        k: number of experts per token.
        capacity_factor: in training, an expert has capacity_factor * k S / num_experts slots for a rank's S tokens.
        eval_capacity_factor: the same, in evaluation.
        min_capacity: minimum number of slots of an expert.
        use_residual: whether the output is mixed with that of a dense branch, `expert` itself (arXiv:2201.05596).
        noisy_gate_policy: None, "Jitter" or "RSample"; see `TopKGate`.
        drop_tokens: whether a full expert drops further tokens.
        use_rts: for k = 1, whether a full expert drops random tokens, instead of the last ones.
        use_tutel: no effect.
        enable_expert_tensor_parallelism: no effect; `expert` may be a tensor-parallel slice either way.
        top2_2nd_expert_sampling: for k = 2, whether the second expert is sampled, also in evaluation.

    Raises:
        ArgumentError: `ep_size` does not divide `num_experts`, k is not in [1, num_experts], or the policy is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            fits = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ArgumentError(f"ep_size {ep_size} does not divide {num_experts} expert(s); sizes that do: {fits}")
        self.use_residual, self.enable_expert_tensor_parallelism = use_residual, enable_expert_tensor_parallelism
        self.num_experts, self.ep_size, self.num_local_experts = num_experts, ep_size, num_experts // ep_size
        self.expert_group_name = groups.name_of(ep_size)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel)
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Divide the experts among the ranks of the current mesh. All ranks call this, in `deepspeed.initialize`.

        Raises:
            MeshError: `ep_size` does not divide the number of data-parallel ranks.
            NotAvailableError: `use_data_before_expert_parallel_` is True.
            ExpertParallelError: the experts were divided on another mesh before.
        """
        make = groups._create_expert_and_data_parallel
        make(self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_)
        self.deepspeed_moe._set_ep_group(groups._get_expert_parallel_group(self.expert_group_name))
        if self.ep_size > 1:
            self._divide()

    def _divide(self) -> None:
        layer, mesh, ep = self.deepspeed_moe, current_mesh(), self.ep_size
        experts: Any = layer.experts.deepspeed_experts
        location = ExpertLocation(mesh.axis("ep", ep=ep), "MoE", self.num_experts, order_of(mesh, ep))
        before = layer.location
        if before is not None:
            if before.first != location.first:
                raise ExpertParallelError(
                    f"this rank has the experts from {before.first} of a MoE layer, and by the current mesh those from "
                    f"{location.first}: make the model anew for another mesh"
                )
            location.name = before.name
            layer.location = location
            return
        params = dict(experts.named_parameters())
        born_sharded = [key for key, param in params.items() if is_managed(param)]  # by `zero.Init`, over all ranks
        unshard(params[key] for key in born_sharded)
        for param in params.values():
            placed = placement_of(param)
            place(param, replace(placed, relations={**placed.relations, "ep": Relation.ABSENT}, ep=ep))
        alike = mesh.axis("edp", ep=ep)
        for key in born_sharded if alike.size > 1 else ():
            shard_parameter(params[key], f"MoE.{key}", alike)
        layer.location = location
        experts.number_from(location.first, location.count)
        log_rank0(f"a MoE layer has {self.num_local_experts} of {self.num_experts} experts on each of {ep} ranks")

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run tokens through their experts. All ranks of the expert-parallel group must call this.

        Args:
            hidden_states: (…, H) tokens.
            used_token: (S,) of 0 and 1, only for k = 1: tokens with 0 go to no expert; None: all tokens are used.

        Returns:
            (…, H) output; 0-d balance loss of this rank's tokens, to be added to the model's loss; (num_experts,)
            int64 number of tokens that chose each expert.

        Raises:
            UsageError: `ep_size` is above 1, and the experts are not divided yet.
            ArgumentError: for k = 1 with `drop_tokens`, there are fewer tokens than `min_capacity`.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            branch = first_of(self.mlp(hidden_states))
            share = self.coefficient(hidden_states).softmax(-1)
            output = output * share[..., :1] + branch * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
