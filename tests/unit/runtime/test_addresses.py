"""Old addresses lead to the rooms of today, by import and by attribute, and can be patched where clients patch them."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from unittest import mock

import pytest

import deepspeed
from deepspeed.errors import NotAvailableError
from deepspeed.foundation.addresses import ADDRESSES, ALIASES, LATER, PLACEHOLDERS, names_of
from deepspeed.zero.api import init_context
from tests.harness.fresh import run_fresh

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


STAR = """
import io
from deepspeed import *
from deepspeed.runtime.zero.partition_parameters import *
assert (io.__name__, Init.__name__, GatheredParameters is zero.GatheredParameters) == ("io", "Init", True)
"""

BY_THREADS = """
import threading
import deepspeed
barrier, errors = threading.Barrier(4), []

def importing():
    barrier.wait()
    try:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
        from deepspeed.checkpointing import checkpoint
    except ImportError as error:
        errors.append(error)

threads = [threading.Thread(target=importing) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
"""

AS_A_PROGRAM = """
import contextlib, io, runpy, sys
sys.argv = ["-m", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    runpy.run_module("deepspeed.utils.zero_to_fp32", run_name="__main__", alter_sys=True)
assert shown.getvalue().startswith("usage: zero_to_fp32.py"), shown.getvalue()
"""


def test_names_are_reached_by_attribute_by_star_and_by_threads_at_the_same_time() -> None:
    """Each in a process that has not imported the package; a star import keeps a program's own `io`."""
    run_fresh([BY_ATTRIBUTE, STAR, BY_THREADS])


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


@pytest.mark.parametrize("name", ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"])
def test_a_name_of_a_later_feature_says_so(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}': it belongs to .*, which is not available yet"):
        getattr(deepspeed, name)  # `hasattr` is False, so that programs go on
    with pytest.raises(ImportError, match="not available yet"):
        exec(f"from deepspeed import {name}")
    assert name not in dir(deepspeed)


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    assert not hasattr(deepspeed, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name"):
        from deepspeed import no_such_name  # noqa: F401


def test_every_name_of_the_table_is_there() -> None:
    missing = []
    for module in (*ADDRESSES, *ALIASES, *PLACEHOLDERS):
        for name in (*names_of(module), *PLACEHOLDERS.get(module, ("", ""))[1].split()):
            try:
                getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                missing.append(f"{module}: {name}: {error}")
    assert not missing, "\n".join(missing)


def test_an_address_is_never_both_a_row_and_a_file() -> None:
    asking = {
        "",
        ".checkpoint",
        ".compression",
        ".inference",
        ".moe",
        ".ops.op_builder",
        ".zero",
    }  # the table, for other names
    rows = {*ADDRESSES, *ALIASES} - {f"deepspeed{package}" for package in asking}
    paths = [Path(deepspeed.__path__[0], *module.split(".")[1:]) for module in rows]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()]
    assert len(rows) > 40 and files == []


def test_a_folder_that_an_older_checkout_left_behind_hides_no_address(tmp_path: Path) -> None:
    shutil.copytree(Path(deepspeed.__path__[0]), tmp_path / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("utils", "runtime/zero", "checkpointing"):
        (tmp_path / "deepspeed" / folder / "__pycache__").mkdir(parents=True)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import deepspeed
import deepspeed.checkpointing as checkpointing
from deepspeed.runtime.zero import Init
from deepspeed.utils import logger
assert checkpointing.__name__ == "deepspeed.activation_checkpointing.checkpointing", checkpointing.__name__
assert deepspeed.__file__.startswith({str(tmp_path)!r}), deepspeed.__file__
"""
    run_fresh([program])


def test_what_later_features_name_is_not_there() -> None:
    for module in LATER:
        with pytest.raises(NotAvailableError, match=f"{module} is not available yet"):
            importlib.import_module(module)
        owner, _, name = module.rpartition(".")
        with pytest.raises(NotAvailableError, match=f"{module} is not available yet"):
            exec(f"from {owner} import {name}")  # the statement itself asks the finder
        assert not hasattr(importlib.import_module(owner), name)


def test_a_program_of_an_address_runs() -> None:
    run_fresh([AS_A_PROGRAM])


def test_a_placeholder_raises_when_it_is_used_and_not_before() -> None:
    from deepspeed.sequence.fpdt_layer import FPDT_Attention as placeholder

    assert not isinstance(object(), placeholder) and not hasattr(placeholder, "__wrapped__")

    class Subclass(placeholder):
        pass

    for use in (placeholder, lambda: placeholder.apply, Subclass):
        with pytest.raises(NotAvailableError, match="is not available yet: it belongs to chunks of a sequence"):
            use()
