"""What a model's config says of lengths and tokens."""

from __future__ import annotations

from typing import Any

from torch import nn

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_target_positions",
    "n_ctx",
)
CHANGING = ("dynamic", "longrope")  # rotations that depend on the length of the sequence, which a pass has many of


def text_config(model: nn.Module) -> Any:
    """The config of the part that reads and writes text."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def length_limit(model: nn.Module) -> int | None:
    """Tokens of prompt and answer that the model's positions bear; None where the config states none."""
    config = text_config(model)
    for name in LENGTHS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            return value
    return None


def packed_limit(model: nn.Module) -> int | None:
    """Longer sequences change how the model rotates all positions of a pass, so they cannot share one; None where
    length changes nothing."""
    config = text_config(model)
    ropes = getattr(config, "rope_parameters", None) or {}
    parts = [ropes, *(part for part in ropes.values() if isinstance(part, dict))] if isinstance(ropes, dict) else []
    limits = []
    for part in parts:
        if part.get("rope_type") in CHANGING:
            limits.append(part.get("original_max_position_embeddings") or length_limit(model) or 0)
    return min(limits) if limits else None


def vocabulary(model: nn.Module) -> int | None:
    """Number of tokens that the model's embedding has, None if that cannot be told."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    return getattr(table, "num_embeddings", None) or getattr(text_config(model), "vocab_size", None)
