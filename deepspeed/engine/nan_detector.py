"""Search for the operation that produced the first NaN or infinity (`non_finite` of the JSON).

The detector keeps references to the inputs of every micro-batch, and the random states, to run the window again.
Backward is run again from the loss if forward returned the loss; otherwise from the gradients of forward's outputs,
which are recorded only after a first failure.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.torch_api import all_gather_object
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import NotAvailableError
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.pytree import tensors_in
from deepspeed.optim.loss_scale import DynamicLossScaler
from deepspeed.profiling.nonfinite import INPUT, OF_LOSS, UPDATE, Checker, Finding, describe, first_input, kinds_in

_MOST = 4  # maximum number of recorded forwards per micro-batch: more of them without an update are not training
_ORDER = {UPDATE: 0, INPUT: 1, "forward": 2, "forward again, in backward": 3, "backward": 3}


@dataclass(eq=False)
class _Micro:
    """Recorded forward of a micro-batch, for running it again."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]  # arguments of forward
    random: tuple[torch.Tensor, Any]  # random states of host and device before forward
    outputs: list[Any] = field(default_factory=list)  # weak references to forward's differentiable outputs
    loss: int | None = None  # index of the output that is the loss
    scale: float = 1.0  # scale of that loss
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients of the outputs, by index


class NonFiniteFinder:
    """Search for the origin of non-finite values; raises NotAvailableError if it is enabled in a pipeline engine."""

    def __init__(self, state: EngineState, engine: Any) -> None:
        self._state, self._engine, self._section = state, engine, state.ds_config.top.non_finite
        self.enabled = self._section.enabled
        if self.enabled and hasattr(type(engine), "train_batch"):
            raise NotAvailableError("non_finite does not run the window of a pipeline again yet; drop the block")
        self._window: list[_Micro] = []
        self._keeps_gradients = self._replaying = False
        self._left = self._section.reports
        self._hook: Any = None
        self.found: str | None = None

    # -- recording --------------------------------------------------------------------------------------------------

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.enabled or self._replaying or not self._left:
            return
        if self._hook is None:
            after: Any = torch.compiler.disable(self._after_forward)
            self._hook = self._state.module.register_forward_hook(after)
            optimizer = self._state.components.optimizer
            if optimizer is not None:
                optimizer.inspect_norm(self.inspect)
        self._window.append(_Micro((args, kwargs), self._random_state()))
        del self._window[: -_MOST * self._state.window.steps]

    def _after_forward(self, _module: Any, _args: Any, output: Any) -> None:
        training = self._engine.training and self._window
        if self._replaying or not training or torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            return
        micro = self._window[-1]
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        micro.outputs = [weakref.ref(tensor) for tensor in outputs]
        for index, tensor in enumerate(outputs) if self._keeps_gradients else ():
            tensor.register_hook(lambda gradient, index=index: micro.gradients.__setitem__(index, gradient))

    def on_loss(self, loss: torch.Tensor, scale: float) -> None:
        if self._window:
            outputs = [reference() for reference in self._window[-1].outputs]
            self._window[-1].loss = next((index for index, tensor in enumerate(outputs) if tensor is loss), None)
            self._window[-1].scale = scale

    def forget(self) -> None:
        self._window.clear()

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self.forget()
        self.enabled = False

    # -- at the end of a window -------------------------------------------------------------------------------------

    def inspect(self, norm: float | None, rows: list[list[float]]) -> None:
        """Search (`reports` times at most) if norm or losses are not finite; called before the update. Collective.

        Args:
            norm: gradient norm, or None; ignored while a dynamic loss scale is above its minimum.
            rows: `Instruments.row` of each rank, which begins with the sum of its losses; ignored with dp_replicate.
        """
        axes, scaler = self._state.axes, self._state.window.scaler
        bad = norm is not None and not math.isfinite(norm)
        if isinstance(scaler, DynamicLossScaler) and scaler.loss_scale > scaler.min_scale:
            bad = False  # the loss scale is too large, which is normal
        if axes.model_replica_group.size == axes.everyone.size:  # otherwise ranks would decide on different rows
            bad = bad or any(row and not math.isfinite(row[0]) for row in rows)
        if bad and self._left:
            self._left -= 1
            self._report()

    def _report(self) -> None:
        state = self._state
        micro_index, finding = self._search()
        reports: list[Any] = [None] * state.everyone.size
        summary = None if finding is None else (micro_index, _ORDER.get(finding.direction, 3), *finding[:4])
        outside = any(micro.loss is None and not micro.gradients for micro in self._window)
        if state.everyone.size > 1:
            all_gather_object(reports, (summary, outside), group=state.everyone.group)
        else:
            reports = [(summary, outside)]
        step = state.global_steps
        findings = [(rank_summary, rank) for rank, (rank_summary, _) in enumerate(reports) if rank_summary is not None]
        if findings:
            first, rank = min(findings, key=lambda pair: (*pair[0][:2], pair[1]))
            micro, _, direction, module, operation, statistics = first
            producer = f" by {operation}" if operation else ""
            self.found = (
                f"update {step}, rank {rank}, micro-batch {micro}: first not finite in {direction}, "
                f"{module or 'the model'}{producer}: {statistics}"
            )
            if rank == state.everyone.rank and finding is not None:
                self._dump(finding, self.found)
        elif any(outside for _, outside in reports):
            self._keeps_gradients = True
            self.found = (
                f"update {step}: forward of the window is finite, and its loss was computed outside of the model; the "
                "next time backward is looked at too"
            )
        else:
            self.found = f"update {step}: not found again when the window was run once more"
        log_rank0(self.found)

    def _dump(self, finding: Finding, words: str) -> None:
        """Write the inputs of the operation to a file for `torch.load`, if the JSON has an `output_path`."""
        if self._section.output_path:
            folder = Path(self._section.output_path)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"non_finite_step{self._state.global_steps}_rank{self._state.everyone.rank}.pt"
            torch.save({"where": words, "inputs": [tensor.cpu() for tensor in finding.inputs]}, path)

    def _search(self) -> tuple[int, Finding | None]:
        """Run all micro-batches again; returns (micro-batch, finding) of the first one, else (0, None). Collective."""
        first: tuple[int, Finding | None] = (0, self._of_parameters())
        reducer, lifecycle = self._state.components.reducer, self._state.components.lifecycle
        buffers = [(b, b.detach().clone()) for b in self._state.module.buffers()]
        random = self._random_state()
        self._replaying = True
        if reducer is not None:
            reducer.muted = True
        try:
            for index, micro in enumerate(self._window):
                finding = first_input(micro.inputs) or self._run_again(micro)
                if first[1] is None:
                    first = (index, finding)
        finally:
            self._replaying = False
            if reducer is not None:
                reducer.muted = False
            if lifecycle is not None:
                lifecycle.settle()
            self._set_random_state(random)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        return first

    def _of_parameters(self) -> Finding | None:
        """Return a finding for this rank's first parameter that was not finite before the micro-batches, or None."""
        for group in self._state.components.groups:
            whole = not group.policy.gathers_before_use
            with contextlib.nullcontext(group.full) if whole else group.values.borrowed() as values:
                if not any(kinds_in(values)):
                    continue
                low = 0 if whole else group.layout.cuts[group.axis.rank]
                for member in group.members:
                    begin, end = member.offset - low, member.offset + member.numel - low
                    part = values[max(0, begin) : max(0, end)]
                    if any(kinds_in(part)):
                        return Finding(UPDATE, f"parameter '{member.name}'", "", describe(part), [part.clone()])
        return None

    def _run_again(self, micro: _Micro) -> Finding | None:
        self._set_random_state(micro.random)
        args, kwargs = micro.inputs
        with Checker(self._state.module) as checker:
            with self._engine._autocast():
                output = self._state.module(*args, **kwargs)
            outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
            roots, gradients = self._roots(micro, outputs)
            if roots and checker.found is None and any(any(kinds_in(gradient)) for gradient in gradients):
                bad = next(gradient for gradient in gradients if any(kinds_in(gradient)))
                checker.found = Finding("backward", OF_LOSS, "", describe(bad), [bad])
            if roots:
                torch.autograd.backward(roots, gradients)
        return checker.found

    def _random_state(self) -> tuple[torch.Tensor, Any]:
        on_cpu = self._state.device.type == "cpu"
        return torch.get_rng_state(), None if on_cpu else get_accelerator().get_rng_state()

    @staticmethod
    def _set_random_state(state: tuple[torch.Tensor, Any]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            get_accelerator().set_rng_state(state[1])

    def _roots(self, micro: _Micro, outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs from which backward is run again, and their gradients."""
        if micro.loss is not None and micro.loss < len(outputs):
            loss = outputs[micro.loss]
            return [loss], [torch.full_like(loss, micro.scale)]
        gradients = {index: gradient for index, gradient in micro.gradients.items() if index < len(outputs)}
        return [outputs[index] for index in gradients], list(gradients.values())
