"""Other servers as sides of `benchmarks.serve`: llama.cpp's, vLLM's and Transformers'.

Each runs in an environment of its own, over the folder that `ds_serve` serves, and answers the same requests to
`/v1/completions` by the same clients. Its processes may use the cores that this process may (`benchmarks/cores.py`),
and it is started with a thread for each. While others are timed, its processes are stopped, since some of them never
sleep. llama.cpp's alone has weights in int8 and int4 like ours.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import BENCHMARKS

START = 400  # seconds
ROOM = 1024  # tokens of a request
NO_END = 10**9  # the end token of a model that has none
# By these `benchmarks.serve` sees that nothing of ours is compiled; others may.
WATCHED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CC", "CXX")
NAMES = {"llama": "llama.cpp", "vllm": "vLLM", "transformers": "transformers serve"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@dataclass(frozen=True)
class Sizes:
    """How a server is started.

    Attributes:
        slots: requests that may run at once.
        threads: that compute.
        form: of the weights, one of `benchmarks.served_models.FORMS`.
    """

    slots: int
    threads: int
    form: str


def _command(peer: str, python: str, folder: Path, sizes: Sizes, port: int) -> list[str]:
    if peer == "transformers":
        command = [python, "-m", "transformers.cli.transformers", "serve", str(folder), "--continuous-batching"]
        return [*command, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    script = {"llama": "llama_cpp.py", "vllm": "vllm_cpu.py"}[peer]
    command = [python, str(BENCHMARKS / script), str(folder), str(sizes.slots), str(ROOM), str(port)]
    if peer == "llama":
        command += ["--threads", str(sizes.threads), *([] if sizes.form == "bf16" else ["--form", sizes.form])]
    return command


def _own_folder(folder: Path, into: Path) -> Path:
    """The same model without an end token, for a server that has no `ignore_eos`."""
    into.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.name != "generation_config.json":
            (into / path.name).symlink_to(path)
    (into / "generation_config.json").write_text(json.dumps({"eos_token_id": NO_END, "pad_token_id": 0}))
    return into


class PeerServer:
    """A running server of others.

    Args:
        peer: a key of `NAMES`.
        python: interpreter of the environment that has it.
        folder: model and tokenizer.
        sizes: how it is started.
        work: folder for its log, and for what it writes.

    Raises:
        RuntimeError: it did not start, or has no such form.
    """

    def __init__(self, peer: str, python: str, folder: Path, sizes: Sizes, work: Path) -> None:
        if sizes.form != "bf16" and peer != "llama":
            raise RuntimeError(f"it has no {sizes.form} weights on CPUs that it makes of this folder")
        self.peer, self.name, self.host, self.port = peer, NAMES[peer], "127.0.0.1", free_port()
        work.mkdir()
        self._log = work / "log"
        self.served = str(_own_folder(folder, work / "model") if peer == "transformers" else folder)
        variables = {name: value for name, value in os.environ.items() if name not in WATCHED}
        variables |= {"OMP_NUM_THREADS": str(sizes.threads), "HF_HUB_OFFLINE": "1", "TMPDIR": str(work)}
        with self._log.open("w") as out:
            self.process = subprocess.Popen(
                _command(peer, python, Path(self.served), sizes, self.port), env=variables,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                process_group=0,  # no session of its own, which Linux may give another share of the cores
            )  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + START
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self.host}:{self.port}/health", timeout=5):
                    return
            except OSError:  # no answer, or one that it is still loading
                time.sleep(0.2)
        self.end()
        raise RuntimeError(f"it did not start: {self._log.read_text().strip()[-600:]}")

    def body(self, text: str, tokens: list[int], new: int) -> dict[str, Any]:
        """A greedy completion of `new` tokens that streams; llama.cpp has no tokenizer of this model, so it gets
        tokens."""
        body: dict[str, Any] = {"model": self.served, "prompt": text, "max_tokens": new, "temperature": 0}
        if self.peer != "transformers":
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        if self.peer == "llama":
            body |= {"prompt": tokens, "top_k": 1, "cache_prompt": False}
        return {**body, "stream": True}

    def read(self, text: str, words: Any) -> str:
        """An answer's text in our tokenizer's; in llama.cpp's file the words are numbers."""
        if self.peer != "llama":
            return text
        return words.decode([int(number) for number in re.findall(r"<(\d+)>", text)], skip_special_tokens=True)

    def cpu(self) -> float:
        """Seconds of CPU time of its processes so far."""
        whole = psutil.Process(self.process.pid)
        return sum(sum(process.cpu_times()[:2]) for process in (whole, *whole.children(recursive=True)))

    @contextmanager
    def running(self) -> Iterator[PeerServer]:
        """Within the block its processes run; they are stopped afterwards."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield self
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        """Kill it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def peer_servers(environments: dict[str, str], folder: Path, sizes: Sizes) -> Iterator[list[PeerServer]]:
    """Those that there are, stopped; a line says which one is left out, and why."""
    with ExitStack() as stack:
        made = []
        for peer, name in NAMES.items():
            try:
                if peer not in environments:
                    raise RuntimeError(f"no --env {peer}=PYTHON")
                server = PeerServer(peer, environments[peer], folder, sizes, folder / f"peer-{peer}")
            except (OSError, RuntimeError) as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            stack.callback(server.end)
            os.killpg(server.process.pid, signal.SIGSTOP)
            made.append(server)
        yield made
