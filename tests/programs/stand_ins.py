"""Tiny models, tokenizers and data under the names that programs ask the hub for; made on the spot, always the same.

`python -m tests.programs.stand_ins FOLDER` makes all of them. A program runs in a folder that has them as relative
paths, and Transformers and Datasets take a folder of a hub name before the hub.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
import sys
from pathlib import Path
from typing import Any

WORDS = (
    "the model reads a small book of words and writes one line about rain snow wind sun sea hill road tree bird "
    "house river stone light night day time hand work year people water city field king queen horse"
).split()
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "facebook/opt-125m": ("OPT", SHAPE | {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "facebook/opt-350m": ("OPT", SHAPE | {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "facebook/opt-1.3b": ("OPT", SHAPE | {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "openai-community/gpt2": ("GPT2", {"n_embd": 32, "n_layer": 12, "n_head": 4}),
    "gpt2-medium": ("GPT2", {"n_embd": 32, "n_layer": 24, "n_head": 4}),
    "gpt2-large": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "meta-llama/Llama-3.1-8B": ("Llama", SHAPE | {"intermediate_size": 128, "num_key_value_heads": 4}),
    "meta-llama/Llama-2-7b-hf": ("Llama", SHAPE | {"intermediate_size": 128, "num_key_value_heads": 4}),
    "EleutherAI/pythia-6.9b": ("GPTNeoX", SHAPE | {"intermediate_size": 128}),
    "bigscience/bloom-3b": ("Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-large-cased": ("Bert", "ForMaskedLM", SHAPE | {"intermediate_size": 128}),
    "yoshitomo-matsubara/bert-base-uncased-mnli": (
        "Bert", "ForSequenceClassification",
        {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 192,
         "num_labels": 3}),
    "google/electra-base-generator": ("Electra", "ForMaskedLM", SHAPE | {"intermediate_size": 128,
                                                                         "embedding_size": 64}),
}  # fmt: skip


def sentences(count: int, seed: int = 0) -> list[str]:
    """`count` lines of six to fourteen words."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(6, 14))) for _ in range(count)]


def byte_tokenizer(folder: Path) -> Any:
    """A byte-level BPE tokenizer in the files that GPT-2's, OPT's and RoBERTa's classes read."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    bpe.train_from_iterator(
        sentences(400), vocab_size=384, min_frequency=1, special_tokens=special, show_progress=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save_model(str(folder))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        mask_token="<mask>", model_max_length=512)  # fmt: skip
    tokenizer.save_pretrained(folder)
    named(folder, "GPT2Tokenizer")
    return tokenizer


def named(folder: Path, family: str) -> None:
    """Write the class that releases before 5 look for into the tokenizer's file."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": family}))


def word_tokenizer(folder: Path) -> Any:
    """A WordPiece tokenizer over whole words and letters, with BERT's `vocab.txt`."""
    from transformers import BertTokenizer

    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *WORDS, *[f"##{letter}" for letter in letters]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(entries)) + "\n")
    tokenizer = BertTokenizer(vocab_file=str(folder / "vocab.txt"), vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    named(folder, "BertTokenizer")
    return tokenizer


def models(folder: Path) -> None:
    """Every decoder and encoder of the tables, with random weights of seed 0."""
    import torch
    import transformers

    for name, (family, sizes) in DECODERS.items():
        place = folder / name
        tokenizer = byte_tokenizer(place)
        ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **ids, **sizes)
        torch.manual_seed(0)
        head = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        model = getattr(transformers, head)(config)
        model.generation_config.eos_token_id = None  # programs count what is generated
        model.save_pretrained(place)
    reward_model(folder)
    for name, (family, head, sizes) in ENCODERS.items():
        place = folder / name
        tokenizer = word_tokenizer(place)
        config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **sizes)
        torch.manual_seed(0)
        getattr(transformers, family + head)(config).save_pretrained(place)
    byte_tokenizer(folder / "roberta-base")
    (folder / "roberta-base" / "config.json").write_text('{"model_type": "roberta"}')
    word_tokenizer(folder / "bert-large-uncased")
    (folder / "bert-tiny.json").write_text(json.dumps({
        "vocab_size": len((folder / "bert-large-uncased" / "vocab.txt").read_text().split()), "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512,
        "type_vocab_size": 2, "initializer_range": 0.02}))  # fmt: skip


def reward_model(folder: Path) -> None:
    """What step 2 of DeepSpeed-Chat leaves, and step 3 begins with: the decoder's weights and a head's, in one file."""
    import torch
    from safetensors.torch import load_file

    place = folder / "reward-opt-350m"
    shutil.copytree(folder / "facebook" / "opt-350m", place, dirs_exist_ok=True)
    weights = load_file(place / "model.safetensors").items()
    state = {name.replace("model.", "rwtransformer.", 1): value for name, value in weights if name != "lm_head.weight"}
    state["v_head.weight"] = torch.randn(1, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0)) / 8
    torch.save(state, place / "pytorch_model.bin")


def hub_data(folder: Path, name: str, configs: list[str], splits: dict[str, list[dict[str, Any]]]) -> None:
    """A data set that `load_dataset(name, config)` takes from a folder of that name, one content for all `configs`."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"      - split: {split}\n        path: {split}.jsonl\n" for split in splits)
    head = "".join(f"  - config_name: {config}\n    data_files:\n{rows}" for config in configs)
    (place / "README.md").write_text(f"---\nconfigs:\n{head}---\n")
    for split, samples in splits.items():
        (place / f"{split}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def texts(folder: Path) -> None:
    """Wikitext, MNLI, Alpaca, SQuAD and the chat data of DeepSpeed-Chat, some lines each."""
    from datasets import Dataset, DatasetDict

    lines = {"train": sentences(640, 1), "validation": sentences(64, 2), "test": sentences(64, 3)}
    text = {split: [{"text": line + " . " + line + " ."} for line in rows] for split, rows in lines.items()}
    hub_data(folder, "wikitext", ["wikitext-2-raw-v1", "wikitext-2-v1"], text)
    draw = random.Random(0)

    def pairs(count: int, seed: int) -> list[dict[str, Any]]:
        return [{"premise": line, "hypothesis": line.split(" and ")[0], "label": draw.randrange(3), "idx": number}
                for number, line in enumerate(sentences(count, seed))]  # fmt: skip

    hub_data(folder, "glue", ["mnli"], {"train": pairs(128, 4), "validation_matched": pairs(32, 5),
                                      "validation_mismatched": pairs(32, 6)})  # fmt: skip
    named_labels = "".join(
        f"            '{place}': {name}\n" for place, name in enumerate(("agrees", "open", "contradicts"))
    )
    features = "".join(f"    - name: {name}\n      dtype: string\n" for name in ("premise", "hypothesis"))
    features += f"    - name: label\n      dtype:\n        class_label:\n          names:\n{named_labels}"
    features += "    - name: idx\n      dtype: int64\n"
    readme = folder / "glue" / "README.md"
    head = readme.read_text().removesuffix("---\n")
    readme.write_text(f"{head}dataset_info:\n- config_name: mnli\n  features:\n{features}---\n")
    taught = [{"instruction": f"Write about {line.split()[0]}", "input": "", "output": line}
              for line in sentences(64, 7)]  # fmt: skip
    hub_data(folder, "tatsu-lab/alpaca", ["default"], {"train": taught})
    (folder / "alpaca_data.json").write_text(json.dumps(taught))

    def chats(count: int, seed: int) -> Dataset:
        asked, good, bad = sentences(count, seed), sentences(count, seed + 1), sentences(count, seed + 2)
        return Dataset.from_list([{"prompt": f" Human: {ask} Assistant:", "chosen": f" {one}", "rejected": f" {two}"}
                                  for ask, one, two in zip(asked, good, bad, strict=True)])  # fmt: skip

    DatasetDict(train=chats(640, 10), test=chats(64, 20)).save_to_disk(str(folder / "Dahoas" / "rm-static"))
    squad(folder)


def squad(folder: Path) -> None:
    """Questions about lines, in SQuAD's two files."""
    place = folder / "squad"
    place.mkdir(exist_ok=True)
    for split, seed in (("train", 30), ("dev", 31)):
        asked = []
        for number, line in enumerate(sentences(48, seed)):
            word = line.split()[2]
            answer = {"text": word, "answer_start": line.index(word)}
            question = {"id": f"{split}{number}", "question": f"what is {word}", "answers": [answer]}
            asked.append({"context": line, "qas": [question]})
        (place / f"{split}-v1.1.json").write_text(
            json.dumps({"version": "1.1", "data": [{"title": "lines", "paragraphs": asked}]})
        )


def pictures(folder: Path) -> None:
    """CIFAR-10's files with random pictures, and a folder of pictures by class."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    place = folder / "cifar" / "cifar-10-batches-py"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        content = {"data": draw.integers(0, 256, (104, 3072), dtype=numpy.uint8),
                   "labels": [number % 10 for number in range(104)]}  # fmt: skip
        (place / name).write_bytes(pickle.dumps(content))
    classes = "airplane automobile bird cat deer dog frog horse ship truck".split()
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": classes}))
    for split, count in (("train", 64), ("val", 16)):
        for number in range(count):
            where = folder / "pictures" / split / f"class{number % 4}"
            where.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (72, 72, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(where / f"{number}.png")


def make(folder: Path) -> Path:
    """All stand-ins in `folder`, unless they are there."""
    done = folder / "made"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        models(folder)
        texts(folder)
        pictures(folder)
        (folder / "bytes.bin").write_bytes(bytes(range(256)) * (4 << 12))
        done.touch()
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))
