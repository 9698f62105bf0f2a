"""Pruning masks on the owner's shard: applied to gradient, master and moments.

[Note: dense masters] Where a later mask may keep what an earlier one dropped, the master keeps its values and gets the
unmasked gradient; the mask acts on the copy that the owner publishes. With the last mask the master is masked too.

[Note: edits] Users write into weights: by a setter, in place, in a load. So every step masks again what final masks
drop, and so does an export; between them a weight is what the user made it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.compression.pruning import bitmask
from deepspeed.compression.pruning.dependency_groups import Family
from deepspeed.compression.pruning.distributed_topk import keep_largest, kept_of, largest_units
from deepspeed.compression.pruning.importance import Scores
from deepspeed.compression.pruning.rules import CompressionRule
from deepspeed.compression.pruning.sharded_view import Exchange, Owned, owned_parameters
from deepspeed.errors import CompressionError
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.api.state_view import COMPRESSION
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.optimizer.update import all_gather_updated
from deepspeed.zero.parameters.shard_group import ShardGroup, group_of, meet_before_change

MASK, SCORE = f"{COMPRESSION}mask", f"{COMPRESSION}score"


class Masks:
    """The masks of all rules, on this rank.

    Args:
        model: its parameters are managed already.
        rules: of `rules_of`.
        axis: ranks that share the state.
        optimizer: None when nothing is trained.
    """

    def __init__(
        self, model: nn.Module, rules: list[CompressionRule], axis: Axis, optimizer: ZeroOptimizer | None
    ) -> None:
        self.model, self.rules, self.optimizer = model, rules, optimizer
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.exchange = Exchange(axis, device)
        names = [name for rule in rules for name in rule.names()]
        self.owned = owned_parameters(model, axis, optimizer, names)
        self._home = {name: home for home, names in _aliases(model).items() for name in names}
        self.scores = Scores(rules, self.owned, self._home, self.exchange)
        self.kept: dict[tuple[str, str], torch.Tensor] = {}  # bits of single weights by (rule, parameter)
        self.units: dict[str, list[torch.Tensor]] = {}  # flags of the units of each family, by rule
        self.final: set[str] = set()
        self.hard: dict[str, torch.Tensor] = {}
        self.veils: dict[str, torch.Tensor] = {}
        self._updated: set[int] = set()  # groups that this step has updated
        if optimizer is not None and rules:
            optimizer.set_masks(self)
            for rule in rules:
                _check_gradients_exist(rule, self)
                self._hang_veils(rule, optimizer)

    def _hang_veils(self, rule: CompressionRule, optimizer: ZeroOptimizer) -> None:
        """Mask what is published; keep masters dense where a later mask may keep what an earlier one dropped."""
        for name in rule.names():
            owned = self.of(name)
            if owned.trained and owned.member is not None:
                group = group_of(owned.member)
                if rule.revives and group.split_master():
                    optimizer.shard_of(owned.member).point()
                group.value_mask = self._veil_of(group)

    def of(self, name: str) -> Owned:
        """What this rank holds of a parameter, by any of its names."""
        return self.owned[self._home[name]]

    # -- in a step ----------------------------------------------------------------------------------------------------

    def on_gradients(self) -> None:
        """The window's gradients are complete: criteria read them, then final masks act on them."""
        self.scores.on_gradients([rule for rule in self.rules if rule.name not in self.final])
        for name, packed in self.hard.items():
            with self.owned[name].gradient(changed=True) as gradient:
                if gradient is not None:
                    bitmask.apply(packed, gradient)

    def on_update(self, groups: Iterable[ShardGroup]) -> None:
        """The masters of these groups were updated: final masks hold again, whatever the optimizer or a user did."""
        among = {id(group) for group in groups}
        self._updated |= among
        for name, packed in self.hard.items():
            owned = self.owned[name]
            if owned.member is not None and id(owned.member.group) in among:
                with owned.values(changed=True) as values:
                    bitmask.apply(packed, values)

    def enforce(self) -> None:
        """Mask what edits have put where an export reads: in the parameters. All ranks call together."""
        with torch.no_grad():
            self._mend(self._finals(), lambda group: group.values)

    def _recall(self) -> None:
        """Mask edits of what this step did not update: it is frozen, or had no gradient on any rank."""
        members = {name: self.owned[name].member for name in self._finals()}
        left = [name for name, member in members.items() if member is None or id(member.group) not in self._updated]
        self._updated.clear()
        self._mend(left, lambda group: group.updated)

    def _finals(self) -> list[str]:
        """Parameters that have a final mask, on any rank."""
        names = {self._home[name] for rule in self.rules for name in rule.names() if rule.name in self.final}
        frozen = {name for name, owned in self.owned.items() if not owned.trained}
        return sorted(names | frozen)

    def _mend(self, names: list[str], where: Callable[[ShardGroup], StoredTensor]) -> None:
        """Put masks of these parameters into force again if they do not hold there, on any rank."""
        if not names:
            return
        broken = torch.tensor(
            [_is_broken(self.owned[name], self.hard.get(name), where) for name in names], dtype=torch.uint8
        )
        told = self.exchange.rows(broken, "masks that edits have broken").amax(0).tolist()
        again = [name for name, flag in zip(names, told, strict=True) if flag]
        found = [self.owned[name].member for name in again]
        groups = {id(member.group): group_of(member) for member in found if member is not None}
        meet_before_change(list(groups.values()))
        self.act(again)
        for group in groups.values():
            group.refresh()

    def _veil_of(self, group: ShardGroup) -> Any:
        """What masks the copy that a group publishes."""
        names = [m.name for m in group.members if m.name in self.owned]

        def veil(values: torch.Tensor) -> None:
            for name in names:
                packed = self.veils.get(name, self.hard.get(name))
                if packed is not None:
                    bitmask.apply(packed, values[self.owned[name].span])

        return veil

    # -- new masks ----------------------------------------------------------------------------------------------------

    def after_step(self, step: int) -> list[CompressionRule]:
        """Form the masks that are due after `step` applied steps. All ranks call together.

        Returns:
            The rules whose mask became final now.
        """
        due = [rule for rule in self.rules if rule.name not in self.final and rule.due(step)]
        ended = []
        with torch.no_grad():
            self._recall()
            for rule in due:
                self._form(rule, rule.ratio_at(step))
                if rule.final(step):
                    self.final.add(rule.name)
                    self.scores.forget(rule)
                    ended.append(rule)
            if due:
                self.act([self._home[name] for rule in due for name in rule.names()])
        return ended

    def _form(self, rule: CompressionRule, ratio: float) -> None:
        if rule.families:
            self.units[rule.name] = self._choose(rule, ratio)
            return
        owned = [self.of(name) for name in rule.weights]
        score = self.scores.of_weights(rule)
        if rule.pattern is not None:
            flags = ((one.name, self.scores.by_pattern(rule, one, score, ratio)) for one in owned)
        else:
            sets = [owned] if rule.over_all else [[one] for one in owned]
            keep = [kept_of(sum(one.numel for one in some), ratio) for some in sets]
            flags = keep_largest(sets, keep, score, self.exchange)
        for name, flag in flags:  # one at a time
            self.kept[rule.name, name] = bitmask.pack(flag)

    def _choose(self, rule: CompressionRule, ratio: float) -> list[torch.Tensor]:
        scores = self.scores.of_units(rule)
        if rule.over_all:
            flags = largest_units(torch.cat(scores), kept_of(sum(len(row) for row in scores), ratio))
            return list(flags.split([len(row) for row in scores]))
        return [
            family.choose(row, kept_of(family.size // family.blocks, ratio) * family.blocks)
            for family, row in zip(rule.families, scores, strict=True)
        ]

    def act(self, names: Sequence[str]) -> None:
        """Put changed masks into force on masters, moments and published copies. All ranks call together."""
        names = list(dict.fromkeys(names))
        for name in names:
            self._combine(name)
        groups: dict[int, ShardGroup] = {}
        for name in names:
            owned = self.owned[name]
            self._mask_state(owned)
            if owned.member is not None:
                groups[id(owned.member.group)] = group_of(owned.member)
        all_gather_updated(list(groups.values()))
        for group in groups.values():
            group.advance()

    def _combine(self, name: str) -> None:
        """All masks of one parameter as one: those that are final, and all of them."""
        hard, soft = None, None
        for rule in self.rules:
            packed = self._bits(rule, name)
            if packed is None:
                continue
            if rule.name in self.final or not self.owned[name].trained:
                hard = packed if hard is None else hard & packed
            soft = packed if soft is None else soft & packed
        for store, packed in ((self.hard, hard), (self.veils, soft if soft is not hard else None)):
            if packed is None:
                store.pop(name, None)
            else:
                store[name] = packed

    def _bits(self, rule: CompressionRule, name: str) -> torch.Tensor | None:
        if (rule.name, name) in self.kept:
            return self.kept[rule.name, name]
        owned, flags = self.owned[name], None
        for family, keep in zip(rule.families, self.units.get(rule.name, ()), strict=False):
            if any(self._home[slot] == name for slot in family.names()):
                own = self._flags(family, owned, keep)
                flags = own if flags is None else flags & own
        return None if flags is None else bitmask.pack(flags)

    def _flags(self, family: Family, owned: Owned, keep: torch.Tensor) -> torch.Tensor:
        names = [name for name in family.names() if self._home[name] == owned.name]
        made = family.flags(names[0], owned.shape, (owned.low, owned.high), keep)
        for name in names[1:]:
            made &= family.flags(name, owned.shape, (owned.low, owned.high), keep)
        return made

    def _mask_state(self, owned: Owned) -> None:
        packed = self.hard.get(owned.name)
        if packed is None:
            return
        if owned.member is None or self.optimizer is None or not owned.trained:
            with owned.values(changed=True) as values:
                bitmask.apply(packed, values)
            return
        with self.optimizer.shard_of(owned.member).at_hand(changed=True), owned.values(changed=True) as values:
            bitmask.apply(packed, values)
            for moment in owned.moments():
                bitmask.apply(packed, moment)

    # -- in a checkpoint ----------------------------------------------------------------------------------------------

    def fragment_state(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        """What a checkpoint stores beside the optimizer's state of a fragment: masks and scores of single weights."""
        name = fragment.member.name
        if name not in self.owned:
            return {}
        owned, made = self.owned[name], {}
        for (rule, of), packed in self.kept.items():
            if of == name:
                made[f"{MASK}.{rule}"] = bitmask.unpack(packed, owned.high - owned.low).view(fragment.leaf.shape)
        for rule, score in self.scores.stored(name):
            made[f"{SCORE}.{rule}"] = score.view(fragment.leaf.shape)
        return made

    def take_fragment_state(self, fragment: Fragment, state: dict[str, Any]) -> dict[str, Any]:
        """Take masks and scores out of a state that was loaded; gives what belongs to the optimizer.

        The tensors are filled later: `loaded` reads them.
        """
        rest = {}
        for key, value in state.items():
            if key.startswith((MASK, SCORE)):
                self._arriving.setdefault(fragment.member.name, {})[key] = value
            else:
                rest[key] = value
        return rest

    @property
    def _arriving(self) -> dict[str, dict[str, torch.Tensor]]:
        return self.__dict__.setdefault("_coming", {})

    def state_dict(self) -> dict[str, Any]:
        """What all ranks share: flags of units, their scores, which rules have ended."""
        units = {rule: [flags.clone() for flags in rows] for rule, rows in self.units.items()}
        return {"units": units, "final": sorted(self.final), "scores": self.scores.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take back masks and scores, after the tensors of a checkpoint were read. All ranks call together."""
        self.kept.clear()
        self.hard.clear()
        self.veils.clear()
        self.final = set(saved["final"]) & {rule.name for rule in self.rules}
        self.units = {rule: [flags.clone() for flags in rows] for rule, rows in saved["units"].items()}
        self.scores.load_state_dict(saved["scores"])
        known = {rule.name for rule in self.rules}
        for name, state in self._arriving.items():
            for key, value in state.items():
                kind, rule = (MASK, key[len(MASK) + 1 :]) if key.startswith(MASK) else (SCORE, key[len(SCORE) + 1 :])
                if rule not in known:
                    continue
                if kind == MASK:
                    self.kept[rule, name] = bitmask.pack(value.reshape(-1).to(torch.bool))
                else:
                    self.scores.put(rule, name, value.reshape(-1))
        self._arriving.clear()
        self.act([self._home[name] for rule in self.rules for name in rule.names()])

    def arriving(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        """Tensors that a load is filling."""
        return self._arriving.get(fragment.member.name, {})

    # -- reports ------------------------------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes of the masks on this rank."""
        stores = [*self.kept.values(), *self.hard.values(), *self.veils.values()]
        return sum({packed.data_ptr(): packed.numel() for packed in stores}.values())


def _check_gradients_exist(rule: CompressionRule, masks: Masks) -> None:
    """A criterion that reads gradients, of parameters that have none."""
    if rule.criterion in ("movement", "taylor") and not any(masks.of(name).trained for name in rule.names()):
        raise CompressionError(
            f"{rule.name}: criterion {rule.criterion} reads gradients, and none of its parameters is trained: "
            f"use magnitude or activation"
        )


def _is_broken(owned: Owned, packed: torch.Tensor | None, where: Callable[[ShardGroup], StoredTensor]) -> bool:
    """Whether a final mask drops an element that is not zero there."""
    if packed is None:
        return False
    with contextlib.ExitStack() as stack:
        if owned.member is None:
            values = stack.enter_context(owned.values())
        else:
            values = stack.enter_context(where(group_of(owned.member)).borrowed())[owned.span]
        masked = values.clone()
        bitmask.apply(packed, masked)
        return not torch.equal(masked, values)


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Every name of each parameter, by its first."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(param), name), []).append(name)
    return found
