"""Recorder of a step: operators, copies and waits, with their streams and memory.

A CPU has one stream, for which `StepRecorder` is sufficient. `benchmarks/device_recorder.py`, a recorder for the
emulated device, also records device calls (streams, events, messages).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from math import prod
from typing import Any

import torch

from deepspeed.foundation.pytree import tensors_in
from deepspeed.ops.dispatch import DispatchMode
from deepspeed.ops.fake_tensors import dispatches, is_fake
from deepspeed.ops.flop_formulas import formulas
from deepspeed.simulator.trace import COPY, HOST, KERNEL, MARK, NOTHING, ORDER, WAIT, HostEvent, MemoryEvent, Recording

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_FREE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted")
_VIEWS = ("_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach", "record_stream", "set_", "resize_")
_COPIES = ("copy_", "_to_copy", "_copy_from")
_OVERWRITES = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_")
# Operators that touch only a part of their inputs: that part, read and written.
_PARTS: dict[str, Any] = {
    "embedding": lambda _args, out: [out],  # the looked-up rows
    "index_select": lambda _args, out: [out],
    "nll_loss_forward": lambda args, _out: [args[1]],
    "all_gather_copy_in": lambda args, _out: args[0],  # FSDP2 operator: copies shards into the full buffer
}
_SMALL = 1 << 16  # bytes of host arithmetic that is included in the host's time per launch


class StepRecorder(DispatchMode):
    """Context that records a step; inside of `Valueless`, it records without computing values.

    Args:
        recording: the recording to fill.
        device: type of the device on which operators count as kernels, such as "cuda".

    Attributes:
        on: whether entries are recorded; memory is always tracked.
    """

    def __init__(self, recording: Recording, device: str = "cpu") -> None:
        super().__init__()
        self.recording, self.on = recording, True
        self._device, self._formulas, self._mark = device, formulas(), ""
        self._last: dict[int, int] = {}  # last entry by stream
        self._alive: dict[int, tuple[Any, int, int]] = {}  # by storage: finalizer, number, bytes
        self._next = 0

    # -- what is launched --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if dispatches(types):
            return NotImplemented if not is_fake(types) else func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if func.namespace == "c10d":
            return self.message(name, func, args, kwargs)
        out = func(*args, **kwargs)
        inputs, outputs = [*tensors_in((args, kwargs))], [*tensors_in(out)]
        if is_fake(map(type, outputs)):  # DTensor computes shapes of whole tensors with these; not recorded
            return out
        for tensor in inputs:
            self._see(tensor)
        for tensor in outputs:  # views and aliases of the inputs are already known
            self._see(tensor, is_output=True)
        tensors = inputs + outputs
        if name == "record_stream":
            self._used(args[0], args[1].stream_id)
        elif name == "_local_scalar_dense":
            if self.here(args[0]):
                self.wait(self.behind())
        elif name not in _FREE and name not in _VIEWS and not self._is_view(func):
            self._operator(func, name, args, kwargs, out, tensors)
        return out

    def here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the recorded device."""
        return tensor.device.type == self._device

    def _operator(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, tensors: list[torch.Tensor]) -> None:
        on_device = [self.here(tensor) for tensor in tensors if tensor.dim() or tensor.numel() > 1]
        nbytes = _traffic(tensors)
        if self._device != "cpu" and any(on_device) and not all(on_device) and name in _COPIES:
            self._copy(name, args, kwargs, out)
            return
        if not any(self.here(tensor) for tensor in tensors):
            if nbytes > _SMALL and any(tensor.device.type == "cpu" for tensor in tensors):
                self.add(HostEvent(HOST, name, nbytes=nbytes))
            return
        nbytes += self._read_as_well(func, name, args, kwargs)
        if name in _PARTS:
            nbytes = 2.0 * sum(tensor.numel() * tensor.itemsize for tensor in _PARTS[name](args, out))
        formula = self._formulas.get(func._overloadpacket)
        flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))
        if flops and "flash_attention" in name and self._is_causal(func, args, kwargs):
            flops /= 2  # formulas count the masked half, which kernels skip
        dtype = next((DTYPES[t.dtype] for t in tensors if t.dtype in DTYPES), "")
        self.add(HostEvent(KERNEL, name, self.current(), flops, nbytes, dtype))

    def _copy(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if name == "copy_":
            into, source = args[0], args[1]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            into, source, waits = out, args[0], not kwargs.get("non_blocking", False)
        to_host = not self.here(into)
        self.add(
            HostEvent(
                COPY, "to_host" if to_host else "to_device", self.current(), nbytes=source.numel() * source.itemsize
            )
        )
        if waits:
            self.wait(len(self.recording.entries) - 1)

    def add(self, entry: HostEvent) -> None:
        if not self.on:
            return
        entry.where = self._mark
        self.recording.entries.append(entry)
        if entry.kind in (KERNEL, COPY, ORDER):
            self._last[entry.stream] = len(self.recording.entries) - 1

    def mark(self, name: str) -> None:
        """Record a mark; following entries have it as `where`."""
        self._mark = name
        self.add(HostEvent(MARK, name))

    # -- streams and events ------------------------------------------------------------------------------------------

    def current(self) -> int:
        """Return the number of this thread's current stream: 0; recorders of devices override this."""
        return 0

    def behind(self, stream: int | None = None) -> int:
        """Return the index of the last kernel, copy or order of a stream (None: the current one), or NOTHING."""
        return self._last.get(self.current() if stream is None else stream, NOTHING)

    def order(self, after: int, stream: int | None = None) -> None:
        """Record that a stream (None: the current one) waits for the entry with index `after`, unless NOTHING."""
        if after != NOTHING:
            self.add(HostEvent(ORDER, "order", self.current() if stream is None else stream, after=after))

    def wait(self, after: int) -> None:
        """Record that the host waits for the entry with index `after`, unless NOTHING."""
        if after != NOTHING:
            self.add(HostEvent(WAIT, "wait", after=after))

    def wait_all(self) -> None:
        """Record that the host waits for all streams."""
        for stream in list(self._last):
            self.wait(self._last[stream])

    # -- memory ------------------------------------------------------------------------------------------------------

    def _see(self, tensor: torch.Tensor, is_output: bool = False) -> None:
        if not self.here(tensor) or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is None:
            self._next += 1
            number = self._next
            gone = functools.partial(_gone, weakref.ref(self), storage._cdata, number)
            reference = weakref.ref(storage, gone)
        else:
            reference, number, before = known
            if before == storage.nbytes():
                return
        self._alive[storage._cdata] = (reference, number, storage.nbytes())
        self._block(number, storage.nbytes(), new=is_output and known is None)

    def _block(self, number: int, nbytes: int, stream: int = 0, used: bool = False, new: bool = False) -> None:
        entry_count = len(self.recording.entries)
        self.recording.blocks.append(
            MemoryEvent(entry_count, number, nbytes, stream if used else self.current(), used, new)
        )

    def _used(self, tensor: torch.Tensor, stream: int) -> None:
        known = self._alive.get(tensor.untyped_storage()._cdata)
        if known is not None:
            self._block(known[1], known[2], stream, True)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._alive.get(storage._cdata)
        if known is not None and known[2] != storage.nbytes():
            self._alive[storage._cdata] = (known[0], known[1], storage.nbytes())
            self._block(known[1], storage.nbytes())

    # -- the context -------------------------------------------------------------------------------------------------

    def watch(self, undo: contextlib.ExitStack) -> None:
        """Also record resizes of storages, which do not go through the dispatcher, until `undo` is closed."""
        plain, this = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, *size: Any) -> Any:
            resized = plain(storage, *size)
            this._resized(storage)
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        undo.callback(setattr, torch.UntypedStorage, "resize_", plain)

    def message(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a communication operator and return its result; recorders of devices override this to record it."""
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        self._undo = contextlib.ExitStack()
        self.watch(self._undo)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()
        self._alive.clear()  # later releases do not belong to the step

    @staticmethod
    def _read_as_well(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> float:
        """Return the bytes of tensors changed in place that are read before they are written."""
        if name in _OVERWRITES or "out" in kwargs:
            return 0.0
        schema = zip(func._schema.arguments, args, strict=False)
        return _traffic([t for a, value in schema if a.alias_info and a.alias_info.is_write for t in tensors_in(value)])

    @staticmethod
    def _is_causal(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        place = next((index for index, each in enumerate(func._schema.arguments) if each.name == "is_causal"), None)
        return place is not None and bool(args[place] if place < len(args) else kwargs.get("is_causal", False))

    @staticmethod
    @functools.cache
    def _is_view(func: Any) -> bool:
        return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _gone(recorder: weakref.ref[StepRecorder], key: int, number: int, _reference: Any) -> None:
    this = recorder()
    if this is not None and this._alive.pop(key, None) is not None:
        this._block(number, 0)


def _traffic(tensors: list[torch.Tensor]) -> float:
    """Return the bytes of tensors: equal views and broadcast dims count once, a view at most its storage's size."""
    bytes_by_view: dict[tuple[int, int, int], float] = {}
    for tensor in tensors:
        if tensor.layout != torch.strided:
            continue
        held = (
            prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.itemsize
        )
        storage = tensor.untyped_storage()
        bytes_by_view[storage._cdata, int(tensor.storage_offset()), tensor.numel()] = min(held, storage.nbytes())
    return float(sum(bytes_by_view.values()))
