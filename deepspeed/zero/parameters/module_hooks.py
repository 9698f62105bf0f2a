"""Module hooks that all-gather and reshard parameters in forward, backward and recomputation.

[Note: units] A unit is a module whose groups are gathered before its forward: a repeated block (`layout/units`), or,
outside of blocks, each module with parameters. After forward, the limits decide whether a group is resharded. In
backward, a group is gathered when the gradient of the unit's outputs arrives, and released when the gradients of the
unit's inputs (or of all its parameters) have arrived. Forward hooks that run within backward (activation checkpointing)
do not reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from deepspeed.comm.collectives import collectives
from deepspeed.errors import ShardedParameterError
from deepspeed.foundation.compiler import is_compiled, opaque
from deepspeed.foundation.module_tree import children_of, own_parameters
from deepspeed.foundation.pytree import tensors_in
from deepspeed.foundation.saved_tensors import in_backward, now
from deepspeed.zero.layout.units import owners_of, repeated_blocks
from deepspeed.zero.parameters import buffer_views
from deepspeed.zero.parameters.collective_order import GatherOrder
from deepspeed.zero.parameters.functorch import feed_transforms
from deepspeed.zero.parameters.local_shard import arrived
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.prefetch import ModuleOrder, PrefetchScheduler
from deepspeed.zero.parameters.shard_group import ShardGroup, State, group_of

_EXTERNALS = "ds_external_parameters"  # attribute of the root module that TRL reads


class Hook:
    """Module hook that is disabled in deep copies and pickles of the module, since these are not sharded.

    Args:
        call: function to call; not traced by torch.compile (but see `TracedHook`).
        transparent: whether the hook leaves the module's inputs and outputs as they are, so that code which computes
            the same without calling the module may leave the hook out.
    """

    def __init__(self, call: Callable[..., Any], transparent: bool = False) -> None:
        self.transparent = transparent
        self._call = call

    # torch.compile would trace the hooks of a compiled module; these run eagerly, between the compiled graphs.
    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(_nothing, transparent=True)

    def __reduce__(self) -> Any:
        return Hook, (_nothing, True)


class TracedHook(Hook):
    """Hook that torch.compile may trace, since it only computes its results from its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


@dataclass(eq=False)
class _Call:
    """Forward of a unit, recorded until its backward has finished."""

    unit: nn.Module
    inputs: int  # number of inputs whose gradients mark the end of the unit's backward; 0: its parameters do
    since: int  # number of the first autograd node of the forward
    groups: Sequence[ShardGroup] = ()  # groups that its backward has gathered
    using: bool = False  # whether the unit's backward is running
    begun: int = -1  # id of the last backward pass that has reached it
    open: set[int] = field(default_factory=set)  # groups with missing gradients, if `inputs` is 0
    arrived: dict[int, int] = field(default_factory=dict)  # number of input gradients so far, by backward pass


class ModuleHooks:
    """Hooks of a model that gather and reshard the groups of its units; see [Note: units].

    Args:
        module: root module.
        prefetcher: scheduler with the sharded groups.
        gather_order: check of the order of all-gathers over ranks; None: no check.
    """

    def __init__(
        self, module: nn.Module, prefetcher: PrefetchScheduler, gather_order: GatherOrder | None = None
    ) -> None:
        self.module, self.prefetcher, self.gather_order = module, prefetcher, gather_order
        self.units: dict[nn.Module, list[ShardGroup]] = {}
        self.depth = 0  # nesting depth of the root's forward
        self.running: list[nn.Module] = []  # units whose forward is running, outermost first
        # Of each of `running`: the groups that were gathered for it, to which a read in it may add others.
        self._entered: list[tuple[Sequence[ShardGroup], _Call | None]] = []
        self._open_ended: dict[int, list[_Call]] = defaultdict(list)
        self._alone: set[nn.Module] = set()  # units that ran in this pass outside of the root's forward
        self._turned = True  # the last pass is over: its backward has begun, or it has none
        self._with_grad = True
        # TRL removes these hooks for generation, clears the lists, and calls `_register_deepspeed_module` afterwards.
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self._managed = {id(g) for g in prefetcher.groups}
        self._find_units(set(repeated_blocks(module)))
        self.attach()
        for group in prefetcher.groups:
            group.attach(self, gather_order, prefetcher.note)

    def _find_units(self, blocks: set[nn.Module]) -> None:
        def visit(module: nn.Module, unit: nn.Module | None) -> None:
            unit = unit or (module if module in blocks else None)
            home = unit or module
            for param in own_parameters(module):
                if is_managed(param) and id(param._ds_member.group) in self._managed:  # type: ignore[union-attr]
                    groups = self.units.setdefault(home, [])
                    if param._ds_member.group not in groups:  # type: ignore[union-attr]
                        groups.append(param._ds_member.group)  # type: ignore[union-attr]
            for child in children_of(module):
                visit(child, unit)

        visit(self.module, None)

    def bound(self) -> str:
        """Return a sentence for the log: the maximum number of gathered elements, and the setting that limits it."""
        limits = self.prefetcher.limits
        names = {module: name or "the root module" for name, module in self.module.named_modules()}
        units = [
            (sum(g.numel for g in groups), names.get(unit) or getattr(unit, "name", "?"))
            for unit, groups in self.units.items()
        ]
        ahead = limits.prefetch > 0
        pairs = zip(units, units[1:] or units, strict=False)
        most, first, second = max((a + b, of, then) for (a, of), (b, then) in pairs)
        if limits.live >= sum(numel for numel, _ in units):
            text = f"everything may be, stage3_max_live_parameters is {limits.live:,}"
        elif limits.live >= most:
            text = f"{limits.live:,} elements (stage3_max_live_parameters)"
        else:
            text = f"{most:,} elements ({first} and {second}; stage3_max_live_parameters is {limits.live:,})"
        return f"gathered at once: {text}; {'at least one unit' if ahead else 'nothing'} is gathered ahead of its use"

    def attach(self) -> None:
        """Register all hooks, at first or after `detach`."""
        vars(self.module)[_EXTERNALS] = Hook(self._no_externals)
        for unit in self.units:
            self.attach_unit(unit)
        enter, leave = Hook(self._enter_root, transparent=True), Hook(self._leave_root, transparent=True)
        self.forward_hooks.append(self.module.register_forward_pre_hook(enter, prepend=True))
        self.forward_hooks.append(self.module.register_forward_hook(leave, always_call=True))

    @staticmethod
    def _no_externals() -> list[Any]:
        return []

    def attach_unit(self, unit: nn.Module) -> None:
        before, after = Hook(self._before, transparent=True), Hook(self._after, transparent=True)
        self.forward_hooks.append(unit.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self.forward_hooks.append(unit.register_forward_hook(after, with_kwargs=True, always_call=True))

    def detach(self) -> None:
        for handle in self.forward_hooks:
            handle.remove()
        self.forward_hooks.clear()
        vars(self.module).pop(_EXTERNALS, None)

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        self.detach()
        self.attach()

    @property
    def param_coordinator(self) -> ModuleOrder:
        """Return the recorded order of units, which programs reset after a pass of another kind."""
        return self.prefetcher.trace

    def add_external(self, module: nn.Module, group: ShardGroup) -> None:
        """Gather a group before each forward of a module that is not its unit."""
        if group in self.units.get(module, ()):
            return
        known = module in self.units
        self.units.setdefault(module, []).append(group)
        if not known:
            self.attach_unit(module)

    def remove_external(self, module: nn.Module, group: ShardGroup) -> None:
        if group in self.units.get(module, ()):
            self.units[module].remove(group)

    def used_outside(self, group: ShardGroup) -> None:
        """Gather a group with the running unit in later passes, since the unit reads it; no effect without a unit."""
        if self.running:
            self.add_external(self.running[-1], group)

    # -- forward --------------------------------------------------------------------------------------------------

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        if not in_backward() and self.depth == 0:
            self._begin_pass(module)
        self.depth += 1

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and not in_backward() and not torch.is_grad_enabled():
            self.prefetcher.free_idle()
            self._turned = True  # there is no backward, so the next forward is another pass

    def _begin_pass(self, first: nn.Module) -> None:
        """Begin a pass, which is expected to use the groups in the order of the last pass of the same kind."""
        kind = (first, torch.is_grad_enabled())
        self.prefetcher.trace.restart(kind)
        if self.gather_order is not None:
            self.gather_order.begin(kind)
        self._with_grad, self._turned = torch.is_grad_enabled(), False
        self._alone.clear()

    def _run_alone(self, unit: nn.Module) -> None:
        """Begin a pass if necessary, for a unit that is called without a forward of the root module.

        A pass begins with the first unit, the first one after a backward or update, a unit that runs for the second
        time, and the first unit after gradients were enabled or disabled.
        """
        if self._turned or self._with_grad != torch.is_grad_enabled() or unit in self._alone:
            if not torch.is_grad_enabled():
                self.prefetcher.free_idle()  # groups that were prefetched in the last pass and not used
            self._begin_pass(unit)
            self._alone.add(unit)
        elif self._alone:
            self._alone.add(unit)

    def _before(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        collectives.delay("before a unit")
        if self.depth == 0 and not self.running and not in_backward():
            self._run_alone(unit)
        try:
            groups = self._gather(unit)
        except ShardedParameterError:  # the user has written to a view of a sharded parameter: no forward
            for group in self.units[unit]:
                group.users -= 1
            raise
        self.running.append(unit)
        call = self._watch_inputs(unit, args, kwargs) if torch.is_grad_enabled() else None
        self._entered.append((groups, call))

    def _after(self, unit: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        collectives.delay("after a unit")
        if not self.running or self.running[-1] is not unit:  # `_before` has raised, or came before it was a unit
            return
        self.running.pop()
        groups, call = self._entered.pop()
        outputs = [t for t in tensors_in(output) if t.requires_grad] if call is not None else []
        if call is not None and outputs:
            hook = Hook(lambda _grad: self._output_gradient(call))
            for tensor in outputs:
                tensor.register_hook(hook)
        if outputs and call is not None and not in_backward():
            self._keep_places(unit, outputs, call.since)
        for group in groups:
            group.users -= 1
            if not in_backward():
                self.prefetcher.release(group)

    def _keep_places(self, unit: nn.Module, outputs: list[torch.Tensor], since: int) -> None:
        """Make autograd save positions instead of views of a unit's groups, so that their memory can be freed."""
        groups = [g for g in self.units[unit] if not g.keep_unsharded_storage and g.state is State.GATHERED]
        viewed = any(group.buffer_views.others() > len(group.members) for group in groups)
        # Parameters that the root has saved are needed at once by its backward, so their memory is not freed.
        if viewed or (unit is not self.module and any(group.buffer_views.may_be_saved() for group in groups)):
            buffer_views.keep_places(outputs, since, groups)

    def _gather(self, unit: nn.Module) -> Sequence[ShardGroup]:
        """All-gather the groups of a unit, and mark them as in use; return them, since the unit may get more."""
        groups = tuple(self.units[unit])
        for group in groups:
            group.users += 1
        self.prefetcher.gather(*groups)
        return groups

    # -- passes without modules -----------------------------------------------------------------------------------

    @contextmanager
    def pass_by_groups(self) -> Iterator[None]:
        """Context of a pass that reads parameters without the forward of modules, by `groups_in_use`."""
        self._enter_root(self.module, ())
        try:
            yield
        finally:
            self._leave_root(self.module, (), None)

    @contextmanager
    def groups_in_use(self, groups: Sequence[ShardGroup]) -> Iterator[None]:
        """Context in which groups are gathered; the following ones are prefetched as for units."""
        for group in groups:
            group.users += 1
        try:
            self.prefetcher.gather(*groups)
            yield
        finally:
            for group in groups:
                group.users -= 1
                self.prefetcher.release(group)

    # -- backward -------------------------------------------------------------------------------------------------

    def _watch_inputs(self, unit: nn.Module, args: Any, kwargs: Any) -> _Call:
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        # With autograd.grad, a leaf may get no gradient, so it cannot mark the end of the unit's backward.
        call = _Call(unit, 0 if any(t.is_leaf for t in inputs) else len(inputs), now())
        if call.inputs:
            # torch's hook for several tensors is not used, since it forms a reference cycle with their nodes: each
            # graph would stay in memory until a garbage collection.
            hook = Hook(lambda _grad: self._input_gradient(call))
            for tensor in inputs:
                tensor.register_hook(hook)
        return call

    def _output_gradient(self, call: _Call) -> None:
        """Begin the unit's backward when the first gradient of its outputs arrives in a backward pass."""
        task = torch._C._current_graph_task_id()
        if call.begun != task:
            call.begun = task
            self._before_backward(call)
        if torch.is_grad_enabled():  # `create_graph=True`
            buffer_views.keep_parameters(torch._C._current_autograd_node(), call.since)

    def _before_backward(self, call: _Call) -> None:
        collectives.delay("before a unit's backward")
        if call.using:
            return
        call.using = self._turned = True
        call.groups = self._gather(call.unit)
        if not call.inputs:
            for group in call.groups:
                call.open.add(id(group))
                self._open_ended[id(group)].append(call)
        if call.inputs > 1:  # some may get no gradient in this backward pass
            Variable._execution_engine.queue_callback(lambda: self._after_backward(call))

    def _input_gradient(self, call: _Call) -> None:
        task = torch._C._current_graph_task_id()
        call.arrived[task] = call.arrived.get(task, 0) + 1
        if call.arrived[task] == call.inputs:
            del call.arrived[task]
            self._after_backward(call)

    def _after_backward(self, call: _Call) -> None:
        collectives.delay("after a unit's backward")
        if not call.using:
            return
        call.using = False
        for group in call.groups:
            group.users = max(0, group.users - 1)
            self.prefetcher.release(group)

    def gradients_complete(self, group: ShardGroup) -> None:
        """End the backward of units that wait for the gradients of their parameters (`_Call.inputs` is 0).

        Args:
            group: group with complete gradients in this micro-batch.
        """
        for call in self._open_ended.pop(id(group), ()):
            call.open.discard(id(group))
            if call.using and not call.open:
                self._after_backward(call)

    def settle(self) -> None:
        """Reshard all groups before an update, and reset the state of the passes.

        Raises:
            ShardedParameterError: a view of a sharded parameter was written to, or cannot get the new values.
        """
        self._open_ended.clear()
        self._turned = True
        self.running.clear()
        self._entered.clear()
        self.depth = 0
        for group in self.prefetcher.groups:
            group.users = 0
        self.prefetcher.free_idle()
        for group in self.prefetcher.groups:
            group.buffer_views.check_no_unsaved_writes()
            group.buffer_views.check_no_stale_views()


class DeferredAllGatherHooks:
    """Hooks that let `step` return before the all-gather of updated parameters has finished (stages 1 and 2).

    Each unit waits for its groups before its forward; see [Note: arriving] in `local_shard`.

    Args:
        module: root module.
        groups: parameter groups; those without `overlaps_all_gather` are ignored.
    """

    def __init__(self, module: nn.Module, groups: list[ShardGroup]) -> None:
        self._module, self._groups = module, [group for group in groups if group.overlaps_all_gather]
        self._units: dict[nn.Module, list[ShardGroup]] = {}
        for param, unit in owners_of(module) if self._groups else ():  # all units with a tied weight wait for it
            if is_managed(param):
                known, group = self._units.setdefault(unit, []), group_of(param._ds_member)  # type: ignore[attr-defined]
                if group not in known and group.overlaps_all_gather:
                    known.append(group)
        self._hooks: list[Any] = []

    @property
    def allowed(self) -> bool:
        """Return whether `step` may leave all-gathers unfinished on this rank, and register the hooks if so.

        If a module is compiled, remove the hooks: torch.compile does not support changes of a parameter's class.
        """
        if self._groups and any(is_compiled(module) for module in self._module.modules()):
            self.detach()
            return False
        if self._groups and not self._hooks:
            feed_transforms(arrived, arrived)
            for unit, groups in self._units.items():
                wait = Hook(partial(self._wait_for, groups), transparent=True)
                self._hooks.append(unit.register_forward_pre_hook(wait, prepend=True))
        return bool(self._groups)

    @staticmethod
    def _wait_for(groups: list[ShardGroup], *_: Any) -> None:
        for group in groups:
            group.wait()

    def wait(self) -> None:
        self._wait_for(self._groups)

    def detach(self) -> None:
        """Wait for all-gathers in progress, and remove the hooks."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
