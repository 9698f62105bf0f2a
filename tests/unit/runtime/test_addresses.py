"""Old addresses lead to the rooms of today, by import and by attribute, and can be patched where clients patch them."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest

import deepspeed
from deepspeed.errors import NotAvailableError
from deepspeed.zero.api import init_context

BY_ATTRIBUTE = """
import deepspeed
names = [
    deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES,
    deepspeed.runtime.engine.DeepSpeedEngine,
    deepspeed.runtime.zero.GatheredParameters,
    deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3,
    deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler,
    deepspeed.utils.groups.get_data_parallel_world_size,
    deepspeed.utils.logging.logger.setLevel,
    deepspeed.comm.is_initialized,
    deepspeed.zero.Init,
    deepspeed.ops.adam.DeepSpeedCPUAdam,
]
"""


def test_all_is_reached_as_attributes_of_a_plain_import() -> None:
    subprocess.run([sys.executable, "-c", BY_ATTRIBUTE], check=True)


def test_zero_is_a_package_and_an_attribute() -> None:
    import deepspeed.zero as package
    from deepspeed import zero

    assert package is zero is deepspeed.zero


def test_partition_parameters_is_the_module_that_uses_its_names() -> None:
    import deepspeed.runtime.zero.partition_parameters as by_import
    from deepspeed.runtime.zero import partition_parameters as by_name

    assert by_import is by_name is init_context
    with mock.patch("deepspeed.runtime.zero.partition_parameters.get_accelerator") as patched:
        assert init_context.get_accelerator is patched


@pytest.mark.parametrize("address", ["zero.Init", "init_distributed", "initialize"])
def test_a_lazy_name_can_be_patched_and_comes_back(address: str) -> None:
    owner = deepspeed.zero if address.startswith("zero.") else deepspeed
    name = address.rpartition(".")[2]
    before = getattr(owner, name)
    with mock.patch(f"deepspeed.{address}") as patched:
        assert getattr(owner, name) is patched
    assert getattr(owner, name) is before


@pytest.mark.parametrize("name", ["DeepSpeedHybridEngine", "moe"])
def test_a_name_of_a_later_feature_says_so(name: str) -> None:
    with pytest.raises(NotAvailableError, match=f"deepspeed.{name} is not available yet"):
        getattr(deepspeed, name)
    with pytest.raises(ImportError, match="not available yet"):
        exec(f"from deepspeed import {name}")
    assert name not in dir(deepspeed)


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    assert not hasattr(deepspeed, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name"):
        from deepspeed import no_such_name  # noqa: F401
