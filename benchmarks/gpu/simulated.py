"""The simulator against the clock: kept recordings of one card's steps, replayed, beside the measured ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from benchmarks.gpu.plan import TINY, MissingError, Setting
from benchmarks.gpu.results import Results
from benchmarks.simulate import KEPT
from deepspeed.simulator.machine import Machine, cards
from deepspeed.simulator.replay import replay
from deepspeed.simulator.trace import Recording

H200 = {"bandwidth": 4.8e12, "memory": 131 * 10**9}  # NVIDIA's data sheet of the H200 SXM: else an H100


def machine_of(name: str) -> Machine | None:
    """Return the machine file of a card by torch's name of it, for one rank; None where there is none."""
    said = name.upper().replace(" ", "-")
    if "H200" in said:
        return replace(Machine.load("H100-80GB"), ranks=1, **H200)
    known = [card for card in cards() if card[:8] in said or card.split("-")[0] in said]
    return replace(Machine.load(known[0]), ranks=1) if known else None


def recording_of(side: str, model: str, micro: int, length: int, recompute: bool) -> Recording | None:
    """Return the kept recording of a side's step, or None."""
    for path in sorted(KEPT.glob("one-card-*.case")):
        case = json.loads(path.read_text())
        maker = f"stage{case['stage']}" if case["maker"] == "package" else case["maker"]
        same = case["model"], case["micro"], case["length"], case["recompute"]
        if maker == side and same == (model, micro, length, recompute):
            return Recording.load(path.with_suffix(".json.gz"))
    return None


def measure(
    setting: Setting, row: str, sides: list[str], model: str, micro: int, length: int, recompute: bool = False
) -> dict[str, Any]:
    """The part `simulator`: ratios are simulated over measured milliseconds of a row of `training`."""
    rows = Results(setting.folder).rows()
    measured = rows.get(("training", row), {})
    if "sides" not in measured:
        raise MissingError("the part `training` has no such row yet")
    shape = setting.pick((model, micro, length, recompute), (*TINY, False))
    card = "H100" if setting.rehearse else rows.get(("environment", "machine"), {}).get("card", "")
    machine = machine_of(card)
    if machine is None:
        raise MissingError(f"no machine file for {card or 'an unknown card'}")
    records, absent = [], []
    for side in measured["sides"]:
        recording = recording_of(side["side"], *shape)
        if recording is None:
            absent.append(side["side"])
            continue
        simulated = 1e3 * replay(recording, machine).seconds
        ratio = simulated / side["ms"]
        records.append({"side": side["side"], "reference": "measured", "ms": simulated, "measured ms": side["ms"],
                        "ratio": ratio, "low": ratio, "high": ratio, "rounds": side["rounds"]})  # fmt: skip
    if not records:
        raise MissingError(f"no recordings of {', '.join(absent)}")
    worst = max(abs(math.log(record["ratio"])) for record in records)
    says = ", ".join(f"{each['side']} {each['ms']:.1f} ms, measured {each['measured ms']:.1f}" for each in records)
    says += f"; off by {math.exp(worst) - 1:.0%} at most" + (f"; no recording of {', '.join(absent)}" if absent else "")
    return {"says": says, "sides": records}
