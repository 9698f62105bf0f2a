"""A loop under Accelerate, with and without this package."""

from __future__ import annotations

from typing import Any

import torch

from tests.clients.common import (
    ACCUMULATION,
    CLIP,
    MICRO,
    RATE,
    Run,
    Words,
    close,
    falling,
    fresh_clients,
    sentences,
    whole_values,
    without,
    zero,
)


def gloo() -> list[Any]:
    """Accelerate picks a backend for GPUs only."""
    from accelerate.utils import InitProcessGroupKwargs

    return [InitProcessGroupKwargs(backend="gloo")]


def plugin_for(stage: int, **more: Any) -> Any:
    """With the flags of the plugin at even stages, with a JSON at odd ones; `more` are flags."""
    from accelerate import DeepSpeedPlugin

    if stage % 2 == 0 or more:
        flags = {"gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIP}
        return DeepSpeedPlugin(zero_stage=stage, **flags | more)
    return DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": CLIP,
            "zero_optimization": zero(stage),
            "bf16": {"enabled": "auto"},
        }
    )


def accelerator_for(stage: int | None, precision: str, **more: Any) -> Any:
    """None: without DeepSpeed."""
    from accelerate import Accelerator

    mixed = {"fp32": "no", "bf16": "bf16"}[precision]
    if stage is None:
        return Accelerator(mixed_precision=mixed, gradient_accumulation_steps=ACCUMULATION, cpu=True)
    return Accelerator(
        mixed_precision=mixed,
        gradient_accumulation_steps=ACCUMULATION,
        deepspeed_plugin=plugin_for(stage, **more),
        kwargs_handlers=gloo(),
    )


def data(accelerator: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(sentences(40 * accelerator.num_processes), batch_size=MICRO)  # type: ignore[arg-type]


def loop(accelerator: Any, optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Run, Any]:
    """The loop that Accelerate's documentation shows; what it noted, and the prepared model."""
    run, model = Run(), Words()
    optimizer = optimizer_class(model.parameters(), lr=RATE)  # type: ignore[call-arg]
    prepared = accelerator.prepare(model, optimizer, data(accelerator), falling(optimizer))
    model, optimizer, loader, scheduler = prepared
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
    return run, prepared


def train(stage: int | None, precision: str) -> Run:
    with fresh_clients():
        run, (model, *_) = loop(accelerator_for(stage, precision))
        if stage is not None:
            assert model.global_steps == run.updates == model.micro_steps  # Accelerate steps at boundaries only
            model.destroy()
    return run


def train_with(optimizer: type[torch.optim.Optimizer]) -> Run:
    with fresh_clients():
        return loop(accelerator_for(None, "fp32"), optimizer)[0]


def mapped(stage: int, optimizer: str, becomes: str) -> None:
    """With the optimizer's state in host memory, Accelerate puts this package's CPU optimizer for torch's."""
    kind = getattr(torch.optim, optimizer)
    with fresh_clients():
        accelerator = accelerator_for(stage, "fp32", offload_optimizer_device="cpu")
        run, (model, wrapped, *_) = loop(accelerator, kind)
        assert type(wrapped.optimizer.optimizer).__name__ == becomes, wrapped.optimizer.optimizer
        model.destroy()
    close(run.losses, train_with(kind).losses, 1e-5, "losses")


def dummies(stage: int) -> None:
    """Optimizer and schedule are the JSON's; the script has stand-ins."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    rise = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": zero(stage),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": rise},
    }
    with fresh_clients():
        accelerator = Accelerator(
            gradient_accumulation_steps=ACCUMULATION,
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            kwargs_handlers=gloo(),
        )
        model = Words()
        optimizer = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.01)
        schedule = DummyScheduler(optimizer, warmup_num_steps=4)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, data(accelerator), schedule)
        ours, rates = [], []
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(tokens)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            ours.append(loss.item())
            if accelerator.sync_gradients:
                rates.append(schedule.get_last_lr()[0])
        model.destroy()
    plain = Words()
    adam = torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.01)
    risen = [0.0, *(min(1.0, update / 4) * RATE for update in range(20))]  # before the first update, and after each
    close(rates, risen[1 : 1 + len(rates)], 1e-9, "learning rates")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    batches = sentences(40 * ranks).view(-1, MICRO, sentences().shape[1])
    theirs = []
    for at in range(0, len(batches), ACCUMULATION * ranks):
        adam.param_groups[0]["lr"] = risen[at // (ACCUMULATION * ranks)]
        losses = [plain(batch) for batch in batches[at : at + ACCUMULATION * ranks]]
        theirs += [loss.item() for loss in losses[rank::ranks]]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        adam.step()
        adam.zero_grad()
    close(ours, theirs, 1e-5, "losses")


def several_models() -> None:
    """Two plugins, two models, each with its own Accelerator, trained in turn: each as if alone."""
    from accelerate import Accelerator

    with fresh_clients():
        plugins = {"first": plugin_for(2), "second": plugin_for(3)}
        first = Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=ACCUMULATION, kwargs_handlers=gloo())
        second = Accelerator()
        engines, losses = [], ([], [])
        loaders = []
        for accelerator, name in ((first, "first"), (second, "second")):
            first.state.select_deepspeed_plugin(name)
            model = Words()
            optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
            *parts, loader = accelerator.prepare(model, optimizer, falling(optimizer), data(accelerator))
            engines.append(parts)
            loaders.append(loader)
        assert [parts[0].zero_optimization_stage() for parts in engines] == [2, 3]
        for batches in zip(*loaders, strict=True):
            for at, accelerator in enumerate((first, second)):
                model, optimizer, schedule = engines[at]
                with accelerator.accumulate(model):
                    loss = model(batches[at])
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses[at].append(loss.item())
        for model, *_ in engines:
            model.destroy()
    wanted = without(train, "fp32").losses
    for found in losses:
        close(found, wanted, 1e-5, "losses")


def saved_and_loaded(stage: int, folder: str) -> None:
    """save_state, load_state and get_state_dict."""
    with fresh_clients():
        flag = {"zero3_save_16bit_model": True} if stage == 3 else {}
        accelerator = accelerator_for(stage, "fp32", **flag)
        _, (model, optimizer, loader, _) = loop(accelerator)

        def on() -> list[float]:
            return [step_on(accelerator, model, optimizer, tokens) for tokens in loader]

        accelerator.save_state(folder)
        state = accelerator.get_state_dict(model)
        values = whole_values(model.module)
        if accelerator.is_main_process:
            assert state.keys() == values.keys()
            assert all(torch.equal(state[name], values[name]) for name in values)
        after = on()
        accelerator.load_state(folder)
        assert on() == after
        model.destroy()


def step_on(accelerator: Any, model: Any, optimizer: Any, tokens: torch.Tensor) -> float:
    with accelerator.accumulate(model):
        loss = model(tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def averaged(stage: int) -> None:
    """A schedule-free optimizer of a client: evaluation has the averaged weights, with this package and without."""
    from schedulefree import AdamWScheduleFree

    def run(stage: int | None) -> list[float]:
        with fresh_clients():
            accelerator = accelerator_for(stage, "fp32")
            model = Words()
            optimizer = AdamWScheduleFree(model.parameters(), lr=RATE)
            optimizer.train()
            model, optimizer, loader = accelerator.prepare(model, optimizer, data(accelerator))
            for tokens in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(tokens))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
            losses = []
            for change in (optimizer.eval, optimizer.train):
                change()
                with torch.no_grad():
                    losses.append(float(model(sentences()[:MICRO])))
            if stage is not None:
                model.destroy()
        return losses

    plain = run(None)
    assert abs(plain[0] - plain[1]) > 1e-4 * plain[0]  # the two have other weights
    close(run(stage), plain, 1e-5, "losses")
