"""The models of `benchmarks/simulate.py`: decoders in published tables' shapes, attention a fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PER_HOST = 8  # ranks, as all cards' files have it


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Args:
        layers: blocks.
        width: of the residual stream.
        heads: of queries.
        inner: of the MLP; gated where `gated`.
        vocabulary: tokens known.
        kv_heads: of keys and values.
        gated: three matrices with SiLU and RMS norms (Llama), else two with GELU and layer norms (MPT).
        tied: the head is the embedding.
    """

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    kv_heads: int
    gated: bool
    tied: bool

    @property
    def parameters(self) -> int:
        """In matrices and norms."""
        kv = self.width * self.kv_heads // self.heads
        block = 2 * self.width * (self.width + kv) + (3 if self.gated else 2) * self.width * self.inner + 2 * self.width
        return self.layers * block + (1 if self.tied else 2) * self.vocabulary * self.width + self.width


def mpt(layers: int, width: int, heads: int) -> Shape:
    """llm-foundry's MPT."""
    return Shape(layers, width, heads, 4 * width, 50368, heads, False, True)


def llama(layers: int, width: int, heads: int, inner: int, kv_heads: int = 0, vocabulary: int = 32000) -> Shape:
    """Llama's."""
    return Shape(layers, width, heads, inner, vocabulary, kv_heads or heads, True, False)


SHAPES = {
    "mpt-760m": mpt(24, 1536, 12),
    "mpt-1b": mpt(24, 2048, 16),
    "mpt-3b": mpt(32, 2560, 20),
    "mpt-7b": mpt(32, 4096, 32),
    "mpt-13b": mpt(40, 5120, 40),
    "mpt-30b": mpt(48, 7168, 56),
    "mpt-70b": mpt(80, 8192, 64),
    "gpt2": mpt(12, 768, 12),
    "llama-tiny": llama(2, 64, 2, 172, vocabulary=512),
    "llama-90m": llama(3, 1024, 16, 2816),
    "llama-220m": llama(12, 1024, 16, 2816),
    "llama-1.3b": llama(24, 2048, 16, 5504),
    "llama-7b": llama(32, 4096, 32, 11008),
    "llama-13b": llama(40, 5120, 40, 13824),
    "llama-70b": llama(80, 8192, 64, 28672, 8),
    "llama3-8b": llama(32, 4096, 32, 14336, 8, 128256),
}


def package_config(stage: int, micro: int, offload: str = "") -> dict[str, Any]:
    """This package's JSON: bf16 on the wire, fp32 master and sums, torch's fused AdamW, or the host's with `offload`
    (`optimizer-cpu`, `all-nvme`, …)."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        "zero_optimization": {"stage": stage, "stage3_fixed_graph": stage == 3, "overlap_publish": stage in (1, 2)},
    }
    where, _, tier = offload.partition("-")
    on = {"device": tier, "pin_memory": True} | ({"nvme_path": "/tmp"} if tier == "nvme" else {})
    if where:
        made["zero_optimization"]["offload_optimizer"] = on
        made["optimizer"]["params"] = {"lr": 1e-4}
    if where == "all":
        made["zero_optimization"]["offload_param"] = on
    return made


class Norm(nn.Module):
    """Layer norm without bias, or RMS norm: one fused kernel each way."""

    def __init__(self, width: int, rms: bool) -> None:
        super().__init__()
        self.weight, self.rms = nn.Parameter(torch.ones(width)), rms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        if self.rms:
            return torch._fused_rms_norm(x, weight.shape, weight, 1e-5)[0]
        return F.layer_norm(x, weight.shape, weight)


attention: Any = torch.ops.aten._scaled_dot_product_flash_attention


class Attention(nn.Module):
    """Causal attention as one kernel. Rotations of positions count as one pass over queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kv = shape.width * shape.kv_heads // shape.heads
        self.heads, self.kv_heads, self.gated = shape.heads, shape.kv_heads, shape.gated
        if shape.gated:
            self.query = nn.Linear(shape.width, shape.width, bias=False)
            self.key, self.value = (nn.Linear(shape.width, kv, bias=False) for _ in range(2))
        else:
            self.together = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (self.query(x), self.key(x), self.value(x)) if self.gated else self.together(x).chunk(3, -1)
        q, k, v = (t.view(batch, length, -1, width // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.gated:
            q, k = q * 1.0, k * 1.0
        if self.kv_heads < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        made = attention(q, k, v, 0.0, True)[0]
        return self.out(made.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before, self.after = Norm(shape.width, shape.gated), Norm(shape.width, shape.gated)
        self.attention = Attention(shape)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        h = self.after(x)
        return x + self.down(F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Tokens to loss."""

    def __init__(self, shape: Shape, recompute: bool = False, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.shape, self.recompute = shape, recompute
        self.run = run or (lambda block, x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False))
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.gated)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, self.shape.vocabulary).float(), tokens.view(-1))  # as autocast does
