"""Generation by engines in training: tokens of the gathered model, bits of scores, ranks that end apart."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import LengthError, RequestError, UsageError
from deepspeed.inference import Generator
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.rollouts.logprobs import exact_logprobs
from tests.parallel.tiny import raises
from tests.unit.inference.toys import scale

NEW, VOCABULARY = 12, 96
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def model_of(family: str, lora: bool = False, seed: int = 5) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    more = {"head_dim": 16} if family == "qwen3" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **more))
    scale(model, 0.15, 0.3, 0.0, seed=seed)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model


def settings(stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return config | ({"bf16": {"enabled": True}} if dtype == "bf16" else {}) | more


def prompts_of(rank: int) -> list[list[int]]:
    """Prompts of other numbers and lengths on each rank."""
    generator = torch.Generator().manual_seed(rank)
    lengths = (3, 17, 6)[: 2 + rank]
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def train(engine: Any, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(steps):
        ids = torch.randint(1, VOCABULARY, (2, 9), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def gathered_copy(engine: Any, merge: bool) -> Any:
    """A copy of the engine's model with all weights, LoRA merged in fp32 or left in its layers."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        whole = copy.deepcopy(engine.module)
    if hasattr(whole, "merge_and_unload"):
        whole = whole.merge_and_unload() if merge else whole.get_base_model()
    return whole.eval()


def answers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers by Transformers' own `generate`."""
    generate = type(model).generate
    return [
        generate(model, torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def handed_over(stage: int, dtype: str, early: bool, lora: bool, family: str) -> list[str]:
    """What is wrong with greedy tokens after three updates, and with the place of the weights."""
    model, wrong = model_of(family, lora), []
    generator = Generator(model) if early else None
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=settings(stage, dtype)
    )
    prompts, sampling = prompts_of(dist.get_rank()), SamplingParams(max_new_tokens=NEW)
    for update in range(3):
        train(engine, 1, update)
        generator = generator or Generator(engine)
        whole = gathered_copy(engine, merge=dtype == "fp32")
        right = answers(whole, prompts) if dtype == "fp32" else Generator(whole).generate(prompts, sampling)
        if generator.generate(prompts, sampling) != right:
            wrong.append(f"tokens after update {update}")
        if generator.weights_version != update + early:  # of a generator made before, the first change is `initialize`
            wrong.append(f"version {generator.weights_version} after update {update}")
    structure = getattr(generator._executor, "structure", None)
    if structure is None or not structure.blocks:
        wrong.append(f"no native passes: {getattr(generator._executor, 'unfused', '')}")
    elif stage < 3:
        projection = generator.model.model.layers[0].self_attn.o_proj
        if structure.layers[0].out.weights != projection.weight.data_ptr():
            wrong.append("weights were copied")
    engine.destroy()
    return wrong


CELLS = list(itertools.product((0, 1, 2, 3), ("fp32", "bf16"), (False, True), (False, True)))
FAST = {(2, "bf16", True, False), (3, "fp32", False, True)}


@pytest.mark.parametrize(
    ("stage", "dtype", "early", "lora"),
    [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in CELLS],
)
def test_an_engine_in_training_generates_what_its_gathered_weights_do(
    workers: Any, stage: int, dtype: str, early: bool, lora: bool
) -> None:
    assert workers(2).run(handed_over, stage, dtype, early, lora, "llama", timeout=120) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_families_generate_what_their_gathered_weights_do(
    workers: Any, family: str, stage: int, dtype: str
) -> None:
    assert workers(2).run(handed_over, stage, dtype, False, False, family, timeout=120) == [[], []]


DRAWN = (
    SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=1),
    SamplingParams(max_new_tokens=NEW, temperature=0.7, top_k=12, top_p=0.9, seed=2),
)


def same_bits(family: str, stage: int, dtype: str) -> list[str]:
    """Where the log-probability of a drawn token has other bits: scored anew, in other batches, or in training."""
    engine, *_ = deepspeed.initialize(model=model_of(family), config=settings(stage, dtype))
    wrong = []
    for number, sampling in enumerate(DRAWN):
        train(engine, 1, number)
        drawn = engine.rollout(prompts_of(dist.get_rank()), sampling, n=4)
        texts = [answer.prompt + answer.tokens for answer in drawn]
        wanted = [torch.tensor(answer.logprobs) for answer in drawn]
        for name, scores in (
            ("scored at once", engine.score(texts, sampling)),
            ("scored alone", [score for text in texts for score in engine.score([text], sampling)]),
        ):
            parts = [score[len(answer.prompt) - 1 :] for score, answer in zip(scores, drawn, strict=True)]
            wrong += [name for a, b in zip(parts, wanted, strict=True) if not torch.equal(a, b)]
        small = Generator(engine, cache_bytes=9 * 16 * engine_bytes(engine), max_batch_tokens=7, page_size=16)
        again = small.run([request(answer, index, sampling) for index, answer in enumerate(drawn)])
        wrong += [
            "chunks and preemption"
            for outputs, answer in zip(again, drawn, strict=True)
            if [token for output in outputs for token in output.tokens] != answer.tokens
            or [entry.logprob for output in outputs for entry in output.logprobs] != answer.logprobs
        ]
        ids = torch.tensor([text[: min(map(len, texts))] for text in texts])
        values = torch.stack([score[: ids.shape[1] - 1] for score in engine.score(texts, sampling)])
        trained = exact_logprobs(engine(input_ids=ids).logits[:, :-1], ids[:, 1:], values, sampling)
        if not bool(((trained - values).exp() == 1)[values.isfinite()].all()):
            wrong.append("ratio")
        engine.backward(-(trained[values.isfinite()]).mean())
        engine.step()
    engine.destroy()
    return wrong


def engine_bytes(engine: Any) -> int:
    """Bytes of a token's keys and values."""
    config = engine.module.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * size * next(engine.parameters()).itemsize


def request(answer: Any, index: int, sampling: SamplingParams) -> Any:
    from dataclasses import replace

    from deepspeed.inference.request import Request

    return Request(object(), answer.prompt, replace(sampling, index=index, logprobs=0, logprobs_mode="processed"))


BITS = list(itertools.product(("llama", "qwen3", "phi3"), (0, 1, 2, 3), ("fp32", "bf16")))


@pytest.mark.parametrize(
    ("family", "stage", "dtype"),
    [
        pytest.param(*cell, marks=() if cell == ("llama", 3, "bf16") else pytest.mark.slow)
        for cell in BITS
    ],
)  # fmt: skip
def test_decoding_scoring_and_training_have_the_same_bits(workers: Any, family: str, stage: int, dtype: str) -> None:
    assert workers(2).run(same_bits, family, stage, dtype, timeout=120) == [[], []]


def by_names(stage: int, pinned: bool) -> list[str]:
    """What is wrong with `generate` of an engine and its module under `hybrid_engine`."""
    rank, wrong = dist.get_rank(), []
    block = {"enabled": True, "pin_parameters": pinned, "release_inference_cache": True, "max_out_tokens": 40}
    engine, *_ = deepspeed.initialize(model=model_of("llama"), config=settings(stage, hybrid_engine=block))
    train(engine, 1)
    whole = gathered_copy(engine, merge=False)
    if "generate" in vars(whole) and whole.generate.__self__ is not whole:
        wrong.append("a copy generates with the engine's weights")
    ids = torch.tensor([[0, 0, 5, 7], [9, 4, 3, 2]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 3 + 5 * rank}  # ends apart
    right = type(whole).generate(whole, **inputs, do_sample=False)
    for name, generate in (("engine", engine.generate), ("module", engine.module.generate)):
        if not torch.equal(generate(**inputs, do_sample=False), right):
            wrong.append(name)
    torch.manual_seed(3)
    drawn = engine.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, num_return_sequences=2)
    torch.manual_seed(3)
    again = engine.module.generate(**inputs, do_sample=True, top_k=0, num_return_sequences=2)
    if drawn.shape[0] != 4 or not torch.equal(drawn, again):
        wrong.append("drawn tokens do not follow torch's seed")
    output = engine.generate(**inputs, do_sample=False, return_dict_in_generate=True)
    if not torch.equal(output.sequences, right):
        wrong.append("output object")
    searched = inputs | {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    if not torch.equal(engine.generate(**searched), type(whole).generate(whole, **searched)):
        wrong.append("beams")
    with raises(LengthError, "limit of 40"):
        engine.generate(ids + 1, max_new_tokens=37)
    if (
        rank == 0
        and engine.rollout([])
        or rank == 1
        and len(engine.rollout([[4, 5]], SamplingParams(max_new_tokens=4))) != 1
    ):
        wrong.append("a rank without prompts")
    train(engine, 1, 1)
    if [group.name for group in engine._components.groups if group.users]:
        wrong.append("groups stay in use")
    engine.destroy()
    if "generate" in vars(engine.module):
        wrong.append("generate of a destroyed engine")
    return wrong


@pytest.mark.parametrize(
    ("stage", "pinned"), [(3, False), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((3, True), (1, True)))]
)
def test_generate_of_engine_and_module(workers: Any, stage: int, pinned: bool) -> None:
    assert workers(2).run(by_names, stage, pinned, timeout=120) == [[], []]


def refused() -> None:
    engine, *_ = deepspeed.initialize(model=model_of("llama"), config=settings(2))
    with raises(RequestError, "no token of a vocabulary"):
        engine.rollout([[1, VOCABULARY]], SamplingParams(max_new_tokens=4))
    with raises(LengthError, "over the limit of 128"):
        engine.rollout([[1] * 120], SamplingParams(max_new_tokens=30))
    with raises(RequestError, "n, the number of answers"):
        engine.rollout([[1]], n=0)
    generator = Generator(engine)
    from deepspeed.inference.request import Request

    generator.submit(Request("slow", [1, 2, 3], SamplingParams(max_new_tokens=50)))
    generator.step()
    train(engine, 1)
    with raises(UsageError, "the weights, or the adapters", "1 requests"):
        generator.step()
    generator.cancel("slow")
    generator.step()
    assert len(generator.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))[0]) == 4
    engine.destroy()


def test_what_cannot_be_is_refused(workers: Any) -> None:
    workers(2).run(refused, timeout=120)


def adapters_followed(stage: int) -> list[str]:
    """Where answers do not follow the adapter that is used now, on one engine with pages of earlier answers."""
    model, wrong = model_of("llama", lora=True), []
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings(stage))
    generator, sampling = Generator(engine), SamplingParams(max_new_tokens=NEW)
    prompts = [[5, 9, 4, 7] * 9]  # more than a page of 16 tokens
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        whole = copy.deepcopy(engine.module).eval()
    wanted = {"used": answers(whole.get_base_model(), prompts)}
    with whole.disable_adapter():
        wanted["disabled"] = answers(whole.get_base_model(), prompts)
    if wanted["used"] == wanted["disabled"]:
        wrong.append("the adapter changes nothing")
    for name in ("used", "disabled", "used", "disabled"):
        if name == "used":
            got = generator.generate(prompts, sampling)
        else:
            with engine.module.disable_adapter():
                got = generator.generate(prompts, sampling)
        if got != wanted[name]:
            wrong.append(name)
    if generator.weights_version:
        wrong.append("another version without an update")
    if not generator._executor.structure.blocks:
        wrong.append("no native passes")
    engine.destroy()
    return wrong


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_adapters_that_are_switched_off_and_on(workers: Any, stage: int) -> None:
    assert workers(2).run(adapters_followed, stage, timeout=120) == [[], []]


def cut_over_ranks(stage: int) -> list[str]:
    """Where answers of an engine whose matrices are cut over two ranks are not those of the whole model."""
    model, wrong = model_of("llama"), []
    whole = copy.deepcopy(model)
    config = settings(stage, tensor_parallel={"autotp_size": 2}, hybrid_engine={"enabled": True})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    prompts = prompts_of(0)  # ranks of one model have the same
    got = engine.rollout(prompts, SamplingParams(max_new_tokens=NEW))
    if [answer.tokens for answer in got] != answers(whole, prompts):
        wrong.append("greedy")
    torch.manual_seed(10 + dist.get_rank())
    drawn = engine.rollout(prompts, SamplingParams(max_new_tokens=NEW, temperature=1.0), n=2)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, [answer.tokens for answer in drawn])
    if everyone[0] != everyone[1]:
        wrong.append("ranks of one model draw other tokens")
    ids = torch.tensor(prompts[:1])
    call = {"max_new_tokens": 5, "do_sample": False}
    if not torch.equal(engine.generate(ids, **call), type(whole).generate(whole, ids, **call)):
        wrong.append("generate")
    engine.destroy()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_that_share_a_model_answer_together(workers: Any, stage: int) -> None:
    assert workers(2).run(cut_over_ranks, stage, timeout=120) == [[], []]


def refused_on_one_rank() -> None:
    """Ranks gather weights together: what one of them cannot do, all raise, and then they go on."""
    config = settings(3, hybrid_engine={"enabled": True})
    collective = {"stage3_fixed_graph": True, "offload_param": {"device": "cpu"}}  # not read in shared memory either
    config["zero_optimization"] |= collective
    engine, *_ = deepspeed.initialize(model=model_of("llama"), config=config)
    rank, sampling = dist.get_rank(), SamplingParams(max_new_tokens=4)
    assert not engine._generation.generator.weights.read_alone()
    own, other = (LengthError, "over the limit of 128"), (UsageError, "rank 1 failed: LengthError")
    with raises(*(own if rank else other)):
        engine.rollout([[1] * (127 if rank else 3)], sampling)
    with raises(*((RequestError, "no token of a vocabulary") if rank else (UsageError, "rank 1 failed"))):
        engine.score([[1, VOCABULARY if rank else 2]])
    with raises(*((RequestError, "logit_bias") if rank else (UsageError, "rank 1 failed"))):
        biased = SamplingParams(max_new_tokens=4, temperature=1.0, top_k=5, logit_bias={3: 1.0} if rank else {})
        engine.rollout([[1, 2]], biased)
    train(engine, 1)
    assert len(engine.rollout([[1, 2, 3]], sampling)[0].tokens) == 4
    engine.destroy()


def test_an_error_of_one_rank_is_one_of_all_where_they_gather_together(workers: Any) -> None:
    workers(2).run(refused_on_one_rank, timeout=120)
