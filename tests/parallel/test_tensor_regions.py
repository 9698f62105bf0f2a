"""What a plan makes of forwards that few models have: each was once followed wrongly, or left whole without need."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.errors import TensorParallelError
from deepspeed.tensor_parallel import channel_dependencies
from deepspeed.tensor_parallel.parallelize import cut_model
from deepspeed.tensor_parallel.plan import make_plan
from deepspeed.zero.layout.placement import Relation, placement_of
from tests.parallel.dense import share_of

WIDTH, HEADS, SIZE = 8, 4, 6


class Attention(nn.Module):
    """Latent keys, and a rotary part that all heads share, written beside them into one new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * SIZE)
        self.latent, self.kv = nn.Linear(WIDTH, 5 + 2), nn.Linear(5, HEADS * (SIZE - 2 + SIZE))
        self.o = nn.Linear(HEADS * SIZE, WIDTH)

    def turned(self, shared: torch.Tensor) -> torch.Tensor:
        turns = torch.polar(torch.ones(shared.shape[1], 1), torch.arange(shared.shape[1])[:, None] * 0.3)
        return torch.view_as_real(torch.view_as_complex(shared[..., None, :].contiguous()) * turns).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        latent, shared = self.latent(x).split([5, 2], -1)
        made = self.kv(torch.tanh(latent)).view(rows, length, -1, SIZE - 2 + SIZE).transpose(1, 2)
        key, value = made.split([SIZE - 2, SIZE], -1)
        whole = key.new_empty(*key.shape[:-1], SIZE)
        whole[..., : SIZE - 2].copy_(key)
        whole[..., SIZE - 2 :].copy_(self.turned(shared)[:, None].expand(-1, key.shape[1], -1, -1))
        query = self.q(x).view(rows, length, -1, SIZE).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(query, whole, value).transpose(1, 2).flatten(2))


class Filtered(nn.Module):
    """A filter over time for each channel between two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.filters = nn.Conv1d(12, 12, 3, padding=2, groups=12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).transpose(1, 2)
        return self.down(torch.tanh(self.filters(hidden)[..., : x.shape[1]]).transpose(1, 2))


class Shut(nn.Module):
    """So many channels that some are shut in each of the first draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6000), nn.Linear(6000, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x.mean(1, keepdim=True)))).expand_as(x)


class Remembering(nn.Module):
    """Adds what it computes to a memory that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor, memory: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if memory is not None:
            memory["all"] = torch.cat([memory.get("all", hidden[:, :0]), hidden], 1)
            hidden = hidden + memory["all"].mean(1, keepdim=True)
        return self.down(hidden)


class InARow(nn.Module):
    """A feed-forward whose layers are numbered, as blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(x)


class Stack(nn.Module):
    """Blocks in a stream."""

    example_input_array = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0))

    def __init__(self, kind: Any, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks, self.more = nn.Linear(WIDTH, WIDTH), nn.ModuleList(kind() for _ in range(2)), more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x, **{key: made() for key, made in self.more.items()})
        return x


@pytest.mark.parametrize(
    ("kind", "more", "columns"),
    [
        (Attention, {}, {"q", "latent", "kv"}),
        (Filtered, {}, {"up"}),
        (Shut, {}, {"up"}),
        (Remembering, {"memory": dict}, {"up"}),
        (InARow, {}, {"ff"}),
    ],
)
def test_all_of_a_block_is_cut(kind: Any, more: Any, columns: set[str]) -> None:
    for rank in range(2):
        plan = make_plan(Stack(kind, **more), 2, rank)
        assert not plan.whole and plan.part() < 0.7
        assert {name.split(".")[2] for name, how in plan.cuts().items() if how == "column"} == columns


class Numbered(nn.Sequential):
    """Blocks whose names begin with their numbers, with another Sequential inside, or the layers of one block."""

    example_input_array = Stack.example_input_array


def numbered_block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH), nn.GELU())


@pytest.mark.parametrize(
    ("model", "columns", "rows"),
    [
        (Numbered(numbered_block(), numbered_block()), ["0.0", "1.0"], ["0.2", "1.2"]),
        (Numbered(*numbered_block()), ["0"], ["2"]),
    ],
)
def test_a_numbered_model_is_cut_within_its_blocks(model: nn.Module, columns: list[str], rows: list[str]) -> None:
    cuts = make_plan(model, 2, 0).cuts()
    assert sorted(name.removesuffix(".weight") for name, how in cuts.items() if how == "column") == columns
    assert sorted(name.removesuffix(".weight") for name, how in cuts.items() if how == "row") == rows


class Idle(nn.Module):
    """A block with a matrix that the small input does not reach, and one without a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.other, self.alone = nn.Linear(WIDTH, 30), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) + self.alone(x)


def test_no_matrix_of_a_block_is_left_out_of_the_figures() -> None:
    plan = make_plan(Stack(Idle), 2, 0)
    assert {name.split(".")[2] for name in plan.whole} == {"other", "alone"}
    assert "small input" in plan.whole["blocks.0.other.weight"]
    cut, whole = 2 * WIDTH * 12, WIDTH * 30 + WIDTH * WIDTH
    assert plan.part() == pytest.approx((cut / 2 + whole) / (cut + whole))


class Experts(nn.Module):
    """Experts in three dims, the last with a bias that is added to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(3, WIDTH, 24)), nn.Parameter(torch.randn(3, 24))
        self.down, self.down_bias = nn.Parameter(torch.randn(3, 12, WIDTH)), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for at in range(3):
            gate, up = (x @ self.up[at] + self.up_bias[at]).chunk(2, -1)
            made = made + (torch.sigmoid(gate) * up) @ self.down[at] + self.down_bias[at]
        return made


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x)


def added(kind: Any) -> None:
    model = Stack(kind)
    dense, order = copy.deepcopy(model), [name for name, _ in model.named_parameters()]
    plan = cut_model(model, mesh_for({"tp": 2}).axis("tp"))
    assert not set(plan.whole) - {f"blocks.{at}.experts.{name}_bias" for at in range(2) for name in ("up", "down")}
    outs = [one(one.example_input_array) for one in (model, dense)]
    for out in outs:
        out.square().sum().backward()
    assert (outs[0] - outs[1]).abs().max() <= 1e-5 * outs[1].abs().max()
    assert order == [name for name, _ in model.named_parameters()]
    for name, param in dense.named_parameters():
        ours = model.get_parameter(name)
        assert ours.grad is not None and param.grad is not None
        grad = ours.grad.clone()
        if placement_of(ours).relations.get("tp") is Relation.PARTIAL:
            dist.all_reduce(grad)
        assert (grad - share_of(ours, param.grad)).norm() <= 1e-5 * param.grad.norm(), name
    small = model.blocks[0].experts.down if kind is Mixture else model.blocks[0].ff[2].weight.t()  # type: ignore[union-attr]
    assert small.shape[-2:] == (6, WIDTH)


@pytest.mark.parametrize("kind", [Mixture, InARow])
def test_biases_behind_rows_are_added_once(workers: Any, kind: Any) -> None:
    workers(2).run(added, kind)


class Recurrent(nn.Module):
    """Hands its blocks a state of the size that it knows, when it keeps a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stateful() for _ in range(2))

    @property
    def example_input_array(self) -> Any:
        return {"x": torch.ones(2, 7, WIDTH), "use_cache": False}

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x, [torch.zeros(len(x), 1, 12)] if use_cache else None)
        return x


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor, state: list[torch.Tensor] | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        return self.down(hidden if state is None else hidden + state[0])


class Lonely(Recurrent):
    """A model without a pair of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity()])

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        return x


def test_a_model_without_a_pair_is_refused_by_name() -> None:
    with pytest.raises(TensorParallelError, match="Lonely cannot be split over 2 ranks"):
        make_plan(Lonely(), 2, 0)


def test_a_block_that_is_handed_a_state_stays_whole() -> None:
    with pytest.raises(TensorParallelError, match="hands it a state"):
        make_plan(Recurrent(), 2, 0)


class LaterOnly(Recurrent):
    """Hands a state to all blocks but the first."""

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        for at, block in enumerate(self.blocks):
            x = x + block(x, [torch.zeros(len(x), 1, 12)] if use_cache and at else None)
        return x


class Around(nn.Module):
    """Takes `use_cache` among others, as PEFT's wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Recurrent()

    @property
    def example_input_array(self) -> Any:
        return self.inner.example_input_array

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.inner(x, **more)


class ByConfig(nn.Module):
    """Caches as its config says, which a client has turned off to train."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = Recurrent(), LlamaConfig(use_cache=False)

    @property
    def example_input_array(self) -> Any:
        return torch.ones(2, 7, WIDTH)

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.inner(x, use_cache=self.config.use_cache)


@pytest.mark.parametrize("kind", [LaterOnly, Around, ByConfig])
def test_states_of_any_module_behind_any_wrapper_are_seen(kind: Any) -> None:
    model = kind()
    with pytest.raises(TensorParallelError, match="hands it a state of all channels"):
        make_plan(model, 2, 0)
    assert kind is not ByConfig or model.config.use_cache is False


class Unread(nn.Module):
    """Some outputs that nobody reads, which no draw ever shows."""

    example_input_array = torch.ones(3, WIDTH)

    def __init__(self) -> None:
        super().__init__()
        pair = {"up": nn.Linear(WIDTH, 14), "down": nn.Linear(12, WIDTH)}
        self.blocks = nn.ModuleList([nn.ModuleDict(pair)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block: Any = self.blocks[0]
        return x + block["down"](torch.relu(block["up"](x)[..., :12]))


def test_what_nobody_reads_is_not_drawn_for_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, draws = channel_dependencies._masks, []

    def counted(*args: Any) -> Any:
        draws.append(args[-1])
        return inner(*args)

    monkeypatch.setattr(channel_dependencies, "_masks", counted)
    make_plan(Unread(), 2, 0)
    assert channel_dependencies.DRAWS <= max(draws) + 1 < channel_dependencies.MOST_DRAWS / 2
