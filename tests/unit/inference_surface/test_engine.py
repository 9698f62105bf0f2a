"""The engine around a module: what it answers, refuses, falls through to, and leaves as it was."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import CheckpointError, NotAvailableError
from deepspeed.inference.engine import InferenceEngine
from tests.unit.inference_surface.models import model, prompt

FP32 = {"dtype": torch.float32}


def _generated(one: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    kwargs = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), **kwargs}
    return one.generate(ids, **kwargs)


# -- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt_neo"])
@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_are_those_of_the_model(kind: str, beams: int) -> None:
    plain, ids = model(kind), prompt()
    want = _generated(plain, ids, num_beams=beams)
    assert len(set(want[0].tolist())) > 8, "the model repeats itself: the comparison would see nothing"
    assert torch.equal(_generated(deepspeed.init_inference(plain, **FP32), ids, num_beams=beams), want)


def test_a_bare_call_runs_on_a_cpu_and_says_in_which_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    plain, ids = model("llama"), prompt()
    want = _generated(plain, ids)
    engine = deepspeed.init_inference(plain)
    assert engine.dtype is torch.float32 and torch.equal(_generated(engine, ids), want)
    assert capsys.readouterr().err.count("dtype fp16 runs in fp32") == 1


def test_the_cast_is_in_place_and_equals_loading_in_that_dtype(tmp_path: Path) -> None:
    plain, ids = model("llama"), prompt()
    plain.save_pretrained(tmp_path)
    want = type(plain).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()(ids).logits
    weight = plain.lm_head.weight
    engine = deepspeed.init_inference(plain, dtype="bf16")
    assert engine.module is plain and plain.lm_head.weight is weight and weight.dtype is torch.bfloat16
    assert torch.equal(engine(ids).logits, want)


def test_two_engines_at_once_and_one_destroyed() -> None:
    one, two, ids = model("llama"), model("gpt2"), prompt()
    want = _generated(one, ids), _generated(two, ids)
    first, second = deepspeed.init_inference(one, **FP32), deepspeed.init_inference(two, **FP32)
    first.profile_model_time(), second.profile_model_time()
    assert torch.equal(_generated(first, ids), want[0]) and torch.equal(_generated(second, ids), want[1])
    first.destroy()
    assert torch.equal(_generated(second, ids), want[1]) and len(second.model_times()) == 24
    assert torch.equal(_generated(first, ids), want[0])


def test_the_mode_is_evaluation() -> None:
    trained = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    engine = deepspeed.init_inference(trained, **FP32)
    assert not engine.training and not trained[1].training
    x = torch.randn(3, 4)
    assert torch.equal(engine(x), trained[0](x))


# -- length ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        ({"max_new_tokens": 56}, ("9", "56", "65", "64")),
        ({"max_length": 65}, ("9", "56", "65", "64")),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(call: dict[str, int], numbers: tuple[str, ...]) -> None:
    engine = deepspeed.init_inference(model("gpt2"), **FP32)
    engine.profile_model_time()
    ids = prompt()
    for spelled in ({"inputs": ids}, {"input_ids": ids}):
        with pytest.raises(RuntimeError, match="exceed maximum length") as caught:
            engine.generate(**spelled, **call)
        assert all(number in str(caught.value) for number in numbers)
    with pytest.raises(RuntimeError, match="exceed"):
        engine.generate(ids, **call)
    assert engine.model_times() == []


def test_the_limit_is_the_models_and_max_tokens_lowers_it() -> None:
    ids = prompt(1, 9)
    engine = deepspeed.init_inference(model("gpt2"), **FP32)
    assert _generated(engine, ids, max_new_tokens=55, min_new_tokens=55).shape == (1, 64)
    engine = deepspeed.init_inference(model("gpt2"), max_tokens=8, **FP32)
    with pytest.raises(RuntimeError, match="Input with size 9 exceeds maximum length of 8.*Please increase max_tokens"):
        engine.generate(ids, max_new_tokens=1)
    engine = deepspeed.init_inference(model("bloom"), **FP32)  # its positions have no end
    assert engine.generate(prompt(1, 70), max_new_tokens=3, min_new_tokens=3).shape == (1, 73)


def test_lengths_from_a_generation_config_count() -> None:
    from transformers import GenerationConfig

    engine = deepspeed.init_inference(model("gpt2"), **FP32)
    with pytest.raises(RuntimeError, match="56 new tokens"):
        engine.generate(prompt(), generation_config=GenerationConfig(max_new_tokens=56))
    engine.module.generation_config.max_new_tokens = 57
    with pytest.raises(RuntimeError, match="57 new tokens"):
        engine.generate(prompt())


def test_the_decoder_of_an_encoder_decoder_counts_its_own() -> None:
    engine = deepspeed.init_inference(model("t5"), **FP32)
    assert engine.generate(prompt(1, 40), max_new_tokens=4, min_new_tokens=4).shape == (1, 5)


# -- members ---------------------------------------------------------------------------------------------------------


def test_model_times() -> None:
    engine = deepspeed.init_inference(model("gpt2"), **FP32)
    with pytest.raises(AssertionError, match="model profiling is not enabled"):
        engine.model_times()
    engine.profile_model_time(use_cuda_events=False)
    engine.profile_model_time()
    engine(prompt())
    assert [time > 0 for time in engine.model_times()] == [True] and engine.model_times() == []


def test_names_fall_through_both_ways() -> None:
    plain = model("gpt2")
    engine = deepspeed.init_inference(plain, **FP32)
    assert isinstance(engine, deepspeed.InferenceEngine) and deepspeed.InferenceEngine is InferenceEngine
    assert engine.config is plain.config and engine.device == plain.device and engine.can_generate()
    settings = type(plain.generation_config)(max_new_tokens=3)
    engine.generation_config = settings
    assert plain.generation_config is settings and "generation_config" in dir(engine)
    assert engine.mp_group is None and engine.mpu is None and engine._config.tensor_parallel.tp_size == 1
    with pytest.raises(AttributeError, match="neither the engine nor its module GPT2LMHeadModel has 'nothing'"):
        _ = engine.nothing
    assert not hasattr(deepspeed.init_inference(nn.Module()), "config_of_nothing")


def test_config_of_a_plain_module_is_the_key() -> None:
    assert deepspeed.init_inference(nn.Linear(2, 2), config={"args": {"n": 1}}).config == {"n": 1}
    with pytest.raises(AttributeError, match="Linear has no generate"):
        deepspeed.init_inference(nn.Linear(2, 2)).generate(prompt())


def test_compiled_only_when_asked() -> None:
    engine = deepspeed.init_inference(nn.Linear(2, 2), **FP32)
    x = torch.randn(2, 2)
    want = engine(x)
    assert not engine.is_compiled and engine.module._compiled_call_impl is None
    engine.compile(backend="eager")
    engine.compile(backend="eager")
    assert engine.is_compiled and torch.equal(engine(x), want)


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a torch module, got dict"):
        deepspeed.init_inference({})


def test_a_module_can_stay_on_the_host() -> None:
    assert deepspeed.init_inference(nn.Linear(2, 2), keep_module_on_host=True).weight.device.type == "cpu"


def test_weights_are_loaded_to_where_the_module_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, tmp_path / "some.bin")
    monkeypatch.setattr(get_accelerator(), "current_device_name", lambda: "meta")
    for on_host, device in ((True, "cpu"), (False, "meta")):
        keys = {"dtype": "fp32", "keep_module_on_host": on_host, "checkpoint": str(tmp_path / "some.bin")}
        engine, other = (nn.Linear(2, 2, device="meta") for _ in range(2))
        engine = deepspeed.init_inference(engine, **keys)
        engine.load_model_with_checkpoint(other)
        assert engine.weight.device.type == other.weight.device.type == device


def test_features_come_in_the_models_dtype() -> None:
    engine = deepspeed.init_inference(model("wav2vec2"), dtype="bf16")
    assert engine(torch.randn(1, 400)).logits.dtype is torch.bfloat16


# -- policies ----------------------------------------------------------------------------------------------------------


def test_an_injection_policy_names_layers_of_the_model() -> None:
    from transformers.models.bert.modeling_bert import BertLayer

    plain, ids = model("bert"), prompt()
    want = plain(ids).logits
    assert torch.equal(
        deepspeed.init_inference(plain, injection_policy={BertLayer: ("output.dense",)})(ids).logits, want
    )
    for names in (("output.sparse",), "nothing"):
        with pytest.raises(ValueError, match=r"Injection policy layer'.*' not valid."):
            deepspeed.init_inference(plain, injection_policy={BertLayer: names})
    with pytest.raises(AssertionError, match="cannot be given together"):
        deepspeed.init_inference(
            plain, injection_policy={BertLayer: ("output.dense",)}, replace_with_kernel_inject=True
        )


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _on_meta(kind: str) -> Any:
    plain = model(kind)
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        return plain, type(plain)(plain.config)


@pytest.mark.parametrize(
    "form", ["folder", "file", "dict", "json", "list json", "bin", "base_dir", "checkpoint_config"]
)
def test_forms_of_checkpoint(tmp_path: Path, form: str) -> None:
    plain, empty = _on_meta("llama")
    plain.save_pretrained(tmp_path)
    torch.save(plain.model.state_dict(), tmp_path / "base.bin")  # the bare model: other names, and no head
    torch.save({"lm_head.weight": plain.lm_head.weight.detach()}, tmp_path / "head.bin")
    described = {"type": "BLOOM", "version": 1.0, "checkpoints": ["base.bin", "head.bin"]}
    (tmp_path / "said.json").write_text(json.dumps(described))
    (tmp_path / "list.json").write_text(json.dumps(["model.safetensors"]))
    kwargs: Any = {
        "folder": {"checkpoint": str(tmp_path)},
        "file": {"checkpoint": str(tmp_path / "model.safetensors")},
        "dict": {"checkpoint": {**described, "base_dir": str(tmp_path)}},
        "json": {"checkpoint": str(tmp_path / "said.json")},
        "list json": {"checkpoint": str(tmp_path / "list.json")},
        "bin": {"checkpoint": [str(tmp_path / "base.bin"), str(tmp_path / "head.bin")]},
        "base_dir": {"checkpoint": described, "base_dir": str(tmp_path)},
        "checkpoint_config": {"checkpoint_config": {"checkpoint_dir": str(tmp_path)}},
    }[form]
    engine = deepspeed.init_inference(empty, **FP32, **kwargs)
    assert not any(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert torch.equal(engine(prompt()).logits, plain(prompt()).logits)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_weights_written_for_the_next_start(tmp_path: Path, kind: str) -> None:
    plain, empty = _on_meta(kind)
    deepspeed.init_inference(plain, dtype="fp32", save_mp_checkpoint_path=str(tmp_path))
    deepspeed.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path / "ds_inference_config.json"))
    assert torch.equal(_generated(empty, prompt()), _generated(plain, prompt()))


@pytest.mark.parametrize("upstream", [False, True])
def test_a_training_checkpoint_is_read(tmp_path: Path, alone: None, upstream: bool) -> None:
    """Ours, and upstream's files alone."""
    plain, empty = _on_meta("gpt2")
    trained = model("gpt2")
    config: dict[str, Any] = {"train_batch_size": 1}
    if upstream:
        config |= {"zero_optimization": {"stage": 1}, "checkpoint": {"format": "deepspeed"}}
    engine, *_ = deepspeed.initialize(model=trained, config=config, model_parameters=trained.parameters())
    want = {name: value.clone() for name, value in plain.state_dict().items()}
    engine.save_checkpoint(str(tmp_path), tag="step1")
    for path in (tmp_path / "step1").iterdir() if upstream else ():
        if path.suffix != ".pt":
            path.unlink()
    deepspeed.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path))
    engine.destroy()
    assert all(torch.equal(value, want[name]) for name, value in empty.state_dict().items())


class _Trap:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("trapped"),))


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": _Trap()}, tmp_path / "bad.bin")
    (tmp_path / "worse.pt").write_bytes(pickle.dumps(_Trap()))
    for name in ("bad.bin", "worse.pt"):
        with pytest.raises(CheckpointError):
            deepspeed.init_inference(nn.Linear(2, 2), checkpoint=str(tmp_path / name))
    assert not Path("trapped").exists()


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / "some.bin")
    torch.save({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, tmp_path / "other.bin")
    for given, error, text in (
        (str(tmp_path / "some.bin"), CheckpointError, "1 parameters are not in it, such as .'bias'"),
        (str(tmp_path / "other.bin"), CheckpointError, "'weight' is .3, 2. there and .2, 2. in the model"),
        (str(tmp_path / "none.bin"), FileNotFoundError, "there is no"),
        ({"files": []}, ValueError, "'checkpoints' is missing"),
        ({"type": "Megatron", "checkpoints": ["a", "b"], "mp_size": 2}, NotAvailableError, "slices of ranks"),
        ({"type": "ds_model", "checkpoints": {"tp": ["a"]}}, NotAvailableError, "slices of ranks"),
    ):
        with pytest.raises(error, match=text):
            deepspeed.init_inference(nn.Linear(2, 2), checkpoint=given)


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_more_slices_than_ranks() -> None:
    with pytest.raises(ValueError, match="tp"):
        deepspeed.init_inference(model("llama"), tensor_parallel={"tp_size": 2}, dtype="fp32")
