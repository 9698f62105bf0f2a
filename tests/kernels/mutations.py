"""Changed kernels: an operator, a constant, a mask of a kernel's source is changed, and the checks have to notice.

`python -m tests.kernels.mutations [SUITE ...] [--count 40] [--seed 0]` prints one line per change and the share that
was noticed, and exits 1 if it is below 95 %. A change runs in a process of its own, and ends after a time limit.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.kernels.interpreter import InterpretedKernels, module_of
from tests.kernels.suites import SUITES, Suite

BAR, LEAST_LIMIT = 0.95, 30.0  # share of changes; seconds of one, beyond twice what all checks take
BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
          ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.RShift: ast.LShift,
          ast.LShift: ast.RShift, ast.BitXor: ast.BitAnd}  # fmt: skip
COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
CALLED = {"maximum": "minimum", "minimum": "maximum", "max": "min", "exp2": "abs", "sum": "max"}
Change = tuple[str, Callable[[], None]]


def _changes(source: str, tree: ast.AST) -> Iterator[Change]:
    """Each possible change of the kernels of a module: what it is, and a function that makes it in the tree."""
    lines = source.splitlines()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
            continue
        for node in ast.walk(ast.Module(function.body, [])):
            line = f"{function.name}: {lines[getattr(node, 'lineno', 1) - 1].strip()} |"
            if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in BINARY:
                yield from _replaced(line, node, "op", BINARY[type(node.op)]())
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
                yield from _replaced(line, node, "ops", [COMPARED[type(node.ops[0])]()])
            elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
                yield from _replaced(line, node, "value", node.value + 1)
            elif isinstance(node, ast.Attribute) and node.attr in CALLED:
                yield from _replaced(line, node, "attr", CALLED[node.attr])
            elif isinstance(node, ast.keyword) and node.arg == "mask":
                everywhere = ast.parse("(0 == 0)", mode="eval").body
                widened = ast.BinOp(node.value, ast.BitOr(), everywhere)
                yield from _replaced(f"{function.name}: mask |", node, "value", widened)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "where":
                yield from _replaced(line, node, "args", [node.args[0], node.args[2], node.args[1]])
            elif isinstance(node, ast.If) and node.orelse == [] and not isinstance(node.test, ast.Name):
                yield from _replaced(line, node, "test", ast.Constant(False))


def _replaced(line: str, node: Any, name: str, value: Any) -> Iterator[Change]:
    before = ast.unparse(node) if not isinstance(node, ast.Module) else ""

    def change() -> None:
        setattr(node, name, value)
        ast.fix_missing_locations(node)

    shown = {"op": lambda: type(value).__name__, "ops": lambda: type(value[0]).__name__}
    yield f"{line} {before[:70]!r} {name} -> {shown.get(name, lambda: str(value)[:20])()}", change


def changed_sources(source: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Draw changes of a module's source, without repetition: what each is, and the source with it."""
    total = sum(1 for _ in _changes(source, ast.parse(source)))
    drawn = random.Random(seed).sample(range(total), min(count, total))
    sources = []
    for number in sorted(drawn):
        tree = ast.parse(source)
        name, change = list(_changes(source, tree))[number]
        change()
        sources.append((name, ast.unparse(tree)))
    return sources


def noticed(suite: Suite, source: str, limit: float) -> str:
    """Why the checks fail on a changed source, in a process that may crash or stand still; "" if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder) / "changed.py", Path(folder) / "report"
        path.write_text(source)
        child = os.fork()
        if not child:
            _judge(suite, path, report)
        deadline = time.monotonic() + limit
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "it does not end"
            time.sleep(0.02)
        return report.read_text() if report.exists() else "the process ended"


def _judge(suite: Suite, path: Path, report: Path) -> None:
    try:
        kernels = InterpretedKernels(module_of(str(path), "changed"))
        for name, check in suite.checks().items():
            try:
                check(kernels)
            except BaseException as error:
                report.write_text(f"{name}: {type(error).__name__} {str(error)[:80]}")
                return
        report.write_text("")
    finally:
        os._exit(0)


def run(name: str, count: int, seed: int) -> float:
    """Print what each change of a suite's kernels leads to; return the share that was noticed."""
    suite = SUITES[name]
    source = suite.path().read_text()
    sources = [each for each in changed_sources(source, 10 * count, seed)]
    random.Random(seed).shuffle(sources)
    start = time.monotonic()
    if reason := noticed(suite, source, 900.0):
        raise SystemExit(f"{name}: the kernels as they are fail: {reason}")
    limit = LEAST_LIMIT + 2 * (time.monotonic() - start)
    seen, total = 0, 0
    for change, text in sources:
        if total == count:
            break
        if any(all(part in change for part in parts) for parts in suite.equivalent):
            continue
        reason = noticed(suite, text, limit)
        total, seen = total + 1, seen + bool(reason)
        print(
            f"{'noticed' if reason else 'SURVIVED'}  {change}  {reason.splitlines()[0] if reason else ''}", flush=True
        )
    print(f"{name}: {seen} of {total} noticed in {time.monotonic() - start:.0f} s", flush=True)
    return seen / total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=list(SUITES))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shares = [run(name, arguments.count, arguments.seed) for name in arguments.suites]
    return int(min(shares) < BAR)


if __name__ == "__main__":
    sys.exit(main())
