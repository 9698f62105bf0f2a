"""Weights of a running server replaced under load: no answer mixes two versions."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import deepspeed.inference.weight_update as weight_update
from deepspeed.errors import DeepSpeedError, RequestError, UsageError
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.shared_tensors import SharedTensor
from deepspeed.inference.weight_update import SHARED, WeightUpdate, copy_tensors
from deepspeed.rollouts.weight_sender import WeightSender, whole_tensors
from tests.unit.serving.inline import inline

PROMPTS = ([5, 9, 4], [7, 3, 8, 2, 11, 6])
NEW = 16


def versions(folder: Path, count: int) -> list[Any]:
    """Models with other weights each."""
    first = AutoModelForCausalLM.from_pretrained(folder)
    models = [first]
    for seed in range(1, count):
        model, generator = copy.deepcopy(first), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.2 * param.std() * torch.randn(param.shape, generator=generator))
        models.append(model)
    return models


def ask(url: str, prompt: list[int], **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return httpx.post(f"{url}/v1/completions", json=body | {"repetition_penalty": 1} | more, timeout=120)


@pytest.mark.parametrize(
    ("mode", "count"), [("wait", 4), *(pytest.param(mode, 21, marks=pytest.mark.slow) for mode in ("wait", "abort"))]
)
def test_no_answer_mixes_two_versions(folder: Path, mode: str, count: int) -> None:
    models, sampling = versions(folder, count), SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=0)
    wanted = []
    for model in models:
        generator = Generator(model)
        parts = generator.run([weight_request(prompt, sampling) for prompt in PROMPTS])
        wanted.append([[entry.logprob for output in outputs for entry in output.logprobs or ()] for outputs in parts])
    done, wrong, seen = threading.Event(), [], set()

    def load(url: str) -> None:
        while not done.is_set():
            for number, prompt in enumerate(PROMPTS):
                answer = ask(url, prompt)
                if answer.status_code == 503 and mode == "abort" and "weights_updated" in answer.text:
                    continue
                version = answer.json()["weights_version"]
                seen.add(version)
                values = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
                if values != pytest.approx(wanted[version][number], abs=1e-4):
                    wrong.append((version, number))

    with inline(folder, {"threads": 1, "weight_updates": True}) as server:
        threads = [threading.Thread(target=load, args=(server.url,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number, model in enumerate(models[1:], start=1):
                assert WeightSender(server.url, mode=mode).send(model) == number
                assert ask(server.url, PROMPTS[0]).json()["weights_version"] == number
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert not wrong and len(seen) > count // 2


def weight_request(prompt: list[int], sampling: SamplingParams) -> Any:
    from deepspeed.inference.request import Request

    return Request(object(), prompt, sampling)


def test_what_the_server_refuses(folder: Path) -> None:
    model = versions(folder, 1)[0]
    with inline(folder, {"threads": 1, "weight_updates": True}) as server:

        def post(**body: Any) -> httpx.Response:
            return httpx.post(f"{server.url}/update_weights", json=body, timeout=60)

        entry = {"name": "lm_head.weight", "dtype": "float32", "shape": [1, 1], "offset": 0}
        assert "come after" in post(action="tensors", shared_memory="x", tensors=[entry]).json()["error"]["message"]
        assert "has begun" in post(action="end").json()["error"]["message"]
        assert post(action="begin").status_code == 200
        assert "under way" in post(action="begin").json()["error"]["message"]
        for file, text in (("../etc/passwd", "not the name"), ("nothing-there", "No such file")):
            refusal = post(action="tensors", shared_memory=file, tensors=[entry])
            assert refusal.status_code == 400 and text in refusal.json()["error"]["message"]
        assert post(action="begin", mode="now").status_code == 400
        assert post(action="end").json()["weights_version"] == 0  # nothing has changed
        assert ask(server.url, PROMPTS[0]).json()["weights_version"] == 0
        other = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
        other.lm_head = torch.nn.Linear(3, 5, bias=False)
        with pytest.raises(DeepSpeedError, match="shape"):
            WeightSender(server.url).send(other)
    with inline(folder, {"threads": 1}) as server:
        assert httpx.post(f"{server.url}/update_weights", json={"action": "begin"}).status_code == 404
        assert "weights_version" not in ask(server.url, PROMPTS[0]).json()


def test_a_bucket_that_does_not_fit_changes_nothing(folder: Path) -> None:
    model = versions(folder, 1)[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = next(iter(before))
    good = SharedTensor(name, "float32", tuple(before[name].shape), 0)
    path = SHARED / "ds-weights-test"
    path.write_bytes(bytes(before[name].numel() * 4))
    try:
        for bad in (
            SharedTensor("nobody", "float32", (1,), 0),
            SharedTensor(name, "float64", good.shape, 0),
            SharedTensor(name, "float32", good.shape, 4),
            SharedTensor(name, "float32", (*good.shape, 1), 0),
        ):
            with pytest.raises(RequestError):
                copy_tensors(model, path.name, [good, bad])
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        copy_tensors(model, path.name, [good])
        assert not model.state_dict()[name].any()
    finally:
        path.unlink()


def test_an_update_that_nobody_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = versions(folder, 1)[0]
    update, now = WeightUpdate(Generator(model), patience=10), [0.0]
    monkeypatch.setattr(weight_update.time, "monotonic", lambda: now[0])
    update.begin()
    assert not update.given_up() and update.active
    now[0] = 11.0
    assert update.given_up() and not update.active
    update.begin()
    name, tensor = next(whole_tensors(model))
    path = SHARED / "ds-weights-test-2"
    path.write_bytes(bytes(tensor.nbytes))
    try:
        update.copy(path.name, [SharedTensor(name, "float32", tuple(tensor.shape), 0)])
    finally:
        path.unlink()
    now[0] = 30.0
    with pytest.raises(UsageError, match="mixture of two versions"):
        update.given_up()
    assert update.active
    assert update.end() == 1
