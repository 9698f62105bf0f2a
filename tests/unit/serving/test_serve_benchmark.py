"""What `benchmarks.serve` gives its sides: cores, threads, forms and requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import llama_cpp, vllm_cpu
from benchmarks.cores import Cores
from benchmarks.peer_servers import PeerServer, Sizes
from benchmarks.served_models import random_requests, results_name, short_name, tokenizer_of

MASK = "import os; print(*sorted(os.sched_getaffinity(0)))"


def test_clients_run_on_the_cores_that_servers_do_not_have() -> None:
    assert Cores.first(1, {5, 3, 4}) == Cores((3,), (4, 5))
    assert Cores.first(3, {5, 3, 4}) == Cores((3, 4, 5), (3, 4, 5))
    assert Cores.first(2, {0, 1}).threads == 2
    for count in (0, 3):
        with pytest.raises(SystemExit, match=f"--cores {count}: this process may use 2 cores; give 1 to 2"):
            Cores.first(count, {0, 1})


def test_processes_inherit_the_servers_cores() -> None:
    """In a process of its own, with a thread that is there before, as those of libraries are."""
    code = f"""
import os, subprocess, sys, threading
from benchmarks.cores import Cores
usable, stop, masks = os.sched_getaffinity(0), threading.Event(), []
thread = threading.Thread(target=lambda: (stop.wait(), masks.append(os.sched_getaffinity(0))))
thread.start()
cores = Cores.first(1, usable)
cores.pin()
stop.set()
thread.join()
child = subprocess.run([sys.executable, "-c", {MASK!r}], capture_output=True, text=True, check=True).stdout
assert {{int(core) for core in child.split()}} == set(cores.servers) == masks[0] == os.sched_getaffinity(0)
with cores.asking():
    assert os.sched_getaffinity(0) == set(cores.clients)
assert os.sched_getaffinity(0) == set(cores.servers)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60)


def test_vllm_has_a_thread_on_each_core() -> None:
    assert vllm_cpu.bound({1, 0}) == {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "0,1"}
    assert vllm_cpu.bound([3]) == {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "3"}


def test_matrices_have_equal_bits_in_llama_cpp() -> None:
    """Layers in the form that is served; the embedding and the head in 8 bits, as in `quantize_linears`."""
    layer, embedding = "blk.0.attn_q.weight", "token_embd.weight"
    assert [llama_cpp.form_of(layer, form, "BF16") for form in ("", "int8", "int4")] == ["BF16", "Q8_0", "Q4_0"]
    assert [llama_cpp.form_of(embedding, form, "BF16") for form in ("", "int8", "int4")] == ["BF16", "Q8_0", "Q8_0"]


@pytest.mark.parametrize("peer", ["vllm", "transformers"])
def test_servers_without_an_equal_form_are_left_out(peer: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no int8 weights"):
        PeerServer(peer, sys.executable, tmp_path, Sizes(1, 1, "int8"), tmp_path / "work")


def test_results_are_named_by_model_form_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert results_name("A", "int4", 2) == "serve-a-int4-2-cores.json"
    assert short_name("some/folder/SmolLM2-135M.Instruct/") == "smollm2-135m-instruct"
    (tmp_path / "trained").mkdir()
    monkeypatch.chdir(tmp_path / "trained")
    assert results_name(".", "bf16", 1) == "serve-trained-bf16-1-cores.json"


def test_the_tokens_of_a_request_are_those_of_its_text() -> None:
    from transformers import LlamaConfig

    class Sized:
        config = LlamaConfig(vocab_size=2048)

    words = tokenizer_of(2048)
    mixed, alone = random_requests(words, Sized(), 3)
    assert len(mixed) == 48 and len(alone) == 3
    assert all(one.tokens == words(one.text)["input_ids"] and one.new > 0 for one in mixed + alone)
    assert len({one.text for one in mixed + alone}) == 51
