"""Puts the emulated device into a CPU-only torch. Import it before torch: hooks are looked up while torch is loaded.

What a CUDA build of torch has in C++ under `torch.cuda` is set here, on top of the functions of the extension.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests.emulated import build

if "torch" in sys.modules and not getattr(sys.modules["torch"], "_emulated", False):
    raise ImportError("tests.emulated.device must be imported before torch")


def _load() -> ModuleType:
    library = build.built()
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401  the extension's types are torch's

    spec = importlib.util.spec_from_file_location(build.NAME, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native: Any = _load()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.cuda import graphs  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

torch._emulated = True  # type: ignore[attr-defined]
cuda: Any = torch.cuda
ranges: list[str] = []  # open ranges of the trace, and every range there was
all_ranges: list[str] = []


def _index(device: Any = None) -> int:
    if device is None or isinstance(device, int):
        return -1 if device is None else device
    found = torch.device(device).index
    return -1 if found is None else found


def _device(device: Any = None) -> torch.device:
    index = _index(device)
    return torch.device("cuda", native.current_device() if index < 0 else index)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **found: Any) -> Any:
        if found:
            return super().__new__(cls, **found)
        return super().__new__(cls, _device(device), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        # The watch over hangs only looks: what it sees is not known to the program's host.
        if threading.current_thread().name == "deepspeed-watch":
            return native.is_over(self.event_id)
        return super().query()

    def elapsed_time(self, end: Any) -> float:
        return (end._recorded - self._recorded) * 1e3

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)


class StreamContext:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = current_stream(), current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            here, there = self.before
            set_stream(there)
            set_stream(here)  # and its device the current one


def set_stream(stream: Any) -> None:
    torch.accelerator.set_stream(stream)


def _as_stream(found: Any) -> Stream:
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def current_stream(device: Any = None) -> Stream:
    return _as_stream(torch.accelerator.current_stream(_device(device)))


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_device(device).index, device_type=1)


class _Runtime:
    """`torch.cuda.cudart()`."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815
    refuses = False  # a system that locks no more pages

    @classmethod
    def cudaHostRegister(cls, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if cls.refuses:
            return 2
        native.host_register(address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        return 0 if native.host_unregister(address) else 1


def _check_error(status: int) -> None:
    if int(status):
        raise RuntimeError(f"CUDA error {int(status)} (emulated)")


def _push(message: str) -> int:
    ranges.append(message)
    all_ranges.append(message)
    return len(ranges)


def _exchange_device(index: int) -> int:
    before = native.current_device()
    native.set_device(index)
    return before


def _properties(device: Any = None) -> Any:
    return SimpleNamespace(
        name="emulated", major=9, minor=0, total_memory=native.limit(), multi_processor_count=1, uuid="emulated"
    )


def _memory() -> dict[str, Any]:
    def figure(read: Any) -> Any:
        return lambda device=None: read(_index(device))

    def reset(device: Any = None) -> None:
        native.reset_peak(_index(device))

    return {
        "empty_cache": native.empty_cache,
        "memory_allocated": figure(native.allocated),
        "max_memory_allocated": figure(native.peak),
        "memory_reserved": figure(native.reserved),
        "max_memory_reserved": figure(native.reserved_peak),
        "memory_cached": figure(native.reserved),
        "max_memory_cached": figure(native.reserved_peak),
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": reset,
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": native.allocated(_index(device)),
            "allocated_bytes.all.peak": native.peak(_index(device)),
            "reserved_bytes.all.current": native.reserved(_index(device)),
        },
        "mem_get_info": lambda device=None: (native.limit() - native.reserved(_index(device)), native.limit()),
    }


def _random() -> dict[str, Any]:
    def seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            native.generator(index).manual_seed(seed)

    return {
        "default_generators": tuple(native.generator(index) for index in range(native.device_count())),
        "get_rng_state": lambda device="cuda": native.generator(_index(device)).get_state(),
        "set_rng_state": lambda state, device="cuda": native.generator(_index(device)).set_state(state),
        "manual_seed": lambda seed: native.generator(-1).manual_seed(seed) and None,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: native.generator(-1).initial_seed(),
    }


def _names() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda callback, **_: callback(),
        "_is_in_bad_fork": lambda: False,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(_index(device)),
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "synchronize": lambda device=None: native.synchronize(_index(device)),
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "emulated",
        "get_device_properties": _properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "cudart": lambda: _Runtime,
        "check_error": _check_error,
        "ipc_collect": lambda: None,
        **_memory(),
        **_random(),
    }


def _resize_(self: Any, size: int, _plain: Any = torch.UntypedStorage.resize_) -> Any:
    if self.device.type != "cuda":
        return _plain(self, size)
    over = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
    native.resize_storage(over, int(size))
    return self


class _IsNCCL(type):
    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, native.EmulatedNCCL)


class ProcessGroupNCCL(metaclass=_IsNCCL):
    Options = native.EmulatedNCCL.Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        # NCCL's own limit is left out: the package's watch, which names the ranks' places, comes first.
        limit = options._timeout * 4
        inner = dist.ProcessGroupGloo(dist.PrefixStore("emulated", store), rank, size, timeout=limit)
        return native.EmulatedNCCL(inner, rank, size, options)


def _install_graphs() -> None:
    """Let torch's own Python of graphs stand on the emulated device's."""
    inside: Any = torch._C
    inside._CUDAGraph, inside._graph_pool_handle = native.Graph, native.new_pool
    inside._cuda_isCurrentStreamCapturing, inside._host_emptyCache = native.is_capturing, lambda: None
    with mock.patch.object(inside, "_CudaStreamBase", object, create=True):  # else it takes empty classes instead
        importlib.reload(graphs)
    for name in ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing", "make_graphed_callables"):
        setattr(cuda, name, getattr(graphs, name))


def launch_kernel(what: str, tensors: list[Any], written: list[bool], run: Callable[[list[Any]], None]) -> None:
    """Launch `run` over CPU tensors of the same bytes, as one kernel on the current stream; a graph takes it up.

    Args:
        what: its name in reports.
        tensors: tensors of the device.
        written: which of them it writes.
        run: called with the CPU tensors, in each replay again.
    """
    native.launch_kernel(what, tensors, written, run)


def _install() -> None:
    for name, value in _names().items():
        setattr(cuda, name, value)
    _install_graphs()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _push, lambda: ranges.pop() and len(ranges)
    inside: Any = torch._C
    inside._cuda_getCurrentRawStream = lambda device: 0
    inside._cuda_getDevice, inside._cuda_getDeviceCount = native.current_device, native.device_count
    inside._cuda_exchangeDevice = inside._cuda_maybeExchangeDevice = _exchange_device
    storage: Any = torch.UntypedStorage
    storage.resize_ = _resize_
    for module in (distributed_c10d, dist):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    distributed_c10d._NCCL_AVAILABLE = True


def watch_host() -> None:
    """From now on, host code that touches page-locked memory in use is reported; after `faulthandler.enable`."""
    from deepspeed.storage import tensor_file
    from deepspeed.storage.tensor_file import BlockQueue  # noqa: F401  the room is there

    native.watch_host()
    plain = tensor_file.block_queue

    def watched(*args: Any) -> Any:
        queue = plain(*args)
        submit = queue.submit

        def checked(file: Any, tensor: torch.Tensor, offset: int, writing: bool) -> Any:
            # A system call gets an error where an instruction would fault; a write of the disk reads the tensor.
            native.host_use(tensor, not writing, "disk write" if writing else "disk read")
            return submit(file, tensor, offset, writing)

        queue.submit = checked
        return queue

    tensor_file.block_queue = watched  # type: ignore[assignment]


_install()
