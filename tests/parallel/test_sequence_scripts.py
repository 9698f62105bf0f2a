"""What scripts may say and loops may do over cut sequences, and what is refused there by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.nn.functional import all_gather

import deepspeed
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.engine import sequence_parallel
from deepspeed.errors import ArgumentError, DataError, MeshError, SequenceParallelError, UsageError
from deepspeed.runtime.sequence_parallel.parallel_state_sp import (
    get_data_parallel_world_size,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    initialize_sequence_parallel,
)
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.sequence.batches import slice_batch
from tests.parallel.dense import Dense, apart, compared, momentum
from tests.parallel.sequence_runs import LENGTH, batch_of, close, config_of, loss_of, start
from tests.parallel.tensor_runs import model_of
from tests.parallel.tiny import raises

SP = {"sp": 2}


def mine(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return slice_batch(batch, current_mesh().axis("sp"))


def trains(engine: Any, dense: Dense) -> None:
    close(list(compared(engine, dense, current_mesh(), loss_of, 1)))


# -- how it is asked for -----------------------------------------------------------------------------------------------


def asked(folder: str) -> None:
    register, model = UlyssesSPAttentionHF.register_with_transformers, model_of("Llama")
    model.config.save_pretrained(f"{folder}/{torch.distributed.get_rank()}")
    path = f"{folder}/{torch.distributed.get_rank()}"
    with raises(ArgumentError, "13", "2 ranks"):
        register(model, "sdpa", 2, 2, seq_length=13, seq_length_is_variable=False)
    with raises(ArgumentError, "None", "2 ranks"):
        register(model, "sdpa", 2, 2, seq_length_is_variable=False)
    with raises(MeshError, "3 query head(s)", "2 ranks", "1 and 3"):
        register(model_of("Llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48), "sdpa", 2, 2)
    # By where a configuration is found: `initialize` cuts the model.
    mpu, dense = (
        register(path, "sdpa", 2, 2, max_length=LENGTH, seq_length_is_variable=False),
        Dense(model, momentum, 1),
    )
    with start(model, config_of({}, 1), mpu=mpu) as engine:
        assert engine.sequence_parallel_size == get_sequence_parallel_world_size() == 2
        trains(engine, dense)
    for more in ({"mesh_param": {"sp": 2}}, {"mesh_param": (1, 2)}, {"mpu": initialize_sequence_parallel(2)}):
        dense = Dense(model, momentum, 1)
        with start(model, config_of({}, 2), **more) as engine:
            assert get_data_parallel_world_size() == 1 and engine.get_data_parallel_rank() == 0
            assert get_sequence_parallel_rank() == torch.distributed.get_rank()
            trains(engine, dense)


def test_scripts_ask_in_their_ways(workers: Any, tmp_path: Path) -> None:
    workers(2).run(asked, str(tmp_path), timeout=60)


def evaluated() -> None:
    """Asked to leave evaluation alone, slices are what the plain model is given."""
    model = model_of("Llama")
    plain = copy.deepcopy(model).eval()
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2, disable_in_eval=True)
    with start(model, config_of({}, 1), mpu=mpu) as engine, torch.no_grad():
        engine.eval()
        part = mine(batch_of(0, 0))
        given = {name: part[name] for name in ("input_ids", "position_ids")}
        torch.testing.assert_close(engine(**given).logits, plain(**given).logits)


def of_its_own() -> None:
    model = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config_of(SP, 1))
    with mock.patch.object(sequence_parallel, "warn_once") as warned:
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    assert "each computes all of it" in warned.call_args.args[0]
    engine.destroy()


def test_a_model_that_shares_no_sequence_is_said(workers: Any) -> None:
    workers(2).run(of_its_own)


def test_evaluation_may_be_left_alone(workers: Any) -> None:
    workers(2).run(evaluated, timeout=60)


def unverified() -> None:
    """The comparison is switched off by its key: what it would refuse then begins."""
    model = model_of("Llama")
    rotary = model.model.rotary_emb
    inner = rotary.forward
    rotary.forward = lambda x, position_ids: inner(x, position_ids=torch.arange(x.shape[1])[None])
    with raises(SequenceParallelError, "LlamaForCausalLM"):
        start(model, config_of(SP, 1))
    with start(model, config_of(SP, 1, sequence_parallel_verify=False)) as engine:
        engine.backward(loss_of(engine, 0, 0))


def test_the_comparison_may_be_switched_off(workers: Any) -> None:
    workers(2).run(unverified, timeout=60)


# -- batches ----------------------------------------------------------------------------------------------------------


def repeated() -> None:
    """Two documents that end where the sequence is cut; once with the same tokens, so that both slices are equal."""
    model = model_of("Llama")
    dense = Dense(model, momentum, 1)

    def loss(made: Any, step: int, rank: int) -> torch.Tensor:
        batch, half = batch_of(step, rank), LENGTH // 2
        batch["position_ids"] = torch.arange(half).repeat(2, 2)
        if step:
            batch["input_ids"] = batch["input_ids"][:, :half].repeat(1, 2)
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, half] = -100
        return made(**batch, use_cache=False).loss

    with start(model, config_of(SP, 1)) as engine:
        close(list(compared(engine, dense, current_mesh(), loss, 3)))


def embedded() -> None:
    """`inputs_embeds` are cut as tokens are."""
    model = model_of("Llama")
    dense = Dense(model, momentum, 1)
    states = torch.randn(2, LENGTH, model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def loss(made: Any, step: int, rank: int) -> torch.Tensor:
        return made(inputs_embeds=states, labels=batch_of(step, rank)["labels"], use_cache=False).loss

    def trained(made: Any) -> dict[str, torch.Tensor]:
        return {name: value for name, value in made.parameters().items() if "embed" not in name}

    with start(model, config_of(SP, 1)) as engine:
        for step in range(2):
            engine.backward(loss(engine, step, 0))
            engine.step()
            dense.window(step, loss)
            dense.step()
        assert apart(engine, trained(dense), deepspeed.utils.safe_get_full_fp32_param) <= 5e-6


def refused() -> None:
    with start(model_of("Llama"), config_of(SP, 1)) as engine:
        batch = batch_of(0, 0)
        square = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
        with raises(DataError, "attention_mask", str((2, 1, LENGTH, LENGTH))):
            engine(**batch, attention_mask=square)
        with raises(DataError, "attention_mask", "[batch, tokens]"):
            engine(**mine(batch), attention_mask=square)
        with raises(DataError, "input_ids", "position_ids"):
            engine(labels=batch["labels"])
        engine.backward(engine(**batch).loss)


@pytest.mark.parametrize("program", [repeated, embedded, refused])
def test_batches(workers: Any, program: Any) -> None:
    workers(2).run(program, timeout=60)


# -- losses -----------------------------------------------------------------------------------------------------------


def weighed() -> None:
    """Means over each rank's own tokens, gathered with a sum in backward and weighed by how many they are."""
    model = model_of("Llama")
    dense = Dense(model, momentum, 1)

    def loss(made: Any, step: int, rank: int) -> torch.Tensor:
        batch = batch_of(step, rank, kind=("plain", "prompt")[step % 2])
        if made is not engine:
            return made(**batch, use_cache=False).loss
        part, group = mine(batch), current_mesh().get_sequence_parallel_group()
        labels = part["shift_labels"].flatten()
        logits = engine(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits.flatten(0, 1)
        own = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / max(int((labels != -100).sum()), 1)
        losses, counts = all_gather(own, group=group), all_gather((labels != -100).sum(), group=group)
        return (torch.stack(losses) * torch.stack(counts)).sum() / torch.stack(counts).sum()

    with start(model, config_of(SP, 2)) as engine:
        close(list(compared(engine, dense, current_mesh(), loss, 3)))


def late() -> None:
    """Losses that begin to differ in the tenth micro-batch are refused there, on all ranks."""
    with start(model_of("Llama"), config_of(SP, 0)) as engine:
        for step in range(9):
            engine.backward(loss_of(engine, step, 0))
            engine.step()
        with raises(UsageError, "ranks 0 and 1", "share a sequence (sp)"):
            engine.backward(loss_of(engine, 9, 0) * (1 + get_sequence_parallel_rank()))


def looped() -> None:
    """`engine.loop` weighs batches by their samples; of seven rows the last batch has one."""
    rows = [{name: value[0] for name, value in batch_of(at, 0).items()} for at in range(7)]
    model = model_of("Llama")
    dense = Dense(model, momentum, 1)
    config = config_of(SP, 1, accumulation=2, dataloader_drop_last=False)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
    with engine:
        loader = engine.deepspeed_io(rows, route="eval")
        whole = [torch.utils.data.default_collate(rows[at : at + 2]) for at in range(0, 7, 2)]
        for batch in engine.loop(loader):
            engine.backward(engine(**batch).loss)
            engine.step()
        for first, second in zip(whole[::2], whole[1::2], strict=True):
            sizes = [len(batch["labels"]) for batch in (first, second)]
            dense.optimizer.zero_grad()
            for batch, size in zip((first, second), sizes, strict=True):
                (dense.model(**batch).loss * size / sum(sizes)).backward()
            dense.step()
        assert apart(engine, dense.parameters(), deepspeed.utils.safe_get_full_fp32_param) <= 5e-6


@pytest.mark.parametrize("program", [weighed, late, looped])
def test_losses(workers: Any, program: Any) -> None:
    workers(2).run(program, timeout=60)
