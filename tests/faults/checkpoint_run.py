"""A run that saves as it goes and resumes from the newest complete checkpoint: started, killed and started again.

python -m tests.faults.checkpoint_run FOLDER STAGE STEPS   (with the environment of a rank)
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from tests.parallel.checkpointing import everything, make, train


def main() -> None:
    import deepspeed

    folder, stage, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engine = make(stage, "bf16" if stage % 2 else "fp32", accumulation=2)
    engine.load_checkpoint(f"{folder}/saved")
    batches = iter(deepspeed.utils.RepeatingLoader(engine.training_dataloader))
    print("ready", flush=True)
    while engine.micro_steps < steps:
        train(engine, batches, 1)
        engine.save_checkpoint(f"{folder}/saved", "checkpoint" if engine.micro_steps % 3 else None)
    state = everything(engine)
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/final.pt")
    engine.destroy()


if __name__ == "__main__":
    main()
