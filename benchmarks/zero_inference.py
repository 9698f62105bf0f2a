"""ZeRO-Inference: weights on NVMe stream through a batch; memory over the imports, and the time of a pass.

python benchmarks/zero_inference.py                              # 2 GB of bf16, batch 32
python benchmarks/zero_inference.py --width 512 --layers 12      # small
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time

import psutil
import torch

import deepspeed

MIB = 1 << 20
VOCABULARY = 8192


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4)
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


def build(width: int, layers: int, config: dict) -> torch.nn.Module:
    """Random weights, born where they rest."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11 // 4 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=width // 64, max_position_embeddings=512,
        pad_token_id=None, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    with deepspeed.zero.Init(config_dict_or_path=config):
        return LlamaForCausalLM(shape)


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


def answer(arguments: argparse.Namespace, shape: tuple[int, int], folder: str, peak: Peak | None) -> dict[str, float]:
    """Build, wrap, and generate twice; MiB at each stage, bytes, and the seconds of a pass."""
    config = config_of(arguments, folder)
    model = build(*shape, config)
    found = {"build_mb": peak.mark() if peak else 0.0}
    numbers = [getattr(p, "ds_numel", p.numel()) for p in model.parameters()]
    layer = [getattr(p, "ds_numel", p.numel()) for p in model.model.layers[0].parameters()]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    found["initialize_mb"] = peak.mark() if peak else 0.0
    ids = torch.randint(2, VOCABULARY, (arguments.batch, arguments.prompt))
    asked = {"max_new_tokens": arguments.tokens, "min_new_tokens": arguments.tokens, "do_sample": False}
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        engine.module.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        times.append((time.perf_counter() - begun) / arguments.tokens)
    found["generate_mb"] = peak.mark() if peak else 0.0
    cache = 2 * 2 * shape[1] * arguments.batch * (arguments.prompt + arguments.tokens) * shape[0]
    block = 2 * max(sum(layer), VOCABULARY * shape[0])
    engine.destroy()
    found |= {"weights_mb": 2 * sum(numbers) / MIB, "bound_mb": (2 * block + cache) / MIB + 64, "block_mb": block / MIB}
    return found | {"seconds_per_pass": min(times), "weights_mb_per_second": found["weights_mb"] / min(times)}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    deepspeed.init_distributed()
    with tempfile.TemporaryDirectory(dir=arguments.nvme_path or None) as folder:
        answer(arguments, (64, 2), folder, None)  # what is imported on the way is not counted
        peak = Peak()
        found = answer(arguments, (arguments.width, arguments.layers), folder, peak)
        peak.end()
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
