"""ZeRO-Inference: weights on NVMe stream through a batch; memory over the imports, and a pass over its floor.

python -m benchmarks.zero_inference                              # 2 GB of bf16, batch 32
python -m benchmarks.zero_inference --width 1024 --layers 14     # small

A pass makes the next token of every sequence of the batch, packed, over pages (`--own`: by the model's own `generate`).
Its floor is the slower of two: the weights' bytes over the rate at which the native reader brings them block by block,
and the same pass of the model in memory. Medians; `share` is the floor over the pass (bar 0.85). Growth is the largest
resident set over what it was after the imports (bar: two blocks, the pages of keys and values, 64 MB).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from typing import Any

import psutil
import torch

import deepspeed
from benchmarks.common import write_json
from deepspeed.config.sections.memory import Aio
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.ops.aio.memory import aligned_bytes
from deepspeed.storage.tensor_file import Disk

MIB = 1 << 20
VOCABULARY = 8192
ROWS = 128  # of a pass: what they take beside weights and pages grows with them


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=14)
    parser.add_argument("--own", action="store_true", help="by the model's own generate, not by packed passes")
    parser.add_argument("--device", default="nvme", choices=["cpu", "nvme"])
    parser.add_argument("--nvme_path", default="")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


class Peak:
    """The largest resident set, looked at every few milliseconds."""

    def __init__(self) -> None:
        self._process, self._over = psutil.Process(), threading.Event()
        self.begun = self.peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def mark(self) -> float:
        """MiB over the beginning since the last mark, at most; the next look begins now."""
        found, self.peak = self.peak - self.begun, self._process.memory_info().rss
        return found / MIB

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.peak - self.begun


def shape_of(width: int, layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11 // 4 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=width // 64, max_position_embeddings=512,
        pad_token_id=None, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip


def build(shape: Any, config: dict) -> torch.nn.Module:
    """Random weights, born where they rest."""
    from transformers import LlamaForCausalLM

    with deepspeed.zero.Init(config_dict_or_path=config):
        return LlamaForCausalLM(shape)


def in_memory(shape: Any) -> torch.nn.Module:
    """The same sizes, whole and in bf16."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(shape).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
        for buffer in model.buffers():
            buffer.uniform_(0.1, 1.0)
    return model


def config_of(arguments: argparse.Namespace, folder: str) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1,  # the unit in use and the next one, no more
            "stage3_max_reuse_distance": 1,
            "offload_param": {"device": arguments.device, "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2},
        },
    }


def passes(model: Any, ids: torch.Tensor, arguments: argparse.Namespace) -> list[float]:
    """Seconds from each next token of the batch to the one after it; the first also reads the prompt, and is left out.

    Of two answers, of which the first teaches what is needed when.
    """
    if arguments.own:
        return passes_of_own(model, ids, arguments)
    page, room = 16, arguments.batch * (pages_of(arguments) + 1)  # one more to let all in at once
    config = model.config
    each = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * page
    generator = Generator(model, page_size=page, cache_bytes=room * each, prefix_cache=False, max_batch_tokens=ROWS)
    sampling = SamplingParams(max_new_tokens=arguments.tokens, ignore_eos=True)
    for _ in range(2):
        for number, prompt in enumerate(ids.tolist()):
            generator.submit(Request(number, prompt, sampling))
        seconds = []
        while not generator.idle:
            begun = time.perf_counter()
            outputs = generator.step()
            if len(outputs) == arguments.batch:  # prompts enter in several passes
                seconds.append(time.perf_counter() - begun)
    print(f"{type(model).__name__}: {generator.kind}, passes of {[round(one, 2) for one in seconds]} s", flush=True)
    generator.close()
    return seconds


def pages_of(arguments: argparse.Namespace) -> int:
    """Of a sequence."""
    return -(-(arguments.prompt + arguments.tokens) // 16)


def passes_of_own(model: Any, ids: torch.Tensor, arguments: argparse.Namespace) -> list[float]:
    """The same by the model's own `generate`."""
    asked = {"max_new_tokens": arguments.tokens, "min_new_tokens": arguments.tokens, "do_sample": False}
    begun: list[float] = []
    handle = model.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))
    for _ in range(2):
        begun.clear()
        model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    begun.append(time.perf_counter())
    handle.remove()
    return [after - before for before, after in zip(begun[1:], begun[2:], strict=False)]


def answer(arguments: argparse.Namespace, shape: Any, folder: str, peak: Peak | None) -> dict[str, Any]:
    """Build, wrap, and generate twice; MiB at each stage, bytes, and the seconds of passes."""
    config = config_of(arguments, folder)
    model = build(shape, config)
    found: dict[str, Any] = {"build_mb": peak.mark() if peak else 0.0}
    numbers = [getattr(p, "ds_numel", p.numel()) for p in model.parameters()]
    layer = [getattr(p, "ds_numel", p.numel()) for p in model.model.layers[0].parameters()]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    found["initialize_mb"] = peak.mark() if peak else 0.0
    ids = torch.randint(2, VOCABULARY, (arguments.batch, arguments.prompt))
    found["passes"] = passes(engine.module, ids, arguments)
    found["generate_mb"] = peak.mark() if peak else 0.0
    width, layers = shape.hidden_size, shape.num_hidden_layers
    rows = arguments.prompt + arguments.tokens if arguments.own else 16 * (pages_of(arguments) + 1)
    cache = 2 * 2 * layers * arguments.batch * rows * width
    block = 2 * max(sum(layer), VOCABULARY * width)
    engine.destroy()
    return found | {
        "weights_mb": 2 * sum(numbers) / MIB, "block_mb": block / MIB, "bound_mb": (2 * block + cache) / MIB + 64,
    }  # fmt: skip


def disk_rate(folder: str, weights: int, block: int) -> list[float]:
    """Bytes a second, of three times that the native reader brings the weights, two blocks under way.

    Args:
        folder: on the disk.
        weights: bytes in all.
        block: bytes at a time.
    """
    disk = Disk(folder, settings=Aio())
    buffers = [aligned_bytes(block) for _ in range(2)]
    extents = [disk.create(f"block {number}", block) for number in range(max(weights // block, 1))]
    for extent in extents:
        disk.write(extent, buffers[0]).wait()
    rates = []
    for _ in range(3):
        begun, before = time.perf_counter(), None
        for number, extent in enumerate(extents):
            transfer = disk.read(extent, buffers[number % 2])
            if before is not None:
                before.wait()
            before = transfer
        if before is not None:
            before.wait()
        rates.append(len(extents) * block / (time.perf_counter() - begun))
    disk.close()
    return rates


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    deepspeed.init_distributed()
    shape = shape_of(arguments.width, arguments.layers)
    with tempfile.TemporaryDirectory(dir=arguments.nvme_path or None) as folder:
        answer(arguments, shape_of(64, 2), folder, None)  # what is imported on the way is not counted
        peak = Peak()
        found = answer(arguments, shape, folder, peak)
        peak.end()
        if arguments.device == "nvme":
            rates = disk_rate(folder, int(found["weights_mb"] * MIB), int(found["block_mb"] * MIB))
            found["disk_mb_per_second"] = statistics.median(rates) / MIB
    model, ids = in_memory(shape), torch.randint(2, VOCABULARY, (arguments.batch, arguments.prompt))
    found["pass_in_memory_s"] = statistics.median(passes(model, ids, arguments))
    found["pass_s"] = statistics.median(found.pop("passes"))
    found["pass_of_disk_s"] = found["weights_mb"] / found.get("disk_mb_per_second", float("inf"))
    found["floor_s"] = max(found["pass_of_disk_s"], found["pass_in_memory_s"])
    found["share"] = found["floor_s"] / found["pass_s"]
    found |= {"batch": arguments.batch, "threads": arguments.threads, "device": arguments.device}
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}))
    print(write_json("zero_inference.json", found))


if __name__ == "__main__":
    main()
