"""Goes on from a checkpoint of this project with the engine of the upstream package. Run it there.

UPSTREAM/bin/torchrun --nproc_per_node 2 tests/upstream/read_ours.py FOLDER STAGE PRECISION OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from make_checkpoints import config, groups, loss_of, small


def main() -> None:
    import deepspeed

    folder, stage, precision, output = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    deepspeed.init_distributed("gloo")
    model = small(seed=7)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, eps=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage, precision))
    _, client = engine.load_checkpoint(folder, tag="small")
    losses = []
    for step in range(3, 6):
        loss = loss_of(engine, step)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    if dist.get_rank() == 0:
        torch.save({"losses": every, "best": client.get("best")}, output)


if __name__ == "__main__":
    main()
