"""One Lightning model of bytes, the same under every strategy, and its data from files of this machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class Block(nn.TransformerEncoderLayer):
    """A pre-norm transformer block that looks back only."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Same shape as `x`: (batch, time, width)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


class ByteModel(pl.LightningModule):
    """Predicts the next byte."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.net: Any = None

    def configure_model(self) -> None:
        """Made here, so that stage 3 shards it as it is born."""
        if self.net is None:
            torch.manual_seed(self.config.seed)
            m = self.config.model
            blocks = [Block(m.width, m.heads) for _ in range(m.layers)]
            self.net = nn.Sequential(
                nn.Embedding(m.vocabulary, m.width), *blocks, nn.LayerNorm(m.width), nn.Linear(m.width, m.vocabulary)
            )

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Mean cross-entropy per byte."""
        logits = self.net(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any torch optimizer does."""
        return torch.optim.AdamW(self.parameters(), lr=self.config.lr)


def loader(config: Any, rank: int, ranks: int) -> DataLoader[Any]:
    """A rank's windows of bytes of Python's own standard library, the same under every strategy."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(path.read_bytes() for path in files)[:2_000_000]
    windows = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    count = len(windows) // (config.sequence + 1)
    rows = windows[: count * (config.sequence + 1)].view(count, -1)
    generator = torch.Generator().manual_seed(config.seed)
    rows = rows[torch.randperm(count, generator=generator)]
    sampler = DistributedSampler(rows, ranks, rank, shuffle=False)  # type: ignore[arg-type]
    return DataLoader(rows, batch_size=config.micro, sampler=sampler)  # type: ignore[arg-type]
