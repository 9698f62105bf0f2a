"""Generation that groups of ranks do together over slices of an engine's weights (`inference_tp_size`)."""

from __future__ import annotations

import copy
import threading
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import LengthError, MeshError, RequestError, TensorParallelError, UsageError
from deepspeed.inference import Generator
from deepspeed.inference.sampling_params import SamplingParams
from tests.parallel.test_rollouts import (
    NEW,
    SIZES,
    VOCABULARY,
    answers,
    gathered_copy,
    model_of,
    prompts_of,
    settings,
    train,
)
from tests.parallel.tiny import raises


def engine_of(stage: int, dtype: str = "fp32", family: str = "llama", lora: bool = False, **block: Any) -> Any:
    model = model_of(family, lora)
    block = {"enabled": True, "inference_tp_size": 2} | block
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(
        model=model, model_parameters=trained, config=settings(stage, dtype, hybrid_engine=block)
    )[0]


def bytes_held(model: Any) -> int:
    """Bytes of the storages of a model's parameters, each once."""
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in model.parameters()}
    return sum(storages.values())


def wrong_places(copy: Any, stage: int) -> list[str]:
    """What is wrong with the memory of a sliced copy's weights, during a generation and after it."""
    source, wrong = dict(copy.source.named_parameters()), []
    whole = sum(param.numel() * param.itemsize for param in source.values())
    copy.attach()
    names = ("q_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight", "embed_tokens.weight")
    own = {name: param for name, param in copy.model.named_parameters() if name.endswith(names)}
    halves = [name for name, param in own.items() if param.numel() * 2 == source[name].numel()]
    if len(halves) != 4 * SIZES["num_hidden_layers"]:
        wrong.append(f"sliced: {halves}")
    if stage < 3:
        storages = {param.untyped_storage().data_ptr() for param in source.values()}
        wrong += [
            f"{name} is a copy" for name, param in own.items() if param.untyped_storage().data_ptr() not in storages
        ]
    else:
        embeddings = 2 * source["model.embed_tokens.weight"].numel() * source["model.embed_tokens.weight"].itemsize
        if not bytes_held(copy.model) < 0.51 * (whole - embeddings) + embeddings + 4096:
            wrong.append(f"{bytes_held(copy.model)} bytes of {whole}")
    copy.detach()
    if bytes_held(copy.model) > 64 * len(source):
        wrong.append(f"{bytes_held(copy.model)} bytes after the generation")
    return wrong


def sliced_answers(whole: Any, prompts: list[list[int]], sampling: Any) -> list[list[int]]:
    """Answers of a model that is sliced itself, to the prompts of all ranks, of which this rank's are returned."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, prompts)
    generator = Generator(deepspeed.tp_model_init(copy.deepcopy(whole), 2))
    got = generator.generate([prompt for each in everyone for prompt in each], sampling)
    first = sum(map(len, everyone[: dist.get_rank()]))
    return got[first : first + len(prompts)]


def answered_together(stage: int, dtype: str, family: str, lora: bool) -> list[str]:
    """Where answers, scores, versions and memory of a shared generation are not those of the gathered weights."""
    engine, wrong, rank = engine_of(stage, dtype, family, lora), [], dist.get_rank()
    prompts, greedy = prompts_of(rank), SamplingParams(max_new_tokens=NEW)
    drawing = SamplingParams(max_new_tokens=NEW, temperature=0.8, top_k=20, seed=5 + rank)
    for update in range(3):
        train(engine, 1, update)
        state = torch.get_rng_state()
        got = engine.rollout(prompts, greedy)
        if not torch.equal(state, torch.get_rng_state()):
            wrong.append("random state")
        whole = gathered_copy(engine, merge=dtype == "fp32")
        alone = Generator(whole)
        right = answers(whole, prompts) if dtype == "fp32" else sliced_answers(whole, prompts, greedy)
        if [answer.tokens for answer in got] != right or [answer.prompt for answer in got] != prompts:
            wrong.append(f"tokens after update {update}")
        if {answer.version for answer in got} != {update} or engine.weights_version != update:
            wrong.append(f"version after update {update}")
        if dtype == "fp32":
            drawn = engine.rollout(prompts[:1], drawing, n=2)
            wanted = [SamplingParams(**{**vars(drawing), "index": index}) for index in range(2)]
            if [a.tokens for a in drawn] != [alone.generate(prompts[:1], each)[0] for each in wanted]:
                wrong.append("drawn tokens")
            scores = engine.score([a.prompt + a.tokens for a in drawn], drawing)
            for score, answer in zip(scores, drawn, strict=True):
                torch.testing.assert_close(
                    score[len(answer.prompt) - 1 :], torch.tensor(answer.logprobs), atol=1e-4, rtol=0
                )
    if not lora and family == "llama":
        wrong += wrong_places(engine._generation._copy, stage)
    if len(engine.rollout(prompts[:rank], greedy)) != rank:
        wrong.append("a rank without prompts")
    train(engine, 1, 3)
    engine.destroy()
    return wrong


CELLS = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [pytest.param(*cell, marks=() if cell == (3, "fp32") else pytest.mark.slow) for cell in CELLS],
)
def test_ranks_generate_together_what_gathered_weights_do(workers: Any, stage: int, dtype: str) -> None:
    assert workers(2).run(answered_together, stage, dtype, "llama", False, timeout=120) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lora"), [("llama", True), ("qwen3", False), ("phi3", False)])
@pytest.mark.parametrize("stage", [1, 3])
def test_other_models_and_adapters_generate_together(workers: Any, stage: int, family: str, lora: bool) -> None:
    assert workers(2).run(answered_together, stage, "fp32", family, lora, timeout=120) == [[], []]


def calls_of_generate(stage: int, collective: bool) -> list[str]:
    """Where `generate` of a rank is not that of the gathered weights, in groups of two of all ranks."""
    config = {"tp_gather_partition_size": 1, "release_inference_cache": True}
    engine, wrong, rank = engine_of(stage, **config), [], dist.get_rank()
    train(engine, 1)
    whole = gathered_copy(engine, merge=False)
    ids = torch.tensor([[0, 0, 5, 7], [9, 4, 3, 2 + rank]])
    call = {"attention_mask": (ids != 0).long(), "max_new_tokens": 3 + rank, "do_sample": False}
    right = type(whole).generate(whole, ids, **call)
    for name, generate in (("engine", engine.generate), ("module", engine.module.generate)):
        if not torch.equal(generate(ids, **call), right):
            wrong.append(name)
    # Another way of one rank of each group: its partner's prompts are answered all the same.
    more = {"num_beams": 2} if rank % 2 and stage < 3 else {}
    if not torch.equal(engine.generate(ids, **call, **more), type(whole).generate(whole, ids, **call, **more)):
        wrong.append("beams of one rank")
    if engine._generation._copy.axis.ranks != (rank - rank % 2, rank - rank % 2 + 1):
        wrong.append(f"group {engine._generation._copy.axis.ranks}")
    engine.destroy()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_groups_of_two_among_four_ranks(workers: Any, stage: int) -> None:
    assert workers(4).run(calls_of_generate, stage, False, timeout=180) == [[]] * 4


def refused_on_one_rank(stage: int) -> None:
    """What one rank cannot do ends the call on the ranks that generate with it, and then they go on."""
    model, rank = model_of("llama"), dist.get_rank()
    config = settings(stage, hybrid_engine={"enabled": True, "inference_tp_size": 2})
    if stage == 3:  # ranks gather together
        config["zero_optimization"] |= {"stage3_fixed_graph": True, "offload_param": {"device": "cpu"}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    sampling = SamplingParams(max_new_tokens=4)
    with raises(*((LengthError, "over the limit of 128") if rank else (UsageError, "rank 1 failed: LengthError"))):
        engine.rollout([[1] * (127 if rank else 3)], sampling)
    with raises(*((RequestError, "no token of a vocabulary") if rank else (UsageError, "rank 1 failed"))):
        engine.score([[1, VOCABULARY if rank else 2]])
    with raises(*((RequestError, "n, the number") if not rank else (UsageError, "rank 0 failed"))):
        engine.rollout([[1, 2]], sampling, n=rank)
    train(engine, 1)
    assert len(engine.rollout([[1, 2, 3]], sampling)[0].tokens) == 4
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_an_error_of_one_rank_is_one_of_its_group(workers: Any, stage: int) -> None:
    workers(2).run(refused_on_one_rank, stage, timeout=120)


class Counts:
    """Counts the calls of its hook; it cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0

    def __call__(self, *_: Any) -> None:
        raise AssertionError

    def count(self, *_: Any) -> None:
        self.calls += 1


def changed_weights() -> None:
    """Changes that no counter tells of, hooks of objects that cannot be copied, and the mode without gradients."""
    engine, rank, counts = engine_of(1, family="phi3", lora=True), dist.get_rank(), Counts()
    engine.module.get_base_model().model.norm.register_forward_hook(counts.count)
    prompt, scores = [[5, 7, 9, 11 + rank]], []
    with torch.inference_mode():
        scores.append(engine.score(prompt)[0])
    calls = counts.calls
    assert calls
    train(engine, 1)
    scores.append(engine.score(prompt)[0])
    engine.module.merge_adapter()
    scores.append(engine.score(prompt)[0])
    engine.module.unmerge_adapter()
    with torch.no_grad():
        for name, param in engine.module.named_parameters():
            if "qkv_proj" in name and "lora" not in name:
                param.data.mul_(3)
    scores.append(engine.score(prompt)[0])
    assert counts.calls > calls
    torch.testing.assert_close(scores[2], scores[1], atol=1e-4, rtol=0)
    wanted = torch.log_softmax(engine.module(input_ids=torch.tensor(prompt)).logits[0, :-1].float(), -1)
    torch.testing.assert_close(
        scores[3], wanted.gather(1, torch.tensor(prompt[0][1:])[:, None])[:, 0], atol=1e-4, rtol=0
    )
    assert (scores[3] - scores[1]).abs().max() > 1e-3
    engine.destroy()


@pytest.mark.slow
def test_every_change_of_the_weights_is_followed(workers: Any) -> None:
    workers(2).run(changed_weights, timeout=120)


def failed_before_passes() -> None:
    """A request that cannot be sent, and a rank that fails while it slices: the ranks raise together and go on."""
    engine, rank, sampling = engine_of(1), dist.get_rank(), SamplingParams(max_new_tokens=4)
    alone = engine.rollout([[1, 2, 3]], sampling)[0].tokens
    odd = SamplingParams(max_new_tokens=4, logit_bias=MappingProxyType({5: 1.0}) if rank else {})
    with raises(*((RequestError, "cannot be sent") if rank else (UsageError, "rank 1 failed"))):
        engine.rollout([[1, 2, 3]], odd)
    copy, broken = engine._generation._copy, mock.Mock(side_effect=MemoryError("planted"))
    with mock.patch.object(type(copy), "_follow_modules", broken if rank else type(copy)._follow_modules):
        with raises(*((MemoryError, "planted") if rank else (UsageError, "rank 1 failed"))):
            engine.rollout([[1, 2, 3]], sampling)
    assert engine.rollout([[1, 2, 3]], sampling)[0].tokens == alone
    engine.destroy()


@pytest.mark.slow
def test_a_rank_that_fails_before_the_passes(workers: Any) -> None:
    workers(2).run(failed_before_passes, timeout=120)


def refused_in_one_group() -> None:
    """Where all ranks gather weights together, what one of four cannot do ends the call on all, and then they go on."""
    config = settings(3, hybrid_engine={"enabled": True, "inference_tp_size": 2})
    config["zero_optimization"] |= {"stage3_fixed_graph": True, "offload_param": {"device": "cpu"}}
    engine, *_ = deepspeed.initialize(model=model_of("llama"), config=config)
    sampling = SamplingParams(max_new_tokens=4)
    with raises(*((UsageError, "rank 0 failed") if dist.get_rank() else (RequestError, "n, the number"))):
        engine.rollout([[1, 2]], sampling, n=min(dist.get_rank(), 1))
    train(engine, 1)
    assert len(engine.rollout([[1, 2, 3]], sampling)[0].tokens) == 4
    engine.destroy()


@pytest.mark.slow
def test_an_error_of_one_group_is_one_of_all_that_gather_together(workers: Any) -> None:
    workers(4).run(refused_in_one_group, timeout=180)


def refused_at_start() -> None:
    with raises(MeshError, "hybrid_engine.inference_tp_size"):
        engine_of(1, inference_tp_size=3)
    with raises(MeshError, "share layers or experts already"):
        block = {"enabled": True, "inference_tp_size": 2}
        deepspeed.initialize(
            model=model_of("llama"), config=settings(1, tensor_parallel={"autotp_size": 2}, hybrid_engine=block)
        )
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, n_embd=3, n_head=1, n_layer=2, n_inner=1))
    block = {"enabled": True, "inference_tp_size": 2}
    engine, *_ = deepspeed.initialize(model=model, config=settings(1, hybrid_engine=block))
    with raises(TensorParallelError, "cannot be split over 2 ranks"):
        engine.rollout([[1, 2]])
    engine.destroy()


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused(workers: Any) -> None:
    workers(2).run(refused_at_start, timeout=120)
