"""Every causal LM of the installed Transformers at toy size, and what it says by itself.

Imports nothing of the package. The toys are made and asked in a process of their own (`said`); their weights and words
go to a file.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

from tests import zoo
from tests.harness.forks import in_a_fork
from tests.unit.inference.toys import LENGTHS, lively

NEW, VOCABULARY = 32, 2000
LONGER = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256,
    "max_target_positions": 256, "sliding_window": 16, "attention_chunk_size": 32, "window_size": 16,
    "max_sequence_length": 256, "seq_length": 256, "embedding_size": 96,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
}  # fmt: skip


def names() -> list[str]:
    """Classes that generate text, by name."""
    return sorted(name for name, kind in zoo.names().items() if kind == "causal LM")


def build(name: str) -> Any:
    """A toy in fp32 without dropout.

    Raises:
        ValueError: there is none, and why.
    """
    import transformers
    from transformers import GenerationConfig

    reasons = []
    kind = getattr(transformers, name)
    for find in zoo.configs(name, LONGER):
        try:
            config = find()
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
            config.tie_word_embeddings = False  # a tied toy repeats what it reads
            for key in ("max_position_embeddings", "n_positions"):
                if isinstance(vars(config).get(key), int):
                    setattr(config, key, 256)
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if count > zoo.LARGEST:
                raise ValueError(f"{count:,} parameters")
            torch.manual_seed(0)
            model = kind(config).float().eval()
            model.generation_config = GenerationConfig()  # no forced tokens, beams, penalties
            copy.deepcopy(model)(torch.tensor([[3, 4, 5]]))
            return model
        except Exception as error:  # a class may refuse a toy in any way it likes
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    raise ValueError("; ".join(dict.fromkeys(reasons)))


def said(name: str, path: Path) -> dict[str, Any]:
    """Make the toy, ask it, and write model and words to `path`."""
    if any(module.split(".")[0] == "deepspeed" for module in sys.modules):
        raise RuntimeError("the reference has to come from a process without the package")
    try:
        model = build(name)
    except ValueError as error:
        return {"toy": str(error)}
    size = min(VOCABULARY, model.get_input_embeddings().num_embeddings)
    try:
        model, words, least = lively(model, 20, NEW, LENGTHS, size)
    except Exception as error:
        return {"toy": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"}
    torch.save((model, words), path)
    return {"toy": "", "different": least[0], "margin": least[1]}


def main() -> None:
    """`python -m tests.unit.inference.classes FOLDER NAME...`: a file for each toy, a line of JSON for each name."""
    import json

    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or names():
        row = in_a_fork(lambda name=name: said(name, folder / f"{name}.pt"), 150)
        row = {"toy": row["failed"]} if "failed" in row else row
        (folder / f"{name}.said.json").write_text(json.dumps(row))
        print(name, row, flush=True)


if __name__ == "__main__":
    main()
