"""Dropout: alike over `tp` where activations are whole, apart where they are cut, the same when computed again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.errors import TensorParallelError
from deepspeed.tensor_parallel.parallelize import cut_model
from tests.parallel.tensor_runs import batch_of, model_of
from tests.parallel.tiny import raises


def gpt2(attention: float, residual: float) -> Any:
    model = model_of("GPT2")
    model.config._attn_implementation = "eager"  # so that its masks can be seen
    for block in model.transformer.h:
        block.attn.attn_dropout.p, block.attn.resid_dropout.p, block.mlp.dropout.p = attention, residual, residual
    model.transformer.drop.p = residual
    return model.train()


class Masks:
    """What dropout modules drop."""

    def __init__(self, model: Any) -> None:
        self.by_name: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(self._note(name))

    def _note(self, name: str) -> Any:
        return lambda _, args, out: self.by_name.setdefault(name, []).append(((out == 0) & (args[0] != 0)).detach())


def everyone(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.zeros_like(tensor, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.to(torch.uint8).contiguous())
    return found


def gradients(model: Any, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(**batch_of(model, 0, 0)).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


Run = tuple[torch.Tensor, dict[str, torch.Tensor]]


def alike(found: Run, wanted: Run) -> bool:
    """Up to the rounding of products over memory that lies elsewhere; other masks are far beyond it."""
    ours, theirs = ([run[0], *(run[1][name] for name in wanted[1])] for run in (found, wanted))
    return all(float((a - b).abs().max()) <= 1e-5 * float(b.abs().max()) for a, b in zip(ours, theirs, strict=True))


def drawn() -> None:
    torch.manual_seed(100 + dist.get_rank())  # a script that seeds by rank
    model = gpt2(0.3, 0.3)
    cut_model(model, mesh_for({"tp": 2}).axis("tp"))
    masks = Masks(model)
    for _ in range(2):
        model(**batch_of(model, 0, 0))
    for name, drops in masks.by_name.items():
        for drop in drops:
            ranks = everyone(drop)
            cut = name.endswith("attn_dropout")
            assert drop.any() and torch.equal(ranks[0], ranks[1]) is not cut, name
        assert not torch.equal(drops[0], drops[1]), name
    first = gradients(model, 5)
    assert alike(gradients(model, 5), first)
    assert not alike(gradients(model, 6), first)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert alike(gradients(model, 5), first), reentrant
    model.eval()
    outs = everyone((model(**batch_of(model, 0, 0)).logits * 1e4).long() % 256)
    assert torch.equal(outs[0], outs[1])


def test_regions_draw_apart_and_the_rest_alike(workers: Any) -> None:
    workers(2).run(drawn, timeout=60)


class Both(torch.nn.Module):
    """Drops cut and whole activations in one forward."""

    example_input_array = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(8, 8)
        pair = {"up": (8, 12), "down": (12, 8)}
        blocks = [{name: torch.nn.Linear(*sizes) for name, sizes in pair.items()} for _ in range(2)]
        self.blocks = torch.nn.ModuleList(map(torch.nn.ModuleDict, blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            hidden = F.dropout(F.gelu(block["up"](x)), 0.2, self.training)  # type: ignore[index]
            x = x + F.dropout(block["down"](hidden), 0.2, self.training)  # type: ignore[index]
        return x


def refused() -> None:
    with raises(TensorParallelError, "applies dropout to split and to unsplit activations"):
        cut_model(Both().train(), mesh_for({"tp": 2}).axis("tp"))


def test_one_forward_that_drops_both_is_refused(workers: Any) -> None:
    workers(2).run(refused, timeout=60)
