"""`nn.MultiheadAttention` shared out by heads: the dense numbers, forward and backward, with every kind of mask."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.tensor_parallel.attention import HeadParallel
from deepspeed.tensor_parallel.parallelize import cut_model
from deepspeed.tensor_parallel.plan import make_plan
from deepspeed.tensor_parallel.plan_file import read_plan, write_plan
from tests.parallel.dense import share_of

WIDTH, LENGTH, ROWS = 12, 5, 3
CLOSE = 2e-6


class Alone(nn.Module):
    """Self-attention, or attention to something of another width."""

    def __init__(self, heads: int = 4, memory: int | None = None, calls: Any = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, heads, kdim=memory, vdim=memory, **options)
        self.memory, self.calls = memory, calls or {}
        self.example_input_array = (torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, memory or WIDTH))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> Any:
        if not self.attention.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        return self.attention(x, memory if self.memory else x, memory if self.memory else x, **self.calls)


class Encoder(nn.Module):
    def __init__(self, batch_first: bool, **calls: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=batch_first)
        self.encoder, self.calls = nn.TransformerEncoder(layer, 2), calls
        self.example_input_array = torch.randn(ROWS, LENGTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.encoder.layers[0].self_attn.batch_first else x.transpose(0, 1)
        return self.encoder(x, **self.calls)


def padding() -> torch.Tensor:
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    mask[0, -2:] = True
    return mask


def causal() -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(LENGTH)


def by_head() -> torch.Tensor:
    return torch.randn(ROWS * 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))


CASES: dict[str, Any] = {
    "weights": lambda: Alone(batch_first=True),
    "no weights, rows second": lambda: Alone(calls={"need_weights": False}),
    "weights by head": lambda: Alone(batch_first=True, calls={"average_attn_weights": False}),
    "heads that do not divide": lambda: Alone(heads=3, batch_first=True),
    "no bias": lambda: Alone(bias=False),
    "another width": lambda: Alone(memory=7, batch_first=True, calls={"need_weights": False}),
    "padding": lambda: Alone(calls={"key_padding_mask": padding()}),
    "causal": lambda: Alone(batch_first=True, calls={"attn_mask": causal(), "is_causal": True, "need_weights": False}),
    "both masks": lambda: Alone(
        calls={"attn_mask": causal(), "key_padding_mask": padding().float().mul(-1e4), "need_weights": False}
    ),
    "mask by head": lambda: Alone(batch_first=True, calls={"attn_mask": by_head()}),
    "encoder": lambda: Encoder(True),
    "encoder, rows second, padding": lambda: Encoder(False, src_key_padding_mask=padding()),
    "encoder, padding": lambda: Encoder(True, src_key_padding_mask=padding()),
    "encoder, causal": lambda: Encoder(True, mask=causal(), is_causal=True),
}


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= CLOSE * wanted.abs().max().clamp(min=1))


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, torch.Tensor)]


def run(model: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and the gradients of the inputs; those of parameters are left in them."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = tensors(model(*leaves))
    weighing = torch.Generator().manual_seed(5)
    sum((t * torch.randn(t.shape, generator=weighing)).sum() for t in out).backward()  # type: ignore[union-attr]
    return [*out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(name: str) -> None:
    dense = CASES[name]()
    model = copy.deepcopy(dense)
    plan = cut_model(model, mesh_for({"tp": 2}).axis("tp"))
    assert not plan.whole, plan.whole
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    assert all(isinstance(module, HeadParallel) for module in attentions)
    inputs = tensors(dense.example_input_array)
    wanted, found = run(dense, inputs), run(model, inputs)
    assert len(wanted) == len(found) and all(map(close, found, wanted)), name
    for (param_name, param), whole in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert close(param.grad, share_of(param, whole.grad)), (name, param_name)
    dense.eval(), model.eval()
    with torch.no_grad():  # torch has a path of its own here
        ours, theirs = tensors(model(*inputs)), tensors(dense(*inputs))
        if name == "encoder, padding":  # nested tensors, which torch takes here, give zeros for padded rows
            ours = [ours[0].masked_fill(padding()[..., None], 0.0)]
        assert all(map(close, ours, theirs)), name


@pytest.mark.drawn(7)
@pytest.mark.parametrize("name", CASES)
def test_heads_that_are_shared_out_compute_what_the_whole_does(workers: Any, name: str) -> None:
    workers(2).run(compare, name)


def dropped() -> None:
    model = Alone(heads=3, batch_first=True, dropout=0.5, calls={"average_attn_weights": False})
    cut_model(model, mesh_for({"tp": 2}).axis("tp"))
    inputs = tensors(model.example_input_array)
    torch.manual_seed(1)
    out, weights = model(*inputs)
    states = [torch.zeros_like(torch.get_rng_state()) for _ in range(2)]
    dist.all_gather(states, torch.get_rng_state())
    assert torch.equal(*states)  # though the ranks have two heads and one
    masks = weights == 0
    assert masks.any() and not torch.equal(masks[:, 0], masks[:, 2])
    outs = [torch.zeros_like(out) for _ in range(2)]
    dist.all_gather(outs, out.detach())
    assert torch.equal(*outs)


def test_ranks_drop_their_heads_apart(workers: Any) -> None:
    workers(2).run(dropped)


def trained(stage: int) -> None:
    import deepspeed

    losses: dict[int, list[float]] = {}
    for tp in (1, 2):
        model = Encoder(True)
        settings = {
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},  # Adam moves biases of keys by rounding errors
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "tensor_parallel": {"autotp_size": tp},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        with engine:
            for _ in range(4):
                loss = engine(model.example_input_array).square().mean()
                engine.backward(loss)
                engine.step()
                losses.setdefault(tp, []).append(loss.item())
    assert losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_training_with_slices_equals_training_whole(workers: Any, stage: int) -> None:
    workers(2).run(trained, stage)


def test_what_stays_whole_is_named_with_the_reason() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Net(nn.Module):
        def __init__(self, attention: nn.Module) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH)), attention])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.blocks[0](x)
            return x + self.blocks[1](x, x, x)[0]

    reasons = {
        "Own has a forward of its own": Own(WIDTH, 4),
        "an entry more (add_bias_kv": nn.MultiheadAttention(WIDTH, 4, add_bias_kv=True),
        "1 heads cannot be shared out to 2 ranks": nn.MultiheadAttention(WIDTH, 1),
    }
    for reason, attention in reasons.items():
        plan = make_plan(Net(attention), 2, 0, torch.randn(ROWS, LENGTH, WIDTH))
        for name in ("in_proj_weight", "out_proj.weight"):
            assert reason in plan.whole[f"blocks.1.{name}"], plan.table()


def test_the_plan_goes_through_a_file(tmp_path: Path) -> None:
    model = Encoder(True)
    write_plan(str(tmp_path / "plan.json"), model, ranks=2)
    found = read_plan(str(tmp_path / "plan.json"), model, ranks=2, rank=1)
    assert found.table() == make_plan(model, 2, 1).table()
    assert "encoder.layers.*.self_attn.out_proj.weight (2)  row" in found.table()
