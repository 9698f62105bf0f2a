"""Ten architectures with their operations by hand: forward, backward, and what backward computes again.

Shapes: `B` samples of `S` tokens (`T` on the decoder's side), width `E`, a vocabulary of `V`. Blocks are checkpointed
each by itself: `again` is None, or `use_reentrant`. Without it, torch stops a block's recomputation as soon as all that
was saved is there, and so does not compute its last product, of which nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

B, S, T, E, V, HEADS, KV_HEADS, R = 2, 6, 5, 8, 11, 4, 2, 3
N = B * S


class Counts(NamedTuple):
    forward: int
    backward: int
    again: int


def lin(tokens: int, into: int, out: int) -> int:
    return 2 * tokens * into * out


def scores(queries: int, keys: int) -> int:
    """One of the two products of attention."""
    return 2 * B * queries * keys * E


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fused: bool) -> torch.Tensor:
    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, E // HEADS)).transpose(1, 2)

    q, k, v = heads(q), heads(k), heads(v)
    if fused:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = (q @ k.transpose(-1, -2) / (E // HEADS) ** 0.5).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, fused: bool, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(E, E), nn.Linear(E, E)
        self.kv = nn.Linear(E, 2 * kv_heads * E // HEADS)
        self.fused = fused

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        k, v = self.kv(x if other is None else other).chunk(2, dim=-1)
        return self.out(attend(self.q(x), k, v, self.fused))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(E, 4 * E), nn.Linear(4 * E, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, fused: bool, kv_heads: int = HEADS, crosses: bool = False) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(E), Attention(fused, kv_heads), Mlp()
        self.cross = Attention(fused) if crosses else None

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        if self.cross is not None:
            x = x + self.cross(x, other)
        return x + self.mlp(x)


def attention_flops(queries: int, keys: int, kv_heads: int = HEADS) -> int:
    into = lin(B * queries, E, E) + lin(B * keys, E, 2 * kv_heads * E // HEADS)
    return into + 2 * scores(queries, keys) + lin(B * queries, E, E)


def mlp_flops(tokens: int) -> int:
    return lin(tokens, E, 4 * E) + lin(tokens, 4 * E, E)


def run(block: nn.Module, again: bool | None, *inputs: torch.Tensor) -> torch.Tensor:
    return block(*inputs) if again is None else checkpoint(block, *inputs, use_reentrant=again)


def again_of(block: int, last: int, again: bool | None) -> int:
    """What a checkpointed block computes again, given its forward and its last product."""
    return 0 if again is None else block if again else block - last


class Decoder(nn.Module):
    """GPT: the head has the embedding's weight."""

    def __init__(self, fused: bool, again: bool | None, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, E), nn.Linear(E, V, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(fused, kv_heads) for _ in range(2))
        self.again = again

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = run(block, self.again, x)
        return self.head(x)


def decoder_counts(fused: bool, again: bool | None, kv_heads: int = HEADS) -> Counts:
    block = attention_flops(S, S, kv_heads) + mlp_flops(N)
    forward = 2 * block + lin(N, E, V)
    hidden = 2 * scores(S, S) * fused
    return Counts(forward, 2 * forward, 2 * again_of(block, lin(N, 4 * E, E), again) + hidden)


class EncoderDecoder(nn.Module):
    """T5."""

    def __init__(self, fused: bool, again: bool | None) -> None:
        super().__init__()
        self.embed, self.again = nn.Embedding(V, E), again
        self.encoder, self.decoder = Block(fused), Block(fused, crosses=True)
        self.head = nn.Linear(E, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        coded = run(self.encoder, self.again, self.embed(ids))
        return self.head(run(self.decoder, self.again, self.embed(ids[:, :T]), coded))


def encoder_decoder_counts(fused: bool, again: bool | None) -> Counts:
    encoder = attention_flops(S, S) + mlp_flops(N)
    decoder = attention_flops(T, T) + attention_flops(T, S) + mlp_flops(B * T)
    forward = encoder + decoder + lin(B * T, E, V)
    hidden = (scores(S, S) + scores(T, T) + scores(T, S)) * fused
    blocks = again_of(encoder, lin(N, 4 * E, E), again) + again_of(decoder, lin(B * T, 4 * E, E), again)
    return Counts(forward, 2 * forward, blocks + hidden)


class Experts(nn.Module):
    """A mixture in which each token has one expert; an expert without tokens does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(E, 4), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, E)
        gates, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for at, expert in enumerate(self.experts):
            mine = (chosen == at).nonzero().squeeze(-1)
            if mine.numel():
                out = out.index_add(0, mine, expert(flat[mine]))
        return (out * gates[:, None]).view_as(x)


class Mixture(nn.Module):
    def __init__(self, fused: bool, again: bool | None) -> None:
        super().__init__()
        self.embed, self.again = nn.Embedding(V, E), again
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = run(layer, self.again, x)
        return x


def mixture_counts(fused: bool, again: bool | None) -> Counts:
    layer = lin(N, E, 4) + mlp_flops(N)
    return Counts(2 * layer, 4 * layer, 2 * again_of(layer, 0, again))  # the gates' product saves the experts' output


class Adapted(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(E, E), nn.Linear(E, R, bias=False), nn.Linear(R, E, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x) + self.b(self.a(x))).tanh()


class Dense(nn.Module):
    """Layers over plain numbers, whose gradient nobody wants."""

    def __init__(self, layers: list[nn.Module], again: bool | None) -> None:
        super().__init__()
        self.layers, self.again = nn.ModuleList(layers), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = run(layer, self.again, x)
        return x


def lora(fused: bool, again: bool | None) -> nn.Module:
    return Dense([Adapted(), Adapted()], again)


def lora_counts(fused: bool, again: bool | None) -> Counts:
    base, a, b = lin(N, E, E), lin(N, E, R), lin(N, R, E)
    first, second = a + 2 * b, base + 2 * a + 2 * b  # weights of A alone; then the inputs' gradient as well
    return Counts(2 * (base + a + b), first + second, 2 * again_of(base + a + b, 0, again))


def mlp(fused: bool, again: bool | None) -> nn.Module:
    return Dense([nn.Sequential(nn.Linear(E, 4 * E), nn.Tanh()), nn.Linear(4 * E, V)], again)


def mlp_counts(fused: bool, again: bool | None) -> Counts:
    one, two = lin(N, E, 4 * E), lin(N, 4 * E, V)
    recomputed = again_of(one, 0, again) + again_of(two, two, again)
    return Counts(one + two, one + 2 * two, recomputed)


class Convolutions(nn.Module):
    """Strided, depthwise and transposed."""

    def __init__(self, fused: bool, again: bool | None) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(3, E, 3, stride=2, padding=1), again
        self.depthwise = nn.Conv2d(E, E, 3, padding=1, groups=E)
        self.up = nn.ConvTranspose2d(E, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(run(nn.Sequential(self.depthwise, nn.Tanh()), self.again, self.first(x)))


def convolution_counts(fused: bool, again: bool | None) -> Counts:
    first, depthwise, up = 2 * B * 16 * E * 3 * 9, 2 * B * 16 * E * 9, 2 * B * 16 * E * 4 * 4
    return Counts(first + depthwise + up, first + 2 * (depthwise + up), again_of(depthwise, 0, again))


class Recurrent(nn.Module):
    """Two layers, both directions."""

    def __init__(self, fused: bool, again: bool | None) -> None:
        super().__init__()
        self.embed, self.again = nn.Embedding(V, E), again
        self.lstm, self.head = nn.LSTM(E, R, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(2 * R, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def recurrent_counts(fused: bool, again: bool | None) -> Counts:
    layers = 2 * (lin(N, E, 4 * R) + lin(N, R, 4 * R)) + 2 * (lin(N, 2 * R, 4 * R) + lin(N, R, 4 * R))
    forward = layers + lin(N, 2 * R, V)
    return Counts(forward, 2 * forward, 0)


class Caller(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.own, self.inner = nn.Linear(E, E), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.own(x)).tanh()


class Shared(nn.Module):
    """One module under two parents, each of which calls it."""

    def __init__(self, fused: bool, again: bool | None) -> None:
        super().__init__()
        inner = nn.Linear(E, E)
        self.embed, self.again = nn.Embedding(V, E), again
        self.one, self.other = Caller(inner), Caller(inner)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return run(self.other, self.again, run(self.one, self.again, self.embed(ids)))


def shared_counts(fused: bool, again: bool | None) -> Counts:
    caller = 2 * lin(N, E, E)
    return Counts(2 * caller, 4 * caller, 2 * again_of(caller, 0, again))


class Vectors(nn.Module):
    """A matrix by a vector, and a vector by a vector: outer products of backward are elementwise."""

    def __init__(self, fused: bool, again: bool | None) -> None:
        super().__init__()
        self.vector, self.other = nn.Parameter(torch.randn(E)), nn.Parameter(torch.randn(N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dot(torch.mv(x.reshape(-1, E), self.vector), self.other)


def vector_counts(fused: bool, again: bool | None) -> Counts:
    return Counts(2 * N * E + 2 * N, 2 * N * E, 0)


def ids() -> torch.Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(0))


def numbers() -> torch.Tensor:
    return torch.randn(B, S, E, generator=torch.Generator().manual_seed(0))


def picture() -> torch.Tensor:
    return torch.randn(B, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Case(NamedTuple):
    make: Callable[[bool, bool | None], nn.Module]
    counts: Callable[[bool, bool | None], Counts]
    inputs: Callable[[], torch.Tensor]
    attends: bool = False
    recomputes: tuple[bool | None, ...] = (None, False, True)


def _gqa(of: Callable[..., Any]) -> Callable[[bool, bool | None], Any]:
    return lambda fused, again: of(fused, again, KV_HEADS)


CASES = {
    "gpt": Case(Decoder, decoder_counts, ids, attends=True),
    "gqa": Case(_gqa(Decoder), _gqa(decoder_counts), ids, attends=True),
    "t5": Case(EncoderDecoder, encoder_decoder_counts, ids, attends=True),
    "moe": Case(Mixture, mixture_counts, ids),
    "lora": Case(lora, lora_counts, numbers, recomputes=(None, False)),
    "mlp": Case(mlp, mlp_counts, numbers, recomputes=(None, False)),
    "conv": Case(Convolutions, convolution_counts, picture),
    "lstm": Case(Recurrent, recurrent_counts, ids, recomputes=(None,)),
    "shared": Case(Shared, shared_counts, ids),
    "vectors": Case(Vectors, vector_counts, numbers, recomputes=(None,)),
}
CELLS = [
    (name, fused, again)
    for name, case in CASES.items()
    for fused in ((False, True) if case.attends else (False,))
    for again in case.recomputes
]
