"""A loop under Accelerate, with and without this package."""

from __future__ import annotations

from typing import Any

import torch

from tests.clients.common import ACCUMULATION, CLIP, MICRO, RATE, Run, Words, falling, fresh_clients, sentences, zero


def accelerator_for(stage: int | None, precision: str) -> Any:
    """With the flags of the plugin at even stages, with a JSON at odd ones; None: without DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs

    mixed = {"fp32": "no", "bf16": "bf16"}[precision]
    if stage is None:
        return Accelerator(mixed_precision=mixed, gradient_accumulation_steps=ACCUMULATION, cpu=True)
    if stage % 2 == 0:
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=ACCUMULATION, gradient_clipping=CLIP)
    else:
        plugin = DeepSpeedPlugin(
            hf_ds_config={
                "train_micro_batch_size_per_gpu": "auto",
                "train_batch_size": "auto",
                "gradient_accumulation_steps": ACCUMULATION,
                "gradient_clipping": CLIP,
                "zero_optimization": zero(stage),
                "bf16": {"enabled": "auto"},
            }
        )
    return Accelerator(
        mixed_precision=mixed,
        gradient_accumulation_steps=ACCUMULATION,
        deepspeed_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def train(stage: int | None, precision: str) -> Run:
    run = Run()
    with fresh_clients():
        accelerator = accelerator_for(stage, precision)
        model = Words()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        loader = torch.utils.data.DataLoader(sentences(40 * accelerator.num_processes), batch_size=MICRO)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, falling(optimizer))
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(tokens)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
                    run.updates += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.losses.append(loss.item())
            run.rates.append(optimizer.param_groups[0]["lr"])
        if stage is not None:
            assert model.global_steps == run.updates == model.micro_steps  # Accelerate steps at boundaries only
            model.destroy()
    return run
