"""The call forms of scripts: the engine inside a pipeline, or its module, with the keywords that they use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from tests.unit.inference_surface.models import model, prompt, tokenizer

FP16, BF16, FP32 = {"dtype": torch.half}, {"dtype": torch.bfloat16}, {"dtype": torch.float}
KERNELS = {"replace_with_kernel_inject": True}


def _policy(kind: str) -> dict[str, Any]:
    import transformers.models as m

    block, names = {
        "bert": (m.bert.modeling_bert.BertLayer, ("output.dense",)),
        "electra": (m.electra.modeling_electra.ElectraLayer, ("output.dense",)),
        "roberta": (m.roberta.modeling_roberta.RobertaLayer, ("output.dense",)),
        "t5": (m.t5.modeling_t5.T5Block, ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")),
        "wav2vec2": (
            m.wav2vec2.modeling_wav2vec2.Wav2Vec2EncoderLayer,
            ("attention.out_proj", "feed_forward.output_dense"),
        ),
        "gpt_neo": (m.gpt_neo.modeling_gpt_neo.GPTNeoBlock, ("attn.attention.out_proj", "mlp.c_proj")),
    }[kind]
    return {"injection_policy": {block: names}}


# (model, keywords); what stands in a list is done as each of the scripts does it.
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"mp_size": 1, **FP16, **KERNELS, "replace_method": "auto"}),
    ("gpt2", {"mp_size": 1, **FP32, "replace_method": "auto"}),
    ("gpt2", {"tensor_parallel": {"tp_size": 1}, **FP16, **KERNELS, "max_tokens": 60}),
    ("gpt_neo", {"mp_size": 1, **FP32, **KERNELS, "replace_method": "auto"}),
    ("gpt_neo", {"mp_size": 1, **FP32, "policy": True}),
    ("gpt_neox", {**FP16, **KERNELS, "max_out_tokens": 60, "min_out_tokens": 2}),
    ("gptj", {"tensor_parallel": {"tp_size": 1}, **FP32, **KERNELS}),
    ("bloom", {"mp_size": 1, **FP16, **KERNELS, "max_tokens": 60}),
    ("bloom", {"tensor_parallel": {"tp_size": 1}, **FP16, **KERNELS, "base_dir": "."}),
    ("opt", {"mp_size": 1, **FP32, **KERNELS, "replace_method": "auto"}),
    ("opt", {"tensor_parallel": {"tp_size": 1}, **FP16, "max_tokens": 60}),
    ("llama", {"tensor_parallel": {"tp_size": 1}, **FP16, **KERNELS}),
    ("llama", {"config": {"replace_with_kernel_inject": True, "dtype": "fp32", "enable_cuda_graph": False}}),
    ("llama", {**BF16, "keep_module_on_host": False}),
    ("bert", {"mp_size": 1, **FP32, "policy": True}),
    ("bert", {"dtype": torch.half, **KERNELS, "enable_cuda_graph": True}),
    ("bert-class", {"mp_size": 1, **FP16, **KERNELS, "replace_method": "auto"}),
    (
        "distilbert",
        {"dtype": torch.half, **KERNELS, "use_triton": False, "triton_autotune": False, "max_out_tokens": 64},
    ),
    ("electra", {"mp_size": 1, **FP32, "policy": True}),
    ("roberta", {"mp_size": 1, **FP32, "policy": True}),
    ("t5", {"mp_size": 1, **FP32, "policy": True}),
    ("t5", {"tensor_parallel": {"tp_size": 1}, **FP32}),
    ("wav2vec2", {"mp_size": 1, **FP32, "policy": True}),
]


def _asked(kind: str, one: Any) -> torch.Tensor:
    """What a script asks of a model of that kind: tokens, or the values of an encoder."""
    ids = prompt(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # the second prompt is shorter, and padded where generation pads
    if kind == "wav2vec2":
        return one(torch.randn(2, 400, generator=torch.Generator().manual_seed(1))).logits
    if kind.split("-")[0] in ("bert", "distilbert", "electra", "roberta"):
        return one(ids, attention_mask=mask.flip(1)).logits
    return one.generate(input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False)


def _in_bf16(one: Any) -> Any:
    """As Transformers loads it: what is computed, such as rotary frequencies, stays in fp32."""
    for param in one.parameters():
        param.data = param.data.bfloat16()
    return one


@pytest.mark.parametrize(("kind", "given"), FORMS, ids=lambda part: part if isinstance(part, str) else "-".join(part))
def test_call_forms(kind: str, given: dict[str, Any]) -> None:
    kwargs = {key: value for key, value in given.items() if key != "policy"}
    kwargs |= _policy(kind) if "policy" in given else {}
    plain = model(kind)
    want = _asked(kind, _in_bf16(model(kind)) if given.get("dtype") is torch.bfloat16 else plain)
    engine = deepspeed.init_inference(plain, **kwargs)
    for one in (engine, engine.module):
        assert torch.equal(_asked(kind, one), want)


def test_weights_of_shards_for_a_model_without_memory(tmp_path: Path) -> None:
    """As scripts for large models do: the model on the meta device, a JSON that names the files."""
    plain = model("bloom")
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(str(path.name) for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    (tmp_path / "checkpoints.json").write_text(json.dumps({"type": "BLOOM", "checkpoints": files, "version": 1.0}))
    with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
        empty = type(plain)(plain.config).eval()
    engine = deepspeed.init_inference(
        empty, mp_size=1, dtype=torch.float16, checkpoint=str(tmp_path / "checkpoints.json"), base_dir=str(tmp_path),
        save_mp_checkpoint_path=str(tmp_path / "next"), **KERNELS,
    )  # fmt: skip
    assert torch.equal(_asked("bloom", engine), _asked("bloom", plain))
    assert (tmp_path / "next" / "ds_inference_config.json").is_file()


def test_an_old_setting_is_an_error() -> None:
    with pytest.raises(ValueError, match="quantization_setting"):
        deepspeed.init_inference(model("gpt2"), quantization_setting=(False, 64))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_inside_a_pipeline_for_text(kind: str) -> None:
    from transformers import pipeline

    words = tokenizer()
    pipe = pipeline("text-generation", model=model(kind), tokenizer=words)
    texts = ["a b c de", "fa ge x y z m"]
    call = {"do_sample": False, "max_new_tokens": 12}
    want = [pipe(text, **call) for text in texts]
    pipe.model = deepspeed.init_inference(pipe.model, dtype=torch.float32, **KERNELS)
    assert [pipe(text, **call) for text in texts] == want
    assert len(set(want[0][0]["generated_text"].split())) > 5


def test_inside_a_pipeline_for_masks() -> None:
    from transformers import pipeline

    pipe = pipeline("fill-mask", model=model("bert"), tokenizer=tokenizer())
    want = pipe("a b <mask> d")
    pipe.model = deepspeed.init_inference(pipe.model, mp_size=1, dtype=torch.float, **_policy("bert"))
    assert pipe("a b <mask> d") == want


def test_inside_a_pipeline_for_classes() -> None:
    from transformers import pipeline

    pipe = pipeline("text-classification", model=model("bert-class"), tokenizer=tokenizer())
    want = pipe("a b c d")
    pipe.model = deepspeed.init_inference(pipe.model, dtype=torch.half, **KERNELS)
    assert pipe("a b c d") == want
