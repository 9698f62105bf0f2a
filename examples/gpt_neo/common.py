"""What the GPT-Neo examples share: arguments, model and tokenizer, text found on this machine, and the last lines."""

from __future__ import annotations

import argparse
import os
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoConfig, PreTrainedTokenizerFast
from transformers.utils import logging

# hidden size, layers, heads
SIZES = {"small": (128, 4, 4), "125M": (768, 12, 12), "1.3B": (2048, 24, 16), "2.7B": (2560, 32, 20)}
HELD_OUT = 32  # sequences
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
logging.set_verbosity_error()


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The command line of every example here; launchers may add `--local_rank`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=SIZES, default="small", help="of a model with random weights")
    parser.add_argument("--weights", help="folder (or hub name) of a pretrained GPT-Neo with its tokenizer")
    parser.add_argument("--data", type=Path, help="folder of text files; default: Python's own standard library")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro", type=int, default=4, help="sequences per device and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/gpt_neo"))
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    for name, value in ALONE.items():  # with `python …` instead of a launcher there is one rank
        os.environ.setdefault(name, value)
    return parser.parse_args()


def choose_backend() -> bool:
    """Whether there is no GPU; Accelerate picks a backend for GPUs only, so it is told here."""
    cpu = not torch.cuda.is_available()
    if cpu:
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    return cpu


def read_text(folder: Path | None, limit: int = 2_000_000) -> str:
    """Text of the files of a folder, up to `limit` characters."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py")) if folder is None else sorted(p for p in root.rglob("*") if p.is_file())
    parts: list[str] = []
    for path in files:
        parts.append(path.read_text(errors="ignore"))
        if sum(map(len, parts)) > limit:
            break
    if not parts:
        raise SystemExit(f"no files in {root}; pass --data FOLDER with text files")
    return "\n".join(parts)[:limit]


def load_tokenizer(weights: str | None, text: str) -> Any:
    """The tokenizer that belongs to the weights, or without weights a byte-level BPE learned from the text."""
    if weights:
        return _or_explain(weights, AutoTokenizer.from_pretrained)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(text[:300_000].splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", bos_token="<|end|>", pad_token="<|end|>")


def load_model(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    """A causal-LM GPT-Neo: pretrained, or of a size with random weights."""
    if arguments.weights:
        return _or_explain(arguments.weights, AutoModelForCausalLM.from_pretrained)
    width, layers, heads = SIZES[arguments.size]
    config = GPTNeoConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        attention_types=[[["global", "local"], layers // 2]],
        max_position_embeddings=max(arguments.sequence, 128),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def _or_explain(weights: str, load: Any) -> Any:
    if not Path(weights).is_dir() and not _hub_answers():
        huggingface_hub.constants.HF_HUB_OFFLINE = True  # what is in its cache loads; no minutes of retries
    try:
        return load(weights)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(
            f"cannot load {weights!r}: {reason}\nIt is no folder here with config.json, weights and tokenizer files, "
            f"and the hub cannot be reached or has no such model. Copy the model to a folder and pass "
            f"--weights FOLDER, or leave --weights out for random weights."
        ) from None


def _hub_answers() -> bool:
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def sequences(arguments: argparse.Namespace) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
    """Tokenizer, training rows and held-out rows, each of `sequence` tokens that are their own labels."""
    text = read_text(arguments.data)
    tokenizer = load_tokenizer(arguments.weights, text)
    ids = torch.tensor(tokenizer(text, truncation=False)["input_ids"])
    ids = ids[: len(ids) // arguments.sequence * arguments.sequence].view(-1, arguments.sequence)
    if len(ids) <= 2 * HELD_OUT:
        raise SystemExit(f"the text has {len(ids)} sequences of {arguments.sequence} tokens; give more with --data")
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return tokenizer, rows[HELD_OUT:], rows[:HELD_OUT]


def zero_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON, with what the client fills in left at "auto"."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": arguments.stage, "stage3_gather_16bit_weights_on_model_save": True},
    }


def report(before: float, after: float, arguments: argparse.Namespace, note: str = "") -> None:
    """The last lines of an example."""
    print(f"held-out loss {before:.3f} -> {after:.3f} after {arguments.steps} updates at stage {arguments.stage}{note}")
    print(
        "next: --stage 0..3 (same losses, other memory), --steps 300, --data FOLDER (your text), --weights FOLDER (a "
        "pretrained GPT-Neo), --size 2.7B (on GPUs)"
    )
