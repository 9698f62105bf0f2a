"""Tokens from memory: `python -m benchmarks.generate [--tables "latency A" first throughput] [--env PEER=PYTHON ...]`.

Models A (110 M: width 768, 12 layers, 12 heads, 32,000 tokens, tied) and B (3 M: width 256, 4 layers), random weights
of a size at which greedy text does not repeat itself, bf16, one thread. "ours" has them from a folder, as engines and
servers that load one do (matrices in 12 bits, every bit kept); "ours, plain" is over the model as it is. Sides
alternate in one run, their order is drawn anew each round; a line compares our side with itself. Wall time, CPU time of
the process beside it; ratios are medians over rounds, with 95 % intervals. Peers are sides where `--env` names the
interpreter of an environment that has them, each on one thread of a process of its own, and has to write as many tokens
as are asked for: `--env llama=PYTHON` is llama.cpp (`benchmarks/llama_cpp.py`), `--env vllm=PYTHON` is vLLM
(`benchmarks/vllm_cpu.py`, which tells how its environment is made).

`--sides vLLM "ours again"` takes the throughput of these beside ours alone: those of HF's take most of a round's time.

The table `agree` is of no times: on model B in fp32, prompts of four lengths together, what we and vLLM write has to be
what HF finds likeliest there, so that a side that is fast because it is wrong is found before it is timed.

The table `command` (`command B` for the small model) is of fresh processes, from their start to their end: import, load
from a folder (in the page cache after the round that is not counted), the first token of a prompt of 128
(`benchmarks/first_token.py`).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import BENCHMARKS, REPOSITORY, median_interval, print_table, write_json
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.quantization.lossless_bf16 import LosslessWeight
from deepspeed.inference.quantization.quantization import quantize_linears

SIZES = {
    "A": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
          "vocab_size": 32000, "tie_word_embeddings": True},
    "B": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 2048, "tie_word_embeddings": True},
}  # fmt: skip
STD = {"A": 0.06, "B": 0.1}
NEW = 64
CLOSE = 0.5  # nats that a peer may choose under the likeliest; a wrong mask or position costs several
PATIENCE = 60  # seconds
PEERS: dict[str, str] = {}  # interpreters by peer
NAMES = {"llama": ("llama.cpp", "llama_cpp.py"), "vllm": ("vLLM", "vllm_cpu.py")}  # what a peer is, its script
Side = Callable[[], object]
Times = dict[str, list[tuple[float, float]]]  # wall and CPU seconds by side


def make(name: str) -> LlamaForCausalLM:
    """A model whose text is no one token repeated."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096, **SIZES[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, STD[name])
        model.model.norm.weight.normal_(0, 1)  # unties what a tied embedding says from what it read
    model = model.to(torch.bfloat16)
    said = hugging_face(model, [tokens(model, 128, 1)], 32)[0]
    assert len(set(said)) >= 20, f"a toy: {len(set(said))} different tokens of 32"
    return model


def tokens(model: LlamaForCausalLM, count: int, seed: int) -> list[int]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (count,), generator=drawn).tolist()


@torch.no_grad()
def hugging_face(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """One batch, padded on the left; every row runs as long as the longest."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
        eos_token_id=10**9,
    )  # fmt: skip
    return out[:, longest:].tolist()


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


class Peer:
    """Another engine over a model, in a process of its own.

    Args:
        peer: a key of `NAMES` that `PEERS` has an interpreter for.
        model: of which it gets a copy.
        slots: prompts that go on at once.
        room: tokens of each.
    """

    def __init__(self, peer: str, model: LlamaForCausalLM, slots: int, room: int) -> None:
        self.name, script = NAMES[peer]
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        command = [PEERS[peer], str(BENCHMARKS / script), self._folder.name, str(slots), str(room)]
        self._log = Path(self._folder.name, "log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._hear()

    def __call__(self, prompts: list[list[int]], new: list[int]) -> dict[str, Any]:
        """What it wrote to prompts that go on together: `texts` or `tokens`, one for each."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@contextmanager
def peers_of(
    model: LlamaForCausalLM, slots: int = 1, room: int = 2048, among: Iterable[str] = NAMES
) -> Iterator[list[Peer]]:
    """The peers that an environment was named for."""
    with ExitStack() as stack:
        made = []
        for peer in (one for one in among if one in PEERS):
            made.append(Peer(peer, model, slots, room))
            stack.callback(made[-1].close)
        yield made


# -- timing ------------------------------------------------------------------------------------------------------------


def rounds_of(sides: dict[str, Side], rounds: int, seed: int = 3) -> Times:
    """(wall, CPU) seconds of each side in each round, after one that is not counted."""
    order, found = random.Random(seed), {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in order.sample(list(sides), len(sides)):
            cpu, wall = cpu_time(), time.perf_counter()
            sides[name]()
            took = time.perf_counter() - wall, cpu_time() - cpu
            if number:
                found[name].append(took)
    return found


def cpu_time() -> float:
    """Seconds of this process and of those that it started, ended ones too."""
    ended = os.times()
    return (
        time.process_time()
        + ended.children_user
        + ended.children_system
        + sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
    )


def rows_of(
    found: dict[str, list[tuple[float, float]]], table: str, reference: str, per: float
) -> list[dict[str, Any]]:
    rows = []
    for name, times in found.items():
        row: dict[str, Any] = {"table": table, "side": name, "reference": reference}
        for which, clock in enumerate(("wall", "cpu")):
            ratio = median_interval([a[which] / b[which] for a, b in zip(times, found[reference], strict=True)])
            ms = [1e3 / per * one[which] for one in times]
            row[clock] = {"ms": statistics.median(ms), "best": min(ms), "ratio": ratio.median,
                          "low": ratio.low, "high": ratio.high}  # fmt: skip
        rows.append(row)
    return rows


def minus(found: Times) -> Times:
    """Per round, a side's whole less its first token: what the further tokens took."""
    return {
        name: [(a[0] - b[0], a[1] - b[1]) for a, b in zip(times, found[f"{name}, first token"], strict=True)]
        for name, times in found.items()
        if not name.endswith(", first token")
    }


def weights_of(model: Any) -> int:
    """Bytes of its weights, in whatever form."""
    packed = sum(module.nbytes for module in model.modules() if isinstance(module, LosslessWeight))
    return packed + sum(param.nbytes for param in model.parameters())


def bandwidth() -> float:
    """Bytes a second that one thread reads from memory; the best of many."""
    values = torch.ones(1 << 26)
    best = float("inf")
    for _ in range(12):
        started = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - started)
    return values.nbytes / best


# -- tables ------------------------------------------------------------------------------------------------------------


def generators(model: LlamaForCausalLM) -> dict[str, Generator]:
    """Over the model from a folder, whose bf16 matrices are held in 12 bits as in engines and servers that load one,
    over the given model as it is, and over one of integers."""
    packed = copy.deepcopy(model)
    quantize_linears(packed, 8, 1, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    options: dict[str, Any] = {"prefix_cache": False, "cache_bytes": 1 << 29}
    return {
        "ours": Generator(loaded, lossless_weights=True, **options),
        "ours, plain": Generator(model, **options),
        "ours, int8": Generator(packed, **options),
    }


def latency(name: str, rounds: int) -> list[dict[str, Any]]:
    model = make(name)
    prompt, made = tokens(model, 128, 2), generators(model)
    sides: dict[str, Side] = {}
    with peers_of(model) as peers:
        for new, suffix in ((1, ", first token"), (NEW, "")):
            for side, generator in {**made, "ours again": made["ours"]}.items():
                sides[side + suffix] = lambda g=generator, n=new: g.generate([prompt], greedy(n))
            sides["HF generate" + suffix] = lambda n=new: hugging_face(model, [prompt], n)
            for peer in peers:
                sides[peer.name + suffix] = lambda p=peer, n=new: p([prompt], [n])
        found = minus(rounds_of(sides, rounds))
    rows = rows_of(found, f"{name}: a token, batch 1, prompt 128", "HF generate", NEW - 1)
    read = bandwidth()
    for row in rows:
        if row["side"] in ("ours", "ours, plain"):
            size, took = weights_of(made[row["side"]].model), row["wall"]["ms"] / 1e3
            row["bandwidth"] = {"weights": size, "read": read, "share": size / took / read}
    return rows


def first(rounds: int) -> list[dict[str, Any]]:
    model = make("A")
    made, rows = generators(model), []
    with peers_of(model) as peers:
        for length in (128, 1024):
            prompt = tokens(model, length, length)
            sides: dict[str, Side] = {
                name: lambda p=prompt, g=made[of]: g.generate([p], greedy(1))
                for name, of in (("ours", "ours"), ("ours again", "ours"), ("ours, plain", "ours, plain"))
            }
            sides["HF generate"] = lambda p=prompt: hugging_face(model, [p], 1)
            for peer in peers:
                sides[peer.name] = lambda p=prompt, q=peer: q([p], [1])
            rows += rows_of(rounds_of(sides, rounds), f"A: first token, prompt {length}", "HF generate", 1)
    return rows


def requests(model: LlamaForCausalLM, count: int = 32) -> list[tuple[list[int], int]]:
    """Prompts of 16 to 256 tokens and answers of 8 to 128, log-uniform."""
    draw = random.Random(7)
    sizes = [(round(16 * 16 ** draw.random()), round(8 * 16 ** draw.random())) for _ in range(count)]
    return [(tokens(model, prompt, 100 + i), new) for i, (prompt, new) in enumerate(sizes)]


def throughput(rounds: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    model = make("A")
    asked = requests(model)
    useful = sum(new for _, new in asked)

    def ours(generator: Generator) -> None:
        for number, (prompt, new) in enumerate(asked):
            generator.submit(Request(number, prompt, greedy(new)))
        while not generator.idle:
            generator.step()

    def padded() -> None:
        hugging_face(model, [prompt for prompt, _ in asked], max(new for _, new in asked))

    made = generators(model)
    sides: dict[str, Side] = {
        "ours": lambda: ours(made["ours"]), "ours again": lambda: ours(made["ours"]),
        "ours, plain": lambda: ours(made["ours, plain"]),
        "HF generate, padded": padded, "HF continuous batching": lambda: continuous(model, asked),
    }  # fmt: skip
    with peers_of(model, len(asked), 512) as peers:
        for peer in peers:
            sides[peer.name] = lambda p=peer: p([prompt for prompt, _ in asked], [new for _, new in asked])
        kept = {name: side for name, side in sides.items() if not only or name in {"ours", *only}}
        found = rounds_of(kept, rounds)
    rows = rows_of(found, f"A: {useful} useful tokens of 32 requests", "ours", useful)
    for row in rows:
        row["tokens per second"] = 1e3 / row["wall"]["ms"]
    return rows


def continuous(model: Any, asked: list[tuple[list[int], int]]) -> None:
    """Transformers' own continuous batching; every request has its own length."""
    from transformers import GenerationConfig

    options = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
    left = len(asked)
    with model.continuous_batching_context_manager(generation_config=options) as manager:
        for prompt, new in asked:
            manager.add_request(prompt, max_new_tokens=new)
        while left:
            result = manager.get_result(timeout=PATIENCE)
            if result is None:
                raise SystemExit("HF's continuous batching stopped answering")
            left -= result.is_finished()


@torch.no_grad()
def agree() -> None:
    """B in fp32 writes: our tokens are HF's, and HF finds each token of vLLM's text (almost) the likeliest there.

    Equal tokens are not asked of vLLM: its attention in fp32 is exact to some tenths of a nat only, which is enough
    to take the other of two near tokens. llama.cpp's form of the weights is bf16, so it is left out.
    """
    model = make("B").float()
    asked = [tokens(model, length, length) for length in (16, 31, 97, 300)]
    expected = [hugging_face(model, [prompt], NEW)[0] for prompt in asked]
    found = {"ours": Generator(model, prefix_cache=False).generate(asked, greedy(NEW))}
    with peers_of(model, len(asked), 512, ["vllm"]) as peers:
        for peer in peers:
            found[peer.name] = peer(asked, [NEW] * len(asked))["tokens"]
    for side, texts in found.items():
        alike = [sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(a, b, strict=True)))
                 for a, b in zip(texts, expected, strict=True)]  # fmt: skip
        gaps = []
        for prompt, text in zip(asked, texts, strict=True):
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
            gaps.append((logits.amax(-1) - logits.gather(-1, torch.tensor(text)[:, None])[:, 0]).max().item())
        print(
            f"agree: {side}: the first {alike} of {NEW} tokens are HF's; at most {max(gaps):.4f} under HF's likeliest"
        )
        if max(gaps) > (0.001 if side == "ours" else CLOSE):
            raise SystemExit(f"{side} does not write what HF would")


def command(name: str, rounds: int) -> list[dict[str, Any]]:
    """Scripts that load a folder and print a first token; both have to print the same one."""
    model = make(name)
    prompt, said = [str(token) for token in tokens(model, 128, 2)], set()

    def script(side: str, folder: str) -> None:
        ran = subprocess.run(
            [sys.executable, str(BENCHMARKS / "first_token.py"), side, folder, *prompt],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
        )  # fmt: skip
        if ran.returncode:
            raise SystemExit(f"first_token.py {side} ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
        said.add(ran.stdout.split()[-1])

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        sides: dict[str, Side] = {
            "ours": lambda: script("ours", folder), "ours again": lambda: script("ours", folder),
            "HF generate": lambda: script("theirs", folder),
        }  # fmt: skip
        found = rounds_of(sides, rounds)
    assert len(said) == 1, f"the first tokens differ: {said}"
    return rows_of(found, f"{name}: command to first token, prompt 128", "HF generate", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="*", default=["latency A", "latency B", "first", "throughput"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--env", action="append", default=[], help="llama=PYTHON or vllm=PYTHON")
    parser.add_argument(
        "--sides", nargs="*", default=[], help="of the throughput, beside ours; all where none are named"
    )
    given = parser.parse_args()
    PEERS.update(one.split("=", 1) for one in given.env)
    if unknown := PEERS.keys() - NAMES:
        parser.error(f"--env knows {', '.join(NAMES)}, not {', '.join(unknown)}")
    if os.environ.get("OMP_NUM_THREADS") != "1":  # threads that others start read it when they are born
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    for table in given.tables:
        if table == "agree":
            agree()
            continue
        if table.startswith("latency"):
            rows = latency(table[-1], given.rounds)
        elif table.startswith("command"):
            rows = command("B" if table.endswith("B") else "A", given.rounds)
        else:
            rows = first(given.rounds) if table == "first" else throughput(given.rounds, given.sides)
        show(rows)
        name = "-".join([table, *given.sides]).replace(",", "").replace(" ", "-").lower()
        print(write_json(f"generate-{name}.json", rows), flush=True)


def show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        wall, cpu = row["wall"], row["cpu"]
        ratio = f"{wall['ratio']:.3f} [{wall['low']:.3f}, {wall['high']:.3f}]"
        times = [f"{clock[which]:.2f}" for clock in (wall, cpu) for which in ("ms", "best")]
        lines.append([row["table"], row["side"], *times, ratio, f"{cpu['ratio']:.3f}"])
    head = ["table", "side", "ms", "best", "CPU ms", "best", "wall / reference", "CPU / reference"]
    print_table(head, lines)
    for row in rows:
        if "bandwidth" in row:
            facts = row["bandwidth"]
            print(
                f"{row['table']}: {row['side']}: {facts['weights'] / 1e6:.1f} MB at {facts['share']:.2f} of the "
                f"{facts['read'] / 1e9:.1f} GB/s that one thread reads"
            )


if __name__ == "__main__":
    main()
