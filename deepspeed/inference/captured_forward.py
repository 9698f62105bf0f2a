"""A module's forward as CUDA graphs (`enable_cuda_graph` of `init_inference`): one for each kind of call.

The first call of a kind runs eagerly; then the forward is captured on copies of its tensors. Later calls copy their
tensors into these copies and replay the graph. Calls are of one kind if their arguments have the same nesting, their
tensors the same shapes, strides and dtypes, and all other arguments the same types and values, and if the module's
parts have the same `training` flags and its LoRA layers the same switches (such as disabled or merged adapters).

All other Python state of the module is frozen: a graph replays the branches that its capture took, whatever attributes
the module's code would read now. A module whose own attributes decide what it computes needs a new engine after a
change of theirs, or no `enable_cuda_graph`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.log import describe_error, log_once, warn_once
from deepspeed.inference.trained_lora import TrainedLora

MOST_KINDS = 12
PLAIN = (type(None), bool, int, float, str, torch.dtype)


@dataclass(frozen=True)
class CapturedCall:
    """A captured call: its graph, the tensors that it reads, and the leaves and structure of its result."""

    graph: Any
    inputs: list[torch.Tensor]
    outputs: list[Any]
    structure: Any


class CapturedForward:
    """Caller of a module's forward, which replays graphs where it can. Results are new tensors, without gradients.

    Calls run as they are on a CPU, in training mode, under autocast, with hooks, with arguments or results that are
    neither tensors of the module's device nor plain values (such as a cache of Transformers), for further kinds of
    calls after 12, and for good if a capture fails. Reasons are logged once.

    Threads take turns at the graphs. On the device, a call comes after the one before, also on another stream, since
    both use the graphs' memory. The order of a call's arguments and results is that of the caller's current stream.

    Args:
        module: the module. If its parameters or buffers move in memory, its graphs are captured again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._graphs: dict[Hashable, CapturedCall | None] = {}  # None: this kind of call is not captured
        self._addresses: tuple[int, ...] = ()
        self._adapters = TrainedLora(module)
        self._pool: Any = None
        self._off = False
        self._lock = threading.RLock()  # the module's forward may call this again
        self._last: Any = None  # event after the last use of the graphs' memory

    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's forward of these arguments."""
        leaves, structure = pytree.tree_flatten((inputs, kwargs))
        if self._can_capture(leaves):
            with self._lock:
                self._drop_if_moved()
                kind = (str(structure), *map(_kind, leaves), *self._python_state())
                captured = self._graphs.get(kind)
                if captured is not None:
                    return self._replay(captured, leaves)
                if kind not in self._graphs and self._has_room():
                    return self._first(kind, leaves, inputs, kwargs)
        return self._module(*inputs, **kwargs)

    def drop(self) -> None:
        """Free all graphs, after the device has done the last one."""
        with self._lock:
            if self._last is not None:  # it may be on another stream than the memory's own
                self._last.synchronize()
            self._graphs, self._pool, self._last = {}, None, None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have graphs of their own."""
        return CapturedForward, (self._module,)

    def _say(self, why: str) -> None:
        log_once(f"enable_cuda_graph: a forward of {type(self._module).__name__} is called as it is: {why}")

    def _can_capture(self, leaves: list[Any]) -> bool:
        """Return whether a call with these arguments may be a graph. If not, the reason is logged."""
        module = self._module
        device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        if self._off or module.training or device.type == "cpu":
            return False
        why = ""
        if torch.is_autocast_enabled(device.type):
            why = "autocast is on, whose casts a graph would leave out or keep"
        elif any(each._forward_hooks or each._forward_pre_hooks for each in module.modules()):
            why = "it has hooks, which a graph would leave out"
        elif not all(_suits(leaf, device) for leaf in leaves):
            why = "an argument is neither a tensor of its device nor a plain value"
        if why:
            self._say(why)
        return not why

    def _drop_if_moved(self) -> None:
        """Drop the graphs if parameters or buffers are others than before, or elsewhere in memory."""
        addresses = tuple(tensor.data_ptr() for tensor in (*self._module.parameters(), *self._module.buffers()))
        if addresses != self._addresses:
            self.drop()
            self._addresses, self._adapters = addresses, TrainedLora(self._module)  # layers may be new, too

    def _python_state(self) -> list[Hashable]:
        """Return what a forward reads beside tensors and arguments: training flags, switches of adapters, the mode."""
        training = tuple(each.training for each in self._module.modules())
        # A graph's tensors of inference mode cannot be written to outside of it.
        return [torch.is_inference_mode_enabled(), training, *self._adapters.switches()]

    def _has_room(self) -> bool:
        if len(self._graphs) < MOST_KINDS:
            return True
        self._say(f"{MOST_KINDS} kinds of calls are captured already, which differ in shapes or values")
        return False

    @torch.no_grad()
    def _replay(self, captured: CapturedCall, leaves: list[Any]) -> Any:
        self._wait()
        for target, source in zip(captured.inputs, _tensors(leaves), strict=True):
            target.copy_(source)
        get_accelerator().replay_graph(captured.graph)
        outputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in captured.outputs]
        self._record()
        return pytree.tree_unflatten(outputs, captured.structure)

    def _wait(self) -> None:
        """Let the caller's stream wait for the last use of the graphs' memory, which may be on another stream."""
        if self._last is not None:
            get_accelerator().current_stream().wait_event(self._last)

    def _record(self) -> None:
        accelerator = get_accelerator()
        self._last = self._last if self._last is not None else accelerator.Event()
        self._last.record(accelerator.current_stream())

    @torch.no_grad()
    def _first(self, kind: Hashable, leaves: list[Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a new kind on a stream of its own, then capture it; return its result."""
        accelerator = get_accelerator()
        self._wait()
        current, stream = accelerator.current_stream(), accelerator.Stream()
        stream.wait_stream(current)
        with accelerator.stream(stream):
            result = self._module(*inputs, **kwargs)
        current.wait_stream(stream)
        outputs, structure = pytree.tree_flatten(result)
        for tensor in _tensors(outputs):
            tensor.record_stream(current)
        self._graphs[kind] = None
        if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in outputs):
            self._say("its result holds other objects than tensors, such as a cache; use_cache=False leaves it out")
            return result
        try:
            self._graphs[kind] = self._captured(leaves, (inputs, kwargs), structure, stream)
            self._record()
        except Exception as error:  # of the driver, or the module looks at values: it can still be called
            self._off = True
            self.drop()
            warn_once(
                f"enable_cuda_graph has no effect: the forward of {type(self._module).__name__} cannot be captured: "
                f"{describe_error(error)}"
            )
        return result

    def _captured(self, leaves: list[Any], arguments: Any, structure: Any, stream: Any) -> CapturedCall:
        """Return the graph of a call that has run once."""
        accelerator = get_accelerator()
        own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(own, pytree.tree_structure(arguments))
        graph = accelerator.create_graph()
        with accelerator.capture_to_graph(graph, pool=self._pool, stream=stream, error_mode="thread_local"):
            result = self._module(*args, **kwargs)
        self._pool = graph.pool()
        return CapturedCall(graph, _tensors(own), pytree.tree_leaves(result), structure)


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _suits(leaf: Any, device: torch.device) -> bool:
    return leaf.device == device if isinstance(leaf, torch.Tensor) else isinstance(leaf, PLAIN)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride()
    return type(leaf), leaf
