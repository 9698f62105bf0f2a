"""torch.compile of a model in training: all ways to ask for it, and what is compiled as one.

[Note: compiled parts] The forward of a module is compiled, not its call: hooks of the module, which all-gather, reshard
or communicate, run before and after the compiled graph, eagerly. At stages 0 to 2 one module is compiled as a whole,
also with tensor slices: their collectives are operators in the graph. At stage 3 each unit is compiled by itself, since
hooks run between units. The same holds for blocks with activation checkpointing, and for repeated blocks with a split
vocabulary or sequence, divided experts or pipeline stages: code around the blocks depends on values there.

A compiled graph takes parameters as inputs and reads them from their modules at each call, so it uses the memory that a
parameter has at that time: after an all-gather, an offload, a load or an assignment.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.apply import checkpointed_blocks
from deepspeed.comm.collectives.graph_operators import register_operators
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import NotAvailableError
from deepspeed.foundation.compiler import CompiledForward
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.replaced_forward import ReplacedForward, withdraw
from deepspeed.tensor_parallel.layers import share_labels
from deepspeed.zero.layout.units import STANDS_FOR, repeated_blocks

# Compiles a function; the number is that of the modules that are compiled at once.
Compiler = Callable[[Callable[..., Any], int], Callable[..., Any]]

_LIMIT = 8  # of torch: how often it compiles a function again before it runs eagerly
# Of the modules of models in training, so that `module.compile()` is done by their engine.
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Compiling]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Context in which modules that were compiled before `initialize` run as without: their forward is traced, or its
    layers change."""
    calls = {module: call for module in model.modules() if (call := module._compiled_call_impl) is not None}
    wrappers: list[Any] = [module for module in model.modules() if _inside(module) is not None]
    for module in calls:
        module._compiled_call_impl = None
    for wrapper in wrappers:
        wrapper.forward = _call_of(_inside(wrapper))
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call
        for wrapper in wrappers:
            wrapper._initialize()


def _inside(module: nn.Module) -> Any:
    """Return the module that `torch.compile` has wrapped in `module`; None if `module` is no such wrapper."""
    context = vars(module).get("dynamo_ctx")
    return module._modules.get("_orig_mod") if callable(getattr(context, "callback", None)) else None


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module, with the signature of its forward."""

    @functools.wraps(module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return call


class Compiling:
    """Compiled forwards of one engine's model; see [Note: compiled parts].

    Args:
        state: state of the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._installed: list[tuple[nn.Module, CompiledForward]] = []
        self._undo: list[Callable[[], None]] = []
        self._adopted: Any = None
        self.active = False  # whether compilation was asked for
        self._take_over()
        _send_to_engines()
        for module in state.module.modules():
            _engines[module] = weakref.ref(self)
        if state.ds_config.top.compile.deepcompile:
            log_rank0("compile.deepcompile: torch.compile of the model, as engine.compile() asks for it")
            self.ask()

    def ask(self, backend: Any = None, compile_kwargs: dict[str, Any] | None = None) -> None:
        """Compile the model; `backend` and `compile_kwargs` are arguments of torch.compile."""
        backend = get_accelerator().get_compile_backend() if backend is None else backend
        self.compile(self._state.module, _compiler((), {"backend": backend, **(compile_kwargs or {})}))

    def adopt(self, callback: Any) -> None:
        """Compile the model with the backend of the `torch.compile(engine)` in which the engine is called.

        Args:
            callback: what that has set to take over frames.
        """
        backend = callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        if callable(backend) and backend is not self._adopted:
            self._adopted = backend
            self.compile(
                self._state.module,
                _compiler((), {"backend": backend, "dynamic": getattr(backend, "dynamic", None)}),
            )

    def compile(self, module: nn.Module, compiler: Compiler) -> None:
        """Compile the forward of a module, or those of its parts; see [Note: compiled parts].

        Args:
            module: the model, or a module of it.
            compiler: compiles a function.
        """
        register_operators()
        parts, reason = self._parts(module)
        for part in parts:
            self._install(part, compiler, len(parts))
        self.active = True
        if reason:
            kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(type(part).__name__ for part in parts).items())
            log_rank0(f"torch.compile of {type(module).__name__}: {kinds or 'nothing'}, one by one, since {reason}")

    def _parts(self, module: nn.Module) -> tuple[list[nn.Module], str]:
        """Return the modules that are compiled in place of `module`, and the reason; only `module`, "": none."""
        state = self._state
        if state.components.lifecycle is not None:
            units = state.components.lifecycle.units
            inside = [part for part in module.modules() if part in units]
            if inside and inside != [module]:
                parts = [unit for unit in inside if _is_one_graph(unit, units)]
                return parts, "stage 3 all-gathers parameters between units" + (
                    "" if parts else "; its units are single layers of torch (leaf_module makes units of modules)"
                )
            return [module], ""
        blocks = checkpointed_blocks(module)
        if blocks and blocks != [module]:
            return blocks, "the rest of the model runs the activation checkpoints"
        split_vocabulary = state.ds_config.top.tensor_parallel.vocab_parallel_lm_head
        if split_vocabulary or state.components.ep_sizes or set(state.model_dims) - {"tp"}:
            blocks = [block for block in repeated_blocks(module) if STANDS_FOR not in vars(block)]
            if blocks:
                return blocks, "ranks communicate between or in them"
        return [module], ""

    def _install(self, part: nn.Module, compiler: Compiler, number: int) -> None:
        holder: Any = part
        name = "forward"
        while isinstance(getattr(holder, name), ReplacedForward):  # these run eagerly, around the compiled graph
            holder, name = getattr(holder, name), "inner"
        present = getattr(holder, name)
        if isinstance(present, CompiledForward):
            present = present.inner
        compiled = CompiledForward(present, lambda function: compiler(function, number))
        setattr(holder, name, compiled)
        if part is not self._state.module:
            share_labels(part)
        self._installed.append((part, compiled))

    def _take_over(self) -> None:
        """Do what modules compiled before `initialize` ask for, since their graphs would contain the engine's hooks.

        Raises:
            NotAvailableError: the settings of a compiled module cannot be read.
        """
        for module in list(self._state.module.modules()):
            call, inner = module._compiled_call_impl, _inside(module)
            if call is not None:
                module._compiled_call_impl = None
                self._undo.append(functools.partial(setattr, module, "_compiled_call_impl", call))
                self.compile(module, _compiler_of(call, module))
            if inner is not None:
                wrapper: Any = module
                wrapper.forward = inner.__call__
                self._undo.append(wrapper._initialize)
                self.compile(inner, _again(wrapper.dynamo_ctx))

    def close(self) -> None:
        """Give the modules their own forwards again, and what had compiled them before the engine."""
        for part, compiled in self._installed:
            withdraw(part, compiled)
            share_labels(part, shared=False)
        for undo in self._undo:
            undo()
        for module in self._state.module.modules():
            _engines.pop(module, None)
        self._installed, self._undo = [], []


def _is_one_graph(unit: nn.Module, units: dict[nn.Module, Any]) -> bool:
    """Return whether a unit is worth compiling: no other unit in it, and more than one layer of torch."""
    inside = list(unit.modules())[1:]
    several = bool(inside) or not type(unit).forward.__module__.startswith("torch.nn.modules.")
    return several and not any(module in units for module in inside)


def _compiler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiler:
    """Return `torch.compile` with these arguments."""

    def compile_(function: Callable[..., Any], number: int) -> Callable[..., Any]:
        # torch.compile takes entries out of the options.
        own = {name: dict(value) if isinstance(value, dict) else value for name, value in kwargs.items()}
        if number > 1 and "recompile_limit" in inspect.signature(torch.compile).parameters:
            # Blocks of a class share a function, which has a graph for each block that reads a number of its own.
            own.setdefault("recompile_limit", _LIMIT + number)
        return torch.compile(function, *args, **own)

    return compile_


def _again(context: Callable[..., Any]) -> Compiler:
    """Return the compiler of a context object of torch.compile."""
    return lambda function, number: context(function)


def _compiler_of(compiled: Any, module: nn.Module) -> Compiler:
    """Return what has compiled a function: the context object that `torch.compile` keeps in its wrapper."""
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    context = cells["self"].cell_contents if "self" in cells else None
    if not callable(getattr(context, "callback", None)):
        raise NotAvailableError(
            f"{type(module).__name__} was compiled before initialize, and this torch does not show how: compile it "
            f"afterwards, with engine.compile()"
        )
    return _again(context)  # type: ignore[arg-type]


@functools.cache
def _send_to_engines() -> None:
    """Patch `nn.Module.compile`: the engine of a module in training compiles it."""
    original = nn.Module.compile

    @functools.wraps(original)
    def compile_(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        engine = _engines.get(self)
        owner = engine() if engine is not None else None
        if owner is None:
            original(self, *args, **kwargs)
        else:
            owner.compile(self, _compiler(args, kwargs))

    nn.Module.compile = compile_  # type: ignore[method-assign]
