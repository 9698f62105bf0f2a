"""Pruning masks of this rank's shard: packed bits, applied to gradients, master weights and moments.

[Note: dense masters] If a later mask may keep elements that an earlier mask dropped, the master weight stays dense and
gets unmasked gradients; the mask is applied to the copy that is all-gathered. The last mask is also applied to the
master weight.

[Note: edits] Users may change weights between steps, so every step and every export applies the final masks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.compression.pruning.distributed_topk import keep_largest, kept_of, largest_units
from deepspeed.compression.pruning.importance import Scores
from deepspeed.compression.pruning.rules import CompressionRule
from deepspeed.compression.pruning.sharded_view import Exchange, Owned
from deepspeed.errors import CompressionError
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.api.state_view import COMPRESSION
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.optimizer.update import all_gather_updated
from deepspeed.zero.parameters.shard_group import ShardGroup, group_of, meet_before_change

MASK, SCORE = f"{COMPRESSION}mask", f"{COMPRESSION}score"
_BITS = 2 ** torch.arange(8)
# The eight flags of every byte as one 64-bit number: unpacking is one lookup per byte.
_FLAGS = ((torch.arange(256)[:, None] // _BITS) % 2).to(torch.uint8).contiguous().view(torch.int64).view(-1)
_CHUNK = 1 << 14  # mask bytes unpacked at a time


def pack_flags(keep: torch.Tensor) -> torch.Tensor:
    """Pack 1-D bool flags [n] into bits: uint8 [ceil(n / 8)]; bits past the end are set."""
    count = -(-keep.numel() // 8)
    packed = torch.empty(count, dtype=torch.uint8, device=keep.device)
    weights = _BITS.to(torch.uint8).to(keep.device)
    for start in range(0, count, _CHUNK * 8):
        part = keep[start * 8 : (start + _CHUNK * 8) * 8]
        if part.numel() % 8:
            part = torch.cat([part, part.new_ones(-part.numel() % 8)])
        packed[start : start + _CHUNK * 8] = (part.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return packed


def unpack_flags(packed: torch.Tensor, numel: int) -> torch.Tensor:
    flags = _FLAGS.to(packed.device).index_select(0, packed.to(torch.int32))
    return flags.view(torch.bool)[:numel]


def apply_mask(packed: torch.Tensor, values: torch.Tensor) -> None:
    """Multiply 1-D `values` of any dtype by the mask `packed` (see `pack_flags`), in place."""
    flags, numel = _FLAGS.to(packed.device), values.numel()
    for start in range(0, packed.numel(), _CHUNK):
        part = values[start * 8 : min((start + _CHUNK) * 8, numel)]
        keep = flags.index_select(0, packed[start : start + _CHUNK].to(torch.int32)).view(torch.uint8)
        part.mul_(keep[: part.numel()])


def count_dropped(packed: torch.Tensor) -> int:
    """Return the number of unset flags in a packed mask."""
    counts = torch.bincount(packed.to(torch.int64), minlength=256).to("cpu")
    ones = counts * _FLAGS.view(torch.uint8).view(256, 8).sum(1)
    return packed.numel() * 8 - int(ones.sum())


class Masks:
    """Masks of all pruning rules for this rank's elements, by first parameter name.

    `hard` are final masks, applied to master weights. `soft` also include masks that may still change, and are applied
    only to the parameters (copies of the masters).

    Args:
        model: plain model, or an engine's module.
        rules: pruning rules.
        axis: ranks that share parameters and optimizer state.
        optimizer: the engine's optimizer; None without training.

    Raises:
        CompressionError: a rule reads gradients, and none of its parameters is trained.
    """

    def __init__(
        self, model: nn.Module, rules: list[CompressionRule], axis: Axis, optimizer: ZeroOptimizer | None
    ) -> None:
        self.model, self.rules, self.optimizer = model, rules, optimizer
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.exchange = Exchange(axis, device)
        self.owned: dict[str, Owned] = {}
        self._first_name: dict[str, str] = {}
        wanted, first_names = {name for rule in rules for name in rule.names()}, dict[int, str]()
        for name, param in model.named_parameters(remove_duplicate=False):
            first = self._first_name[name] = first_names.setdefault(id(param), name)
            if name in wanted and first not in self.owned:
                self.owned[first] = Owned(first, param, axis, optimizer)
        self.scores = Scores(rules, self.owned, self._first_name, self.exchange)
        self.kept: dict[tuple[str, str], torch.Tensor] = {}  # packed flags of single weights, by (rule, parameter)
        self.units: dict[str, list[torch.Tensor]] = {}  # flags of each family's units, by rule
        self.final: set[str] = set()
        self.hard: dict[str, torch.Tensor] = {}
        self.soft: dict[str, torch.Tensor] = {}
        self._updated: set[int] = set()  # groups updated in this step
        self._loading: dict[str, dict[str, torch.Tensor]] = {}  # tensors that a load is filling
        if optimizer is not None and rules:
            optimizer.set_masks(self)
            for rule in rules:
                self._attach(rule, optimizer)

    def _attach(self, rule: CompressionRule, optimizer: ZeroOptimizer) -> None:
        """Set up a rule's groups (dense masters if masks revive weights); CompressionError if gradients are missing."""
        names = rule.names()
        if rule.criterion in ("movement", "taylor") and not any(self.of(name).trained for name in names):
            raise CompressionError(
                f"{rule.name}: criterion {rule.criterion} reads gradients, and none of its parameters is trained: "
                f"use magnitude or activation"
            )
        for name in names:
            owned = self.of(name)
            if owned.trained and owned.member is not None:
                group = group_of(owned.member)
                if rule.revives and group.split_master():
                    optimizer.shard_of(owned.member).point()
                group.value_mask = self._soft_mask_of(group)

    def of(self, name: str) -> Owned:
        """Return this rank's part of a parameter, by any of its names."""
        return self.owned[self._first_name[name]]

    # -- in a step ----------------------------------------------------------------------------------------------------

    def on_gradients(self) -> None:
        """Update scores by this step's accumulated gradients, then apply final masks to the gradients. Collective."""
        self.scores.on_gradients([rule for rule in self.rules if rule.name not in self.final])
        for name, packed in self.hard.items():
            with self.owned[name].gradient(changed=True) as gradient:
                if gradient is not None:
                    apply_mask(packed, gradient)

    def on_update(self, groups: Iterable[ShardGroup]) -> None:
        """Apply final masks to the masters of these groups, after the optimizer has updated them."""
        among = {id(group) for group in groups}
        self._updated |= among
        for name, packed in self.hard.items():
            owned = self.owned[name]
            if owned.member is not None and id(owned.member.group) in among:
                with owned.values(changed=True) as values:
                    apply_mask(packed, values)

    def enforce(self) -> None:
        """Apply final masks to parameters that the user has edited, before an export. Collective."""
        with torch.no_grad():
            self._mask_edits(self._finally_masked(), lambda group: group.values)

    def _mask_edits_without_update(self) -> None:
        """Apply final masks to edited parameters that this step has not updated (frozen or no gradient). Collective."""
        members = {name: self.owned[name].member for name in self._finally_masked()}
        names = [name for name, member in members.items() if member is None or id(member.group) not in self._updated]
        self._updated.clear()
        self._mask_edits(names, lambda group: group.updated)

    def _finally_masked(self) -> list[str]:
        """Return the sorted first names of parameters with a final mask, and of all frozen parameters with a rule."""
        names = {self._first_name[name] for rule in self.rules for name in rule.names() if rule.name in self.final}
        frozen = {name for name, owned in self.owned.items() if not owned.trained}
        return sorted(names | frozen)

    def _mask_edits(self, names: list[str], values_of: Callable[[ShardGroup], StoredTensor]) -> None:
        """Apply the masks of these parameters if masked elements are nonzero on any rank. Collective.

        Args:
            names: first names of parameters, the same on all ranks.
            values_of: function of a group that returns the tensor to check.
        """
        if not names:
            return
        edited = torch.tensor([self._is_edited(name, values_of) for name in names], dtype=torch.uint8)
        on_any_rank = self.exchange.rows(edited, "masks that edits have broken").amax(0).tolist()
        names = [name for name, flag in zip(names, on_any_rank, strict=True) if flag]
        members = [self.owned[name].member for name in names]
        groups = {id(member.group): group_of(member) for member in members if member is not None}
        meet_before_change(list(groups.values()))
        self.act(names)
        for group in groups.values():
            group.refresh()

    def _is_edited(self, name: str, values_of: Callable[[ShardGroup], StoredTensor]) -> bool:
        """Whether this rank's elements of a parameter are nonzero where its final mask is zero."""
        packed, owned = self.hard.get(name), self.owned[name]
        if packed is None:
            return False
        with contextlib.ExitStack() as stack:
            if owned.member is None:
                values = stack.enter_context(owned.values())
            else:
                values = stack.enter_context(values_of(group_of(owned.member)).borrowed())[owned.span]
            masked = values.clone()
            apply_mask(packed, masked)
            return not torch.equal(masked, values)

    def _soft_mask_of(self, group: ShardGroup) -> Any:
        """Return a function that masks the copy of a group's master, in place."""
        names = [m.name for m in group.members if m.name in self.owned]

        def mask(values: torch.Tensor) -> None:
            for name in names:
                packed = self.soft.get(name, self.hard.get(name))
                if packed is not None:
                    apply_mask(packed, values[self.owned[name].span])

        return mask

    # -- new masks ----------------------------------------------------------------------------------------------------

    def after_step(self, step: int) -> list[CompressionRule]:
        """Apply masks that are due after `step` applied steps; return the rules with newly final masks. Collective."""
        due = [rule for rule in self.rules if rule.name not in self.final and rule.due(step)]
        ended = []
        with torch.no_grad():
            self._mask_edits_without_update()
            for rule in due:
                self._form(rule, rule.ratio_at(step))
                if rule.final(step):
                    self.final.add(rule.name)
                    self.scores.forget(rule)
                    ended.append(rule)
            if due:
                self.act([self._first_name[name] for rule in due for name in rule.names()])
        return ended

    def _form(self, rule: CompressionRule, ratio: float) -> None:
        if rule.families:
            self.units[rule.name] = self._choose(rule, ratio)
            return
        owned = [self.of(name) for name in rule.weights]
        score = self.scores.of_weights(rule)
        if rule.pattern is not None:
            flags = ((param.name, self.scores.by_pattern(rule, param, score, ratio)) for param in owned)
        else:
            sets = [owned] if rule.over_all else [[param] for param in owned]
            keep = [kept_of(sum(param.numel for param in params), ratio) for params in sets]
            flags = keep_largest(sets, keep, score, self.exchange)
        for name, flag in flags:  # one at a time
            self.kept[rule.name, name] = pack_flags(flag)

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
        """Apply the masks of parameters, given first names, to master weights, moments and parameters. Collective."""
        groups: dict[int, ShardGroup] = {}
        names = list(dict.fromkeys(names))
        for name in names:
            self._combine(name)
        for name in names:
            owned = self.owned[name]
            self._mask_state(owned)
            if owned.member is not None:
                groups[id(owned.member.group)] = group_of(owned.member)
        all_gather_updated(list(groups.values()))
        for group in groups.values():
            group.advance()

    def _combine(self, name: str) -> None:
        """Combine the masks of all rules for one parameter: final masks in `hard`, all in `soft` if these differ."""
        hard, soft = None, None
        for rule in self.rules:
            packed = self._bits(rule, name)
            if packed is None:
                continue
            if rule.name in self.final or not self.owned[name].trained:
                hard = packed if hard is None else hard & packed
            soft = packed if soft is None else soft & packed
        for store, packed in ((self.hard, hard), (self.soft, soft if soft is not hard else None)):
            if packed is None:
                store.pop(name, None)
            else:
                store[name] = packed

    def _bits(self, rule: CompressionRule, name: str) -> torch.Tensor | None:
        if (rule.name, name) in self.kept:
            return self.kept[rule.name, name]
        owned, flags = self.owned[name], None
        for family, keep in zip(rule.families, self.units.get(rule.name, ()), strict=False):
            for tied in (tied for tied in family.names() if self._first_name[tied] == name):
                part = family.flags(tied, owned.shape, (owned.low, owned.high), keep)
                flags = part if flags is None else flags & part
        return None if flags is None else pack_flags(flags)

    def _mask_state(self, owned: Owned) -> None:
        packed = self.hard.get(owned.name)
        if packed is None:
            return
        if owned.member is None or self.optimizer is None or not owned.trained:
            with owned.values(changed=True) as values:
                apply_mask(packed, values)
            return
        with self.optimizer.shard_of(owned.member).at_hand(changed=True), owned.values(changed=True) as values:
            apply_mask(packed, values)
            for moment in owned.moments():
                apply_mask(packed, moment)

    # -- in a checkpoint ----------------------------------------------------------------------------------------------

    def fragment_state(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        """Return the masks and scores of a fragment's weights, to be stored with its optimizer state."""
        name = fragment.member.name
        if name not in self.owned:
            return {}
        owned, state = self.owned[name], {}
        for (rule, parameter), packed in self.kept.items():
            if parameter == name:
                state[f"{MASK}.{rule}"] = unpack_flags(packed, owned.high - owned.low).view(fragment.leaf.shape)
        for rule, score in self.scores.stored(name):
            state[f"{SCORE}.{rule}"] = score.view(fragment.leaf.shape)
        return state

    def take_fragment_state(self, fragment: Fragment, state: dict[str, Any]) -> dict[str, Any]:
        """Record the masks and scores in a fragment's state, and return the rest, the state of the optimizer.

        The checkpoint reader fills the recorded tensors later, before `load_state_dict` uses them.
        """
        rest = {}
        for key, value in state.items():
            if key.startswith((MASK, SCORE)):
                self._loading.setdefault(fragment.member.name, {})[key] = value
            else:
                rest[key] = value
        return rest

    def arriving(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        """Return the recorded masks and scores of a fragment, which the checkpoint reader fills."""
        return self._loading.get(fragment.member.name, {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks: flags and scores of units, and names of finished rules."""
        units = {rule: [flags.clone() for flags in rows] for rule, rows in self.units.items()}
        return {"units": units, "final": sorted(self.final), "scores": self.scores.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a `state_dict` and the recorded masks and scores, and apply the masks. Collective."""
        self.kept.clear()
        self.hard.clear()
        self.soft.clear()
        known = {rule.name for rule in self.rules}
        self.final = set(saved["final"]) & known
        self.units = {rule: [flags.clone() for flags in rows] for rule, rows in saved["units"].items()}
        self.scores.load_state_dict(saved["scores"])
        for name, state in self._loading.items():
            for key, value in state.items():
                kind = MASK if key.startswith(MASK) else SCORE
                rule = key.removeprefix(f"{kind}.")
                if rule in known and kind == MASK:
                    self.kept[rule, name] = pack_flags(value.reshape(-1).to(torch.bool))
                elif rule in known:
                    self.scores.put(rule, name, value.reshape(-1))
        self._loading.clear()
        self.act([self._first_name[name] for rule in self.rules for name in rule.names()])

    # -- reports ------------------------------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Return the number of bytes of the masks on this rank."""
        stores = [*self.kept.values(), *self.hard.values(), *self.soft.values()]
        return sum({packed.data_ptr(): packed.numel() for packed in stores}.values())
