"""Comparison of model folders by size, loss and speed, each in a process that does not import `deepspeed`."""

from __future__ import annotations

import inspect
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from deepspeed.errors import CompressionError
from deepspeed.foundation import hf_forward

LIMIT_S = 1800.0
"""Maximum seconds for one answer of a process."""

# Runs separately, after the source of `hf_forward`; answers each input line with one line of JSON.
_READER = """
import inspect, json, sys, time
import torch, transformers
from torch.nn import functional as F
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
folder = sys.argv[1]
config = transformers.AutoConfig.from_pretrained(folder)
model_class = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
model, loaded = model_class.from_pretrained(folder, output_loading_info=True)
if loaded["missing_keys"]:  # Transformers would go on with random values
    raise SystemExit(f"weights are missing: {sorted(loaded['missing_keys'])[:3]}")
model.eval()
# generate takes the logits of a prompt's last token alone
last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

def prefill(ids):
    model(input_ids=ids, **without_cache(model), **last)

def token(ids):
    name, cache = cache_argument(model), returned_cache(model(**caches_at_all(model, {"input_ids": ids[:, :-1]})))
    if name is None or cache is None:
        raise SystemExit(f"{type(model).__name__} takes and returns no cache")
    return lambda: model(input_ids=ids[:, :1], **with_cache(name, cache))

def timed(kind, length, times):
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None) or length + times
    if kind == "token":  # the cache grows by one at each of them, and learned positions end
        length = max(min(length, most - times + 1), 2)
    length = min(length, most)
    ids = torch.randint(0, text.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    run = token(ids) if kind == "token" else lambda: prefill(ids)
    started = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - started) / times

def loss(file):
    windows, total = torch.load(file, weights_only=True), 0.0
    for part in windows.split(16):
        logits = model(input_ids=part[:, :-1], **without_cache(model)).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten().long(), reduction="sum").item()
    return total / windows[:, 1:].numel()

with torch.no_grad():
    prefill(torch.zeros(1, 8, dtype=torch.long))  # packed integers are unpacked at the first forward
    if "deepspeed" in sys.modules:
        raise SystemExit("this process knows deepspeed")
    print(json.dumps(sum(param.numel() for param in model.parameters())), flush=True)
    for line in sys.stdin:
        what, *given = json.loads(line)  # no name of a function above
        print(json.dumps(loss(*given) if what == "loss" else timed(what, *given)), flush=True)
"""


class Exported:
    """Single-threaded process that loads one exported folder with plain Transformers and measures it. Context manager.

    Args:
        folder: folder of the model.
        limit: maximum seconds per measurement.

    Raises:
        CompressionError: the folder is missing, Transformers cannot load it, or an answer takes too long.
    """

    def __init__(self, folder: str | Path, limit: float = LIMIT_S) -> None:
        self.folder, self._limit = Path(folder).resolve(), limit
        if not (self.folder / "config.json").is_file():
            raise CompressionError(f"{folder} is no folder with a config.json")
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", inspect.getsource(hf_forward) + _READER, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd="/",
        )
        self.parameters = int(self._answer())
        files = list(self.folder.glob("*.safetensors")) or list(self.folder.glob("pytorch_model*.bin"))
        self.bytes = sum(file.stat().st_size for file in files)

    def _answer(self) -> Any:
        late = threading.Timer(self._limit, self._process.kill)
        late.start()
        line = self._process.stdout.readline() if self._process.stdout else ""
        late.cancel()
        if not line and late.finished.is_set() and self._process.wait() == -signal.SIGKILL:
            self.close()
            raise CompressionError(f"{self.folder} gave no answer within {self._limit:g} s, or its process was killed")
        if not line:
            self._stderr.seek(0)
            text = self._stderr.read().strip().splitlines()[-1:]
            self.close()
            raise CompressionError(f"{self.folder} cannot be read by plain Transformers: {' '.join(text)}")
        return json.loads(line)

    def _ask(self, *question: Any) -> float:
        if self._process.stdin is None or self._process.poll() is not None:
            return self._answer()
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def seconds(self, kind: str, length: int = 128, times: int = 1) -> float:
        """Measure the CPU time of a forward pass, in seconds, as the mean of `times` passes.

        Args:
            kind: `prefill`: a pass of `length` tokens, with the last one's logits as in `generate`; `token`: a pass of
                one token with `length` - 1 tokens in the cache. Lengths above the model's maximum are reduced.
        """
        return self._ask(kind, length, times)

    def loss(self, windows: torch.Tensor) -> float:
        """Compute the mean cross-entropy in nats per token, for token ids [windows, tokens + 1]."""
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(windows, file.name)
            return self._ask("loss", file.name)

    def close(self) -> None:
        self._process.communicate()
        self._stderr.close()

    def __enter__(self) -> Exported:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def faster(before: Exported, after: Exported, kind: str, rounds: int = 5, length: int = 128, times: int = 2) -> float:
    """Measure the speedup of `after` over `before` in CPU time of one thread: the median ratio over `rounds`.

    `kind`, `length` and `times` are those of `Exported.seconds`.
    """
    ratios = [before.seconds(kind, length, times) / after.seconds(kind, length, times) for _ in range(rounds)]
    return statistics.median(ratios)


def report(before: str | Path, after: str | Path, windows: torch.Tensor | None = None) -> dict[str, Any]:
    """Compare two folders of Transformers models, each in a fresh process that does not import this package.

    Args:
        before: folder of the original model.
        after: exported folder.
        windows: held-out tokens, integers [windows, tokens + 1]; None: no loss is computed.

    Returns:
        `bytes`, `parameters`, and with windows `loss` (nats per token), each as [before, after]; `prefill` and
        `token`: speedups, 1.0 means no gain.

    Raises:
        CompressionError: a folder cannot be loaded by plain Transformers.
    """
    with Exported(before) as old, Exported(after) as new:
        length = 128 if windows is None else windows.shape[1] - 1
        figures: dict[str, Any] = {"bytes": [old.bytes, new.bytes], "parameters": [old.parameters, new.parameters]}
        if windows is not None:
            figures["loss"] = [old.loss(windows), new.loss(windows)]
        return figures | {kind: faster(old, new, kind, length=length) for kind in ("prefill", "token")}
