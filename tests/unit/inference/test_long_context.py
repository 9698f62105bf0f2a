"""Contexts that rotary scaling makes longer: their limits, and tokens beyond, against Transformers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.errors import LengthError, RequestError
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.executors.gathered import GatheringExecutor
from deepspeed.inference.executors.native import FusedExecutor
from deepspeed.inference.executors.paged import PagedExecutor
from deepspeed.inference.request import length_limit
from deepspeed.serving.ipc import Ready
from deepspeed.serving.protocol import ChatCompletionRequest
from deepspeed.serving.service import Service
from tests.unit.inference.test_native import native
from tests.unit.inference.toys import llama, prompts, watched

ORIGINAL, FACTOR, NEW = 48, 4.0, 16
LONG = ORIGINAL * int(FACTOR)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": FACTOR},
    "dynamic": {"rope_type": "dynamic", "factor": FACTOR},
    "yarn": {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL},
    "yarn, no original length": {"rope_type": "yarn", "factor": FACTOR},
    "llama3": {
        "rope_type": "llama3", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "rope_type": "longrope", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    },
}  # fmt: skip
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def scaled(kind: str, **sizes: Any) -> Any:
    return llama(max_position_embeddings=ORIGINAL, rope_parameters={"rope_theta": 10000.0, **ROPES[kind]}, **sizes)


def stated(length: int, **rope: Any) -> Any:
    """A module with a config of these positions."""
    module = torch.nn.Linear(1, 1)
    module.config = SimpleNamespace(max_position_embeddings=length, rope_parameters=rope or None)  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("kind", ROPES)
def test_an_answer_without_a_length_stays_in_shared_passes(kind: str) -> None:
    """A chat goes to the end of what is batched and fits into the cache, not to the end of the scaled context."""
    model, whole = scaled(kind), ORIGINAL if kind in ("dynamic", "longrope") else LONG
    assert Generator(model, page_size=4).packed_length == whole
    each = Generator(model, page_size=4)._executor.store.bytes_per_page()
    small = Generator(model, page_size=4, cache_bytes=20 * each)
    assert small.packed_length == min(whole, 80) < LONG
    ready = Ready(small.limit, small.kind, "", None, small.packed_length)
    service: Any = SimpleNamespace(engine=SimpleNamespace(ready=ready), defaults={})
    for prompt, more, room in (
        ([5] * 10, {}, small.packed_length - 10),
        ([5] * 10, {"max_tokens": LONG - 10}, LONG - 10),
        ([5] * (LONG - 1), {}, 1),
    ):
        chat = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], **more)
        assert Service.room(service, prompt, chat) == room


@pytest.mark.parametrize("kind", ROPES)
def test_the_limit_is_the_scaled_length(kind: str) -> None:
    model = scaled(kind)
    generator = Generator(model, page_size=4)
    assert length_limit(model) == generator.limit == LONG
    with pytest.raises(LengthError, match=f"limit of {LONG}"):
        generator.submit(Request("a", [5] * (LONG - 3), SamplingParams(max_new_tokens=4)))
    assert Generator(model, max_length=LONG).limit == LONG
    with pytest.raises(RequestError, match=f"own limit of {LONG}"):
        Generator(model, max_length=LONG + 1)


@pytest.mark.parametrize(
    ("length", "rope", "limit"),
    [
        (131072, {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}, 131072),
        (131072, {"rope_type": "longrope", "original_max_position_embeddings": 4096}, 131072),
        (163840, {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}, 163840),
        (32768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (4096, {"rope_type": "linear", "factor": 2.5}, 10240),
        (4096, {"rope_type": "default"}, 4096),
        (4096, {"rope_type": "linear", "factor": None}, 4096),
        (4096, {}, 4096),
        # Gemma 3: only the layers that see everything are scaled, and the length is the one after it
        (131072, {"full": {"rope_type": "linear", "factor": 8.0}, "sliding": {"rope_type": "default"}}, 131072),
        (4096, {"full": {"rope_type": "yarn", "factor": 2.0}, "chunked": {"rope_type": "yarn", "factor": 4.0}}, 8192),
    ],
)  # fmt: skip
def test_limits_of_known_configs(length: int, rope: dict[str, Any], limit: int) -> None:
    assert length_limit(stated(length, **rope)) == limit


WAYS = {"native": FusedExecutor, "modules": PagedExecutor, "gathered": GatheringExecutor}


def by(way: str, model: Any) -> Generator:
    """A generator that goes one of the ways."""
    generator = Generator(model, page_size=4)
    if way != "native":
        store = generator._executor.store.resized(generator.pages.count, 4)
        generator._executor = WAYS[way](model, store)
    assert isinstance(generator._executor, WAYS[way])
    return generator


@pytest.mark.parametrize("way", [pytest.param("native", marks=native), "modules", "gathered"])
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_tokens_beyond_the_original_length_are_those_of_transformers(kind: str, way: str) -> None:
    """Prompts that begin before and behind it, together in one batch."""
    model, given = scaled(kind), prompts((20, ORIGINAL - 4, ORIGINAL + 30, LONG - NEW))
    wanted = [watched(model, prompt, NEW) for prompt in given]
    assert min(min(gaps) for _, gaps in wanted) > 1e-4
    assert by(way, model).generate(given, GREEDY) == [tokens for tokens, _ in wanted]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_change_with_the_length_are_right_in_company(kind: str) -> None:
    """Long texts go through the model's own generate, short ones beside them through passes."""
    model, given = scaled(kind), prompts((20, ORIGINAL - 4, ORIGINAL + 30, 9, LONG - NEW))
    wanted = [watched(model, prompt, NEW)[0] for prompt in given]
    generator = Generator(model, page_size=4)
    assert generator.generate(given, GREEDY) == wanted
    assert generator.generate(given[::-1], GREEDY) == wanted[::-1]
    model.generate(torch.tensor([given[2]]), max_new_tokens=4, do_sample=False)  # others may use the model in between
    assert generator.generate(given[:1], GREEDY) == wanted[:1]


@native
def test_a_rotation_that_others_left_longer_is_not_taken_into_the_table() -> None:
    """The table of rotations grows while a long text of someone else has changed the model's own."""
    sizes = {"max_position_embeddings": 1024, "rope_parameters": {"rope_theta": 1e4, **ROPES["dynamic"]}}
    model = llama(**sizes)
    (prompt,) = prompts((700,))
    wanted = watched(model, prompt, 4)[0]
    generator = Generator(model)
    with torch.no_grad():
        model(torch.tensor([[5] * 1100]))
    assert generator.generate([prompt], SamplingParams(max_new_tokens=4, ignore_eos=True)) == [wanted]


@pytest.mark.parametrize("inject", [False, True])
def test_an_injected_model_reaches_as_far(inject: bool) -> None:
    model = scaled("yarn")
    (prompt,) = prompts((ORIGINAL + 30,))
    wanted = watched(model, prompt, NEW)[0]
    engine = deepspeed.init_inference(copy.deepcopy(model), dtype="fp32", replace_with_kernel_inject=inject)
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found = engine.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert len(set(wanted)) > 4 and (2 in wanted or found[0, len(prompt) :].tolist() == wanted)
    with pytest.raises(LengthError, match=f"maximum length of {LONG}"):
        engine.generate(torch.tensor([[5] * LONG]), max_new_tokens=1)
