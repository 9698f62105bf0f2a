"""Every address of the instruments that scripts import, with the methods they call."""

from __future__ import annotations

import importlib
import inspect

import pytest

from deepspeed.engine.engine import DeepSpeedEngine

STRINGS = ("number", "flops", "macs", "params", "duration", "bytes")
ESTIMATES = ("model_states_mem_needs", "model_states_mem_needs_all_live", "model_states_mem_needs_all_cold")
# address: what it has to have
ADDRESSES = {
    "deepspeed.profiling.flops_profiler": ["FlopsProfiler", "get_model_profile"],
    "deepspeed.profiling.flops_profiler.profiler": [
        "FlopsProfiler", "get_model_profile", *(f"{kind}_to_string" for kind in STRINGS),
    ],
    "deepspeed.profiling.flops_profiler.FlopsProfiler": [
        "start_profile", "stop_profile", "reset_profile", "end_profile", "get_total_flops", "get_total_macs",
        "get_total_duration", "get_total_params", "print_model_profile", "print_model_aggregated_profile",
    ],
    "deepspeed.profiling.config": ["DeepSpeedFlopsProfilerConfig"],
    "deepspeed.utils.timer": [
        "SynchronizedWallClockTimer", "ThroughputTimer", "NoopTimer",
        *(f"{part}_{span}_TIMER" for part in ("FORWARD", "BACKWARD", "BACKWARD_INNER", "BACKWARD_REDUCE", "STEP")
          for span in ("MICRO", "GLOBAL")),
    ],
    "deepspeed.utils.timer.SynchronizedWallClockTimer": ["get_timers", "log", "get_mean", "memory_usage", "__call__"],
    "deepspeed.utils.timer.ThroughputTimer": ["start", "stop", "update_epoch_count", "avg_samples_per_sec"],
    "deepspeed.runtime.utils": ["see_memory_usage"],
    "deepspeed.runtime.zero.partitioned_param_profiler.PartitionedParameterProfiler": [
        "reset_events", "start_event", "stop_event", "log_events", "EventCounter",
    ],
    "deepspeed.comm": [
        "log_summary", "configure", "comms_logger", "get_logged_comm_ops", "get_comm_operation_count", "has_comm_data",
        "reset_log",
    ],
    "deepspeed.comm.comms_logger": [
        "start_profiling_comms", "stop_profiling_comms", "start_profiling_op", "stop_profiling_op", "append",
        "get_raw_data", "comms_dict", "log_all",
    ],
    "deepspeed.monitor.monitor.MonitorMaster": ["write_events"],
    "deepspeed.monitor.config": ["DeepSpeedMonitorConfig", "get_monitor_config"],
    "deepspeed.monitor.tensorboard": ["TensorBoardMonitor"],
    "deepspeed.monitor.wandb": ["WandbMonitor"],
    "deepspeed.monitor.csv_monitor": ["csvMonitor"],
    "deepspeed.monitor.comet": ["CometMonitor"],
    "deepspeed.runtime.zero.stage3": [f"estimate_zero3_{kind}" for kind in ESTIMATES],
    "deepspeed.runtime.zero.stage_1_and_2": [f"estimate_zero2_{kind}" for kind in ESTIMATES],
    "deepspeed.autotuning": ["Autotuner"],
    "deepspeed.autotuning.Autotuner": ["tune", "print_tuning_results", "write_optimal_config", "run_after_tuning"],
    "deepspeed.utils": ["instrument_w_nvtx", "safe_get_full_fp32_param", "safe_get_full_grad"],
    "deepspeed.utils.debug": [
        "debug_extract_module_and_param_names", "debug_clear_module_and_param_names", "debug_module2name",
        "debug_module2name_id", "debug_module2name_class", "debug_param2name", "debug_param2name_id",
        "debug_param2name_id_shape", "debug_param2name_id_shape_device", "debug_param2name_id_numel",
        "debug_param2name_id_shape_status", "printflock", "log_rank_file", "print_backward_tensors", "print_rank",
        "print_rank0",
    ],
}  # fmt: skip
SIGNATURES = {
    "deepspeed.profiling.flops_profiler.FlopsProfiler": ["model", "ds_engine", "recompute_fwd_factor"],
    "deepspeed.profiling.flops_profiler.get_model_profile": [
        "model", "input_shape", "args", "kwargs", "print_profile", "detailed", "module_depth", "top_modules",
        "warm_up", "as_string", "output_file", "ignore_modules", "mode",
    ],
    "deepspeed.utils.timer.ThroughputTimer": [
        "config", "batch_size", "start_step", "steps_per_output", "monitor_memory", "logging_fn",
    ],
    "deepspeed.runtime.utils.see_memory_usage": ["message", "force"],
    "deepspeed.comm.log_summary": ["show_straggler", "return_dict"],
    "deepspeed.autotuning.Autotuner": ["args", "active_resources"],
}  # fmt: skip
ENGINE = (
    "get_wall_clock_timers", "wall_clock_breakdown", "memory_breakdown", "flops_profiler", "monitor", "tput_timer",
    "timers", "get_global_grad_norm",
)  # fmt: skip


def looked_up(address: str) -> object:
    parts = address.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(address)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_has_its_names(address: str) -> None:
    found = looked_up(address)
    assert [name for name in ADDRESSES[address] if not hasattr(found, name)] == []


@pytest.mark.parametrize("address", SIGNATURES)
def test_arguments_have_their_names(address: str) -> None:
    names = list(inspect.signature(looked_up(address)).parameters)
    assert names[: len(SIGNATURES[address])] == SIGNATURES[address]


def test_an_engine_has_its_names() -> None:
    assert [name for name in ENGINE if not hasattr(DeepSpeedEngine, name)] == []
