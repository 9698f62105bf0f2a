"""Small models whose greedy text is not one repeated token."""

from __future__ import annotations

import copy
from typing import Any

import torch

# Sizes of weights: matrices, embeddings, noise on norms (which unties what a tied embedding says from what it read).
SCALES = (
    (0.3, 0.3, 0.0), (0.08, 0.1, 0.0), (0.3, 0.3, 1.0), (0.2, 0.3, 0.0), (0.25, 0.05, 1.0), (0.15, 0.3, 1.0),
    (0.12, 0.15, 0.0), (0.5, 0.1, 0.3), (0.3, 1.0, 1.0), (0.08, 0.1, 1.0), (0.6, 0.1, 0.0), (0.08, 0.3, 0.0),
    (0.06, 0.06, 0.0), (0.3, 3.0, 0.0), (0.05, 0.1, 0.0),
)  # fmt: skip
MARGIN = 1e-3
LENGTHS = (1, 5, 16, 17, 33, 60, 97, 23)


def scale(model: Any, std: float = 0.3, embedding: float | None = None, norms: float = 0.0, seed: int = 5) -> Any:
    """Weights of a size at which random models say different things."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = getattr(model.get_output_embeddings(), "weight", None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                size = embedding if embedding is not None and id(parameter) in tables else std
                size = 4 * size if parameter is head and id(parameter) not in tables else size
                parameter.copy_(noise * size)
            elif norms and ("norm" in name.lower() or "ln_" in name):
                parameter.add_(noise * norms)
    return model.eval()


def lively(model: Any, different: int = 20, new: int = 32, lengths: Any = (12,), vocabulary: int = 200) -> Any:
    """`model` with weights at which greedy text has many different tokens, none of them by a hair, and what it says:
    (prompts and tokens, how many differ on average, the smallest gap).

    Raises:
        ValueError: none of the sizes tried gives that.
    """
    best = (0.0, 0.0)
    vectors = {name: value.clone() for name, value in model.state_dict().items() if value.dim() < 2}
    for seed, sizes in ((seed, sizes) for seed in (5, 6) for sizes in SCALES):
        model.load_state_dict(vectors, strict=False)
        scale(model, *sizes, seed=seed)
        said, counts, least = [], [], float("inf")
        for prompt in prompts(lengths, vocabulary):
            tokens, gaps = watched(model, prompt, new)
            said.append((prompt, tokens))
            counts.append(len(set(tokens)))
            least = min(least, *gaps)
            if counts[-1] < different / 2 or not least > MARGIN:
                break
        mean = sum(counts) / len(counts)
        if len(counts) == len(lengths) and mean >= different and least > MARGIN:
            return model, said, (mean, least)
        best = max(best, (mean, least))
    raise ValueError(f"its text has {best[0]:.0f} different tokens of {new}, margin {best[1]:.1e}")


@torch.no_grad()
def watched(model: Any, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """(greedy tokens of a copy's `generate`, the gap between the two largest logits of each).

    A copy, since some models keep state in their modules and begin the next text with it."""
    ids = torch.tensor([prompt])
    out = copy.deepcopy(model).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=10**9,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    gaps = [float(values[0, 0] - values[0, 1]) for values in (row.float().topk(2).values for row in out.logits)]
    return out.sequences[0, -len(gaps) :].tolist(), gaps


def llama(**sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    return scale(LlamaForCausalLM(LlamaConfig(**{**given, **sizes})))


def phi3(**sizes: Any) -> Any:
    """Queries, keys and values of one matrix, gate and up of one."""
    from transformers import Phi3Config, Phi3ForCausalLM

    given = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    return scale(Phi3ForCausalLM(Phi3Config(**{**given, **sizes})))


MIXTURES = {  # sizes of experts under the names that their configs have
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 8},
    "Qwen3Moe": {"intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8, "head_dim": 16},
    "Qwen2Moe": {
        "intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "num_experts": 8,
    },
    "Olmoe": {"intermediate_size": 48, "num_experts": 8},
}  # fmt: skip


def mixture(family: str = "Mixtral", **sizes: Any) -> Any:
    """Eight experts in each layer, two of them for each token."""
    import transformers

    given = {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2, "num_experts_per_tok": 2,
        **MIXTURES[family],
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**given, **sizes})
    return scale(getattr(transformers, f"{family}ForCausalLM")(config))


def masked(kind: str) -> Any:
    """A family with windows, chunks, soft caps or sinks; its second layer sees nine tokens, or chunks of nine."""
    import transformers

    windowed = "chunked_attention" if kind == "Llama4Text" else "sliding_attention"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=9, attention_chunk_size=9,
        num_local_experts=4, intermediate_size_mlp=96, moe_layers=[], eos_token_id=2, pad_token_id=0,
        layer_types=None if kind == "Mistral" else ["full_attention", windowed, "full_attention"],
    )  # fmt: skip
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    return scale(getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config), norms=0.5)


def gpt_neo(**sizes: Any) -> Any:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    given = {
        "vocab_size": 256, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256,
        "window_size": 12, "attention_types": [[["global", "local"], 1]], "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    return scale(GPTNeoForCausalLM(GPTNeoConfig(**{**given, **sizes})))


def mamba(**sizes: Any) -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    given = {"vocab_size": 256, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": 2}
    return scale(MambaForCausalLM(MambaConfig(**{**given, **sizes})))


def prompts(lengths: Any = LENGTHS, vocabulary: int = 256) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def alone(model: Any, prompt: list[int], new: int) -> list[int]:
    """Greedy tokens of the model's own `generate`."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=10**9,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()
