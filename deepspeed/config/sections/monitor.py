"""`comms_logger`, `timers`, the monitors and `flops_profiler`: what a run tells of itself."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.fields import Int, Names, Section, key, later


class CommsLogger(Section):
    """`comms_logger`: time and size of every collective."""

    enabled: bool = key(False, "record collectives")
    verbose: bool = key(False, "print every collective as it runs")
    prof_all: bool = key(True, "record all operations")
    prof_ops: Names = key([], "operations to record when prof_all is false")
    debug: bool = key(False, "name the caller")


class Throughput(Section):
    """`timers.throughput`."""

    enabled: bool = key(True, "measure samples per second")
    synchronized: bool = key(True, "wait for the device at each measurement")


class Timers(Section):
    """`timers`."""

    throughput: Throughput = key(Throughput, "samples per second")


class TensorBoard(Section):
    """`tensorboard`."""

    switch = "enabled"
    enabled: bool = later(False, "write events for TensorBoard")
    output_path: str = later("", "folder of the event files")
    job_name: str = later("DeepSpeedJobName", "folder of this run")


class WandB(Section):
    """`wandb`."""

    switch = "enabled"
    enabled: bool = later(False, "send events to Weights & Biases")
    group: str | None = later(None, "group of runs")
    team: str | None = later(None, "team")
    project: str = later("deepspeed", "project")


class Comet(Section):
    """`comet`."""

    switch = "enabled"
    enabled: bool = later(False, "send events to Comet")
    samples_log_interval: Int = later(100, "samples between events", ge=1)
    project: str | None = later(None, "project")
    workspace: str | None = later(None, "workspace")
    api_key: str | None = later(None, "key of the account")
    experiment_name: str | None = later(None, "name of the experiment")
    experiment_key: str | None = later(None, "key of the experiment")
    online: bool | None = later(None, "send while training")
    mode: Literal["get", "create", "get_or_create"] | None = later(None, "continue or create the experiment")


class CsvMonitor(Section):
    """`csv_monitor`."""

    switch = "enabled"
    enabled: bool = later(False, "write events to CSV files")
    output_path: str = later("", "folder of the files")
    job_name: str = later("DeepSpeedJobName", "folder of this run")


class FlopsProfiler(Section):
    """`flops_profiler`."""

    switch = "enabled"
    enabled: bool = later(False, "count floating-point operations per module")
    recompute_fwd_factor: float = later(0.0, "share of forward that is recomputed", ge=0)
    profile_step: Int = later(1, "step that is profiled", ge=1)
    module_depth: Int = later(-1, "depth of the printed tree; -1 is all", ge=-1)
    top_modules: Int = later(1, "modules listed per depth", ge=1)
    detailed: bool = later(True, "print every module")
    output_file: str | None = later(None, "file instead of stdout")
