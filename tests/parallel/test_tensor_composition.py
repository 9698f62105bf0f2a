"""Cut models beside everything else an engine does: each equals the dense model."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import DataError, DeepSpeedError, MeshError, OptimizerError, TensorParallelError, UsageError
from deepspeed.tensor_parallel.plan import shapes_of
from deepspeed.utils import safe_get_full_fp32_param
from tests.parallel.checkpointing import differences, everything
from tests.parallel.dense import Dense, adamw, compared, momentum
from tests.parallel.tensor_runs import batch_of, config_of, loss_of, model_of
from tests.parallel.tiny import raises


def start(model: Any, config: dict[str, Any], optimizer: Any = momentum) -> Any:
    import deepspeed

    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(trained), config=config)
    return engine


def close(windows: list[tuple[float, ...]]) -> None:
    worst = [max(column) for column in zip(*windows, strict=True)]
    assert worst[0] <= 2e-6 and max(worst[1:]) <= 5e-6, worst


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets))
    for name, param in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1, generator=torch.Generator().manual_seed(1))
    return made


HALVES = {  # an adapter's half has its base's channels, the other one is whole
    "self_attn.q_proj.base_layer.weight": (16, 32), "self_attn.q_proj.lora_B.default.weight": (16, 4),
    "self_attn.q_proj.lora_A.default.weight": (4, 32), "self_attn.v_proj.lora_B.default.weight": (8, 4),
    "self_attn.o_proj.base_layer.weight": (32, 16), "self_attn.o_proj.lora_A.default.weight": (4, 16),
    "self_attn.o_proj.lora_B.default.weight": (32, 4), "mlp.gate_proj.lora_B.default.weight": (24, 4),
    "mlp.down_proj.lora_A.default.weight": (4, 24),
}  # fmt: skip


def composed(what: str, stage: int, dp: int) -> None:
    model = model_of("Llama")
    config = config_of(stage, 2, accumulation=2)
    if what == "recompute":
        model.gradient_checkpointing_enable()
    elif what == "recompute by JSON":
        config["activation_checkpointing"] = {"enabled": True}
    elif what == "lora":
        model = with_lora(model)
    elif what == "offload":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    elif what == "vocabulary":
        config["tensor_parallel"]["vocab_parallel_lm_head"] = True
    elif what == "tied vocabulary":
        model = model_of("Llama", tie_word_embeddings=True)
        config["tensor_parallel"]["vocab_parallel_lm_head"] = True
    dense = Dense(model, momentum, dp, 2)
    with start(model, config) as engine:
        close(list(compared(engine, dense, current_mesh(), loss_of, 3)))
        if what == "lora":
            trained = [name for name, p in model.named_parameters() if p.requires_grad]
            assert trained and all("lora" in name for name in trained)
            shapes = {name.split("layers.0.")[-1]: shape for name, shape in shapes_of(model).items()}
            for place, shape in HALVES.items():
                assert shapes[place] == shape, (place, shapes[place])
        if "vocabulary" in what:
            given = batch_of(model, 0, 0)
            output = engine(**given)
            assert output.logits is None  # nobody has them
            names = list(inspect.signature(model.forward).parameters)
            by_position = [given.get(name) for name in names[: names.index("labels") + 1]]
            for plain in (engine(*by_position), engine(*by_position, return_dict=False)):
                assert torch.equal(plain[0], output.loss)
                assert not any(isinstance(value, torch.Tensor) for value in plain[1:])
            with torch.no_grad():
                ours, theirs = (m(input_ids=given["input_ids"]).logits for m in (engine, dense.model))
            assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 1e-5


WHATS = ("recompute", "recompute by JSON", "lora", "offload", "vocabulary", "tied vocabulary")
FAST = {("lora", 3), ("tied vocabulary", 1)}
COMPOSED = [
    pytest.param(what, stage, marks=() if (what, stage) in FAST else pytest.mark.slow)
    for what in WHATS
    for stage in (0, 1, 2, 3)
    if not (what == "offload" and stage == 0)
]


@pytest.mark.parametrize(("what", "stage"), COMPOSED)
def test_it_composes(workers: Any, what: str, stage: int) -> None:
    workers(2).run(composed, what, stage, 1, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "stage"), [(what, 3) for what in WHATS])
def test_it_composes_over_data_parallel_ranks(workers: Any, what: str, stage: int) -> None:
    workers(4).run(composed, what, stage, 2, timeout=240)


def counted() -> None:
    """num_items, and no_sync."""
    model = model_of("Llama")
    dense = Dense(model, momentum, 1, 2)
    with start(model, config_of(1, 2, accumulation=2)) as engine:
        lengths = (5, 9)
        for step, length in enumerate(lengths):
            given = batch_of(model, step, 0, length)
            items = 2 * (length - 1)
            engine.backward(engine(**given).loss * items, num_items=items)
            engine.step()
        total = sum(2 * (length - 1) for length in lengths)
        losses = [dense.model(**batch_of(model, s, 0, n)).loss * 2 * (n - 1) for s, n in enumerate(lengths)]
        (torch.stack(losses).sum() / total).backward()
        dense.step()
        for name, wanted in dense.parameters().items():
            assert (safe_get_full_fp32_param(model.get_parameter(name)) - wanted).abs().max() <= 1e-6, name


def test_items_are_counted_once_for_ranks_that_share_them(workers: Any) -> None:
    workers(2).run(counted, timeout=60)


def saved(folder: str, tp: int, stage: int, steps: int) -> Any:
    config = config_of(stage, tp, zero={"stage3_gather_16bit_weights_on_model_save": True})
    with start(model_of("Llama", seed=3), config, adamw) as engine:
        at = current_mesh().coordinates["dp_shard"]
        for step in range(2):
            engine.backward(loss_of(engine, step, 0 * at))
            engine.step()
        engine.save_checkpoint(folder)
        assert engine.save_16bit_model(folder + "/export")
        return goes_on(engine, steps)


def goes_on(engine: Any, steps: int) -> list[float]:
    losses = []
    for step in range(2, 2 + steps):
        loss = loss_of(engine, step, 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def loaded(folder: str, tp: int, stage: int, steps: int) -> Any:
    with start(model_of("Llama", seed=4), config_of(stage, tp), adamw) as engine:
        path, _ = engine.load_checkpoint(folder)
        assert path
        return goes_on(engine, steps)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, 1), (1, 1, 3)),
        pytest.param((1, 1, 0), (2, 2, 3), marks=pytest.mark.slow),
        pytest.param((4, 2, 3), (2, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_any_mesh_loads_it(workers: Any, tmp_path: Path, before: Any, after: Any) -> None:
    """(ranks, tp, stage) before and after."""
    one = workers(before[0]).run(saved, str(tmp_path), *before[1:], 3, timeout=120)
    two = workers(after[0]).run(loaded, str(tmp_path), *after[1:], 3, timeout=120)
    assert max(abs(a - b) / b for a, b in zip(one[0], two[0], strict=True)) <= 2e-6, (one[0], two[0])
    exported = torch.load(tmp_path / "export" / "pytorch_model.bin", weights_only=True)
    shapes = {name: tuple(p.shape) for name, p in model_of("Llama").state_dict().items()}
    assert {name: tuple(t.shape) for name, t in exported.items()} == shapes


def refused() -> None:
    """What cannot be is refused on every rank, by name."""
    rank = dist.get_rank()
    with raises(OptimizerError, "Adafactor", "q_proj"):
        start(model_of("Llama"), config_of(0, 2), lambda ps: torch.optim.Adafactor(ps, lr=1e-3))
    with raises(MeshError, "ranks 0 and 1", "tp"):
        start(model_of("Llama", intermediate_size=48 + 16 * rank), config_of(0, 2))
    with raises(TensorParallelError, "Linear"):
        plain = torch.nn.Linear(4, 4)
        plain.example_input_array = torch.randn(2, 4)  # type: ignore[assignment]
        start(plain, config_of(0, 2))
    with raises(MeshError, "tp"):
        start(model_of("Llama"), config_of(0, 3))
    for pattern, how, why in (
        ("q_proj", "row", "split by column"),
        ("embed", "column", "no block"),
        ("(", "row", "no reg"),
    ):
        specs = {"layer_specs": [{"patterns": [pattern], "partition_type": how}]}
        with raises(DeepSpeedError, "partition_config", pattern, why):
            start(model_of("Llama"), config_of(0, 2, tensor_parallel={"partition_config": specs}))
    specs = {"layer_specs": [{"patterns": ["o_proj"], "partition_type": "row"}], "use_default_specs": False}
    with start(model_of("Llama"), config_of(0, 2, tensor_parallel={"partition_config": specs})) as engine:
        shapes = {name: tuple(p.shape) for name, p in engine.module.model.layers[0].named_parameters()}
        assert shapes["self_attn.o_proj.weight"] == (32, 16) and shapes["mlp.up_proj.weight"] == (48, 32)
    skip = {"layer_specs": [{"patterns": ["self_attn"], "partition_type": "skip"}]}
    with raises(TensorParallelError, "strict_mode", "q_proj"):
        config = config_of(0, 2, tensor_parallel={"partition_config": {**skip, "strict_mode": True}})
        start(model_of("Llama"), config)
    with start(model_of("Llama"), config_of(0, 2, tensor_parallel={"partition_config": skip})) as engine:
        model = engine.module
        assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)
        assert model.model.layers[0].mlp.up_proj.weight.shape == (24, 32)
        with raises(UsageError, "save_pretrained", "save_16bit_model"):
            model.save_pretrained("nowhere")
        with raises(DataError, "ranks 0 and 1", "different batches"):
            engine(**batch_of(model, rank, 0))


def test_what_cannot_be_is_refused(workers: Any) -> None:
    workers(2).run(refused, timeout=120)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((4,), at)


def dealt() -> list[list[int]]:
    import deepspeed

    model = model_of("Llama")
    config = config_of(1, 2)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=momentum(model.parameters()), config=config, training_data=Rows()
    )
    with engine:
        return [batch[:, 0].tolist() for batch in loader]


def test_the_own_loader_deals_to_data_parallel_coordinates(workers: Any) -> None:
    found = workers(4).run(dealt, timeout=60)
    assert found[0] == found[1] and found[2] == found[3]
    assert sorted(sum(found[0] + found[2], [])) == list(range(16))


def born(stage: int) -> None:
    """Under zero.Init, with other values on each rank: the first one's count."""
    import deepspeed

    config = config_of(stage, 2)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = model_of("Llama", seed=10 + dist.get_rank(), pad_token_id=None)
    dense = Dense(model_of("Llama", seed=10, pad_token_id=None), momentum, 2)
    with start(model, config) as engine:
        close(list(compared(engine, dense, current_mesh(), loss_of, 2)))


def test_models_born_sharded_are_cut(workers: Any) -> None:
    workers(4).run(born, 3, timeout=120)


def kept(folder: str, tp: int, stage: int, family: str, load: bool) -> tuple[Any, list[float]]:
    """Masters and moments where a run was saved or loaded, and the losses after it."""
    with start(model_of(family, seed=4 if load else 3), config_of(stage, tp), adamw) as engine:
        if load:
            engine.load_checkpoint(folder)
        else:
            for step in range(2):
                engine.backward(loss_of(engine, step, 0))
                engine.step()
            engine.save_checkpoint(folder)
        return everything(engine), goes_on(engine, 3)


MESHES = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (4, 1), (6, 3)]  # ranks, tp


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_random_pairs_of_meshes(workers: Any, tmp_path: Path, trial: int) -> None:
    draw = random.Random(trial)
    family = draw.choice(["Llama", "GPT2", "Falcon"])
    ends = []
    for load in (False, True):
        (ranks, tp), stage = draw.choice(MESHES), draw.randint(0, 3)
        ends.append(workers(ranks).run(kept, str(tmp_path), tp, stage, family, load, timeout=240)[0])
    (wanted, one), (found, two) = ends
    assert not differences(found, wanted)
    assert max(abs(a - b) / b for a, b in zip(one, two, strict=True)) <= 2e-6, (one, two)


def initialised_first() -> None:
    import deepspeed

    model = model_of("GPT2")
    dense = Dense(model, momentum, 1)
    assert deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32) is model
    config = config_of(1, 0)
    with start(model, config) as engine:
        assert engine.dp_world_size == 1 and engine.world_size == 2
        close(list(compared(engine, dense, current_mesh(), loss_of, 2)))


def test_a_model_may_be_cut_before_initialize(workers: Any) -> None:
    workers(2).run(initialised_first, timeout=60)
