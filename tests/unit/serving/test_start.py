"""What a server is started with: addresses, keys, limits, weights from elsewhere."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from deepspeed.compression.export import export, packable
from deepspeed.errors import ArgumentError
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.quantization.compressed_tensors import unread
from deepspeed.inference.quantization.layers import PackedLinear
from deepspeed.inference.token_bytes import token_names
from deepspeed.serving.arguments import EngineOptions, parse
from deepspeed.serving.worker import load
from tests.harness.pool import PATIENCE
from tests.unit.inference_surface.test_stored import packed, stored
from tests.unit.serving.server import serving


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`ds_serve`, which has to end by itself."""
    command = [sys.executable, "-m", "deepspeed.serving.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30 * PATIENCE, check=False)


def test_an_address_in_use_ends_the_command(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = started(str(folder), "--port", str(port))
        assert ended.returncode == 1 and f"cannot listen at 127.0.0.1:{port}" in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_whatever_fails_before_the_first_answer_ends_the_engine_too(folder: Path, tmp_path: Path) -> None:
    """The engine heeds no signal, so a web process that waits for it at its end would wait for ever."""
    broken = "import uvicorn; uvicorn.Config = None; import deepspeed.serving.cli as c; raise SystemExit(c.main())"
    ended = subprocess.run(
        [sys.executable, "-c", broken, str(folder), "--port", "0"],
        capture_output=True, text=True, timeout=60 * PATIENCE, check=False,
    )  # fmt: skip
    assert ended.returncode == 1 and "TypeError" in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-key", ""), ("--api-key", " "), ("--port", "70000"), ("--port", "-1"), ("--max-waiting", "-1"),
        ("--timeout", "inf"), ("--timeout", "nan"), ("--timeout", "0"), ("--drain", "-1"), ("--grace", "nan"),
        ("--threads", "-1"), ("--cache-bytes", "-1"), ("--max-length", "-1"), ("--speculation", "-1"),
    ],
    ids="".join,
)  # fmt: skip
def test_what_no_server_can_be_told_is_refused_by_name(arguments: tuple[str, str]) -> None:
    with pytest.raises(ArgumentError, match=arguments[0]):
        parse(["model", *arguments])


@pytest.mark.parametrize("path", ["runs/none/model", "/nowhere", "./none", ""])
def test_a_folder_that_is_not_there_is_not_asked_for_elsewhere(path: str) -> None:
    with pytest.raises(ArgumentError, match="there is no folder"):
        parse([path])


def test_a_folder_of_adapters_names_the_option_for_them(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ArgumentError, match="adapters alone: ds_serve MODEL --lora-modules NAME="):
        parse([str(tmp_path)])


def test_a_file_without_keys_is_no_open_door(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(" \n\n")
    with pytest.raises(ArgumentError, match="holds no key"):
        parse(["model", "--api-key-file", str(tmp_path / "keys")])
    (tmp_path / "keys").write_text("one\n two \n")
    assert parse(["model", "--api-key-file", str(tmp_path / "keys")]).api_keys == ("one", "two")


def of_training(folder: Path, path: Path) -> Path:
    """Other weights of the same model, as a training run may leave them, and end tokens in the folder."""
    from safetensors.torch import load_file, save_file

    weights = {name: -value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, path / "weights.safetensors")
    return path / "weights.safetensors"


def answers(url: str, prompt: list[int], new: int) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    said = httpx.post(f"{url}/v1/completions", json=body, timeout=60 * PATIENCE).json()
    return said["choices"][0]["logprobs"]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "elsewhere"), [("int4", True), ("", True), ("int8", False)])
def test_weights_from_a_checkpoint_and_packed_ones_through_the_server(
    folder: Path, tmp_path: Path, quantize: str, elsewhere: bool
) -> None:
    weights = str(of_training(folder, tmp_path)) if elsewhere else ""
    model, tokenizer = load(EngineOptions(str(folder), quantize=quantize, checkpoint=weights))
    plain, _ = load(EngineOptions(str(folder)))
    prompt, new = [20, 30, 40, 50], 24
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    (wanted,), (other,) = (Generator(one).generate([prompt], sampling) for one in (model, plain))
    assert wanted != other, "the toy says the same whatever it is told"
    arguments = ["--served-model-name", "tiny", "--quantize", quantize, "--checkpoint", weights]
    with serving(folder, tmp_path / "log", *arguments) as server:
        found = answers(server.url, prompt, new)
    stream, pieces = TextStream(tokenizer, (), prompt, skip_special_tokens=True), []
    for one in wanted:
        pieces.append(token_names(tokenizer, [(one, stream.piece(one))])[0])
    assert pieces == found


@pytest.mark.slow
def test_a_folder_that_compression_packed_is_served_in_its_integers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("compressed_tensors")
    whole = AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    export(whole, whole.state_dict(), tmp_path, "int8")
    model, _ = load(EngineOptions(str(tmp_path)))
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert packed == set(packable(whole))
    (said,) = Generator(model).generate([[20, 30, 40]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[20, 30, 40]])
    want = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False
    )
    assert said == want[0, 3:].tolist()


def by_hand(folder: Path, made: Path) -> Any:
    """The model, and around it a bf16 folder as compression packs it, whose weights are still to be put there."""
    from transformers import AutoModelForCausalLM

    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    whole.save_pretrained(made)
    AutoTokenizer.from_pretrained(folder).save_pretrained(made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": section_of()}))
    return whole


def section_of(**changes: Any) -> dict[str, Any]:
    """The `quantization_config` of such a folder, with changes."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": {**weights, **changes.pop("weights", {})}}
    given = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {**given, **changes}


def test_a_packed_folder_is_served_in_its_dtype(folder: Path, tmp_path: Path) -> None:
    whole = by_hand(folder, tmp_path)
    save_file(stored(packed(whole, 8), 8), tmp_path / "model.safetensors")
    for asked, dtype in (("auto", torch.bfloat16), ("fp32", torch.float32)):
        model, _ = load(EngineOptions(str(tmp_path), dtype=asked))
        assert {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
        assert model.model.norm.weight.dtype == model.config.dtype == dtype
        assert model.model.layers[0].mlp.up_proj.packed.dtype == dtype


@pytest.mark.parametrize(
    "section",
    [
        {"weights": {"type": "float"}, "format": "float-quantized"},
        {"weights": {"symmetric": False}},
        {"weights": {"num_bits": 2}},
        {"weights": {"strategy": "block"}},
        {"format": "nvfp4-pack-quantized"},
        {"transform_config": {"config_groups": {"R4": {}}}},
        {"kv_cache_scheme": {"num_bits": 8}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"quant_method": "fp8"},
        {"config_groups": {}},
    ],
)
def test_packed_forms_that_are_not_read_here_are_known(section: dict[str, Any]) -> None:
    assert unread(section_of(**section)) and not unread(section_of())


@pytest.mark.slow
def test_a_packed_form_that_is_not_read_here_is_transformers_work(folder: Path, tmp_path: Path) -> None:
    """Floats of 8 bits, which Transformers unpacks."""
    tensors = pytest.importorskip("compressed_tensors")
    forms: Any = pytest.importorskip("compressed_tensors.quantization")
    whole = by_hand(folder, tmp_path)
    args = forms.QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    scheme = forms.QuantizationScheme(targets=["Linear"], weights=args)
    settings = forms.QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format="float-quantized",
        quantization_status=forms.QuantizationStatus.COMPRESSED,
    )
    forms.apply_quantization_config(whole, settings)
    for module in packable(whole).values():
        module.weight_scale.data.copy_(module.weight.detach().abs().amax(1, keepdim=True) / 448)  # type: ignore[operator,union-attr]
    wanted = {name: module.weight.detach().clone() for name, module in packable(whole).items()}
    compressor = tensors.ModelCompressor.from_pretrained_model(whole, quantization_format="float-quantized")
    compressor.compress_model(whole)
    whole.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    model, _ = load(EngineOptions(str(tmp_path)))
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    (said,) = Generator(model).generate([[20, 30, 40]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(said) == 4 and wanted.keys() == packable(model).keys()


def test_end_tokens_of_the_folder_hold_for_weights_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "folder"
    shutil.copytree(folder, copy)
    said = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**said, "eos_token_id": [2, 77]}))
    for weights in ("", str(of_training(folder, tmp_path))):
        model, _ = load(EngineOptions(str(copy), checkpoint=weights))
        assert Generator(model)._ends == {2, 77}


def loaded_by_an_engine(folder: str) -> object:
    from deepspeed.inference import RaggedInferenceEngineConfig, build_hf_engine

    return build_hf_engine(folder, RaggedInferenceEngineConfig())


LOADERS: dict[str, Callable[[str], object]] = {
    "server": lambda folder: load(EngineOptions(folder)),
    "engine": loaded_by_an_engine,
}


@pytest.mark.parametrize("loader", ["server", pytest.param("engine", marks=pytest.mark.slow)])
def test_code_in_a_folder_is_refused_whatever_is_typed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    copy = tmp_path / "folder"
    shutil.copytree(folder, copy)
    said = json.loads((copy / "config.json").read_text())
    said |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (copy / "config.json").write_text(json.dumps(said))
    (copy / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    with pytest.raises(Exception, match="trust_remote_code"):
        LOADERS[loader](str(copy))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", ["</s>", "Ã"], ids=["end tokens", "half characters"])
def test_text_that_does_not_come_is_not_decoded_again_and_again(folder: Path, what: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token, decode, work = tokenizer.convert_tokens_to_ids(what), tokenizer.decode, []
    tokenizer.decode = lambda tokens, **options: (work.append(len(tokens)), decode(tokens, **options))[1]
    stream = TextStream(tokenizer, skip_special_tokens=True)
    said = "".join(stream.push([token]) for _ in range(2000)) + stream.finish([], None)
    assert said == decode([token] * 2000, skip_special_tokens=True)
    assert sum(work) < 2000 * 200


def test_a_long_stop_string_is_not_either(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token, decode, work = tokenizer.convert_tokens_to_ids("x"), tokenizer.decode, []
    tokenizer.decode = lambda tokens, **options: (work.append(len(tokens)), decode(tokens, **options))[1]
    watch = TextStream(tokenizer, ("x" * 1500, "y" * 100_000))
    assert [bool(watch.push([token]) or watch.matched) for _ in range(1500)] == [False] * 1499 + [True]
    assert sum(work) < 1500 * 20


def test_stop_strings_are_found_in_the_text_as_it_is_shown() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"a": 0, ",": 1, "b": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=True)
    tokens = tokenizer("a , b")["input_ids"]
    assert tokenizer.decode(tokens) == "a, b", "nothing is made prettier: nothing to test"
    stream, watch = TextStream(tokenizer, skip_special_tokens=True), TextStream(tokenizer, (" ,",))
    assert "".join(stream.push([token]) for token in tokens) == "a , b"
    assert [(watch.push([token]), watch.matched)[1] for token in tokens] == [None, " ,", None]


def test_weights_are_what_they_were_loaded_as(folder: Path) -> None:
    model, _ = load(EngineOptions(str(folder), dtype="bf16"))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_request_whose_own_generate_fails_is_answered_and_the_others_go_on(folder: Path, tmp_path: Path) -> None:
    """Long texts of this model go through its own `generate`, whose cache needs a package that is not there."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    ropes = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    for name, said in (
        ("config.json", {"rope_parameters": ropes}),
        ("generation_config.json", {"cache_implementation": "quantized"}),
    ):
        path = broken / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    with serving(broken, tmp_path / "log") as server:

        def asked(prompt: str) -> httpx.Response:
            body = {"model": "broken", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60 * PATIENCE)

        before = asked("short").json()["choices"][0]["text"]
        failed = asked("a text of more tokens than sixteen")
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "model_error", failed.text
        assert "ImportError" in failed.json()["error"]["message"]
        assert asked("short").json()["choices"][0]["text"] == before
        assert server.until_free()["status"] == "ok"
        assert server.end() == 0
