"""`replace_with_kernel_inject`: greedy calls in the native form, the rest through the model, with a reason."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.foundation import log
from deepspeed.native import library
from tests.unit.inference.toys import llama
from tests.unit.inference_surface.models import model

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not there")
IDS = torch.randint(3, 256, (3, 9), generator=torch.Generator().manual_seed(2))
LEFT = torch.ones_like(IDS)
LEFT[1, :4] = 0
RIGHT = LEFT.flip(1)
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def injected(**config: Any) -> tuple[Any, Any, list[int]]:
    """(the plain model, an engine around a copy, counts of the model's own `generate`)."""
    plain = llama()
    engine = deepspeed.init_inference(
        copy.deepcopy(plain), dtype=torch.float32, replace_with_kernel_inject=True, **config
    )
    own, asked = engine.module.generate, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return own(*args, **kwargs)

    engine.module.generate = counted
    return plain, engine, asked


def test_greedy_calls_go_through_native_passes() -> None:
    plain, engine, asked = injected()
    with torch.no_grad():
        text = plain.generate(IDS, attention_mask=LEFT, **GREEDY)
        end = int(text[0, 9 + 5])  # what some row says early
        calls: list[dict[str, Any]] = [
            {**GREEDY, "attention_mask": LEFT}, {**GREEDY, "attention_mask": LEFT, "eos_token_id": end},
            {**GREEDY, "attention_mask": LEFT, "eos_token_id": [end, int(text[1, -1])], "min_new_tokens": 7},
            {"max_length": 20, "attention_mask": LEFT, "pad_token_id": 0}, {**GREEDY},
        ]  # fmt: skip
        for call in calls:
            assert torch.equal(engine.generate(IDS, **call), plain.generate(IDS, **call)), call
            assert torch.equal(engine.generate(input_ids=IDS, **call), plain.generate(input_ids=IDS, **call)), call
    assert asked == []
    engine.destroy()
    engine.generate(IDS, **GREEDY)
    assert asked == [1]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"num_beams": 2}, "beams"),
        ({"do_sample": True}, "tokens are drawn"),
        ({"attention_mask": RIGHT}, "elsewhere than on the left"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_other_calls_go_through_the_model_and_say_why(
    call: dict[str, Any], why: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.foundation.log._said", set())
    plain, engine, asked = injected()
    given = {**GREEDY, "attention_mask": LEFT, **call}
    found = []
    for one in (engine, plain):
        torch.manual_seed(4)
        with torch.no_grad():
            found.append(one.generate(IDS, **given))
    a, b = (one.sequences if hasattr(one, "sequences") else one for one in found)
    assert torch.equal(a, b) and asked == [1]
    assert "goes through LlamaForCausalLM's own: " in (said := capfd.readouterr().err) and why in said


def test_measuring_goes_through_the_modules() -> None:
    _, engine, asked = injected()
    engine.profile_model_time()
    engine.generate(IDS, **GREEDY)
    assert asked == [1] and len(engine.model_times()) == 24


@pytest.mark.parametrize(("kind", "why"), [("gpt2", "has h"), ("bert", "it has no generate"), ("t5", "encoder")])
def test_a_model_of_another_shape_says_so(kind: str, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(log, "_said", set()):  # once per process
        engine = deepspeed.init_inference(model(kind), dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine._injected is None
    lines = [line for line in capfd.readouterr().err.splitlines() if "replace_with_kernel_inject: " in line]
    assert len(lines) == 1 and "keeps its own layers: " in lines[0] and why in lines[0], lines
    assert "[WARNING]" in lines[0]
