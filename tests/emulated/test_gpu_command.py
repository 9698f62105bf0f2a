"""`make gpu`: the plan, the file of rows, processes that end, the report; and the whole command, killed and resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import command, report, work
from benchmarks.gpu.plan import PARTS, START, MissingError, Part, Row, Setting, choose
from benchmarks.gpu.results import BEGUN, ENDED, FAILED, MISSING, OK, WRONG, Results
from tests.emulated.needs import need_compiler

ROOT = Path(__file__).resolve().parents[2]
ROWS = {(part.name, row.key) for part in PARTS for row in part.rows}
SIDES = [
    {"side": "ddp", "reference": "ddp", "ms": 4.0, "ratio": 1.0, "low": 1.0, "high": 1.0, "rounds": 6},
    {"side": "stage0", "reference": "ddp", "ms": 3.0, "ratio": 0.75, "low": 0.7, "high": float("inf"), "rounds": 6},
]


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_the_table_keeps_its_limits() -> None:
    keys = [(part.name, row.key) for part in PARTS for row in part.rows]
    assert len(set(keys)) == len(keys)
    for part in PARTS:
        assert part.limit <= 480 and all(START + row.seconds <= part.limit for row in part.rows)
        assert (ROOT / (part.function.partition(":")[0].replace(".", "/") + ".py")).exists()
    names = ["environment", "contract", "kernels", "parity", "generation", "large model", "training", "simulator"]
    assert [part.name for part in PARTS] == names


def test_the_plan_of_half_an_hour_has_every_part_and_one_of_ten_minutes_the_valuable_rows() -> None:
    half_hour = choose(PARTS, set(), 1800)
    assert {row.key for part in PARTS for row in part.rows if row.worth < 3} <= {
        key for keys in half_hour.values() for key in keys
    }
    short = choose(PARTS, {("environment", "native library"), ("environment", "kernels, built")}, 600)
    assert set(short) == {part.name for part in PARTS}
    assert all(
        row.key in short[part.name]
        for part in PARTS
        for row in part.rows
        if row.worth == 1 and part.name != PARTS[0].name
    )


@pytest.mark.parametrize("seconds", [0.0, 30.0, 200.0, 700.0])
def test_what_is_chosen_fits(seconds: float) -> None:
    by_name = {part.name: part for part in PARTS}
    chosen = choose(PARTS, set(), seconds)
    cost = sum(
        START + sum(row.seconds for row in by_name[name].rows if row.key in keys) for name, keys in chosen.items()
    )
    assert cost <= seconds and list(chosen) == [part.name for part in PARTS if part.name in chosen]


def test_worth_comes_before_place_and_what_is_done_is_left_out() -> None:
    first = Part("first", "", "", (Row("cheap", 5, 2), Row("dear", 50, 1), Row("done", 1, 1)))
    second = Part("second", "", "", (Row("worthy", 10, 1),))
    done = {("first", "done")}
    assert choose([first, second], done, 2 * START + 60) == {"first": ["dear"], "second": ["worthy"]}
    assert choose([first, second], done, 2 * START + 65) == {"first": ["cheap", "dear"], "second": ["worthy"]}
    assert choose([first, second], done, START + 20) == {"second": ["worthy"]}
    assert choose([first], done, START + 45) == {"first": ["cheap"]}


# -- the file of rows --------------------------------------------------------------------------------------------------


def test_a_torn_line_costs_its_row_alone(tmp_path: Path) -> None:
    results = Results(tmp_path / "card")
    assert results.rows() == {} and results.open_row("part") is None
    results.append("part", "a", BEGUN)
    results.append("part", "a", OK, says="fine", sides=SIDES)
    with results.path.open("ab") as file:
        file.write(b'{"part": "part", "key": "b", "sta')
    results.append("part", "c", BEGUN)
    assert set(results.rows()) == {("part", "a")} and (results.open_row("part") or {})["key"] == "c"
    results.append("part", "c", WRONG)
    results.append("part", "a", FAILED)
    states = {key: line["state"] for (_, key), line in results.rows().items()}
    assert states == {"a": FAILED, "c": WRONG} and results.open_row("part") is None


def test_a_row_that_ends_its_process_twice_is_left_alone(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for number in (1, 2):
        results.append("part", "a", BEGUN)
        results.append("part", "a", ENDED, says="exit code -11")
        assert (("part", "a") in results.rows()) == (number == 2)
    assert results.rows()["part", "a"]["state"] == ENDED


# -- a part's process --------------------------------------------------------------------------------------------------


def measured(setting: Setting, what: str) -> dict[str, Any]:
    """A function of a part, for the tests below."""
    if what == "missing":
        raise MissingError("no such library")
    if what in ("bug", "lost"):
        raise RuntimeError("CUDA error: an illegal memory access" if what == "lost" else "a bug")
    return {"says": what, "ok": what != "wrong"}


def part_of(*keys: str, seconds: float = 1.0) -> Part:
    rows = tuple(Row(key, seconds, 1, {"what": key}) for key in keys)
    return Part("part", "", f"{__name__}:measured", rows)


def test_every_end_of_a_row_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of("fine", "wrong", "missing", "bug", "lost", "never")
    monkeypatch.setattr(work, "PARTS", (part,))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[measured.__module__])
    said: list[str] = []
    setting, keys = Setting(True, tmp_path, 0.0), [row.key for row in part.rows]
    assert work.work("part", keys, time.time() + 100, setting, said.append) == work.BROKEN
    lines = {key: line for (_, key), line in Results(tmp_path).rows().items()}
    states = {"fine": OK, "wrong": WRONG, "missing": MISSING, "bug": FAILED, "lost": FAILED}
    assert {key: line["state"] for key, line in lines.items()} == states and len(said) == 5
    assert lines["missing"]["says"] == "no such library" and "a bug" in lines["bug"]["trace"]
    assert work.work("part", ["never"], time.time() + 0.5, setting, said.append) == 0 and len(said) == 5


def call_of(folder: Path, again: float = 0.0) -> command.Call:
    return command.Call(Results(folder), again, time.time() + 300, True)


def test_a_process_that_ends_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def process(call: command.Call, part: Part, keys: list[str]) -> tuple[int, str]:
        started.append(keys)
        for key in keys:
            call.results.append(part.name, key, BEGUN)
            if key == "crash":
                return -signal.SIGSEGV, "exit code -11"
            call.results.append(part.name, key, OK)
            if key == "lost":
                return work.BROKEN, ""
            if key == "last":
                return 0, ""  # the part's limit is reached
        return 0, ""

    monkeypatch.setattr(command.Call, "_process", process)
    part = part_of("lost", "crash", "last", "rest")
    call_of(tmp_path).run(part, [part])
    assert started == [
        ["lost", "crash", "last", "rest"],
        ["crash", "last", "rest"],
        ["crash", "last", "rest"],
        ["last", "rest"],
        ["rest"],
    ]
    states = {key: line["state"] for (_, key), line in Results(tmp_path).rows().items()}
    assert states == {"lost": OK, "crash": ENDED, "last": OK, "rest": OK}
    started.clear()
    call_of(tmp_path, again=time.time() + 1).run(part, [part])  # the clock of a later call
    assert started[0] == ["crash"], "only what is not ok is measured again"


def test_a_process_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(command, "GRACE", 0.1)
    began, patience = time.time(), float(os.environ.get("TEST_PATIENCE", "1"))
    code, why = call_of(tmp_path / "card")._process(replace(part_of("a"), limit=1.0 * patience), ["a"])
    assert code == -signal.SIGKILL and "not over after" in why and time.time() - began < 20 * patience
    child, until = Path("/proc", (tmp_path / "child").read_text().strip(), "cmdline"), time.time() + 5 * patience
    while _runs(child) and time.time() < until:
        time.sleep(0.02)
    assert not _runs(child), "what the process had started goes on"


def _runs(path: Path) -> bool:
    """Whether a process runs; one that has ended and was not waited for has an empty command line."""
    try:
        return bool(path.read_text())
    except OSError:
        return False


def test_a_row_that_takes_too_long_is_left_alone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, part, call = time.time(), part_of("hangs"), call_of(tmp_path)
    call = replace(call, rehearse=False)
    call.results.append("part", "hangs", BEGUN)
    assert call._overdue(part, now) == "", "it has just begun"
    monkeypatch.setattr(command.time, "time", lambda: now + 40)
    assert call._overdue(part, now) == "not over after 32 s"
    assert replace(call, rehearse=True)._overdue(part, now) == ""
    call.results.append("part", "hangs", ENDED, final=True)
    assert ("part", "hangs") in call.results.rows()
    assert call._overdue(part, now - 20) == "", "the next row may begin"
    monkeypatch.setattr(command.time, "time", lambda: now + 100)
    assert "54 s" in call._overdue(part, now - 20), "no row begins"


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "_card", lambda rehearse: ("", ""))
    assert command.main([]) == command.NO_GPU and "no GPU" in capsys.readouterr().err


def test_a_call_goes_on_in_the_newest_folder_of_its_card(tmp_path: Path) -> None:
    for name in ("NVIDIA-H100-2026-01-02", "NVIDIA-H100-2026-01-10", "NVIDIA-H100-80GB-2026-02-01", "other"):
        (tmp_path / name).mkdir()
    assert command._folder(tmp_path, "NVIDIA H100", False).name == "NVIDIA-H100-2026-01-10"
    fresh = command._folder(tmp_path, "NVIDIA H100", True)
    fresh.mkdir()
    assert command._folder(tmp_path, "NVIDIA H100", True).name == f"{fresh.name}-2"


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_has_every_row_and_draws_every_side(tmp_path: Path) -> None:
    results, part = Results(tmp_path / "emulated-2026-01-01"), next(part for part in PARTS if part.name == "training")
    results.append("environment", "machine", OK, says="a | b", card="emulated", seconds=1.0, sources="0badcafe")
    results.append("training", part.rows[0].key, OK, says="faster", sides=SIDES, seconds=2.0, sources="0badcafe")
    results.append("generation", "vLLM", MISSING, says="vLLM is not installed", seconds=0.1)
    paths = report.write(results.folder)
    text = paths[0].read_text()
    assert [path.name for path in paths] == ["report.md", "training.png"]
    assert all(f"| {key} |" in text for _, key in ROWS) and "vLLM is not installed" in text
    assert f"{len(ROWS) - 3} not measured" in text and "sources 0badcafe" in text and "Emulated device" in text
    assert f"| {part.rows[0].key} | stage0 | 3.00 | 0.750 [0.700, inf] | ddp | 6 |" in text
    assert paths[1].read_bytes()[:4] == b"\x89PNG"


# -- the whole command -------------------------------------------------------------------------------------------------


def rehearsal(out: Path, *options: str) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(out), "--minutes", "120", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (out / "calls.txt").open("a") as log:
        return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def processes_of(out: Path) -> list[str]:
    """Command lines of the part's processes that are alive."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if "benchmarks.gpu.work" in line and str(out) in line:
            alive.append(line)
    return alive


@pytest.mark.slow
def test_the_rehearsal_is_complete_after_kills(tmp_path: Path) -> None:
    """SIGKILL to the command at drawn moments; what was known stays known, and nothing stays on the card."""
    need_compiler()
    draw, kills, seen = random.Random(5), 0, 0
    patience = float(os.environ.get("TEST_PATIENCE", "1"))
    while True:
        process = rehearsal(tmp_path)
        try:
            code = process.wait(timeout=draw.uniform(3, 40) * patience if kills < 7 else 3000)
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        deadline = time.time() + 30
        while processes_of(tmp_path) and time.time() < deadline:
            time.sleep(0.1)
        assert processes_of(tmp_path) == [], "a part's process outlives the command"
        for folder in tmp_path.glob("emulated-*"):
            known = len(Results(folder).rows())
            assert known >= seen, "a finished row was lost"
            seen = known
    (folder,) = tmp_path.glob("emulated-*")
    results = Results(folder)
    rows, text = results.rows(), (folder / "report.md").read_text()
    assert code == 0, (tmp_path / "calls.txt").read_text()[-3000:]
    assert kills >= 3 and set(rows) == ROWS
    finished = [(line["part"], line["key"]) for line in results.lines() if line["state"] not in (BEGUN, ENDED)]
    assert len(set(finished)) == len(finished), "a finished row was measured again"
    assert len(finished) == len(results.lines()) - len([1 for line in results.lines() if line["state"] == BEGUN])
    assert all(f"| {key} | {rows[part, key]['state']} |" in text for part, key in ROWS)
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {"generation.png", "training.png", "simulator.png"}
    print(json.dumps({"kills": kills, "seconds": round(sum(line["seconds"] for line in rows.values()))}))
