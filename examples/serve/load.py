"""Serve the model of `make train`, ask it with the `openai` client, and measure latency against load.

python examples/serve/load.py
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from model import ROOT, trained
from openai import AsyncOpenAI, OpenAI

sys.path.insert(0, str(ROOT / "examples" / "bytes_lm"))
CONTEXT = 128  # bytes, of the model


@dataclass(frozen=True)
class Asked:
    """One request: seconds to the first text and in all, and tokens."""

    first: float
    whole: float
    tokens: int


def parse_arguments() -> argparse.Namespace:
    """The command line; what is not known goes to the training script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/serve/model"), help="trained there, if it is not there"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/serve"))
    parser.add_argument("--ranks", type=int, default=2, help="of the training")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=48, help="per number of clients")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most")
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    arguments, arguments.train = parser.parse_known_args()
    return arguments


def start(folder: Path, threads: int, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The server, and its address once it listens."""
    command = [sys.executable, "-m", "deepspeed.serving.cli", str(folder), "--port", "0", "--threads", str(threads)]
    with log.open("w") as out:
        server = subprocess.Popen([*command, "--served-model-name", "bytes"], stdout=out, stderr=out)
    while (found := re.search(r"listening at (\S+)", log.read_text())) is None:
        if server.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    return server, found[1] + "/v1"


def prompts(count: int, longest: int) -> list[str]:
    """Beginnings of held-out library text, of lengths between 16 and `longest` bytes."""
    from corpus import library_files, split

    text = bytes(split(library_files())[1].tolist()).decode("utf-8", "ignore").replace("\0", "\n")
    rng = random.Random(0)
    found = []
    while len(found) < count:
        at, size = rng.randrange(len(text) - longest), rng.randint(16, longest)
        if text[at : at + size].isascii():
            found.append(text[at : at + size])
    return found


async def ask(client: AsyncOpenAI, prompt: str, tokens: int) -> Asked:
    """Stream one answer."""
    begun, first, used = time.perf_counter(), 0.0, 0
    stream = await client.completions.create(
        model="bytes",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0.7,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        first = first or time.perf_counter() - begun
        used = chunk.usage.completion_tokens if chunk.usage else used
    return Asked(first, time.perf_counter() - begun, used)


async def load(url: str, clients: int, texts: list[str], tokens: int) -> tuple[list[Asked], float]:
    """So many clients, each asking again as soon as it has its answer; returns the requests and the seconds."""
    waiting = iter(texts)
    done: list[Asked] = []
    async with AsyncOpenAI(base_url=url, api_key="none") as client:

        async def one() -> None:
            for text in waiting:
                done.append(await ask(client, text, tokens))

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        return done, time.perf_counter() - begun


def share(values: list[float], part: float) -> float:
    """The value below which that part of them lies."""
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Latency and throughput over the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    clients = [row["clients"] for row in rows]
    for key, label in (
        ("first p50", "first token, median"),
        ("first p99", "first token, p99"),
        ("whole p50", "answer, median"),
    ):
        left.plot(clients, [row[key] * 1e3 for row in rows], marker="o", label=label)
    left.set(xlabel="clients", ylabel="ms", xscale="log", yscale="log")
    left.legend()
    right.plot(clients, [row["tokens/s"] for row in rows], marker="o")
    right.set(xlabel="clients", ylabel="tokens per second", xscale="log", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(clients, [f"{n:.0f}" for n in clients])
        axes.minorticks_off()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def measure(url: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """One row per number of clients."""
    texts = prompts(arguments.requests * (len(arguments.clients) + 1), CONTEXT - arguments.tokens)
    asyncio.run(load(url, 2, texts[: arguments.requests], arguments.tokens))  # warm
    rows = []
    for at, clients in enumerate(arguments.clients, start=1):
        mine = texts[at * arguments.requests : (at + 1) * arguments.requests]
        done, seconds = asyncio.run(load(url, clients, mine, arguments.tokens))
        firsts, wholes = [one.first for one in done], [one.whole for one in done]
        rows.append(
            {
                "clients": clients,
                "first p50": share(firsts, 0.5),
                "first p99": share(firsts, 0.99),
                "whole p50": share(wholes, 0.5),
                "tokens/s": sum(one.tokens for one in done) / seconds,
            }
        )
    return rows


def main() -> None:
    """Train if need be, serve, ask, measure, end."""
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    folder = trained(arguments.folder, arguments.ranks, arguments.train)
    server, url = start(folder, arguments.threads, arguments.output / "server.log")
    try:
        client = OpenAI(base_url=url, api_key="none")
        answer = client.completions.create(model="bytes", prompt="def read_", max_tokens=80, temperature=0.7, seed=0)
        print(f"def read_{answer.choices[0].text}\n")
        rows = measure(url, arguments)
    finally:
        server.terminate()
        server.wait()
    print("clients  first token ms (median, p99)   answer ms   tokens/s")
    for row in rows:
        first = f"{row['first p50'] * 1e3:12.1f} {row['first p99'] * 1e3:9.1f}"
        print(f"{row['clients']:7.0f} {first:>30} {row['whole p50'] * 1e3:11.1f} {row['tokens/s']:10.1f}")
    draw(rows, arguments.output / "load.png")
    print(f"picture: {arguments.output / 'load.png'}; the server ended with {server.returncode}")


if __name__ == "__main__":
    main()
