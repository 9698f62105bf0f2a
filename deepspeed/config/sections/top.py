"""Top level of the JSON configuration."""

from __future__ import annotations

from typing import Any

from deepspeed.config.base_model import (
    AllreduceOp,
    Dtype,
    Int,
    Interval,
    LogLevel,
    Section,
    WireDtype,
    key,
    later,
    moot,
)
from deepspeed.config.sections.checkpoint import Checkpoint, Nebula
from deepspeed.config.sections.compression import CompressionTraining, QuantizeTraining
from deepspeed.config.sections.data import CurriculumLearning, DataEfficiency, Eigenvalue, ProgressiveLayerDrop
from deepspeed.config.sections.memory import ActivationCheckpointing, Aio, Compile
from deepspeed.config.sections.monitor import (
    Comet,
    CommsLoggerConfig,
    CsvMonitor,
    FlopsProfilerConfig,
    JsonlMonitorConfig,
    MLflow,
    NonFinite,
    Prometheus,
    TensorBoard,
    TimelineConfig,
    Timers,
    WandB,
)
from deepspeed.config.sections.optimizer import Optimizer, SchedulerConfig
from deepspeed.config.sections.parallel import (
    Autotuning,
    Elasticity,
    ExpertParallel,
    HybridEngine,
    MeshSizes,
    Pipeline,
    SparseAttention,
    TensorParallel,
    WeightQuantization,
)
from deepspeed.config.sections.precision import BF16, FP16, Amp, DataTypes, TorchAutocast
from deepspeed.config.sections.wire import WireConfig
from deepspeed.config.sections.zero import Zero

_MODEL = "the model's own weights show it"


def wire_of(top: TopLevel) -> WireConfig:
    """Return the block `wire`, with the values of ZeRO++'s keys and of `communication_data_type`."""
    wire, zero, loco = top.wire, top.zero_optimization, top.zero_optimization.zeropp_loco_param
    values: dict[str, Any] = {}
    written = wire.model_fields_set
    if "gradients" not in written and top.communication_data_type in ("int8", "int4"):
        values["gradients"] = top.communication_data_type
    elif "gradients" not in written and zero.zero_quantized_gradients:
        values["gradients"] = "int4"
    if "weights" not in written and zero.zero_quantized_weights:
        values["weights"] = "int8"
    if wire.frozen_weights is None and zero.zero_quantized_nontrainable_weights:
        values["frozen_weights"] = "int8"
    if loco.model_fields_set:
        values |= {"error_beta": loco.err_beta, "error_reset": loco.reset_T}
        values |= {"error_memory": True} if wire.error_memory is None else {}
    return wire.model_copy(update=values)


class TopLevel(Section):
    """Top level of the JSON: one field for each block and each key outside of blocks."""

    open_names = True
    train_batch_size: Int | None = key(None, "samples per optimizer step, over all ranks", ge=1)
    train_micro_batch_size_per_gpu: Int | None = key(None, "samples per rank and forward", ge=1)
    gradient_accumulation_steps: Int | None = key(None, "micro-batches per optimizer step", ge=1)
    gradient_clipping: float = key(0.0, "largest global gradient norm; 0 or absent is off", ge=0)
    steps_per_print: Interval | None = key(None, "optimizer steps between progress lines; inf or null: none")
    dataloader_drop_last: bool = key(False, "drop a short last batch of training_data")
    dataloader_carry_last: bool = key(False, "fill the last batch of an epoch of training_data from the next epoch")
    optimizer: Optimizer | None = key(None, "the optimizer; one given to initialize wins")
    scheduler: SchedulerConfig | None = key(None, "the learning-rate schedule; one given to initialize wins")
    auto_cast: bool = key(True, "cast floating inputs where they enter a module with lower-precision parameters")
    fp16: FP16 = key(FP16, "fp16 parameters under a loss scale")
    bf16: BF16 = key(BF16, "bf16 parameters", aliases=["bfloat16"])
    torch_autocast: TorchAutocast = key(TorchAutocast, "forward under torch.autocast")
    data_types: DataTypes = key(DataTypes, "dtypes beside the compute dtype")
    zero_optimization: Zero = key(Zero, "which training state is split over the ranks")
    communication_data_type: WireDtype | None = key(
        None, "dtype of gradient communication; null: summed in fp32; int8, int4: as wire.gradients"
    )
    wire: WireConfig = key(WireConfig, "encoding of gradients and weights in messages")
    sparse_gradients: bool = key(
        False, "send gradients of embeddings as row numbers and rows where these are fewer bytes; stages 0, 1 and 2"
    )
    deterministic_reduction: bool = key(
        False,
        "on devices, sum in rank order, in place of the backend's own reduction (fp32) and of one kernel (16 bits)",
    )
    prescale_gradients: bool = key(False, "divide by the world size before the reduction, not after")
    gradient_predivide_factor: float = key(1.0, "part of the division that is done before the reduction", gt=0)
    gradient_allreduce_op: AllreduceOp = key("mean", "mean or sum over data-parallel ranks")
    wall_clock_breakdown: bool = key(False, "time forward, backward and step")
    memory_breakdown: bool = key(False, "print memory along the step")
    dump_state: bool = key(False, "print the resolved configuration at the start")
    log_level: LogLevel | None = key(None, "level of the package's logger")
    disable_python_gc: bool = key(False, "collect Python's garbage at step boundaries only")
    comms_logger: CommsLoggerConfig = key(CommsLoggerConfig, "time and size of every collective")
    divergence_check_interval: Int = key(0, "compare the ranks' calls after this number of collectives; 0: never", ge=0)
    timers: Timers = key(Timers, "timers")

    zero_allow_untested_optimizer: bool = moot(
        False, "allow any optimizer under ZeRO", "every optimizer is proven equal to plain torch or refused by name"
    )
    zero_force_ds_cpu_optimizer: bool = moot(
        True, "offload needs an own optimizer class", "any torch.optim.Optimizer may update offloaded state"
    )
    disable_allgather: bool = moot(False, "broadcasts rather than gathers", "the collective is picked by a fixed table")
    vocabulary_size: Int | None = moot(None, "warn when not a multiple of 8", _MODEL)

    managed_gradient_accumulation: bool = later(True, "false: the caller alone decides the boundary")
    sequence_parallel_size: Int = key(1, "ranks that share a sequence", ge=1)
    sequence_parallel_verify: bool = key(
        True, "compare a sequence-parallel Transformers model with the whole one before the first step"
    )
    sequence_parallel_recompute: bool = key(
        True, "exchange contexts and copied key-value heads again in backward, instead of saving them"
    )
    data_parallel_size: Int | None = key(None, "data-parallel ranks; checked against the world", ge=1)
    use_data_before_expert_parallelism: bool = later(
        False, "order of the axes of experts", aliases=["use_data_before_expert_parallelism_"]
    )
    seq_parallel_communication_data_type: Dtype = moot(
        "fp32", "dtype of reductions over a sequence's ranks", "communication_data_type decides for all"
    )
    graph_harvesting: bool = later(False, "record steps as CUDA graphs")
    datastates_ckpt: dict[str, Any] | None = later(None, "asynchronous checkpoint plug-in", idle=[{}])
    amp: Amp = key(Amp, "NVIDIA Apex")
    aio: Aio = key(Aio, "files on NVMe")
    activation_checkpointing: ActivationCheckpointing = key(ActivationCheckpointing, "recompute activations")
    compile: Compile = key(Compile, "torch.compile of the model")
    mesh: MeshSizes = key(MeshSizes, "ranks along each axis of the mesh")
    pipeline: Pipeline = key(Pipeline, "pipeline parallelism")
    tensor_parallel: TensorParallel = key(TensorParallel, "tensor parallelism")
    expert_parallel: ExpertParallel = key(ExpertParallel, "expert parallelism")
    hybrid_engine: HybridEngine = key(HybridEngine, "train and generate")
    weight_quantization: WeightQuantization = key(WeightQuantization, "quantized weights for inference")
    tensorboard: TensorBoard = key(TensorBoard, "TensorBoard")
    wandb: WandB = key(WandB, "Weights & Biases")
    comet: Comet = key(Comet, "Comet")
    csv_monitor: CsvMonitor = key(CsvMonitor, "CSV files")
    jsonl_monitor: JsonlMonitorConfig = key(JsonlMonitorConfig, "a JSONL file")
    mlflow: MLflow = key(MLflow, "MLflow")
    prometheus: Prometheus = key(Prometheus, "Prometheus")
    flops_profiler: FlopsProfilerConfig = key(FlopsProfilerConfig, "operation counts")
    non_finite: NonFinite = key(NonFinite, "where values that are not finite come from")
    timeline: TimelineConfig = key(TimelineConfig, "what each rank does and when")
    autotuning: Autotuning = key(Autotuning, "search for fast settings")
    checkpoint: Checkpoint = key(Checkpoint, "how training state is written and read")
    nebula: Nebula = key(Nebula, "a cloud checkpoint service")
    data_efficiency: DataEfficiency = key(DataEfficiency, "curriculum and token dropping")
    curriculum_learning: CurriculumLearning = key(CurriculumLearning, "short sequences first")
    progressive_layer_drop: ProgressiveLayerDrop = key(ProgressiveLayerDrop, "drop layers at random")
    eigenvalue: Eigenvalue = key(Eigenvalue, "curvature per block")
    compression_training: CompressionTraining = key(CompressionTraining, "smaller weights by training")
    quantize_training: QuantizeTraining = key(QuantizeTraining, "fewer bits as training goes on")
    elasticity: Elasticity = key(Elasticity, "a batch that fits many device counts")
    sparse_attention: SparseAttention | None = later(None, "block-sparse attention layouts")
