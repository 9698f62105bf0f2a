"""A trained model: tokens beside Transformers', and its folder through a checkpoint of stage 3 and back.

The base is made the first time (`tests/trained.py`, minutes) and skipped by name where its package is absent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference import generator as generator_module
from deepspeed.inference.executors import select
from deepspeed.inference.executors.native import FusedExecutor
from deepspeed.inference.executors.native_tensors import functions
from tests import trained
from tests.harness.pool import PATIENCE, WorkerPool
from tests.unit.serving.server import serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(trained.missing()), reason=trained.missing())]
PROMPTS, NEW = 50, 20


@pytest.fixture(scope="module")
def folder() -> Path:
    return trained.base()


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Half of them chats, a quarter documentation, a quarter sources; none was trained on."""
    from transformers import AutoTokenizer

    tokenizer, text = AutoTokenizer.from_pretrained(folder), trained.texts(held_out=True)
    chats = [
        trained.conversation(tokenizer, question, "", 200)[0][:-1]
        for question, _ in text.chats[:: len(text.chats) // 25]
    ]
    plain = [
        tokenizer(part[:160])["input_ids"] for kind in (text.prose, text.code) for part in kind[:: len(kind) // 13]
    ]
    return [*chats[:25], *plain][:PROMPTS]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What Transformers' own `generate` says, one prompt at a time."""
    said = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        said.append(out[0, len(prompt) :].tolist())
    return said


GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0)


@pytest.mark.skipif(functions() is None, reason="the native library is not built, or off")
def test_native_tokens_are_transformers(model: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert len(prompts) == PROMPTS and len({token for one in expected for token in one}) > 100
    generator = Generator(model, cache_bytes=1 << 28, speculation=4)
    assert isinstance(generator._executor, FusedExecutor)
    assert generator.generate(prompts, GREEDY) == expected
    generator.close()


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "12 bits"])
@pytest.mark.skipif(functions() is None, reason="the native library is not built, or off")
def test_passes_in_bf16_are_native(folder: Path, packed: bool) -> None:
    """Some of its rows are computed worse by bf16 modules than by native passes, which must not count against these."""
    from transformers import AutoModelForCausalLM

    executor, why = select.select_executor(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), packed=packed
    )
    assert isinstance(executor, FusedExecutor) and not why, (executor.unfused, why)


def test_tokens_through_modules_are_transformers(
    model: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    through_modules = functools.partial(select.select_executor, fused=False)
    with mock.patch.object(generator_module, "select_executor", through_modules):
        generator = Generator(model, cache_bytes=1 << 28)
    assert generator.kind == "packed" and not isinstance(generator._executor, FusedExecutor)
    assert generator.generate(prompts, GREEDY) == expected
    generator.close()


def test_the_servers_tokens_are_transformers(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = ("--dtype", "fp32", "--max-length", "512", "--served-model-name", "base")
    with serving(folder, tmp_path / "log", *options) as server:
        client = server.client(timeout=600 * PATIENCE)
        answer = client.completions.create(model="base", prompt=prompts, max_tokens=NEW, temperature=0)
        texts = [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    assert texts == [tokenizer.decode(one, skip_special_tokens=True) for one in expected]


# -- a checkpoint at stage 3, to a folder and back ---------------------------------------------------------------------

IDS = [[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]]
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def trained_and_saved(folder: str, into: str) -> torch.Tensor:
    """A step of the base at stage 3, its checkpoint, and the logits after it."""
    from transformers import AutoModelForCausalLM

    import deepspeed

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    with engine:
        ids = torch.tensor(IDS)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(into, tag="one")
        engine.eval()
        with torch.no_grad():
            return engine(input_ids=ids).logits[0].clone()


def read_back(folder: str) -> torch.Tensor:
    """The logits of an engine at stage 3 whose model was built of the folder's config and read its weights sharded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    with engine:
        engine.load_pretrained(folder)
        engine.eval()
        with torch.no_grad():
            return engine(input_ids=torch.tensor(IDS)).logits[0].clone()


def test_a_checkpoint_of_stage_3_becomes_a_folder_and_comes_back(
    folder: Path, model: Any, workers: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from deepspeed.checkpoint import cli

    ids = torch.tensor(IDS)
    wanted, again = workers(2).run(trained_and_saved, str(folder), str(tmp_path / "saved"), timeout=600)
    assert torch.equal(wanted, again)
    assert cli.main(["export", str(tmp_path / "saved"), str(tmp_path / "folder")]) == 0
    with torch.no_grad():
        before = model(input_ids=ids).logits[0]
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)(input_ids=ids).logits[0]
    assert float((found - before).abs().max()) > 1e-3  # the step shows
    assert torch.equal(found, wanted)
    for logits in workers(2).run(read_back, str(tmp_path / "folder"), timeout=600):
        assert torch.equal(logits, wanted)
