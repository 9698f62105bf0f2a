"""Resolved configuration of a run: parsed once, with the origin of every value."""

from __future__ import annotations

from typing import Any, cast

from deepspeed.config.auto import (
    BATCH,
    MICRO,
    STEPS,
    TRAIN,
    BatchSizes,
    Facts,
    derive_batch,
    elastic_batch,
    resolve_autos,
    with_plan,
)
from deepspeed.config.base_model import Section
from deepspeed.config.docs import ResolvedValue, section_rows
from deepspeed.config.errors import Problem, nearest, raise_for
from deepspeed.config.keys import Reading
from deepspeed.config.load import load_raw
from deepspeed.config.schema import spellings
from deepspeed.config.sections.monitor import MonitorSections
from deepspeed.config.sections.top import TopLevel, wire_of
from deepspeed.config.sections.wire import WireConfig
from deepspeed.config.validate import conflicts, to_sections, unavailable
from deepspeed.errors import ArgumentError, DeepSpeedConfigError
from deepspeed.foundation.log import warn_once


class DeepSpeedConfig:
    """Resolved configuration of a run; docs/configuration.md describes all keys.

    Example:
        >>> cfg = DeepSpeedConfig({"train_batch_size": 8, "bf16": {"enabled": True}}, world=2)
        >>> cfg.train_micro_batch_size_per_gpu
        4

    Attributes:
        raw: the configuration as a dict, as the user wrote it.
        top: the validated configuration (`TopLevel`), with "auto" and the batch sizes resolved. The other attributes
            are values of `top`, some under other names (`zero` is `top.zero_optimization`).
    """

    def __init__(
        self,
        config: object,
        mpu: Any = None,
        *,
        world: int = 1,
        replicas: int | None = None,
        facts: Facts | None = None,
        for_init: bool = False,
    ) -> None:
        """Read, resolve and check a configuration.

        Args:
            config: a dict, a path to a JSON or HJSON file, or urlsafe base64 of JSON.
            mpu: object with `get_data_parallel_world_size()`, which replaces `world`; None: `world` counts.
            world: number of data-parallel ranks.
            replicas: number of ranks with the same model slice, sequence-parallel ranks included; None: `world`.
            facts: values from which "auto" is resolved; None: nothing is known.
            for_init: see the method `for_init`.

        Raises:
            ArgumentError: `world` is below 1.
            BatchSizeError: the only problems are in the three batch sizes.
            NotAvailableError: the only problems are features that are not available.
            DeepSpeedConfigError: there are other problems, or several kinds; the message lists all problems.
        """
        if mpu is not None:
            world = getattr(mpu, "get_data_parallel_world_size", lambda: world)()
        if world < 1:
            raise ArgumentError(f"world is the number of data-parallel ranks and must be at least 1, got {world}")
        self.raw = load_raw(config)
        reading = Reading.of(with_plan(self.raw))
        resolve_autos(reading, facts or Facts(), lenient=for_init)
        top = to_sections(reading)
        reading.problems += [
            *conflicts(top, reading, None if for_init else (world, replicas or world)),
            *unavailable(top, reading),
        ]
        batch = None if for_init else self._batch(top, reading, world, facts or Facts())
        raise_for(reading.problems)
        if batch is not None:
            top = top.model_copy(update={TRAIN: batch.train, MICRO: batch.micro, STEPS: batch.steps})
            reading.origins.update(batch.derived)
        for line in reading.warnings:
            warn_once(line)
        self._reading = reading
        self._take(top)

    @classmethod
    def for_init(cls, config: object, *, world: int = 1, facts: Facts | None = None) -> DeepSpeedConfig:
        """Create the configuration for `zero.Init`: "auto" values may be unresolved, and the batch may be unknown.

        Unresolved values have their default, and missing batch sizes are 0. Errors are those of the constructor.
        """
        return cls(config, world=world, facts=facts, for_init=True)

    def _take(self, top: TopLevel) -> None:
        self.top = top
        self.train_batch_size = top.train_batch_size or 0
        self.train_micro_batch_size_per_gpu = top.train_micro_batch_size_per_gpu or 0
        self.gradient_accumulation_steps = top.gradient_accumulation_steps or 0
        self.gradient_clipping = top.gradient_clipping
        self.steps_per_print = top.steps_per_print
        self.optimizer = top.optimizer
        self.scheduler = top.scheduler
        self.auto_cast = top.auto_cast
        self.fp16 = top.fp16
        self.bf16 = top.bf16
        self.torch_autocast = top.torch_autocast
        self.data_types = top.data_types
        self.zero = top.zero_optimization
        self.communication_data_type = top.communication_data_type
        self.deterministic_reduction = top.deterministic_reduction
        self.sparse_gradients = top.sparse_gradients
        self.prescale_gradients = top.prescale_gradients
        self.gradient_predivide_factor = top.gradient_predivide_factor
        self.gradient_allreduce_op = top.gradient_allreduce_op
        self.dataloader_drop_last = top.dataloader_drop_last
        self.dataloader_carry_last = top.dataloader_carry_last
        self.wall_clock_breakdown = top.wall_clock_breakdown
        self.memory_breakdown = top.memory_breakdown
        self.dump_state = top.dump_state
        self.comms_logger = top.comms_logger
        self.timers = top.timers
        self.monitor_config = MonitorSections(**{name: getattr(top, name) for name in MonitorSections.model_fields})
        self.flops_profiler_config = top.flops_profiler
        self.log_level = top.log_level
        self.disable_python_gc = top.disable_python_gc

    @property
    def expert_parallel_size(self) -> int:
        """Number of ranks over which the experts of a layer are divided; 1: they are not divided."""
        section = self.top.expert_parallel
        return 1 if section.enabled is False else section.size

    @property
    def wire(self) -> WireConfig:
        """Return the block `wire`, with the values of the keys of other blocks that mean the same."""
        return wire_of(self.top)

    def mesh_sizes(self) -> list[tuple[str, int, str]]:
        """Return the sizes that the JSON sets, as (axis, size, key), for `mesh.resolve`.

        An axis occurs once for each key that sets it; -1 is all remaining ranks. The axis "dp" is dp_replicate x
        dp_shard, "shard" is dp_shard x sp. Sizes of 1 of pp, sp and tp are left out.
        """
        top, mesh = self.top, self.top.mesh
        stages = top.pipeline.stages
        shard = top.zero_optimization.mics_shard_size
        sizes = [
            *((axis, getattr(mesh, axis), f"mesh.{axis}") for axis in type(mesh).model_fields),
            ("dp", top.data_parallel_size, "data_parallel_size"),
            ("sp", top.sequence_parallel_size, "sequence_parallel_size"),
            ("tp", top.tensor_parallel.autotp_size or None, "tensor_parallel.autotp_size"),
            ("tp", top.tensor_parallel.tp.tp_size, "tensor_parallel.tp.tp_size"),
            ("pp", None if stages == "auto" else stages, "pipeline.stages"),
            ("shard", shard if shard > 0 else None, "zero_optimization.mics_shard_size"),
        ]
        # One stage, slice or part of a sequence is what everybody has who does not ask.
        return [
            (a, size, key) for a, size, key in sizes if size is not None and not (size == 1 and a in ("pp", "sp", "tp"))
        ]

    def section(self, path: str) -> Section:
        """Return the section at a JSON path, such as "zero_optimization"; DeepSpeedConfigError if there is none."""
        section = self.get(path)
        if not isinstance(section, Section):
            raise DeepSpeedConfigError(f'"{path}" is a value, not a section')
        return section

    def get(self, path: str) -> Any:
        """Return the resolved value at a JSON path; aliases are accepted.

        None inside a missing block, for an absent key of a free dict (such as `optimizer.params`), and below a value.

        Raises:
            DeepSpeedConfigError: a section has no such key.
        """
        here: Any = self.top
        for part in path.split("."):
            if isinstance(here, Section) and part in spellings(type(here)):
                here = getattr(here, spellings(type(here))[part][0])
            elif isinstance(here, Section):
                raise DeepSpeedConfigError(f'"{path}": no such key; {nearest(part, type(here))}')
            elif here is None:
                return None  # a block that was not given
            else:
                here = cast("dict[str, Any]", here).get(part) if isinstance(here, dict) else None
        return here

    def explain(self) -> list[ResolvedValue]:
        """Return resolved values with origins, in the order of the configuration reference; unread values come last."""
        tolerated = self._reading.tolerated.items()
        ignored = [ResolvedValue(name, value, "given", "accepted and not read") for name, value in tolerated]
        return [*section_rows(self.top, self._reading), *ignored]

    @staticmethod
    def _batch(top: TopLevel, reading: Reading, world: int, facts: Facts) -> BatchSizes | None:
        """Resolve the batch sizes; None, with a problem in `reading`, if one is wrong or the sizes contradict."""
        train, micro, steps = top.train_batch_size, top.train_micro_batch_size_per_gpu, top.gradient_accumulation_steps
        if any(getattr(top, name) is None and reading.origins.get(name) == "given" for name in BATCH):
            return None  # a part had a wrong type: it is reported already
        sections = top.tensor_parallel
        slices = max(sections.autotp_size, sections.tp.tp_size, top.mesh.tp) * max(
            top.sequence_parallel_size, top.mesh.sp
        )
        if slices > 1 and train and micro and steps and train == micro * steps * world * slices:
            # Clients count all ranks, and those that share matrices or a sequence get the same batch.
            train = micro * steps * world
            reading.warnings.append(
                f"{TRAIN} counts {slices} ranks that share matrices (tp) or a sequence (sp) as data-parallel ones; "
                f"it is {train} here"
            )
        if MICRO in reading.autos and not (train and steps):
            micro = facts.loader_batch_size
            if micro is None and train is None:
                text = f"give the number, give {TRAIN} as well, or pass a loader whose batch size is known"
                reading.problems.append(Problem(f'{MICRO} = "auto": cannot be resolved: {text}', "batch"))
                return None
        if top.elasticity.enabled:
            batch = elastic_batch(reading.tree.get("elasticity", {}), (train, micro, steps), world)
        else:
            batch = derive_batch(train, micro, steps, world)
        if isinstance(batch, str):
            reading.problems.append(Problem(batch, "batch"))
            return None
        for name in BATCH.keys() & set(reading.autos):
            batch.derived[name] = "auto: " + batch.derived.get(name, "the batch size of the loader")
        return batch
