"""Decides how ranks share out the update of an optimizer, and logs what that costs."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import OptimizerError
from deepspeed.foundation.log import warn_once
from deepspeed.optim.separability import MethodTraits, UpdateTraits, update_traits
from deepspeed.zero.parameters.parallel_groups import ParallelGroups


def traits_of(optimizer: torch.optim.Optimizer | None, config: DeepSpeedConfig, axes: ParallelGroups) -> UpdateTraits:
    """How the optimizer's update may be split; what follows of it is logged."""
    traits = UpdateTraits(known=True) if optimizer is None else update_traits(optimizer)
    if optimizer is None or traits.known:
        return traits
    traits = _agreed(traits, axes)
    name, mesh = type(optimizer).__name__, axes.mesh
    if traits.unknown:
        warn_once(
            f"{name} could not be tried on small copies of its groups ({traits.unknown}), so it is taken for one that "
            f"updates each parameter by itself; a global norm inside of its step would be that of one rank",
            key=type(optimizer),
        )
    if not traits.by_parameter and (mesh.size("tp") > 1 or mesh.size("pp") > 1):
        raise OptimizerError(
            f"the update of {name} looks at all parameters at once (on small copies, sharing them out changes it by "
            f"{traits.difference:.1g} of the distance moved), and ranks of a model cut by tp or pp have some each; use "
            f"an optimizer that updates each parameter by itself, such as AdamW, or data parallelism alone"
        )
    if not traits.by_parameter and config.zero.stage > 0 and axes.shard.size > 1:
        warn_once(
            f"the update of {name} looks at all parameters at once (on small copies, sharing them out changes it by "
            f"{traits.difference:.1g} of the distance moved), so rank 0 of each data-parallel group updates all of "
            f"them and holds all of its state; an optimizer that updates each parameter by itself, such as AdamW, is "
            f"sharded",
            key=type(optimizer),
        )
    return traits


def _agreed(traits: UpdateTraits, axes: ParallelGroups) -> UpdateTraits:
    """The traits that hold on all ranks: one rank may hold an object that cannot be copied, or other parameters.

    Ranks lay parameters out by the result, so none may decide alone. All ranks call together.
    """
    every = [
        replace(each, methods=methods)
        for each, methods in all_gather_objects(axes.everyone, (replace(traits, methods={}), dict(traits.methods)))
    ]
    tried = [each for each in every if not each.unknown]
    if not tried:
        return traits
    methods: dict[str, MethodTraits] = {}
    for each in tried:
        for name, method in each.methods.items():
            methods[name] = method.joined(methods.get(name, method))
    return replace(
        tried[0],
        by_parameter=all(each.by_parameter for each in tried),
        in_parts=all(each.in_parts for each in tried),
        counts_alone=all(each.counts_alone for each in tried),
        methods=methods,
        difference=max(each.difference for each in tried),
    )
