"""Records what public calls compute, bit by bit, so that two trees can be compared.

    PYTHONPATH=TREE python tests/equivalence/record.py record FILE      # with the package of that tree
    python tests/equivalence/record.py compare FILE FILE
    PYTHONPATH=TREE python tests/equivalence/record.py load FILE FOLDER  # goes on from checkpoints of another tree

Only `deepspeed`'s public names are used, so one file runs with trees of different inner names. A record is digests:
losses, gradient norms, masters, moments, files of checkpoints, bytes of state, tokens, logits, estimates. Two
records of one machine are equal where the package computes the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

PORT = 29871
STEPS = 3


def digest(*values: Any) -> str:
    """A short digest of tensors, numbers, texts and nests of them."""
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous()
            sha.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            sha.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            sha.update(digest(*itertools.chain(*sorted(value.items(), key=lambda item: str(item[0])))).encode())
        elif isinstance(value, (list, tuple)):
            sha.update(digest(*value).encode())
        else:
            sha.update((value.hex() if isinstance(value, float) else str(value)).encode())
    return sha.hexdigest()[:16]


class Tiny(nn.Module):
    """Blocks of two matrices, a tied head, a norm, a frozen buffer of its own."""

    def __init__(self, width: int = 24, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def llama(layers: int = 2) -> nn.Module:
    """A small Llama of Transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def batches(rank: int, rows: int = 2, length: int = 8) -> Iterator[torch.Tensor]:
    """Tokens of a rank."""
    draw = torch.Generator().manual_seed(100 + rank)
    while True:
        yield torch.randint(0, 40, (rows, length), generator=draw)


def json_of(stage: int, **blocks: Any) -> dict[str, Any]:
    """A configuration."""
    zero = {"stage": stage, "reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 100} | blocks.pop(
        "zero", {}
    )
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}},
        "zero_optimization": zero,
    }
    return base | blocks


def train(engine: Any, rank: int, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """A few steps; what they computed."""
    import deepspeed

    told: dict[str, Any] = {"losses": [], "norms": []}
    stream = batches(rank)
    for _ in range(STEPS * 2):
        loss = call(engine, next(stream))
        engine.backward(loss)
        engine.step()
        told["losses"].append(float(loss))
        told["norms"].append(str(engine.get_global_grad_norm()))
    masters, moments = [], []
    for name, param in engine.module.named_parameters():
        masters.append((name, deepspeed.utils.safe_get_full_fp32_param(param)))
        moments.append((name, deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg_sq")))
    told |= {"masters": digest(masters), "moments": digest(moments), "lr": engine.get_lr()}
    told["state_bytes"] = engine.state_bytes()
    told["zero_report"] = engine.zero_report()
    return told


def files_of(folder: str) -> dict[str, str]:
    """Digests of a checkpoint's files, without those that hold times."""
    digests = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".json":
                with contextlib.suppress(ValueError):
                    data = json.dumps(_timeless(json.loads(data)), sort_keys=True).encode()
            digests[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()[:16]
    return digests


def _timeless(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _timeless(value) for key, value in node.items() if key not in ("saved_at", "crc32")}
    return [_timeless(value) for value in node] if isinstance(node, list) else node


ZERO_CELLS = {
    f"stage {stage} {precision} {tier}": json_of(
        stage,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        zero={"offload_optimizer": {"device": tier, **({"nvme_path": "NVME"} if tier == "nvme" else {})}}
        | (
            {"offload_param": {"device": tier, **({"nvme_path": "NVME"} if tier == "nvme" else {})}}
            if stage == 3
            else {}
        )
        if tier != "device"
        else {},
    )
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16", "fp16")
    for tier in ("device", "cpu", "nvme")
    if tier == "device" or stage > 0
}
ZERO_CELLS |= {
    "stage 3 muon": json_of(3, optimizer={"type": "Muon", "params": {"lr": 1e-2}}),
    "stage 2 lamb": json_of(2, optimizer={"type": "Lamb", "params": {"lr": 1e-2}}, gradient_clipping=0.0),
    "stage 2 lion": json_of(2, optimizer={"type": "Lion", "params": {"lr": 1e-3}}),
    "stage 1 adagrad": json_of(1, optimizer={"type": "Adagrad", "params": {"lr": 1e-2}}),
    "stage 3 unclipped": json_of(3, gradient_clipping=0.0),
    "stage 3 profile": json_of(3, memory_breakdown=True, wall_clock_breakdown=True),
}


def zero_cell(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Training of the tiny model, a checkpoint, and the steps after it is loaded."""
    import deepspeed

    config = json.loads(json.dumps(ZERO_CELLS[name]).replace("NVME", f"{folder}/nvme"))
    torch.manual_seed(3)
    engine, *_ = deepspeed.initialize(model=Tiny(), config=config)
    told = train(engine, rank, lambda engine, tokens: engine(tokens, tokens))
    engine.save_checkpoint(f"{folder}/{name.replace(' ', '_')}", tag="t", client_state={"a": 1})
    told["memory"] = sorted(engine.memory_by_category())  # names: what a heap holds differs from run to run
    engine.destroy()
    torch.distributed.barrier()
    if rank == 0:
        told["files"] = files_of(f"{folder}/{name.replace(' ', '_')}")
    return told | _resumed(rank, name, folder)


def _resumed(rank: int, name: str, folder: str) -> dict[str, Any]:
    import deepspeed

    config = json.loads(json.dumps(ZERO_CELLS[name]).replace("NVME", f"{folder}/nvme"))
    torch.manual_seed(4)
    engine, *_ = deepspeed.initialize(model=Tiny(), config=config)
    engine.load_checkpoint(f"{folder}/{name.replace(' ', '_')}")
    told = train(engine, rank, lambda engine, tokens: engine(tokens, tokens))
    engine.destroy()
    return {"resumed": told}


MODEL_CELLS: dict[str, dict[str, Any]] = {
    "tensor 2 stage 1": json_of(1, tensor_parallel={"autotp_size": 2}),
    "tensor 2 stage 0 bf16": json_of(0, tensor_parallel={"autotp_size": 2}, bf16={"enabled": True}),
    "sequence 2 stage 3": json_of(3, sequence_parallel_size=2),
    "stage 3 llama": json_of(3),
    "stage 2 llama recomputed": json_of(2, activation_checkpointing={"partition_activations": True}),
    "pipeline 2 1f1b": json_of(1, pipeline={"stages": 2}),
    "pipeline 2 gpipe": json_of(0, pipeline={"stages": 2, "schedule": "gpipe"}),
    "pipeline 2 zero-bubble": json_of(0, pipeline={"stages": 2, "schedule": "zero_bubble"}),
}


def model_cell(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Training of a small Llama over a mesh."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=llama().train(), config=MODEL_CELLS[name])
    if "pipeline" in name:
        told: dict[str, Any] = {"losses": []}
        stream = batches(0)
        for _ in range(STEPS):
            data = iter([{"input_ids": tokens, "labels": tokens} for tokens in itertools.islice(stream, 2)])
            told["losses"].append(float(engine.train_batch(data)))
        told["parameters"] = digest([(name, param.detach()) for name, param in engine.module.named_parameters()])
    else:
        told = train(
            engine, 0 if "2 stage" in name else rank,
            lambda engine, tokens: engine(input_ids=tokens, labels=tokens).loss,
        )  # fmt: skip
    engine.destroy()
    return told


def inference_cell(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Tokens: greedy, drawn, batched; weights in int8 and int4."""
    import deepspeed

    told: dict[str, Any] = {}
    prompts = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(2))
    for label, config in {
        "fp32": {"dtype": "fp32"},
        "bf16": {"dtype": "bf16"},
        "injected": {"replace_with_kernel_inject": True, "dtype": "fp32"},
    }.items():
        engine = deepspeed.init_inference(llama(), config)
        told[label] = digest(engine.generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0))
        with torch.no_grad():
            told[f"{label} logits"] = digest(engine(prompts).logits)
    from deepspeed.inference import generator

    sampling = getattr(generator, "SamplingParams", None) or vars(generator)["Sampling"]
    for label, options in {"greedy": {}, "drawn": {"temperature": 0.8, "seed": 3}}.items():
        rows = [row.tolist() for row in prompts]
        told[label] = generator.Generator(llama()).generate(rows, sampling(max_new_tokens=10, **options))
    return told


def estimates_cell(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Estimates."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live

    told: dict[str, Any] = {}
    for estimate in (estimate_zero3_model_states_mem_needs_all_live, estimate_zero2_model_states_mem_needs_all_live):
        with contextlib.redirect_stdout(out := io.StringIO()):
            estimate(Tiny(), num_gpus_per_node=4)
        told[estimate.__name__] = digest(out.getvalue())
    return told


CELLS: dict[str, Callable[[int, str, str], dict[str, Any]]] = {
    **{name: zero_cell for name in ZERO_CELLS},
    **{name: model_cell for name in MODEL_CELLS},
}
ALONE: dict[str, Callable[[int, str, str], dict[str, Any]]] = {"inference": inference_cell, "estimates": estimates_cell}


def _rank(rank: int, world: int, port: int, cells: dict[str, Any], folder: str, out: str) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world),
    }  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed()
    told: dict[str, Any] = {}
    for name, cell in cells.items():
        deepspeed.runtime.utils.set_random_seed(5 + rank)  # states of generators are in checkpoints
        try:
            told[name] = cell(rank, name, folder)
        except Exception as error:
            told[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            traceback.print_exc()
        if rank == 0:
            print(name, "·", digest(json.dumps(told[name], default=str)), flush=True)
    Path(f"{out}.{rank}").write_text(json.dumps(told, indent=1, default=str))
    torch.distributed.barrier()


def run(cells: dict[str, Any], world: int, folder: str, out: str) -> dict[str, Any]:
    """Records of cells by rank."""
    mp.spawn(_rank, (world, PORT + world, cells, folder, out), nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
    told = {f"rank {rank}": json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)}
    for rank in range(world):
        Path(f"{out}.{rank}").unlink()
    return told


def compare(first: Any, second: Any, path: str = "") -> Iterator[str]:
    """Places where two records differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            if key not in first or key not in second:
                yield f"{path}/{key}: only in the {'second' if key not in first else 'first'}"
            else:
                yield from compare(first[key], second[key], f"{path}/{key}")
    elif first != second:
        yield f"{path}: {first} != {second}"


def main(arguments: list[str]) -> int:
    """The command line."""
    action, *paths = arguments
    if action == "compare":
        records = [json.loads(Path(path).read_text()) for path in paths]
        differences = list(compare(*records))
        print("\n".join(differences) or "equal")
        return bool(differences)
    folder = paths[1] if len(paths) > 1 else tempfile.mkdtemp()
    if action == "load":
        record = {"two ranks": run({name: _resumed_of for name in ZERO_CELLS}, 2, folder, paths[0])}
    else:
        record = {"two ranks": run(CELLS, 2, folder, paths[0]), "alone": run(ALONE, 1, folder, paths[0])}
    Path(paths[0]).write_text(json.dumps(record, indent=1))
    return 0


def _resumed_of(rank: int, name: str, folder: str) -> dict[str, Any]:
    return _resumed(rank, name, folder)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
