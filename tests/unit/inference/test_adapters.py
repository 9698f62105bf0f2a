"""LoRA adapters by request: each equals the merged model alone, in native passes and through modules."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspeed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    NotAvailableError,
    RequestError,
)
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.executors import select
from deepspeed.inference.executors.native import FusedExecutor

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

WIDE, CLOSE = 0.3, 1e-5
KINDS: dict[str, dict[str, Any]] = {
    "few": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 5, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": r".*\.(o_proj|down_proj|k_proj)", "rank_pattern": {"down_proj": 17},
        "alpha_pattern": {"layers.1.self_attn.o_proj": 3},
    },
    "layer": {"r": 2, "target_modules": ["up_proj", "gate_proj"], "layers_to_transform": [1]},
}  # fmt: skip


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 97} | changes  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


def phi3() -> Any:
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.Phi3ForCausalLM(config).eval()


def neo() -> Any:
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        vocab_size=97,
        attention_types=[[["global"], 2]],
        max_position_embeddings=256,
    )
    return transformers.GPTNeoForCausalLM(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97, bos_token_id=0, eos_token_id=0)
    ).eval()


def adapted(model: Any, folder: Path, seed: int = 1, **config: Any) -> Any:
    """Save an adapter of `model` with PEFT to a folder, and return the merged model."""
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
    drawn = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data = WIDE * torch.randn(parameter.shape, generator=drawn)
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload().eval()


def greedy(new: int = 12) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, logprobs=3)


def finish(generator: Generator, outputs: Sequence[Any] = ()) -> dict[Any, tuple[list[int], list[Any]]]:
    found: dict[Any, tuple[list[int], list[Any]]] = {}
    while outputs or not generator.idle:
        for output in outputs or generator.step():
            assert output.error is None, output.error
            tokens, logprobs = found.setdefault(output.ident, ([], []))
            tokens += output.tokens
            logprobs += output.logprobs or []
        outputs = ()
    return found


def check(model: Any, prompt: list[int], tokens: list[int], logprobs: list[Any], close: float = CLOSE) -> None:
    """Compare an answer with the logits of a model on prompt and answer."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    assert tokens == logits.argmax(-1).tolist()
    for row, one in zip(logits, logprobs, strict=True):
        for token, value in ((one.token, one.logprob), *one.top):
            assert abs(float(row[token]) - value) <= close


PROMPTS = [[5, 6, 7, 8, 9] * 5, [3, 4, 1], list(range(10, 50))]


def mixed(generator: Generator, models: dict[str | None, Any], close: float = CLOSE) -> None:
    """Run all prompts with all adapters and without, in the same passes, and compare each with its model alone.

    One request of each adapter is cancelled while they run.
    """
    for name in models:
        generator.submit(Request((name, "gone"), PROMPTS[1], greedy(), adapter=name))
    for number, prompt in ((1, PROMPTS[1]), (0, PROMPTS[0]), (2, PROMPTS[2])):  # short ones first: they outgrow a cache
        for name in models:
            generator.submit(Request((name, number), prompt, greedy(), adapter=name))
    outputs = [output for _ in range(3) for output in generator.step()]
    assert all(generator.cancel((name, "gone")) for name in models)
    found = finish(generator, outputs)
    assert len(found) == 4 * len(models)
    for (name, number), (tokens, logprobs) in found.items():
        if number == "gone":
            continue
        check(models[name], PROMPTS[number], tokens, logprobs, close)


@pytest.mark.parametrize("fused", [True, False])
def test_each_request_equals_its_merged_model(fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = llama()
    models = {name: adapted(base, tmp_path / name, number, **kind) for number, (name, kind) in enumerate(KINDS.items())}
    if not fused:
        monkeypatch.setattr(select, "_fused", lambda executor, *_: executor)
    state = {name: value.clone() for name, value in base.state_dict().items()}
    folders = {name: tmp_path / name for name in KINDS}
    options: dict[str, Any] = {
        "page_size": 4,
        "cache_bytes": 1 << 15,
        "max_batch_tokens": 24,
        "speculation": 4,
        "prompt_chunk": 7,
    }
    generator = Generator(base, adapters=folders, **options)
    assert isinstance(generator._executor, FusedExecutor) is fused
    mixed(generator, {None: base, **models})
    assert generator.load().preemptions > 0
    mixed(generator, {None: base, **models})  # prefixes in the cache
    assert all(torch.equal(value, state[name]) for name, value in base.state_dict().items())
    assert not any(module._forward_hooks for module in base.modules())
    matrices = load_file(tmp_path / "few" / "adapter_model.safetensors")
    assert generator.adapters["few"].nbytes == sum(tensor.nbytes for tensor in matrices.values())


@pytest.mark.parametrize(("make", "targets"), [(phi3, "all-linear"), (gpt2, ["c_attn"]), (neo, ["q_proj", "c_fc"])])
def test_joined_matrices_and_other_executors(make: Any, targets: Any, tmp_path: Path) -> None:
    base = make()
    models = {name: adapted(base, tmp_path / name, seed, r=4, target_modules=targets) for seed, name in enumerate("ab")}
    generator = Generator(base, cache_bytes=1 << 20, adapters={name: tmp_path / name for name in models})
    assert generator.kind == ("gathered" if make is neo else "packed")
    assert isinstance(generator._executor, FusedExecutor) is (make is phi3)
    mixed(generator, {None: base, **models})


@pytest.mark.parametrize("form", ["lossless", "int8"])
def test_bits_do_not_depend_on_neighbours_over_packed_weights(form: str, tmp_path: Path) -> None:
    from deepspeed.inference.quantization.quantization import quantize_linears

    base = llama(head_dim=16, intermediate_size=128, hidden_size=128).to(torch.bfloat16)
    for number, name in enumerate("abc"):
        adapted(base, tmp_path / name, number, r=4, target_modules="all-linear")
    if form == "int8":
        quantize_linears(base, 8, 1, torch.bfloat16)
    generator = Generator(base, cache_bytes=1 << 20, lossless_weights=form == "lossless", prefix_cache=False,
                          adapters={name: tmp_path / name for name in "abc"})  # fmt: skip
    assert isinstance(generator._executor, FusedExecutor)
    alone = {}
    for name in (None, *"abc"):
        generator.submit(Request(name, PROMPTS[2], greedy(6), adapter=name))
        alone |= finish(generator)
    for name in (None, *"abc"):
        generator.submit(Request(name, PROMPTS[2], greedy(6), adapter=name))
        generator.submit(Request((name, "other"), PROMPTS[0], greedy(3), adapter=name))
    together = finish(generator)
    assert {name: together[name] for name in alone} == alone
    assert len({tuple(tokens) for tokens, _ in alone.values()}) > 1


def test_pages_are_of_one_adapter(tmp_path: Path) -> None:
    base = llama()
    models = {
        name: adapted(base, tmp_path / name, seed, r=4, target_modules=["v_proj"]) for seed, name in enumerate("ab")
    }
    generator = Generator(base, cache_bytes=1 << 20, page_size=4, adapters={name: tmp_path / name for name in models})
    prompt = PROMPTS[2]
    reused = {}
    for name in ("a", "b", None, "a"):
        generator.submit(Request(name, prompt, greedy(4), adapter=name))
        outputs = generator.step()
        reused[name] = next(iter(generator._live.values())).reused
        check({None: base, **models}[name], prompt, *finish(generator, outputs)[name])
    assert reused == {"a": 39, "b": 0, None: 0}
    generator.submit(Request("late", prompt, greedy(8), adapter="a"))
    outputs = generator.step()
    generator.remove_adapter("a")
    with pytest.raises(RequestError, match="there is no adapter 'a'"):
        generator.submit(Request("later", prompt, greedy(4), adapter="a"))
    adapted(base, tmp_path / "c", 7, r=3, target_modules=["v_proj"])
    other = generator.add_adapter("a", tmp_path / "c")
    generator.submit(Request("other", prompt, greedy(4), adapter="a"))
    outputs += generator.step()
    assert generator._live["other"].reused == 0 and generator._live["other"].adapter is other
    check(models["a"], prompt, *finish(generator, outputs)["late"])  # goes on with the adapter that it began with
    with pytest.raises(RequestError, match="there is an adapter 'b' already"):
        generator.add_adapter("b", tmp_path / "c")
    generator.refresh()
    assert not generator.pages._nodes and generator.load().free_pages == generator.load().pages


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_something_new": 1}, "use_something_new"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "lm_head is the output layer"),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, "embed_tokens is a Embedding"),
        ({"target_modules": ["q_proj"]}, "weights of 2 modules"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "selects 2 modules without weights"),
        ({"target_modules": ["nothing"]}, "selects no module"),
        ({"target_modules": "("}, "pattern"),
        ({"r": 9}, "for rank 9"),
        ({"r": 0}, "r is 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(entries: dict[str, Any], text: str, tmp_path: Path) -> None:
    base = llama()
    adapted(base, tmp_path, r=4, target_modules=["q_proj", "v_proj"])
    change_config(tmp_path, **entries)
    generator = Generator(base, cache_bytes=1 << 18)
    with pytest.raises((NotAvailableError, CheckpointError), match="adapter 'x'") as error:
        generator.add_adapter("x", tmp_path)
    assert text in str(error.value)
    assert not generator.adapters


def test_files_that_are_damaged_or_pickled(tmp_path: Path) -> None:
    base = llama()
    adapted(base, tmp_path, r=4, target_modules=["q_proj"])
    generator, path = Generator(base, cache_bytes=1 << 18), tmp_path / "adapter_model.safetensors"
    with pytest.raises(NotAvailableError, match="rank 4, more than the limit 2"):
        generator.add_adapter("x", tmp_path, max_rank=2)
    weights = load_file(path)
    name = next(name for name in weights if "lora_B" in name)
    save_file({**weights, name.replace("lora_B.weight", "lora_magnitude_vector"): torch.ones(4)}, path)
    with pytest.raises(NotAvailableError, match="lora_magnitude_vector"):
        generator.add_adapter("x", tmp_path)
    save_file({key: value for key, value in weights.items() if key != name}, path)
    with pytest.raises(CheckpointError, match="only one of lora_A and lora_B"):
        generator.add_adapter("x", tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointCorruptError, match="cannot be read"):
        generator.add_adapter("x", tmp_path)
    path.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointMissingError, match="pickle"):
        generator.add_adapter("x", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointCorruptError, match="not valid JSON"):
        generator.add_adapter("x", tmp_path)


def test_requests_that_run_generate_have_no_adapters(tmp_path: Path) -> None:
    base = llama()
    adapted(base, tmp_path, r=4, target_modules=["q_proj"])
    base.config.is_encoder_decoder = True  # so that nothing batches it
    with pytest.raises(NotAvailableError, match="own generate, which has no adapters"):
        Generator(base, adapters={"x": tmp_path})


def test_a_planted_error_in_the_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.inference.executors import native_adapters

    base, pointers = llama(), native_adapters._pointers
    adapted(base, tmp_path, r=4, target_modules=["up_proj"])

    def wrong(pair: Any, first: int) -> Any:
        entry = pointers(pair, first)
        entry.scale *= 1.01
        return entry

    monkeypatch.setattr(native_adapters, "_pointers", wrong)
    with pytest.raises(NotAvailableError, match="are off by"):
        Generator(base, cache_bytes=1 << 18, adapters={"x": tmp_path})
