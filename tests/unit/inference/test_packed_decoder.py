"""The device executor, its kernels in plain torch: tokens of Transformers' `generate`, in all kinds of passes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from deepspeed.errors import RequestError
from deepspeed.foundation.replaced_forward import TrainingOnlyForward
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.executors import device_structure, packed_decoder, select
from deepspeed.inference.executors.packed_decoder import PackedDecoder
from deepspeed.inference.executors.pass_inputs import PassSizes
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.quantization.quantization import quantize_linears
from tests.unit.inference.device_passes import (
    FAMILIES,
    GREEDY,
    INVARIANT,
    NEW,
    OTHERS,
    THROUGH_MODULES,
    check_draws,
    check_invariance,
    check_tokens,
    small,
)
from tests.unit.inference.reference_kernels import ReferenceKernels, only_way
from tests.unit.inference.toys import alone, masked, mixture, prompts

CPU = torch.device("cpu")


@pytest.fixture
def kernels() -> Iterator[Any]:
    with only_way(ReferenceKernels()) as launched:
        yield launched


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(kernels: Any, family: str) -> None:
    check_tokens(kernels, FAMILIES[family]())


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_tokens_of_other_families(kernels: Any, family: str) -> None:
    check_tokens(kernels, OTHERS[family]())


@pytest.mark.slow
@pytest.mark.parametrize("family", THROUGH_MODULES)
def test_tokens_of_families_that_go_through_their_modules(kernels: Any, family: str) -> None:
    check_tokens(kernels, THROUGH_MODULES[family](), packed=False)


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
        pools = [pool for pair in executor.store.layers.values() for pool in pair]
        before = [pool.clone() for pool in pools]
        launches = len(kernels.launches)
        logits = executor.compute(inputs)
        grids = kernels.launches[launches:]
        torch.testing.assert_close(logits[: len(wanted[number])], wanted[number], rtol=1e-4, atol=1e-4)
        inputs.fill(RaggedBatch(batches[1 - number], 4, CPU), executor.tiling)
        launches = len(kernels.launches)
        executor.compute(inputs)
        assert kernels.launches[launches:] == grids  # of sizes alone
        for pool, old in zip(pools, before, strict=True):
            # Padding writes nothing: pages -1 and 0 are nobody's, and page 0 may hold anything.
            torch.testing.assert_close(pool[: 2 * 4], old[: 2 * 4], rtol=0, atol=0, equal_nan=True)


# -- tokens chosen on the device ---------------------------------------------------------------------------------------


def test_tokens_chosen_on_the_device_are_those_of_the_host(kernels: Any) -> None:
    check_draws(small())


def test_answers_of_one_prompt_draw_the_same_alone_and_together(kernels: Any) -> None:
    """Those that begin on the pages of another draw their first token on the host."""
    sampling, text = SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=30.0, seed=3), prompts((20,))[0]
    tokens: list[dict[Any, list[int]]] = []
    for group in ("answers", None):
        generator = Generator(small(), page_size=4, cache_bytes=1 << 18)
        tokens.append({index: [] for index in range(3)})
        for index in range(3):
            own = dataclasses.replace(sampling, index=index)
            generator.submit(Request(index, text, own, group=group))
        while not generator.idle:
            for output in generator.step():
                tokens[-1][output.ident] += output.tokens
    assert tokens[0] == tokens[1] and len({tuple(each) for each in tokens[0].values()}) == 3


def test_beams(kernels: Any) -> None:
    model, text = small(), prompts((9,))[0]
    ids = torch.tensor([text])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, num_beams=3, do_sample=False, eos_token_id=10**9,
        pad_token_id=0,
    )[0, len(text) :].tolist()  # fmt: skip
    generator = Generator(model, page_size=4, cache_bytes=1 << 18)
    assert generator.generate([text], SamplingParams(max_new_tokens=4, ignore_eos=True, beams=3)) == [wanted]


# -- what goes through the modules -------------------------------------------------------------------------------------


def test_weights_stay_the_parameters(kernels: Any, tmp_path: Path) -> None:
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
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.items()) and len(saved) == len(before)
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
    real = ReferenceKernels.launch

    def launch(self: Any, variant: Any, grid: Any, arguments: Any) -> None:
        real(self, variant, grid, arguments)
        if variant.kernel == "gate_rows":
            arguments[2].copy_(arguments[1])

    with mock.patch.object(ReferenceKernels, "launch", launch):
        generator = Generator(small(), cache_bytes=1 << 18)
    assert "logits of mixed rows" in generator._executor.unfused and generator._executor.ways


def test_a_kernel_that_is_missing_is_named(kernels: Any) -> None:
    kernels.without = "gate_rows"
    generator = Generator(small(), cache_bytes=1 << 18)
    assert "gate_rows" in generator._executor.unfused and "is not compiled" in generator._executor.unfused


def test_weights_that_an_engine_holds_go_through_their_modules(kernels: Any) -> None:
    model = small()
    with mock.patch.object(device_structure, "is_managed", lambda tensor: tensor is model.lm_head.weight):
        generator = Generator(model, cache_bytes=1 << 18)
    assert "lm_head is held by an engine" in generator._executor.unfused


def test_an_engine_that_takes_the_weights_later(kernels: Any) -> None:
    model, text, lines = small(), prompts((9,))[0], []
    generator = Generator(model, cache_bytes=1 << 18)
    held: list[Any] = []
    with (
        mock.patch.object(device_structure, "is_managed", lambda tensor: any(tensor is each for each in held)),
        mock.patch.object(packed_decoder, "warn_once", lines.append),
    ):
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
        held.append(model.lm_head.weight)
        wanted, launches = alone(model, text, NEW), len(kernels.launches)
        assert generator.generate([text], GREEDY) == [wanted]
    assert "runs through its own modules" in lines[0] and "held by an engine" in lines[0]
    assert {name.split("_fp32")[0] for name, _ in kernels.launches[launches:]} == {"attend_whole"}


def test_scores_and_embeddings_of_prompts(kernels: Any) -> None:
    """Scores come from the pass's logits; hidden states from the modules, in a pass of their own way."""
    model = small()
    texts, results = prompts((9, 12)), []
    for way in (contextlib.nullcontext(), mock.patch.object(select, "_without_modules", lambda executor, *_: executor)):
        with way:
            generator = Generator(model, cache_bytes=1 << 18)
        generator.submit(Request("score", texts[0], SamplingParams(max_new_tokens=2, prompt_logprobs=1, logprobs=2)))
        generator.submit(Request("embed", texts[1], pooling="mean"))
        outputs = [output for _ in range(20) if not generator.idle for output in generator.step()]
        scores = [entry.logprob for output in outputs for entry in output.prompt_logprobs or [] if entry]
        states = [value for output in outputs for value in output.embedding or []]
        tokens = [token for output in outputs for token in output.tokens]
        results.append((tokens, scores, states))
    assert len(results[0][0]) == 2 and len(results[0][1]) == 8 and len(results[0][2]) == 32
    assert results[0][0] == results[1][0]
    for mine, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_rows_of_adapters_go_through_the_modules(kernels: Any, tmp_path: Any) -> None:
    pytest.importorskip("peft")
    from tests.unit.inference.test_adapters import adapted

    model, text = small(), prompts((9,))[0]
    merged = adapted(model, tmp_path, r=4, target_modules=["q_proj", "up_proj"])
    generator = Generator(model, cache_bytes=1 << 18, adapters={"one": tmp_path})
    assert type(generator._executor) is PackedDecoder
    tokens: dict[Any, list[int]] = {None: [], "one": []}
    for name in tokens:
        generator.submit(Request(name, text, GREEDY, adapter=name))
    while not generator.idle:
        for output in generator.step():
            tokens[output.ident] += output.tokens
    assert tokens == {None: alone(model, text, NEW), "one": alone(merged, text, NEW)}
    assert tokens[None] != tokens["one"]


def test_tokens_outside_of_the_vocabulary_are_refused(kernels: Any) -> None:
    executor: Any = Generator(small(), cache_bytes=1 << 18)._executor
    with pytest.raises(RequestError, match="tokens are from 0 to 255, not 3 to 256"):
        executor.run(RaggedBatch([BatchSlice([3, 256], 0, [0])], 16, CPU))


def test_long_contexts_get_a_longer_table(kernels: Any) -> None:
    model = small(max_position_embeddings=512)
    with mock.patch.object(packed_decoder, "LONGEST_TABLE", 16), mock.patch.object(packed_decoder, "STEP", 8):
        generator = Generator(model, cache_bytes=1 << 18)
        executor: Any = generator._executor
        assert len(executor._table) == 16
        text, version = prompts((30,))[0], executor.version
        assert generator.generate([text], GREEDY) == [alone(model, text, NEW)]
    assert len(executor._table) in range(38, 48) and executor.version > version


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", INVARIANT)
def test_logits_do_not_depend_on_the_batch(way: str, dtype: torch.dtype) -> None:
    """As in the CPU's native passes."""
    check_invariance(way, "torch", "cpu", dtype)


def test_without_blocks_of_one_size_they_do() -> None:
    with pytest.raises(AssertionError, match="of 36, first"):
        check_invariance("8 at once", "torch", "cpu", rows=0)


def answers(generator: Generator, requests: list[Request]) -> dict[Any, list[int]]:
    """The tokens of each request."""
    for request in requests:
        generator.submit(request)
    tokens: dict[Any, list[int]] = {request.ident: [] for request in requests}
    while not generator.idle:
        for output in generator.step():
            tokens[output.ident] += output.tokens
    return tokens


def test_answers_of_one_group_with_other_options_are_those_of_each_alone(kernels: Any) -> None:
    options = {"temperature": 3.0, "seed": 1}
    few: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}
    prompt, generator = prompts((9,))[0], Generator(small(), page_size=16, cache_bytes=1 << 18)
    plain, drawn = SamplingParams(**few), [SamplingParams(**few, **options, index=index) for index in range(3)]
    requests = [
        *(Request(n, prompt, each, group="g") for n, each in enumerate(drawn)),
        Request(9, prompt, plain, group="g"),
    ]
    together = answers(generator, requests)
    for number, each in (*enumerate(drawn), (9, plain)):
        assert together[number] == answers(generator, [Request("alone", prompt, each)])["alone"]


def test_parts_of_prompts_launch_nothing_for_a_packed_head(kernels: Any) -> None:
    model = small(tie_word_embeddings=False)
    quantize_linears(model, 8, 1, torch.float32)
    generator = Generator(model, page_size=16, cache_bytes=1 << 18, max_batch_tokens=16)
    assert type(generator._executor) is PackedDecoder and len(generator.generate(prompts((40,)), GREEDY)[0]) == NEW


def test_penalties_of_tokens_that_the_head_lacks_count_for_nothing(kernels: Any) -> None:
    model = small(tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 100, bias=False)
    generator = Generator(model, page_size=16, cache_bytes=1 << 18)
    assert type(generator._executor) is PackedDecoder
    penalized = dataclasses.replace(GREEDY, repetition_penalty=1.3)
    assert generator.generate([[120, 3, 4]], penalized) == generator.generate(
        [[120, 3, 4]], dataclasses.replace(penalized, logit_bias={3: 0.0})
    )


def test_weights_that_move_in_training_mode_leave_the_executor(kernels: Any) -> None:
    model = small()
    generator = Generator(model, page_size=16, cache_bytes=1 << 18)
    wanted = generator.generate(prompts((5,)), GREEDY)
    layer = model.model.layers[0]
    layer.forward = TrainingOnlyForward(layer)
    model.train()
    layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.clone()
    assert generator.generate(prompts((5,)), GREEDY) == wanted and generator._executor.structure.blocks
