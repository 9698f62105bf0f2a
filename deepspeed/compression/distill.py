"""Distillation: losses between a student's and a teacher's logits, hidden states and attention maps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.config.sections.compression import Distillation
from deepspeed.errors import CompressionError, UsageError
from deepspeed.foundation.hf_forward import named_arguments, uncached
from deepspeed.foundation.log import warn_once
from deepspeed.foundation.transformers_model import block_lists

_IGNORED = -100


class Distiller:
    """Hooks on a student that add distillation losses to the `.loss` of its output, in training mode only.

    Args:
        student: module of the engine; its output has `.loss` and `.logits`. Without `.loss`, nothing is added; this is
            logged once.
        section: `compression_training.distillation`.
    """

    def __init__(self, student: nn.Module, section: Distillation) -> None:
        self.student, self.section = student, section
        self.teacher: Any = None
        self._remaining: list[int] | None = None  # see `layers_left`
        self._before: int | None = None
        self.close: Callable[[], None] | None = None  # closes the teacher
        self._list_name = ""  # name of the list of the teacher's blocks
        kinds = (getattr(module, "loss_type", None) for module in student.modules())
        self._shifts = "ForCausalLM" in kinds  # causal models: logits of a position belong to the label of the next one
        self._hooks = [
            student.register_forward_pre_hook(self._request_outputs, with_kwargs=True),
            student.register_forward_hook(self._add_loss, with_kwargs=True),
        ]

    def set_teacher(self, teacher: Any, close: Callable[[], None] | None = None) -> None:
        """Set the teacher, which runs in evaluation mode without gradients.

        Args:
            teacher: a module or an engine.
            close: called by `remove`; None: an earlier value stays.

        Raises:
            CompressionError: the teacher is not callable.
        """
        if not callable(teacher):
            raise CompressionError(f"a teacher is a module or an engine, not a {type(teacher).__name__}")
        self.teacher, self.close = teacher, close or self.close

    def layers_left(self, remaining: list[int], before: int | None) -> None:
        """Pair hidden states by a removal of layers.

        Args:
            remaining: indices of the student's layers before the removal.
            before: number of layers before it; None: unknown, as many as the teacher has.
        """
        self._remaining, self._before = remaining, before

    def _request_outputs(self, module: Any, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook that requests the outputs to compare; CompressionError for attention that is not eager."""
        if not module.training:
            return None
        kwargs = dict(kwargs)
        if self.section.hidden:
            kwargs["output_hidden_states"] = True
        if self.section.attention:
            kind = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
            if kind != "eager":
                raise CompressionError(
                    f"distillation.attention compares attention maps, which {kind!r} attention does not give: load "
                    f"both models with attn_implementation='eager'"
                )
            kwargs["output_attentions"] = True
        return inputs, kwargs

    def _add_loss(self, module: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return None
        own = getattr(output, "loss", None)
        if own is None:
            warn_once(
                "distillation adds to the .loss of the model's output, and this forward of training returned none: "
                "nothing is distilled. Pass labels to the model, and leave return_dict=False out",
                (id(self), "no loss"),
            )
            return None
        with self._recorded_blocks() as calls:
            teacher_output = self._teacher_output(inputs, kwargs)
        output.loss = self.loss(output, teacher_output, named_arguments(module, inputs, kwargs).get("labels"), own)
        if self.section.layerwise:
            output.loss = output.loss + self.section.layerwise * self._layerwise(calls)
        return output

    @contextlib.contextmanager
    def _recorded_blocks(self) -> Iterator[list[_Call]]:
        """Context that records inputs and output of every block of the teacher, for `layerwise`."""
        calls: list[_Call] = []

        def record(module: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
            # a repeated run must not write into the teacher's cache
            calls.append((inputs, uncached(kwargs), _first(output)))

        blocks: list[nn.Module] = []
        if self.section.layerwise and self.teacher is not None:
            self._list_name, blocks = self._longest_list(self.teacher)
        hooks = [block.register_forward_hook(record, with_kwargs=True) for block in blocks]
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()

    def _layerwise(self, calls: list[_Call]) -> torch.Tensor:
        """Compute the mean squared error of student layers on teacher inputs; CompressionError if shapes differ."""
        lists = (
            list(module)  # found by the teacher's name, even with one remaining block
            for name, module in self.student.named_modules()
            if isinstance(module, nn.ModuleList) and f".{name}".endswith(f".{self._list_name}")
        )
        blocks = next(lists, None)
        if blocks is None:
            blocks = self._longest_list(self.student)[1]
        errors = []
        for block, teacher_layer in zip(blocks, self._layers(len(blocks), len(calls)), strict=True):
            inputs, kwargs, target = calls[teacher_layer]
            output = _first(block(*inputs, **kwargs))
            if output.shape != target.shape:
                raise CompressionError(
                    f"distillation.layerwise: a layer gives {tuple(output.shape)}, the teacher's {tuple(target.shape)}"
                )
            errors.append(functional.mse_loss(output.float(), target.float()))
        return torch.stack(errors).mean()

    @staticmethod
    def _longest_list(model: Any) -> tuple[str, list[nn.Module]]:
        """Return name and blocks of the longest list of repeated blocks in a model; CompressionError if none."""
        lists = block_lists(model.module if isinstance(getattr(model, "module", None), nn.Module) else model)
        if not lists:
            raise CompressionError(
                f"distillation.layerwise: {type(model).__name__} has no list of two or more equal blocks"
            )
        name, blocks = next(iter(lists.items()))
        return name, list(blocks)

    def _teacher_output(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        if self.teacher is None:
            raise UsageError("distillation is enabled and there is no teacher: call engine.set_teacher(model) first")
        # a decoder behind an encoder has its inputs from the labels
        from_labels = getattr(getattr(self.student, "config", None), "is_encoder_decoder", False)
        without_labels = {key: value for key, value in kwargs.items() if key != "labels" or from_labels}
        was_training = self.teacher.training
        self.teacher.eval()
        try:
            with torch.no_grad():
                return self.teacher(*inputs, **without_labels)
        finally:
            if was_training:
                self.teacher.train()

    def loss(self, output: Any, teacher_output: Any, labels: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the student's loss and its distances from the teacher, without `layerwise`.

        Args:
            output: student's output, with `.logits`, and `.hidden_states` and `.attentions` if they are compared.
            teacher_output: teacher's output, with the same attributes.
            labels: int64 labels; positions with -100 do not count for logits. None: all positions count.
            own: the student's own loss.

        Raises:
            CompressionError: shapes or numbers of layers of student and teacher do not fit.
        """
        section = self.section
        total = section.hard * own
        if section.logits:
            if self._shifts and labels is not None:
                labels = functional.pad(labels[..., 1:], (0, 1), value=_IGNORED)
            distance = divergence(output.logits, teacher_output.logits, section.temperature, labels)
            total = total + section.logits * distance
        if section.hidden:
            states = [_of(each, "hidden_states") for each in (output, teacher_output)]
            total = total + section.hidden * self._hidden(*states)
        if section.attention:
            maps = [_of(each, "attentions") for each in (output, teacher_output)]
            total = total + section.attention * self._attention(*maps)
        return total

    def _hidden(self, student: Any, teacher: Any) -> torch.Tensor:
        """Compute the mean distance of paired layers' outputs and of the first layers' inputs."""
        layers = self._layers_of_outputs(len(student) - 1, len(teacher) - 1)
        pairs = [(0, 0), *((layer + 1, teacher_layer + 1) for layer, teacher_layer in enumerate(layers))]
        if student[0].shape != teacher[0].shape:
            shapes = f"{tuple(student[0].shape)} and {tuple(teacher[0].shape)}"
            raise CompressionError(f"distillation.hidden: hidden states of student and teacher differ: {shapes}")
        distance = cosine_distance if self.section.hidden_distance == "cosine" else functional.mse_loss
        return torch.stack([distance(student[a].float(), teacher[b].float()) for a, b in pairs]).mean()

    def _attention(self, student: Any, teacher: Any) -> torch.Tensor:
        """Compute the mean squared error of paired layers' attention maps."""
        layers = self._layers(len(student), len(teacher))
        errors = [
            functional.mse_loss(student[layer].float(), teacher[other].float()) for layer, other in enumerate(layers)
        ]
        return torch.stack(errors).mean()

    def _layers_of_outputs(self, count: int, teacher_count: int) -> list[int]:
        """Return teacher layers by student layer for outputs.

        After a removal of layers from a model as deep as the teacher, a layer is paired with the last teacher layer
        before the student's next one, since it replaces all of them. Other pairs are those of `_layers`.
        """
        layers, ascending = self._remaining, self._remaining == sorted(self._remaining or ())
        if self.section.layers is not None or layers is None or len(layers) != count or not ascending:
            return self._layers(count, teacher_count)
        if layers[-1] >= teacher_count or self._before not in (None, teacher_count):
            return self._layers(count, teacher_count)
        return [layer - 1 for layer in layers[1:]] + [teacher_count - 1]

    def _layers(self, count: int, teacher_count: int) -> list[int]:
        """Return teacher layers by student layer: `distillation.layers` or evenly spaced; CompressionError if wrong."""
        named = self.section.layers
        if count == teacher_count and (named is None or len(named) != count):
            return list(range(count))  # layers are not removed yet
        if named is None:
            return [(layer + 1) * teacher_count // count - 1 for layer in range(count)]
        if len(named) != count or any(not 0 <= layer < teacher_count for layer in named):
            raise CompressionError(f"distillation.layers is {named}: {count} layers learn from {teacher_count}")
        return named

    def remove(self) -> None:
        """Remove the hooks from the student, and close the teacher."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.close is not None:
            self.close()
        self.teacher = None


_Call = tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def _of(output: Any, name: str) -> Any:
    """Return `hidden_states` or `attentions` of a model's output, those of the decoder if it has two parts.

    Raises:
        CompressionError: the output has neither.
    """
    for attribute in (name, f"decoder_{name}"):
        if getattr(output, attribute, None) is not None:
            return getattr(output, attribute)
    raise CompressionError(f"distillation compares {name}, which a {type(output).__name__} does not have")


def cosine_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the mean over positions of one minus the cosine (Sanh et al. 2019, section 3).

    A few channels of hidden states can be far larger than the others, and a squared error then consists of these. The
    cosine does not depend on a state's length, nor does the norm that follows the state in most models.

    Args:
        student: fp32 [..., features].
        teacher: the same.
    """
    # eps bounds the gradient at a vector of zeros
    return (1 - functional.cosine_similarity(student, teacher, dim=-1, eps=1e-4)).mean()


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float, labels: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the mean over positions of KL(teacher ‖ student) · temperature² (Hinton et al., arXiv:1503.02531).

    Args:
        student: logits [..., classes].
        teacher: logits of the same shape.
        temperature: divisor of both logits.
        labels: [...]; positions with -100 are excluded from the mean. None, or another shape: all positions count.

    Raises:
        CompressionError: the shapes differ.
    """
    if student.shape != teacher.shape:
        raise CompressionError(f"logits of student {tuple(student.shape)} and teacher {tuple(teacher.shape)} differ")
    log_probs = functional.log_softmax(student.float() / temperature, -1)
    targets = functional.log_softmax(teacher.float() / temperature, -1)
    divergences = (targets.exp() * (targets - log_probs)).sum(-1) * temperature**2
    if labels is None or labels.shape != divergences.shape:
        return divergences.mean()
    counts = (labels != _IGNORED).to(divergences.dtype)
    return (divergences * counts).sum() / counts.sum().clamp(min=1)
