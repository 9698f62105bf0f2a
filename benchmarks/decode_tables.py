"""Tables of generation on cards by arithmetic: `python -m benchmarks.simulate decode`.

Nothing here ran on a GPU. Passes are recorded from the package's calls (`decode_pass.py`) and replayed with published
rates (`deepspeed/simulator/cards`). Results are kept under `results/simulated/decode-*.json`; the picture is drawn from
them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.decode_pass import FORMS, Pass, record, times
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.replay import replay
from deepspeed.simulator.trace import KERNEL, MARK, HostEvent, KernelWork, Recording

RESULTS = Path(__file__).parent / "results" / "simulated"
PUBLISHED = RESULTS / "published-decode.json"
CARDS = ("H100-80GB", "A100-80GB")
BATCHES, CONTEXTS = (1, 32, 256), (1024, 8192)
BARS = {"bf16": 1.15, "int8": 1.2, "int4": 1.2, "fp8": 1.2}
# Of the published rows: forms that somebody else's kernels read.
THEIRS = {"bf16": "bf16-theirs", "fp8": "fp8-theirs", "int8": "int8-theirs"}
ERROR = 0.25  # bar: median of the published rows
# Tokens among which sampling looks for its places, with random normal logits of deviation 3.
CANDIDATES = {"greedy": None, "temperature": 0, "top-k 50": 130, "top-p 0.9": 10000}
Row = dict[str, Any]


def has(machine: Machine, form: str) -> bool:
    """Whether a card has the arithmetic of a form."""
    return machine.kernels is not None and FORMS[form].dtype in machine.kernels.products


def _row(wanted: Pass, machine: Machine, card: str) -> Row:
    made = times(record(wanted), machine)
    assert machine.kernels is not None
    floor, sheet = wanted.floor(machine), wanted.memory_floor(machine.bandwidth)
    return {
        "card": card, "form": wanted.form, "batch": wanted.batch, "context": wanted.context,
        "captured": made.captured, "eager": made.eager, "floor": floor, "ratio": made.captured / floor,
        "weights_and_pages": wanted.weights + wanted.pages, "of_data_sheet": made.captured / sheet,
        "fits": wanted.fits(machine), "launches": made.launches, "parts": made.parts,
    }  # fmt: skip


def bars(forms: tuple[str, ...] = tuple(BARS), model: str = "llama3-8b") -> list[Row]:
    """Predicted passes beside their floors."""
    found: list[Row] = []
    for card in CARDS:
        machine = Machine.load(card)
        for form in (form for form in forms if has(machine, form)):
            for batch in BATCHES:
                for context in CONTEXTS:
                    row = _row(Pass(model, batch, context, form), machine, card)
                    row["held"] = row["ratio"] <= BARS[form]
                    found.append(row)
                    _print_bar(row, BARS[form])
    return found


def _print_bar(row: Row, bar: float) -> None:
    told = {key: f"{row[key] * 1e3:7.2f}" for key in ("captured", "eager", "floor")}
    print(f"{row['card']:10s} {row['form']:5s} batch {row['batch']:3d} context {row['context']:5d}: captured "
          f"{told['captured']} ms, eager {told['eager']}, floor {told['floor']}, ratio {row['ratio']:.3f} (bar {bar}, "
          f"{'held' if row['held'] else 'MISSED'}); of data sheet's bandwidth {row['of_data_sheet']:.3f}"
          f"{'' if row['fits'] else '; does not fit the card'}", flush=True)  # fmt: skip


def shares(rows: list[Row]) -> None:
    """Of the passes that miss their bar, which kernels take the time over the floor."""
    for row in (row for row in rows if not row["held"]):
        whole = sum(row["parts"].values())
        parts = sorted(row["parts"].items(), key=lambda part: -part[1])[:6]
        print(f"{row['card']:10s} {row['form']:5s} batch {row['batch']:3d} context {row['context']:5d}: "
              + ", ".join(f"{name} {seconds / whole:.1%}" for name, seconds in parts))  # fmt: skip


def published() -> list[Row]:
    """Every published figure beside the simulator's."""
    found: list[Row] = []
    for figure in json.loads(PUBLISHED.read_text())["rows"]:
        machine = Machine.load(figure["card"])
        simulated = throughput(figure, machine)
        found.append(figure | {"simulated": simulated, "error": simulated / figure["tokens"] - 1})
        print(f"{figure['who']:18s} {figure['card'][:4]} {figure['model']:9s} {figure['weights']:7s} batch "
              f"{figure['batch']:3d} {figure['prompt']:4d} + {figure['output']:4d}: {figure['tokens']:9.1f} published, "
              f"{simulated:9.1f} simulated, {found[-1]['error']:+.1%}", flush=True)  # fmt: skip
    errors = [abs(row["error"]) for row in found]
    print(f"{len(errors)} figures: median error {statistics.median(errors):.1%} (bar {ERROR:.0%}), "
          f"worst {max(errors):.1%}")  # fmt: skip
    return found


def throughput(figure: Row, machine: Machine) -> float:
    """Tokens per second of a static batch: prompts at the rate of products, then captured passes.

    The time of a pass is linear in the length, so that of the middle stands for all.
    """
    assert machine.kernels is not None
    form = str(THEIRS.get(figure["weights"], figure["weights"]))
    wanted = Pass(figure["model"], figure["batch"], figure["prompt"] + figure["output"] // 2, form,
                  page_bytes=1.0 if figure["pages"] == "fp8" else 2.0)  # fmt: skip
    step = times(record(wanted), machine).captured
    tokens = figure["batch"] * figure["prompt"]
    matrices = replace(wanted, batch=1, context=0)
    prompts = max(tokens * matrices.flops / machine.kernels.products[FORMS[form].dtype],
                  matrices.weights / machine.kernels.stream)  # fmt: skip
    return figure["batch"] * figure["output"] / (prompts + figure["output"] * step)


def sampling() -> list[Row]:
    """What sampling adds to a pass."""
    found: list[Row] = []
    machine = Machine.load("H100-80GB")
    for batch in (1, 32):
        for name, candidates in CANDIDATES.items():
            made = times(record(Pass(batch=batch, candidates=candidates)), machine)
            chosen = sum(made.parts.get(part, 0.0) for part in ("adjust_scores", "weigh_parts", "choose_tokens"))
            share = chosen / made.captured
            found.append({"batch": batch, "options": name, "candidates": candidates, "captured": made.captured,
                          "choice": chosen})  # fmt: skip
            print(f"H100 bf16 batch {batch:2d} context 1024, {name:16s}: {made.captured * 1e3:6.2f} ms, of which the "
                  f"choice {chosen * 1e3:6.3f} ({share:.1%})", flush=True)  # fmt: skip
    return found


def twelve() -> list[Row]:
    """Whether decoding the 12-bit form in a kernel would pay: at most what its bytes save, if decoding were free."""
    found: list[Row] = []
    machine = Machine.load("H100-80GB")
    assert machine.kernels is not None
    for batch in (1, 8, 32, 128):
        plain = Pass(batch=batch)
        packed = replace(plain, form="12-bit")
        before = times(record(plain), machine).captured
        after = {per: _decoded(packed, machine, per) for per in (0.0, 0.1, 0.25, 0.5)}
        found.append({"batch": batch, "bf16": before, "12-bit": after})
        told = ", ".join(
            f"{per:g} → {seconds * 1e3:.2f} ms ({before / seconds:.2f} x)" for per, seconds in after.items()
        )
        print(f"H100 batch {batch:3d} context 1024: bf16 {before * 1e3:.2f} ms; 12 bits with so many instructions of "
              f"warps a weight: {told}", flush=True)  # fmt: skip
    return found


def _decoded(wanted: Pass, machine: Machine, per: float) -> float:
    """Seconds of a pass whose products decode each weight with `per` instructions of warps, once for 64 rows."""
    recording = record(wanted)
    outputs_of = dict(zip(("qkv", "out", "gate_up", "down"), wanted.matrices, strict=True))
    for entry in recording.entries:
        if entry.name in outputs_of:
            outputs, width = outputs_of[entry.name]
            times_decoded = -(-wanted.batch // 64)
            entry.work = KernelWork(instructions=per * outputs * width * times_decoded)
    return times(recording, machine).captured


# Steps of training, recorded by `benchmarks.simulate`: two each, of one rank of eight.
_STEP = {"maker": "package", "ranks": 8, "clip": 1.0, "repeat": 2}
TRAINED: list[Row] = [
    _STEP | {"model": "gpt2", "micro": 8, "length": 1024, "stage": 1},
    _STEP | {"model": "llama-1.3b", "micro": 4, "stage": 2},
    _STEP | {"model": "llama-7b", "micro": 4, "recompute": True, "stage": 3},
]
MATTERS = 0.03  # of a step: less is not worth a kernel
_BESIDE_ADAM = ("mul_", "pow", "copy_")  # in a step: clip and cast, which one launch with Adam would do on its way
_SUMS = ("sum",)  # sums of 16-bit messages in fp32


def training(kept: Path) -> list[Row]:
    """What one launch for clip, Adam and cast, or kernels for sums of 16-bit messages, would save of a step, at most:
    what is beside torch's fused Adam is taken to be free, and so are the sums."""
    from benchmarks.simulate import recorded

    found: list[Row] = []
    machine = Machine.load("H100-80GB")
    for case in TRAINED:
        recording = recorded(kept, **case)
        step = replay(recording, machine).seconds
        clip = 1 - replay(_without(recording, _BESIDE_ADAM, ("step",)), machine).seconds / step
        sums = 1 - replay(_without(recording, _SUMS, ("backward", "step")), machine).seconds / step
        adam = sum(machine.seconds(e) for e in recording.entries if e.name == "_fused_adamw_") / step
        found.append({"model": case["model"], "stage": case["stage"], "step": step / case["repeat"], "adam": adam,
                      "clip and cast": clip, "sums": sums})  # fmt: skip
        print(f"{case['model']:10s} stage {case['stage']}, 8 x H100: step {step / case['repeat'] * 1e3:7.1f} ms, fused "
              f"Adam {adam:.2%}; clip and cast in its launch save at most {clip:.2%}, sums of 16-bit messages at most "
              f"{sums:.2%} (worth a kernel from {MATTERS:.0%})", flush=True)  # fmt: skip
    return found


def _without(recording: Recording, names: tuple[str, ...], where: tuple[str, ...]) -> Recording:
    """A recording in which some kernels cost nothing; entries keep their places."""

    def kept(entry: HostEvent) -> HostEvent:
        free = entry.kind == KERNEL and entry.name in names and entry.where in where
        return HostEvent(MARK, entry.name, where=entry.where) if free else entry

    return replace(recording, entries=[kept(entry) for entry in recording.entries])


def bubbles() -> list[Row]:
    """What is left if the starts of dependent kernels overlap (programmatic dependent launch)."""
    found: list[Row] = []
    machine = Machine.load("H100-80GB")
    assert machine.kernels is not None
    overlapped = replace(machine, kernels=replace(machine.kernels, captured=machine.kernels.captured - 0.96e-6))
    for form in ("bf16", "int8", "fp8"):
        wanted = Pass(form=form)
        recording = record(wanted)
        row = {"form": form, "captured": times(recording, machine).captured,
               "overlapped": times(recording, overlapped).captured, "floor": wanted.floor(machine)}  # fmt: skip
        found.append(row)
        print(f"H100 {form} batch 1 context 1024: {row['captured'] / row['floor']:.3f} x floor, with overlapped starts "
              f"{row['overlapped'] / row['floor']:.3f}", flush=True)  # fmt: skip
    return found


def curve() -> list[Row]:
    """The picture's points: bf16 on the H100 at 1,024 tokens."""
    machine = Machine.load("H100-80GB")
    return [_row(Pass(batch=batch), machine, "H100-80GB") for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)]


def picture(rows: list[Row], path: Path) -> None:
    """Draw floor, captured and eager pass by batch; ImportError without matplotlib."""
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "decode"
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    batches = [row["batch"] for row in rows]
    for key, label, style in (("eager", "launched one by one", "--"), ("captured", "captured", "-"),
                              ("floor", "weights and pages over the memory's speed, or operations", ":")):  # fmt: skip
        axes.plot(batches, [row[key] * 1e3 for row in rows], style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences")
    axes.set_ylabel("ms a pass")
    axes.set_title("Llama-8B in bf16 at 1,024 tokens on an H100: simulated, not measured", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(kept: Path) -> None:
    """Print all tables, keep their rows, draw the picture. `kept`: folder of recorded steps of training."""
    rows: list[Row] = []
    print(json.loads(PUBLISHED.read_text())["rule"])

    def keep(name: str, make: Callable[[], list[Row]]) -> None:
        print(f"\n== {name}: simulated, not measured", flush=True)
        made = make()
        rows.extend(made if name == "bars" else [])
        (RESULTS / f"decode-{name}.json").write_text(json.dumps(made, indent=1) + "\n")

    keep("bars", bars)
    print("\n== shares of passes over their bars")
    shares(rows)
    for name, make in (("published", published), ("sampling", sampling), ("bubbles", bubbles), ("twelve", twelve),
                       ("training", lambda: training(kept)), ("curve", curve)):  # fmt: skip
        keep(name, make)
    path = Path(__file__).resolve().parents[1] / "docs" / "images" / "decode.svg"
    picture(json.loads((RESULTS / "decode-curve.json").read_text()), path)
    print(f"\npicture: docs/images/{path.name}")
