"""Constants that programs import; their values are those of the JSON and of launchers."""

from __future__ import annotations

ADAGRAD_OPTIMIZER = "adagrad"
ADAMW_OPTIMIZER = "adamw"
ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
]

CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
