"""Contract tests of an accelerator: each method of the protocol is called, and its effect is checked.

    @pytest.mark.parametrize("check", accelerator_checks(), ids=str)
    def test_the_contract(check):
        check(MyAccelerator())

A failed check raises `ContractError` with the expected behaviour. Checks restore device, stream and seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.errors import ArgumentError, ContractError, NotAvailableError

_BYTES = 64 * 1024**2  # bytes of a tensor large enough for the memory statistics


@dataclass(frozen=True)
class AcceleratorCheck:
    """Check of several related methods of an accelerator.

    Args:
        names: names of all methods that the check calls.
        run: called with the accelerator; raises `ContractError` if the check fails.
    """

    names: tuple[str, ...]
    run: Callable[[Any], None]

    def __str__(self) -> str:
        return self.run.__name__.removeprefix("_")

    def __call__(self, accelerator: Any) -> None:
        """Run the check on an object with the methods of `Accelerator`.

        Raises:
            ContractError: a method is missing, or does not behave as the protocol specifies.
        """
        missing = [name for name in self.names if not callable(getattr(accelerator, name, None))]
        expect(not missing, f"methods {', '.join(missing)}")
        self.run(accelerator)


def expect(holds: object, what: str) -> None:
    """Raise ContractError unless `holds` is true.

    Args:
        holds: the condition.
        what: the requirement, as words that follow "an accelerator must have".

    Raises:
        ContractError: the condition is false.
    """
    if not holds:
        raise ContractError(f"an accelerator must have {what}; see docs/accelerators.md")


_CHECKS: list[AcceleratorCheck] = []


def _shows(*names: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def note(run: Callable[[Any], None]) -> Callable[[Any], None]:
        _CHECKS.append(AcceleratorCheck(names, run))
        return run

    return note


def accelerator_checks() -> list[AcceleratorCheck]:
    """Return all checks; together they call every method of the protocol."""
    return list(_CHECKS)


def _here(accelerator: Any) -> torch.device:
    return torch.device(accelerator.current_device_name())


# -- which device ----------------------------------------------------------------------------------------------------


@_shows(
    "is_available",
    "device_count",
    "device_name",
    "device",
    "current_device",
    "current_device_name",
    "set_device",
    "on_accelerator",
)
def _devices(accelerator: Any) -> None:
    kind, count = accelerator.device_name(), accelerator.device_count()
    expect(accelerator.is_available() and count >= 1, "a device where it is run")
    before = accelerator.current_device()
    try:
        for index in range(min(count, 2)):
            accelerator.set_device(index)
            expect(accelerator.current_device() == index, "current_device() follow set_device()")
            expect(accelerator.current_device_name() == accelerator.device_name(index), "names with the index")
            tensor = torch.ones(1, device=_here(accelerator))
            expect(tensor.device.type == kind and accelerator.on_accelerator(tensor), "tensors where its name says")
            expect((tensor.device.index or 0) == index, "tensors on the current device")
    finally:
        accelerator.set_device(before)
    expect(accelerator.device().type == kind, "device() of its kind")
    if kind != "cpu":
        expect(accelerator.device(0) == torch.device(kind, 0), "device(0), the first")
        expect(not accelerator.on_accelerator(torch.ones(1)), "on_accelerator() refuse host tensors")


@_shows("visible_devices_envs", "set_visible_devices_envs", "export_envs")
def _environment(accelerator: Any) -> None:
    child: dict[str, str] = {}
    accelerator.set_visible_devices_envs(child, [1, 3])
    names = accelerator.visible_devices_envs()
    expect(names and child == {name: "1,3" for name in names}, "the child's devices in each of visible_devices_envs()")
    expect(all(isinstance(name, str) for name in accelerator.export_envs()), "export_envs(), names of variables")


@_shows("communication_backend_name")
def _backend(accelerator: Any) -> None:
    from deepspeed.comm.process_groups.init import choose_backend

    name = accelerator.communication_backend_name()
    try:
        choose_backend(name)
    except NotAvailableError as error:
        raise ContractError(f"communication_backend_name() is {name!r}: {error}") from error


# -- numbers that repeat ---------------------------------------------------------------------------------------------


@_shows(
    "manual_seed",
    "manual_seed_all",
    "initial_seed",
    "get_rng_state",
    "set_rng_state",
    "default_generator",
    "random",
)
def _random(accelerator: Any) -> None:
    def draw() -> list[float]:
        return torch.rand(4, device=_here(accelerator)).tolist()

    state = accelerator.get_rng_state()
    try:
        accelerator.manual_seed(5)
        first = draw()
        expect(accelerator.initial_seed() == 5, "initial_seed(), the seed it was given")
        middle = accelerator.get_rng_state()
        second = draw()
        expect(first != second, "numbers that go on")
        accelerator.set_rng_state(middle)
        expect(draw() == second, "set_rng_state() repeat what came after get_rng_state()")
        accelerator.manual_seed_all(5)
        expect(draw() == first, "manual_seed_all() repeat what manual_seed() gave")
        generator = accelerator.default_generator(accelerator.current_device())
        expect(generator.initial_seed() == 5, "default_generator(), the one that is seeded")
    finally:
        accelerator.set_rng_state(state)
    expect(hasattr(accelerator.random(), "fork_rng"), "random(), torch's module of generators")


# -- streams ---------------------------------------------------------------------------------------------------------


@_shows("Stream", "stream", "current_stream", "default_stream", "Event", "synchronize")
def _streams(accelerator: Any) -> None:
    here = _here(accelerator)
    before, side = accelerator.current_stream(), accelerator.Stream()
    source = torch.arange(1000.0, device=here)
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        if not accelerator.is_synchronized_device():
            expect(accelerator.current_stream() == side, "stream() make its stream the current one")
        doubled = source * 2
        done = accelerator.Event()
        done.record()
    expect(accelerator.current_stream() == before, "stream() put the former stream back")
    done.wait()
    expect(doubled.sum().item() == 999000, "work on a stream come after what it waits for")
    done.synchronize()
    expect(done.query(), "an event be over once the host has waited for it")
    accelerator.synchronize()
    default = accelerator.default_stream()
    expect(type(default) is type(before), "default_stream(), of the kind of current_stream()")


@_shows("is_synchronized_device", "use_host_timers", "resolves_data_dependency", "handles_memory_backpressure")
def _timing(accelerator: Any) -> None:
    facts = ("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure", "use_host_timers")
    for name in facts:
        expect(isinstance(getattr(accelerator, name)(), bool), f"{name}() answer with a bool")
    if accelerator.is_synchronized_device():
        expect(accelerator.use_host_timers(), "the host's timers, where the host waits for everything")
    if not accelerator.use_host_timers():
        start, end = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
        start.record()
        torch.ones(1000, device=_here(accelerator)).mul_(2)
        end.record()
        accelerator.synchronize()
        expect(start.elapsed_time(end) >= 0, "events that measure")


@_shows("create_graph", "capture_to_graph", "replay_graph")
def _graphs(accelerator: Any) -> None:
    x, y = (torch.full((4,), value, device=_here(accelerator)) for value in (2.0, 0.0))
    graph = accelerator.create_graph()
    with accelerator.capture_to_graph(graph):
        y.add_(x * 3)
    if graph is None:
        expect(y.tolist() == [6.0] * 4, "what is captured run at once, where there are no graphs")
        accelerator.replay_graph(graph)
        return
    expect(y.tolist() == [0.0] * 4, "what is captured not run")
    for _ in range(2):
        accelerator.replay_graph(graph)
    accelerator.synchronize()
    expect(y.tolist() == [12.0] * 4, "replay_graph() run what was captured, each time")


@_shows("range_push", "range_pop", "lazy_call")
def _callbacks(accelerator: Any) -> None:
    accelerator.range_push("outer")
    accelerator.range_push("inner")
    accelerator.range_pop()
    accelerator.range_pop()
    called: list[int] = []
    torch.ones(1, device=_here(accelerator))  # initializes the device
    accelerator.lazy_call(lambda: called.append(1))
    expect(called == [1], "lazy_call() call once, at once where the device is in use")


# -- memory ----------------------------------------------------------------------------------------------------------


@_shows(
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "memory_stats",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "total_memory",
    "available_memory",
    "empty_cache",
)
def _memory(accelerator: Any) -> None:
    for reset in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"):
        getattr(accelerator, reset)()
    accelerator.empty_cache()  # freed memory is reused without a new allocation
    before, total = accelerator.memory_allocated(), accelerator.total_memory()
    held = torch.full((_BYTES,), 1, dtype=torch.uint8, device=_here(accelerator))
    full = accelerator.memory_allocated()
    expect(full - before > 0.9 * _BYTES, "memory_allocated() count what tensors hold")
    expect(accelerator.memory_reserved() >= 0.9 * _BYTES, "memory_reserved() count what tensors hold")
    expect(accelerator.memory_cached() >= 0.9 * _BYTES, "memory_cached(), the old name of memory_reserved()")
    stats = accelerator.memory_stats()
    expect(stats["allocated_bytes.all.current"] >= 0.9 * _BYTES, "memory_stats() under torch's names")
    expect(0 < accelerator.available_memory() < total, "available_memory() below total_memory()")
    del held
    accelerator.synchronize()
    accelerator.empty_cache()
    expect(accelerator.memory_allocated() < before + 0.5 * _BYTES, "memory_allocated() forget what was freed")
    for peak in ("max_memory_allocated", "max_memory_reserved", "max_memory_cached"):
        expect(getattr(accelerator, peak)() >= 0.9 * _BYTES, f"{peak}() remember what was freed")


@_shows("pin_memory", "is_pinned", "lock_pages")
def _locked_memory(accelerator: Any) -> None:
    source = torch.arange(1000.0)
    pinned = accelerator.pin_memory(source)
    expect(torch.equal(pinned, source), "pin_memory() keep the values")
    moved = pinned.to(_here(accelerator), non_blocking=True)
    accelerator.synchronize()
    expect(moved.sum().item() == 499500, "copies from locked memory arrive")
    locks = accelerator.device_name() != "cpu"
    expect(accelerator.is_pinned(pinned) == locks, "is_pinned() tell what pin_memory() gave")
    expect(not accelerator.is_pinned(source), "is_pinned() be false of plain memory")
    memory = torch.frombuffer(bytearray(1 << 16), dtype=torch.uint8)
    undo = accelerator.lock_pages(memory)
    expect(accelerator.is_pinned(memory) == locks, "lock_pages() lock where there is something to lock for")
    if undo is not None:
        undo()
    expect(not accelerator.is_pinned(memory), "lock_pages() return what unlocks")


# -- arithmetic ------------------------------------------------------------------------------------------------------


@_shows(
    "is_bf16_supported",
    "is_fp16_supported",
    "is_bf16_fast",
    "is_fp16_fast",
    "supported_dtypes",
    "is_triton_supported",
)
def _dtypes(accelerator: Any) -> None:
    dtypes = accelerator.supported_dtypes()
    expect(torch.float32 in dtypes, "float32")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        supported = bool(getattr(accelerator, f"is_{name}_supported")())
        expect(supported == (dtype in dtypes), f"is_{name}_supported() agree with supported_dtypes()")
        expect(supported or not getattr(accelerator, f"is_{name}_fast")(), f"{name} supported where it is fast")
    for dtype in dtypes:
        ones = torch.ones(8, 8, dtype=dtype, device=_here(accelerator))
        expect((ones @ ones).float().sum().item() == 512, f"products in {dtype}")
    expect(isinstance(accelerator.is_triton_supported(), bool), "is_triton_supported() answer with a bool")


@_shows(
    "BFloat16Tensor",
    "ByteTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
)
def _tensor_types(accelerator: Any) -> None:
    # Written out instead of imported: a table cannot be tested against itself.
    types = {
        "BFloat16Tensor": torch.bfloat16,
        "ByteTensor": torch.uint8,
        "DoubleTensor": torch.float64,
        "FloatTensor": torch.float32,
        "HalfTensor": torch.float16,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
    }
    for name, dtype in types.items():
        tensor = getattr(accelerator, name)([1, 2])
        expect(tensor.dtype == dtype and accelerator.on_accelerator(tensor), f"{name}(), of {dtype} on the device")
        expect(tensor.tolist() == [1, 2], f"{name}() with the values it is given")


@_shows(
    "create_op_builder", "get_op_builder", "op_builder_dir", "build_extension", "get_compile_backend",
    "set_compile_backend",
)  # fmt: skip
def _compilers(accelerator: Any) -> None:
    expect(isinstance(accelerator.op_builder_dir(), str), "op_builder_dir(), a package")
    for name in ("create_op_builder", "get_op_builder"):
        with contextlib.suppress(NotAvailableError):
            expect(getattr(accelerator, name)("NoSuchBuilder") is None, f"{name}() refuse what it does not know")
    expect(hasattr(accelerator.build_extension(), "with_options"), "build_extension(), torch's command")
    with _backend_kept(accelerator):
        accelerator.set_compile_backend("eager")
        expect(accelerator.get_compile_backend() == "eager", "get_compile_backend(), what was set")
        try:
            accelerator.set_compile_backend("no such backend")
        except (ArgumentError, ValueError):
            return
        expect(False, "set_compile_backend() refuse what torch does not know")


@contextlib.contextmanager
def _backend_kept(accelerator: Any) -> Iterator[None]:
    before = accelerator.get_compile_backend()
    try:
        yield
    finally:
        accelerator.set_compile_backend(before)
