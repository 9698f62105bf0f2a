"""`python -m deepspeed.planner.training MODEL --deepspeed_config FILE`: a rank that trains what `ds_plan` was given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.engine.initialize import add_config_arguments, initialize
from deepspeed.foundation.tree import map_tensors
from deepspeed.planner.program import Program
from deepspeed.planner.source import model_named

_FOREVER = 1 << 30  # a trial ends itself


def main(args: Sequence[str] | None = None) -> None:
    """Train until the trial ends.

    Args:
        args: command line; None takes the process's own.
    """
    parser = add_config_arguments(argparse.ArgumentParser(prog="deepspeed.planner.training", description=__doc__))
    parser.add_argument("model", help="as `ds_plan` takes it")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence, for models of Transformers")
    parser.add_argument("--local_rank", type=int, default=0, help="the launcher's")
    options = parser.parse_args(args)
    comm.init_distributed()
    make, batch = model_named(options.model, options.length)
    torch.manual_seed(0)
    model = make()
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = initialize(model=model, model_parameters=trained, config=options.deepspeed_config)
    del model, trained
    device = torch.device(get_accelerator().current_device_name())
    moved = map_tensors(lambda tensor: tensor.to(device), batch(engine.train_micro_batch_size_per_gpu()))
    Program(engine, options.deepspeed_config, moved, updates=_FOREVER).run(engine, lambda: None)


if __name__ == "__main__":
    main()
