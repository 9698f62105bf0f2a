"""Balance of the experts of an engine's model, and measurement of their load, by `expert_parallel` of the JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import ExpertParallelError, NotAvailableError
from deepspeed.foundation.spans import recorder
from deepspeed.moe.balance import AllTokens, GateLoss, ModelLoss, RouterBias
from deepspeed.moe.load import ExpertLoad, LayerLoad, TrainingForward, layers_of
from deepspeed.moe.sharded_moe import TopKGate

_EXPERTS = "Train/Experts/"


class ExpertBalance:
    """Hooks on a model that balance its experts and count their tokens, if the JSON requests them.

    Tokens are counted if `expert_parallel.load` is true, or null with a monitor or timeline, or for the bias update.

    Raises:
        ExpertParallelError: `bias_update_speed` is set, but the model has no layers of experts.
        NotAvailableError: the auxiliary loss of a model in pipeline stages cannot be balanced over all ranks.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        section = state.ds_config.top.expert_parallel
        speed = section.bias_update_speed or 0.0
        watched = section.load
        if watched is None:
            monitors = [section for _, section in state.ds_config.monitor_config]
            watched = any(monitor.enabled for monitor in monitors) or state.ds_config.top.timeline.enabled
        self._parts: list[Any] = []
        self._tokens: list[AllTokens] = []
        self._load: ExpertLoad | None = None
        self._bias: RouterBias | None = None
        model, axis = state.module, state.axes.dp_sp_group
        layers = list(layers_of(model)) if watched or speed or section.balance != "model" else []
        if speed and not layers and state.axes.mesh.size("pp") == 1:
            raise ExpertParallelError("expert_parallel.bias_update_speed: the model has no layers of experts")
        if not layers and section.balance == "model":
            return
        try:
            forward = self._add(TrainingForward(model))
            if speed:
                self._bias = RouterBias(model, layers, speed)
            if watched or speed:
                self._load = self._add(ExpertLoad(layers, axis, forward))
            if section.balance != "model":
                self._share_loss(layers, section.balance == "window", forward)
        except BaseException:
            self.close()  # the user's model gets no hooks of an engine that is not made
            raise

    def _add(self, part: Any) -> Any:
        self._parts.append(part)
        return part

    def _share_loss(self, layers: list[Any], window: bool, forward: TrainingForward) -> None:
        """Compute auxiliary losses over all ranks' tokens, in gates or the loss; NotAvailableError in a pipeline."""
        model, axis = self._state.module, self._state.axes.dp_sp_group
        gates = [(name, module) for name, module, _ in layers if isinstance(module, TopKGate)]
        for name, gate in gates:
            self._tokens.append(AllTokens(axis, window, name))
            self._add(GateLoss(gate, self._tokens[-1], forward))
        if not gates:
            if self._state.axes.mesh.size("pp") > 1:
                raise NotAvailableError(
                    "expert_parallel.balance for the auxiliary loss of a model in pipeline stages is not available "
                    'yet: no stage has the logits of all routers; use "balance": "model", or bias_update_speed'
                )
            self._tokens.append(AllTokens(axis, window, type(model).__name__))
            self._add(ModelLoss(model, self._tokens[-1]))

    def stepped(self) -> list[Callable[[], None]]:
        """Return the callbacks for after each optimizer step, skipped ones included."""
        return [self._end_window] if self._tokens or self._load is not None else []

    def _end_window(self) -> None:
        for tokens in self._tokens:
            tokens.end_window()
        optimizer = self._state.components.optimizer
        if self._load is not None:
            self._load.end_window()
            if self._bias is not None and optimizer is not None and not optimizer.overflow:
                self._bias.update(self._load.unpadded())

    def load(self) -> dict[str, LayerLoad]:
        """Return the load of each layer by name in the last update, over all ranks; {} if tokens are not counted."""
        return {} if self._load is None else self._load.last()

    def events(self) -> Iterator[tuple[str, float]]:
        """Yield (name, value) of each layer's load for the monitors."""
        loads = self.load()
        for name, load in loads.items():
            yield f"{_EXPERTS}{name}/max_over_mean", load.max_over_mean
            yield f"{_EXPERTS}{name}/dropped", load.dropped_share
            yield f"{_EXPERTS}{name}/entropy", load.entropy

    def summary(self) -> dict[str, Any]:
        """Return figures for `ds_top`: most unbalanced layer, mean dropped share, least entropy; {} if not counted."""
        loads = self.load()
        if not loads:
            return {}
        busiest = max(loads, key=lambda name: loads[name].max_over_mean)
        return {
            "layers": len(loads),
            "max over mean": loads[busiest].max_over_mean,
            "busiest": busiest,
            "dropped": sum(load.dropped_share for load in loads.values()) / len(loads),
            "entropy": min(load.entropy for load in loads.values()),
        }

    def count(self) -> None:
        """Add the load of each layer to the timeline as counters, while the timeline is recording."""
        if recorder.on:
            for name, load in self.load().items():
                recorder.count(f"% of the mean load, busiest expert of {name}", round(100 * load.max_over_mean))
                recorder.count(f"tokens dropped by {name}", load.dropped)

    def close(self) -> None:
        while self._parts:
            self._parts.pop().remove()
