"""Rollouts by upstream's interface over an engine that answers by a rule: rows, masks, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.errors import ArgumentError, DataError, LengthError, UsageError
from deepspeed.runtime import rollout

PAD, EOS = 0, 1


@dataclass
class StandInRollout:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int


class StandInEngine:
    """Answers are a table by the first token of the prompt; the n samples differ in their first token."""

    def __init__(self, answers: dict[int, list[int]], limit: int = 32) -> None:
        self.module = torch.nn.Module()
        self.module.config = SimpleNamespace(max_position_embeddings=limit)
        self.answers, self.calls, self.limit = answers, [], limit

    def rollout(self, prompts: list[list[int]], sampling: Any, n: int = 1) -> list[StandInRollout]:
        self.calls.append((prompts, sampling, n))
        if any(len(prompt) + sampling.max_new_tokens > self.limit for prompt in prompts):
            raise LengthError("too long")
        found = []
        for prompt in prompts:
            for sample in range(n):
                tokens = [*self.answers[prompt[0]]]
                tokens[:1] = [token + sample for token in tokens[:1]]
                logprobs = [-0.5 - at for at in range(len(tokens))]
                found.append(StandInRollout(prompt, tokens, logprobs, "stop", 7))
        return found


def tokenizer(pad: int | None = PAD, eos: int | None = EOS) -> Any:
    return SimpleNamespace(pad_token_id=pad, eos_token_id=eos)


def request(*prompts: list[int], pad: int = PAD) -> Any:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return rollout.RolloutRequest(ids, mask)


def generated(answers: dict[int, list[int]], *prompts: list[int], n: int = 1, **ids: Any) -> Any:
    engine = StandInEngine(answers)
    made = rollout.build_rollout(rollout.RolloutConfig(), engine, tokenizer(**ids))
    return made.generate(request(*prompts), rollout.SamplingConfig(8, n_samples_per_prompt=n))


def test_rows_are_prompts_padded_left_and_answers_padded_right() -> None:
    batch = generated({5: [8, 9, EOS], 6: [7]}, [5], [6, 4, 3], n=2)
    assert batch.input_ids.tolist() == [
        [0, 0, 5, 8, 9, 1], [0, 0, 5, 9, 9, 1], [6, 4, 3, 7, 0, 0], [6, 4, 3, 8, 0, 0]
    ]  # fmt: skip
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1]] * 2 + [[1, 1, 1, 1, 0, 0]] * 2
    assert batch.response_start_idx.tolist() == [3] * 4 and batch.version.tolist() == [7] * 4
    assert batch.logprobs.tolist() == [[0, 0, 0, -0.5, -1.5, -2.5]] * 2 + [[0, 0, 0, -0.5, 0, 0]] * 2
    assert (batch.batch_size, batch.seq_len) == (4, 6) and batch.input_ids.dtype == torch.int64


PLANTED = {  # answers, and the tokens that count
    "the end token is the padding": ({5: [8, EOS], 6: [9]}, {"pad": EOS}, [2, 1]),
    "no padding token": ({5: [8, EOS], 6: [9]}, {"pad": None}, [2, 1]),
    "no end token": ({5: [8, 9], 6: [9]}, {"eos": None}, [2, 1]),
    "the padding's id inside of an answer": ({5: [PAD, 8, PAD], 6: [9]}, {}, [3, 1]),
    "an end token in the prompt": ({EOS: [8], 6: [9, 9]}, {}, [1, 2]),
    "an empty answer": ({5: [], 6: [9, 9]}, {}, [0, 2]),
    "only empty answers": ({5: [], 6: []}, {}, [0, 0]),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_mask_has_the_tokens_of_the_answers(case: str) -> None:
    answers, ids, counts = PLANTED[case]
    first, second = answers
    batch = generated(answers, [first], [second, 4, 3], **ids)
    tokens = rollout.ResponseTokenBatch.from_rollout(batch)
    assert tokens.response_mask.sum(1).tolist() == counts
    for row, answer in enumerate(answers.values()):
        mask = tokens.response_mask[row]
        assert tokens.targets[row][mask].tolist() == answer
        assert tokens.logprobs[row][mask].tolist() == [-0.5 - at for at in range(len(answer))]
        assert (
            batch.input_ids[row][batch.attention_mask[row].bool()].tolist() == [[first], [second, 4, 3]][row] + answer
        )
    logits = torch.randn(2, batch.seq_len, 11)
    assert tokens.select_causal_logits(logits).shape[:2] == tokens.response_mask.shape
    loss = rollout.generalized_jsd_loss(*[tokens.select_causal_logits(logits)] * 2, tokens.response_mask)
    assert loss.valid_token_count == sum(counts) and loss.loss.abs() < 1e-6


def test_a_position_selects_the_logits_that_predict_its_target() -> None:
    """Logits that name the next token: their best token is the target."""
    batch = generated({5: [8, 9, EOS], 6: [7]}, [5], [6, 4, 3])
    logits = torch.nn.functional.one_hot(batch.input_ids.roll(-1, 1), 11).float()
    tokens = rollout.ResponseTokenBatch.from_rollout(batch)
    best = tokens.select_causal_logits(logits).argmax(-1)
    assert torch.equal(best[tokens.response_mask], tokens.targets[tokens.response_mask])


def test_options_reach_the_engine() -> None:
    engine = StandInEngine({5: [8]})
    made = rollout.HybridEngineRollout(engine, tokenizer())
    made.generate(request([5]), rollout.SamplingConfig(4, temperature=0.7, top_p=0.9, top_k=3, n_samples_per_prompt=2))
    made.generate(request([5]), rollout.SamplingConfig(4, temperature=-1, top_p=0.9, top_k=3))
    (_, drawn, n), (_, greedy, _) = engine.calls
    assert (drawn.max_new_tokens, drawn.temperature, drawn.top_p, drawn.top_k, n) == (4, 0.7, 0.9, 3, 2)
    assert drawn.stop_token_ids == (EOS,)
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)


def test_a_shut_down_rollout_does_not_generate() -> None:
    made = rollout.build_rollout({"engine": "hybrid_engine"}, StandInEngine({5: [8]}), tokenizer())
    made.sync_weights(3)
    made.shutdown()
    with pytest.raises(UsageError, match="shut down"):
        made.generate(request([5]), rollout.SamplingConfig(4))


def test_wrong_prompts_are_refused_by_name() -> None:
    ids = torch.tensor([[5, 6, 0], [5, 6, 7]])
    wrong = {
        r"shape \[2, 3\] with a prompt_attention_mask of shape \[2, 2\]": torch.ones(2, 2),
        r"prompts \[0\] are not padded on the left": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        r"prompts \[1\] have no tokens": torch.tensor([[1, 1, 1], [0, 0, 0]]),
        "other than 0 and 1": torch.tensor([[0, 1, 2], [1, 1, 1]]),
    }
    for message, mask in wrong.items():
        with pytest.raises(DataError, match=message):
            rollout.RolloutRequest(ids, mask)
    with pytest.raises(ValueError, match="shape"):
        rollout.RolloutRequest(ids, torch.ones(3, 2))


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    made = rollout.HybridEngineRollout(StandInEngine({5: [8]}, limit=8), tokenizer())
    made.generate(request([5] * 6), rollout.SamplingConfig(2))
    for prompt, new in ((7, 2), (9, 1)):
        with pytest.raises(LengthError, match=f"prompt 1 has {prompt} tokens: with {new} new ones"):
            made.generate(request([5], [5] * prompt), rollout.SamplingConfig(new))


def test_wrong_options_are_refused_by_name() -> None:
    engine = StandInEngine({})
    with pytest.raises(ValueError, match="no rollout engine 'vllm'"):
        rollout.build_rollout(rollout.RolloutConfig(engine="vllm"), engine, tokenizer())
    with pytest.raises(ArgumentError, match="has no engines"):
        rollout.build_rollout({"engines": "hybrid_engine"}, engine, tokenizer())
    with pytest.raises(ArgumentError, match="has no method rollout"):
        rollout.HybridEngineRollout(torch.nn.Linear(2, 2), tokenizer())
    for values in ({"max_new_tokens": 0}, {"n_samples_per_prompt": 0}, {"top_p": 0.0}, {"continuous_batch_size": 0}):
        with pytest.raises(ArgumentError, match=next(iter(values))):
            rollout.SamplingConfig(**{"max_new_tokens": 4} | values)
    with pytest.raises(DataError, match="logits of shape"):
        rollout.ResponseTokenBatch.from_rollout(
            generated({5: [8]}, [5])
        ).select_causal_logits(torch.zeros(1, 5, 3))  # fmt: skip


def test_a_training_engine_answers_with_its_own_weights(alone: None) -> None:
    """Greedy answers are those of Transformers, with the scores of the same weights; after an update a new version."""
    import deepspeed
    from tests.unit.inference.toys import alone as greedy
    from tests.unit.inference.toys import llama

    model, prompts = llama(eos_token_id=None), [[5, 9], [7, 3, 11, 4]]
    wanted = [greedy(model, prompt, 6) for prompt in prompts]
    config = {
        "train_micro_batch_size_per_gpu": 4, "hybrid_engine": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        made = rollout.build_rollout(rollout.RolloutConfig(), engine, tokenizer(eos=None))
        sampling = rollout.SamplingConfig(6, temperature=0.0, n_samples_per_prompt=2)
        batch = made.generate(request(*prompts), sampling)
        tokens = rollout.ResponseTokenBatch.from_rollout(batch)
        answers = [row[mask].tolist() for row, mask in zip(tokens.targets, tokens.response_mask, strict=True)]
        assert answers == [wanted[0], wanted[0], wanted[1], wanted[1]]
        scored = engine.score([prompts[0] + wanted[0]])[0][len(prompts[0]) - 1 :]
        assert torch.equal(tokens.logprobs[0][tokens.response_mask[0]], scored)
        loss = rollout.generalized_jsd_loss(
            tokens.select_causal_logits(engine(batch.input_ids, attention_mask=batch.attention_mask).logits),
            torch.zeros(4, batch.seq_len - 1, 256), tokens.response_mask,
        )  # fmt: skip
        assert loss.valid_token_count == 24
        engine.backward(loss.loss)
        engine.step()
        later = made.generate(request(*prompts), sampling)
        assert len(set(batch.version.tolist())) == 1 and (later.version > batch.version).all()
    finally:
        engine.destroy()
