"""Fine-tune GPT-Neo with Accelerate: `deepspeed --num_gpus 2 examples/gpt_neo/with_accelerate.py`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from common import load_model, parse_arguments, report, sequences
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


@torch.no_grad()
def held_out_loss(accelerator: Accelerator, model: Any, loader: DataLoader[Any]) -> float:
    """Mean over the ranks' shares."""
    model.eval()
    losses = torch.stack([model(**batch).loss.float() for batch in loader])
    model.train()
    return float(accelerator.gather(losses).mean())


def main() -> None:
    """The loop Accelerate's documentation shows; nothing in it is about sharding."""
    arguments = parse_arguments(__doc__)
    cpu = not torch.cuda.is_available()
    plugin = DeepSpeedPlugin(
        zero_stage=arguments.stage,
        gradient_accumulation_steps=arguments.accumulate,
        gradient_clipping=1.0,
        zero3_init_flag=arguments.stage == 3,
    )
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=arguments.accumulate,
        mixed_precision="no" if cpu else "bf16",
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo" if cpu else "nccl")],
    )
    tokenizer, rows, held_out = sequences(arguments)
    model = load_model(arguments, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, arguments.steps * accelerator.num_processes)
    model, optimizer, loader, checks, schedule = accelerator.prepare(
        model,
        optimizer,
        DataLoader(rows, batch_size=arguments.micro, shuffle=True),
        DataLoader(held_out, batch_size=arguments.micro),
        schedule,
    )
    before = held_out_loss(accelerator, model, checks)
    updates = 0
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            updates += 1
            if updates % max(1, arguments.steps // 10) == 0:
                accelerator.print(f"update {updates}: loss {loss.item():.3f}")
        if updates == arguments.steps:
            break
    after = held_out_loss(accelerator, model, checks)
    if accelerator.is_main_process:
        report(before, after, arguments)


if __name__ == "__main__":
    main()
