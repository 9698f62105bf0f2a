"""What clients do beside training: load, generate, save, resume, validate. Each function runs on a worker."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from tests.clients import lightning_runs, transformers_runs
from tests.clients.common import RATE, Run, Words, close, fresh_clients, sentences, whole_values, without, zero

STAGE_3 = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero(3)}


def same_values(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    with deepspeed.zero.GatheredParameters(list(ours.parameters())):
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        return all(torch.equal(a.detach(), b.detach()) for a, b in pairs)


def born_resized_and_generating(folder: str) -> None:
    """from_pretrained and from_config under zero.Init, tied and resized embeddings, ranks that stop apart."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    rank = dist.get_rank()
    with fresh_clients():
        plain = transformers_runs.small_model().eval()
        if rank == 0:
            plain.save_pretrained(folder)
        dist.barrier()
        keep = HfDeepSpeedConfig(STAGE_3 | {"bf16": {"enabled": "auto"}})
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(hasattr(p, "ds_id") for p in model.parameters())
        assert same_values(model, plain)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
        assert all(hasattr(p, "ds_id") for p in AutoModelForCausalLM.from_config(plain.config).parameters())
        words = plain.config.vocab_size
        model.resize_token_embeddings(words + 6)
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            assert torch.equal(model.get_input_embeddings().weight[:words], plain.get_input_embeddings().weight)
            plain.resize_token_embeddings(words + 6)
            plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        del keep
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    engine.eval()
    draw = random.Random(rank)
    for _ in range(4):  # every rank stops when it likes
        prompt = torch.tensor([[draw.randrange(3, words) for _ in range(draw.randint(2, 8))]])
        how = {"max_new_tokens": draw.randint(1, 24), "do_sample": False}
        assert torch.equal(engine.generate(prompt, **how), plain.generate(prompt, **how))
    engine.train()
    engine.backward(engine(prompt, labels=prompt).loss)
    engine.step()
    engine.destroy()


def evaluated_then_trained() -> None:
    """evaluate() with no training before it, and training after it."""
    from transformers import Trainer, TrainingArguments

    model, plain = transformers_runs.small_model(), transformers_runs.small_model()
    with transformers_runs.trainer_state(3) as folder:
        arguments = TrainingArguments(**transformers_runs.settings(3, "fp32", folder))
        data = {"train_dataset": transformers_runs.rows(), "eval_dataset": transformers_runs.rows(8)}
        trainer = Trainer(model=model, args=arguments, **data)  # type: ignore[arg-type]
        found = trainer.evaluate()["eval_loss"]
        batch = torch.stack([row["input_ids"] for row in transformers_runs.rows(8)])
        close([found], [plain(input_ids=batch, labels=batch).loss.item()], 1e-5, "losses")
        # A Trainer that has evaluated hands its engine without optimizer to training, unless it forgets it.
        trainer.model_wrapped = trainer.model
        trainer.accelerator.free_memory()
        trainer.train()
        close(transformers_runs.noted(trainer).losses, without(transformers_runs.train, "fp32").losses, 1e-5, "losses")


def computed_again(reentrant: bool) -> None:
    """Gradient checkpointing either way: the losses of a run without it and without this package."""
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    run = transformers_runs.run_trainer(3, "fp32", transformers_runs.small_model, **again)
    close(run.losses, without(transformers_runs.train, "fp32").losses, 1e-5, "losses")


def model_saved(gathers: bool) -> None:
    """save_model() at stage 3: a folder for from_pretrained, or without the flag a checkpoint to convert."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folders: list[Any] = [None]
    with transformers_runs.trainer_state(3) as folder:
        folders[0] = folder
        dist.broadcast_object_list(folders)
        settings = transformers_runs.settings(3, "fp32", folders[0], max_steps=2)
        settings["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gathers
        trainer = Trainer(
            model=transformers_runs.small_model(),
            args=TrainingArguments(**settings),
            train_dataset=transformers_runs.rows(),
        )
        trainer.train()
        trainer.save_model()
        values = whole_values(trainer.model_wrapped.module)
        weights = {name: values[name] for name, _ in trainer.model.named_parameters()}
        trainer.model_wrapped.destroy()
        if dist.get_rank() == 0:
            unset_hf_deepspeed_config()
            if gathers:
                saved = AutoModelForCausalLM.from_pretrained(folders[0]).state_dict()
            else:
                saved = get_fp32_state_dict_from_zero_checkpoint(folders[0])
            assert weights and all(torch.equal(saved[name], weights[name]) for name in weights)
        dist.barrier()


def lightning_modes(name: str, folder: str) -> None:
    """fit, validate, test, predict with one Trainer; its checkpoint, as Lightning's converter reads it."""
    with fresh_clients():
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

        saves = ModelCheckpoint(folder, filename="last", save_weights_only=False)
        more: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saves]}
        strategy = lightning_runs.strategy_named(name, folder)
        trainer = lightning_runs.make_trainer(strategy, "fp32", folder, **more)
        run = Run()
        module = lightning_runs.lightning_module(run, sharded=True)
        trainer.fit(module, lightning_runs.batches())
        close(run.losses, without(lightning_runs.train, "fp32").losses, 1e-5, "losses")
        weights = whole_values(module)
        engine = trainer.strategy.model
        wanted = "nvme" if name == "nvme" else "cpu" if name.endswith("_offload") else "none"
        found = engine.config["zero_optimization"].get("offload_optimizer", {"device": "none"})["device"]
        assert (found, engine.zero_optimization_stage()) == (wanted, STAGES[name])
        value = trainer.validate(module, lightning_runs.batches(), verbose=False)[0]["loss"]
        assert trainer.test(module, lightning_runs.batches(), verbose=False)[0]["loss"] == value
        assert len(trainer.predict(module, lightning_runs.batches())) == 20
        trainer.strategy.model.destroy()
        if dist.get_rank() == 0:
            target = Path(folder) / "whole.pt"
            state = convert_zero_checkpoint_to_fp32_state_dict(Path(folder) / "last.ckpt", target)["state_dict"]
            assert state.keys() == weights.keys()
            assert all(torch.equal(state[key], weights[key]) for key in weights)
        dist.barrier()


STAGES = {"deepspeed": 2, "nvme": 3} | {
    f"deepspeed_stage_{name}": int(name[0]) for name in ("1", "2", "2_offload", "3", "3_offload")
}


def fabric_named(name: str) -> None:
    """Fabric by a strategy's name, whose defaults neither accumulate nor clip: as one process on the same batches."""
    with fresh_clients():
        fabric, model, optimizer, loader, _ = lightning_runs.fabric_parts(STAGES[name], "fp32", name)
        plain = Words()
        twin = torch.optim.AdamW(plain.parameters(), lr=RATE)
        engine = model._forward_module
        assert engine.zero_optimization_stage() == STAGES[name]
        for tokens in list(loader)[:5]:
            loss = model(tokens)
            fabric.backward(loss)
            optimizer.step()
            shares = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
            dist.all_gather(shares, tokens)
            theirs = [plain(share) for share in shares]
            close([loss.item()], [theirs[dist.get_rank()].item()], 1e-5, "losses")
            twin.zero_grad()
            (sum(theirs) / len(theirs)).backward()  # type: ignore[union-attr]
            twin.step()
        engine.destroy()


def lightning_save(width: int) -> tuple[float, float, float]:
    """Growth of this rank's RSS while Lightning saves at stage 3, the model's size, and what rank 0 finds on disk."""
    import lightning.pytorch as pl

    class Wide(pl.LightningModule):
        def configure_model(self) -> None:
            self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(12)))

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(rows).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)

    with fresh_clients() as folder:
        strategy = lightning_runs.trainer_strategy(3)
        trainer = lightning_runs.make_trainer(strategy, "fp32", folder, max_steps=1, accumulate_grad_batches=1)
        trainer.fit(Wide(), torch.utils.data.DataLoader(torch.zeros(2, width), batch_size=1))
        before = _peak_from_now()
        trainer.save_checkpoint(Path(folder) / "wide.ckpt")
        growth = _resident("VmHWM") - before
        stored = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        trainer.strategy.model.destroy()
    return growth, 12 * width * width * 4.0, stored


def _resident(line: str) -> float:
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(next(row.split()[1] for row in status.splitlines() if row.startswith(line)))


def _peak_from_now() -> float:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    return _resident("VmRSS")


def module_moves() -> None:
    """`module.cpu()` and the like, which Lightning calls at the end, leave sharded parameters sharded."""
    model = Words()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    for move in (model.cpu, model.float, lambda: model.to("cpu", torch.float32)):
        move()
    assert all(p.device.type == "cpu" for p in model.parameters())
    moved = model.head.weight.to("meta")  # stands for another device
    model.head.weight.data = moved
    moved.zero_()
    for wrong in (moved, torch.zeros(model.head.weight.shape)):
        try:
            model.head.weight.data = wrong
        except deepspeed.errors.ShardedParameterError:
            continue
        raise AssertionError("a write to a sharded parameter went unnoticed")
    engine.backward(engine(sentences(2)))
    engine.step()
    engine.destroy()


def born_with_written_children() -> None:
    """Modules that write to parameters of their children in `__init__` are born with those values."""

    def build() -> Any:
        torch.manual_seed(0)
        return torch.nn.TransformerEncoderLayer(16, 2, 32)

    plain = build()
    with deepspeed.zero.Init():
        model = build()
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    assert same_values(model, plain)


def one_model_after_another() -> None:
    """A model that gets a second engine closes the first."""
    model = Words()
    first, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    twin = copy.deepcopy(model)
    assert json.dumps(sorted(twin.state_dict())) == json.dumps(sorted(model.state_dict()))
    second, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    try:
        first.step()
    except RuntimeError as error:
        assert "was destroyed" in str(error)
    else:
        raise AssertionError("the closed engine still steps")
    second.backward(second(sentences(2)))
    second.step()
    second.destroy()


def values_put_under_parameters() -> None:
    """A layer that repacks its weight in forward, as quantised ones do: equal values pass, others raise."""

    class Repacking(torch.nn.Linear):
        factor = 1.0

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data * self.factor
            return super().forward(rows)

    model = Repacking(8, 8)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    kinds = {p.ds_param_type.name for p in model.parameters()}
    assert kinds == {"PARTITIONED"} and model.weight.aligned_size() == 64 + model.weight.padding_size()
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    assert not engine.get_wall_clock_timers()
    Repacking.factor = 2.0
    try:
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    except deepspeed.errors.ShardedParameterError as error:
        assert "weight" in str(error)
    else:
        raise AssertionError("the repacked weight was lost without a word")
    engine.destroy()
