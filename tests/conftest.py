"""Fixtures of the whole suite: persistent workers, police against leaks, and the pinned list of skips."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.harness import WorkerPool, fork_server
from tests.harness.drawn import mark_others_slow
from tests.harness.police import Police
from tests.harness.pool import EMULATED_IMPORTS, WORKER_IMPORTS

SKIPS = Path(__file__).parent / "skips.txt"
MANY_MODULES = 50
_pools: dict[tuple[str, int], WorkerPool] = {}
# A machine that others use too draws slowly; that says nothing about a test.
hypothesis.settings.register_profile("shared", suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shared")
_skipped: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: part of the full product of a table, not of `make test`")
    config.addinivalue_line("markers", "drawn(count): so many of its cells run in `make test`; the others are slow")
    config.addinivalue_line("filterwarnings", "error:::deepspeed")
    # A shell, or nohup, starts what is in the background so; what tests start would inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    torch.set_num_threads(1)  # the reference must sum in the order the single-threaded workers sum
    gc.disable()  # collecting 14,000 tests and what they import makes little garbage, and the collector looks at it all


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """The cells of a test that is slow as a whole, ten thousand, are not made where none of them would run."""
    slow = inspect.isfunction(obj) and any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ()))
    return [] if slow and "not slow" in collector.config.option.markexpr.split(" and ") else None


@pytest.hookimpl(tryfirst=True)  # before cells are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_others_slow(items)


def pytest_collection_finish() -> None:
    """What collection has made stays to the end: no later pass of the garbage collector has to look at it."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """What a file has imported and caches stays too: a pass over it takes seconds, and would copy it in each child."""
    yield
    gc.collect()
    gc.freeze()


def _started(worker: str, imported: Sequence[str] = ()) -> Iterator[Callable[[int], WorkerPool]]:
    def pool(size: int) -> WorkerPool:
        return _pools.setdefault((worker, size), WorkerPool(size, worker, imported))

    yield pool
    for key in [key for key in _pools if key[0] == worker]:
        _pools.pop(key).close()


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """`workers(n).run(fn, *args)` runs `fn` on `n` ranks; a pool is started once, when first asked for."""
    yield from _started("tests.harness.worker", WORKER_IMPORTS)


@pytest.fixture(scope="session")
def emulated() -> Iterator[Callable[[int], WorkerPool]]:
    """As `workers`, on ranks whose torch has the emulated device (`tests/emulated`), one device each."""
    from tests.emulated.build import built

    built()
    yield from _started("tests.emulated.worker", EMULATED_IMPORTS)


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one that ends with the test, when it was not there before."""
    from deepspeed import comm

    before = comm.is_initialized()
    yield
    if comm.is_initialized() and not before:
        comm.destroy_process_group()


@pytest.fixture
def without_group() -> None:
    """For tests that predict, which makes a world: ends the process group that an earlier test left to this process."""
    from deepspeed import comm

    if comm.is_initialized():
        comm.destroy_process_group()


def _ranks() -> set[int]:
    return {pid for pool in _pools.values() for pid in pool.pids}


@pytest.fixture(autouse=True)
def _police() -> Iterator[None]:
    """A test that leaves an environment variable, a thread or a child process behind fails.

    What it has imported, the collector need not look at again in this file either.
    """
    police, modules = Police(_ranks), len(sys.modules)
    yield
    left = police.report(lambda: _ranks() | fork_server.pids())
    if left:
        pytest.fail(f"the test left behind: {left}")
    if len(sys.modules) > modules + MANY_MODULES:
        gc.collect()
        gc.freeze()


def _unpinned_skips() -> list[str]:
    lines = (line.split("#", 1)[0].strip() for line in SKIPS.read_text().splitlines())
    return sorted(_skipped - {line for line in lines if line})


def _note_skip(report: pytest.CollectReport | pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.add(report.nodeid)


pytest_runtest_logreport = _note_skip
pytest_collectreport = _note_skip


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unpinned_skips():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in _unpinned_skips():
        terminalreporter.write_line(f"SKIPPED BUT NOT PINNED in {SKIPS.name}: {nodeid}", red=True)
