"""torchao or llama.cpp as a side of `benchmarks.trained_perplexity`, in an environment of its own.

`python trained_peers.py torchao FOLDER ROWS` needs torch, Transformers and torchao; `… llama FOLDER ROWS` needs
`cyllama` (llama.cpp's own library, bound), `gguf` and numpy. FOLDER is a Llama of Transformers in fp32, ROWS a .npy of
int32 tokens (count, length). Prints a line of JSON for each form: its name, the mean loss per token in nats, and the
bits that a weight of the layers' matrices takes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Result = tuple[str, float, float]  # name, nats, bits


def torchao(folder: str, rows: Any) -> Iterator[Result]:
    """Its weight-only int8 and int4 and its W8A8; all linear layers but the head, as ours but for the head's 8 bits."""
    import torch
    from torch import nn
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )
    from torchao.quantization.quant_primitives import MappingType
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    groups: dict[str, Any] = {"weight_dtype": torch.int4, "granularity": PerGroup(32)}
    forms = {
        "int8": (Int8WeightOnlyConfig(), 8 + 32 / 576),
        "int4, symmetric": (IntxWeightOnlyConfig(**groups), 5.0),
        "int4, with offsets": (IntxWeightOnlyConfig(mapping_type=MappingType.ASYMMETRIC, **groups), 5.25),
        "W8A8": (Int8DynamicActivationInt8WeightConfig(), 8 + 32 / 576),
    }
    tokens = torch.from_numpy(rows).long()
    for name, (form, bits) in forms.items():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        quantize_(model, form, lambda module, path: isinstance(module, nn.Linear) and "lm_head" not in path)
        with torch.no_grad():
            losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in tokens]
        yield name, float(np.mean(losses)), bits


def llama(folder: str, rows: Any) -> Iterator[Result]:
    """Its fp32, Q8_0 and Q4_0, made by its own quantizer and computed by its own products."""
    from cyllama.llama import llama_cpp as cpp
    from llama_cpp import write

    whole = write(Path(folder), Path(tempfile.mkdtemp()) / "whole.gguf")
    for name, ftype, bits in (("fp32", None, 32), ("Q8_0", 7, 8.5), ("Q4_0", 2, 4.5)):
        path = whole
        if ftype is not None:
            path = whole.with_name(f"{name}.gguf")
            given = cpp.LlamaModelQuantizeParams()
            given.ftype, given.nthread = ftype, 1
            cpp.model_quantize(str(whole), str(path), given)
        yield name, _loss(cpp, path, rows), bits
    for path in whole.parent.iterdir():
        path.unlink()
    whole.parent.rmdir()


def _loss(cpp: Any, path: Path, rows: Any) -> float:
    count = rows.shape[1]
    given, context = cpp.LlamaModelParams(), cpp.LlamaContextParams()
    given.n_gpu_layers = 0
    context.n_ctx = context.n_batch = context.n_ubatch = count
    context.n_threads = context.n_threads_batch = 1
    vocabulary = cpp.LlamaModel(str(path), params=given).get_vocab().n_vocab

    class Model(cpp.LlamaModel):  # 0.2.18's context asks it for this, and it has no such member
        n_vocab = vocabulary

    model = Model(str(path), params=given)
    session = cpp.LlamaContext(model, context)
    losses = []
    for row in rows:
        session.kv_cache_clear()
        batch = cpp.LlamaBatch(n_tokens=count, embd=0, n_seq_max=1)
        for place, token in enumerate(row.tolist()):
            batch.add(token, place, [0], True)
        session.decode(batch)
        logits = np.stack([np.asarray(session.get_logits_ith(place), np.float32) for place in range(count - 1)])
        top = logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, row[1:, None], -1)
        losses.append(float((top + np.log(np.exp(logits - top).sum(-1, keepdims=True)) - chosen).mean()))
    return float(np.mean(losses))


def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # llama.cpp prints what it likes
    os.dup2(2, 1)
    side, folder, path = sys.argv[1:]
    for name, loss, bits in {"torchao": torchao, "llama": llama}[side](folder, np.load(path)):
        print(json.dumps({"side": name, "loss": loss, "bits": bits}), file=out, flush=True)


if __name__ == "__main__":
    main()
