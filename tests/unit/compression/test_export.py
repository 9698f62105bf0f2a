"""Folders that are handed over: packed integers are small on disk, and plain Transformers loads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from deepspeed.compression.export import export, packable
from deepspeed.compression.fake_quantize import FakeQuantizers
from deepspeed.compression.pruning.verify import build, inputs_for
from deepspeed.compression.utils import four_bit_scales
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import CompressionError
from tests.parallel.tiny import said, with_words
from tests.unit.compression.architectures import architecture

# In a process without this package: the folder's outputs.
READER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
folder, ids = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
    logits = model(input_ids=torch.tensor(ids), use_cache=False).logits
assert "deepspeed" not in sys.modules
print(json.dumps(logits.flatten().tolist()))
"""


def wide_llama() -> Any:
    model_class, config = architecture("Llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    return build(model_class, config)


def packed_folder(folder: Path, weights: str) -> tuple[float, float]:
    """(bytes over those of fp32, the largest over all packed tensors; largest difference of the logits over theirs).

    Raises:
        AssertionError: a matrix is not stored as packed integers.
    """
    model = wide_llama()
    given = inputs_for(model, model.config)
    wanted = model(**given).logits.detach().flatten()
    names = {name: module.weight.numel() * 4 for name, module in packable(model).items()}
    export(model, model.state_dict(), folder, weights)
    with safe_open(folder / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    sizes = {name: (value.nbytes, value.dtype) for name, value in tensors.items()}
    shares = []
    for name, dense in names.items():
        parts = {key: value for key, value in sizes.items() if key.startswith(f"{name}.")}
        kinds = {parts.get(f"{name}.weight_packed", (0, None))[1], parts.get(f"{name}.weight", (0, None))[1]}
        assert kinds == ({None, torch.int8} if weights == "w8a8" else {None, torch.int32}), f"{name} is stored whole"
        shares.append(sum(size for size, _ in parts.values()) / dense)
    command = [sys.executable, "-c", READER, str(folder), json.dumps(given["input_ids"].tolist())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    logits = json.loads(done.stdout.splitlines()[-1])
    apart = (torch.tensor(logits) - wanted).abs().max() / wanted.abs().max()
    return max(shares), float(apart)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "share", "apart"), [("int8", 0.27, 0.02), ("int4", 0.17, 0.25), ("w8a8", 0.27, 0.03)]
)
def test_packed_integers_are_small_on_disk(weights: str, share: float, apart: float, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    found, far = packed_folder(tmp_path, weights)
    print(f"{weights}: {found:.4f} × the bytes of fp32 per tensor, logits within {far:.4f}")
    assert found <= share and far <= apart, (found, far)


def test_scales_of_four_bits_have_the_least_error_of_the_usual_ones() -> None:
    """Beside the largest size over 7, and Q4_0's signed largest over -8; what lies on such a grid comes back whole."""
    torch.manual_seed(0)
    groups = torch.randn(4096, 32)

    def error(scale: torch.Tensor) -> float:
        return float(((groups / scale).round().clamp(-8, 7) * scale - groups).square().mean())

    size = groups.abs().amax(-1, keepdim=True)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    found, even, signed = error(four_bit_scales(groups)), error(size / 7), error(largest / -8)
    assert found < 0.72 * even and found < 0.92 * signed, (found, even, signed)
    for first in (-8, 7):
        levels = torch.randint(-7, 8, (64, 32)).float()
        levels[:, 0] = first
        scale = four_bit_scales(levels * -0.03)
        assert torch.allclose((levels * -0.03 / scale).round().clamp(-8, 7) * scale, levels * -0.03, atol=1e-6)
    assert torch.equal((torch.zeros(2, 32) / four_bit_scales(torch.zeros(2, 32))), torch.zeros(2, 32))


# In a process without this package: how far the first matrix is from a product with inputs that were not rounded.
INPUTS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
layer, given = model.model.layers[0].mlp.up_proj, torch.randn(1, 3, 256, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    model(torch.zeros(1, 3, dtype=torch.long))  # packed integers are unpacked now
    scale = given.abs().amax(-1, keepdim=True) / 127.5
    rounded = (given / scale).round().clamp(-128, 127) * scale
    whole, eight = (torch.nn.functional.linear(one, layer.weight) for one in (given, rounded))
    found = layer(given)
print((found - whole).abs().max().item(), (found - eight).abs().max().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "rounds"), [("int8", False), ("w8a8", True)])
def test_inputs_are_rounded_where_the_folder_says_so(weights: str, rounds: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = wide_llama()
    export(model, model.state_dict(), tmp_path, weights)
    done = subprocess.run([sys.executable, "-c", INPUTS, tmp_path], capture_output=True, text=True, check=True, cwd="/")
    whole, eight = map(float, done.stdout.split())
    print(f"{weights}: {whole:.1e} from whole inputs, {eight:.1e} from rounded ones")
    assert (eight < whole / 20) if rounds else (whole < eight / 20)


def test_how_it_generates_goes_with_the_folder(tmp_path: Path) -> None:
    model: Any = build(*architecture("Llama"))
    model.generation_config.max_new_tokens, model.generation_config.eos_token_id = 7, [3, 5]
    export(model, model.state_dict(), tmp_path)
    told = json.loads((tmp_path / "generation_config.json").read_text())
    assert told["max_new_tokens"] == 7 and told["eos_token_id"] == [3, 5]


def test_a_weight_that_is_not_given_is_not_invented(tmp_path: Path) -> None:
    model: Any = build(*architecture("Llama"))
    state = dict(model.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(CompressionError, match=r"do not fit.*model\.norm\.weight"):
        export(model, state, tmp_path)
    with pytest.raises(CompressionError, match="int8"):
        export(model, model.state_dict(), tmp_path, "int3")
    assert not list(tmp_path.iterdir())


def test_a_tied_weight_is_given_by_one_of_its_names(tmp_path: Path) -> None:
    model: Any = build(*architecture("GPT2"))
    state = dict(model.state_dict())
    del state["lm_head.weight"]
    assert export(model, state, tmp_path)["parameters"] == sum(param.numel() for param in model.parameters())


def quantized(section: dict[str, Any]) -> tuple[Any, FakeQuantizers]:
    """A GPT-2, whose head is its embedding, with the quantizers of a `compression_training` block."""
    model: Any = build(*architecture("GPT2"))
    top = DeepSpeedConfig({"train_batch_size": 1, "compression_training": section}, world=1).top
    return model, FakeQuantizers(model, top.compression_training, top.quantize_training)


def group(params: dict[str, Any], modules: list[str], **shared: Any) -> dict[str, Any]:
    groups = {"g": {"params": params, "modules": modules}}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}


def test_a_shared_weight_is_quantized_under_all_its_names() -> None:
    bits = {"start_bits": 3, "target_bits": 3}
    with said() as lines:
        model, quantizers = quantized({"weight_quantization": group(bits, ["lm_head"])})
    assert with_words(lines, "lm_head is quantized and shares its weight with transformer.wte") == 1, lines
    quantizers.at_step(5)
    state = dict(model.state_dict())
    quantizers.bake(state)
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    assert len(state["lm_head.weight"].unique()) <= 8


def test_nothing_has_ended_before_inputs_are_rounded() -> None:
    _, quantizers = quantized({"activation_quantization": group({"bits": 8}, ["c_fc"], schedule_offset=4)})
    quantizers.at_step(3)
    assert not quantizers.ended
    quantizers.at_step(4)
    assert quantizers.ended
