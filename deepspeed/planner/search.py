"""Search for the fastest plan of a run, and confirmation of the best predicted plans by trials."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.load import block_of, load_raw
from deepspeed.engine.memory.categories import TRANSIT
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.moe.structure import find_experts
from deepspeed.ops.fake_tensors import Valueless
from deepspeed.planner.fake_world import without_values
from deepspeed.planner.memory import MemoryCount, simulate, young_objects
from deepspeed.planner.mesh_options import MeshShape, asks_for_axes, shapes
from deepspeed.planner.step_time import (
    StepTime,
    UpdateTraffic,
    enough,
    moves,
    recorded,
    schedule_of,
    seconds_of_phases,
    step_time,
    window_time,
)
from deepspeed.planner.train_program import Loss, Program
from deepspeed.planner.trials import TrialOutcome
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.trace import MESSAGE, Recording
from deepspeed.zero.layout.stages import policy_for

STAGES = (0, 1, 2, 3)
ON_DEVICE, OPTIMIZER, ALL = "none", "nvme optimizer", "nvme all"
HOST_OPTIMIZER, HOST_ALL = "cpu optimizer", "cpu all"  # only if a device has its own memory
_NAMES = {
    ON_DEVICE: "", OPTIMIZER: "_opt-nvme", ALL: "_all-nvme", HOST_OPTIMIZER: "_opt-cpu", HOST_ALL: "_all-cpu",
}  # fmt: skip
_WITH_PARAMETERS = (ALL, HOST_ALL)
DATA_PARALLEL = MeshShape()
NARROW = 4_000_000
"""Bucket elements of plans whose usual buckets do not fit: fewer gradients are in transit."""
WHOLE = "nothing travels between ranks that share samples: each would compute the whole model"
_UNCUT = (
    WHOLE,
    "TensorParallelError",
    "NotAvailableError",
    "MeshError",
    "DataError",
    "PipelineError",
    "ExpertParallelError",
)  # reasons that do not depend on stage and micro-batch
_LARGEST = 3  # number of micro-batch sizes to compare for pipelines: with larger ones, stages wait longer
_UPDATES = 2  # simulated updates; the second one allocates the same as all later ones


@dataclass(frozen=True)
class TrainingPlan:
    """One combination of the settings that the planner varies.

    Args:
        stage: ZeRO stage.
        tier: offloaded state: `none`; `nvme optimizer`, `cpu optimizer`; `nvme all`, `cpu all` (also parameters).
        micro: samples of a micro-batch.
        steps: gradient accumulation steps.
        recompute: whether activations of blocks are recomputed in backward.
        bucket: elements of `reduce_bucket_size`; 0: the user's value.
        shape: mesh sizes.
    """

    stage: int
    tier: str
    micro: int
    steps: int
    recompute: bool
    bucket: int = 0
    shape: MeshShape = DATA_PARALLEL

    @property
    def name(self) -> str:
        """Return the plan's name, such as `z3_gas2_tmbspg4_opt-cpu_recompute`."""
        tier = _NAMES[self.tier]
        rest = f"{'_recompute' if self.recompute else ''}{f'_bucket{self.bucket}' if self.bucket else ''}"
        return f"z{self.stage}_gas{self.steps}_tmbspg{self.micro}{tier}{rest}{self.shape.name}"

    def holds_less_than(self, other: TrainingPlan) -> bool:
        """Return whether the plan equals `other` except for a smaller micro-batch and the number of steps."""
        return self.micro < other.micro and replace(self, micro=other.micro, steps=other.steps) == other

    @property
    def samples(self) -> float:
        """Return the samples of an update of all ranks, divided by the number of ranks."""
        return self.micro * self.steps / self.shape.width

    def config(self, base: Any, folder: str) -> dict[str, Any]:
        """Return the configuration of this plan.

        Args:
            base: the user's configuration, as dict, path or base64; it does not change.
            folder: folder for offload to disk; unused by other plans.
        """
        config = copy.deepcopy(load_raw(base))
        config.pop("train_batch_size", None)
        config.pop("autotuning", None)
        config |= {"train_micro_batch_size_per_gpu": self.micro, "gradient_accumulation_steps": self.steps}
        zero = config["zero_optimization"] = {**block_of(config, "zero_optimization"), "stage": self.stage}
        zero.pop("offload_optimizer", None)
        zero.pop("offload_param", None)
        if self.bucket:
            zero["reduce_bucket_size"] = self.bucket
        if self.tier != ON_DEVICE:
            on_disk = self.tier in (OPTIMIZER, ALL)
            rests = {"device": "nvme", "nvme_path": folder} if on_disk else {"device": "cpu"}
            zero["offload_optimizer"] = dict(rests)
        if self.tier in _WITH_PARAMETERS:
            zero["offload_param"] = dict(rests)
        if self.recompute:
            config["activation_checkpointing"] = {**block_of(config, "activation_checkpointing"), "enabled": True}
        elif "activation_checkpointing" in config:
            config["activation_checkpointing"] = {**block_of(config, "activation_checkpointing"), "enabled": False}
        self.shape.ask(config)
        return config


@dataclass(frozen=True)
class Judged:
    """A plan with its predictions and trial results.

    Args:
        plan: the plan.
        memory: memory of a rank; None: not predicted.
        time: time of an update; None: not predicted.
        fits: whether the memory suffices even if other ranks lag as far behind as the engine allows.
        perhaps: if `fits` is False, whether the memory suffices for ranks that run in lockstep; a trial decides.
        reason: reason why the plan does not fit or was not predicted, or its trial failed; "" otherwise.
        flops: floating-point operations of an update on the busiest rank, including recomputation.
        trial: result of a short run; None if there was none.
        least: peak bytes of a rank (see `device_bytes`) if ranks run in lockstep.
    """

    plan: TrainingPlan
    memory: MemoryCount | None = None
    time: StepTime | None = None
    fits: bool = False
    perhaps: bool = False
    reason: str = ""
    flops: float = 0.0
    trial: TrialOutcome | None = None
    least: int = 0

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of an update; infinite if not predicted."""
        return float("inf") if self.time is None else self.time.total

    @property
    def worth(self) -> tuple[bool, bool, float, int]:
        """Return the sort key before trials: plans that fit, plans that may fit, others; each by predicted time."""
        return not self.fits, not self.perhaps, self.seconds, self.plan.micro

    def after_trials(self, too_large: list[TrainingPlan]) -> Judged:
        """Return the plan with `fits` corrected by its trial or by `too_large`, plans that ran out of memory."""
        if self.trial is not None:
            return replace(self, fits=not self.trial.out_of_memory and (self.fits or self.trial.seconds is not None))
        if self.fits and any(plan.holds_less_than(self.plan) for plan in too_large):
            return replace(self, fits=False, reason="a plan that holds less ran out of memory")
        return self

    @property
    def worth_after_trials(self) -> tuple[int, float]:
        """Return the sort key after trials: measured plans by time, untried, failed, too large ones."""
        if not self.fits:
            return 3, 0.0
        if self.trial is None:
            return 1, 0.0
        return (0, self.trial.seconds) if self.trial.seconds is not None else (2, 0.0)


@dataclass(frozen=True)
class Task:
    """Training run to plan.

    Args:
        model: see `Program`.
        batch: creates one micro-batch of a given number of samples.
        train_batch: samples of an update over all ranks, equal in all plans.
        config: the user's configuration.
        loss: see `Program`.
        optimizer: see `Program`.
        expert_load: see `Program`.
    """

    model: nn.Module | Callable[[], nn.Module]
    batch: Callable[[int], Any]
    train_batch: int
    config: dict[str, Any] = field(default_factory=dict)
    loss: Loss | None = None
    optimizer: Any = None
    expert_load: float = 1.0

    def has_experts(self) -> bool:
        """Build the model without values; return whether it has experts to divide, False if it cannot be built."""
        try:
            with without_values(), Valueless():
                return any(find_experts(Program(self.model, self.config, None).made_model()))
        except Exception:  # the first plan that is judged says why the model cannot be built
            return False


def legal_plans(train_batch: int, machine: Machine, most_micro: int = 1024) -> list[TrainingPlan]:
    """Return data-parallel plans for a global batch of `train_batch` samples, roughly by decreasing memory.

    Micro-batches have at most `most_micro` samples. Plans whose sharding or offload would change nothing are left out.

    Raises:
        ArgumentError: the ranks cannot divide the batch.
    """
    if train_batch < 1 or train_batch % machine.ranks:
        raise ArgumentError(
            f"a batch of {train_batch} cannot be shared by {machine.ranks} ranks: give a multiple of {machine.ranks}"
        )
    share = train_batch // machine.ranks
    micros = [size for size in range(min(share, most_micro), 0, -1) if share % size == 0]
    tiers = [ON_DEVICE]
    tiers += [HOST_OPTIMIZER, HOST_ALL] if machine.link else []  # without a link, the device's memory is the host's
    tiers += [OPTIMIZER, ALL] if machine.disk else []
    plans = []
    for recompute, tier, stage, micro in itertools.product((False, True), tiers, STAGES, micros):
        policy = policy_for(stage)
        alone = machine.ranks == 1 and policy.owns_a_shard  # sharding over one rank changes nothing
        with_parameters = tier in _WITH_PARAMETERS
        needless = not (policy.gathers_before_use if with_parameters else tier == ON_DEVICE or policy.owns_a_shard)
        if needless or (alone and tier == ON_DEVICE):
            continue
        plans.append(TrainingPlan(stage, tier, micro, share // micro, recompute))
    return plans


def mesh_plans(train_batch: int, machine: Machine, most_micro: int = 1024, experts: bool = False) -> list[TrainingPlan]:
    """Return plans with one more mesh axis for a global batch of `train_batch` samples; arguments as in `legal_plans`.

    The plans have a few sizes of each axis and no offload, since each needs a simulated run. With `experts`, there are
    also plans that divide the experts of the model among ranks.
    """
    plans = []
    for shape, stages in shapes(machine, experts):
        share = train_batch * shape.width // machine.ranks
        # With fewer micro-batches than stages, most stages wait. Size 1 gives enough micro-batches.
        micros = [size for size in range(min(share, most_micro), 0, -1) if share % size == 0]
        micros = [size for size in micros if share // size >= shape.stages]
        for recompute, stage, micro in itertools.product((False, True), stages, micros):
            plans.append(TrainingPlan(stage, ON_DEVICE, micro, share // micro, recompute, 0, shape))
    return plans


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated run of a plan, from which its memory and time are derived.

    Args:
        memory: memory if other ranks lag as far behind as the engine allows.
        least: memory if ranks run in lockstep; equal to `memory` if that fits or does not depend on other ranks.
        recording: recording of the updates.
        steps: micro-batches of a simulated update.
        config: the plan's configuration, with `steps` micro-batches.
        others: runs of the other pipeline stages.
        crossing: bytes of the largest message between stages.
    """

    memory: MemoryCount
    least: MemoryCount
    recording: Recording
    steps: int
    config: dict[str, Any]
    others: tuple[SimulatedRun, ...] = ()
    crossing: int = 0

    @property
    def stages(self) -> tuple[SimulatedRun, ...]:
        """Return this run and those of the other stages."""
        return (self, *self.others)


def simulated(task: Task, plan: TrainingPlan, machine: Machine) -> SimulatedRun:
    """Simulate a plan, each pipeline stage separately; errors of the engine are raised.

    Raises:
        NotAvailableError: the model, or the configuration, sets pipeline stages itself.
    """
    steps, on_device, stages = min(plan.steps, 2), bool(machine.link), plan.shape.stages
    if stages > 1:
        steps = enough(schedule_of(plan.config(task.config, ""), stages, plan.steps))
    config = replace(plan, steps=steps).config(task.config, machine.folder or "/nonexistent")
    program = Program(task.model, config, task.batch(plan.micro), task.loss, task.optimizer, _UPDATES,
                      task.expert_load)  # fmt: skip
    messages, runs = dict[int, Any](), list[SimulatedRun]()
    for rank in plan.shape.firsts(machine.ranks):
        recording = Recording("plan", rank, machine.ranks)
        clock, world = partial(recorded, recording), machine.ranks
        memory = least = simulate(program, rank, world, clock, late=True, device=on_device, stage_outputs=messages)
        if machine.ranks > 1 and memory.at_peak.get(TRANSIT) and _too_large(memory, machine):
            least = simulate(program, rank, machine.ranks, device=on_device, stage_outputs=messages)
        runs.append(SimulatedRun(memory, least, recording, steps, config))
    if messages and stages == 1:
        raise NotAvailableError("a model, or a JSON, that has its own pipeline stages cannot be planned: remove them")
    crossing = max((message.header.nbytes for message in messages.values()), default=0)
    return replace(runs[0], others=tuple(runs[1:]), crossing=crossing)


def judge(task: Task, plan: TrainingPlan, machine: Machine) -> Judged:
    """Predict one plan; an error becomes the reason to drop the plan."""
    try:
        return verdict(plan, simulated(task, plan, machine), machine)
    except Exception as error:  # any model, any key: a plan that cannot be made is no plan
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return Judged(plan, reason=f"{type(error).__name__}: {first}"[:300])


def verdict(plan: TrainingPlan, run: SimulatedRun, machine: Machine) -> Judged:
    """Predict the memory and time of a plan on a machine from its simulated run."""
    worst = max(run.stages, key=lambda each: device_bytes(each.memory, machine))
    memory, entries = worst.memory, run.recording.entries
    if plan.shape.width > plan.shape.stages and not any(entry.kind == MESSAGE for entry in entries):
        return Judged(plan, memory, reason=WHOLE)
    share = plan.steps / run.steps / _UPDATES
    flops = max(sum(entry.flops for entry in each.recording.entries) for each in run.stages) * share
    rests = [_step_time(plan, each.memory, machine, each.recording, share, run.config) for each in run.stages]
    took = _of_stages(plan, run, machine, rests) if run.others else rests[0]
    full, why = next(((e, lack) for e in (worst, *run.stages) if (lack := _too_large(e.memory, machine))), (worst, ""))
    perhaps = not any(_too_large(each.least, machine) for each in run.stages)
    least = max(device_bytes(each.least, machine) for each in run.stages)
    if why and run.others:
        why = f"stage {run.stages.index(full)} {why}"
    if why and perhaps:
        why = f"{why}; {least / 2**30:.2f} while ranks keep step"
    return Judged(plan, memory, took, not why, perhaps, why, flops, least=least)


def _of_stages(plan: TrainingPlan, run: SimulatedRun, machine: Machine, rests: list[StepTime]) -> StepTime:
    """Return the time of a pipeline's update, from the time of each stage."""
    ranks = plan.shape.firsts(machine.ranks)
    schedule = schedule_of(run.config, plan.shape.stages, plan.steps)
    phases = [seconds_of_phases(each.recording, machine) for each in run.stages]
    copies = sum(each.memory.held for each in run.stages) - run.memory.parameters  # elements that several stages have
    tied = sum(machine.message("all_reduce", _itemsize(run.config) * copies, (0, ranks[-1]))) if copies > 0 else 0.0
    on_link, besides = machine.message("send", float(run.crossing), (ranks[0], ranks[1]))
    way = besides if machine.shared else on_link + besides  # shared memory is read in place
    return window_time(schedule, phases, rests, way, tied)


def _itemsize(config: dict[str, Any]) -> int:
    return 2 if any(block_of(config, name).get("enabled") for name in ("bf16", "fp16")) else 4


def device_bytes(memory: MemoryCount, machine: Machine) -> int:
    """Return a rank's peak bytes on its device, or in host memory if the machine has no devices."""
    held = memory.on_host if machine.link else 0
    # Host memory is allocated with the engine, except the optimizer states, which the first update creates.
    early = held - memory.host.get("optimizer", 0) if machine.link else 0
    return max(memory.peak - held, memory.birth - early)


def _too_large(memory: MemoryCount, machine: Machine) -> str:
    """Return why the memory of the device or host is too small, with the largest category; "" if it suffices."""
    near, far = device_bytes(memory, machine), memory.on_host if machine.link else 0
    parts = {name: count - memory.host.get(name, 0) * bool(machine.link) for name, count in memory.at_peak.items()}
    if near > machine.memory:
        where, needs, there = "" if not machine.link else " of the device", near, machine.memory
    elif machine.host_memory and far > machine.host_memory:
        where, needs, there, parts = " of the host", far, machine.host_memory, memory.host
    else:
        return ""
    category = max(parts, key=lambda name: parts[name])
    return f"needs {needs / 2**30:.2f} GiB{where} of {there / 2**30:.2f}, most of it {category}"


def _step_time(
    plan: TrainingPlan,
    memory: MemoryCount,
    machine: Machine,
    recording: Recording,
    share: float,
    config: dict[str, Any],
) -> StepTime:
    rest, policy = memory.at_rest, policy_for(plan.stage)
    itemsize, ranks = _itemsize(config), plan.shape.shard_ranks(machine.ranks)
    sliced = plan.shape.tensor > 1 or plan.shape.stages > 1
    parameters = memory.held if sliced else memory.parameters
    ep = DeepSpeedConfig.for_init(config).expert_parallel_size
    experts = 0 if sliced else memory.experts
    turns = moves(policy, plan.steps)
    messages = plan.shape.message_bytes(
        parameters * itemsize, machine.ranks, *turns, experts * itemsize, 1 if sliced else ep
    )
    state = memory.disk or rest.get("masters", rest.get("parameters", 0)) + rest.get("optimizer", 0)
    traffic = 2 * state + 2 * rest.get("gradients", 0)
    moved = 2 * memory.disk  # read and written once per update; parameters are also read in forward and backward
    gathered = 2 * plan.steps * parameters * itemsize / len(ranks)
    moved += gathered if plan.tier == ALL else 0
    link = 0.0
    if machine.link and plan.tier != ON_DEVICE:  # gradients go to the host, updated values to the device
        reductions = plan.steps if policy.reduces_as_gradients_arrive else 1
        down = reductions * 4 * parameters / len(ranks)
        up = gathered if plan.tier in _WITH_PARAMETERS else parameters * itemsize / len(ranks)
        link = max(down, up)
    besides = UpdateTraffic(messages, traffic, moved if memory.disk else 0.0, link, tuple(ranks))
    return step_time(recording, share, _UPDATES, machine, besides)


@young_objects()
def search(
    task: Task,
    machine: Machine,
    seconds: float = 300.0,
    report: Callable[[Judged], None] = lambda _judged: None,
    allowed: Callable[[TrainingPlan], bool] = lambda _plan: True,
    axes: bool = False,
) -> list[Judged]:
    """Predict plans of all kinds until none is left or the time is over.

    Args:
        task: the run.
        machine: the machine.
        seconds: time limit; at least one plan is predicted.
        report: called with each plan right after its prediction.
        allowed: returns whether a plan may be tried.
        axes: whether to try plans of `mesh_plans` too; ignored if the configuration sets an axis or is invalid.

    Returns:
        plans that fit, fastest first; plans that may fit; plans that do not fit or were not predicted.

    Raises:
        ArgumentError: the ranks cannot divide the global batch.
    """
    end = time.monotonic() + seconds
    plans = legal_plans(task.train_batch, machine)
    if axes and machine.ranks > 1 and not asks_for_axes(task.config):
        plans += mesh_plans(task.train_batch, machine, experts=task.has_experts())
    plans = [plan for plan in plans if allowed(plan)]
    # Kinds take turns, so that every kind is tried before the time is over. Small micro-batches first; with another
    # mesh axis large ones first, since no smaller one is tried after the first that fits.
    kinds: dict[tuple[Any, ...], list[TrainingPlan]] = {}
    for plan in sorted(plans, key=lambda plan: plan.micro if plan.shape == DATA_PARALLEL else -plan.micro):
        kinds.setdefault((plan.stage, plan.tier, plan.recompute, plan.shape), []).append(plan)
    known: dict[TrainingPlan, Judged] = {}
    for plan in (plan for row in itertools.zip_longest(*kinds.values()) for plan in row if plan is not None):
        if known and time.monotonic() > end:
            known[plan] = Judged(plan, reason="not looked at: the time was over")
            continue
        tries = [plan]
        for each in tries:
            smaller = [judged for other, judged in known.items() if other.holds_less_than(each)]
            too_large = next((judged for judged in smaller if judged.memory is not None and not judged.perhaps), None)
            others = [judged for other, judged in known.items() if other.shape == each.shape != DATA_PARALLEL]
            uncut = next((judged.reason for judged in others if judged.reason.startswith(_UNCUT)), "")
            why = uncut or _is_slower(each, known)
            if why:
                known[each] = Judged(each, reason=why)
            elif too_large is None:
                known[each] = judge(task, each, machine)
                report(known[each])
            else:
                known[each] = Judged(each, reason="a plan that holds less does not fit either")
            narrow = replace(plan, bucket=NARROW)
            if each is plan and _narrows(task, narrow, too_large or known[plan], machine) and allowed(narrow):
                tries.append(narrow)
    return sorted(known.values(), key=lambda judged: judged.worth)


def _is_slower(plan: TrainingPlan, known: dict[TrainingPlan, Judged]) -> str:
    """Return the reason to skip a plan with another mesh axis: a plan with a larger micro-batch or without recompute
    fits; "" for none. Of pipelines with equal recompute, `_LARGEST` must fit: small micro-batches reduce waiting."""
    if plan.shape == DATA_PARALLEL:
        return ""
    larger = []
    for other, judged in known.items():
        alike = replace(other, micro=plan.micro, steps=plan.steps, recompute=plan.recompute) == plan
        if judged.fits and alike and other.micro >= plan.micro and other.recompute <= plan.recompute:
            larger.append(other)
    without = any(other.recompute < plan.recompute for other in larger)
    if len(larger) < (_LARGEST if plan.shape.stages > 1 and not without else 1):
        return ""
    return f"not looked at: {larger[0].name} fits"


def _narrows(task: Task, narrow: TrainingPlan, usual: Judged, machine: Machine) -> bool:
    """Return whether `narrow` may fit if `usual` does not: gradients are reduced during backward, and state fits."""
    if usual.fits or usual.memory is None or not policy_for(narrow.stage).reduces_as_gradients_arrive:
        return False
    own = block_of(load_raw(task.config), "zero_optimization").get("reduce_bucket_size", math.inf)
    if isinstance(own, (int, float)) and own <= NARROW:
        return False
    far = usual.memory.on_host if machine.link else 0
    resting = sum(count for name, count in usual.memory.at_rest.items() if name != "transit") - far
    return max(usual.memory.birth - far, resting) <= machine.memory


MOST = 5
"""Maximum number of trials."""
DARING = 2
"""Maximum number of trials for plans that fit only if ranks run in lockstep."""


@dataclass(frozen=True)
class Answer:
    """Result of a search.

    Args:
        best: the fastest measured plan. Without measurements: the best predicted plan that was not tried, or whose
            trial failed for another reason than memory; None if no plan fits.
        judged: all plans: measured ones by time, then untried ones, those with failed trials, and those that do not
            fit.
    """

    best: Judged | None
    judged: list[Judged]

    @property
    def confirmed(self) -> bool:
        """Return whether the best plan was measured."""
        return self.best is not None and self.best.trial is not None and not self.best.trial.reason

    def best_time(self) -> str:
        """Format the time of the best plan, measured or predicted; "nothing" if no plan fits."""
        best = self.best
        if best is None:
            return "nothing"
        if best.trial is not None and best.trial.seconds is not None:
            return f"{best.trial.seconds * 1e3:,.1f} ms measured ({best.seconds * 1e3:,.1f} predicted)"
        failed = any(each.trial is not None for each in self.judged)
        return f"{best.seconds * 1e3:,.1f} ms predicted{', not confirmed: no trial came to an end' if failed else ''}"


def confirm(
    judged: list[Judged],
    run: Callable[[TrainingPlan], TrialOutcome],
    most: int = MOST,
    report: Callable[[Judged], None] = lambda _judged: None,
) -> Answer:
    """Run trials of the fastest predicted plans: those that fit, and up to `DARING` that may fit.

    Args:
        judged: result of `search`.
        run: runs the trial of a plan.
        most: maximum number of trials; never more than `MOST`.
        report: called with each plan after its trial.
    """
    tried: dict[TrainingPlan, Judged] = {}
    too_large: list[TrainingPlan] = []
    daring = 0
    for each in sorted((each for each in judged if each.fits or each.perhaps), key=lambda each: each.seconds):
        if len(tried) >= min(most, MOST):
            break
        if (not each.fits and daring >= DARING) or any(plan.holds_less_than(each.plan) for plan in too_large):
            continue  # it needs more memory than a plan that ran out of memory
        daring += not each.fits
        outcome = run(each.plan)
        tried[each.plan] = replace(each, trial=outcome, reason=outcome.reason)
        if outcome.out_of_memory:
            too_large.append(each.plan)
        report(tried[each.plan])
    after = [tried.get(each.plan, each).after_trials(too_large) for each in judged]
    after.sort(key=lambda each: each.worth_after_trials)
    return Answer(after[0] if after and after[0].fits else None, after)


def table(judged: list[Judged], most: int = 40, machine: Machine | None = None) -> str:
    """Format the plans as text, the best first.

    Args:
        judged: the plans.
        most: maximum number of plans.
        machine: the plans' machine: samples per second are those of all its ranks; with a device, memory is device +
            host memory. None: samples per second of one rank.
    """
    ranks = 1 if machine is None else machine.ranks
    tried = any(each.trial is not None for each in judged)
    measured = f" {'measured':>10s}" if tried else ""
    lines = [f"{'plan':34s} {'predicted':>10s}{measured} {'samples/s':>10s} {'memory':>14s} {'limit':>9s}  reason"]
    for each in judged[:most]:
        size, memory = "–", each.memory
        if memory is not None and machine is not None and machine.link:
            size = f"{device_bytes(memory, machine) / 2**30:.2f}+{memory.on_host / 2**30:.2f} GiB"
        elif memory is not None:
            size = f"{max(memory.peak, memory.birth) / 2**30:.2f} GiB"
        took = None if each.trial is None else each.trial.seconds
        measured = f" {_ms(took):>10s}" if tried else ""
        seconds = None if each.time is None else each.seconds
        rate = "–" if seconds is None else f"{ranks * each.plan.samples / (took or seconds):.2f}"
        limit = "" if each.time is None else each.time.limit
        lines.append(
            f"{each.plan.name:34s} {_ms(seconds):>10s}{measured} {rate:>10s} {size:>14s} {limit:>9s}  {each.reason}"
        )
    if len(judged) > most:
        lines.append(f"… and {len(judged) - most} more")
    rates = "samples/s are measured where a time of a step is, and predicted elsewhere" if tried else "samples/s too"
    lines.append(f"predicted: the time of a step in the column of that name, memory, limit; {rates}")
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.1f} ms"
