"""Models that `benchmarks.serve` serves, their weights' forms, and the requests.

A and B are those of `benchmarks.generate`, with a tokenizer made on the spot and prompts of random tokens. A folder of
a Hugging Face model has its own tokenizer, and prompts from the held-out text of `tests/trained.py`, as long. Every
side reads one folder, in bf16; in the other forms each packs the matrices by itself:

- int8: ours `--quantize int8` (a scale per output), llama.cpp's Q8_0 (one per 32 inputs).
- int4: ours `--quantize int4` (a scale and an offset per 32 inputs), llama.cpp's Q4_0 (a scale per 32 inputs); the head
  has 8 bits on both sides.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import SIZES, make, requests

FORMS = ("bf16", "int8", "int4")
BYTES = 259  # tokens that are special or single bytes
LETTERS = "abcdefghijklmnopqrstuvwxyz012345"
COUNT = 48  # requests of mixed sizes
PROMPT = 160  # tokens of the prompts from text in the table of first tokens
PLACE = 3000  # characters of a place in the text: more than the longest prompt has


@dataclass(frozen=True)
class Asked:
    """A request: its text, the tokens of it, and how many new ones."""

    text: str
    tokens: list[int]
    new: int


def short_name(model: str) -> str:
    """Name of a size or folder, as in names of files."""
    return re.sub(r"[^a-z0-9]+", "-", Path(model).resolve().name.lower()).strip("-")


def results_name(model: str, form: str, cores: int) -> str:
    """File of the results: `serve-a-bf16-1-cores.json`."""
    return f"serve-{short_name(model)}-{form}-{cores}-cores.json"


def tokenizer_of(size: int) -> Any:
    """Bytes, then strings of two and three letters, up to `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(a, b) for a in LETTERS for b in LETTERS]
    pairs += [(a + b, c) for a, b in pairs for c in LETTERS]
    merges = pairs[: size - len(words)]
    vocabulary = {word: at for at, word in enumerate([*words, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def request(words: Any, ids: list[int], new: int) -> Asked:
    """A request whose text is that of `ids`; its tokens are what the tokenizer makes of this text."""
    text = words.decode(ids)
    return Asked(text, words(text)["input_ids"], new)


def random_requests(words: Any, model: Any, firsts: int) -> tuple[list[Asked], list[Asked]]:
    """`COUNT` requests of random tokens, of mixed sizes, and `firsts` of 300 random letters and 4 new tokens."""
    mixed = [
        request(words, [token for token in prompt if token >= BYTES], new) for prompt, new in requests(model, COUNT)
    ]
    drawn = random.Random(6)
    letters = ["".join(drawn.choices(LETTERS, k=300)) for _ in range(firsts)]
    return mixed, [Asked(text, words(text)["input_ids"], 4) for text in letters]


def text_requests(words: Any, model: Any, firsts: int) -> tuple[list[Asked], list[Asked]]:
    """The same of sources and documentation of Python's standard library, each of another place: `COUNT` requests of
    the same sizes, and `firsts` of `PROMPT` tokens and 4 new ones."""
    from tests import trained

    texts = trained.texts(held_out=True)
    places = [
        text[at : at + PLACE]
        for text in [*texts.code, "\n\n".join(texts.prose)]
        for at in range(0, len(text) - PLACE, PLACE)
    ]
    sizes = [(len(prompt), new) for prompt, new in requests(model, COUNT)] + [(PROMPT, 4)] * firsts
    drawn = []
    for (length, new), text in zip(sizes, random.Random(6).sample(places, len(sizes)), strict=True):
        drawn.append(request(words, words(text, add_special_tokens=False)["input_ids"][:length], new))
    return drawn[:COUNT], drawn[COUNT:]


def write_model(name: str, folder: Path, firsts: int) -> tuple[list[Asked], list[Asked]]:
    """Write the model, in bf16, and its tokenizer into `folder`; returns the requests of `random_requests`.

    Args:
        name: a key of `SIZES`, or a folder of a Hugging Face model with its tokenizer.
        folder: one that is there.
        firsts: requests of the table of first tokens.
    """
    if name in SIZES:
        words, model = tokenizer_of(SIZES[name]["vocab_size"]), make(name)
        drawn = random_requests(words, model, firsts)
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        words = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
        drawn = text_requests(words, model, firsts)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return drawn
