"""Tables of memory for common models, by the package's own estimators: `python -m website.memory` (`make docs`).

Models are built on meta tensors from the sizes that their authors publish; no weights and no memory are needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "which-stage.md"
BEGIN, END = "<!-- generated: `python -m website.memory` -->", "<!-- end of what is generated -->"
GIB = 2**30


def _decoder(
    vocabulary: int, width: int, inner: int, layers: int, heads: int, keys: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        **more,
    }


_BERT = _decoder(30_522, 1024, 4096, 24, 16, 16)
_VIT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
# name: family of Transformers, its sizes
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {}),
    "ViT-L/16": ("ViT", _VIT),
    "BERT-large": ("Bert", _BERT),
    "Llama 3.2 1B": ("Llama", _decoder(128_256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True)),
    "GPT-2 XL": ("GPT2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "Llama 3.2 3B": ("Llama", _decoder(128_256, 3072, 8192, 28, 24, 8, tie_word_embeddings=True)),
    "Qwen2.5 7B": ("Qwen2", _decoder(152_064, 3584, 18_944, 28, 28, 4, tie_word_embeddings=False)),
    "Llama 3.1 8B": ("Llama", _decoder(128_256, 4096, 14_336, 32, 32, 8, tie_word_embeddings=False)),
    "Qwen2.5 32B": ("Qwen2", _decoder(152_064, 5120, 27_648, 64, 40, 8, tie_word_embeddings=False)),
    "Mixtral 8x7B": ("Mixtral", _decoder(32_000, 4096, 14_336, 32, 32, 8, num_local_experts=8)),
    "Llama 3.1 70B": ("Llama", _decoder(128_256, 8192, 28_672, 80, 64, 8, tie_word_embeddings=False)),
}
HEADS = {"GPT2": "LMHeadModel", "ViT": "ForImageClassification", "Bert": "ForMaskedLM"}


def sizes_of(name: str) -> tuple[int, int]:
    """Parameters of a model, and of its largest unit, which stage 3 gathers together."""
    import torch
    import transformers

    from deepspeed.zero.layout.units import units_of

    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, family + HEADS.get(family, "ForCausalLM"))(config)
    units: Counter[Any] = Counter()
    for parameter, unit in units_of(model).items():
        units[unit] += parameter.numel()
    return units.total(), max(units.values())


def columns(ranks: int) -> dict[str, Callable[[int, int], tuple[float, float]]]:
    """What each column of a table has: bytes of device memory on a rank, and of host memory on the node."""
    from deepspeed.zero.api import memory_estimate

    def whole(stage: int) -> Callable[[int, int], tuple[float, float]]:
        """Stages 0 and 1, for which there is no public estimate: states as stage 2's counts them, and a bucket."""
        parts = memory_estimate.state_bytes(stage, ranks)
        return lambda total, _: (parts.total * total + 4 * min(total, memory_estimate.REDUCE_BUCKET), 0.0)

    def second(total: int, _: int, offload: bool = False) -> tuple[float, float]:
        host, device = memory_estimate.estimate_zero2_model_states_mem_needs(total, ranks, 1, offload, 1.0)
        return device, host if offload else 0.0

    def third(total: int, largest: int, optimizer: bool = False, parameters: bool = False) -> tuple[float, float]:
        host, device, _ = memory_estimate.estimate_zero3_model_states_mem_needs(
            total, largest, ranks, 1, optimizer, parameters, True, 1.0
        )
        return device, host if optimizer else 0.0

    if ranks == 1:
        return {
            "no offload": whole(0),
            "2, optimizer on host": lambda total, largest: second(total, largest, True),
            "3, all on host": lambda total, largest: third(total, largest, True, True),
        }
    return {
        "0": whole(0),
        "1": whole(1),
        "2": second,
        "3": third,
        "3, optimizer on host": lambda total, largest: third(total, largest, True),
        "3, all on host": lambda total, largest: third(total, largest, True, True),
    }


def _shown(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:,.0f}"


def table(ranks: int, sizes: dict[str, tuple[int, int]]) -> list[str]:
    """The lines of a table: GiB on a rank's device, and after a `+` those in the node's host memory."""
    named = columns(ranks)
    lines = ["| model | parameters | " + " | ".join(named) + " |", "|---|--:|" + "--:|" * len(named)]
    for name, (total, largest) in sizes.items():
        cells = []
        for column in named.values():
            device, host = column(total, largest)
            cells.append(_shown(device) + (f" + {_shown(host)}" if host else ""))
        parameters = f"{total / 1e9:.2f} B" if total >= 1e9 else f"{total / 1e6:.0f} M"
        lines.append(f"| {name} | {parameters} | " + " | ".join(cells) + " |")
    return lines


def generated(sizes: dict[str, tuple[int, int]]) -> str:
    """What stands between the marks of the page."""
    return "\n".join(
        [
            "",
            "On a node of eight devices:",
            "",
            *table(8, sizes),
            "",
            "On one device, where stages split nothing and only tiers help:",
            "",
            *table(1, sizes),
            "",
        ]
    )


def with_tables(page: str, tables: str) -> str:
    """The page with new tables between its marks."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{tables}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(), generated({name: sizes_of(name) for name in MODELS})))
    print(f"written: {PAGE.name}")
