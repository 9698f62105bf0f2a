"""Models that answer on several ranks: matrices shared by `init_inference`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import deepspeed
from deepspeed.errors import TensorParallelError
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.quantization.quantization import apply_section
from tests.unit.inference_surface.models import model, prompt
from tests.unit.inference_surface.test_stored import packed, stored


def _generated(one: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    kwargs = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), **kwargs}
    return one.generate(ids, **kwargs)


def _sliced(size: int) -> Any:
    torch.manual_seed(100 + int(os.environ["RANK"]))
    engine = deepspeed.init_inference(model("llama"), mp_size=size, dtype="fp32")
    drawn = torch.rand(1)
    out = _generated(engine, prompt())
    return out, drawn, engine.module.model.layers[0].mlp.up_proj.weight.shape, engine.mp_group is not None


def test_two_ranks_share_the_matrices(workers: Any) -> None:
    want = _generated(model("llama"), prompt())
    (one, first, shape, group), (two, second, _, _) = workers(2).run(_sliced, 2)
    assert torch.equal(one, want) and torch.equal(two, want)
    assert torch.equal(first, second) and tuple(shape) == (32, 32) and group


def _packed_sliced(folder: str) -> str:
    one = model("llama")
    try:
        deepspeed.init_inference(one, mp_size=2, dtype="fp32", checkpoint=folder)
    except TensorParallelError as error:
        return str(error)
    return ""


def test_packed_integers_are_not_cut_and_the_error_says_so(workers: Any, tmp_path: Path) -> None:
    save_file(stored(packed(model("llama"), 8), 8), tmp_path / "model.safetensors")
    for text in workers(2).run(_packed_sliced, str(tmp_path)):
        assert "packed integers" in text and "give a folder of whole weights, or tp_size 1" in text


# -- engines of training -----------------------------------------------------------------------------------------------


def _live(stage: int, kind: str) -> Any:
    """A step of training, then answers to prompts that differ in length and number; and what a plain copy says."""
    rank, trained = int(os.environ["RANK"]), model(kind)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=trained, model_parameters=trained.parameters(), config=config)
    ids = prompt(2, 8)
    engine.backward(engine(ids, labels=ids).loss)
    engine.step()
    engine.eval()
    found = [
        _generated(
            engine, prompt(1 + rank, 5 + 9 * rank, seed=at), max_new_tokens=3 + 8 * (rank + at) % 14, min_new_tokens=3
        )
        for at in range(3 if rank else 2)
    ]
    state = engine.module_state_dict()
    plain = model(kind)
    plain.load_state_dict(state)
    want = [
        _generated(
            plain, prompt(1 + rank, 5 + 9 * rank, seed=at), max_new_tokens=3 + 8 * (rank + at) % 14, min_new_tokens=3
        )
        for at in range(3 if rank else 2)
    ]
    engine.train()
    loss = engine(ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return all(torch.equal(one, two) for one, two in zip(found, want, strict=True)), [
        len(set(one[0].tolist())) for one in found
    ]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_live_engine_generates_with_the_weights_of_now(workers: Any, stage: int) -> None:
    """Ranks differ in prompts, lengths and numbers of calls: none waits for another."""
    for equal, different in workers(2).run(_live, stage, "gpt_neo"):
        assert equal and max(different) > 8


def _in_passes(module: Any, ids: torch.Tensor, length: int) -> torch.Tensor:
    """The same, each row a request of its own, in packed passes."""
    generator = Generator(module, page_size=4)
    new = generator.generate(ids.tolist(), SamplingParams(max_new_tokens=length - ids.shape[1], ignore_eos=True))
    kind = generator.kind
    generator.close()
    assert kind == "packed", generator.why
    return torch.cat([ids, torch.tensor(new)], 1)


def _streamed(device: str, folder: str, packed: bool) -> Any:
    rank, plain = int(os.environ["RANK"]), model("llama")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": device, "nvme_path": folder, "max_in_cpu": 0},
        },
    }
    ids = prompt(2 + rank, 6 + 5 * rank)
    other = model("llama")
    if packed:
        section = {
            "post_init_quant": {
                "mlp": {"num_bits": 4, "group_size": 8},
                "self_attn": {"num_bits": 8, "symmetric": True},
            }
        }
        config["weight_quantization"] = section
        apply_section(other, section)
    want = _generated(other, ids)
    engine, optimizer, *_ = deepspeed.initialize(model=plain, config=config)
    found = [_generated(engine.module, ids), _generated(engine, ids), _in_passes(engine.module, ids, want.shape[1])]
    engine.destroy()
    return all(torch.equal(one, want) for one in found), len(set(want[0].tolist()))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_weights_that_rest_elsewhere_stream_through(workers: Any, tmp_path: Path, device: str, packed: bool) -> None:
    """ZeRO-Inference: no optimizer, weights on the host or on disk; ranks answer prompts of lengths of their own."""
    for equal, different in workers(2).run(_streamed, device, str(tmp_path), packed, timeout=120):
        assert equal and different > 8
