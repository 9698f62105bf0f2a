"""Every toy over a sequence that two ranks share: equal to the model alone, or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification, LlamaForTokenClassification

from deepspeed.comm.process_groups.mesh import current_mesh, mesh_for
from deepspeed.errors import DeepSpeedError, NotAvailableError, SequenceParallelError
from deepspeed.sequence import transformers_adapter
from deepspeed.sequence.batches import UlyssesSPDataLoaderAdapter, slice_batch
from deepspeed.sequence.transformers_adapter import UlyssesSPAttentionHF, cut_sequence, sequence_models
from tests.parallel.dense import Dense, compared, momentum
from tests.parallel.sequence_runs import batch_of, close, config_of, start
from tests.parallel.tensor_runs import model_of
from tests.parallel.tiny import raises
from tests.unit.compression.architectures import FAMILIES, architecture

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


def core_of(family: str, **asked: Any) -> str:
    """What each rank computes attention with, in an engine whose outputs were compared with the whole model's."""
    with start(made(family, {}), config_of({"sp": 2}, 1), **asked) as engine:
        [found] = sequence_models(engine.module)
        return str(found._core)


def asked_by_others(folder: str) -> None:
    folder = f"{folder}/{torch.distributed.get_rank()}"
    own = core_of("GptOss")
    assert own != "sdpa" and core_of("Llama") == "sdpa"
    for core in ("sdpa", "eager"):
        model = made("Llama", {})
        model.config.save_pretrained(folder)
        unit = UlyssesSPAttentionHF.register_with_transformers(folder, core, 2, 2)
        assert core_of("GptOss") == own and core_of("Llama") == "sdpa"  # which did not ask
        assert core_of("Llama", mpu=unit) == core
        assert core_of("GptOss") == own and core_of("Llama", mpu=mesh_for({"sp": 2})) == "sdpa"
        assert core_of("Llama", mpu=unit) == core


def test_what_one_model_asks_for_is_nothing_to_another(workers: Any, tmp_path: Any) -> None:
    workers(2).run(asked_by_others, str(tmp_path), timeout=90)


class Renamed(BertForMaskedLM):
    pass


class Weighted(BertForMaskedLM):
    """A loss of its own that no one else knows."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids=input_ids, position_ids=position_ids, **more)
        output.loss = 3 * output.loss
        return output


def masked_losses() -> None:
    axis, length = mesh_for({"sp": 2}).axis("sp"), 10
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :4] = -100  # the ranks count other numbers of tokens
    batch = {"input_ids": ids, "position_ids": torch.arange(length).expand(2, -1), "labels": labels}
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    for kind in (BertForMaskedLM, Renamed, Weighted):
        torch.manual_seed(0)
        model: Any = kind(BertConfig(vocab_size=64, num_attention_heads=4, **sizes)).eval()
        with torch.no_grad():
            wanted = float(model(**batch).loss)
        [made] = cut_sequence(model, axis)
        for more in ({}, {"return_dict": False}):
            if kind is not Weighted:
                with torch.no_grad():
                    found = model(**slice_batch(batch, axis), **more)
                assert abs(float(found[0]) - wanted) < 1e-5 and len(found) == 2, (kind, more, found[0], wanted)
                continue
            if not more:
                with raises(NotAvailableError, "Weighted", "loss of one rank's slice"):
                    model(**slice_batch(batch, axis))
                assert (
                    not made._entered and transformers_adapter._current.get() is None
                )  # the next forward is not taken for one inside
        made.remove()


def labelled_tokens() -> None:
    """With a loss function of its own (Llama) and with lines of its own (BERT), with and without an engine."""
    axis, length, draw = mesh_for({"sp": 2}).axis("sp"), 10, torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, most, (2, length), generator=draw) for most in (64, 5))
    labels[:, :4] = -100  # the ranks count other numbers of tokens
    batch = {"input_ids": ids, "labels": labels}
    for kind, stem in ((BertForTokenClassification, "Bert"), (LlamaForTokenClassification, "Llama")):
        _, config = architecture(stem)
        config.num_labels, config.classifier_dropout = 5, 0.0
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        torch.manual_seed(0)
        model: Any = kind(config)
        dense = Dense(model, momentum, 1)
        with torch.no_grad():
            wanted = float(model(**batch).loss)
        [made] = cut_sequence(model, axis)
        for more in ({}, {"return_dict": False}):
            with torch.no_grad():
                found = model(**slice_batch(batch, axis), **more)
            assert abs(float(found[0]) - wanted) < 1e-5, (kind, more, found[0], wanted)
        adapted = UlyssesSPDataLoaderAdapter([batch], axis.rank, axis.group, 2)
        adapted.shift_labels = False
        [part] = adapted
        assert "shift_labels" not in part and abs(float(model(**part).loss) - wanted) < 1e-5
        made.remove()
        with start(model, config_of({"sp": 2}, 1)) as engine:
            close(list(compared(engine, dense, current_mesh(), lambda m, *_: m(**batch).loss, 2)))


def heads_of_whole_sequences() -> None:
    """What they say of a slice would be wrong in silence without an engine."""
    axis = mesh_for({"sp": 2}).axis("sp")
    for name in (
        "BertForPreTraining", "BertForNextSentencePrediction", "BertForSequenceClassification",
        "BertForQuestionAnswering", "BertForMultipleChoice", "ElectraForPreTraining", "LlamaForSequenceClassification",
    ):  # fmt: skip
        _, config = architecture(name.split("For")[0])
        model = getattr(transformers, name)(config)
        with raises(NotAvailableError, name, "takes the sequence as one", "gather what it gives"):
            cut_sequence(model, axis)
    # A pooled output is of the slice's first token.
    _, config = architecture("Bert")
    with raises(SequenceParallelError, "BertModel", "'pooler_output'", "rank 1"):
        start(transformers.BertModel(config), config_of({"sp": 2}, 1))
    with start(transformers.BertModel(config, add_pooling_layer=False), config_of({"sp": 2}, 1)):
        pass


@pytest.mark.parametrize("program", [labelled_tokens, heads_of_whole_sequences])
def test_other_heads_are_equal_or_refused(workers: Any, program: Any) -> None:
    workers(2).run(program, timeout=90)


def test_a_masked_lm_is_told_by_its_bases_and_in_tuples(workers: Any) -> None:
    workers(2).run(masked_losses, timeout=60)
