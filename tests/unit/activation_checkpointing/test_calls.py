"""Calls by hand: the same outputs, gradients and random numbers as without, and where inputs rest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import deepspeed
from deepspeed import checkpointing
from deepspeed.activation_checkpointing.recompute import calls
from deepspeed.activation_checkpointing.saved_inputs import Saved
from deepspeed.errors import ArgumentError, DeepSpeedConfigError

FLAGS: list[dict[str, Any]] = [
    {},
    {"checkpoint_in_cpu": True},
    {"contiguous_checkpointing": True},
    {"checkpoint_in_cpu": True, "contiguous_checkpointing": True, "num_checkpoints": 3},
    {"partition_activations": True},
    {"synchronize": True, "profile": True},
]
WIDTH = 4
weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Flags and named random states are of the process."""
    yield
    calls.configured = None
    checkpointing.get_cuda_rng_tracker().reset()


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def noisy(x: torch.Tensor, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], *, bias: torch.Tensor) -> Any:
    """Draws from both random states; tensors in nests and by keyword; two outputs."""
    with checkpointing.get_cuda_rng_tracker().fork():
        a = nn.functional.dropout(x @ weight, 0.5).tanh()
    return a * pair[0] + nn.functional.dropout(pair[1]["k"], 0.5).exp() + bias, a


def gradients(run: Callable[..., Any], backwards: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(3)
    checkpointing.model_parallel_cuda_manual_seed(5)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(3, WIDTH, generator=generator, requires_grad=True) for _ in range(4)]
    x, p, k, bias = (leaf * 1 for leaf in leaves)
    y, a = run(noisy, x, (p, {"k": k}), bias=bias)
    loss = (y * a).sum()
    for _ in range(backwards):
        loss.backward(retain_graph=True)
    with checkpointing.get_cuda_rng_tracker().fork():
        inside = torch.rand(3)
    return [*(leaf.grad for leaf in leaves if leaf.grad is not None), y.detach(), torch.rand(3), inside]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "none")
def test_gradients_and_random_numbers_are_those_of_a_plain_call(flags: dict[str, Any]) -> None:
    wanted = gradients(plain)
    checkpointing.configure(None, **flags)
    for _ in range(2):  # the second pass has a contiguous buffer of the right size
        found = gradients(checkpointing.checkpoint)
        assert len(found) == 7
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_it_may_take_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts do so; callers then pass torch's keywords."""
    wanted = gradients(plain)
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpointing.checkpoint)

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True, preserve_rng_state=True, **kwargs)

    assert all(torch.equal(a, b) for a, b in zip(wanted, gradients(run), strict=True))


def test_other_forms() -> None:
    wanted = gradients(plain)
    assert all(
        torch.equal(a, b) for a, b in zip(wanted, gradients(checkpointing.non_reentrant_checkpoint), strict=True)
    )
    outputs: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    made = checkpointing.CheckpointFunction.apply(lambda a, b: (a * b, a), outputs, x, x)
    assert outputs == list(made)
    made[0].sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def kept() -> list[Saved]:
    return [o for o in gc.get_objects() if type(o) is Saved]


def test_inputs_rest_on_the_host_and_in_one_buffer() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True, contiguous_checkpointing=True)
    buffers = set()
    for step in range(3):
        x = torch.randn(5, WIDTH, requires_grad=True) * 1
        for _ in range(4):
            x = checkpointing.checkpoint(torch.tanh, x)
        saved = kept()
        assert [s.tier for s in saved] == ["host"] * 4
        assert sum(s.values.nbytes for s in saved) == 4 * 5 * WIDTH * 4
        starts = {s.values.untyped_storage().data_ptr() for s in saved}
        assert len(starts) == (4 if step == 0 else 1)  # counted in the first pass, reused from then on
        buffers |= starts if step else set()
        del saved
        x.sum().backward()
        del x
        assert kept() == []
    assert len(buffers) == 1
    checkpointing.reset()
    assert checkpointing.is_configured()


def test_room_for_a_number_of_checkpoints_from_the_start() -> None:
    checkpointing.configure(None, contiguous_checkpointing=True)
    checkpointing.set_num_layers(4)
    x = torch.randn(5, WIDTH, requires_grad=True) * 1
    for _ in range(4):
        x = checkpointing.checkpoint(torch.tanh, x)
    assert len({s.values.untyped_storage().data_ptr() for s in kept()}) == 1
    with pytest.raises(ArgumentError, match="at least one layer"):
        checkpointing.set_num_layers(0)


@pytest.mark.parametrize("layout", ["transposed", "strided", "channels_last"])
def test_odd_memory_layouts_come_back(layout: str) -> None:
    source = torch.randn(2, 3, 4, 5, requires_grad=True)
    changed = {
        "transposed": lambda t: t.transpose(0, 2),
        "strided": lambda t: t[:, :, ::2],
        "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    }[layout]
    seen: list[torch.Tensor] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.detach())
        return t.sin()

    checkpointing.configure(None, checkpoint_in_cpu=True)
    checkpointing.checkpoint(function, changed(source * 1)).sum().backward()
    assert torch.equal(seen[0], seen[1])
    assert layout == "strided" or seen[0].stride() == seen[1].stride()  # without the gaps there


def test_what_needs_no_gradient_stays() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    x, mask, param = torch.ones(3, requires_grad=True) * 1, torch.ones(3), nn.Parameter(torch.ones(3))
    y = checkpointing.checkpoint(lambda *t: (t[0] * t[1] * t[2]).exp(), x, mask, param)
    assert len(kept()) == 1
    y.sum().backward()
    assert param.grad is not None
    with torch.no_grad():
        assert not checkpointing.checkpoint(torch.exp, x).requires_grad


def test_configure_reads_the_json_and_arguments_win() -> None:
    assert not checkpointing.is_configured()
    block = {"cpu_checkpointing": True, "number_checkpoints": 7, "synchronize_checkpoint_boundary": True}
    checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": block}, num_checkpoints=3)
    flags = calls.checkpointer().flags
    assert (flags.cpu_checkpointing, flags.number_checkpoints) == (True, 3)
    assert flags.synchronize_checkpoint_boundary
    checkpointing.partition_activations_in_checkpoint(True)
    assert calls.checkpointer().flags.partition_activations
    assert calls.checkpointer().flags.cpu_checkpointing
    with pytest.raises(DeepSpeedConfigError, match="activation_checkpointing.cpu_checkpointing"):
        checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": "no!"}})


class TwoRanks:
    """What a client's model-parallel unit says on its second rank."""

    @staticmethod
    def get_model_parallel_rank() -> int:
        return 1


def test_named_random_states() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    with pytest.raises(ArgumentError, match="model_parallel_cuda_manual_seed"), tracker.fork():
        pass
    checkpointing.model_parallel_cuda_manual_seed(11)
    first = tracker.get_states()
    around = torch.rand(1)
    with tracker.fork():
        mine = torch.rand(1)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(1), around)
    checkpointing.configure(TwoRanks())
    checkpointing.model_parallel_cuda_manual_seed(11)
    assert torch.equal(torch.rand(1), around)  # alike on the ranks of the group
    with tracker.fork():
        assert not torch.equal(torch.rand(1), mine)  # and apart in the fork
    tracker.set_states(first)
    with tracker.fork():
        assert torch.equal(torch.rand(1), mine)
    before = torch.get_rng_state()
    checkpointing.model_parallel_reconfigure_tp_seed(11)
    assert torch.equal(torch.get_rng_state(), before)
    tracker.add("other", 1)
    with pytest.raises(ArgumentError, match="'other' exists"):
        tracker.add("other", 1)


def test_every_address_is_one_module() -> None:
    import deepspeed.runtime.activation_checkpointing.checkpointing as old

    assert old is checkpointing is deepspeed.checkpointing
