"""A model folder made on the spot, and the server as users start it: a process, asked over loopback."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import OpenAI

from tests.harness.pool import PATIENCE

LENGTH = 96
PADDING, END = 13, 300  # of the odd folder: rows without a token, and an end token that only one file states
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def make_folder(path: Path) -> Path:
    """A random Llama over bytes, with a tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: at for at, word in enumerate(["<pad>", "<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    words.save_pretrained(path)
    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(25.0)
    model.save_pretrained(path)
    return path


def make_odd_folder(path: Path) -> Path:
    """As many folders are: bytes for rare characters, more rows than tokens, a context longer by yarn, two kinds of end
    tokens, and sampling defaults."""
    import json

    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.unit.inference.vocabularies import vocabulary

    words = vocabulary("byte-fallback")
    words.chat_template = TEMPLATE
    words.save_pretrained(path)
    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=len(words) + PADDING, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=LENGTH // 4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(25.0)
    model.save_pretrained(path)
    stated = json.loads((path / "generation_config.json").read_text())
    stated |= {"eos_token_id": [2, END], "top_k": 1, "repetition_penalty": 1.2, "max_new_tokens": 11}
    (path / "generation_config.json").write_text(json.dumps(stated))
    return path


class Server:
    """A running `ds_serve`."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        self.log = log
        command = [
            sys.executable,
            "-m",
            "deepspeed.serving.cli",
            str(folder),
            "--port",
            "0",
            "--threads",
            "1",
            *arguments,
        ]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        self.url = self._wait_for_address()

    def _wait_for_address(self) -> str:
        until = time.monotonic() + 60 * PATIENCE
        while time.monotonic() < until:
            found = re.search(r"listening at (http://\S+)", self.log.read_text())
            if found:
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        self.process.wait()
        raise RuntimeError(f"ds_serve did not start:\n{self.log.read_text()}")

    def client(self, **kwargs: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=kwargs.pop("api_key", "none"), max_retries=0, **kwargs)

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=10)

    def engine_pid(self) -> int:
        import psutil

        return next(
            child.pid
            for child in psutil.Process(self.process.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        )

    def until_free(self, seconds: float = 10.0) -> dict[str, Any]:
        """Wait until nothing runs and every page is free; returns what health says then."""
        until = time.monotonic() + seconds * PATIENCE
        while time.monotonic() < until:
            body = self.health().json()
            if body["running"] == body["waiting"] == 0 and body["free_pages"] == body["pages"]:
                return body
            time.sleep(0.05)
        raise AssertionError(f"not free: {body}")

    def end(self, name: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(name)
        return self.process.wait(timeout=60 * PATIENCE)


@contextlib.contextmanager
def serving(folder: Path, log: Path, *arguments: str) -> Iterator[Server]:
    """A server that is gone afterwards."""
    server = Server(folder, log, *arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
