"""Names that old scripts and suites import behave as the interface says; what is not there says so at import."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from pydantic import Field, ValidationError

import deepspeed
from deepspeed.errors import NotAvailableError
from deepspeed.ops import op_builder
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, dict_raise_error_on_duplicate_keys
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum, get_zero_config
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from deepspeed.utils.torch import required_torch_version


@pytest.mark.parametrize("name", op_builder.ALL_OPS)
def test_a_builder_gives_its_operator_or_says_what_there_is(name: str) -> None:
    builder = op_builder.ALL_OPS[name]
    assert getattr(op_builder, type(builder).__name__) is type(builder)
    assert (
        builder.NAME == name and builder.INSTEAD and deepspeed.ops.__compatible_ops__[name] is builder.is_compatible()
    )
    if builder.MODULE is None:
        assert not builder.is_compatible()
        with pytest.raises(NotAvailableError, match=f"'{name}' is not available yet"):
            builder.load()
        return
    module = builder.load()
    assert module.__name__ == builder.absolute_name() and module.__doc__


def test_what_builders_load_works() -> None:
    utils = op_builder.UtilsBuilder().load()
    parts = [torch.arange(3.0), torch.ones(2, 2)]
    flat = utils.flatten(parts)
    assert flat.tolist() == [0, 1, 2, 1, 1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(utils.unflatten(flat, parts), parts, strict=True))
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    op_builder.CPUAdamBuilder().load().DeepSpeedCPUAdam([param], lr=0.5).step()
    assert torch.allclose(param, torch.full((4,), 0.5))


def test_what_git_version_info_says() -> None:
    info = importlib.import_module("deepspeed.git_version_info")
    assert torch.__version__.startswith(info.torch_info["version"])
    assert info.compatible_ops == info.installed_ops == deepspeed.ops.__compatible_ops__
    assert info.accelerator_name == deepspeed.get_accelerator().device_name()


def test_torch_versions_compare_by_number() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert required_torch_version(min_version=f"{major}.{minor}") and required_torch_version(min_version=1.9)
    assert required_torch_version() and required_torch_version(max_version=f"{major}.{minor}")
    assert not required_torch_version(min_version=f"{major}.{minor + 1}")
    assert not required_torch_version(min_version=2.1, max_version="2.9") or (major, minor) <= (2, 9)


class Inner(DeepSpeedConfigModel):
    size: int = 1


class Mine(DeepSpeedConfigModel):
    number: int = 3
    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    inner: Inner = Field(default_factory=Inner)
    old: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "inner.size", "new_param_fn": abs})
    model_name: str = Field("", alias="name")


def test_the_base_of_typed_sections() -> None:
    made = Mine(number="auto", device="cpu", old=-7, name="x")
    assert (made.number, made.device, made.inner.size, made.model_name) == (3, "cpu", 7, "x")
    made.number = 4
    assert made.number == 4 and Mine(model_name="y").model_name == "y"
    for wrong in ({"nmber": 1}, {"number": "many"}, {"old": 1, "inner": {"size": 2}}):
        with pytest.raises(ValidationError):
            Mine(**wrong)
    with pytest.raises(ValidationError):
        made.number = "many"
    with pytest.raises(ValidationError):
        Mine(strict=True, number="auto")


def test_the_section_of_zero() -> None:
    made = DeepSpeedZeroConfig(
        stage=ZeroStageEnum.weights, stage3_prefetch_bucket_size=12.0, reduce_bucket_size="auto", cpu_offload=True
    )
    assert (made.stage, made.prefetch_bucket_size, made.reduce_bucket_size) == (3, 12, int(5e8))
    assert made.stage == ZeroStageEnum.weights and isinstance(made, DeepSpeedConfigModel)
    assert isinstance(made.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert made.offload_optimizer.device == OffloadDeviceEnum.cpu
    param = DeepSpeedZeroOffloadParamConfig(device=OffloadDeviceEnum.nvme, nvme_path="somewhere", pin_memory=False)
    assert DeepSpeedZeroConfig(stage=3, offload_param=param).offload_param == param
    pinned = DeepSpeedZeroConfig(cpu_offload_params=True, cpu_offload_use_pin_memory=False).offload_param
    assert (pinned.device, pinned.pin_memory) == ("cpu", False)
    assert get_zero_config({"zero_optimization": {"stage": 2}}).stage == 2 and get_zero_config({}).stage == 0
    for wrong in ({"stage": 4}, {"stage": "two"}, {"stge": 1}):
        with pytest.raises(ValueError):
            DeepSpeedZeroConfig(**wrong)
    assert DeepSpeedFP16Config(enabled=True).initial_scale_power == 16


def test_pairs_with_equal_names_are_refused() -> None:
    assert dict_raise_error_on_duplicate_keys([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="duplicate keys in one object: a"):
        dict_raise_error_on_duplicate_keys([("a", 1), ("a", 2)])


@pytest.mark.parametrize(
    "module",
    ["deepspeed.linear", "deepspeed.runtime.fp16.onebit", "deepspeed.compile"],
)
def test_modules_of_later_features_say_so_at_import(module: str) -> None:
    with pytest.raises(NotAvailableError, match="deepspeed.* is not available yet: it belongs to") as e:
        importlib.import_module(module)
    assert isinstance(e.value, ImportError) and not isinstance(e.value, ModuleNotFoundError)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed.no_such_module")
    assert importlib.util.find_spec("deepspeed.zero") is not None


def test_hostfiles_of_scripts(tmp_path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    path = tmp_path / "hostfile"
    path.write_text("one slots=4  # the first\n\ntwo slots=2\n")
    assert list(fetch_hostfile(str(path)).items()) == [("one", 4), ("two", 2)]
    assert fetch_hostfile(str(tmp_path / "absent")) is None
    path.write_text("one slots=4\none slots=2\n")
    with pytest.raises(ValueError, match="named twice"):
        fetch_hostfile(path)
