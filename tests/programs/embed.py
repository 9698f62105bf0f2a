"""A training script of sentence-transformers as its users write them; `frameworks.py` starts it.

It trains on pairs and saves with the trainer; with `--encode`, a process of its own loads what was saved and writes the
embeddings of three texts beside it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ASKED = ["add 1 and 2", "add 40 and 2", "7"]


def main() -> None:
    from datasets import load_dataset
    from sentence_transformers import (  # pyright: ignore[reportMissingImports]
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser()
    for name in ("model", "texts", "output"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--encode", action="store_true")
    for name in ("steps", "accumulate"):
        parser.add_argument(f"--{name}", type=int, default=1)
    options = parser.parse_args()
    if options.encode:
        found = SentenceTransformer(options.output).encode(ASKED)
        (Path(options.output) / "embedding.json").write_text(json.dumps(found.tolist()))
        return
    arguments = SentenceTransformerTrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=3,
    )
    model: Any = SentenceTransformer(options.model)
    texts = load_dataset("json", data_files=options.texts, split="train")
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=texts, loss=loss)
    trainer.train()
    trainer.save_state()
    trainer.save_model(options.output)


if __name__ == "__main__":
    main()
