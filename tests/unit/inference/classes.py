"""Every causal LM of the installed Transformers at toy size, and what it says by itself.

Imports nothing of the package. The toys are made and asked in a process of their own (`said`); their weights and words
go to a file.
"""

from __future__ import annotations

import copy
import inspect
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from tests.parallel.tensor_models import LARGEST, SIZES, _known
from tests.unit.inference.toys import LENGTHS, lively

NEW, VOCABULARY = 32, 2000
LONGER = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256,
    "max_target_positions": 256, "sliding_window": 16, "attention_chunk_size": 32, "window_size": 16,
    "max_sequence_length": 256, "seq_length": 256, "embedding_size": 96,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
}  # fmt: skip


# Sizes that go by names of their own, or have to fit each other, by class.
HINTS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"mamba_n_heads": 12, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 200},
    "CohereCompassForCausalLM": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
    }},
    "CpmAntForCausalLM": {"dim_ff": 72, "dim_head": 8},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 6, "clip_qkv": 8.0}},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 12, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2ForCausalLM": {"head_dim": 16, "n_groups": 1},
    "Phi4MultimodalForCausalLM": {
        "audio_config": {"nemo_conv_channels": 16, "ext_pw_out_channel": 96, "num_blocks": 2},
    },
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 32, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 97,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "hc_lowrank": 16, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1,
    },
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3, "lru_width": 96, "attention_window_size": 16},
    "ReformerModelWithLMHead": {
        "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 64], "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 16, "attention_head_size": 8, "feed_forward_size": 72,
    },
    "RoCBertForCausalLM": {
        "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 64, "shape_embed_dim": 16, "shape_vocab_size": 64,
    },
    "XLMWithLMHeadModel": {"causal": True, "mask_token_id": 5},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 16,
                          "n_mamba_heads": 12, "mamba_ngroups": 1},
    "ZambaForCausalLM": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "n_mamba_heads": 2,
                         "num_hidden_layers": 3},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"hidden_size": 128, "num_heads": 4},
}  # fmt: skip


def names() -> list[str]:
    """Classes that generate text, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as table

    found: set[str] = set()
    for name in table.values():
        found.update(name if isinstance(name, (list, tuple)) else [name])
    return sorted(found)


def _config(kind: Any, mixed: bool = True) -> Any:
    """At toy size; `mixed`: a layer of every kind that the class has."""
    return _shrunk(kind.config_class, kind.__name__, mixed, HINTS.get(kind.__name__, {}))


def _shrunk(kind: Any, name: str, mixed: bool, hints: dict[str, Any]) -> Any:
    """A config of `kind` at toy size, the configs in it too; `name` of the class that it is for."""
    base = kind()
    said = {**base.to_dict(), **{key: 0 for key in getattr(base, "attribute_map", {})}}
    accepted = inspect.signature(kind.__init__).parameters
    wanted = {**SIZES, **LONGER}
    given = {key: value for key, value in wanted.items() if key in said or key in accepted}
    if "neo" not in name.lower():
        given.pop("attention_types", None)
    if given.get("window_size") and not isinstance(said.get("window_size"), int):
        given.pop("window_size")
    if "qk_rope_head_dim" in given:
        given["head_dim"], given["num_key_value_heads"] = given["qk_rope_head_dim"], given["num_attention_heads"]
    if mixed and isinstance(said.get("layer_types"), list):
        given["layer_types"] = _layers(said["layer_types"])
        given["num_hidden_layers"] = len(given["layer_types"])
    for key, inner in vars(base).items():
        if isinstance(inner, PreTrainedConfig):
            given[key] = _shrunk(type(inner), name, mixed, hints.get(key, {}))
    return kind(
        **given | {key: value for key, value in hints.items() if not isinstance(given.get(key), PreTrainedConfig)}
    )


def _layers(kinds: list[str]) -> list[str]:
    """Two layers, of unlike kinds if the class has such."""
    different = list(dict.fromkeys(kinds))[:3]
    return different if len(different) > 1 else different * 2


def build(name: str) -> Any:
    """A toy in fp32 without dropout.

    Raises:
        ValueError: there is none, and why.
    """
    import transformers
    from transformers import GenerationConfig

    reasons = []
    kind = getattr(transformers, name)
    for find in (lambda: _config(kind), lambda: _config(kind, mixed=False), lambda: (_known(name) or [None, None])[1]):
        try:
            config = find()
            if config is None:
                continue
            for key, value in vars(config).items():
                if ("drop" in key or key.endswith("pdrop")) and isinstance(value, float):
                    setattr(config, key, 0.0)
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
            config.tie_word_embeddings = False  # a tied toy repeats what it reads
            for key in ("max_position_embeddings", "n_positions"):
                if isinstance(vars(config).get(key), int):
                    setattr(config, key, 256)
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if count > LARGEST:
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


def in_a_fork(work: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What `work` returns, of a child process that may die or take too long."""
    import json

    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        warnings.simplefilter("ignore")
        try:
            found = work()
        except BaseException as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"}
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    until, status = time.monotonic() + seconds, None
    while status is None:
        if os.waitpid(child, os.WNOHANG)[0]:
            status = "ended"
        elif time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = "killed"
        time.sleep(0.02)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    if text:
        return json.loads(text)
    return {"failed": f"no answer within {seconds:.0f} s" if status == "killed" else "its process died"}


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
