"""Every toy over a sequence that two ranks share: equal to the model alone, or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from deepspeed.comm.mesh import current_mesh
from deepspeed.errors import DeepSpeedError
from tests.parallel.dense import Dense, compared, momentum
from tests.parallel.sequence_runs import batch_of, close, config_of, start
from tests.parallel.tensor_runs import model_of
from tests.unit.compression.architectures import FAMILIES

KINDS = ("plain", "padded", "packed")


def made(family: str, changes: dict[str, Any]) -> Any:
    if family != "GptOss":
        return model_of(family, **changes)
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    model: Any = GptOssForCausalLM(GptOssConfig(**sizes, **changes))
    for layer in model.model.layers:  # each head's sink another one
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def shared(family: str, changes: dict[str, Any]) -> str:
    """The error by which it is refused; empty where it trains as the model alone on batches of each kind."""
    model = made(family, changes)
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        for kind in KINDS:
            dense = Dense(model, momentum, 1)
            with start(model, config_of({"sp": 2}, 1)) as engine:
                run = compared(
                    engine, dense, current_mesh(), lambda m, *at, k=kind: m(**batch_of(*at, kind=k), **more).loss, 2
                )
                close(list(run))
    except DeepSpeedError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# What is refused, and a word of the reason.
REFUSED = {
    **dict.fromkeys(("T5", "MT5", "Bart", "Pegasus", "Marian"), "an encoder and a decoder"),
    **dict.fromkeys(("Bloom", "Mamba", "RoFormer", "ViT", "DeiT", "Dinov2", "Beit"), "takes no position_ids"),
    **dict.fromkeys(
        ("GPTNeo", "GPTJ", "CodeGen", "Falcon", "MegatronBert", "DebertaV2"), "does not go by AttentionInterface"
    ),
    **dict.fromkeys(("Nemotron", "StableLm"), "is not handed the keyword arguments"),
    # Their own positions of padded sequences are not the tokens' places.
    **dict.fromkeys(("OPT", "Roberta", "Camembert", "XLMRoberta", "Data2VecText"), "padded sequences differ"),
}
NO_TOY = {"Ernie4_5", "PhiMoE", "HunYuanDenseV1", "Helium"}  # these sizes make none
# Sinks that are numbers of each head, caps of scores, windows: what each rank computes must have them.
OWN = [("GptOss", {}), ("Mistral", {"sliding_window": 4}), ("Gemma2", {"_attn_implementation": "eager"})]
FAST = ("GptOss", "Bert")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(family, changes, id=family + "".join(changes), marks=() if family in FAST else pytest.mark.slow)
        for family, changes in OWN + [(family, {}) for family in FAMILIES if family not in NO_TOY]
    ],
)
def test_a_family_is_equal_or_refused(workers: Any, family: str, changes: dict[str, Any]) -> None:
    for found in workers(2).run(shared, family, changes, timeout=90):
        assert (REFUSED[family] in found and f"{family}" in found) if family in REFUSED else not found, found
