"""GGUF files: check of a file's structure, and loading of its model and tokenizer with Transformers and `gguf`."""

from __future__ import annotations

import functools
import re
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import torch

from deepspeed.errors import CheckpointCorruptError, CheckpointMissingError, NotAvailableError
from deepspeed.foundation.log import log_rank0

ENDING, MAGIC, VERSIONS = ".gguf", b"GGUF", (2, 3)
ALIGNMENT, SPLIT = "general.alignment", "split.count"
SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Types of the metadata by number, as formats of `struct`.
TEXT, LIST = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LONGEST = 1 << 20  # bytes of a name


def is_gguf(path: str | Path) -> bool:
    """Whether a path ends in `.gguf` and is no folder."""
    return str(path).lower().endswith(ENDING) and not Path(path).is_dir()


@dataclass(frozen=True)
class GgufHeader:
    """Facts from the header of a GGUF file.

    Attributes:
        architecture: name of the model's architecture.
        elements: number of elements of matrices by their type, such as "Q4_K".
    """

    architecture: str
    elements: dict[str, int]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype for the weights: that in which most elements of matrices are stored; fp32 if they are quantized."""
        most = max(self.elements, key=lambda kind: self.elements[kind], default="F32")
        return STORED.get(most, torch.float32)


def read_header(path: str | Path) -> GgufHeader:
    """Check a GGUF file from its header: all parts of it are there.

    Raises:
        CheckpointMissingError: there is no such file.
        CheckpointCorruptError: the file is no GGUF file, damaged or truncated.
        NotAvailableError: it is one of several files of a model, or of another version; or `gguf` is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointMissingError(f"there is no file {path}")
    if SPLIT_NAME.search(path.name):
        raise NotAvailableError(f"{path.name} is one of several files of a model; join them (llama-gguf-split --merge)")
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # type: ignore[import-not-found]
    except ImportError:
        raise NotAvailableError("GGUF files need the package gguf: pip install 'deepspeed[gguf]'") from None
    try:
        with path.open("rb") as file:
            metadata, infos, start = _parse(file, path)
        elements: Counter[str] = Counter()
        end = start
        for shape, kind, offset in infos:
            number = 1
            for size in shape:
                number *= size
            block, size_of_block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            end = max(end, start + offset + number // block * size_of_block)
            elements[GGMLQuantizationType(kind).name] += number if len(shape) > 1 else 0
    except (CheckpointCorruptError, NotAvailableError):
        raise
    except (struct.error, ValueError, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise CheckpointCorruptError(f"{path} is damaged: its header cannot be read ({error})") from None
    if metadata.get(SPLIT, 0) > 1:
        raise NotAvailableError(
            f"{path.name} is one of {metadata[SPLIT]} files of a model; join them (llama-gguf-split --merge)"
        )
    if end > path.stat().st_size:
        raise CheckpointCorruptError(f"{path} is truncated: it has {path.stat().st_size} bytes of {end}; copy it anew")
    if not infos:
        raise CheckpointCorruptError(f"{path} has no tensors")
    return GgufHeader(str(metadata.get("general.architecture", "")), {k: n for k, n in elements.items() if n})


def _parse(file: BinaryIO, path: Path) -> tuple[dict[str, Any], list[tuple[tuple[int, ...], int, int]], int]:
    """Return (metadata without lists, (shape, type, offset) of each tensor, position of the first tensor's data)."""
    if file.read(4) != MAGIC:
        raise CheckpointCorruptError(f"{path} is no GGUF file: it does not begin with {MAGIC!r}")
    (version,) = _read(file, "I")
    if version not in VERSIONS:
        raise NotAvailableError(f"{path} has version {version} of GGUF, or another byte order; known are {VERSIONS}")
    tensors, keys = _read(file, "QQ")
    metadata = {}
    for _ in range(keys):
        key = _text(file)
        (kind,) = _read(file, "I")
        metadata[key] = _value(file, kind)
    infos = []
    for _ in range(tensors):
        _text(file)
        (dimensions,) = _read(file, "I")
        if dimensions > 8:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        *shape, kind, offset = _read(file, f"{dimensions}QIQ")
        infos.append((tuple(shape), kind, offset))
    alignment = metadata.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    return metadata, infos, -(-file.tell() // alignment) * alignment


def _read(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))


def _text(file: BinaryIO) -> str:
    (length,) = _read(file, "Q")
    if length > LONGEST:
        raise ValueError(f"a name of {length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends within a name")
    return text.decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """Return a value of the metadata; None for lists, which are skipped."""
    if kind == TEXT:
        return _text(file)
    if kind != LIST:
        return _read(file, NUMBERS[kind])[0]
    inner, count = _read(file, "IQ")
    if inner == LIST:
        raise ValueError("a list of lists")
    if inner in NUMBERS:
        file.seek(count * struct.calcsize(f"<{NUMBERS[inner]}"), 1)
    else:
        for _ in range(count):
            _value(file, inner)
    return None


@contextmanager
def _read_once() -> Iterator[None]:
    """Context in which Transformers parses each file once: it does so for config, tokenizer and weights anew."""
    import gguf  # type: ignore[import-not-found]

    with mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)):
        yield


def _of_file(path: Path, load: Any) -> Any:
    """Return the result of a loader of Transformers; its errors are typed."""
    try:
        return load()
    except (CheckpointCorruptError, NotAvailableError):
        raise
    except ImportError as error:
        raise NotAvailableError(f"{path.name}: {error}") from None
    except (ValueError, KeyError, TypeError, IndexError, NotImplementedError, RuntimeError) as error:
        raise NotAvailableError(
            f"{path.name} cannot be read by Transformers: {type(error).__name__}: {error}"
        ) from error


def load_gguf_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template; errors as in `load_gguf`."""
    from transformers import AutoTokenizer

    path = Path(path)
    read_header(path)
    with _read_once():
        return _of_file(path, lambda: AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name))


def load_gguf(path: str | Path, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Load the model and the tokenizer of a GGUF file, as Transformers reads them. Nothing in the file is executed.

    Args:
        path: the file.
        dtype: dtype of the weights, which are dequantized to fp32 first; None: that of most elements of the matrices
            if it is bf16 or fp16, else fp32, which has the file's exact values. The log has the choice.

    Returns:
        (model in evaluation mode, tokenizer).

    Raises:
        CheckpointMissingError: there is no such file.
        CheckpointCorruptError: the file is damaged or truncated.
        NotAvailableError: it is one of several files of a model, has an unknown version of GGUF, Transformers does not
            read its architecture, or `gguf` is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(path)
    header = read_header(path)
    chosen = header.dtype if dtype is None else dtype
    stored = ", ".join(sorted(header.elements, key=lambda kind: -header.elements[kind]))
    log_rank0(
        f"{path.name}: matrices stored in {stored} become {str(chosen).removeprefix('torch.')}"
        + ("; the dtype bf16 would take half of the memory" if dtype is None and chosen == torch.float32 else "")
    )

    def load() -> tuple[Any, Any]:
        options = {"gguf_file": path.name, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **options)
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=chosen, **options)
        return model, tokenizer

    with _read_once():
        model, tokenizer = _of_file(path, load)
    # The weights are whole now: the mark of a quantized model would refuse casts and saving.
    model.config.__dict__.pop("quantization_config", None)
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    return model.eval(), tokenizer
