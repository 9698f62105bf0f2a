"""LoRA adapters of the server: names, loading while it runs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepspeed.errors import ArgumentError
from deepspeed.inference import Generator, SamplingParams
from deepspeed.serving.adapters import LoraModule, parse_modules
from deepspeed.serving.arguments import parse
from tests.unit.inference.test_adapters import adapted
from tests.unit.serving.inline import InlineServer, inline

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the served model by name, and the merged models as `NAME-merged`."""
    room = tmp_path_factory.mktemp("adapters")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = {}
    for seed, name in enumerate(("red", "blue", "late")):
        merged = adapted(base, room / name, seed, r=4, target_modules="all-linear")
        merged.save_pretrained(room / f"{name}-merged")
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(room / f"{name}-merged")
        found |= {name: room / name, f"{name}-merged": room / f"{name}-merged"}
    return found


def answer(server: InlineServer, model: str, **options: Any) -> str:
    body = {"model": model, "prompt": "abcd", "max_tokens": 8, "temperature": 0, **options}
    response = server.post("completions", body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return response.json()["choices"][0]["text"]


def text_of(merged: Path) -> str:
    """Text of a merged model alone, without the server."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    prompt = tokenizer("abcd")["input_ids"]
    tokens = Generator(model, cache_bytes=1 << 20).generate([prompt], SamplingParams(max_new_tokens=8))[0]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_requests_name_their_adapter(folder: Path, folders: dict[str, Path]) -> None:
    modules = parse_modules([f"red={folders['red']}", json.dumps({"name": "blue", "path": str(folders["blue"])})])
    texts = {name: text_of(folders[f"{name}-merged"]) for name in ("red", "blue", "late")}
    with inline(folder, {"lora_modules": modules}, allow_runtime_lora_updating=True) as server:
        own = answer(server, "tiny")
        cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
        assert list(cards) == ["tiny", "red", "blue"] and cards["red"]["parent"] == "tiny"
        assert cards["red"]["root"] == str(folders["red"])
        assert httpx.get(f"{server.url}/v1/models/blue").json() == cards["blue"]
        assert {name: answer(server, name) for name in ("red", "blue")} == {
            name: texts[name] for name in ("red", "blue")
        }
        assert len({own, *texts.values()}) > 2
        refused = server.post("completions", {"model": "late", "prompt": "abcd"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        late = {"lora_name": "late", "lora_path": str(folders["late"])}
        assert server_post(server, "load_lora_adapter", late) == (200, None)
        assert answer(server, "late") == texts["late"] and answer(server, "tiny") == own
        assert server_post(server, "load_lora_adapter", late) == (400, "lora_name")
        assert server_post(server, "load_lora_adapter", {**late, "lora_name": "tiny"}) == (400, "lora_name")
        assert server_post(server, "load_lora_adapter", {**late, "load_inplace": True}) == (400, "load_inplace")
        damaged = {"lora_name": "new", "lora_path": str(folders["red-merged"])}
        assert server_post(server, "load_lora_adapter", damaged) == (400, "lora_path")
        assert server_post(server, "unload_lora_adapter", {"lora_name": "late"}) == (200, None)
        assert server_post(server, "unload_lora_adapter", {"lora_name": "late"}) == (404, "lora_name")
        assert server.post("completions", {"model": "late", "prompt": "abcd"}).status_code == 404
        assert server_post(server, "load_lora_adapter", late) == (200, None)
        server.until_free()


def server_post(server: InlineServer, path: str, body: dict[str, Any]) -> tuple[int, str | None]:
    """Return the status and the name of the field that is wrong."""
    response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    return response.status_code, None if response.status_code == 200 else response.json()["error"]["param"]


def test_loading_is_off_by_default_and_ranks_have_a_limit(folder: Path, folders: dict[str, Path]) -> None:
    late = {"lora_name": "late", "lora_path": str(folders["late"])}
    with inline(folder) as server:
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=late).status_code == 404
    with inline(folder, {"max_lora_rank": 2}, allow_runtime_lora_updating=True) as server:
        response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=late, timeout=60)
        assert response.status_code == 400 and "rank 4, more than the limit 2" in response.json()["error"]["message"]


def test_options(folder: Path) -> None:
    options = parse([str(folder), "--lora-modules", "a=x/y=z", '{"name": "b", "path": "w", "base_model_name": "c"}',
                     "--lora-modules", "d=e", "--max-lora-rank", "32", "--enable-lora"])  # fmt: skip
    assert options.engine.lora_modules == (LoraModule("a", "x/y=z"), LoraModule("b", "w", "c"), LoraModule("d", "e"))
    assert options.engine.max_lora_rank == 32 and not options.allow_runtime_lora_updating
    for wrong in (
        "a",
        "=b",
        "a=",
        "{",
        '{"name": "a"}',
        '{"name": "a", "path": 1}',
        '{"name": "a", "path": "b", "c": 1}',
    ):
        with pytest.raises(ArgumentError, match="--lora-modules"):
            parse([str(folder), "--lora-modules", wrong])
    with pytest.raises(ArgumentError, match="two adapters 'a'"):
        parse([str(folder), "--lora-modules", "a=b", "a=c"])
    with pytest.raises(ArgumentError, match="name of the model itself"):
        parse([str(folder), "--served-model-name", "a", "--lora-modules", "a=b"])
