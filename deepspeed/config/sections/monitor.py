"""`comms_logger`, `timers`, the monitors and `flops_profiler`: metrics and logs of a run."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.base_model import Int, Names, Section, key, moot


class CommsLoggerConfig(Section):
    """Block `comms_logger`: time and size of every collective."""

    enabled: bool = key(False, "record collectives")
    verbose: bool = key(False, "print every collective as it runs")
    prof_all: bool = key(True, "record all operations")
    prof_ops: Names = key([], "operations to record when prof_all is false")
    debug: bool = key(False, "name the caller")
    curve: str | None = key(None, "file of ds_bench, to compare the measured with the possible bandwidth")


class Throughput(Section):
    """Block `timers.throughput`: measurement of samples per second."""

    enabled: bool = key(True, "measure samples per second")
    synchronized: bool = key(True, "wait for the device at each measurement")


class Timers(Section):
    open_names = True
    throughput: Throughput = key(Throughput, "samples per second")


class TensorBoard(Section):
    enabled: bool = key(False, "write events for TensorBoard")
    output_path: str = key("", "folder of the event files; empty: the working directory")
    job_name: str = key("DeepSpeedJobName", "folder of this run")


class WandB(Section):
    enabled: bool = key(False, "send events to Weights & Biases; offline with WANDB_MODE")
    group: str | None = key(None, "group of runs")
    team: str | None = key(None, "team")
    project: str = key("deepspeed", "project")


class Comet(Section):
    enabled: bool = key(False, "send events to Comet")
    samples_log_interval: Int = key(100, "samples between two events of one name", ge=1)
    project: str | None = key(None, "project")
    workspace: str | None = key(None, "workspace")
    api_key: str | None = key(None, "key of the account")
    experiment_name: str | None = key(None, "name of the experiment")
    experiment_key: str | None = key(None, "key of the experiment")
    online: bool | None = key(None, "send while training; false: an archive in COMET_OFFLINE_DIRECTORY")
    mode: Literal["get", "create", "get_or_create"] | None = key(None, "continue or create the experiment")


class CsvMonitor(Section):
    enabled: bool = key(False, "write events to CSV files, one for each name")
    output_path: str = key("", "folder of the files; empty: the working directory")
    job_name: str = key("DeepSpeedJobName", "folder of this run")


class JsonlMonitorConfig(Section):
    """Block `jsonl_monitor`. Another monitor with a folder also writes the JSONL file, without this block."""

    enabled: bool = key(False, "write events to events.jsonl, a line for each")
    output_path: str = key("", "folder of the file; empty: the working directory")
    job_name: str = key("DeepSpeedJobName", "folder of this run")


class MLflow(Section):
    enabled: bool = key(False, "send events to MLflow")
    tracking_uri: str | None = key(None, "server, or folder; null: MLFLOW_TRACKING_URI")
    experiment: str = key("deepspeed", "experiment")
    run_name: str | None = key(None, "name of the run")


class Prometheus(Section):
    enabled: bool = key(False, "serve the newest value of each event to Prometheus")
    host: str = key("127.0.0.1", "address that is listened on")
    port: Int = key(9464, "port of rank 0", ge=1, le=65535)
    job_name: str = key("DeepSpeedJobName", "label `job` of the metrics")


class MonitorSections(Section):
    """Sections of all monitors (`tensorboard`, `wandb`, ...), for the code that creates the monitors."""

    tensorboard: TensorBoard = key(TensorBoard, "TensorBoard")
    wandb: WandB = key(WandB, "Weights & Biases")
    comet: Comet = key(Comet, "Comet")
    csv_monitor: CsvMonitor = key(CsvMonitor, "CSV files")
    jsonl_monitor: JsonlMonitorConfig = key(JsonlMonitorConfig, "a JSONL file")
    mlflow: MLflow = key(MLflow, "MLflow")
    prometheus: Prometheus = key(Prometheus, "Prometheus")

    @property
    def enabled(self) -> bool:
        return any(getattr(self, name).enabled for name in type(self).model_fields)


class TimelineConfig(Section):
    """Block `timeline`: recorded spans of each rank in selected updates."""

    enabled: bool = key(False, "record spans of all ranks, and write a trace, a picture and a table")
    start_step: Int = key(2, "first update that is recorded, counted from 0", ge=1)
    steps: Int = key(3, "updates that are recorded", ge=1)
    modules: bool = key(True, "forward and backward by module")
    ring: Int = key(1 << 16, "maximum number of spans that a rank keeps: the newest", ge=1024)
    output_path: str = key("", "folder of the files; empty: the working directory")
    job_name: str = key("DeepSpeedJobName", "folder of this run")


class NonFinite(Section):
    """Block `non_finite`: search for the origin of a NaN or infinity in losses and gradients."""

    enabled: bool = key(False, "run the window again with checks, before the update")
    reports: Int = key(3, "times that this is done", ge=1)
    output_path: str = key("", "folder for the inputs of the first such operation; empty: none")


class FlopsProfilerConfig(Section):
    """Block `flops_profiler`: counts of floating-point operations."""

    open_names = True
    enabled: bool = key(False, "count floating-point operations per module")
    recompute_fwd_factor: float = moot(
        0.0, "share of forward that is recomputed", "recomputed operations are counted, apart", ge=0
    )
    profile_step: Int = key(1, "step that is profiled; below 0: none")
    module_depth: Int = key(-1, "depth of the printed tree; -1 is all", ge=-1)
    top_modules: Int = key(1, "modules listed per depth", ge=1)
    detailed: bool = key(True, "print every module")
    output_file: str | None = key(None, "file instead of stdout")
