"""What users and clients call: consolidated weights, exports, imports, async saves, retention, client state, peers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from deepspeed.checkpoint import cli
from deepspeed.checkpoint.format import filesystem
from deepspeed.errors import CheckpointCorruptError, CheckpointError, CheckpointMissingError
from tests.harness.fresh import run_fresh
from tests.parallel.checkpointing import differences, everything, make, mixed, train
from tests.parallel.tiny import raises, start

STAGES = (0, 1, 2, 3)


# -- weights out ------------------------------------------------------------------------------------------------------


def weights_out(folder: str, stage: int, precision: str) -> dict[str, torch.Tensor] | None:
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    with make(stage, precision, zero=zero) as engine:
        train(engine, iter(engine.training_dataloader), 2)
        engine.save_checkpoint(folder, "tag", client_state={"a": 1})
        assert engine.save_16bit_model(folder) and engine.save_fp16_model(folder, "model.safetensors")
        state = engine._consolidated_16bit_state_dict()
        less = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if stage == 3:
            engine._zero3_consolidated_16bit_state_dict()
        else:
            with raises(ValueError, "stage 3"):
                engine._zero3_consolidated_16bit_state_dict()
        if dist.get_rank():
            assert state is None
            return None
        assert state["out.weight"] is state["embed.weight"] and not any(name.startswith("frozen") for name in less)
        assert list(state) == [n for n in mixed().state_dict() if n in state] and len(state) == len(
            mixed().state_dict()
        )
        return state


@pytest.mark.drawn(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_come_out_bit_equal(workers: Any, tmp_path: Path, stage: int, precision: str) -> None:
    state, _ = workers(2).run(weights_out, str(tmp_path), stage, precision, timeout=120)
    assert cli.main(["verify", str(tmp_path)]) == 0
    assert cli.main(["export", str(tmp_path), str(tmp_path / "hf"), "--max-shard-size", "300"]) == 0
    assert cli.main(["export", str(tmp_path), str(tmp_path / "pt"), "--to", "torch"]) == 0
    script = [str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "fp32")]
    run_fresh([f"import runpy, sys; sys.argv = {script}; runpy.run_path({script[0]!r}, run_name='__main__')"])
    exported: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "hf").glob("*.safetensors")):
        exported |= load_file(path)
    whole = torch.load(tmp_path / "pt" / "pytorch_model.bin", weights_only=True)
    fp32 = torch.load(tmp_path / "fp32" / "pytorch_model.bin", weights_only=True)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert exported.keys() == state.keys() - {"out.weight"}
    assert whole.keys() == fp32.keys() == saved.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(saved[name], tensor)
        assert torch.equal(whole[name].to(tensor.dtype), tensor) and torch.equal(fp32[name].to(tensor.dtype), tensor)
        assert name == "out.weight" or torch.equal(exported[name].to(tensor.dtype), tensor)
    order = [name for name in mixed().state_dict() if name != "out.weight"]  # further names of tied ones stand last
    assert list(whole) == list(fp32) == [*order, "out.weight"]
    assert whole["out.weight"].data_ptr() == whole["embed.weight"].data_ptr()
    model = mixed(7)
    model.load_state_dict(fp32)


def test_verify_and_diff_find_a_planted_flip(workers: Any, tmp_path: Path, capsys: Any) -> None:
    workers(2).run(weights_out, str(tmp_path / "a"), 2, "fp32", timeout=120)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    path = tmp_path / "b" / "tag" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert cli.main(["verify", str(tmp_path / "b")]) == 1 and "rank-00001" in capsys.readouterr().out
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    workers(2).run(weights_out, str(tmp_path / "c"), 3, "bf16", timeout=120)
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "elements differ" in capsys.readouterr().out
    assert cli.main(["ls", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.startswith("* tag: step 2")


def hugging_face(folder: str) -> dict[str, torch.Tensor] | None:
    import deepspeed

    model = tiny_llama()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    with engine:
        engine.save_checkpoint(folder)
        return engine._consolidated_16bit_state_dict()


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


FROM_PRETRAINED = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
assert "deepspeed" not in sys.modules
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.mark.slow  # exports have every bit above; that Transformers opens one: test_compression_handover.py
def test_an_export_opens_with_from_pretrained(workers: Any, tmp_path: Path) -> None:
    state, _ = workers(2).run(hugging_face, str(tmp_path / "saved"), timeout=60)
    assert cli.main(["export", str(tmp_path / "saved"), str(tmp_path / "hf"), "--dtype", "bf16"]) == 0
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", FROM_PRETRAINED, str(tmp_path / "hf"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


# -- weights in -------------------------------------------------------------------------------------------------------


def weights_in(folder: str, stage: int) -> None:
    wanted = mixed(9)
    path = Path(folder, "model.safetensors")
    if dist.get_rank() == 0:
        tensors = {name: tensor for name, tensor in wanted.state_dict().items() if name != "embed.weight"}
        save_file(tensors, path)
    dist.barrier()
    values = {name: p.detach() for name, p in wanted.named_parameters()} | dict(wanted.named_buffers())
    del values["scratch"]
    for load in ("pretrained", "state_dict", "module"):
        with make(stage) as engine:
            if load == "pretrained":
                assert engine.load_pretrained(folder) == sum(tensor.numel() for tensor in values.values())
            elif load == "module":
                engine.load_module_state_dict({"module": wanted.state_dict()})
            else:
                engine.load_state_dict(wanted.state_dict())
            now = everything(engine)
            assert all(torch.equal(now[name], tensor) for name, tensor in values.items())
            with raises(CheckpointError, "missing", "scale"):
                engine.load_state_dict({n: t for n, t in wanted.state_dict().items() if n != "scale"})
            keys = engine.load_state_dict({"odd": torch.zeros(5), "new": torch.ones(1)}, strict=False)
            assert "scale" in keys.missing_keys and keys.unexpected_keys == ["new"]
            with raises(CheckpointError, "odd: (4,)", "(5,)"):
                engine.load_state_dict({"odd": torch.zeros(4)}, strict=False)
            train(engine, iter(engine.training_dataloader), 1)


def weights_into_a_born_model(folder: str) -> None:
    import deepspeed
    from deepspeed.checkpoint.huggingface import load_pretrained

    wanted = {f"inner.{name}": tensor for name, tensor in torch.nn.Linear(6, 5).state_dict().items()}
    if dist.get_rank() == 0:
        save_file(wanted, Path(folder, "model.safetensors"))
    dist.barrier()
    outer = torch.nn.Module()
    with deepspeed.zero.Init():
        inner = torch.nn.Linear(6, 5)
    outer.inner = inner  # its parameters have another name now than the one they were born with
    assert load_pretrained(outer, folder) == 35
    with deepspeed.zero.GatheredParameters(list(outer.parameters())):
        assert all(torch.equal(p.detach(), wanted[name]) for name, p in outer.named_parameters())


def test_weights_go_into_a_model_that_is_born_sharded(workers: Any, tmp_path: Path) -> None:
    workers(1).run(weights_into_a_born_model, str(tmp_path), timeout=60)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_weights_go_in_whatever_is_sharded(workers: Any, tmp_path: Path, stage: int) -> None:
    workers(2).run(weights_in, str(tmp_path), stage, timeout=120)


# -- arguments of load ------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def arguments(folder: str) -> None:
    counter = Counter()
    with make(3, accumulation=2) as engine:
        engine.register_for_checkpointing(counter)
        train(engine, iter(engine.training_dataloader), 4)
        counter.count = 5
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
        saved, rate = everything(engine), engine.get_lr()
    with make(3, accumulation=2, seed=1) as engine:
        fresh = everything(engine)
        with raises(CheckpointError, "1 registered objects", "0"):
            engine.load_checkpoint(folder)
        assert not differences(everything(engine), fresh)  # refused before anything was changed
        engine.register_for_checkpointing(counter)
        counter.count = 0
        engine.load_checkpoint(folder, load_module_only=True)
        assert (engine.global_steps, counter.count, engine.get_lr() == rate) == (0, 0, False)
        now = everything(engine)
        assert torch.equal(now["frozen.weight"], fresh["frozen.weight"])  # the save left them out
        assert torch.equal(now["odd"], saved["odd"])
        engine.load_checkpoint(folder, load_optimizer_states=False)
        assert counter.count == 5 and engine.get_lr() == rate and engine.global_steps == 2
        engine.load_checkpoint(folder)
        names = [name for name in saved if not name.startswith("frozen.")]
        now = everything(engine)
        assert not [name for name in names if not torch.equal(now[name], saved[name])]

        def custom(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
            with torch.no_grad():
                dst.odd.copy_(src["odd"] + 1)

        engine.load_checkpoint(folder, custom_load_fn=custom, load_module_only=True)
        assert torch.equal(everything(engine)["odd"], saved["odd"] + 1)


def test_arguments_of_load(workers: Any, tmp_path: Path) -> None:
    workers(2).run(arguments, str(tmp_path), timeout=120)


def tags_differ(folder: str) -> None:
    tag = f"tag{dist.get_rank()}"
    with make(1, checkpoint={"tag_validation": "Fail"}) as engine:
        with raises(CheckpointError, "tag0, tag1", "tag_validation"):
            engine.save_checkpoint(folder, tag)


def test_tags_must_agree(workers: Any, tmp_path: Path) -> None:
    workers(2).run(tags_differ, str(tmp_path), timeout=120)
    assert not any(tmp_path.iterdir())


# -- async, retention, peers ------------------------------------------------------------------------------------------


class Failing(filesystem.FileSystem):
    def sync(self, fd: int) -> None:
        raise OSError(5, "planted")


def asynchronous(folder: str, stage: int) -> None:
    with make(stage, checkpoint={"async_save": True}) as engine:
        batches = iter(engine.training_dataloader)
        train(engine, batches, 1)
        wanted = everything(engine)
        average = torch.ones(3)
        engine.save_checkpoint(folder, "one", client_state={"average": average})
        average.zero_()
        place = engine._checkpoints._background._buffer.data_ptr()
        train(engine, batches, 2)  # the copy is what is written, whatever training does meanwhile
        engine.save_checkpoint(folder, "two")
        assert engine._checkpoints._background._buffer.data_ptr() == place
        _, client = engine.load_checkpoint(folder, "one")
        assert not differences(everything(engine), wanted) and torch.equal(client["average"], torch.ones(3))
        if dist.get_rank() == 1:
            filesystem.current = Failing()
        engine.save_checkpoint(folder, "three")
        with raises(CheckpointError, "was not saved", "planted"):
            engine.save_checkpoint(folder, "four")
        filesystem.current = filesystem.FileSystem()
        dist.barrier()
        assert Path(engine.load_checkpoint(folder)[0]).name == "two"


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_async_saves(workers: Any, tmp_path: Path, stage: int) -> None:
    workers(2).run(asynchronous, str(tmp_path), stage, timeout=120)


def retention(folder: str) -> None:
    with make(1, checkpoint={"keep_last": 2, "keep_every": 3}) as engine:
        batches = iter(engine.training_dataloader)
        Path(folder, "notes").mkdir(exist_ok=True)
        for _ in range(6):
            train(engine, batches, 1)
            engine.save_checkpoint(folder)


def test_retention_removes_what_it_is_asked_to(workers: Any, tmp_path: Path) -> None:
    workers(2).run(retention, str(tmp_path), timeout=120)
    found = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert found == {"notes", "global_step3", "global_step5", "global_step6"}


def private_disks(folder: str) -> None:
    own = Path(folder, f"disk{dist.get_rank()}")
    os.environ["LOCAL_RANK"] = "0"  # two nodes of one rank each
    try:
        with make(3, accumulation=2, checkpoint={"use_node_local_storage": True}) as engine:
            train(engine, iter(engine.training_dataloader), 3)
            engine.save_checkpoint(str(own), "tag", client_state={"x": torch.arange(3)})
            wanted = everything(engine)
        assert not (own / "tag" / f"rank-0000{1 - dist.get_rank()}.safetensors").exists()
        for stage in (3, 1):
            with make(stage, accumulation=2, seed=1) as engine:
                other = Path(folder, f"disk{1 - dist.get_rank()}")  # every rank has come to the other's disk
                _, client = engine.load_checkpoint(str(other))
                assert torch.equal(client["x"], torch.arange(3)) and not differences(everything(engine), wanted)
        dist.barrier()
        if dist.get_rank() == 0:
            (own / "tag" / "rank-00000.safetensors").unlink()
        dist.barrier()
        with make(1) as engine, raises(CheckpointMissingError, "rank-00000.safetensors", os.uname().nodename):
            engine.load_checkpoint(str(own), "tag")
    finally:
        os.environ["LOCAL_RANK"] = str(dist.get_rank())


def test_pieces_on_private_disks_come_through_peers(workers: Any, tmp_path: Path) -> None:
    workers(2).run(private_disks, str(tmp_path), timeout=120)


def damage_on_a_private_disk(folder: str) -> None:
    """Rank 1 reads a file for rank 0 that it does not need itself."""
    own, other = (Path(folder, f"disk{rank}") for rank in (dist.get_rank(), 1 - dist.get_rank()))
    os.environ["LOCAL_RANK"] = "0"
    try:
        with start(3, checkpoint={"use_node_local_storage": True}) as engine:
            engine.save_checkpoint(str(own), "tag")
            path = own / "tag" / "rank-00000.safetensors"
            if dist.get_rank() == 0:
                data = bytearray(path.read_bytes())
                data[-3] ^= 4
                path.write_bytes(data)
            dist.barrier()
            with raises(CheckpointCorruptError, path.name):
                engine.load_checkpoint(str(other), "tag")
    finally:
        os.environ["LOCAL_RANK"] = str(dist.get_rank())


def test_damage_that_a_peer_finds_is_raised_on_all_ranks(workers: Any, tmp_path: Path) -> None:
    workers(2).run(damage_on_a_private_disk, str(tmp_path), timeout=60)
