"""Old address of attention, loaders and tiles of cut sequences."""

from __future__ import annotations

from deepspeed.sequence.batches import UlyssesSPDataLoaderAdapter
from deepspeed.sequence.parallel_state import UlyssesSPAttentionHF
from deepspeed.sequence.tiled import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]
