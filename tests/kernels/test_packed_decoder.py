"""The device executor with interpreted kernels, in fp32: tokens of Transformers' `generate`, in all kinds of passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.needs import need_triton

need_triton()

from deepspeed.inference import Generator, Request, SamplingParams  # noqa: E402
from deepspeed.inference.executors import attention_ways, select  # noqa: E402
from deepspeed.inference.executors.packed_decoder import PackedDecoder  # noqa: E402
from deepspeed.inference.executors.pass_inputs import PassSizes  # noqa: E402
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch  # noqa: E402
from deepspeed.inference.quantization.quantization import quantize_linears  # noqa: E402
from tests.kernels.interpreter import AllInterpreted  # noqa: E402
from tests.unit.inference.toys import alone, llama, masked, mixture, phi3, prompts, scale  # noqa: E402

CPU = torch.device("cpu")
NEW = 8
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture
def kernels() -> Iterator[Any]:
    """Interpreted kernels as the only way, and no native passes."""
    launched = AllInterpreted()
    ways: Any = [attention_ways.KernelWay(launched)]
    with (
        mock.patch.object(attention_ways, "ways_of", lambda _: (ways, "")),
        mock.patch.object(select, "_fused", lambda executor, *_: executor),
    ):
        yield launched


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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(kernels: Any, family: str) -> None:
    model, texts = FAMILIES[family](), prompts((3, 30))
    texts[0] = texts[0] * 4  # drafts
    wanted = [alone(model, prompt, NEW) for prompt in texts]
    generator = Generator(model, max_batch_tokens=24, page_size=16, speculation=3, cache_bytes=1 << 20)
    assert type(generator._executor) is PackedDecoder, generator._executor.unfused
    ran = Counter(name.split("_fp32")[0] for name, _ in kernels.launches)
    assert generator.generate(texts, GREEDY) == wanted
    assert generator.load().drafts > 0
    ran = Counter(name.split("_fp32")[0] for name, _ in kernels.launches) - ran
    assert {"norm_rows", "rotate_into_pages", "gate_rows", "choose_tokens"} <= set(ran)


@pytest.mark.slow
def test_tokens_after_preemption(kernels: Any) -> None:
    model, texts = small(), prompts((9, 12, 7))
    wanted = [alone(model, prompt, NEW) for prompt in texts]
    each = 2 * 2 * 16 * 4 * 2  # bytes of two tokens in two layers
    generator = Generator(model, page_size=2, cache_bytes=20 * each)
    assert generator.generate(texts, GREEDY) == wanted and generator.load().preemptions > 0


def test_padded_inputs_give_the_logits_of_the_batch(kernels: Any) -> None:
    """`compute` is a function of its inputs alone: other contents in the same buffer, then the first ones again."""
    model = small()
    executor: Any = Generator(model, page_size=4, cache_bytes=1 << 16)._executor
    executor.store = executor.store.resized(12, 4)
    texts = prompts((6, 3))
    pages = [[3, 1, 7], [2, 5, 6]]
    executor.run(RaggedBatch([BatchSlice(t, 0, p, 1) for t, p in zip(texts, pages, strict=True)], 4, CPU))
    batches = [
        [BatchSlice([9], 6, pages[0]), BatchSlice([7], 3, pages[1])],
        [BatchSlice([11, 12], 3, pages[1], 2)],
    ]
    wanted = [executor.run(RaggedBatch(spans, 4, CPU)) for spans in batches]
    sizes = PassSizes.decode(4, 5, 4, executor.tiling, 2)
    inputs = executor.inputs(sizes)
    for number in (0, 1, 0):
        batch = RaggedBatch(batches[number], 4, CPU)
        assert executor.native(batch) and PassSizes.of(batch.spans, 4, executor.tiling).fits(sizes)
        inputs.fill(batch, executor.tiling)
        before = [pool.clone() for pool in executor._pools]
        launches = len(kernels.launches)
        logits = executor.compute(inputs)
        grids = kernels.launches[launches:]
        torch.testing.assert_close(logits[: len(wanted[number])], wanted[number], rtol=1e-4, atol=1e-4)
        inputs.fill(RaggedBatch(batches[1 - number], 4, CPU), executor.tiling)
        launches = len(kernels.launches)
        executor.compute(inputs)
        assert kernels.launches[launches:] == grids  # of sizes alone
        for pool, old in zip(executor._pools, before, strict=True):
            assert torch.equal(pool[: 2 * 4], old[: 2 * 4])  # padding writes nothing: pages -1 and 0 are nobody's


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_integers(kernels: Any, bits: int) -> None:
    model = llama(hidden_size=64, intermediate_size=64)
    quantize_linears(model, bits, 1, torch.float32)
    executor: Any = Generator(model, cache_bytes=1 << 18)._executor
    assert type(executor) is PackedDecoder, executor.unfused
    text = prompts((11,))[0]
    executor.store = executor.store.resized(4, 16)
    launches = len(kernels.launches)
    logits = executor.run(RaggedBatch([BatchSlice(text, 0, [1], 11)], 16, CPU))
    ran = Counter(name.split("_")[0] for name, _ in kernels.launches[launches:])
    assert (ran["int8"], ran["int4"]) == ((15, 0) if bits == 8 else (1, 14))  # the head has 8 bits
    right = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(logits, right, rtol=2e-4, atol=2e-4 * float(right.abs().max()))


# -- tokens chosen on the device ---------------------------------------------------------------------------------------

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


def drawn(model: Any, on_device: bool, speculation: int = 2) -> dict[Any, list[int]]:
    """Tokens of requests with all options together."""
    generator = Generator(model, page_size=16, cache_bytes=1 << 18, speculation=speculation)
    executor: Any = generator._executor
    assert type(executor) is PackedDecoder and executor.samples
    text, tokens = prompts((5,))[0] * 3, {name: [] for name in OPTIONS}
    for name, options in OPTIONS.items():
        generator.submit(Request(name, text, SamplingParams(max_new_tokens=6, ignore_eos=True, **options)))
    executor.samples = on_device
    while not generator.idle:
        for output in generator.step():
            assert output.error is None
            tokens[output.ident] += output.tokens
    return tokens


@pytest.mark.slow
def test_tokens_chosen_on_the_device_are_those_of_the_host(kernels: Any) -> None:
    """With the same random numbers; drafts do not change them."""
    model = small()
    chosen = drawn(model, True)
    assert all(len(each) == 6 for each in chosen.values()) and len({tuple(each) for each in chosen.values()}) > 4
    assert chosen == drawn(model, False)
    assert chosen == drawn(model, True, speculation=0)


# -- what goes through the modules -------------------------------------------------------------------------------------


def test_weights_stay_the_parameters(kernels: Any) -> None:
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    generator = Generator(model, cache_bytes=1 << 18)
    executor: Any = generator._executor
    assert executor.structure.joined == 2 * 5
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    text = prompts((9,))[0]
    with torch.no_grad():  # changed in place, then replaced
        attention.k_proj.weight.mul_(-1)
    assert generator.generate([text], GREEDY) == [alone(model, text, NEW)]
    version = executor.version
    attention.q_proj.weight = torch.nn.Parameter(-attention.q_proj.weight.detach())
    wanted = alone(model, text, NEW)
    assert generator.generate([text], GREEDY) == [wanted] and executor.version > version
    assert Generator(model, cache_bytes=1 << 18).generate([text], GREEDY) == [wanted]  # joined already


def hooked(model: Any) -> Any:
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * 2)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda: mixture("Mixtral"), "mixtures"), (lambda: hooked(small()), "hooked"), (lambda: masked("GptOss"), "has")],
)
def test_other_structures_go_through_their_modules(kernels: Any, make: Any, reason: str) -> None:
    lines: list[str] = []
    with mock.patch.object(select, "log_rank0", lines.append):
        generator = Generator(make(), cache_bytes=1 << 18)
    assert type(generator._executor) is not PackedDecoder and generator.kind == "packed"
    assert reason in generator._executor.unfused and reason in lines[-1], lines


def test_a_wrong_kernel_is_not_used(kernels: Any) -> None:
    """Gates that are not applied: the attention kernels stay, the rest goes through the modules."""
    real = AllInterpreted.launch

    def launch(self: Any, variant: Any, grid: Any, arguments: Any) -> None:
        real(self, variant, grid, arguments)
        if variant.kernel == "gate_rows":
            arguments[2].copy_(arguments[1])

    with mock.patch.object(AllInterpreted, "launch", launch):
        generator = Generator(small(), cache_bytes=1 << 18)
    assert "logits of mixed rows" in generator._executor.unfused and generator._executor.ways


def test_a_kernel_that_is_missing_is_named(kernels: Any) -> None:
    with mock.patch.object(AllInterpreted, "has", lambda self, variant: variant.kernel != "gate_rows"):
        generator = Generator(small(), cache_bytes=1 << 18)
    assert "gate_rows" in generator._executor.unfused and "is not compiled" in generator._executor.unfused
