"""Layers leave a running engine: one choice on all ranks, also after a resume; wrapped, odd and small models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.test_compression_layers import KEEP, STEPS, batch_of, plain, settings
from tests.parallel.test_compression_removal import engine_of, llama, state_of, train
from tests.parallel.tiny import said, with_words

TOTAL = 4


def influence(lines: list[str]) -> str:
    """The line that says what was seen of the blocks."""
    [line] = [line for line in lines if "influence of blocks" in line]
    return line


def layers_of(engine: Any) -> int:
    return len(engine.module.model.layers)


def one_choice(how: dict[str, Any]) -> tuple[float, ...]:
    """Names of the blocks that stay, and their weights, on each rank."""
    config = settings(3, keep_number_layer=2)
    config["zero_optimization"]["mics_shard_size"] = 1
    config["compression_training"] = how or config["compression_training"]
    with engine_of(config, llama(num_hidden_layers=TOTAL)) as engine:
        train(engine, range(STEPS))
        sums = getattr(engine.compression_scheduler.depth, "_sums", torch.zeros(1)).flatten().tolist()
        found = state_of(engine)
        return (*sums, *(value.double().sum().item() for value in found.values()))


def copies_agree() -> None:
    """Where the state exists twice, each copy sees its own batches."""
    shared = {"enabled": True, "criterion": "activation", "schedule_offset": 2, "method": "l1"}
    group = {"params": {"dense_ratio": 0.5}, "modules": ["down_proj"]}
    for how in ({}, {"sparse_pruning": {"shared_parameters": shared, "different_groups": {"s": group}}}):
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, one_choice(how))
        assert told[0] == told[1]


def test_copies_of_the_state_make_one_choice(workers: Any) -> None:
    workers(2).run(copies_agree, timeout=120)


class Branches(nn.Module):
    """Ranks take another branch each, and the last one is taken by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[dist.get_rank()](x)


def branches() -> None:
    import deepspeed

    shared = {"enabled": True, "criterion": "activation", "schedule_offset": 1, "method": "l1"}
    group = {"params": {"dense_ratio": 0.5}, "modules": ["branches"]}
    config = settings(1)
    config["compression_training"] = {"sparse_pruning": {"shared_parameters": shared, "different_groups": {"s": group}}}
    model = Branches()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    with engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        for name, param in model.named_parameters():
            assert not name.endswith("weight") or (param == 0).sum() == 8


def test_inputs_of_branches_that_other_ranks_take(workers: Any) -> None:
    workers(2).run(branches, timeout=60)


class Alike(nn.Module):
    """The same sums in three forms: weights [out, in], [in, out] and [out, in, 1, 1]."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(0)
        self.linear, self.turned, self.conv = nn.Linear(6, 4), Conv1D(4, 6), nn.Conv2d(6, 4, 1)
        with torch.no_grad():
            self.turned.weight.copy_(self.linear.weight.t())
            self.conv.weight.copy_(self.linear.weight[..., None, None])
            for bias in (self.linear.bias, self.turned.bias, self.conv.bias):
                assert bias is not None
                bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.turned(x) + self.conv(x.view(-1, 6, 1, 1)).view(-1, 4)


def one_mask_in_three_forms() -> None:
    import deepspeed

    shared = {"enabled": True, "criterion": "activation", "schedule_offset": 1, "method": "l1"}
    group = {"params": {"dense_ratio": 0.5}, "modules": ["linear", "turned", "conv"]}
    config = settings(1)
    config["compression_training"] = {"sparse_pruning": {"shared_parameters": shared, "different_groups": {"s": group}}}
    model = Alike()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    with engine:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank())) * torch.arange(1.0, 7.0)
        engine.backward(engine(x).square().mean())
        engine.step()
        masks = model.linear.weight != 0, (model.turned.weight != 0).t(), (model.conv.weight != 0).view(4, 6)
        assert masks[0].sum() == 12 and torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


def test_inputs_of_convolutions_and_turned_weights(workers: Any) -> None:
    workers(2).run(one_mask_in_three_forms, timeout=60)


def late(folder: str) -> None:
    """Saved before and within the steps over which influence is measured: the same is seen after a resume."""
    due = 12
    config = settings(2, keep_number_layer=2, schedule_offset=due)
    with said() as lines, engine_of(config, llama(num_hidden_layers=TOTAL)) as engine:
        for step in range(due):
            if step in (2, 4, 7, due - 1):
                engine.save_checkpoint(folder, tag=f"after{step}")
            train(engine, range(step, step + 1))
        assert layers_of(engine) == 2
    for saved in (2, 4, 7, due - 1):
        with said() as again, engine_of(config, llama(num_hidden_layers=TOTAL)) as engine:
            train(engine, range(20, 21))  # what was seen before the load does not count
            engine.load_checkpoint(folder, tag=f"after{saved}")
            train(engine, range(saved, due))
            assert layers_of(engine) == 2
        assert dist.get_rank() or influence(lines) == influence(again), saved


@pytest.mark.slow
def test_influence_after_a_resume(workers: Any, tmp_path: Path) -> None:
    workers(2).run(late, str(tmp_path), timeout=120)


def past(folder: str) -> None:
    """A run that had no layers to lose is gone on with when their step is over: none is picked before one is seen."""
    config = settings(2)
    shared = {"enabled": True, "schedule_offset": 0, "quantize_weight_in_forward": True}
    group = {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["down_proj"]}
    config["compression_training"] = {
        "weight_quantization": {"shared_parameters": shared, "different_groups": {"g": group}}
    }
    with engine_of(config, llama(num_hidden_layers=TOTAL)) as engine:
        train(engine, range(12))
        engine.save_checkpoint(folder, tag="x")
    config["compression_training"]["layer_reduction"] = {
        "enabled": True, "keep_number_layer": 2, "schedule_offset": 11,
    }  # fmt: skip
    with said() as lines, engine_of(config, llama(num_hidden_layers=TOTAL)) as engine:
        engine.load_checkpoint(folder, tag="x")
        train(engine, range(12, 13))
        assert layers_of(engine) == 2
    assert dist.get_rank() or "0: 0.000, 1: 0.000" not in influence(lines)


def test_none_leaves_unseen(workers: Any, tmp_path: Path) -> None:
    workers(2).run(past, str(tmp_path), timeout=60)


def never_in_training_mode() -> None:
    with said() as lines, engine_of(settings(2, keep_number_layer=2), llama(num_hidden_layers=TOTAL)) as engine:
        engine.module.model.layers.eval()
        train(engine, range(STEPS))
        assert layers_of(engine) == TOTAL
    assert dist.get_rank() or with_words(lines, "no call in training mode has shown the influence") == 1, lines


def test_blocks_that_are_never_seen_stay(workers: Any) -> None:
    workers(2).run(never_in_training_mode, timeout=60)


def test_what_overflows_does_not_count() -> None:
    """A block of which one step overflows in fp16 is judged by the others."""
    from deepspeed.compression.pruning.layer_selection import InfluenceWatch

    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    watch = InfluenceWatch(blocks, training=True)
    for x in (torch.ones(1, 2), torch.full((1, 2), torch.inf)):
        blocks[1](x) if x.isinf().any() else [block(x) for block in blocks]
    assert all(mean > 0 for mean in watch.means()) and watch.sums[1].tolist() == [1, 1]
    watch.remove()


class Block(nn.Module):
    """A scale without dimensions; called by name, with something else before the states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, place: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.scale * self.linear(hidden_states) + place.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(TOTAL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(place=torch.zeros(3), hidden_states=x)
        return x


def odd_blocks(stage: int) -> None:
    import deepspeed

    model = Net()
    config = settings(stage, module_name_prefix="blocks", keep_number_layer=2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    with engine:
        for _ in range(STEPS):
            engine.backward(engine(torch.linspace(-1, 1, 8).view(2, 4)).square().mean())
            engine.step()
        assert len(model.blocks) == 2


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_scales_without_dimensions_and_states_by_name(workers: Any, stage: int) -> None:
    workers(2).run(odd_blocks, stage, timeout=60)


class Around(nn.Module):
    """What a client wraps around a model; it may hold its teacher too."""

    def __init__(self, net: Any, teacher: Any = None) -> None:
        super().__init__()
        self.net, self.teacher = net, teacher

    def forward(self, **batch: Any) -> Any:
        return self.net(**batch)


def beside_a_teacher() -> None:
    """Of two models in one module the config of the one follows, and of it alone."""
    model = Around(llama(num_hidden_layers=TOTAL), llama(num_hidden_layers=TOTAL).requires_grad_(False))
    with engine_of(settings(2, teacher_layer=KEEP, module_name_prefix="net.model.layers"), model) as engine:
        train(engine, range(STEPS))
        assert (model.net.config.num_hidden_layers, model.teacher.config.num_hidden_layers) == (2, TOTAL)
        assert model.net.model.layers[1].self_attn.layer_idx == 1 and len(model.teacher.model.layers) == TOTAL


def students_of_the_old_calls() -> None:
    """`init_compression` has copied the layers: the same JSON takes none out, whatever is around the student since."""
    from deepspeed.compression import init_compression

    config = settings(2, teacher_layer=KEEP, schedule_offset=1)
    for size in (2, 3):
        student = init_compression(llama(num_hidden_layers=size), config, teacher_model=llama(num_hidden_layers=TOTAL))
        for module in (student, Around(student)):
            with engine_of(config, module) as engine:
                train(engine, range(2))
                assert len(student.model.layers) == size


def pairs_of_removals_before(folder: str) -> None:
    """Hidden states are paired by layers that `init_compression` copied, or that had left before the checkpoint."""
    from deepspeed.compression import init_compression

    config = settings(2, teacher_layer=[0, 3], schedule_offset=1)
    with engine_of(config, llama(num_hidden_layers=TOTAL)) as engine:
        train(engine, range(2))
        engine.save_checkpoint(folder)
    learning = {"enabled": True, "hidden": 1.0}
    distilled = copy.deepcopy(config)
    distilled["compression_training"]["distillation"] = learning
    alone = {**distilled, "compression_training": {"distillation": learning}}
    student = init_compression(llama(num_hidden_layers=2), distilled, teacher_model=llama(num_hidden_layers=TOTAL))
    resumed = [(alone, llama(num_hidden_layers=size), True) for size in (TOTAL, 2)]
    for block, module, loads in ((distilled, student, False), *resumed):
        with engine_of(block, module) as engine:
            if loads:
                engine.load_checkpoint(folder)
            engine.set_teacher(llama(num_hidden_layers=TOTAL))
            train(engine, range(1))
            distiller = engine._state.compression.distiller
            assert distiller._layers_of_outputs(2, TOTAL) == [2, 3] != distiller._layers(2, TOTAL)


def test_hidden_states_are_paired_by_removals_before(workers: Any, tmp_path: Path) -> None:
    workers(2).run(pairs_of_removals_before, str(tmp_path), timeout=60)


def teachers_of_the_old_calls() -> None:
    """Programs make an engine over the teacher with the student's JSON: no layer leaves the teacher."""
    from deepspeed.compression import init_compression

    config = settings(2, teacher_layer=KEEP, schedule_offset=1)
    teacher = llama(num_hidden_layers=TOTAL)
    init_compression(llama(num_hidden_layers=2), config, teacher_model=teacher)
    with engine_of(config, teacher) as engine:
        train(engine, range(2))
        assert len(teacher.model.layers) == TOTAL


def test_what_is_around_the_model(workers: Any) -> None:
    workers(2).run(beside_a_teacher, timeout=60)
    workers(2).run(students_of_the_old_calls, timeout=60)
    workers(2).run(teachers_of_the_old_calls, timeout=60)


def one_block_is_left() -> None:
    config = settings(2, teacher_layer=[0])
    config["compression_training"]["distillation"] = {"enabled": True, "teacher": "before", "layerwise": 0.5}
    with engine_of(config, llama(num_hidden_layers=TOTAL)) as engine:
        assert all(loss == loss for loss in train(engine, range(STEPS)))
        assert layers_of(engine) == 1


def test_one_block_learns_layer_by_layer(workers: Any) -> None:
    workers(2).run(one_block_is_left, timeout=60)


def other_numbers() -> None:
    from deepspeed.errors import DeepSpeedError

    given: tuple[tuple[dict[str, Any], str], ...] = (
        ({"keep_number_layer": 9}, "keep_number_layer is 9, and model.layers has 4 layers"),
        ({"keep_number_layer": 3, "teacher_layer": [0, 2]}, "not the number of layers that teacher_layer names, 2"),
        ({"teacher_layer": [0, 0, 1, 1]}, "name each layer that stays once, from 0"),
        ({"teacher_layer": [0, -1]}, "name each layer that stays once, from 0"),
    )
    for how, words in given:
        with pytest.raises(DeepSpeedError, match=words):
            engine_of(settings(2, **how), llama(num_hidden_layers=TOTAL))


def test_numbers_that_contradict_each_other(workers: Any) -> None:
    workers(1).run(other_numbers, timeout=60)


def at_step_0(folder: str, stage: int, every: bool) -> None:
    """Layers have left before a checkpoint can be loaded."""
    from deepspeed.errors import CheckpointError

    first = settings(stage, teacher_layer=KEEP, schedule_offset=0)
    dense = {key: value for key, value in first.items() if key != "compression_training"}
    with engine_of(dense, llama(num_hidden_layers=TOTAL)) as engine:
        train(engine, range(1))
        engine.save_checkpoint(folder, tag="dense")
    with engine_of(first, llama(num_hidden_layers=TOTAL)) as engine:
        with pytest.raises(CheckpointError, match="schedule_offset of 1 or more"):
            engine.load_checkpoint(folder, tag="dense")
    later = settings(stage, teacher_layer=KEEP, schedule_offset=1)
    with engine_of(later, llama(num_hidden_layers=TOTAL)) as engine:
        engine.load_checkpoint(folder, tag="dense")
        train(engine, range(1, 2))
        assert layers_of(engine) == 2
        engine.save_checkpoint(folder, tag="cut")
        expected = train(engine, range(2, 3))
    others = settings(stage, teacher_layer=[0, 3], schedule_offset=0)
    with engine_of(others, llama(num_hidden_layers=TOTAL)) as engine:
        with pytest.raises(
            CheckpointError, match=r"\[0, 3\].* stay in this engine, and .*\[0, 2\].* in the checkpoint"
        ):
            engine.load_checkpoint(folder, tag="cut")
    for config, layers in ((dense, TOTAL), (first, TOTAL), *([(dense, 2), (later, 2)] if every else [])):
        for tag in ("cut", "again"):  # what goes on knows what has left, and says it to the next
            with engine_of(copy.deepcopy(config), llama(num_hidden_layers=layers)) as engine:
                engine.load_checkpoint(folder, tag=tag)
                assert layers_of(engine) == 2
                engine.save_checkpoint(folder, tag="again")
                assert train(engine, range(2, 3)) == pytest.approx(expected, abs=1e-5), (config, layers, tag)


@pytest.mark.parametrize(
    ("stage", "every"), [(3, False), *(pytest.param(stage, True, marks=pytest.mark.slow) for stage in (0, 3))]
)
def test_checkpoints_of_other_shapes(workers: Any, stage: int, every: bool, tmp_path: Path) -> None:
    workers(2).run(at_step_0, str(tmp_path), stage, every, timeout=120)


def born_sharded(tier: str, folder: str) -> None:
    import deepspeed

    expected, _ = plain(KEEP)
    config = settings(3, teacher_layer=KEEP)
    if tier != "none":
        where = {"device": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
        config["zero_optimization"] |= {"offload_param": where, "offload_optimizer": where}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = llama(num_hidden_layers=TOTAL)
    with engine_of(config, model) as engine:
        found = train(engine, range(STEPS))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("tier", ["none", pytest.param("cpu", marks=pytest.mark.slow), "nvme"])
def test_models_born_sharded(workers: Any, tier: str, tmp_path: Path) -> None:
    workers(2).run(born_sharded, tier, str(tmp_path), timeout=60)


def adapters(stage: int, folder: str) -> None:
    """Layers leave under LoRA: what stays computes what plain Transformers computes with the exported folder."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(llama(num_hidden_layers=TOTAL), lora)
    config = settings(stage, teacher_layer=KEEP, module_name_prefix="base_model.model.model.layers")
    with engine_of(config, model) as engine:
        train(engine, range(STEPS))
        engine.export_compressed(folder)
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=batch_of(0, 0)).logits
    if dist.get_rank() == 0:
        small = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert small.config.num_hidden_layers == 2
        with torch.no_grad():
            assert torch.allclose(small(input_ids=batch_of(0, 0)).logits, logits, atol=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_under_adapters(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(adapters, stage, str(tmp_path / "small"), timeout=60)
