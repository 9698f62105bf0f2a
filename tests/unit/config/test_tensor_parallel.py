"""The batch where ranks share matrices: clients count all ranks, and ranks of one coordinate see one batch."""

from __future__ import annotations

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import BatchSizeError

BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def test_a_client_that_counts_all_ranks_means_the_data_parallel_ones() -> None:
    given = {"train_batch_size": 16, **BATCH, "tensor_parallel": {"autotp_size": 2}}
    assert DeepSpeedConfig(given, world=2).train_batch_size == 8
    assert DeepSpeedConfig({**given, "train_batch_size": 8}, world=2).train_batch_size == 8


def test_another_product_is_refused() -> None:
    for tp, train in ((1, 16), (2, 12), (4, 16)):
        given = {"train_batch_size": train, **BATCH, "tensor_parallel": {"autotp_size": tp}}
        with pytest.raises(BatchSizeError):
            DeepSpeedConfig(given, world=2)
