"""Supervised fine-tuning of a trained model in every way, against one process of plain torch: losses of every step.

`python -m benchmarks.sft --model FOLDER` (a Hugging Face folder with a chat template; three key-value heads for `tp 3`)
trains on the chats of `examples/sft/chats.py`, in fp32, and prints the largest difference of each way's losses. A step
is two chats: one for each of two ranks, both for the ranks of tensor and pipeline parallelism. Losses that are there
already are not computed again: a run that was cut off goes on with the way it was at.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":  # as a worker, a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPOSITORY, World, print_table, serve, start_world, write_json

sys.path.insert(0, str(REPOSITORY / "examples" / "sft"))
from chats import chats

BAR = 1e-4  # nats, at every step
CLIP = 1.0
ROWS = 2
SMALL = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 10_000_000,
    "stage3_max_reuse_distance": 0,
}
LORA = 8


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Keys of the JSON for a stage at which a small model is sharded too."""
    return {"zero_optimization": {"stage": stage, **(SMALL if stage == 3 else {}), **more}}


def nvme(folder: str) -> dict[str, Any]:
    """Stage 3 with all state in a file."""
    place = {"device": "nvme", "nvme_path": folder}
    return zero(3, offload_optimizer=place, offload_param={**place, "max_in_cpu": 0})


# name: (ranks, keys of the JSON, what it is compared with); `plain` and its like know nothing of this package
WAYS: dict[str, tuple[int, dict[str, Any], str]] = {
    "plain": (1, {}, "plain"),
    "plain, two backwards": (1, {}, "plain"),
    "plain LoRA": (1, {}, "plain LoRA"),
    "stage 0": (2, zero(0), "plain"),
    "stage 1": (2, zero(1), "plain"),
    "stage 2": (2, zero(2), "plain"),
    "stage 3": (2, zero(3), "plain"),
    "cpu offload": (2, zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}), "plain"),
    "nvme offload": (2, nvme("NVME"), "plain"),
    "LoRA, stage 3": (2, zero(3), "plain LoRA"),
    "tp 3": (3, {**zero(1), "tensor_parallel": {"autotp_size": 3}}, "plain"),
    "pp 3": (3, {**zero(1), "pipeline": {"stages": 3}}, "plain"),
}


def rows_of(folder: str, steps: int, length: int) -> list[dict[str, Tensor]]:
    """A batch for each step: int64 [2, length]; labels of -100 stand for prompt and padding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows: list[tuple[list[int], list[int], list[int]]] = []
    for chat in chats():
        messages = chat["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)[:length]
        fill = length - len(tokens)
        if len(prompt) < len(tokens):
            labels = [-100] * len(prompt) + tokens[len(prompt) :] + [-100] * fill
            rows.append((tokens + [pad] * fill, [1] * len(tokens) + [0] * fill, labels))
        if len(rows) == ROWS * steps:
            break
    names = ("input_ids", "attention_mask", "labels")
    batches = [zip(*rows[at : at + ROWS], strict=True) for at in range(0, len(rows), ROWS)]
    return [dict(zip(names, map(torch.tensor, parts), strict=True)) for parts in batches]


def part(batch: dict[str, Tensor], row: int) -> dict[str, Any]:
    """One chat of a step, with the argument that makes the model's loss a sum."""
    return {name: values[row : row + 1] for name, values in batch.items()} | {"num_items_in_batch": 1}


def items_of(batch: dict[str, Any]) -> int:
    """Tokens that count."""
    return int((batch["labels"][:, 1:] != -100).sum())


def build(setup: dict[str, Any]) -> Any:
    """The model in fp32, with adapters for LoRA."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32).train()
    if "LoRA" in setup["way"]:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=LORA, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


Step = Callable[[dict[str, Tensor]], float]


def plain(setup: dict[str, Any]) -> tuple[Step, Callable[[], None]]:
    """A step of torch alone, and what ends it."""
    model, apart = build(setup), "two" in setup["way"]
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=setup["rate"], weight_decay=0.0)

    def step(batch: dict[str, Tensor]) -> float:
        total = 0.0
        for micro in [part(batch, row) for row in range(ROWS)] if apart else [{**batch, "num_items_in_batch": 1}]:
            loss = model(**micro).loss / items_of(batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, lambda: None


def sharded(setup: dict[str, Any], rank: int) -> tuple[Step, Callable[[], None]]:
    """A step of an engine, and what ends it."""
    import deepspeed

    model, config = build(setup), copy.deepcopy(setup["config"])
    stages, slices = "pipeline" in config, "tensor_parallel" in config
    config |= {
        "train_micro_batch_size_per_gpu": ROWS if slices else 1,
        "gradient_accumulation_steps": ROWS if stages else 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": setup["rate"], "weight_decay": 0.0}},
        "steps_per_print": 10**9,
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)

    def step(batch: dict[str, Tensor]) -> float:
        if stages:
            return engine.train_batch(iter([part(batch, row) for row in range(ROWS)]), num_items=items_of).item()
        micro = {**batch, "num_items_in_batch": 1} if slices else part(batch, rank)
        loss = engine(**micro).loss
        engine.backward(loss, num_items=items_of(micro))
        engine.step()
        total = torch.tensor([loss.item(), items_of(micro)], dtype=torch.float64)
        if not slices:
            torch.distributed.all_reduce(total)
        return float(total[0] / total[1])

    return step, engine.destroy


def handler(**setup: Any) -> Callable[..., Any]:
    """In a worker: each message is a way, answered by its losses and the CPU seconds of its steps."""
    rank, ranks = start_world()
    batches = rows_of(setup["model"], setup["steps"], setup["length"])

    def answer(way: str, config: dict[str, Any], rate: float) -> tuple[list[float], float]:
        torch.manual_seed(0)
        told = {**setup, "way": way, "config": config, "rate": rate}
        step, close = plain(told) if ranks == 1 else sharded(told, rank)
        losses, started = [], time.process_time()
        for number, batch in enumerate(batches, start=1):
            losses.append(step(batch))
            if rank == 0:
                print(f"{way}: step {number}, {losses[-1]:.6f}", file=sys.stderr, flush=True)
        spent = time.process_time() - started
        close()
        return losses, spent

    return answer


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What all ways share; results of others are left aside."""
    return {"model": str(given.model.resolve()), "steps": given.steps, "length": given.length, "rate": given.rate}


def kept(way: str, given: argparse.Namespace) -> dict[str, Any] | None:
    """What a way gave before, with the same arguments."""
    path = given.output / f"{re.sub('[^a-z0-9]+', '-', way.lower())}.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    return told if told.get("of") == settings(given) else None


def run(ways: list[str], given: argparse.Namespace) -> None:
    """Losses of ways of equally many ranks, with the CPU seconds of a step over all ranks, into a file each."""
    world = World("sft.py", WAYS[ways[0]][0], settings(given))
    for way in ways:
        with tempfile.TemporaryDirectory(dir=given.output) as folder:
            config = json.loads(json.dumps(WAYS[way][1]).replace("NVME", folder))
            rate = given.rate * (10 if "LoRA" in way else 1)
            answers = world.ask(way=way, config=config, rate=rate)
        losses = answers[0][0]
        if any(other != losses for other, _ in answers):
            raise SystemExit(f"{way}: ranks give unlike losses: {answers}")
        told = {"of": settings(given), "losses": losses, "cpu_seconds": sum(s for _, s in answers) / given.steps}
        path = given.output / f"{re.sub('[^a-z0-9]+', '-', way.lower())}.json"
        path.write_text(json.dumps(told))
    world.close()


def gaps(way: str, found: dict[str, Any]) -> list[float]:
    """How far its losses are from those of what it is compared with, step by step."""
    theirs = found[WAYS[way][2]]["losses"]
    return [abs(a - b) for a, b in zip(found[way]["losses"], theirs, strict=True)]


def draw(found: dict[str, Any], path: Path) -> None:
    """Loss curves that lie on each other, and below them how far apart they are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6.5), sharex=True, height_ratios=[1, 1.2])
    for way in found:
        steps = range(1, len(found[way]["losses"]) + 1)
        own = WAYS[way][2] == way
        (line,) = above.plot(steps, found[way]["losses"], lw=2 if own else 0.9, alpha=0.8, label=way)
        if not own:
            shown = [max(gap, 1e-9) for gap in gaps(way, found)]
            below.plot(steps, shown, lw=1, color=line.get_color(), label=way)
    below.axhline(BAR, color="black", lw=0.8, ls="--")
    above.set(ylabel="nats per token of the answers")
    below.set(yscale="log", xlabel="step", ylabel="distance from plain torch")
    above.legend(fontsize=7, ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Every way that is asked for, a table, a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-5, help="of the whole model; LoRA's is ten times as high")
    parser.add_argument("--only", nargs="+", choices=WAYS, help="ways; what they are compared with comes along")
    parser.add_argument("--output", type=Path, default=Path("runs/sft"))
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    given = parser.parse_args()
    import matplotlib  # noqa: F401 -- missing now, not after the last way

    given.output.mkdir(parents=True, exist_ok=True)
    asked = given.only or list(WAYS)
    asked = [way for way in WAYS if way in asked or way in [WAYS[other][2] for other in asked]]
    for ranks in (1, 2, 3):
        missing = [way for way in asked if WAYS[way][0] == ranks and kept(way, given) is None]
        if missing:
            run(missing, given)
    report(given, asked)


def report(given: argparse.Namespace, asked: list[str]) -> None:
    """The table and the picture of what is there, and an error where a way is off."""
    found = {way: told for way in asked if (told := kept(way, given)) is not None}
    table = []
    for way, told in found.items():
        apart = gaps(way, found)
        first, last = told["losses"][0], told["losses"][-1]
        table.append([way, str(WAYS[way][0]), f"{first:.4f}", f"{last:.4f}", f"{max(apart):.1e}",
                      f"{sum(apart) / len(apart):.1e}", f"{told['cpu_seconds']:.1f}"])  # fmt: skip
    print_table(["way", "ranks", "first loss", "last", "largest gap", "mean gap", "CPU s a step"], table)
    draw(found, given.output / "sft.png")
    if given.write:
        print(write_json("sft.json", found))
    off = [way for way in asked if max(gaps(way, found)) > BAR]
    if off:
        raise SystemExit(f"further than {BAR:g} from plain torch: {', '.join(off)}")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        serve(handler)
    else:
        main()
