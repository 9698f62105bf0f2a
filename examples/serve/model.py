"""The folder that is served: the model of `make train` and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def letter_of_byte() -> list[str]:
    """The printable letter by which byte-level tokenizers write each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def write_tokenizer(folder: Path) -> None:
    """Token n is byte n; byte 0 ends a text, as it ends the files that the model was trained on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = letter_of_byte()
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=letters[0], chat_template=template)
    tokenizer.save_pretrained(folder)


def trained(folder: Path, ranks: int, train_arguments: list[str]) -> Path:
    """The folder, trained first where it is not there."""
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
        script = ROOT / "examples" / "bytes_lm" / "train.py"
        subprocess.run([*command, str(script), "--save", str(folder), *train_arguments], check=True)
    if not (folder / "tokenizer.json").is_file():
        write_tokenizer(folder)
    return folder
