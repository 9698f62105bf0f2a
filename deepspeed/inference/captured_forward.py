"""A module's forward as CUDA graphs (`enable_cuda_graph` of `init_inference`): one for each kind of call.

The first call of a kind runs eagerly; then the forward is captured on copies of its tensors. Later calls copy their
tensors into these copies and replay the graph. Calls are of one kind if their arguments have the same nesting, their
tensors the same shapes, strides and dtypes, and all other arguments the same types and values.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.log import describe_error, log_once, warn_once

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

    Calls run as they are on a CPU, in training mode, with hooks, with arguments or results that are neither tensors of
    the module's device nor plain values (such as a cache of Transformers), for further kinds of calls after 12, and for
    good if a capture fails. Reasons are logged once.

    Args:
        module: the module. If its parameters or buffers move in memory, its graphs are captured again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._graphs: dict[Hashable, CapturedCall | None] = {}  # None: this kind of call is not captured
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None
        self._off = False

    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's forward of these arguments."""
        module = self._module
        leaves, structure = pytree.tree_flatten((inputs, kwargs))
        device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        if self._off or module.training or device.type == "cpu":
            return module(*inputs, **kwargs)
        if any(each._forward_hooks or each._forward_pre_hooks for each in module.modules()):
            self._say("it has hooks, which a graph would leave out")
            return module(*inputs, **kwargs)
        if not all(_suits(leaf, device) for leaf in leaves):
            self._say("an argument is neither a tensor of its device nor a plain value")
            return module(*inputs, **kwargs)
        addresses = tuple(tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()))
        if addresses != self._addresses:
            self.drop()
            self._addresses = addresses
        kind = (str(structure), *map(_kind, leaves))
        if kind not in self._graphs:
            return self._first(kind, leaves, inputs, kwargs)
        captured = self._graphs[kind]
        if captured is None:
            return module(*inputs, **kwargs)
        for target, source in zip(captured.inputs, _tensors(leaves), strict=True):
            target.copy_(source)
        get_accelerator().replay_graph(captured.graph)
        outputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in captured.outputs]
        return pytree.tree_unflatten(outputs, captured.structure)

    def drop(self) -> None:
        """Free all graphs."""
        self._graphs, self._pool = {}, None

    def _say(self, why: str) -> None:
        log_once(f"enable_cuda_graph: a forward of {type(self._module).__name__} is called as it is: {why}")

    @torch.no_grad()
    def _first(self, kind: Hashable, leaves: list[Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a new kind on a stream of its own, then capture it; return its result."""
        accelerator = get_accelerator()
        if len(self._graphs) >= MOST_KINDS:
            self._say(f"{MOST_KINDS} kinds of calls are captured already, which differ in shapes or values")
            return self._module(*inputs, **kwargs)
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
        except Exception as error:  # of the driver, or the module looks at values: it can still be called
            self.drop()
            self._off = True
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
