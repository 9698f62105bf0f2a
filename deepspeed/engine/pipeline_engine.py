"""Pipeline engine: `train_batch` runs all micro-batches of an update, in place of forward, backward and step.

In `train_batch` a stage runs its actions of the schedule (`deepspeed/pipe/executor.py`), and then the same update as
any engine at the end of a window.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from deepspeed.comm.collectives import scalars
from deepspeed.comm.collectives.collectives import SMALL
from deepspeed.comm.collectives.same_error import BatchCheck
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import tag_of
from deepspeed.comm.process_groups.mesh import DATA, REPLICATED, Mesh
from deepspeed.engine.client_support import loss_is_divided
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.expert_parallel import divide_layers_of
from deepspeed.engine.metrics import FORWARD
from deepspeed.engine.pipeline_batches import AgreedWindow, WindowDriver, WindowReport, agree, take
from deepspeed.engine.pipeline_setup import check_model, generate, stage_model, staying
from deepspeed.engine.train_loop import Window
from deepspeed.errors import ArgumentError, NotAvailableError, PipelineError
from deepspeed.foundation.fake_mode import STEP, enter
from deepspeed.foundation.log import log_rank0
from deepspeed.pipe.executor import Count, Executor, ModelPart, check_shared
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.schedule import INFERENCE, PipelineSchedule, make_schedule
from deepspeed.pipe.schedule_simulator import ScheduleCost, simulate
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.api.materialize import materialize
from deepspeed.zero.gradients.sparse_rows import tables
from deepspeed.zero.layout.placement import Relation, placement_of

_REDUCTIONS = ("avg", "sum", None)


@functools.lru_cache(maxsize=16)
def validated(name: str, stages: int, micros: int, chunks: int) -> PipelineSchedule:
    """Create a schedule, and check it with a simulated run; arguments and errors as in `make_schedule`."""
    schedule = make_schedule(name, stages, micros, chunks)
    simulate(schedule)
    return schedule


class PipelineEngine(DeepSpeedEngine):
    """Engine that trains a model whose layers are split into pipeline stages. Arguments as in `DeepSpeedEngine`.

    Raises NotAvailableError if the JSON or the mesh has a feature that pipelines do not support, such as `sp`.

    Example:
        >>> engine, _, _, _ = deepspeed.initialize(model=model, config={"pipeline": {"stages": 2}, …})
        >>> loss = engine.train_batch(iter(batches))
    """

    _parts: list[ModelPart]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mesh, section = self.mesh, self.ds_config.top.pipeline
        axis = mesh.axis("pp")
        self._chunks = len(self._parts)
        self.num_stages, self.stage_id = axis.size, axis.rank
        self._name = "interleaved" if self._chunks > 1 and section.schedule == "1f1b" else section.schedule
        for part in self._parts:
            part.cast(self._components.dtype)
        self._log_held(self.schedule(self.gradient_accumulation_steps()))
        divided, lookups = loss_is_divided(self.module), tables(self.module)
        self._driver = WindowDriver(self._parts, self._window, divided, lookups)
        self._executor = Executor(axis, self._driver, ring=self._chunks > 1, device=self.device)
        self._channel, self._sums = self._axes.everyone.channel(), 0
        self._same = [BatchCheck(axis, "are stages of one pipeline (pp)"), self._same_batches]
        self._compares_shared = axis.size > 1
        self.metrics: dict[str, float] = {}  # of the last window: means over micro-batches and replicas, on all ranks
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None

    def _cut(self, model: Any, config: Any, mesh: Any, mpu: Any, optimizer: Any, parameters: Any) -> Any:
        if mesh.size("sp") > 1:
            nearest = f"{self._without(mesh, 'sp')} and {self._without(mesh, 'pp')}"
            raise NotAvailableError(
                f"pipeline stages together with ranks that share a sequence (sp) are not available yet: of "
                f"{mesh.describe()} the nearest that can be had are {nearest}"
            )
        without_values = check_model(model, config, mesh, optimizer)
        if not isinstance(model, PipelineModule):
            if without_values:
                materialize(model, mesh.axis(*REPLICATED, "pp"), mesh.device or torch.device("cpu"))
            parameters = super()._cut(model, config, mesh, mpu, optimizer, parameters)
        elif mpu is None and mesh.size("tp") > 1:
            raise NotAvailableError(
                f"layers of a PipelineModule are not split over ranks (tp): each rank has its own stage's only, and "
                f"what can be split is seen in a forward of the whole model. Of {mesh.describe()} the nearest that can "
                f"be had is {self._without(mesh, 'tp')}; or hand over an unedited model, or layers that hold slices, "
                f"with an mpu"
            )
        if isinstance(model, PipelineModule):
            if config.expert_parallel_size > 1:
                raise NotAvailableError(
                    "expert_parallel does not divide the layers of a PipelineModule, of which a rank has its own "
                    "stage's only: hand over an unedited model, or use deepspeed.moe.layer.MoE with ep_size"
                )
            divide_layers_of(model, config, mesh)
        self._parts = stage_model(model, config, mesh, optimizer)
        return staying(model, parameters)

    @staticmethod
    def _log_held(schedule: PipelineSchedule) -> None:
        """Log how many micro-batches' activations stages store, for a schedule that postpones weight gradients."""
        if schedule.splits:
            cost, plain = simulate(schedule), simulate(make_schedule("1f1b", schedule.stages, schedule.micros))
            together, later, one_f_one_b = (
                ", ".join(map(str, numbers)) for numbers in (cost.peaks, cost.put_off, plain.peaks)
            )
            log_rank0(
                f"{schedule.name}: stages hold at most {together} micro-batches (1f1b: {one_f_one_b}). Of {later} of "
                f"those backward is through, and what the gradients of weights need is held: inputs and gradients of "
                f"matrix products"
            )

    @staticmethod
    def _without(mesh: Mesh, dim: str) -> str:
        """Describe the sizes of a mesh in which the ranks along `dim` are data-parallel instead, for an error."""
        sizes = {"pp": mesh.size("pp"), "dp": mesh.size(*DATA, dim), "sp": mesh.size("sp"), "tp": mesh.size("tp")}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 and name != dim)

    def schedule(self, micros: int, training: bool = True) -> PipelineSchedule:
        """Return the schedule: the actions of all stages for an update, or for an evaluation. It prints as text.

        Args:
            micros: number of micro-batches.
            training: False: evaluation.

        Raises:
            ArgumentError: the schedule does not support this number.
        """
        name = self._name if training else INFERENCE
        return validated(name, self.num_stages, micros, self._chunks)

    def simulated(self, micros: int) -> ScheduleCost:
        """Simulate the schedule of an update with `micros` micro-batches; returns time, activations and idle fraction.

        Raises:
            ArgumentError: the schedule does not support this number.
        """
        return simulate(self.schedule(micros), self._parts[0].costs)

    # -- windows --------------------------------------------------------------------------------------------------

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, num_items: Callable[[Any], float] | None = None
    ) -> torch.Tensor:
        """Train on a window: `gradient_accumulation_steps` micro-batches, then an update. All ranks must call this.

        Args:
            data_iter: iterator over this rank's micro-batches, equal on all stages; a PipelineModule needs them on its
                first and last stage only. None: the iterator of `set_dataiterator`, else `training_data`. A window
                of `loop` may have fewer micro-batches.
            num_items: returns the number of items (tokens) of a micro-batch; losses are then sums over items, and the
                gradient is that of the total loss divided by the total number. None: losses are means with equal
                weights.

        Returns:
            The mean loss of the window over all data-parallel ranks (with `num_items` over all items), 0-d fp32 on the
            CPU, the same on every rank.

        Raises:
            ArgumentError: this rank needs data, and `data_iter` is not an iterator or there is none.
            DataError: a rank's data ended before the window was full, or another rank's failed; nothing was computed.
            PipelineError: a stage failed (the message has its layers and micro-batch), or a rank is in evaluation mode
                or inside `no_sync`.
            UsageError: the engine has no optimizer, `num_items` is passed with a window of `loop`, or windows differ.
        """
        if self._components.destroyed:
            raise self._components.without_optimizer("train_batch")
        self._keywords.begin_window()
        window = self._window
        counted: list[float] = []

        def count(batches: list[Any]) -> None:
            if num_items is not None and self.is_last_stage():
                counted.extend(float(num_items(batch)) for batch in batches)

        agreed = self._fetch(data_iter, None, count if num_items is not None else None, refused=self._refusal())
        batches, steps = agreed.batches, len(agreed.batches)
        self._driver.samples = self._of_last_stage(agreed.samples)
        self._driver.items = self._of_last_stage(counted) if agreed.items else self._driver.samples
        self._before_micro_batch()
        self._instruments.throughput.start()
        with self._timed(FORWARD):
            losses = self._run(batches, training=True)
        window.force(None)
        for _ in range(steps):
            self.micro_steps += 1
            window.end_micro_batch()
        self._applied = False
        mean = self._count(losses, steps)
        self._instruments.on_window(mean, batches if self.is_first_stage() else (), self.num_stages, self.metrics)
        enter(STEP)
        with contextlib.nullcontext() if steps == window.steps else window.flush():
            self._update(None)
        if self._compares_shared and self._applied:
            self._compares_shared = False
            self._compare_shared()
        self._end_step()
        return mean

    def _compare_shared(self) -> None:
        """Raise PipelineError if parameters shared by stages (tied) differ between stages. All ranks must call this."""
        shared: dict[str, torch.Tensor] = {
            name: param
            for name, param in self.module.named_parameters()
            if placement_of(param).relations.get("pp") is Relation.PARTIAL
        }
        with GatheredParameters(list(shared.values())):
            check_shared(shared, self.mesh.axis("pp"))

    def _of_last_stage(self, numbers: list[float] | None) -> list[float] | None:
        """Return the last stage's `numbers`; None if `numbers` is None. All ranks must call this."""
        return None if numbers is None else all_gather_objects(self.mesh.axis("pp"), numbers)[-1]

    def _refusal(self) -> Exception | None:
        """Return the error that prevents training on this rank, or None."""
        if self._components.optimizer is None:
            return self._components.without_optimizer("train_batch")
        if not self.training:
            return PipelineError("train_batch() of an engine in evaluation mode; call engine.train() first")
        if self._window.holding:
            return PipelineError(
                "train_batch() inside no_sync(): a window ends with the gradients of all its micro-batches"
            )
        return None

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate micro-batches, without gradients and in evaluation mode. All ranks must call this.

        Args:
            data_iter: as in `train_batch`.
            return_logits: return (loss, outputs by micro-batch); outputs are None on all but the last stage.
            compute_loss: False: return only outputs.
            reduce_output: reduction over micro-batches: "avg", "sum", or None for a list. Over ranks: the mean.
            bcast_loss: True: every rank gets the loss; False: only the last stage, and others None.
            num_micro_batches: number of micro-batches; None: as in training.

        Returns:
            The loss, 0-d fp32 on the CPU (a list with one per micro-batch without reduction); see `return_logits`.

        Raises:
            ArgumentError: `reduce_output` is unknown, or `data_iter` is not an iterator.
            DataError: a rank's data ended early, or another rank's failed.
            UsageError: ranks make different calls.
            PipelineError: a stage failed.
        """
        refused = None
        if reduce_output not in _REDUCTIONS:
            refused = ArgumentError(f"reduce_output is {reduce_output!r}; it is one of {_REDUCTIONS}")
        agreed = self._fetch(data_iter, num_micro_batches, trains=False, refused=refused)
        training = self.training
        batches = agreed.batches
        self.eval()
        try:
            stage_outputs = self._run(batches, training=False)
        finally:
            self.train(training)
        outputs = stage_outputs if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        loss: Any = self._evaluated(stage_outputs, batches, self._of_last_stage(agreed.samples), reduce_output)
        if not bcast_loss and not self.is_last_stage():
            loss = None
        return (loss, outputs) if return_logits else loss

    def _evaluated(
        self, outputs: list[Any], batches: list[Any], samples: list[float] | None, reduce_output: str | None
    ) -> Any:
        """Return the loss of `eval_batch`, on all ranks, from the last stage's outputs. All ranks must call this."""
        last, weights, batch_losses = self._parts[-1], samples or [1.0] * len(batches), list[torch.Tensor]()
        counted = 0.0
        for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            losses, problem = list[torch.Tensor](), None
            try:
                if outputs:
                    with torch.no_grad():
                        losses.append(last.loss(outputs[index], batch).detach() * weight)
                    self._driver.means.add(last.metrics, weight)
            except Exception as error:  # raised once every rank knows
                problem = error
            counts = self._gather_counts(losses, "loss of an evaluation", weight if samples else 0.0, problem)
            share = sum(count.items for count in counts if count.losses) if samples else 1.0
            batch_losses.append(torch.tensor(Count.mean_loss(counts) * (1.0 if reduce_output is None else share)))
            counted += share
        self._note_metrics(counts)
        if reduce_output is None:
            return batch_losses
        return torch.stack(batch_losses).sum() / (counted if reduce_output == "avg" else counted / len(batches))

    def _run(self, batches: list[Any], training: bool) -> list[Any]:
        self._driver.begin(batches, training)
        short = training and len(batches) < self._window.steps and self._name == "interleaved"
        if short and len(batches) % self.num_stages:  # the last window of a loop, which is not a multiple of the stages
            schedule = validated("gpipe", self.num_stages, len(batches), self._chunks)
        else:
            schedule = self.schedule(len(batches), training)
        try:
            with self._autocast():
                return self._executor.run(schedule, training)
        finally:
            self._driver.batches = []

    def _gather_counts(
        self, losses: list[torch.Tensor], label: str, items: float = 0.0, problem: Exception | None = None
    ) -> list[Count]:
        """Gather every rank's counts of the window, with its `losses` and number of `items`. All ranks must call this.

        If `problem` is not None on one rank, all raise: that rank its problem, the others PipelineError.
        """
        self._sums += 1
        mean = float(torch.stack([loss.float() for loss in losses]).mean()) if losses else 0.0
        ran = self._driver.ran
        local_count = Count(
            mean, len(losses), items, self.stage_id, self.global_steps, ran["forward"], ran["backward"],
            len(self._driver.means), float(problem is not None),
        )  # fmt: skip
        tag = tag_of(self._channel, SMALL, self._sums)
        table = scalars.current.table(self._axes.everyone, list(local_count), tag, label, self.device)
        if problem is not None:
            raise problem
        counts = [Count(*row) for row in table]
        failed = [rank for rank, count in zip(self._axes.everyone.ranks, counts, strict=True) if count.failed]
        if failed:
            raise PipelineError(f"the loss on rank {failed[0]} failed; see its traceback")
        return counts

    def _note_metrics(self, counts: list[Count]) -> None:
        """Set `metrics` on all ranks to the last stage's means; `counts`: result of `_gather_counts`. Collective."""
        has_metrics = any(count.metrics for count in counts)
        self.metrics = self._driver.means.over(self._axes.everyone) if has_metrics else {}

    def _count(self, losses: list[torch.Tensor], micros: int) -> torch.Tensor:
        """Return the mean loss of an update's micro-batches over all ranks, 0-d. All ranks must call this."""
        counts = self._gather_counts(losses, "mean loss of a window", sum(self._driver.items or ()))
        Count.check(counts, self.num_stages, micros, self._chunks)
        self._note_metrics(counts)
        return torch.tensor(Count.mean_loss(counts))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `generate`, with forward passes through all stages. All ranks must call this.

        Each new token needs a pass over the whole sequence, without a KV cache: suited for samples during training,
        slow otherwise. All ranks use the random state of the first stage. Arguments and result are the model's.

        Raises:
            PipelineError: the model has no `generate`, or a pass failed.
        """

        def outputs_of(inputs: dict[str, Any]) -> Any:
            outputs = self.eval_batch(iter([inputs]), compute_loss=False, num_micro_batches=1)
            return outputs[0] if outputs else None

        training = self.training
        self.eval()
        try:
            return generate(self.module, self.mesh.axis("pp"), outputs_of, args, kwargs)
        finally:
            self.train(training)

    # -- data -----------------------------------------------------------------------------------------------------

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator of micro-batches for `train_batch()` without an argument."""
        self._iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set a loader for `train_batch()` without an argument; it is restarted whenever it ends."""
        self.training_dataloader, self._iterator = loader, self._endless(loader)

    def reset_activation_shape(self) -> None:
        """Do nothing: stages send shapes with their values, so batches may differ in theirs."""

    @staticmethod
    def _endless(loader: Any) -> Iterator[Any]:
        while True:
            empty = True
            for batch in loader:
                empty = False
                yield batch
            if empty:
                return

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set a function that maps each micro-batch of the iterator to the micro-batch that is used."""
        self._batch_fn = fn

    def _fetch(
        self,
        data_iter: Iterator[Any] | None,
        count: int | None,
        items: Callable[[list[Any]], None] | None = None,
        trains: bool = True,
        refused: Exception | None = None,
    ) -> AgreedWindow:
        """Read the micro-batches of a window and agree on it. All ranks must call this; see `pipeline_batches.agree`.

        Args:
            count: number of micro-batches; None: those of a `Window`, else as in training.
            items: called with the micro-batches to count their items.
        """
        reads = any(part.reads_batch for part in self._parts)
        if data_iter is None and reads:
            if self._iterator is None and self.training_dataloader is not None:
                self._iterator = self._endless(self.training_dataloader)
            data_iter = self._iterator
        wanted = count or (len(data_iter) if isinstance(data_iter, Window) else self._window.steps)

        def read() -> list[Any]:
            batches = take(data_iter, wanted, self._batch_fn, self.device)
            if items is not None:
                items(batches)
            return batches

        counts = items is not None
        agreed = agree(data_iter, wanted, counts, read if reads else None, self._gather_window_reports, trains, refused)
        for same in self._same:
            for batch in agreed.batches[: same.left]:
                same.compare(batch, in_parts=isinstance(self.module, PipelineModule))
        return agreed

    def _gather_window_reports(self, report: WindowReport) -> list[WindowReport]:
        """Gather every rank's report of a window before it starts. All ranks must call this."""
        self._sums += 1
        tag, label = tag_of(self._channel, SMALL, self._sums), "agreement on the micro-batches of a window"
        table = scalars.current.table(
            self._axes.everyone, [float(number) for number in report], tag, label, self.device
        )
        return [WindowReport(*row) for row in table]

    # -- queries --------------------------------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """Return whether this rank is on the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank is on the last stage."""
        return self.stage_id == self.num_stages - 1

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches per update (`gradient_accumulation_steps`)."""
        return self._window.steps

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise PipelineError: in a pipeline, only `train_batch` and `eval_batch` run forward."""
        raise PipelineError(
            "only train_batch() and eval_batch() run a pipeline: forward() of one stage is half a model"
        )

    def backward(self, *_: Any, **__: Any) -> Any:
        """Raise PipelineError: in a pipeline, only `train_batch` runs backward."""
        raise PipelineError("backward() of a pipeline is a part of train_batch()")

    def loop(  # type: ignore[override]
        self, loader: Iterable[Any] | None = None, policy: str = "drop", progress: bool | None = None
    ) -> Iterator[Window]:
        """Yield windows of `loader`, the same number on every rank, for `train_batch` and `eval_batch`.

        A window has `gradient_accumulation_steps` micro-batches, the last one maybe fewer. Means are over real samples.

        Args:
            loader: this rank's loader of any length, equal on all stages; None: `training_dataloader`. Stages of a
                PipelineModule that need no data ignore it.
            policy: "drop": end with the shortest loader; "pad", "cycle": with the longest, while others repeat the last
                batch with weight 0 or restart.
            progress: show a live line on rank 0; None: only if the launcher has `--progress`.

        Raises:
            ArgumentError: this rank's loader is missing.
            DataError: another rank's loader is missing or fails, a loader has no batch, or the policy is unknown.

        Example:
            >>> for window in engine.loop(loader):
            ...     loss = engine.train_batch(window)
        """
        if not any(part.reads_batch for part in self._parts):
            loader = None
        elif loader is None:
            loader = self.training_dataloader if self.training_dataloader is not None else _MissingLoader()
        return self._feeding.windows(loader, policy, progress)

    def step(self, *_: Any, **__: Any) -> None:
        """Raise PipelineError: in a pipeline, only `train_batch` updates the parameters."""
        raise PipelineError("step() of a pipeline is a part of train_batch()")


class _MissingLoader:
    """Placeholder for a missing loader: iteration raises ArgumentError, so that `equal_steps` raises on every rank."""

    def __iter__(self) -> Iterator[Any]:
        raise ArgumentError("loop() needs a loader: there is no training_data either")
