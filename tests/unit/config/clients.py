"""Configurations that real clients send, as they send them."""

from __future__ import annotations

import copy

QUICKSTART = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
ACCELERATE_2 = {
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ACCELERATE_3 = copy.deepcopy(ACCELERATE_2)
ACCELERATE_3["zero_optimization"] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
}
ACCELERATE_PLUGIN = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": float("inf"),
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
}
HF_AUTO = copy.deepcopy(ACCELERATE_3)
HF_AUTO.update(fp16={"enabled": "auto"}, bf16={"enabled": "auto"})
HF_AUTO["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
LIGHTNING = {
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
    "aio": {
        "block_size": 1048576,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
        "thread_count": 1,
    },
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200000000,
        "reduce_bucket_size": 200000000,
        "sub_group_size": 1000000000000,
    },
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
}
TRL_REFERENCE = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 0},
    "zero_optimization.reduce_bucket_size": 4096,
    "zero_optimization.stage3_param_persistence_threshold": 640,
    "zero_optimization.stage3_prefetch_bucket_size": 3686.4,
}
CLIENTS = {
    "quickstart": QUICKSTART,
    "accelerate stage 2": ACCELERATE_2,
    "accelerate stage 3": ACCELERATE_3,
    "accelerate plugin": ACCELERATE_PLUGIN,
    "transformers": HF_AUTO,
    "lightning": LIGHTNING,
    "lightning inference": {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True},
    "trl reference": TRL_REFERENCE,
}
