"""Small tokenizers of each kind of vocabulary, trained on the spot, and random texts for them."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

BOS, EOS = "<s>", "</s>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps all day in the sun",
    "def function(argument): return argument + 1  # a comment about the function",
    "Größe, naïve café, où êtes-vous? Ελληνικά и русский текст 日本語のテキスト 中文文本",
    "numbers 0 1 2 3 10 100 2024 3.14159, (brackets) [and] {more} - signs + * / = != <= >=",
] * 3
PIECES = [
    *"abc xyz .,!?()0123456789\n\t", "the ", "quick", " brown", "fox", "  ", "é", "ß", "ñ", "日本", "中", "русский",
    "🙂", "👩\u200d👩\u200d👧", "🇩🇪", "e\u0301", "a\u0308\u0323", "\u200d", "नमस्ते", "שלום", "ก็", "\x01", "𝔘", "\ufffd",
    "<0x41>", "▁", "Ġ",
]  # fmt: skip


def texts(count: int, seed: int = 3) -> list[str]:
    """Random texts of words, emoji, combining marks and characters of all lengths."""
    draw = random.Random(seed)
    return ["".join(draw.choices(PIECES, k=draw.randint(1, 16))) for _ in range(count)]


def _fast(made: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS, unk_token="<unk>")


def _byte_level() -> Any:
    """As GPT-2's, Llama 3's, Qwen's and SmolLM2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return _fast(made)


def _with_bytes(made: Any, strip: bool) -> Any:
    """The same tokenizer with a token for each byte after its special tokens, and the decoder that goes with it."""
    from tokenizers import Tokenizer

    stated = json.loads(made.to_str())
    letters = [token for token in stated["model"]["vocab"] if token not in ("<unk>", BOS, EOS)]
    vocabulary = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    stated["model"]["vocab"] = {token: at for at, token in enumerate(vocabulary)}
    stated["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strip else []
    stated["decoder"] = {"type": "Sequence", "decoders": steps}
    return Tokenizer.from_str(json.dumps(stated))


def _byte_fallback(strip: bool = True) -> Any:
    """As Llama 2's and Mistral's; without the strip of the first space, as Gemma's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # as SentencePiece, which splits at spaces
    spaces = [normalizers.Prepend("▁")] if strip else []
    made.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=220, special_tokens=["<unk>", BOS, EOS], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return _fast(_with_bytes(made, strip))


def _unigram() -> Any:
    """As T5's and XLM-R's, from SentencePiece: unknown characters have no bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<unk>", BOS, EOS], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return _fast(made)


def _word_pieces() -> Any:
    """As BERT's: the text of a token depends on its neighbours."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=220, special_tokens=["<unk>", BOS, EOS], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return _fast(made)


KINDS = {
    "byte-level": _byte_level,
    "byte-fallback": _byte_fallback,
    "byte-fallback, spaces kept": functools.partial(_byte_fallback, strip=False),
    "unigram": _unigram,
    "word pieces": _word_pieces,
}


@functools.cache
def vocabulary(kind: str) -> Any:
    """The tokenizer of a kind; it is trained once."""
    return KINDS[kind]()
