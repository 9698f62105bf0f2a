"""Some steps of the byte-level language model of `make train` on one mesh, which the command line names.

deepspeed --num_gpus 4 examples/meshes/train.py --mesh '{"tp": 2}'
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DistributedSampler
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import deepspeed
from deepspeed import comm
from deepspeed.comm.process_groups.mesh import current_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bytes_lm"))
from corpus import VOCABULARY, Windows, library_files, split  # noqa: E402


def build_model(width: int, sequence: int) -> GPTNeoForCausalLM:
    """The same random weights on every rank, without dropout."""
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_layers=4, num_heads=4, attention_types=[[["global"], 4]],
        max_position_embeddings=sequence, embed_dropout=0.0, attention_dropout=0.0, resid_dropout=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPTNeoForCausalLM(config)


def received_by_axis() -> dict[str, int]:
    """Bytes that came from the other ranks of each axis of the mesh, as the comms logger has counted them."""
    mesh = current_mesh()
    axes = {"dp": mesh.axis("dp_replicate", "dp_shard").ranks, "tp": mesh.axis("tp").ranks}
    found = {name: comm.comms_logger.received.pop(ranks, 0) for name, ranks in axes.items()}
    return {**found, "other": sum(comm.comms_logger.received.values())}  # such as all ranks, for the norm


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, and say what came out.

    Returns:
        On the first rank: loss of every step, tokens per second, bytes of state on the fullest rank, and bytes that a
        rank is sent in one step, by axis.
    """
    text, _ = split(library_files())
    windows = Windows(text, arguments.sequence, arguments.steps * arguments.batch * arguments.sequence, seed=0)
    model = build_model(arguments.width, arguments.sequence)
    config = {
        "train_batch_size": arguments.batch,
        "mesh": json.loads(arguments.mesh),
        "zero_optimization": {"stage": arguments.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    # Ranks that share matrices see the same samples: samples are dealt to data-parallel coordinates.
    sampler = DistributedSampler(windows, engine.dp_world_size, engine.get_data_parallel_rank(), shuffle=False)
    loader = torch.utils.data.DataLoader(windows, arguments.batch // engine.dp_world_size, sampler=sampler)
    losses, started, received = [], 0.0, {}
    for step, batch in enumerate(loader):
        if step == 1:
            started = time.perf_counter()
        if step == arguments.steps - 1:
            comm.comms_logger.reset()
            comm.comms_logger.enabled = True
        logits = engine(input_ids=batch[:, :-1].to(engine.device)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().to(engine.device))
        engine.backward(loss)
        engine.step()
        if comm.comms_logger.enabled:
            comm.comms_logger.enabled, received = False, received_by_axis()
        every = loss.detach().clone()
        comm.all_reduce(every)
        losses.append(float(every) / comm.get_world_size())
    seconds = time.perf_counter() - started
    held = torch.tensor(float(sum(engine.state_bytes().values())))
    comm.all_reduce(held, op=comm.ReduceOp.MAX)
    first = engine.global_rank == 0
    engine.destroy()
    tokens = (len(losses) - 1) * arguments.batch * arguments.sequence
    row = {"losses": losses, "tokens_per_s": tokens / seconds, "bytes": held.item(), "received": received}
    return row if first else {}


def main() -> None:
    """Train, then write the row or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="{}", help="JSON: ranks along each axis, as the key `mesh` takes them")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one step, over all ranks")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--result", type=Path, help="a file for the row")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    row = train(arguments)
    if row and arguments.result:
        arguments.result.write_text(json.dumps(row))
    elif row:
        print(f"loss {row['losses'][0]:.4f} → {row['losses'][-1]:.4f}, {row['tokens_per_s']:.0f} tokens/s, "
              f"{row['bytes'] / 1e6:.1f} MB of state on the fullest rank")  # fmt: skip


if __name__ == "__main__":
    main()
