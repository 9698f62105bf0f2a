"""Encoding of gradients and weights in messages between ranks."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.base_model import Int, Section, key

Encoding = Literal["none", "bf16", "int8", "int4"]
EncodingOrMeasured = Literal["none", "bf16", "int8", "int4", "measured"]


class WireConfig(Section):
    """Block `wire`: how gradients and weights are encoded in messages; "wire": "auto" sets both to "measured"."""

    gradients: EncodingOrMeasured = key(
        "none", "gradients between hosts; measured: the most exact of none, bf16 and int8 that costs no time"
    )
    weights: EncodingOrMeasured = key(
        "none", "all-gathers of weights between hosts (stages 1 to 3); measured: as for gradients"
    )
    frozen_weights: Encoding | None = key(None, "all-gathers of frozen weights (stage 3); null: as weights")
    gradients_within_host: Encoding = key("none", "gradients between ranks of one host")
    weights_within_host: Encoding = key("none", "all-gathers of weights between ranks of one host")
    error_memory: bool | None = key(
        None, "add the error of a rank's earlier messages to its next one (LoCo); null: where gradients are int4"
    )
    error_beta: float = key(0.8, "weight of the carried error", ge=0, lt=1)
    error_reset: Int = key(1024, "optimizer steps after which the carried error is dropped", ge=1)
