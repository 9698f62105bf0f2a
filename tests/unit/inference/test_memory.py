"""What a long-lived generator keeps: nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from deepspeed.inference import Generator, Request, SamplingParams
from tests.unit.inference.toys import llama

# B of the benchmarks: 3 M parameters.
SIZES_OF_B = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.slow
def test_ten_thousand_unlike_requests_leave_no_memory_behind() -> None:
    """Two answers each, every tenth cancelled, half of these under way: after the first thousand, memory stays."""
    generator = Generator(llama(**SIZES_OF_B).bfloat16(), cache_bytes=1 << 23)
    draw, process, marks, cancelled = random.Random(3), psutil.Process(), {}, 0
    for number in range(1, 10_001):
        prompt = [
            3 + number % 1000,
            3 + number // 1000,
            *(draw.randrange(3, 2048) for _ in range(draw.randrange(2, 20))),
        ]
        for index in range(2):
            sampling = SamplingParams(max_new_tokens=draw.randrange(1, 6), temperature=1.0, seed=number, index=index)
            generator.submit(Request((number, index), prompt, sampling))
        if number % 20 == 10:
            generator.step()
        if number % 10 == 0:
            cancelled += sum(generator.cancel((number, index)) for index in range(2))
        while len(generator._live) > 64:
            generator.step()
        if number in (1_000, 10_000):
            marks[number] = process.memory_info().rss
    while not generator.idle:
        generator.step()
    assert 1_000 <= cancelled <= 2_000
    assert generator.load().free_pages == generator.pages.count
    assert not generator._live and len(generator.pages._nodes) <= generator.pages.count
    grown = marks[10_000] / marks[1_000] - 1
    print(f"memory after 10,000 requests: {grown:+.2%} of what it was after 1,000 ({marks[1_000] >> 20} MB)")
    assert grown < 0.01


def test_pages_take_what_the_page_of_docs_says() -> None:
    """pages x page size x layers x (key + value heads x head size) x bytes, and one page of zeros."""
    generator = Generator(llama(), cache_bytes=1 << 20, page_size=16)
    each = 16 * 2 * (2 + 2) * 16 * 4
    assert generator.pages.count == (1 << 20) // each
    held = sum(pool.nbytes for pair in generator._executor.store.layers.values() for pool in pair)
    assert held == (generator.pages.count + 1) * each


LOADED = """
import sys, psutil, torch, deepspeed
from transformers import AutoConfig, AutoModelForCausalLM
from deepspeed.inference import Generator, Sampling
from deepspeed.inference.quantization.quantization import quantize_linears

def answer(folder):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    engine = deepspeed.init_inference(model, dtype=torch.bfloat16, checkpoint=folder)
    whole = sum(p.nbytes for p in engine.module.parameters())
    if sys.argv[3] == "8":
        quantize_linears(engine.module, 8, 1, torch.bfloat16)
    generator = Generator(engine.module, cache_bytes=16 << 20, lossless_weights=sys.argv[3] == "12")
    said = generator.generate([[5, 6, 7, 8]], Sampling(max_new_tokens=4, ignore_eos=True))
    held = sum(pool.nbytes for pair in generator._executor.store.layers.values() for pool in pair)
    global kept
    kept = generator
    return whole, held, said[0]

def resident(which):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))

torch.set_num_threads(1)
answer(sys.argv[1])  # what is imported on the way is not counted
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak begins anew
begun = resident("VmRSS")
weights, pages, said = answer(sys.argv[2])
print(weights, pages, resident("VmHWM") - begun, resident("VmRSS") - begun, *said)
"""


def _saved(folder: Path, width: int, layers: int) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=max(width // 128, 1), max_position_embeddings=512,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.05, 0.05)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("bits", [16, 12, 8])
def test_loading_two_gigabytes_takes_them_once(tmp_path: Path, bits: int) -> None:
    """The largest resident set, from a model without memory to its first tokens: weights, pages, and 64 MB; then, with
    matrices in 12 or 8 bits, so much less."""
    folders = [_saved(tmp_path / "small", 128, 1), _saved(tmp_path / "large", 2048, 20)]
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, *folders, str(bits)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    weights, pages, peak, rest, *said = map(int, ran.stdout.split())
    print(
        f"{weights / 1e6:.0f} MB of weights, {pages / 1e6:.0f} MB of pages: peak {peak / 1e6:.0f} MB over the imports, "
        f"then {rest / 1e6:.0f}"
    )
    assert weights > 2e9 and len(said) == 4
    rounding = weights // 2 + (512 << 20) if bits == 8 else 64 << 20  # whole ones go when all are packed, from fp32
    assert peak <= weights + pages + rounding
    assert rest <= bits / 16 * weights + pages + (160 << 20), "what was freed stays with the process"
