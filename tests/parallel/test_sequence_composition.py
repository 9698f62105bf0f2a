"""Cut sequences beside everything else an engine does: each equals the dense model on whole sequences."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.sequence.batches import slice_batch
from deepspeed.utils import safe_get_full_fp32_param
from tests.parallel.dense import Dense, compared, momentum
from tests.parallel.sequence_runs import Tiled, batch_of, close, config_of, loss_of, start, tile, trained
from tests.parallel.tensor_runs import model_of
from tests.parallel.test_tensor_composition import with_lora

MESHES = {
    "sp2": {"sp": 2},
    "sp4": {"sp": 4},
    "dp2-sp2": {"dp_shard": 2, "sp": 2},
    "tp2-sp2": {"sp": 2, "tp": 2},
    "dp2-tp2-sp2": {"dp_shard": 2, "sp": 2, "tp": 2},
    "hybrid-sp2": {"dp_replicate": 2, "dp_shard": 1, "sp": 2},
    "dp2-sp4": {"dp_shard": 2, "sp": 4},
}
# stage, clip, optimizer, key-value heads
HOWS = [(0, 0.5, "momentum", 4), (1, 0.0, "adamw", 2), (2, 0.5, "momentum", 1), (3, 0.0, "adamw", 1),
        (3, 0.0, "momentum", 2)]  # fmt: skip
CELLS = [
    pytest.param({"sp": 2, "tp": 2}, 1, 2, 0.5, "momentum", 2, id="sp2-tp2-zero1"),
    *(
        pytest.param(sizes, stage, 4, clip, how, kv, id=f"{name}-zero{stage}-kv{kv}-{how}", marks=pytest.mark.slow)
        for name, sizes in MESHES.items()
        for stage, clip, how, kv in HOWS
        if not (name == "hybrid-sp2" and stage != 3) and not ("tp" in name and kv == 1)
    ),
]


@pytest.mark.parametrize(("sizes", "stage", "accumulation", "clip", "optimizer", "kv"), CELLS)
def test_same_numbers(
    workers: Any, sizes: dict[str, int], stage: int, accumulation: int, clip: float, optimizer: str, kv: int
) -> None:
    ranks = torch.tensor(list(sizes.values())).prod().item()
    run = partial(trained, num_key_value_heads=kv)
    count = 10 if accumulation == 4 else 4  # windows of the slow cells, and of the fast one
    for windows in workers(ranks).run(run, "Llama", sizes, stage, accumulation, clip, count, optimizer, timeout=300):
        close(windows)


def in_bf16(sizes: dict[str, int], stage: int) -> list[float]:
    with start(model_of("Llama"), config_of(sizes, stage, bf16={"enabled": True})) as engine:
        return [goes_on(engine, range(at, at + 1))[0] for at in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [{"sp": 2}, {"sp": 4}, {"sp": 2, "tp": 2}], ids=str)
def test_losses_in_bf16(workers: Any, sizes: dict[str, int], stage: int) -> None:
    alone = workers(1).run(in_bf16, {}, stage, timeout=120)[0]
    ranks = torch.tensor(list(sizes.values())).prod().item()
    for losses in workers(ranks).run(in_bf16, sizes, stage, timeout=240):
        assert max(abs(a - b) / b for a, b in zip(losses, alone, strict=True)) <= 1e-2


def kind_of_batch(kind: str, model: Any, step: int, rank: int) -> torch.Tensor:
    return model(**batch_of(step, rank, kind=kind), use_cache=False).loss


def composed(what: str, stage: int, data: int) -> None:
    model, kind = model_of("Llama"), what if what in ("padded", "packed", "prompt") else "plain"
    config = config_of({"sp": 2}, stage, accumulation=2)
    if what == "recompute":
        model.gradient_checkpointing_enable()
    elif what == "recompute by JSON":
        config["activation_checkpointing"] = {"enabled": True}
    elif what == "lora":
        model = with_lora(model)
    elif what == "offload":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    elif what == "one number":
        del config["mesh"]
        config["sequence_parallel_size"] = 2
    dense = Dense(model, momentum, data, 2)
    if what == "tiles":
        tile(model)
    with start(model, config) as engine:
        close(list(compared(engine, dense, current_mesh(), partial(kind_of_batch, kind), 3)))
        if what == "packed":
            alone = dense.model(**{**batch_of(0, 0, kind="packed"), "position_ids": None}, use_cache=False).loss
            together = dense.model(**batch_of(0, 0, kind="packed"), use_cache=False).loss
            assert abs(float(alone - together)) > 1e-3  # documents matter


WHATS = ("padded", "packed", "prompt", "recompute", "recompute by JSON", "lora", "offload", "one number", "tiles")
FAST = {("packed", 3), ("padded", 1), ("recompute", 3), ("tiles", 3)}


@pytest.mark.parametrize(
    ("what", "stage"),
    [
        pytest.param(what, stage, marks=() if (what, stage) in FAST else pytest.mark.slow)
        for what in WHATS
        for stage in (0, 1, 2, 3)
        if not (what == "offload" and stage == 0)
    ],
)
def test_it_composes(workers: Any, what: str, stage: int) -> None:
    workers(2).run(composed, what, stage, 1, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("what", WHATS)
def test_it_composes_over_data_parallel_ranks(workers: Any, what: str) -> None:
    workers(4).run(composed, what, 3, 2, timeout=240)


def families(family: str) -> None:
    model = model_of(family)
    dense = Dense(model, momentum, 1)
    with start(model, config_of({"sp": 2}, 1)) as engine:
        close(list(compared(engine, dense, current_mesh(), loss_of, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPT2", "GPTNeoX", "Mistral", "Qwen2", "Qwen3", "Phi"])
def test_other_families(workers: Any, family: str) -> None:
    workers(2).run(families, family, timeout=120)


def tiled_logits(stage: int) -> None:
    model = model_of("Llama")
    dense = Dense(model, momentum, 1)
    with start(Tiled(model, 3), config_of({"sp": 2}, stage)) as engine:
        for step in range(2):
            part = slice_batch(batch_of(step, 0), current_mesh().axis("sp"))
            loss = engine(part["input_ids"], part["position_ids"], part["shift_labels"])
            engine.backward(loss, num_items=int((part["shift_labels"] != -100).sum()))
            engine.step()
            dense.window(step, loss_of)
            dense.step()
        for name, wanted in dense.parameters().items():
            assert (safe_get_full_fp32_param(model.get_parameter(name)) - wanted).abs().max() <= 1e-6, name


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)] + [3])
def test_logits_in_tiles(workers: Any, stage: int) -> None:
    workers(2).run(tiled_logits, stage, timeout=60)


# -- the two conventions of losses -----------------------------------------------------------------------------------


def counted() -> None:
    """Sums over each rank's own tokens with `num_items`, of sequences of several lengths, one with a prompt."""
    model = model_of("Llama")
    dense = Dense(model, momentum, 1, 2)
    with start(model, config_of({"sp": 2}, 2, accumulation=2)) as engine:
        axis, batches = current_mesh().axis("sp"), [batch_of(0, 0, 8), batch_of(1, 0, kind="prompt")]
        for batch in batches:
            part = slice_batch(batch, axis)
            own = part["shift_labels"].flatten()
            logits = engine(**{name: part[name] for name in ("input_ids", "position_ids")}).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, own, reduction="sum", ignore_index=-100)
            engine.backward(loss, num_items=int((own != -100).sum()))
            engine.step()
        items = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        losses = [dense.model(**batch).loss * count for batch, count in zip(batches, items, strict=True)]
        (torch.stack(losses).sum() / sum(items)).backward()
        dense.step()
        for name, wanted in dense.parameters().items():
            assert (safe_get_full_fp32_param(model.get_parameter(name)) - wanted).abs().max() <= 1e-6, name


def test_sums_over_own_tokens_are_counted(workers: Any) -> None:
    workers(2).run(counted, timeout=60)


# -- loaders -----------------------------------------------------------------------------------------------------------


def row_of(at: int) -> dict[str, torch.Tensor]:
    return {name: value[0] for name, value in batch_of(at, 0).items()}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return row_of(at)


def loaded() -> list[list[int]]:
    import deepspeed

    model = model_of("Llama")
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=momentum(model.parameters()), config=config_of({"sp": 2}, 3), training_data=Rows()
    )
    with engine:
        found = []
        for batch in loader:
            assert set(batch) >= {"input_ids", "position_ids", "labels", "shift_labels"}
            assert batch["input_ids"].shape == (2, 6)
            engine.backward(engine(**batch).loss)
            engine.step()
            found += batch["input_ids"].tolist()
        return found


def test_the_own_loader_gives_slices(workers: Any) -> None:
    found = workers(4).run(loaded, timeout=120)
    for one, other in ((0, 1), (2, 3)):
        halves = [a + b for a, b in zip(found[one], found[other], strict=True)]
        assert all(half in [row_of(at)["input_ids"].tolist() for at in range(8)] for half in halves)
    seen = sorted(a + b for one, other in ((0, 1), (2, 3)) for a, b in zip(found[one], found[other], strict=True))
    assert seen == sorted(row_of(at)["input_ids"].tolist() for at in range(8))


def by_script() -> None:
    """A mesh as model-parallel unit, an adapted loader, evaluation and generation."""
    model = model_of("Llama")
    dense = Dense(model, momentum, 1)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2, seq_length_is_variable=True)
    group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
    loader = torch.utils.data.DataLoader([row_of(at) for at in range(8)], 2)
    adapted = UlyssesSPDataLoaderAdapter(
        loader, rank, group, mpu.get_sequence_parallel_world_size(), torch.device("cpu")
    )
    assert len(adapted) == 4 and adapted.batch_size == 2
    config = config_of({}, 1)
    with start(model, config, mpu=mpu) as engine:
        assert engine.sequence_parallel_size == 2 and engine.dp_world_size == 1
        for step, (part, whole) in enumerate(zip(adapted, loader, strict=True)):
            assert "labels" not in part
            loss = engine(**part, labels=part["shift_labels"]).loss
            engine.backward(loss)
            engine.step()
            theirs = dense.window(step, lambda one, *_: one(**whole).loss)  # noqa: B023
            assert abs(loss.item() - theirs[0]) <= 2e-6 * theirs[0]
            dense.step()
        engine.eval()
        with torch.no_grad():
            whole = next(iter(loader))
            one, other = engine(**whole), dense.model(**whole)
            assert (one.logits - other.logits).abs().max() <= 1e-5 and abs(one.loss - other.loss) <= 1e-6
            part = slice_batch(whole, mpu.axis("sp"))
            assert abs(engine(**part).loss - other.loss) <= 1e-6
            prompt = whole["input_ids"][:, :5]
            ours, theirs = (m.generate(prompt, max_new_tokens=4, do_sample=False) for m in (model, dense.model.eval()))
            assert torch.equal(ours, theirs)


def test_the_way_of_scripts(workers: Any) -> None:
    workers(2).run(by_script, timeout=120)


def another_engine() -> None:
    """A model gets a second engine while it has one, then an engine of whole sequences, and is the plain one after."""
    model = model_of("Llama")
    attention, loss = model.config._attn_implementation, model.loss_function
    for sizes in ({"sp": 2}, {"sp": 2}, {}):
        dense = Dense(model, momentum, 1 if sizes else 2)
        engine = start(model, config_of(sizes, 1))
        close(list(compared(engine, dense, current_mesh(), loss_of, 1)))
    engine.destroy()
    assert (model.config._attn_implementation, model.loss_function) == (attention, loss)
    assert not model._forward_pre_hooks


@pytest.mark.slow
def test_a_model_gets_another_engine(workers: Any) -> None:
    workers(2).run(another_engine, timeout=120)


# -- checkpoints, random numbers --------------------------------------------------------------------------------------


def saved(folder: str, sizes: dict[str, int], stage: int) -> list[float]:
    with start(model_of("Llama"), config_of(sizes, stage)) as engine:
        return [goes_on(engine, range(2)), engine.save_checkpoint(folder), goes_on(engine, range(2, 4))][2]  # type: ignore[list-item]


def resumed(folder: str, sizes: dict[str, int], stage: int) -> list[float]:
    with start(model_of("Llama", seed=7), config_of(sizes, stage)) as engine:
        engine.load_checkpoint(folder)
        return goes_on(engine, range(2, 4))


def goes_on(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(engine, step, 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("before", [(2, {"sp": 2}, 3), (4, {"sp": 2, "tp": 2}, 1)])
@pytest.mark.parametrize("after", [(1, {}, 0), (4, {"sp": 4}, 3)])
def test_any_mesh_loads_it(workers: Any, tmp_path: Path, before: Any, after: Any) -> None:
    one = workers(before[0]).run(saved, str(tmp_path), *before[1:], timeout=120)
    two = workers(after[0]).run(resumed, str(tmp_path), *after[1:], timeout=120)
    assert max(abs(a - b) / b for a, b in zip(one[0], two[0], strict=True)) <= 2e-6, (one[0], two[0])


def dropped() -> list[int]:
    """The random state a block drops by, in forward and when it is computed again; outside, ranks go on alike."""
    model, states = model_of("Llama", attention_dropout=0.5), []
    inner = model.model.layers[0].mlp.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if model.training:
            states.append(hash(tuple(torch.get_rng_state().tolist())))
        return torch.nn.functional.dropout(inner(x), 0.5, model.training)

    model.model.layers[0].mlp.forward = forward
    model.gradient_checkpointing_enable()
    with start(model, config_of({"sp": 2}, 1)) as engine:
        torch.manual_seed(5)
        engine.backward(loss_of(engine, 0, 0))
        engine.step()
        return [*states, hash(tuple(torch.get_rng_state().tolist()))]


def test_tokens_are_dropped_apart(workers: Any) -> None:
    one, other = workers(2).run(dropped, timeout=60)
    assert one[0] == one[1] and other[0] == other[1] and one[0] != other[0] and one[2] == other[2]
