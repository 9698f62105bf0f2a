"""Checks of the device executor that hold with any kernels: in plain torch (here), or interpreted (`tests/kernels`)."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any
from unittest import mock

import torch

from deepspeed.inference import Generator, Request, SamplingParams, device_sampling
from deepspeed.inference.executors import attention_ways, select
from deepspeed.inference.executors.packed_decoder import PackedDecoder
from tests.unit.inference.reference_kernels import ReferenceKernels, only_way, planned_drafts
from tests.unit.inference.toys import alone, llama, masked, mixture, phi3, prompts, scale

NEW = 8
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def toy(family: str, norms: float = 0.0, **sizes: Any) -> Any:
    """A model of a family of Transformers with two layers."""
    import transformers

    given = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**given, **sizes})
    return scale(getattr(transformers, f"{family}ForCausalLM")(config), norms=norms)


def small(**sizes: Any) -> Any:
    """The smallest Llama that is not trivial."""
    return llama(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, **sizes)


FAMILIES = {
    "Llama": llama,
    "Qwen2": lambda: toy("Qwen2"),  # biases
    "Qwen3": lambda: toy("Qwen3", 0.5, head_dim=16),  # norms of queries and keys
    "Mistral": lambda: masked("Mistral"),  # a window
    "Gemma2": lambda: masked("Gemma2"),  # soft caps, norms behind both parts, a window
    "Phi3": phi3,  # joined matrices
}
OTHERS = {
    "Gemma": lambda: toy("Gemma", 0.5, head_dim=16),
    "Glm": lambda: toy("Glm", head_dim=16),  # rotations of neighbours, in half of a head
    "Helium": lambda: toy("Helium", head_dim=16),
    "StableLm": lambda: toy("StableLm", 0.5, partial_rotary_factor=0.5),
    "SeedOss": lambda: toy("SeedOss", head_dim=16),
    "Ernie4_5": lambda: toy("Ernie4_5", head_dim=16),
    "Ministral": lambda: toy("Ministral", head_dim=16, sliding_window=9),
}
# What the reader does not know, or whose attention only the attention kernels have.
THROUGH_MODULES = {
    "GptOss": lambda: masked("GptOss"),
    "Llama4Text": lambda: masked("Llama4Text"),
    "Mixtral": lambda: mixture("Mixtral"),
    "GPTNeoX": lambda: toy("GPTNeoX"),
    "Starcoder2": lambda: toy("Starcoder2"),
    "Cohere": lambda: toy("Cohere"),
    "Granite": lambda: toy("Granite", residual_multiplier=0.9),
}


def check_tokens(kernels: Any, model: Any, packed: bool = True, page: int = 16) -> None:
    """Prompts in chunks, next tokens, and drafts that are right or wrong: the tokens of `generate`."""
    texts = prompts((3, 30))
    wanted = [alone(model, prompt, NEW) for prompt in texts]
    generator = Generator(model, max_batch_tokens=24, page_size=page, speculation=3, cache_bytes=1 << 20)
    assert (type(generator._executor) is PackedDecoder) is packed, getattr(generator._executor, "unfused", "")
    before = Counter(name.split("_fp32")[0] for name, _ in kernels.launches)
    with planned_drafts(texts, wanted):
        assert generator.generate(texts, GREEDY) == wanted
    assert 0 < generator.load().accepted < generator.load().drafts
    ran = Counter(name.split("_fp32")[0] for name, _ in kernels.launches) - before
    rows = {"norm_rows", "rotate_into_pages", "gate_rows", "choose_tokens"} & set(ran)
    assert len(rows) == (4 if packed else 0) and ran["attend_whole"] > 0


OPTIONS = {
    "temperature": {"temperature": 0.9, "seed": 5},
    "cut": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 6},
    "penalties": {
        "temperature": 0.7, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    },
    "greedy penalties": {"repetition_penalty": 1.5},
    "later": {"temperature": 0.8, "seed": 8, "min_new_tokens": 3},
    "on the host": {"temperature": 0.8, "seed": 9, "logit_bias": {5: 1.0}},
    "scores": {"temperature": 0.8, "seed": 10, "logprobs": 0},
}  # fmt: skip


def drawn(model: Any, on_device: bool, answers: dict[Any, list[int]] | None = None) -> dict[Any, list[int]]:
    """Tokens of requests with all options together.

    Args:
        model: the model.
        on_device: whether tokens are chosen there.
        answers: tokens of an earlier call, of which drafts are made; None: no drafts.
    """
    generator = Generator(model, page_size=16, cache_bytes=1 << 18, speculation=2 if answers else 0)
    executor: Any = generator._executor
    assert type(executor) is PackedDecoder and executor.samples
    texts = {name: prompts((5 + number,))[0] for number, name in enumerate(OPTIONS)}
    tokens: dict[Any, list[int]] = {name: [] for name in OPTIONS}
    for name, options in OPTIONS.items():
        generator.submit(Request(name, texts[name], SamplingParams(max_new_tokens=6, ignore_eos=True, **options)))
    chooses = device_sampling.chooses if on_device else lambda rows: False
    with (
        planned_drafts(list(texts.values()), list((answers or tokens).values())),
        mock.patch.object(device_sampling, "chooses", chooses),
    ):
        while not generator.idle:
            for output in generator.step():
                assert output.error is None
                tokens[output.ident] += output.tokens
    assert not answers or 0 < generator.load().accepted < generator.load().drafts
    return tokens


def check_draws(model: Any) -> None:
    """Tokens chosen on the device are those of the host with the same random numbers, with drafts and without."""
    chosen = drawn(model, True)
    assert all(len(each) == 6 for each in chosen.values()) and len({tuple(each) for each in chosen.values()}) > 4
    assert chosen == drawn(model, False)
    assert chosen == drawn(model, True, chosen)


# -- on the emulated device --------------------------------------------------------------------------------------------

ALL = {**FAMILIES, **OTHERS, **THROUGH_MODULES}
# The emulated device lacks operators of the others' own modules: histograms of integers, complex numbers.
ON_DEVICE = [family for family in ALL if family not in ("GptOss", "Llama4Text", "Mixtral")]
WAYS = ("packed", "kernels", "flash", "gathered")  # flash: a stand-in, since torch's has no CPU form
FEW = 5  # new tokens


def kernels_of(kind: str) -> Any:
    """Kernels in plain torch ("torch"), or interpreted ones ("interpreted")."""
    if kind == "torch":
        return ReferenceKernels()
    from tests.kernels.interpreter import AllInterpreted

    return AllInterpreted()


def families_on_the_device(family: str, kind: str) -> dict[str, Any]:
    """Tokens of a family on the emulated device by each way, what ran them, and reports of its detector."""
    from tests.emulated.runs import observed
    from tests.unit.inference.test_attention_ways import varlen_stand_in

    said: dict[str, Any] = {}
    with observed() as seen:
        for name in WAYS:
            flash, kernels = attention_ways.FlashWay(varlen_stand_in), attention_ways.KernelWay(kernels_of(kind))
            ways: Any = [] if name == "gathered" else [flash if name == "flash" else kernels]
            plain = mock.patch.object(select, "_without_modules", lambda executor, *_: executor)
            with (
                mock.patch.object(attention_ways, "ways_of", lambda _, ways=ways: (ways, "")),
                mock.patch.object(attention_ways, "FLASH_DTYPES", (torch.float32,)),
                contextlib.nullcontext() if name == "packed" else plain,
            ):
                page = 256 if name == "flash" else 16
                sizes: dict[str, Any] = {"page_size": page, "cache_bytes": 1 << 21}
                generator = Generator(ALL[family]().to("cuda"), **sizes, cuda_graphs=kind != "interpreted")
            executor: Any = generator._executor
            tokens = generator.generate(prompts((3, 20)), SamplingParams(max_new_tokens=FEW, ignore_eos=True))
            used = sorted({way.name for way, _ in getattr(executor, "ways", {}).values()})
            said[name] = tokens, type(executor).__name__, used
            generator.close()
    return said | {"reports": seen.reports}


def check_family(said: dict[str, Any], family: str) -> None:
    """Each way says what Transformers' `generate` says on the CPU, and is the one that it is called."""
    assert said.pop("reports") == []
    wanted = [alone(ALL[family](), prompt, FEW) for prompt in prompts((3, 20))]
    assert {name: tokens for name, (tokens, *_) in said.items()} == dict.fromkeys(WAYS, wanted)
    assert (said["packed"][1] == "PackedDecoder") == (family not in THROUGH_MODULES)
    assert said["kernels"][1:] == ("PagedExecutor", ["kernels"])
    assert said["packed"][2] == ["kernels"] and said["gathered"][2] == []
    assert said["flash"][2] == ["flash"] or family == "Gemma2"  # soft caps


INVARIANT = ("8 at once", "chunks", "guesses", "preempted", "32 at once", "prefix", "other pages")


def check_invariance(
    way: str, kind: str, device: str = "cuda", dtype: torch.dtype = torch.float32, rows: int = 8
) -> list[str]:
    """Compare the logits' bits of a way of the CPU's table with those of requests alone; returns the reports.

    `rows`: rows of a product; 0: those of the pass.
    """
    from tests.emulated.runs import observed
    from tests.unit.inference.test_native import all_ways

    model = small(max_position_embeddings=512, num_hidden_layers=1).to(device, dtype)
    # Interpreted kernels copy to the host, which a capture refuses.
    options: dict[str, Any] = {"kind": PackedDecoder, "max_batch_tokens": 32, "batch_invariant": True}
    options["cuda_graphs"] = kind != "interpreted"
    with only_way(kernels_of(kind)), mock.patch.object(select, "INVARIANT_ROWS", rows), observed() as seen:
        all_ways(model, 6, 20, 6, 56, (way,), **options)  # 56 tokens of cache: sequences are preempted
    return seen.reports
