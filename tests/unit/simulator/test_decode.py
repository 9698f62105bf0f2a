"""Passes of generation by arithmetic: bytes of launches, times of kernels, graphs, published figures."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.decode_pass import FORMS, Pass, record, times
from benchmarks.decode_tables import BARS, ERROR, PUBLISHED, RESULTS, bars, published
from deepspeed.errors import ArgumentError
from deepspeed.ops.triton import products, rows
from deepspeed.ops.triton.attention import AttentionRule, PagedRows, attend_pages
from deepspeed.ops.triton.products import FEW_ROWS
from deepspeed.simulator.card_rates import CardRates
from deepspeed.simulator.kernel_recorder import PassRecorder, RecordedKernels
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.replay import captured, replay
from deepspeed.simulator.trace import COPY, GRAPH, KERNEL, WAIT, HostEvent, KernelWork, Recording

CARD = CardRates(
    multiprocessors=10, stream=1e12, latency=1e-6, l2=4e12, l2_latency=1e-7, issue=1e12, products={"fp32": 1e13},
    launch=3e-6, captured=1e-6, graph_launch=5e-6,
)  # fmt: skip
TOY = Pass("llama-90m", batch=2, context=600)


def seconds(nbytes: float, work: KernelWork, flops: float = 0.0) -> float:
    """Seconds of a kernel of a graph, without its start."""
    return CARD.seconds(HostEvent(KERNEL, "k", 0, flops, nbytes, "fp32", work=work, captured=True)) - CARD.captured


def test_a_library_s_kernel_reads_at_the_memory_s_speed() -> None:
    assert seconds(1e6, KernelWork()) == pytest.approx(1e-6)
    assert seconds(1e6, KernelWork(), flops=1e8) == pytest.approx(1e-5)


def test_few_programs_reach_what_they_wait_for() -> None:
    assert seconds(1e6, KernelWork(1, 2, 1e5)) == pytest.approx(1e-5)  # 1e5 bytes a microsecond
    assert seconds(1e6, KernelWork(20, 2, 1e5)) == pytest.approx(1e-6)
    # One wave of 20 programs at full speed, then one program alone.
    assert seconds(2.1e6, KernelWork(21, 2, 1e5)) == pytest.approx(2e-6 + 1e-6)


def test_what_is_read_again_comes_from_the_cache() -> None:
    assert seconds(0.0, KernelWork(20, 2, 1e5, cached=4e6)) == pytest.approx(1e-6)
    assert seconds(0.0, KernelWork(1, 2, 1e4, cached=4e6)) == pytest.approx(4e-5)


def test_instructions_run_on_the_multiprocessors_that_have_programs() -> None:
    assert seconds(0.0, KernelWork(10, 1, 1e5, instructions=1e6)) == pytest.approx(1e-6)
    assert seconds(0.0, KernelWork(5, 1, 1e5, instructions=1e6)) == pytest.approx(2e-6)


def machine(launch: float = 1e-5) -> Machine:
    return Machine(1, 1 << 30, {"fp32": [[0, 1e13]]}, 1e12, 0.0, 1e11, launch=launch, link=1e10, kernels=CARD)


def test_a_graph_costs_the_host_one_launch() -> None:
    entries = [HostEvent(COPY, "to_device"), *[HostEvent(KERNEL, "k", work=KernelWork())] * 10,
               HostEvent(COPY, "to_host"), HostEvent(WAIT, "wait", after=11)]  # fmt: skip
    recording = Recording("pass", 0, 1, entries)
    assert replay(recording, machine()).host == pytest.approx(12e-5)
    graph = captured(recording)
    assert [e.kind for e in graph.entries].count(GRAPH) == 1 and graph.entries[-1].after == 12
    made = replay(graph, machine())
    assert made.host == pytest.approx(2e-5 + CARD.graph_launch)
    assert made.compute == pytest.approx(10 * CARD.captured)
    assert replay(recording, machine(1e-9)).compute == pytest.approx(10 * CARD.launch)


def test_recordings_keep_the_work_of_kernels(tmp_path: Path) -> None:
    recording = Recording("pass", 0, 1, [HostEvent(KERNEL, "k", work=KernelWork(3, 2, 5.0)), HostEvent(COPY, "c")])
    recording.save(tmp_path / "recording.json")
    assert Recording.load(tmp_path / "recording.json") == recording


def test_machines_keep_their_rates(tmp_path: Path) -> None:
    card = Machine.load("H100-80GB")
    card.save(tmp_path / "card.json")
    assert Machine.load(tmp_path / "card.json") == card and card.kernels is not None
    (tmp_path / "card.json").write_text(json.dumps(dataclasses.asdict(card) | {"kernels": {"stream": 1}}))
    with pytest.raises(ArgumentError, match="multiprocessors"):
        Machine.load(tmp_path / "card.json")


@pytest.mark.parametrize("card", ["H100-80GB", "A100-80GB"])
def test_every_figure_of_a_card_has_its_source(card: str) -> None:
    rates = Machine.load(card).kernels
    assert rates is not None
    named = {field.name for field in dataclasses.fields(rates)} - {"sources"}
    assert set(rates.sources) == named
    assert all("https://" in source or source.startswith("assumed") for source in rates.sources.values())


def recorded() -> tuple[Recording, RecordedKernels]:
    recording = Recording("calls", 0, 1)
    return recording, RecordedKernels(PassRecorder(recording, "cpu"))


def test_bytes_of_launches_are_those_of_their_tensors() -> None:
    recording, kernels = recorded()
    x, weight = torch.zeros(3, 128), torch.zeros(128)
    out, stream = rows.norm(kernels, x, weight, residual=x.clone(), eps=1e-5)
    rows.gated(kernels, out, stream, "silu")
    products.packed_product(kernels, x, "int8", (torch.zeros(70, 128, dtype=torch.int8), torch.zeros(70)))
    for entry, tensors in zip(recording.entries, ([x, x, weight, out, stream], [out, stream, out],
                                                  [x, torch.zeros(3, 70), torch.zeros(70)]), strict=True):  # fmt: skip
        assert entry.work is not None
        extra = 70 * 128 if entry.name == "tile_product" else 0  # weights
        again = {"norm_rows": 2 * weight.nbytes, "gate_rows": 0, "tile_product": 2 * x.nbytes}[entry.name]
        everything = sum(tensor.nbytes for tensor in tensors) + extra
        assert entry.nbytes + entry.work.cached == everything + again


def test_attention_reads_the_pages_of_its_sequences() -> None:
    recording, kernels = recorded()
    lengths, page = [30, 530], 16
    table = torch.zeros(2, 40, dtype=torch.int32)
    pools = torch.zeros(64, 2, 32), torch.zeros(64, 2, 32)
    rule = AttentionRule(1.0)
    attend_pages(kernels, torch.zeros(2, 8, 32), pools, PagedRows([1, 1], lengths, table), page, rule)
    split, join = recording.entries
    assert split.work is not None and split.work.programs == (1 + 2) * 2 and join.name == "join_splits"
    numbers = (2 + 34) * 4 + 2 * 16  # table, tiles
    assert split.nbytes == sum(lengths) * 2 * (32 + 32) * 4 + numbers


@pytest.mark.parametrize(
    ("form", "batch"),
    [("bf16", 2), ("bf16", 8), ("int8", 2), ("int8", 8), ("int4", 1), ("fp8", 1), ("int4", 40), ("fp8", 8)],
)
def test_a_pass_reads_its_weights_and_pages_once(form: str, batch: int) -> None:
    wanted = dataclasses.replace(TOY, form=form, batch=batch)
    made = record(wanted)
    layers, extra = wanted.shape.layers, 4 if FORMS[form].inputs and batch > FEW_ROWS else 0
    # Embedding, cosines, sines, ten launches a layer (of one row six, after a norm), last norm, head, scores, choice.
    launches = 6 * layers + 1 if batch == 1 else (10 + extra) * layers
    assert made.launches - 2 == 3 + launches + 4
    products = [
        e for e in made.entries if e.kind == KERNEL and e.name not in ("norm_rows", "gate_rows", "attend_split")
    ]
    nbytes = sum(entry.nbytes for entry in products)
    assert wanted.weights <= nbytes <= 1.05 * wanted.weights + (5 << 20)
    pages = sum(e.nbytes for e in made.entries if e.name == "attend_split")
    assert wanted.pages <= pages <= 1.01 * wanted.pages


def test_captured_passes_are_faster_and_over_their_floor() -> None:
    card = Machine.load("H100-80GB")
    made = times(record(TOY), card)
    assert TOY.floor(card) < made.captured < made.eager
    assert sum(made.parts.values()) == pytest.approx(made.captured, abs=2.5e-5)  # launches of the graph and a copy


def test_published_figures_were_chosen_once_and_all_are_kept() -> None:
    chosen = json.loads(PUBLISHED.read_text())["rows"]
    kept = json.loads((RESULTS / "decode-published.json").read_text())
    assert len(chosen) >= 6 and {row["card"] for row in chosen} == {"H100-80GB", "A100-80GB"}
    assert all(row["address"].startswith("https://") and row["published"] and row["assumed"] for row in chosen)
    assert [{key: row[key] for key in chosen[0]} for row in kept] == chosen
    assert statistics.median(abs(row["error"]) for row in kept) <= ERROR


@pytest.mark.slow
def test_the_tables_are_those_that_are_kept() -> None:
    for name, rows_ in (("bars", bars(("bf16", "fp8"))), ("published", published())):
        kept = json.loads((RESULTS / f"decode-{name}.json").read_text())
        known = {json.dumps({k: v for k, v in row.items() if isinstance(v, str | int)}): row for row in kept}
        for row in rows_:
            before = known[json.dumps({k: v for k, v in row.items() if isinstance(v, str | int)})]
            assert {k: v for k, v in row.items() if isinstance(v, float)} == pytest.approx(
                {k: v for k, v in before.items() if isinstance(v, float)}, rel=1e-3
            )


@pytest.mark.slow
def test_bars_of_bf16_are_held_where_a_pass_is_one_of_memory() -> None:
    missed = {(row["card"], row["batch"], row["context"]) for row in bars(("bf16",)) if row["ratio"] > BARS["bf16"]}
    assert missed == {("A100-80GB", 256, 1024)}  # products take what operations take, attention what pages take
