"""Memory that somebody still holds: views, outputs and detached values outlive the freeing of their parameter."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.tiny import WIDTH, adamw, rows, start, tiny
from tests.parallel.view_programs import run_programs

RANKS = 2
LIMITS = {
    "nothing": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
    "default": {},
}
WHOLE = {"stage3_param_persistence_threshold": 0}


def setting(limits: str, tier: str = "device") -> dict[str, Any]:
    """The `zero_optimization` entries of a cell."""
    entries: dict[str, Any] = WHOLE | LIMITS[limits]
    if tier == "device":
        return entries
    place = {"device": tier, "max_in_cpu": 0, "nvme_path": tempfile.gettempdir() + "/deepspeed-tests"}
    return entries | {"offload_param": place if tier == "nvme" else {"device": tier}}


class Latents(nn.Module):
    """Gives (a view of) its own parameter, as Perceiver's position embeddings do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table = how, nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {
            "itself": lambda: self.table,
            "expanded": lambda: self.table.expand(2, -1, -1),
            "transposed": lambda: self.table.t(),
            "row": lambda: self.table[1],
            "detached": lambda: self.table.detach(),
            "data": lambda: self.table.data,
        }[self.how]()
        return given


class Gives(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.latents, self.out = nn.Linear(WIDTH, WIDTH), Latents(how), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.latents(x)
        self.seen = given
        return self.out(torch.tanh(self.first(x)) * given.reshape(-1, WIDTH)[: len(x)])


HOW = ("itself", "expanded", "transposed", "row", "detached", "data")


def gives_its_own() -> None:
    for how in HOW:
        for limits in LIMITS:
            torch.manual_seed(0)
            model = Gives(how)
            twin = copy.deepcopy(model)
            plain = torch.optim.SGD(twin.parameters(), lr=0.1)
            with start(3, model, sharded=False, zero=setting(limits)) as engine:
                for step in range(3):
                    for rank in range(RANKS):
                        (twin(rows(step, rank)).square().mean() / RANKS).backward()
                    loss = engine(rows(step, dist.get_rank())).square().mean()
                    assert torch.equal(engine.module.seen.clone(), twin.seen), (how, limits, step)
                    loss.backward()
                    engine.step()
                    plain.step()
                    plain.zero_grad()
                    close = torch.allclose(engine.module.seen.clone(), twin.seen, atol=1e-6)
                    assert close, f"{how}, {limits}: after step {step} what was given is not the parameter"
                engine.module.seen = None


def test_a_module_that_gives_its_own_parameter(workers: Any) -> None:
    workers(RANKS).run(gives_its_own, timeout=90)


def collects(tier: str, limits: str, born: bool) -> None:
    import deepspeed

    dense = tiny()
    entries = setting(limits, tier)
    if born:
        from tests.parity.configs import config

        with deepspeed.zero.Init(config_dict_or_path=config(3, dense, sharded=False, zero=entries)):
            model = tiny()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            early = {n: p.detach() for n, p in model.named_parameters()}
        for name, param in dense.named_parameters():
            assert torch.equal(early[name], param), name
        with start(3, model, sharded=False, zero=entries) as engine:
            same_as(engine)
        for name, param in dense.named_parameters():
            assert torch.equal(early[name], param), name
        return
    with start(3, sharded=False, zero=entries) as engine:
        same_as(engine)


def same_as(engine: Any) -> None:
    """Values collected while gathered are the parameter's, before a step and after it."""
    import deepspeed

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        kept = {f"{n}.data": p.data for n, p in named.items()} | {n: p.detach() for n, p in named.items()}
        before = {n: p.detach().clone() for n, p in named.items()}
    for step in range(2):
        for name, value in kept.items():
            assert torch.equal(value, before[name.removesuffix(".data")]), (name, step)
        engine.backward(engine(rows(step, dist.get_rank())).square().mean())
        engine.step()
        before = {n: p.clone() for n, p in named.items()}
    for name, value in kept.items():
        assert torch.equal(value, before[name.removesuffix(".data")]), name


@pytest.mark.drawn(3)
@pytest.mark.parametrize("born", [False, True])
@pytest.mark.parametrize(("tier", "limits"), [("device", "default"), ("device", "nothing"), ("cpu", "default")])
def test_values_collected_while_gathered(workers: Any, tier: str, limits: str, born: bool) -> None:
    workers(RANKS).run(collects, tier, limits, born, timeout=90)


def perceiver() -> None:
    from transformers import PerceiverConfig, PerceiverForMaskedLM

    torch.manual_seed(0)
    shape = PerceiverConfig(
        num_latents=8, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2, vocab_size=40,
        num_self_attention_heads=2, num_cross_attention_heads=2, max_position_embeddings=12,
        attention_probs_dropout_prob=0.0, qk_channels=16, v_channels=16,
    )  # fmt: skip
    model = PerceiverForMaskedLM(shape)
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-4)
    tokens = torch.arange(24).view(2, 12)
    with start(3, model, optimizer=adamw, sharded=False, zero=setting("nothing")) as engine:
        for _ in range(2):
            theirs = twin(inputs=tokens, labels=tokens).loss
            ours = engine(inputs=tokens, labels=tokens).loss
            assert torch.allclose(ours, theirs, rtol=1e-5), (ours, theirs)
            theirs.backward()
            plain.step()
            plain.zero_grad()
            engine.backward(ours)
            engine.step()


def test_perceiver_trains_with_everything_freed(workers: Any) -> None:
    workers(RANKS).run(perceiver, timeout=90)


def check_programs(workers: Any, numbers: list[int], folder: Path, timeout: float) -> None:
    for wrong, refused in workers(RANKS).run(run_programs, numbers, str(folder), timeout=timeout):
        assert not wrong, "\n".join(wrong)
        assert refused < len(numbers) / 2


def test_random_programs_over_views(workers: Any, tmp_path: Path) -> None:
    check_programs(workers, [*range(9), 538], tmp_path, 180)  # 538: a write that is refused, then destroy()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_2000_random_programs_over_views(workers: Any, tmp_path: Path, first: int) -> None:
    check_programs(workers, list(range(first, first + 100)), tmp_path, 600)
