"""What a step adds to the model's forward: `curriculum_learning`, `progressive_layer_drop` and random-LTD.

The first two add keyword arguments to the model's forward, which the model has to use. Random-LTD and
`enable_layer_drop` replace the `forward` of layers instead, and take the step from the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.data.layer_drop import GAMMA, THETA, DroppedForward, LayerDrop, LayerDropSchedule
from deepspeed.data.random_ltd import RandomLTD, RandomLTDScheduler, layers_to_convert
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, NotAvailableError, UsageError
from deepspeed.foundation.hf_forward import arguments, hands_on
from deepspeed.foundation.log import log_once, warn_once
from deepspeed.foundation.replaced_forward import replacements

_SEQLEN = "curriculum_seqlen"
_LIBRARIES = ("transformers", "peft")  # whose models take these keywords nowhere, even where they take any
_ADVICE = {
    _SEQLEN: "give forward an argument of this name and cut its inputs to that length, or cut the batches in the loop "
    "with deepspeed.data.curriculum.truncate_batch and CurriculumScheduler, without the block curriculum_learning",
    "pld_theta": "give forward the arguments progressive_layer_drop and pld_theta and skip layers there, or let "
    "deepspeed.data.layer_drop.enable_layer_drop(engine) skip the layers of a model as it is",
}


class StepKeywords:
    """Keywords of the model's forward, and layers whose forward depends on the step, of one engine.

    Args:
        state: state of the engine.
        pipelined: whether the engine runs pipeline stages, whose layers get no keywords.

    Raises:
        DeepSpeedConfigError: a schedule of the JSON is wrong.
        NotAvailableError: pipeline stages or sequence-parallel ranks cannot do what the JSON asks for.
    """

    def __init__(self, state: EngineState, pipelined: bool) -> None:
        self._state, self._pipelined = state, pipelined
        self._drop: LayerDrop | None = None
        self._random_ltd: RandomLTD | None = None
        top = state.ds_config.top
        self._by_json = top.progressive_layer_drop.enabled
        forwards = (forward for module in state.module.modules() for forward in replacements(module))
        if any(isinstance(forward, DroppedForward) and forward.active for forward in forwards):
            raise UsageError("layers of the model are skipped already: call enable_layer_drop(engine) after initialize")
        if top.curriculum_learning.enabled:
            state.curriculum = self._curriculum()
        if top.progressive_layer_drop.enabled:
            self._refuse_stages("progressive_layer_drop")
            state.layer_drop = LayerDropSchedule(top.progressive_layer_drop.theta, top.progressive_layer_drop.gamma)
        if self._wants_random_ltd():
            state.random_ltd = self._random_ltd_scheduler()
        self._checked: set[str] = set()
        self._last_step = 0
        self._active = any(part is not None for part in (state.curriculum, state.layer_drop, state.random_ltd))

    # -- the JSON -------------------------------------------------------------------------------------------------

    def _curriculum(self) -> CurriculumScheduler:
        section = self._state.ds_config.top.curriculum_learning
        if section.curriculum_type != "seqlen":
            raise DeepSpeedConfigError(
                f'curriculum_learning.curriculum_type is {section.curriculum_type!r}; there is only "seqlen"'
            )
        settings = section.model_dump(exclude={"enabled", "curriculum_type"})
        return CurriculumScheduler({key: value for key, value in settings.items() if value is not None})

    def _wants_random_ltd(self) -> bool:
        outer = self._state.ds_config.top.data_efficiency
        blocks = {"data_efficiency": outer.enabled, "data_efficiency.data_routing": outer.data_routing.enabled}
        off = next((name for name, enabled in blocks.items() if enabled is False), "")
        if off and outer.data_routing.random_ltd.enabled:
            warn_once(f"random_ltd.enabled has no effect, since {off}.enabled is false")
        return outer.data_routing.random_ltd.enabled and not off

    def _random_ltd_scheduler(self) -> RandomLTDScheduler:
        self._refuse_stages("data_efficiency.data_routing.random_ltd")
        if self._state.axes.mesh.size("sp") > 1:
            raise NotAvailableError(
                "data_efficiency.data_routing.random_ltd with sequence-parallel ranks (sp) is not available: each has "
                "a part of the sequence, of which other tokens stay on each rank"
            )
        window, data = self._state.window, self._state.axes.data
        return RandomLTDScheduler(
            self._state.ds_config.top.data_efficiency.data_routing.random_ltd,
            lambda: window.micro * window.steps * data.size,
        )

    def _refuse_stages(self, what: str) -> None:
        if self._pipelined:
            raise NotAvailableError(
                f"{what} with pipeline stages is not available; of {self._state.axes.mesh.describe()}, use dp or tp in "
                "place of pp"
            )

    # -- each micro-batch -----------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Move the curriculum to the next update; `added` calls this, and pipeline engines for each window."""
        scheduler, step = self._state.curriculum, self._state.global_steps + 1
        if scheduler is None:
            return
        if step < self._last_step:  # a checkpoint was loaded; a difficulty at the maximum would stay
            scheduler.set_current_difficulty(self._state.ds_config.top.curriculum_learning.min_difficulty or 0)
        self._last_step = step
        scheduler.update_difficulty(step)

    def added(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a forward in training, with those of the step.

        Raises:
            UsageError: the model's forward does not take one, or a "custom" schedule has no function.
        """
        if not self._active:
            return kwargs
        state = self._state
        if state.random_ltd is not None:
            state.random_ltd.update_seq(state.global_steps)
            if self._random_ltd is None:
                warn_once(
                    "random_ltd is enabled, but no layers leave tokens out: call convert_to_random_ltd(engine, "
                    "BlockClass) after initialize"
                )
        more: dict[str, Any] = {}
        if state.curriculum is not None:
            self.begin_window()
            more[_SEQLEN] = state.curriculum.get_current_difficulty()
        if state.layer_drop is not None:
            state.layer_drop.update_state(state.global_steps)
            skipping = self._drop is not None and self._drop.installed
            more |= {} if skipping or not self._by_json else state.layer_drop.get_state()
        for name in more.keys() - self._checked:
            self._check_taken(name)
        return {**kwargs, **more}

    def _check_taken(self, name: str) -> None:
        """Raise UsageError if the model's forward surely does not use a keyword."""
        module = self._state.module
        named = arguments(module)
        if name not in named or named[name].kind is inspect.Parameter.VAR_KEYWORD:
            foreign = type(module).__module__.partition(".")[0] in _LIBRARIES
            if foreign or not hands_on(named):
                advice = _ADVICE.get(name, _ADVICE["pld_theta"])
                raise UsageError(f"the forward of {type(module).__name__} does not take {name!r}: {advice}")
            log_once(f"the forward of {type(module).__name__} gets {name!r} among its other keyword arguments")
        self._checked.add(name)

    # -- replaced layers ------------------------------------------------------------------------------------------

    def _position(self) -> tuple[int, int]:
        return self._state.global_steps, self._state.micro_steps

    def convert(self, kind: type[nn.Module], whole: tuple[str, ...]) -> None:
        """See `convert_to_random_ltd`."""
        state, scheduler = self._state, self._state.random_ltd
        if scheduler is None:
            raise UsageError(
                "convert_to_random_ltd needs data_efficiency.data_routing.random_ltd in the JSON, with `enabled` true "
                "there and not false in data_efficiency and data_routing"
            )
        if self._random_ltd is not None:
            raise UsageError("convert_to_random_ltd was called before for this engine")
        section = state.ds_config.top.data_efficiency
        self._random_ltd = RandomLTD(
            scheduler,
            layers_to_convert(state.module, kind, scheduler),
            self._position,
            (section.seed, state.axes.data.rank),
            section.data_routing.random_ltd.hidden_state_order == "seq_batch_dim",
            whole,
        )

    def enable_layer_drop(
        self, theta: float | None, gamma: float | None, make: Callable[[LayerDropSchedule, Any], LayerDrop]
    ) -> LayerDrop:
        """See `enable_layer_drop` of `deepspeed.data.layer_drop`; `make` replaces the layers' forward."""
        self._refuse_stages("enable_layer_drop")
        if self._drop is not None and self._drop.installed:
            raise UsageError("layers of this engine are skipped already; call remove() of the earlier handle first")
        schedule = self._state.layer_drop if self._state.ds_config.top.progressive_layer_drop.enabled else None
        if schedule is None:
            schedule = LayerDropSchedule(THETA if theta is None else theta, GAMMA if gamma is None else gamma)
        elif theta not in (None, schedule.theta) or gamma not in (None, schedule.gamma):
            raise ArgumentError(
                f"enable_layer_drop with theta {theta} and gamma {gamma}: progressive_layer_drop of the JSON says "
                f"{schedule.theta} and {schedule.gamma}"
            )
        self._drop = make(schedule, self._position)
        self._state.layer_drop = schedule
        self._active = True
        return self._drop

    def close(self) -> None:
        """Give the layers their own `forward` again."""
        for routing in (self._drop, self._random_ltd):
            if routing is not None:
                routing.remove()


class StepAccessors:
    """Attributes and methods of an engine that belong to curriculum, layer drop and random-LTD."""

    _state: EngineState
    _keywords: StepKeywords

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """Return the scheduler of `curriculum_learning`; None unless enabled."""
        return self._state.curriculum

    def curriculum_enabled_legacy(self) -> bool:
        """Return whether `curriculum_learning` of the JSON is enabled."""
        return self._state.curriculum is not None

    def curriculum_params_legacy(self) -> dict[str, Any]:
        """Return the block `curriculum_learning` of the JSON, with defaults."""
        return self._state.ds_config.top.curriculum_learning.model_dump()

    @property
    def progressive_layer_drop(self) -> LayerDropSchedule | None:
        """Return the schedule of `progressive_layer_drop` or `enable_layer_drop`; None without either."""
        return self._state.layer_drop

    def pld_enabled(self) -> bool:
        """Return whether `progressive_layer_drop` of the JSON is enabled."""
        return self._state.ds_config.top.progressive_layer_drop.enabled

    def pld_params(self) -> dict[str, float] | bool:
        """Return `theta` and `gamma` of `progressive_layer_drop`; False unless enabled."""
        return {"theta": self.pld_theta(), "gamma": self.pld_gamma()} if self.pld_enabled() else False

    def pld_theta(self) -> float:
        """Return `progressive_layer_drop.theta` of the JSON."""
        return self._state.ds_config.top.progressive_layer_drop.theta

    def pld_gamma(self) -> float:
        """Return `progressive_layer_drop.gamma` of the JSON."""
        return self._state.ds_config.top.progressive_layer_drop.gamma

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler | None:
        """Return the scheduler of random-LTD; None unless enabled."""
        return self._state.random_ltd

    def random_ltd_enabled(self) -> bool:
        """Return whether random-LTD is enabled in the JSON, with the blocks around it."""
        return self._state.random_ltd is not None

    def _convert_to_random_ltd(self, kind: type[nn.Module], whole: tuple[str, ...]) -> None:
        self._keywords.convert(kind, whole)

    def _enable_layer_drop(
        self, theta: float | None, gamma: float | None, make: Callable[[LayerDropSchedule, Any], LayerDrop]
    ) -> LayerDrop:
        return self._keywords.enable_layer_drop(theta, gamma, make)
