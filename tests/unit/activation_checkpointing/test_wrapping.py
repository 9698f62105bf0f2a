"""What the JSON does to a model: which blocks are wrapped, when not, and that copies and pickles are plain."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import checkpointing
from deepspeed.activation_checkpointing.apply import BlockForward, Wrapping, wrap
from deepspeed.config.sections.memory import ActivationCheckpointing
from deepspeed.errors import DeepSpeedConfigError
from tests.parallel.tiny import said, with_words


class Deep(nn.Module):
    """Three blocks; `by_hand` has the model checkpoint them itself."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x) if self.by_hand else block(x)
        return x


def flags(**values: Any) -> ActivationCheckpointing:
    return ActivationCheckpointing(**values)


def wrapped(model: nn.Module) -> int:
    return sum(isinstance(m.forward, BlockForward) for m in model.modules())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    with said() as found:
        yield found


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({}, 0),
        ({"partition_activations": False, "cpu_checkpointing": False, "enabled": False}, 0),
        ({"profile": True}, 0),
        ({"synchronize_checkpoint_boundary": True, "number_checkpoints": 4}, 0),
        ({"cpu_checkpointing": True, "enabled": False}, 0),
        ({"enabled": True}, 3),
        ({"partition_activations": True}, 3),
        ({"cpu_checkpointing": True}, 3),
        ({"contiguous_memory_optimization": True}, 3),
    ],
)
def test_what_wraps(block: dict[str, Any], expected: int, lines: list[str]) -> None:
    model = Deep()
    made = wrap(model, flags(**block), None)
    assert wrapped(model) == expected
    assert with_words(lines, "3 blocks (3 Sequential)") == (expected > 0)
    if made is not None:
        made.remove()
    assert wrapped(model) == 0
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_model_without_repeated_blocks(lines: list[str]) -> None:
    with pytest.raises(DeepSpeedConfigError, match="no repeated blocks are in Linear"):
        wrap(nn.Linear(2, 2), flags(enabled=True), None)
    assert wrap(nn.Linear(2, 2), flags(cpu_checkpointing=True), None)
    assert with_words(lines, "no repeated blocks", "checkpoint") == 1


def test_a_model_that_calls_checkpoint_is_left_alone(lines: list[str]) -> None:
    model = Deep(by_hand=True)
    made = wrap(model, flags(cpu_checkpointing=True), None)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert wrapped(model) == 3
    model(torch.ones(2, 4)).sum().backward()
    assert wrapped(model) == 0
    assert with_words(lines, "the model calls deepspeed.checkpointing.checkpoint itself") == 1
    assert made is not None
    made.remove()


def test_transformers_own_checkpointing_is_left_alone(lines: list[str]) -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 16, "max_position_embeddings": 16}
    model = GPTNeoForCausalLM(GPTNeoConfig(attention_types=[[["global", "local"], 1]], **sizes))
    tokens = torch.arange(8).view(1, 8)
    model(tokens, labels=tokens).loss.backward()
    wanted = [p.grad for p in model.parameters()]
    for on in (False, True):
        model.zero_grad()
        made = wrap(model, flags(cpu_checkpointing=True), None)
        assert wrapped(model) == 2
        if on:  # after the model was wrapped, as a script may do
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        model(tokens, labels=tokens).loss.backward()
        assert wrapped(model) == (0 if on else 2)
        assert all(torch.equal(a, b.grad) for a, b in zip(wanted, model.parameters(), strict=True))
        assert made is not None
        made.remove()
    assert with_words(lines, "gradient checkpointing is on") == 1


def test_copies_and_pickles_are_plain() -> None:
    model = Deep()
    made = wrap(model, flags(enabled=True), None)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert wrapped(twin) == 0
        for block in twin.blocks:
            assert block.forward.__self__ is block
        assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert wrapped(model) == 3
    assert made is not None
    made.remove()


def test_running_statistics_see_a_batch_once() -> None:
    def train(asks: bool) -> nn.Module:
        torch.manual_seed(0)
        block = lambda momentum: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Tanh())  # noqa: E731
        model = nn.Sequential(block(0.1), block(0.3), block(None))
        made = wrap(model, flags(enabled=True), None) if asks else None
        for _ in range(3):
            model(torch.randn(8, 4)).square().sum().backward()
        if made is not None:
            made.remove()
        return model

    plain, again = train(False), train(True)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for name, param in plain.named_parameters():
        assert torch.equal(param.grad, again.get_parameter(name).grad), name


def test_the_forward_of_an_instance_comes_back() -> None:
    model = Deep()
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda x: own(x) + 1
    wanted = model(torch.ones(1, 4))
    made = Wrapping(model, flags(enabled=True), None)
    assert torch.equal(model(torch.ones(1, 4)), wanted)
    made.remove()
    assert torch.equal(model(torch.ones(1, 4)), wanted)
    assert "forward" not in vars(model.blocks[0])
