"""Forms of calls to modules of experts: the arguments with the tokens, their experts, and their weights.

A call of any form is converted to pairs (row, expert). The pairs of one rank's experts are converted back to a call of
the same form. The forms, each a `CallForm`:

| form    | arguments                                                   | such as                               |
|---------|-------------------------------------------------------------|---------------------------------------|
| choices | tokens (…, H), T in all; experts (T, k); weights (T, k)     | the experts of Transformers 5         |
| masks   | tokens (T, H); one-hot over experts (T, k, E); weights      | Switch Transformers: 0 where dropped  |
| counts  | rows (S, H) sorted by expert; rows per expert (E,)          | JetMoE                                |
| blocks  | rows (E T, H): T for each expert, 0 where it is not chosen  | Llama 4                               |
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.errors import ExpertParallelError

_INDEX, _WEIGHTS, _COUNTS = ("ind", "select", "expert", "mask"), ("weight", "score", "prob"), ("size", "count")
_TOKENS, _CHOICES = 16, 2  # of an example


@dataclass(frozen=True)
class Call:
    """Call of a module of experts, converted from any form.

    Args:
        rows: (T, H) tokens.
        index: (T, k) integer: chosen experts of each row; -1: no expert.
        weights: (T, k) weights of the chosen experts.
        shape: shape of the module's result without its last dim.
        where: (T,) int64: position of each row in the flattened result; None: the same order.
    """

    rows: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    shape: torch.Size
    where: torch.Tensor | None = None

    def result(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the module's result from the (T, H') results of the rows; other rows are 0."""
        if self.where is not None:
            rows = rows.new_zeros(self.shape.numel(), rows.shape[-1]).index_copy(0, self.where, rows)
        return rows.view(*self.shape, rows.shape[-1])


def _by_row(result: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """View a result as (P, H'), also for P = 0."""
    return result.view(rows.shape[0], result.shape[-1])


class CallForm:
    """Base class of the forms of calls; `name` is used in error messages."""

    name = ""

    def fits(self, names: list[str]) -> bool:
        """Return whether a forward with these parameter names may be called in this form."""
        raise NotImplementedError

    def read(self, values: list[Any], count: int) -> Call | None:
        """Convert the arguments of a call to a module with `count` experts; None if they have another form."""
        raise NotImplementedError

    def run(self, forward: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int) -> Any:
        """Call the forward of `count` experts for (P, H) rows with (P,) experts and weights; return (P, H') results."""
        raise NotImplementedError

    def example(self, count: int, width: int, like: torch.Tensor) -> list[Any]:
        """Return random arguments of width H = `width` for `count` experts, with the dtype and device of `like`."""
        raise NotImplementedError


class Choices(CallForm):
    """Form "choices": tokens, the experts of each token, and their weights."""

    name = "choices"

    def fits(self, names: list[str]) -> bool:
        return len(names) == 3 and _says(names[1], _INDEX) and _says(names[2], _WEIGHTS)

    def read(self, values: list[Any], count: int) -> Call | None:
        if not _are_tensors(values, 3):
            return None
        hidden, index, weights = values
        fits = index.dim() == 2 and index.shape == weights.shape and hidden.shape[:-1].numel() == index.shape[0]
        return Call(hidden.reshape(-1, hidden.shape[-1]), index, weights, hidden.shape[:-1]) if fits else None

    def run(self, forward: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int) -> Any:
        return _by_row(forward(rows, index.unsqueeze(1), weights.unsqueeze(1)), rows)

    def example(self, count: int, width: int, like: torch.Tensor) -> list[Any]:
        generator, tokens = torch.Generator().manual_seed(0), _TOKENS + count
        first = torch.arange(tokens) % count  # every expert is chosen
        second = (first + torch.randint(1, max(count, 2), (tokens,), generator=generator)) % count
        index = torch.stack([first, second][: min(_CHOICES, count)], 1)
        weights = torch.rand(index.shape, generator=generator)
        hidden = torch.randn(tokens, width, generator=generator)
        return [hidden.to(like), index.to(like.device), weights.to(like)]


class TwoChoices(Choices):
    """Form "choices" for a module that cannot run with one expert per token: a second expert gets weight 0."""

    name = "twochoices"

    def run(self, forward: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int) -> Any:
        index = torch.stack([index, torch.full_like(index, count - 1)], 1)  # LongCat's last expert is an identity
        weights = torch.stack([weights, torch.zeros_like(weights)], 1)
        return _by_row(forward(rows, index, weights), rows)


class ChoiceMasks(Choices):
    """Form "masks": tokens, a one-hot mask over the experts for each choice, and weights."""

    name = "masks"

    def read(self, values: list[Any], count: int) -> Call | None:
        if not _are_tensors(values, 3) or values[1].dim() != 3 or values[1].shape[-1] != count:
            return None
        chosen = values[1] != 0
        if bool((chosen.sum(-1) > 1).any()):
            return None
        index = torch.where(chosen.any(-1), chosen.int().argmax(-1), -1)
        return super().read([values[0], index, values[2]], count)

    def run(self, forward: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int) -> Any:
        return super().run(forward, rows, nn.functional.one_hot(index, count), weights, count)

    def example(self, count: int, width: int, like: torch.Tensor) -> list[Any]:
        hidden, index, weights = super().example(count, width, like)
        mask = nn.functional.one_hot(index, count)
        mask[0] = 0  # a token that was dropped
        return [hidden, mask, weights]


class Counts(CallForm):
    """Form "counts": rows sorted by expert, and the number of rows of each expert."""

    name = "counts"

    def fits(self, names: list[str]) -> bool:
        return len(names) == 2 and _says(names[1], _COUNTS)

    def read(self, values: list[Any], count: int) -> Call | None:
        if len(values) != 2 or not _are_tensors(values[:1], 1):
            return None
        rows, sizes = values
        if isinstance(sizes, torch.Tensor):
            sizes = sizes.tolist()
        if not isinstance(sizes, (list, tuple)) or len(sizes) != count:
            return None
        if rows.dim() != 2 or sum(sizes) != rows.shape[0]:
            return None
        return _of_rows(rows, torch.tensor(sizes, device=rows.device))

    def run(self, forward: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int) -> Any:
        order = index.argsort(stable=True)
        out = forward(rows[order], torch.bincount(index, minlength=count).tolist())
        return out.new_zeros(out.shape).index_copy(0, order, out)

    def example(self, count: int, width: int, like: torch.Tensor) -> list[Any]:
        sizes = [1 + expert % 3 for expert in range(count)]
        return [torch.randn(sum(sizes), width, generator=torch.Generator().manual_seed(0)).to(like), sizes]


class Blocks(CallForm):
    """Form "blocks": an equal number of rows for each expert, in order; rows of zeros are not sent and give zeros."""

    name = "blocks"

    def fits(self, names: list[str]) -> bool:
        return len(names) == 1

    def read(self, values: list[Any], count: int) -> Call | None:
        if not _are_tensors(values, 1) or values[0].dim() != 2 or values[0].shape[0] % count:
            return None
        rows = values[0]
        where = rows.detach().ne(0).any(1).nonzero().squeeze(1)
        index = where.div(max(rows.shape[0] // count, 1), rounding_mode="floor").unsqueeze(1)
        return Call(rows[where], index, rows.new_ones(index.shape), rows.shape[:1], where)

    def run(self, forward: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int) -> Any:
        sizes = torch.bincount(index, minlength=count)
        most, order = int(sizes.max()), index.argsort(stable=True)
        first = (sizes.cumsum(0) - sizes)[index[order]]  # of the sorted rows of the same expert
        place = index[order] * most + torch.arange(len(order), device=order.device) - first
        out = forward(rows.new_zeros(count * most, rows.shape[1]).index_copy(0, place, rows[order]))
        return out.new_zeros(rows.shape[0], out.shape[-1]).index_copy(0, order, out[place])

    def example(self, count: int, width: int, like: torch.Tensor) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(count, _TOKENS, width, generator=generator)
        rows[:, ::3] = 0
        return [rows.flatten(0, 1).to(like)]


FORMS: tuple[CallForm, ...] = (Choices(), TwoChoices(), ChoiceMasks(), Counts(), Blocks())


def values_of(kind: type, module: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments of a call of `module`, in the order of the parameters of the forward of class `kind`."""
    return list(signature_of(kind).bind(module, *args, **kwargs).arguments.values())[1:]


def read_call(form: CallForm, values: list[Any], count: int, name: str) -> Call:
    """Convert the arguments of a call in one form.

    Args:
        form: the form.
        values: the arguments, as from `values_of`.
        count: number of experts of the module.
        name: name of the module in error messages.

    Raises:
        ExpertParallelError: the arguments or their shapes are not those of the form.
    """
    return read_any((form,), values, count, name)


def read_any(forms: Sequence[CallForm], values: list[Any], count: int, name: str) -> Call:
    """Convert the arguments of a call in the first of several forms that matches; see `read_call`."""
    call = next((call for call in (form.read(values, count) for form in forms) if call is not None), None)
    if call is None:
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values]
        kinds = " or ".join(form.name for form in forms)
        raise ExpertParallelError(
            f"the {count} experts of '{name}' are divided among ranks, as a module whose calls have the form {kinds} "
            f"(docs/experts.md); this call has {shapes}"
        )
    return call


def signature_of(kind: type) -> inspect.Signature:
    """Return the signature of the forward of a module class; overrides that take *args are skipped."""
    signatures = [inspect.signature(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base)]
    own = [s for s in signatures if all(p.kind is not p.VAR_POSITIONAL for p in s.parameters.values())]
    return (own or signatures)[0]


def _of_rows(rows: torch.Tensor, sizes: torch.Tensor) -> Call:
    index = torch.arange(len(sizes), device=rows.device).repeat_interleave(sizes).unsqueeze(1)
    return Call(rows, index, rows.new_ones(index.shape), rows.shape[:1])


def _are_tensors(values: list[Any], count: int) -> bool:
    return len(values) == count and all(isinstance(value, torch.Tensor) for value in values)


def _says(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)
