"""What OpenRLHF, verl and TRL call of an engine and its modules, in the form in which they call it, on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.inference.sampling_params import SamplingParams
from tests.parallel.test_rollouts import model_of, settings, train
from tests.parallel.tiny import raises

AUTO = dict.fromkeys(
    (
        "sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "reduce_bucket_size",
    ),
    "auto",
)  # fmt: skip


def openrlhf_config(stage: int) -> dict[str, Any]:
    """The JSON of OpenRLHF's actor, with every key that it names."""
    zero = {
        "stage": stage, "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none", "pin_memory": True}, **AUTO, "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False, "zero_quantized_gradients": False,
    }  # fmt: skip
    return {
        "steps_per_print": 100, "zero_optimization": zero | ({"reduce_scatter": True} if stage == 3 else {}),
        "bf16": {"enabled": False}, "fp16": {"enabled": False}, "gradient_clipping": 1.0, "prescale_gradients": False,
        "wall_clock_breakdown": False, "data_types": {"grad_accum_dtype": None},
        "checkpoint": {"load_universal": False}, "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1}, "train_micro_batch_size_per_gpu": 1, "train_batch_size": 2,
    }  # fmt: skip


def actor(stage: int) -> tuple[Any, Any, Any, Any]:
    """An engine as OpenRLHF makes it, with the model before, its optimizer and its scheduler."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = model_of("llama")
    before = copy.deepcopy(model)
    decayed = [param for name, param in model.named_parameters() if "norm" not in name]
    others = [param for name, param in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = DeepSpeedCPUAdam(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        config=openrlhf_config(stage), args={"local_rank": dist.get_rank()}, dist_init_required=True,
    )  # fmt: skip
    return engine, before, optimizer, scheduler


def sent_weights(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """The names and whole tensors that OpenRLHF broadcasts to its generators, one parameter at a time."""
    sent = {}
    for name, param in engine.module.named_parameters():
        kept = None
        if stage == 3 and hasattr(param, "ds_active_sub_modules"):
            kept, param.ds_active_sub_modules = param.ds_active_sub_modules, set()
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            shape = param.shape if stage != 3 else param.ds_shape
            sent[name] = param.data.clone()
            assert sent[name].shape == shape
        if kept is not None:
            param.ds_active_sub_modules = kept
    return sent


def openrlhf(stage: int, folder: str) -> None:
    import deepspeed.module_inject.layers
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    assert deepspeed.version >= "0.16.4" and callable(FusedAdam)
    engine, before, _, scheduler = actor(stage)
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.zero_optimization_stage() == stage
    assert engine.config["zero_optimization"]["offload_optimizer"]["device"] == "none" and scheduler is not None
    for name, value in sent_weights(engine, stage).items():
        assert torch.equal(value, before.get_parameter(name)), name

    average = copy.deepcopy(before)
    with torch.no_grad():
        for param, mean in zip(engine.module.parameters(), average.parameters(), strict=True):
            sharded = [
                each for each in (param, mean)
                if hasattr(each, "ds_id") and each.ds_status == ZeroParamStatus.NOT_AVAILABLE
            ]  # fmt: skip
            assert stage == 3 or not sharded
            with deepspeed.zero.GatheredParameters(sharded, enabled=len(sharded) > 0):
                mean.data.copy_(0.1 * param.data.to("cpu") + 0.9 * mean.data)
            assert torch.allclose(mean, before.get_parameter(names_of(average)[mean]), atol=1e-6)

    train(engine, 1)
    kinds = ("optim_states", "contiguous_grad_buffer", "hp_params", "lp_grads")
    engine.optimizer.offload_states(
        include=[getattr(OffloadStateTypeEnum, kind) for kind in kinds], device=OffloadDeviceEnum.cpu, pin_memory=True,
        non_blocking=True,
    )  # fmt: skip
    engine.empty_partition_cache()
    rollouts = engine.rollout([[1, 2, 3]], SamplingParams(max_new_tokens=4))  # generation while the states sleep
    assert len(rollouts[0].tokens) == 4
    engine.reload_states(non_blocking=True)
    train(engine, 1, 1)

    sent = sent_weights(engine, stage)
    if stage > 2:
        state = engine._consolidated_16bit_state_dict()
    else:
        state = clone_tensors_for_torch_save(engine.module.state_dict())
    if dist.get_rank() == 0:
        assert {name: True for name in sent} == {name: torch.equal(state[name], value) for name, value in sent.items()}
    engine.save_checkpoint(folder, tag="global_step2", client_state={"episode": 3}, save_latest=True)
    path, states = engine.load_checkpoint(
        folder, None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
        load_module_only=False,
    )  # fmt: skip
    assert path is not None and states["episode"] == 3
    train(engine, 1, 2)
    engine.destroy()


def names_of(model: Any) -> dict[Any, str]:
    return {param: name for name, param in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_calls_of_openrlhf(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(openrlhf, stage, str(tmp_path), timeout=120)


def verl(stage: int, folder: str) -> None:
    """verl's worker: its JSON, and what it reads of the engine."""
    model = model_of("llama")
    config = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-3, "warmup_num_steps": 0}
        },
        "steps_per_print": 1, "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": stage, "allgather_partitions": True, "allgather_bucket_size": 2e7, "overlap_comm": False,
            "reduce_scatter": True, "reduce_bucket_size": 2e7, "contiguous_gradients": True,
        },
    }  # fmt: skip
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    assert engine.module is model and optimizer is engine.optimizer and hasattr(engine, "_config")
    engine.module.train()
    engine.zero_grad()
    ids = torch.tensor([[3, 4, 5]])
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss * 0.5)
    engine.step()
    assert float(engine.get_global_grad_norm()) > 0
    scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(1e-3)
    for name in ("data_parallel_group", "dp_group"):
        group = getattr(engine, name, None)
        assert group is None or dist.get_world_size(group) == 2
    engine.module.eval()
    engine.save_checkpoint(folder, client_state={"global_step": 1, "hdfs_path": None}, tag="step_1")
    _, state = engine.load_checkpoint(
        folder, tag="step_1", load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    assert state["global_step"] == 1
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_calls_of_verl(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(verl, stage, str(tmp_path), timeout=120)


def streamed(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) one at a time, as TRL sends them to a server."""
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            yield name, param.data.clone()


def trl(stage: int) -> None:
    """TRL around a generation: stage 3's hooks off and on by its own functions, tensors one at a time, leaf modules."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from trl.models.utils import add_hooks, remove_hooks

    from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules, z3_leaf_module

    model = model_of("llama")
    set_z3_leaf_modules(model, [LlamaDecoderLayer])
    assert len(get_z3_leaf_modules(model)) == 3 and z3_leaf_module(model.model.layers[0])
    engine, *_ = deepspeed.initialize(model=model, config=settings(stage))
    train(engine, 1)
    offload = engine.optimizer.parameter_offload
    assert offload.module is engine.module and hasattr(offload, "param_coordinator")
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        remove_hooks(engine)
        assert offload.forward_hooks == offload.backward_hooks == []
        tokens = engine.module.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
        add_hooks(engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        whole = copy.deepcopy(engine.module)
    assert tokens.equal(whole.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False))
    assert sum(len(tensor) for _, tensor in streamed(engine)) > 0
    train(engine, 1, 1)
    with raises(ValueError):
        set_z3_leaf_modules(model, [torch.nn.Conv2d])
    engine.destroy()


@pytest.mark.slow
def test_calls_of_trl(workers: Any) -> None:
    workers(2).run(trl, 3, timeout=120)
