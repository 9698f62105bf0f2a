"""The accelerator: how it is chosen, the names clients call, and what the CPU answers."""

from __future__ import annotations

import psutil
import pytest
import torch

from deepspeed.accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    real_accelerator,
    set_accelerator,
)
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.accelerator.cuda import CudaAccelerator
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.ops.op_builder import CPUAdamBuilder
from tests.harness.fresh import run_fresh

METHODS = """
device_name device set_device current_device current_device_name device_count synchronize random set_rng_state
get_rng_state manual_seed manual_seed_all initial_seed default_generator Stream stream current_stream default_stream
Event empty_cache memory_allocated max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached
reset_max_memory_cached memory_stats reset_peak_memory_stats memory_reserved max_memory_reserved total_memory
available_memory is_bf16_supported is_fp16_supported is_bf16_fast is_fp16_fast supported_dtypes is_available range_push
range_pop lazy_call communication_backend_name is_triton_supported create_graph capture_to_graph replay_graph
BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor pin_memory is_pinned on_accelerator
create_op_builder get_op_builder build_extension export_envs visible_devices_envs set_visible_devices_envs
get_compile_backend set_compile_backend is_synchronized_device use_host_timers resolves_data_dependency
handles_memory_backpressure
""".split()


@pytest.fixture
def fresh(monkeypatch):
    """As in a new process, where no accelerator was chosen."""
    monkeypatch.setattr(real_accelerator, "_chosen", {})
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return monkeypatch


@pytest.mark.parametrize("kind", [CpuAccelerator, CudaAccelerator])
def test_every_method_is_there(kind):
    accelerator = kind()
    assert [name for name in METHODS if not callable(getattr(accelerator, name, None))] == []
    assert set(METHODS) <= set(dir(accelerator))
    with pytest.raises(AttributeError, match=f"the {accelerator.name} accelerator has no 'warp_drive'"):
        accelerator.warp_drive()


def test_the_machine_decides_and_the_choice_stays(fresh):
    assert get_accelerator().device_name() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert get_accelerator() is get_accelerator()
    assert is_current_accelerator_supported()


def test_the_variable_decides(fresh):
    fresh.setenv("DS_ACCELERATOR", "CPU")
    assert isinstance(get_accelerator(), CpuAccelerator)


def test_an_accelerator_that_this_package_does_not_have(fresh):
    fresh.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(NotAvailableError, match=r"'xpu'.*\['cuda', 'cpu'\]"):
        get_accelerator()


def test_an_accelerator_that_the_machine_does_not_have(fresh):
    fresh.setenv("DS_ACCELERATOR", "cuda")
    fresh.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotAvailableError, match="no such device"):
        get_accelerator()


def test_a_client_may_set_its_own(fresh):
    class Own:
        def device_name(self):
            return "abacus"

    own = Own()
    set_accelerator(own)
    assert get_accelerator() is own
    assert not is_current_accelerator_supported()


def test_the_cpu():
    cpu = CpuAccelerator()
    assert (cpu.device_name(), cpu.device_name(1), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert (cpu.device(3), cpu.current_device(), cpu.device_count()) == (torch.device("cpu"), 0, 1)
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.is_bf16_supported() and cpu.is_fp16_supported() and not cpu.is_fp16_fast()
    assert torch.float16 in cpu.supported_dtypes()
    assert cpu.is_synchronized_device() and cpu.use_host_timers()
    assert cpu.FloatTensor([1, 2]).dtype == torch.float32 and cpu.on_accelerator(cpu.HalfTensor([1]))
    assert cpu.pin_memory(cpu.LongTensor([1])).tolist() == [1]
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device"):
        assert getattr(cpu, name)(*([0] if name == "set_device" else [])) is None
    with cpu.stream(cpu.Stream()), cpu.capture_to_graph(cpu.create_graph()):
        pass


def test_a_program_reads_the_name_to_tell_a_cpu_from_a_device():
    assert (CpuAccelerator()._name, CudaAccelerator()._name) == ("cpu", "cuda")


def test_facts_cannot_be_spoiled_by_a_caller():
    CpuAccelerator().supported_dtypes().clear()
    assert CpuAccelerator().supported_dtypes()


def test_memory_of_the_process_and_the_machine():
    cpu = CpuAccelerator()
    assert cpu.memory_allocated() == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert cpu.max_memory_allocated() >= cpu.memory_allocated() * 0.9
    assert 0 < cpu.available_memory() < cpu.total_memory()


def test_the_generator_can_be_put_back():
    cpu = CpuAccelerator()
    cpu.manual_seed(7)
    state = cpu.get_rng_state()
    drawn = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn) and cpu.initial_seed() == 7


def test_the_devices_of_a_child():
    env = {}
    CudaAccelerator().set_visible_devices_envs(env, [2, 3])
    assert env == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_the_compile_backend():
    cpu = CpuAccelerator()
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ArgumentError, match="'fortran' is unknown"):
        cpu.set_compile_backend("fortran")


def test_builders_are_had_by_name():
    cpu = CpuAccelerator()
    assert cpu.op_builder_dir() == "deepspeed.ops.op_builder"
    assert cpu.get_op_builder("CPUAdamBuilder") is CPUAdamBuilder
    assert hasattr(cpu.create_op_builder("CPUAdamBuilder").load(), "DeepSpeedCPUAdam")
    assert cpu.create_op_builder("NoSuchBuilder") is None


def test_choosing_creates_no_cuda_context():
    imports = "import torch; from deepspeed.accelerator import get_accelerator"
    assert run_fresh([f"{imports}; get_accelerator(); print(torch.cuda.is_initialized())"]) == ["False\n"]
