"""The plan as a table and as data: written, read again, edited by hand, and refused where it is not the model's."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.comm.process_groups.mesh import current_mesh, mesh_for
from deepspeed.errors import DeepSpeedError, TensorParallelError
from deepspeed.tensor_parallel.parallelize import cut_model
from deepspeed.tensor_parallel.plan import Spec, Specs, make_plan
from deepspeed.tensor_parallel.plan_file import read_plan, write_plan
from tests.parallel.dense import Dense, compared, momentum
from tests.parallel.tensor_runs import config_of, loss_of, model_of
from tests.parallel.tiny import raises, said

# Three matrices with shared heads, one fused head by head, Conv1D, gate beside up, experts, alibi, relative positions.
FAMILIES = ("Llama", "GPTNeoX", "GPT2", "Phi3", "Mixtral", "Bloom", "T5")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_plan_is_the_found_one(tmp_path: Path, family: str) -> None:
    model, path = model_of(family), tmp_path / "plan.json"
    written = write_plan(path, model, 2)
    for rank in range(2):
        found, read = make_plan(model, 2, rank), read_plan(path, model, 2, rank)
        assert read.table() == found.table() == written[rank].table()
        assert {u.name: [(r.shares, r.numbers) for r in u.regions] for u in read.units} == {
            u.name: [(r.shares, r.numbers) for r in u.regions] for u in found.units
        }
        assert read.drops == found.drops and read.shapes == found.shapes and read.declared == found.declared
    if family == "Llama":  # equal layers stand once
        assert [unit["modules"] for unit in json.loads(path.read_text())["units"]] == [
            ["model.layers.*.self_attn"], ["model.layers.*.mlp"],
        ]  # fmt: skip


def trained(path: str, stage: int, verify: str) -> None:
    """By the key of the JSON alone, on four ranks under data parallelism too."""
    import deepspeed

    model = model_of("Llama")
    dense = Dense(model, momentum, torch.distributed.get_world_size() // 2)
    config = config_of(stage, 2, tensor_parallel={"plan_file": path, "verify": verify})
    with said() as lines:
        engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
    rank = torch.distributed.get_rank()
    with raises(TensorParallelError, "strict_mode", "6 matrices", "mlp"):
        strict = {"plan_file": path, "verify": "off", "partition_config": {"strict_mode": True}}
        deepspeed.initialize(model=model_of("Llama"), config=config_of(stage, 2, tensor_parallel=strict))
    assert any("model.layers.*.self_attn.o_proj.weight (2)" in line for line in lines) is (rank == 0)
    with engine:
        assert model.model.layers[0].mlp.up_proj.weight.ds_shape == (48, 32)  # by the file's edit it stays whole
        assert model.model.layers[0].self_attn.q_proj.weight.ds_shape == (16, 32)
        for window in compared(engine, dense, current_mesh(), loss_of, 2):
            assert window[0] <= 2e-6 and max(window[1:]) <= 5e-6, window


@pytest.mark.parametrize(
    ("ranks", "verify"),  # what a comparison of units finds: below
    [(2, "off"), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((2, "units"), (4, "units"), (4, "off")))],
)
def test_a_plan_file_is_what_is_cut(workers: Any, tmp_path: Path, ranks: int, verify: str) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, model_of("Llama"), 2)
    plan = json.loads(path.read_text())
    plan["units"] = [unit for unit in plan["units"] if "mlp" not in unit["modules"][0]]
    plan["whole"]["model.layers.*.mlp.up_proj.weight"] = "its author wants it so"
    path.write_text(json.dumps(plan))
    read = read_plan(path, model_of("Llama"), 2, 0)
    assert sorted(set(read.whole.values())) == ["its author wants it so", "the plan file leaves it whole"]
    assert len(read.whole) == 6 and 0.5 < read.part() < 1
    workers(ranks).run(trained, str(path), 3, verify, timeout=60)


def test_equal_names_with_other_shares_stand_apart(tmp_path: Path) -> None:
    """One layer is of another width, one stays whole: a star would be of all."""
    model, path = model_of("Llama", num_hidden_layers=4), tmp_path / "plan.json"
    for name, size in (("gate_proj", (40, 32)), ("up_proj", (40, 32)), ("down_proj", (32, 40))):
        linear = torch.nn.Linear(size[1], size[0], bias=False)
        setattr(model.model.layers[1].mlp, name, linear)
    skip = Specs([Spec((re.compile(r"layers\.2\.mlp"),), "skip")])
    write_plan(path, model, 2, specs=skip)
    units = [unit["modules"] for unit in json.loads(path.read_text())["units"]]
    mlp = "model.layers.{}.mlp".format
    assert units == [["model.layers.*.self_attn"], [mlp(0), mlp(3)], [mlp(1)]], units
    assert read_plan(path, model, 2, 0).table() == make_plan(model, 2, 0, specs=skip).table()


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        plan = json.loads(path.read_text())
        change(plan)
        path.write_text(json.dumps(plan))

    return edit


def at(plan: Any, *way: Any) -> Any:
    for step in way:
        plan = plan[step]
    return plan


def put(*way: Any) -> Callable[[Path], None]:
    """The last of `way` is put where the others lead."""
    *place, key, value = way
    return edited(lambda plan: at(plan, *place).__setitem__(key, value))


ATTENTION = ("units", 0, "regions", 0)
Q = (*ATTENTION, "tensors", "q_proj.weight")
HALVES = {"dim": 0, "segments": [[[0, 1]], [[1, 1]]], "copied": False}
EQUAL = [[[0, 16]], [[16, 16]]]
MISTAKES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no file": (lambda path: path.unlink(), ("cannot be read", "No such file")),
    "no JSON": (lambda path: path.write_text("{"), ("no JSON",)),
    "no object": (lambda path: path.write_text("[]"), ("an object belongs here",)),
    "another version": (put("version", 2), ("version 1",)),
    "other ranks": (put("ranks", 4), ("4 ranks", "over 2")),
    "another class": (put("model", "GPT2LMHeadModel"), ("GPT2LMHeadModel", "LlamaForCausalLM")),
    "a word too much": (put("unit", []), ("'unit' is unknown",)),
    "a word too few": (edited(lambda plan: plan.pop("whole")), ("'whole' is missing",)),
    "no module": (put("units", 0, "modules", ["model.layers.7.self_attn"]), ("units[0].modules[0]", "layers.7")),
    "another shape": (put("units", 0, "shapes", "q_proj.weight", [32, 16]), ("[32, 16]", "[32, 32]", "layers.0")),
    "another parameter": (put("units", 0, "shapes", "x", [2]), ("'x'", "not in", "layers.0")),
    "no column": (put(*ATTENTION, "columns", ["r_proj.weight"]), ("'r_proj.weight' is no parameter",)),
    "no rows": (put(*ATTENTION, "rows", []), ("no rows",)),
    "a row that is none": (put(*ATTENTION, "channels", [[[0, 4]], [[4, 4]]]), ("channels are 8", "o_proj", "[32, 32]")),
    "a share for nobody": (put(*Q, "segments", [[[0, 16]], [[20, 12]]]), ("segments", "nobody has", "16")),
    "a share for two": (put(*Q, "segments", [[[0, 20]], [[16, 16]]]), ("two ranks have", "16")),
    "a share too small": (put(*Q, "segments", [[[0, 8]], [[8, 8]]]), ("16 of 32",)),
    "a rank without": (put(*Q, "segments", [[], [[0, 32]]]), ("each rank needs",)),
    "one rank's share": (put(*Q, "segments", [[[0, 32]]]), ("a list of 2",)),
    "the other dim": (put(*Q, "dim", 1), ("q_proj.weight", "dim 1")),
    "words for numbers": (put(*Q, "dim", "0"), ("'0' is no int",)),
    "no such number": (put(*ATTENTION, "numbers", [{"": {"heads": 1}}] * 2), ("has no number 'heads'",)),
    "twice": (edited(lambda plan: plan["units"].append(copy.deepcopy(plan["units"][0]))), ("already", "units[0]")),
    "a module twice": (
        put("units", 0, "modules", ["model.layers.*.self_attn", "model.layers.0.self_attn"]), ("already", "modules[0]"),
    ),
    "a row twice": (put(*ATTENTION, "rows", ["o_proj.weight"] * 2), ("o_proj.weight", "twice")),
    "a column without": (edited(lambda plan: at(plan, *Q[:-1]).pop(Q[-1])), ("'q_proj.weight' is missing",)),
    "a row's own share": (put(*Q[:-1], "o_proj.weight", {**HALVES, "segments": EQUAL}), ("is a row",)),
    "a home around nothing": (put(*ATTENTION, "home", "q_proj"), ("k_proj.weight", "home 'q_proj'")),
    "a copy beyond": (
        put(*Q, {"dim": 0, "segments": [[[0, 16]], [[100, 16]]], "copied": True}),
        ("115", "of 32"),
    ),
    "no dim": (put(*Q, "dim", -7), ("-7",)),
    "no dim of an argument": (put(*ATTENTION, "inputs", {"hidden_states": {**HALVES, "dim": -7}}), ("-7",)),
    "a dim no argument has": (put(*ATTENTION, "inputs", {"hidden_states": {**HALVES, "dim": 9}}), ("dim 9",)),
    "half an argument": (put(*ATTENTION, "inputs", {"hidden_states": HALVES}), ("2 of dim 0", "[1, 12, 32]")),
    "no such argument": (put(*ATTENTION, "inputs", {"nonsense.7": HALVES}), ("'nonsense.7'", "hidden_states")),
    "no such whole argument": (put(*ATTENTION, "partial_inputs", ["x.0"]), ("partial_inputs", "'x.0'")),
    "no heads": (put(*ATTENTION, "numbers", [{"": {"head_dim": 0}}, {}]), ("0 is no part of 8",)),
    "fewer than no heads": (put(*ATTENTION, "numbers", [{}, {"": {"head_dim": -4}}]), ("numbers[1]", "-4 is no part")),
    "all heads there are": (put(*ATTENTION, "numbers", [{"": {"head_dim": 10**30}}, {}]), ("no part of 8",)),
    "ranks and a half": (put("ranks", 2.0), ("2.0 is no int",)),
    "a reason for nothing": (put("whole", {"nonsense": "mine"}), ("whole", "'nonsense'")),
    "a reason for what is cut": (put("whole", {"model.layers.*.mlp.up_proj.weight": "mine"}), ("is split", "units[1]")),
    "nothing": (put("units", []), ("every matrix whole",)),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_a_file_that_is_not_the_models_is_refused(tmp_path: Path, what: str) -> None:
    path, (mistake, words) = tmp_path / "plan.json", MISTAKES[what]
    write_plan(path, model_of("Llama"), 2)
    mistake(path)
    with raises(TensorParallelError, "tensor_parallel.plan_file", str(path), *words):
        read_plan(path, model_of("Llama"), 2, 0)


def differs(path: str) -> None:
    """Wrong on one rank, and what only the comparison of units sees: all ranks end."""
    import deepspeed

    rank = torch.distributed.get_rank()
    cases = [
        ("", DeepSpeedError, ("rank 1", "cannot be read")),
        ("-swapped", TensorParallelError, ("'model.layers.0.self_attn'", "gives other results")),
        ("-numbers", TensorParallelError, ("'model.layers.0.self_attn'", "rank 0")),
        ("-apart", TensorParallelError, ("ranks 0 and 1 have different plans",)),
    ]
    for name, kind, words in cases:
        model = model_of("Llama")
        first, second = {"": ("", "-nowhere"), "-apart": ("", "-numbers")}.get(name) or (name, name)
        own = path + (second if rank else first)
        with raises(kind, *words):
            config = config_of(0, 2, tensor_parallel={"plan_file": own})
            deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)


def test_what_a_reader_cannot_see_the_comparison_does(workers: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, model_of("Llama"), 2)
    plan = json.loads(path.read_text())
    at(plan, *ATTENTION, "tensors")["k_proj.weight"]["segments"].reverse()
    Path(f"{path}-swapped").write_text(json.dumps(plan))
    plan = json.loads(path.read_text())
    at(plan, *ATTENTION)["numbers"][0][""] = {"head_dim": 4}
    Path(f"{path}-numbers").write_text(json.dumps(plan))
    workers(2).run(differs, str(path), timeout=60)


def test_the_models_own_plan_is_compared() -> None:
    for family in ("Llama", "GPTNeoX", "Mixtral", "GPT2"):
        plan = make_plan(model_of(family), 2, 0)
        assert bool(plan.declared) is (family != "GPT2") and "own plan" not in plan.table()
        assert all(plan.cuts()[name] == how for name, how in plan.declared.items() if "layers" in name)
    model = model_of("Llama")
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.down_proj": "colwise", "model.norm": "rowwise"}
    table = " ".join(make_plan(model, 2, 0).table().split())
    assert "model.layers.*.mlp.down_proj.weight (2) row its model's own plan splits it by column" in table, table
    assert table.count("own plan") == 1


class Spare(torch.nn.Module):
    """Some outputs of a matrix that nobody reads: cut, they would be on no rank."""

    example_input_array = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))

    def __init__(self) -> None:
        super().__init__()
        pair = {"up": torch.nn.Linear(8, 14), "down": torch.nn.Linear(12, 8)}
        self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict(copy.deepcopy(pair)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](torch.tanh(block["up"](x)[..., :12]))  # type: ignore[index]
        return x


def test_what_nobody_reads_is_not_lost(tmp_path: Path) -> None:
    plan = make_plan(Spare(), 2, 0)
    for unit in plan.units:
        for one in unit.regions:
            for name, share in one.shares.tensors.items():
                size = plan.shapes[f"{unit.name}.{name}" if unit.name else name][max(share.dim, 0)]
                assert share.copied or sum(n for part in share.segments for _, n in part) == size, (name, share)
    write_plan(tmp_path / "plan.json", Spare(), 2)
    assert read_plan(tmp_path / "plan.json", Spare(), 2, 1).table() == plan.table()


def test_channels_in_several_runs_are_counted_whole(tmp_path: Path) -> None:
    """Ranks take quarters of the channels in turns, by hand."""
    model, path = model_of("Llama"), tmp_path / "plan.json"
    write_plan(path, model, 2)
    plan = json.loads(path.read_text())
    region = at(plan, "units", 1, "regions", 0)
    quarter = model.config.intermediate_size // 4
    region["channels"] = [[[at * quarter, quarter], [(at + 2) * quarter, quarter]] for at in range(2)]
    for share in region["tensors"].values():
        share["segments"] = region["channels"]
    path.write_text(json.dumps(plan))
    read, found = read_plan(path, model, 2, 0), make_plan(model, 2, 0)
    assert read.held(0) == found.held(0) and read.part() == found.part()
    halves = f"{2 * quarter}/{2 * quarter} in 2 runs"
    assert [what for name, _, what in read.rows() if "mlp" in name] == [halves] * 3


class Block(torch.nn.Module):
    """Reads how many heads it has only where nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.heads = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), 4

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        each = torch.tanh(self.up(x)).unflatten(-1, (self.heads, -1) if mask is None else (-1, 4))
        return self.down((each / each.norm(dim=-1, keepdim=True)).flatten(-2))


class Blocks(torch.nn.Module):
    """Calls its blocks in two ways; a rank may leave the second out."""

    example_input_array = {"input_ids": torch.arange(10)[None]}

    def __init__(self, ignores: bool = False) -> None:
        super().__init__()
        self.tokens, self.ignores = torch.nn.Embedding(20, 8), ignores
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.ignores:
            attention_mask = None
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = x + block(x, None if attention_mask is None else attention_mask.float())
        return x


def two_ways(path: str) -> None:
    axis = mesh_for({"tp": 2}).axis("tp")
    with raises(TensorParallelError, "'blocks.0'", "way 1 of 2"):
        cut_model(Blocks(), axis, plan_file=path)
    for ignoring in (0, 1):
        model = Blocks(ignores=axis.rank == ignoring)
        with said() as lines:
            plan = cut_model(model, axis)
        assert not any(unit.calls for unit in plan.units)
        assert axis.rank or any("in 1 of its ways" in line for line in lines), lines


def test_both_ways_of_calling_a_unit_are_compared(workers: Any, tmp_path: Path) -> None:
    """One of them alone would not show that a number is wrong; and ranks that have seen other ways end together."""
    path = tmp_path / "plan.json"
    write_plan(path, Blocks(), 2)
    plan = json.loads(path.read_text())
    assert at(plan, *ATTENTION)["numbers"] == [{"": {"heads": 2}}] * 2
    at(plan, *ATTENTION)["numbers"] = [{}, {}]
    path.write_text(json.dumps(plan))
    workers(2).run(two_ways, str(path), timeout=30)
