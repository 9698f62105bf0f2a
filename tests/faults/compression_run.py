"""A run that prunes as it goes and saves after every step: killed and started again, always from the dense class.

python -m tests.faults.compression_run FOLDER STAGE STEPS   (with the environment of a rank)
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

RAMP, HEADS = (2, 6), 8


def configuration(stage: int) -> dict[str, Any]:
    def technique(modules: list[str], **shared: Any) -> dict[str, Any]:
        group = {"params": {"dense_ratio": 0.5}, "modules": modules}
        return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}

    ramp = {"schedule_offset": RAMP[0], "schedule_offset_end": RAMP[1], "schedule": "cubic", "criterion": "taylor"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True}},
        **({"bf16": {"enabled": True}} if stage % 2 else {}),
        "compression_training": {
            "row_pruning": technique(["gate_proj", "up_proj"], **ramp),
            "head_pruning": technique(["o_proj"], schedule_offset=HEADS, method="l1"),
        },
    }


def main() -> None:
    import deepspeed
    from deepspeed.engine.compression import StructuredPruning
    from tests.parallel.test_compression_removal import llama, state_of, train

    folder, stage, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    run = StructuredPruning.run

    def announced(self: StructuredPruning) -> None:
        print(f"removing {'heads' if any('o_proj' in name for name in self.removal.cuts) else 'rows'}", flush=True)
        run(self)

    model = llama()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=configuration(stage))[
        0
    ]
    engine.load_checkpoint(f"{folder}/saved")
    StructuredPruning.run = announced  # pyright: ignore[reportAttributeAccessIssue]
    print("ready", flush=True)
    while engine.global_steps < steps:
        print(f"step {engine.global_steps}", flush=True)
        train(engine, range(engine.global_steps, engine.global_steps + 1))
        engine.save_checkpoint(f"{folder}/saved")
    state = state_of(engine)
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/final.pt")
    engine.destroy()


if __name__ == "__main__":
    main()
