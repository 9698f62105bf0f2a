"""What HTTP costs, beside other servers: `python -m benchmarks.serve [--model A] [--form bf16] [--cores 1]
[--clients 16] [--requests 48] [--rounds 7] [--env PEER=PYTHON ...]`.

`ds_serve` in processes of its own, asked over loopback by clients of asyncio, against the same requests handed to the
same engine in this process, as many at once: a client asks again when it has its answer. Models, forms of their weights
and requests: `benchmarks/served_models.py`; `--model` also takes a folder. Answers stream, and their texts are
compared. Prompts differ, and nothing is reused. Sides alternate in an order drawn anew each round; a line compares the
engine in process with itself. `--env` names the interpreters of environments that have other servers
(`benchmarks/peer_servers.py`): `llama=PYTHON` is llama.cpp's, `vllm=PYTHON` vLLM's, `transformers=PYTHON` that of
Transformers with continuous batching. They get the same requests from the same clients, over the same weights in equal
forms, have to read as many tokens and to write as many; how many of their texts are ours is counted, since sums in
bf16 differ. A line says which one is left out.

With `--cores N` each server, with all of its processes and threads, and the engine in process may use the first N cores
only, and is started with N threads. The clients run on the other cores, or everywhere where there are no others. Three
tables:

- throughput: tokens a second through the server over those in process, and over those of other servers; CPU time of all
  processes, the clients' too; medians over rounds, 95 % intervals.
- first token: one request at a time, the best of `--firsts`.
- load: latencies with `--loads` clients at once; `--draw` makes their picture of kept results.

Nothing may be compiled: the caches of torch's and Triton's compilers lie in a folder that has to be empty afterwards,
and the compilers' names lead to a program that leaves a file there.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import BENCHMARKS, median_interval, print_table, write_json
from benchmarks.cores import Cores
from benchmarks.generate import SIZES, greedy
from benchmarks.peer_servers import NAMES, PeerServer, Sizes, peer_servers
from benchmarks.served_models import COUNT, FORMS, Asked, results_name, write_model
from deepspeed.inference import Generator, Request
from deepspeed.serving.arguments import EngineOptions
from deepspeed.serving.worker import load as load_served

CACHE = 1 << 29  # bytes of keys and values
LOADS = (1, 2, 4, 8, 16, 32)  # clients
TRACES = "BENCHMARK_TRACES"  # names the folder in which a compiler would leave something


@dataclass
class Answer:
    """What a client got: parts of the stream, the seconds at which they came, and when it asked."""

    begun: float
    times: list[float]
    parts: list[bytes]

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.begun

    def events(self) -> list[dict[str, Any]]:
        """The events of the stream.

        Raises:
            SystemExit: one is an error.
        """
        lines = b"".join(self.parts).splitlines()
        said = [json.loads(one[len(b"data: ") :]) for one in lines if one.startswith(b"data: {")]
        if any("error" in one for one in said):
            raise SystemExit(f"the server answered {said[-1]}")
        return said

    def text(self) -> str:
        """All of it."""
        return "".join(choice["text"] for one in self.events() for choice in one["choices"])

    def counts(self) -> tuple[int, int]:
        """Tokens of the prompt and of the answer, as the server states them."""
        usage = next((one["usage"] for one in self.events()[::-1] if one.get("usage")), {})
        return usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)


# -- the server --------------------------------------------------------------------------------------------------------


class Server:
    """`ds_serve` as users start it.

    Args:
        folder: model and tokenizer.
        log: what it prints.
        options: further ones, of the command.
    """

    def __init__(self, folder: Path, log: Path, options: Sequence[str]) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "deepspeed.serving.cli", str(folder), "--port", "0", *options]
        with log.open("w") as out:
            self.process = subprocess.Popen([*command, "--served-model-name", "m"], stdout=out, stderr=out)
        self._log = log
        self.host, self.port = self._address()
        web = psutil.Process(self.process.pid)
        self._processes = [web, *web.children(recursive=True)]

    def _address(self) -> tuple[str, int]:
        until = time.monotonic() + 300
        while time.monotonic() < until and self.process.poll() is None:
            if found := re.search(r"listening at http://([\d.]+):(\d+)", self._log.read_text()):
                return found[1], int(found[2])
            time.sleep(0.1)
        self.process.kill()
        raise SystemExit(f"ds_serve did not start:\n{self._log.read_text()}")

    def body(self, text: str, tokens: list[int], new: int) -> dict[str, Any]:
        """A greedy completion of `new` tokens that streams."""
        body = {"model": "m", "prompt": text, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        return {**body, "stream": True}

    def cpu(self) -> float:
        """Seconds of CPU time of its processes so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        if code := self.process.wait(timeout=60):
            raise SystemExit(f"ds_serve ended with {code}:\n{self._log.read_text()}")


AnyServer = Server | PeerServer


# -- the sides -----------------------------------------------------------------------------------------------------


async def ask(server: AnyServer, one: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
    """One completion that streams, over a connection that stays; as little work as a client can do."""
    content = json.dumps(server.body(one.text, one.tokens, one.new)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
    answer = Answer(time.perf_counter(), [], [])
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    said = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in said.split(b"\r\n", 1)[0] or b"chunked" not in said:
        raise SystemExit(f"the server answered {said.decode()}{(await reader.read(1000)).decode()}")
    while size := int(await reader.readuntil(b"\r\n"), 16):
        found = await reader.readexactly(size + 2)
        answer.times.append(time.perf_counter())
        answer.parts.append(found[:-2])
    await reader.readuntil(b"\r\n")
    return answer


async def _client(server: AnyServer, left: deque[int], asked: list[Asked], answers: dict[int, Answer]) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 22)
    while left:
        at = left.popleft()
        try:
            answers[at] = await ask(server, asked[at], reader, writer)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            writer.close()  # llama.cpp's server ends a connection with its stream
            reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 22)
            answers[at] = await ask(server, asked[at], reader, writer)
    writer.close()


async def _clients(server: AnyServer, asked: list[Asked], count: int) -> list[Answer]:
    left, answers = deque(range(len(asked))), dict[int, Answer]()
    await asyncio.gather(*(_client(server, left, asked, answers) for _ in range(count)))
    return [answers[at] for at in range(len(asked))]


def through_server(server: AnyServer, asked: list[Asked], clients: int, cores: Cores) -> list[Answer]:
    """Answers in the order of the requests."""
    with cores.asking():
        return asyncio.run(_clients(server, asked, clients))


def through_peer(peer: PeerServer, asked: list[Asked], clients: int, cores: Cores) -> list[Answer]:
    """The same of another server, which runs only meanwhile.

    Raises:
        SystemExit: a prompt has another number of tokens there than here, or an answer than was asked for.
    """
    with peer.running():
        answers = through_server(peer, asked, clients, cores)
    counts = [((len(one.tokens), one.new), answer.counts()) for one, answer in zip(asked, answers, strict=True)]
    if wrong := [both for both in counts if both[0] != both[1]]:
        raise SystemExit(f"{peer.name} read or wrote other numbers of tokens (asked for, done): {wrong[:8]}")
    return answers


def in_process(generator: Generator, asked: list[Asked], clients: int) -> list[list[int]]:
    """New tokens in the order of the requests, as many under way as there are clients."""
    found: list[list[int]] = [[] for _ in asked]
    left = deque(enumerate(asked))

    def submit() -> None:
        if left:
            at, one = left.popleft()
            generator.submit(Request(at, one.tokens, greedy(one.new)))

    for _ in range(clients):
        submit()
    while not generator.idle:
        for output in generator.step():
            found[output.ident] += output.tokens  # type: ignore[index]
            if output.finish_reason is not None:
                submit()
    return found


# -- tables ------------------------------------------------------------------------------------------------------------


def throughput(
    ours: Ours, asked: list[Asked], clients: int, rounds: int, peers: Sequence[PeerServer] = ()
) -> list[dict[str, Any]]:
    """Rounds of all sides; texts of the first are compared."""
    server, generator, words, cores = ours.server, ours.generator, ours.words, ours.cores
    texts = [answer.text() for answer in through_server(server, asked, clients, cores)]
    right = [words.decode(tokens, skip_special_tokens=True) for tokens in in_process(generator, asked, clients)]
    if texts != right:
        raise SystemExit(f"{sum(a != b for a, b in zip(texts, right, strict=True))} texts of {len(texts)} differ")
    sides: dict[str, Callable[[], Any]] = {
        "server": lambda: through_server(server, asked, clients, cores),
        "in process": lambda: in_process(generator, asked, clients),
        "in process again": lambda: in_process(generator, asked, clients),
    }
    equal: dict[str, int] = {}
    for peer in peers:
        texts = [peer.read(answer.text(), words) for answer in through_peer(peer, asked, clients, cores)]
        equal[peer.name] = sum(a == b for a, b in zip(texts, right, strict=True))
        sides[peer.name] = functools.partial(through_peer, peer, asked, clients, cores)
    times = _rounds(sides, rounds, [server, *peers])
    tokens, rows = sum(one.new for one in asked), []
    for name, seconds in times.items():
        wall, cpu, beside = (
            median_interval([b[which] / a[which] for a, b in zip(seconds, times[reference], strict=True)])
            for which, reference in ((0, "in process"), (1, "in process"), (0, "server"))
        )
        rows.append({
            "side": name, "clients": clients, "requests": len(asked), "tokens": tokens, "ratio": wall.median,
            "low": wall.low, "high": wall.high, "cpu_ratio": cpu.median,
            "of_server": {"ratio": beside.median, "low": beside.low, "high": beside.high},
            "tokens_per_second": tokens / statistics.median(one[0] for one in seconds),
            "cpu_ms_per_token": 1e3 * statistics.median(one[1] for one in seconds) / tokens,
            **({"equal_texts": equal[name]} if name in equal else {}),
        })  # fmt: skip
    return rows


def _rounds(
    sides: dict[str, Callable[[], Any]], rounds: int, servers: list[Server | PeerServer]
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each side in each round, in an order drawn anew."""
    order = random.Random(4)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}

    def cpu() -> float:
        return time.process_time() + sum(server.cpu() for server in servers)

    for _ in range(rounds):
        for name in order.sample(list(sides), len(sides)):
            begun, used = time.perf_counter(), cpu()
            sides[name]()
            times[name].append((time.perf_counter() - begun, cpu() - used))
    return times


def first_token(ours: Ours, asked: list[Asked], peers: Sequence[PeerServer] = ()) -> dict[str, Any]:
    """Milliseconds to the first token of prompts that come alone: best and median of each side, and what is added."""
    times: dict[str, list[float]] = {name: [] for name in ("server", "in process", *(peer.name for peer in peers))}
    for one in asked:
        times["server"].append(through_server(ours.server, [one], 1, ours.cores)[0].first)
        begun = time.perf_counter()
        in_process(ours.generator, [Asked(one.text, one.tokens, 1)], 1)
        times["in process"].append(time.perf_counter() - begun)
        for peer in peers:
            times[peer.name].append(through_peer(peer, [one], 1, ours.cores)[0].first)
    found = {name: 1e3 * min(seconds) for name, seconds in times.items()}
    found |= {f"{name}, median": 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    return found | {"added": found["server"] - found["in process"], "requests": len(asked)}


def load(ours: Ours, asked: list[Asked], loads: Sequence[int]) -> list[dict[str, float]]:
    """Milliseconds to the first token and between tokens, and tokens a second, by clients at once."""
    rows = []
    for clients in loads:
        some = (asked * 4)[: max(8, 3 * clients)]
        begun = time.perf_counter()
        answers = through_server(ours.server, some, clients, ours.cores)
        took = time.perf_counter() - begun
        firsts = sorted(1e3 * answer.first for answer in answers)
        both = zip(some, answers, strict=True)
        paces = sorted(1e3 * (answer.times[-1] - answer.times[0]) / (one.new - 1) for one, answer in both)
        rows.append({
            "clients": clients, "tokens_per_second": sum(one.new for one in some) / took,
            "first_ms": statistics.median(firsts), "first_p95_ms": firsts[int(0.95 * (len(firsts) - 1))],
            "token_ms": statistics.median(paces), "token_p95_ms": paces[int(0.95 * (len(paces) - 1))],
        })  # fmt: skip
    return rows


def draw(path: Path) -> Path:
    """The picture of a kept result: latencies against tokens a second, a point for each number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = json.loads(path.read_text())["load"]
    rates = [row["tokens_per_second"] for row in rows]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4))
    for axes, key, title in zip(panels, ("first", "token"), ("first token", "between tokens"), strict=True):
        for which, style, label in ((f"{key}_ms", "o-", "median"), (f"{key}_p95_ms", "o:", "95th percentile")):
            axes.plot(rates, [row[which] for row in rows], style, color="tab:blue", label=label)
        for row, rate in zip(rows, rates, strict=True):
            axes.annotate(f"{row['clients']}", (rate, row[f"{key}_ms"]), (0, -12), textcoords="offset points")
        axes.set_xlabel("tokens a second, all clients; the numbers are clients")
        axes.set_ylabel(f"ms, {title}")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    figure.tight_layout()
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return picture


# -- nothing is compiled -----------------------------------------------------------------------------------------------


def _watched(threads: int) -> None:
    """Start this program again with so many threads, and a folder in which every compiler would leave something."""
    with tempfile.TemporaryDirectory() as folder:
        traces, compiler = Path(folder, "traces"), Path(folder, "compiler")
        traces.mkdir()
        compiler.write_text(f'#!/bin/sh\necho "$0 $*" >> {traces}/compiler\nexit 1\n')
        compiler.chmod(0o755)
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
        own = {"OMP_NUM_THREADS": str(threads), TRACES: str(traces), "CC": str(compiler), "CXX": str(compiler)}
        environment = {**os.environ, **own, **{name: str(traces / name) for name in caches}}
        code = subprocess.run(sys.orig_argv, env=environment, check=False).returncode
        left = [str(path.relative_to(traces)) for path in traces.rglob("*") if path.is_file()]
    sys.exit(f"something was compiled: {left[:5]}" if left else code)


# -- the whole ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """The server, the engine in this process, the tokenizer of both, and the cores."""

    server: Server
    generator: Generator
    words: Any
    cores: Cores


@contextmanager
def _ours(folder: Path, form: str, cores: Cores) -> Iterator[Ours]:
    """Both over the model in a folder."""
    quantize = "" if form == "bf16" else form
    options = ["--threads", str(cores.threads), "--no-prefix-cache", "--cache-bytes", str(CACHE)]
    if quantize:
        options += ["--quantize", quantize]
    # read as the server reads it: what Transformers computes, such as rotary frequencies, keeps its dtype there
    model, words = load_served(EngineOptions(str(folder), quantize=quantize, threads=cores.threads))
    server = Server(folder, folder / "server.log", options)
    try:
        generator = Generator(
            model, tokenizer=words, prefix_cache=False, cache_bytes=CACHE, max_sequences=64, lossless_weights=True
        )
        try:
            yield Ours(server, generator, words, cores)
        finally:
            generator.close()
    finally:
        server.end()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="A", help=f"{', '.join(SIZES)}, or a folder of a Hugging Face model")
    add("--form", default="bf16", choices=FORMS, help="of the weights")
    add("--cores", type=int, default=1, help="of each server, which has as many threads")
    add("--clients", type=int, default=16)
    add("--requests", type=int, default=COUNT, help=f"of the table of throughput; {COUNT} at most")
    add("--rounds", type=int, default=7)
    add("--firsts", type=int, default=20, help="requests of the table of first tokens")
    add("--loads", type=int, nargs="*", default=LOADS, metavar="CLIENTS", help="of the table of load; none: no table")
    add("--env", action="append", default=[], help=f"PEER=PYTHON, of {', '.join(NAMES)}")
    add("--draw", action="store_true", help="only the picture, of the newest kept result")
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.model not in SIZES and not Path(args.model, "config.json").is_file():
        parser.error(f"--model {args.model}: neither one of {', '.join(SIZES)} nor a folder with a config.json")
    name = results_name(args.model, args.form, args.cores)
    if args.draw:
        results = (BENCHMARKS / "results").glob(f"*/{name}")
        print(draw(max(results, key=lambda path: path.parent.name[-len("2026-11-23") :])))
        return
    environments = dict(one.split("=", 1) for one in args.env)
    if unknown := environments.keys() - NAMES:
        parser.error(f"--env knows {', '.join(NAMES)}, not {', '.join(unknown)}")
    cores = Cores.first(args.cores, os.sched_getaffinity(0))
    if TRACES not in os.environ:
        _watched(cores.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # other servers end too
    cores.pin()
    torch.set_num_threads(cores.threads)
    sizes = Sizes(args.clients, cores.threads, args.form)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        mixed, alone = write_model(args.model, folder, args.firsts)
        with _ours(folder, args.form, cores) as ours, peer_servers(environments, folder, sizes) as peers:
            rows = throughput(ours, mixed[: args.requests], args.clients, args.rounds, peers)
            firsts = first_token(ours, alone, peers)
            loads = load(ours, mixed, args.loads)
    print(f"{args.model} in {args.form}; {cores}")
    show(rows, firsts, loads)
    setting = {"model": args.model if args.model in SIZES else Path(args.model).resolve().name, "form": args.form}
    setting |= {"server_cores": cores.servers, "client_cores": cores.clients, "threads": cores.threads}
    print(write_json(name, {**setting, "throughput": rows, "first_token": firsts, "load": loads}), flush=True)


def show(rows: list[dict[str, Any]], firsts: dict[str, Any], loads: list[dict[str, float]]) -> None:
    head = ["side", "tokens/s", "CPU ms a token", "over in process", "CPU, in process over it", "over the server"]
    lines = []
    for row in rows:
        ratios = [f"{one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for one in (row, row["of_server"])]
        rates = [f"{row['tokens_per_second']:.1f}", f"{row['cpu_ms_per_token']:.2f}"]
        lines.append([row["side"], *rates, ratios[0], f"{row['cpu_ratio']:.3f}", ratios[1]])
    print_table(head, lines)
    others = [row for row in rows if "equal_texts" in row]
    for row in others:
        server = next(one for one in rows if one["side"] == "server")["tokens_per_second"]
        print(
            f"{row['side']}: the server has {server / row['tokens_per_second']:.3f} x its tokens a second, "
            f"{firsts['server'] / firsts[row['side']]:.3f} x its first token; "
            f"{row['equal_texts']} of {row['requests']} texts are equal"
        )
    for name in ("server", *(row["side"] for row in others)):
        print(
            f"first token, best of {firsts['requests']}: {name} {firsts[name]:.2f} ms, in process "
            f"{firsts['in process']:.2f}: {firsts[name] - firsts['in process']:+.2f} ms (medians "
            f"{firsts[f'{name}, median']:.2f}, {firsts['in process, median']:.2f})"
        )
    if loads:
        print_table([*loads[0]], [[f"{value:.1f}".removesuffix(".0") for value in row.values()] for row in loads])


if __name__ == "__main__":
    main()
