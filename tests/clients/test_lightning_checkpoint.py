"""The state Lightning's trainer really saves: twice over one tag, killed between, then through its own converter."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import deepspeed
from deepspeed.checkpoint.format import filesystem
from tests.parallel.checkpointing import everything, make, mixed, train


def trainer_state() -> dict[str, Any]:
    """What a trainer hands to its strategy, without the weights, as Lightning's DeepSpeed strategy does."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self, rate: float = 0.1, names: tuple[str, ...] = ("a", "b")) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(2, 2)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.layer(batch).sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = pl.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[EarlyStopping("loss"), ModelCheckpoint(dirpath="unused", save_top_k=0)],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(4, 2)))
    saved = trainer._checkpoint_connector.dump_checkpoint()
    return {key: value for key, value in saved.items() if key not in ("state_dict", "optimizer_states")}


class Killed(filesystem.FileSystem):
    def rename(self, old: Path, new: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def saved_twice(folder: str, stage: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    client = trainer_state()
    assert {"loops", "callbacks", "hyper_parameters"} <= client.keys()
    with make(stage) as engine:
        train(engine, iter(engine.training_dataloader), 1)
        engine.save_checkpoint(folder, "checkpoint", client_state=client)
        state = everything(engine)
        child = os.fork()
        if not child:
            filesystem.current = Killed()
            engine.save_checkpoint(folder, "checkpoint", client_state={"epoch": -1})
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        engine.save_checkpoint(folder, "checkpoint", client_state=client)
        _, found = engine.load_checkpoint(folder)
        assert found == {**client, "ds_version": deepspeed.__version__}
        return client, state


def test_what_lightning_saves_comes_back_and_converts(workers: Any, tmp_path: Path) -> None:
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    for stage in (2, 3):
        folder = tmp_path / str(stage)
        client, state = workers(1).run(saved_twice, str(folder), stage, timeout=90)[0]
        convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(tmp_path / "converted.ckpt"))
        converted = torch.load(tmp_path / "converted.ckpt", weights_only=False)
        assert {key: converted[key] for key in client} == client
        weights = converted["state_dict"]
        model = mixed(3)
        model.load_state_dict(weights)
        assert all(torch.equal(weights[name], state[name]) for name in weights if name in state)
