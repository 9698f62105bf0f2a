"""The runner on a program of its own, and, slow, every row of the table where a checkout of the examples is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.programs import environment, run, stand_ins
from tests.programs.page import difference, page
from tests.programs.table import PROGRAMS, Program

CHECKOUT = os.environ.get("DEEPSPEED_EXAMPLES")
TRAINS = """
import argparse, torch, deepspeed
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="nccl")
torch.cuda.set_device(args.local_rank)
device = torch.device("cuda", args.local_rank)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1).to(device)
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
start = torch.cuda.Event(enable_timing=True)
start.record()
while True:
    loss = engine(torch.ones(2, 4, device="cuda")).square().mean()
    engine.backward(loss)
    engine.step()
"""
JSON = '{"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}'


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two programs, run by the interpreter that is here, without stand-ins."""
    folder = tmp_path / "checkout" / "training" / "line"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAINS)
    (folder / "ds.json").write_text(JSON)
    (folder / "later.py").write_text("from deepspeed import DeepSpeedTransformerLayer\n")
    monkeypatch.setattr(environment, "interpreter", lambda _: Path(sys.executable))
    monkeypatch.setattr(stand_ins, "make", lambda _: folder)
    return tmp_path / "checkout"


def test_a_program_trains_unedited_and_its_losses_are_kept(checkout: Path, tmp_path: Path) -> None:
    row = Program("line", "training/line", "train.py --deepspeed --deepspeed_config ds.json", steps=3, seconds=120)
    result = run.run(row, checkout, tmp_path / "work", "here", 29811)
    assert (result["outcome"], result["steps"]) == ("trains", 3), result
    first, *_, last = result["losses"]
    assert len(result["losses"]) == 3 and last < first
    assert not list((checkout / "training" / "line").glob("record"))  # what a program writes is not in the checkout


def test_a_refusal_counts_only_with_its_words(checkout: Path, tmp_path: Path) -> None:
    row = Program("later", "training/line", "later.py", "refused", "fused transformer layers", "a reason", ranks=0)
    assert run.run(row, checkout, tmp_path / "work", "here")["outcome"] == "refused"
    other = Program("later", "training/line", "later.py", "refused", "mixture of experts", "a reason", ranks=0)
    result = run.run(other, checkout, tmp_path / "work", "here")
    assert result["outcome"] == "fails" and "DeepSpeedTransformerLayer" in result["error"]


def test_names_of_rows_are_unique() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names)


def test_the_page_says_how_far_losses_differ(tmp_path: Path) -> None:
    assert difference([1.0, 0.5], [1.0, 0.5]) == "0"
    assert difference([1.0, 0.5], [1.0, 0.4]) == "2.5e-01"
    assert difference([1.0], [1.0, 0.4]) == "1 and 2 losses"
    assert "not run" in page(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="DEEPSPEED_EXAMPLES names no checkout of DeepSpeedExamples")
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name.replace(" ", "_") for program in PROGRAMS])
def test_a_program_of_the_examples(program: Program, tmp_path_factory: pytest.TempPathFactory) -> None:
    work = Path(os.environ.get("PROGRAMS_WORK") or tmp_path_factory.getbasetemp() / "programs")
    result = run.run(program, Path(CHECKOUT or ""), work, "here")
    assert result["outcome"] == program.expected, result
