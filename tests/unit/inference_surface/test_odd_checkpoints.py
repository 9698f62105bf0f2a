"""Weights as folders store them: ties once, twice or broken, names of wrappers, shards without their index."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import deepspeed
from deepspeed.errors import CheckpointError, CheckpointMissingError
from tests.unit.inference_surface.models import model, prompt

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied(tie: bool = True) -> Any:
    config = copy.deepcopy(model("llama").config)
    config.tie_word_embeddings = tie
    torch.manual_seed(4)
    return type(model("llama"))(config).eval()


def stored(plain: Any, **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The weights of a model by name, with changes; None leaves one out."""
    weights = {name: value.detach().clone() for name, value in plain.named_parameters(remove_duplicate=False)}
    weights |= {name.replace("__", "."): value for name, value in changes.items()}  # type: ignore[misc]
    return {name: value for name, value in weights.items() if value is not None}


def loaded(plain: Any, source: Any, meta: bool) -> Any:
    """A model of the same config with the weights of a checkpoint."""
    with torch.device("meta" if meta else "cpu"):
        empty = type(plain)(plain.config).eval()
    return deepspeed.init_inference(empty, dtype="fp32", checkpoint=str(source)).module


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("absent", ["lm_head__weight", "model__embed_tokens__weight", ""])
def test_a_tied_weight_may_be_stored_under_either_name_or_both(tmp_path: Path, absent: str, meta: bool) -> None:
    plain = tied()
    save_file(stored(plain, **({absent: None} if absent else {})), tmp_path / "model.safetensors")
    found = loaded(plain, tmp_path, meta)
    assert not any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert torch.equal(found(prompt()).logits, plain(prompt()).logits)


@pytest.mark.parametrize("meta", [True, False])
def test_ties_that_the_stored_values_break_stay_broken(
    tmp_path: Path, meta: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in Transformers: the config is wrong, not the weights."""
    right = tied(tie=False)
    save_file(stored(right), tmp_path / "model.safetensors")
    found = loaded(tied(), tmp_path, meta)
    assert not torch.equal(right.lm_head.weight, right.model.embed_tokens.weight)
    assert torch.equal(found(prompt()).logits, right(prompt()).logits)
    assert "stays untied" in capfd.readouterr().err


def test_a_tied_weight_that_is_nowhere_is_missed(tmp_path: Path) -> None:
    plain = tied()
    save_file(stored(plain, lm_head__weight=None, model__embed_tokens__weight=None), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 parameters are not in it"):
        loaded(plain, tmp_path, True)


@pytest.mark.parametrize(
    "form",
    [
        "module.{}",
        "_orig_mod.{}",
        "module._orig_mod.{}",
        "module.module.{}",
        "module.{bare}",
        "_orig_mod.{bare}",
        "{bare}",
    ],
)
def test_names_of_wrappers_are_known(tmp_path: Path, form: str) -> None:
    plain = tied()
    names = {name: form.format(name, bare=name.removeprefix("model.")) for name in stored(plain)}
    save_file({names[name]: value for name, value in stored(plain).items()}, tmp_path / "model.safetensors")
    assert torch.equal(loaded(plain, tmp_path, True)(prompt()).logits, plain(prompt()).logits)


def test_names_inside_of_wrapped_layers_are_known(tmp_path: Path) -> None:
    plain = tied()
    weights = {name.replace(".mlp.", "._fsdp_wrapped_module.mlp._orig_mod."): v for name, v in stored(plain).items()}
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(loaded(plain, tmp_path, True)(prompt()).logits, plain(prompt()).logits)


def test_a_model_whose_own_names_begin_so_keeps_them(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))

    save_file({"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2), "weight": torch.full((2, 2), 3.0)},
              tmp_path / "model.safetensors")  # fmt: skip
    outer = deepspeed.init_inference(Outer(), dtype="fp32", checkpoint=str(tmp_path)).module
    assert outer.module.weight.sum().item() == 4 and outer.weight.sum().item() == 12


@pytest.mark.parametrize("index", [True, False])
def test_shards_with_and_without_their_index(tmp_path: Path, index: bool) -> None:
    plain = tied()
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    if not index:
        (tmp_path / "model.safetensors.index.json").unlink()
    assert torch.equal(loaded(plain, tmp_path, True)(prompt()).logits, plain(prompt()).logits)
    files[1].unlink()
    with pytest.raises(CheckpointMissingError, match=files[1].name):
        loaded(plain, tmp_path, True)


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapters_loaded_after_kernel_injection_are_heard(tmp_path: Path) -> None:
    """Native passes read the model's own matrices; an adapter puts other modules in their place."""
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import BaseTunerLayer

    from tests.unit.inference.toys import llama

    plain = llama()
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(1)
    peft.get_peft_model(copy.deepcopy(plain), config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    engine = deepspeed.init_inference(copy.deepcopy(plain), dtype="fp32", replace_with_kernel_inject=True)
    ids = torch.randint(3, 256, (2, 9), generator=torch.Generator().manual_seed(2))
    greedy: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}

    def texts(one: Any) -> torch.Tensor:
        return one.generate(ids, attention_mask=torch.ones_like(ids), **greedy)

    before = texts(plain)
    assert torch.equal(texts(engine), before)
    for one in (plain, engine.module):
        one.load_adapter(str(tmp_path))
    adapted = texts(plain)
    assert not torch.equal(adapted, before) and torch.equal(texts(engine), adapted)
    for on, text in ((False, before), (True, adapted)):
        for one in (plain, engine.module):
            for layer in one.modules():
                if isinstance(layer, BaseTunerLayer):
                    layer.enable_adapters(on)
        assert torch.equal(texts(plain), text) and torch.equal(texts(engine), text)
