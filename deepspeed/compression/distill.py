"""A teacher beside the model: losses on logits, hidden states and attention maps, added to the model's own `.loss`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.compression.pruning.layer_selection import block_lists
from deepspeed.config.sections.compression import Distillation
from deepspeed.errors import CompressionError, UsageError
from deepspeed.foundation.hf_forward import uncached

_IGNORED = -100


class Distiller:
    """Adds a teacher's losses to a student's output.

    Args:
        student: the module of the engine; its output has `.loss` and `.logits`.
        section: `compression_training.distillation`.
    """

    def __init__(self, student: nn.Module, section: Distillation) -> None:
        self.student, self.section = student, section
        self.teacher: Any = None
        self.close: Callable[[], None] | None = None  # ends what was made for the teacher
        self._named = ""  # the teacher's list of blocks
        self._hooks = [
            student.register_forward_pre_hook(self._ask, with_kwargs=True),
            student.register_forward_hook(self._add, with_kwargs=True),
        ]

    def set_teacher(self, teacher: Any, close: Callable[[], None] | None = None) -> None:
        """Take a module or an engine as the teacher; it is asked in evaluation mode, without gradients.

        Args:
            teacher: called with the student's arguments without labels.
            close: ends what was made for it.
        """
        if not callable(teacher):
            raise CompressionError(f"a teacher is a module or an engine, not a {type(teacher).__name__}")
        self.teacher, self.close = teacher, close or self.close

    def _ask(self, module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Have the student give what is compared."""
        if not module.training:
            return None
        wanted = dict(kwargs)
        if self.section.hidden:
            wanted["output_hidden_states"] = True
        if self.section.attention:
            self._check_attention(module)
            wanted["output_attentions"] = True
        return inputs, wanted

    def _check_attention(self, module: Any) -> None:
        kind = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
        if kind != "eager":
            raise CompressionError(
                f"distillation.attention compares attention maps, which {kind!r} attention does not give: load both "
                f"models with attn_implementation='eager'"
            )

    def _add(self, module: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return None
        own = getattr(output, "loss", None)
        if own is None:
            return None  # without labels there is no loss to add to
        with self._watched() as seen:
            told = self._told(inputs, kwargs)
        output.loss = self.loss(output, told, kwargs.get("labels"), own)
        if self.section.layerwise:
            output.loss = output.loss + self.section.layerwise * self._layerwise(seen)
        return output

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[_Call]]:
        """What goes into and comes out of every block of the teacher."""
        seen: list[_Call] = []
        named, blocks = "", []
        if self.section.layerwise and self.teacher is not None:
            named, blocks = _blocks(self.teacher)
        self._named = named
        hooks = [block.register_forward_hook(_noting(seen), with_kwargs=True) for block in blocks]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _layerwise(self, seen: list[_Call]) -> torch.Tensor:
        """Mean squared error of each layer on what the teacher's layer was given: no layer waits for another."""
        blocks = _namesakes(self.student, self._named)
        errors = []
        for block, at in zip(blocks, self._layers(len(blocks), len(seen)), strict=True):
            inputs, kwargs, wanted = seen[at]
            found = _first(block(*inputs, **kwargs))
            if found.shape != wanted.shape:
                raise CompressionError(
                    f"distillation.layerwise: a layer gives {tuple(found.shape)}, the teacher's {tuple(wanted.shape)}"
                )
            errors.append(functional.mse_loss(found.float(), wanted.float()))
        return torch.stack(errors).mean()

    def _told(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        if self.teacher is None:
            raise UsageError("distillation is enabled and there is no teacher: call engine.set_teacher(model) first")
        given = {key: value for key, value in kwargs.items() if key != "labels"}
        was = self.teacher.training
        self.teacher.eval()
        try:
            with torch.no_grad():
                return self.teacher(*inputs, **given)
        finally:
            if was:
                self.teacher.train()

    def loss(self, output: Any, told: Any, labels: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        """The whole loss.

        Args:
            output: the student's, with `.logits`.
            told: the teacher's.
            labels: tokens whose label is -100 are left out; None: all count.
            own: the student's own loss.
        """
        section = self.section
        total = section.hard * own
        if section.logits:
            total = total + section.logits * divergence(output.logits, told.logits, section.temperature, labels)
        if section.hidden:
            total = total + section.hidden * self._between(output.hidden_states, told.hidden_states, states=True)
        if section.attention:
            total = total + section.attention * self._between(output.attentions, told.attentions, states=False)
        return total

    def _between(self, mine: Any, theirs: Any, states: bool) -> torch.Tensor:
        """Mean squared error of paired layers; of hidden states what enters the first layer is compared too."""
        first = 1 if states else 0
        pairs = [(0, 0)] if states else []
        for layer, teacher_layer in enumerate(self._layers(len(mine) - first, len(theirs) - first)):
            pairs.append((layer + first, teacher_layer + first))
        errors = [functional.mse_loss(mine[a].float(), theirs[b].float()) for a, b in pairs]
        return torch.stack(errors).mean()

    def _layers(self, mine: int, theirs: int) -> list[int]:
        named = self.section.layers
        if mine == theirs and (named is None or len(named) != mine):
            return list(range(mine))  # layers have not left yet
        if named is None:
            return [(layer + 1) * theirs // mine - 1 for layer in range(mine)]
        if len(named) != mine or any(not 0 <= layer < theirs for layer in named):
            raise CompressionError(f"distillation.layers is {named}: {mine} layers learn from {theirs}")
        return named

    def remove(self) -> None:
        """Take the hooks off, and end what was made for the teacher."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.close is not None:
            self.close()
        self.teacher = None


_Call = tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]


def _noting(seen: list[_Call]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        # a layer that is asked again must not write into the teacher's cache
        seen.append((inputs, uncached(kwargs), _first(output)))

    return hook


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def _blocks(model: Any) -> tuple[str, list[nn.Module]]:
    """The longest list of repeated blocks of a module or an engine, and its name."""
    lists = block_lists(model.module if isinstance(getattr(model, "module", None), nn.Module) else model)
    if not lists:
        raise CompressionError(
            f"distillation.layerwise: {type(model).__name__} has no list of two or more equal blocks"
        )
    name, blocks = next(iter(lists.items()))
    return name, list(blocks)


def _namesakes(student: nn.Module, named: str) -> list[nn.Module]:
    """The student's blocks: of the list with the teacher's name, also where one is left; else of its longest."""
    for name, module in student.named_modules():
        if isinstance(module, nn.ModuleList) and f".{name}".endswith(f".{named}"):
            return list(module)
    return _blocks(student)[1]


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float, labels: torch.Tensor | None = None
) -> torch.Tensor:
    """Kullback-Leibler divergence of the teacher's distribution from the student's, times the temperature squared.

    Args:
        student: logits [..., classes].
        teacher: logits of the same shape.
        temperature: divides both.
        labels: [...]: where -100 stands, nothing counts.

    Returns:
        Mean over what counts.
    """
    if student.shape != teacher.shape:
        raise CompressionError(f"logits of student {tuple(student.shape)} and teacher {tuple(teacher.shape)} differ")
    mine = functional.log_softmax(student.float() / temperature, -1)
    theirs = functional.log_softmax(teacher.float() / temperature, -1)
    each = (theirs.exp() * (theirs - mine)).sum(-1) * temperature**2
    if labels is None or labels.shape != each.shape:
        return each.mean()
    counts = (labels != _IGNORED).to(each.dtype)
    return (each * counts).sum() / counts.sum().clamp(min=1)
