"""llama.cpp as a side of `benchmarks.generate`: `python llama_cpp.py FOLDER SLOTS TOKENS`, in an environment that has
`xllamacpp`, `gguf` and numpy, and needs nothing else (no torch). SLOTS prompts go on at once, each of up to TOKENS.
With a PORT behind these, it is llama.cpp's own HTTP server, a side of `benchmarks.serve`, on `--threads`.

Writes the Llama in FOLDER (Transformers, safetensors, bf16 or fp32) as GGUF beside it, with a vocabulary of made-up
words: matrices in that dtype, or with `--form int8` in Q8_0, with `int4` in Q4_0 (the embedding and the head in Q8_0,
as ours are in 8 bits). Loads it, on one thread where nothing else is said, and answers lines of JSON on stdin:
`{"prompts": [[tokens]], "new": [numbers]}` gets `{"texts": [strings]}` once all are answered. Prompts of one line go on
together, with continuous batching; nothing of an earlier prompt is reused.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def renamed(name: str) -> str:
    """The name in a GGUF."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    base = name.removesuffix(".weight")
    if base in whole:
        return f"{whole[base]}.weight"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def tensors(path: Path) -> Any:
    """(name, values in their shape: fp32, or bf16 as uint16) of a safetensors file."""
    import numpy as np

    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, said in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            kind = {"BF16": np.uint16, "F32": np.float32}[said["dtype"]]
            begin, end = said["data_offsets"]
            yield name, np.frombuffer(raw[8 + length + begin : 8 + length + end], kind).reshape(said["shape"])


def interleaved(matrix: Any, heads: int) -> Any:
    """Rows of queries or keys in llama.cpp's order: it turns neighbours, Transformers the two halves of a head."""
    rows, width = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def form_of(name: str, form: str, stored: str) -> str:
    """The name of the type, as gguf's, of the matrix `name` (in a GGUF), which is stored as F32 or BF16."""
    if not form:
        return stored
    return "Q4_0" if form == "int4" and name.startswith("blk.") else "Q8_0"


def write(folder: Path, path: Path | None = None, form: str = "") -> Path:
    """The GGUF of a folder: at `path`, or in it; matrices in their dtype, or of the form int8 or int4."""
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text())
    heads, size = config["num_attention_heads"], config["vocab_size"]
    cached = config.get("num_key_value_heads") or heads
    path = path or folder / "model.gguf"
    made = gguf.GGUFWriter(path, "llama")
    made.add_context_length(config["max_position_embeddings"])
    made.add_embedding_length(config["hidden_size"])
    made.add_block_count(config["num_hidden_layers"])
    made.add_feed_forward_length(config["intermediate_size"])
    made.add_head_count(heads)
    made.add_head_count_kv(cached)
    made.add_layer_norm_rms_eps(config["rms_norm_eps"])
    made.add_rope_dimension_count(config["hidden_size"] // heads)
    made.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    made.add_vocab_size(size)
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre("gpt-2")
    made.add_token_list([f"<{at}>" for at in range(size)])
    made.add_token_types([1] * size)
    made.add_token_merges(["< 0"])
    made.add_bos_token_id(1)
    made.add_eos_token_id(2)
    made.add_add_bos_token(False)
    for name, values in tensors(folder / "model.safetensors"):
        whole = values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)
        if values.ndim == 1:
            made.add_tensor(renamed(name), whole)
            continue
        kind = gguf.GGMLQuantizationType[form_of(renamed(name), form, "F32" if whole is values else "BF16")]
        turned = heads if "q_proj" in name else cached if "k_proj" in name else 0
        values = whole if form else values
        values = np.ascontiguousarray(interleaved(values, turned) if turned else values)
        content = gguf.quants.quantize(values, kind) if form else values if whole is values else values.view(np.uint8)
        made.add_tensor(renamed(name), content, raw_dtype=kind)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path


def load(path: Path, slots: int, tokens: int, port: int = 0, threads: int = 1) -> Any:
    """A server inside this process; a slot has a cache of its own, which is faster than one for all."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_predict = tokens * slots, slots, -1
    params.n_batch, params.n_ubatch, params.cont_batching, params.warmup = 2048, 512, True, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt, params.cache_ram_mib, params.n_gpu_layers = False, 0, 0
    params.kv_unified, params.n_threads_http = False, slots + 2
    if port:
        params.hostnames, params.port = ["127.0.0.1"], port
    return xllamacpp.Server(params)


def answer(server: Any, prompt: list[int], new: int) -> str:
    """Greedy text of one prompt."""
    asked = {"prompt": prompt, "max_tokens": new, "n_predict": new, "temperature": 0, "top_k": 1, "ignore_eos": True,
             "cache_prompt": False, "stream": False}  # fmt: skip
    said = server.handle_completions(asked)
    said = json.loads(said) if isinstance(said, (str, bytes)) else said
    if "choices" not in said:
        raise SystemExit(f"llama.cpp answered {said}")
    written = said["usage"]["completion_tokens"]
    if written != new:
        raise SystemExit(f"llama.cpp wrote {written} tokens of {new}")
    return said["choices"][0]["text"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("slots", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("port", type=int, nargs="?", default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--form", default="", choices=["", "int8", "int4"])
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")  # llama.cpp prints what it likes
    os.dup2(2, 1)
    path = Path(tempfile.mkdtemp(), "model.gguf") if args.port else None
    server = load(write(args.folder, path, args.form), args.slots, args.tokens, args.port, args.threads)
    if args.port:
        print(server.listening_address, file=out, flush=True)
        signal.pause()
    pool = ThreadPoolExecutor(args.slots)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        texts = list(pool.map(lambda one: answer(server, *one), zip(asked["prompts"], asked["new"], strict=True)))
        print(json.dumps({"texts": texts}), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
