"""The length of a call of `generate`, checked before any work."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import LengthError


def prompt_length(args: tuple[Any, ...], kwargs: dict[str, Any], encoder_decoder: bool) -> int:
    """Positions that a call of `generate` fills before its first new token."""
    names = ("decoder_input_ids",) if encoder_decoder else ("input_ids", "inputs", "inputs_embeds")
    given = [kwargs.get(name) for name in names]
    if args and not encoder_decoder:
        given.append(args[0])
    shapes = [one.shape for one in given if isinstance(one, torch.Tensor) and one.dim() >= 2]
    return max((shape[1] for shape in shapes), default=1 if encoder_decoder else 0)


def new_tokens(prompt: int, kwargs: dict[str, Any], own: Any) -> int:
    """Tokens that a call of `generate` may write after a prompt of that length.

    Args:
        prompt: its length.
        kwargs: of the call.
        own: the model's generation_config, or None.
    """
    settings = [kwargs, _values(kwargs.get("generation_config")), _values(own)]
    for one in settings:
        if one.get("max_new_tokens") is not None:
            return int(one["max_new_tokens"])
        if one.get("max_length") is not None:
            return max(int(one["max_length"]) - prompt, 1 if one is settings[-1] else 0)
    return 1


def _values(config: Any) -> dict[str, Any]:
    """What a generation config was told to be; a default `max_length` of the class is not among it."""
    if config is None:
        return {}
    named = {key: getattr(config, key, None) for key in ("max_new_tokens", "max_length")}
    return {**named, "max_length": None} if named["max_length"] == 20 else named


def check_length(prompt: int, new: int, limit: int | None, model_limit: int | None) -> None:
    """Refuse what does not fit.

    Args:
        prompt: positions filled.
        new: tokens that may follow.
        limit: what `max_out_tokens` was set to; None: not set.
        model_limit: the model's own; None: it says none.

    Raises:
        LengthError: the text would be longer.
    """
    for most, whose, advice in (
        (limit, "max_out_tokens", "Please increase max_tokens in the DeepSpeed Inference Config."),
        (model_limit, "the model's own limit", "Shorten the prompt, or ask for fewer tokens."),
    ):
        if most is None or prompt + new <= most:
            continue
        if prompt > most:
            raise LengthError(f"Input with size {prompt} exceeds maximum length of {most} ({whose}). {advice}")
        raise LengthError(
            f"Input with size {prompt} and {new} new tokens, {prompt + new} together, exceed maximum length of {most} "
            f"({whose}). {advice}"
        )
