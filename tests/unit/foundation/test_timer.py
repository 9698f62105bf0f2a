"""Timers against a clock that the test moves by hand."""

from __future__ import annotations

import logging
import re

import pytest

from deepspeed.accelerator.instruments import SynchronizedWallClockTimer as DeviceTimers
from deepspeed.accelerator.instruments import ThroughputTimer
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError
from deepspeed.foundation import timer as timers_module
from deepspeed.foundation.timer import HostWallClockTimer, NoopTimer, ThroughputMeter


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` lets time pass."""
    now = [100.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: now[0])

    def tick(seconds):
        now[0] += seconds

    return tick


@pytest.fixture
def lines(monkeypatch):
    said = []
    monkeypatch.setattr(timers_module, "log_dist", lambda message, ranks=None, level=logging.INFO: said.append(message))
    return said


def test_a_timer_adds_up_in_milliseconds(clock):
    forward = HostWallClockTimer()("forward")
    for seconds in (1.0, 3.0):
        forward.start()
        clock(seconds)
        forward.stop(record=True)
        clock(10.0)
    assert forward.mean() == pytest.approx(2000.0)
    assert (forward.elapsed(reset=False), forward.elapsed(), forward.elapsed()) == pytest.approx((4000.0, 4000.0, 0.0))


def test_a_running_timer_can_be_read_and_goes_on(clock):
    step = HostWallClockTimer()("step")
    step.start()
    clock(1.0)
    assert step.elapsed(reset=False) == pytest.approx(1000.0)
    clock(1.0)
    step.stop()
    assert step.elapsed() == pytest.approx(2000.0)


def test_a_running_timer_is_not_started_again(clock):
    step = HostWallClockTimer()("step")
    step.stop()
    assert step.elapsed() == 0.0
    step.start()
    clock(1.0)
    with pytest.raises(AssertionError, match="'step' runs already"):
        step.start()
    clock(1.0)
    step.stop()
    step.stop()
    assert step.elapsed() == pytest.approx(2000.0)


def test_each_measurement_waits_for_the_device():
    waits = []
    backward = HostWallClockTimer(lambda: waits.append(1))("backward")
    backward.start()
    backward.stop()
    assert len(waits) == 2


def test_the_log_line_and_the_means(clock, lines):
    timers = HostWallClockTimer()
    timers("forward").start()
    clock(0.5)
    timers("forward").stop(record=True)
    timers.log(["forward", "never used"], normalizer=2.0)
    assert lines == ["time (ms) | forward: 250.00"]
    assert timers.get_mean(["forward"]) == {"forward": pytest.approx(500e3)}  # microseconds
    assert timers.get_mean(["forward"]) == {"forward": 0.0}
    with pytest.raises(ArgumentError, match="normalizer is 0"):
        timers.log(["forward"], normalizer=0)
    assert timers.has_timer("forward") and not timers.has_timer("never used")


def test_the_mean_leaves_out_a_tenth_at_either_end_and_what_is_not_recorded(clock):
    step = HostWallClockTimer()("step")
    for seconds in (1000.0, *[1.0] * 8, 0.0):
        step.start()
        clock(seconds)
        step.stop(record=True)
    step.start()
    clock(500.0)
    step.stop()
    assert step.mean() == pytest.approx(1000.0)


def test_the_memory_of_the_device_beside_the_times(clock, lines):
    timers = DeviceTimers()
    timers("x").start()
    clock(0.001)
    timers("x").stop()
    words = "mem_allocated max_mem_allocated cache_allocated max_cache_allocated".split()
    pattern = r" \| ".join(rf"{word}: \d+\.\d+ GB" for word in words)
    assert re.fullmatch(pattern, DeviceTimers.memory_usage())
    timers.log(["x"], memory_breakdown=True)
    assert re.fullmatch(r"time \(ms\) \| x: 1\.00 \| " + pattern, lines[0])


def test_noop_measures_and_says_nothing(clock, lines):
    timers = NoopTimer()
    timers("x").start()
    clock(1.0)
    timers("x").stop()
    timers.log(["x"])
    assert (timers("x").elapsed(), timers("x").mean(), timers.get_timers(), lines) == (0.0, 0.0, {}, [])


def test_throughput_leaves_out_the_warm_up(clock, lines):
    meter = ThroughputMeter(batch_size=8, start_step=1, steps_per_output=3)
    for seconds in (100.0, 1.0, 3.0):  # two micro-steps each
        for last in (False, True):
            meter.start()
            clock(seconds / 2)
            meter.stop(global_step=last)
    assert meter.avg_samples_per_sec() == pytest.approx(16 / 4.0)
    assert lines == ["step 3: 4.00 samples/s on average, 2.67 samples/s now"]
    assert ThroughputMeter(8).avg_samples_per_sec() == 0.0


def test_the_throughput_timer_of_scripts(clock, lines):
    said = []
    config = DeepSpeedConfig({"train_batch_size": 8}).timers.throughput
    timer = ThroughputTimer(config, 8, start_step=1, steps_per_output=3, logging_fn=said.append)
    for seconds in (100.0, 1.0, 3.0):
        timer.start()
        clock(seconds)
        timer.stop(global_step=True)
    assert timer.avg_samples_per_sec() == pytest.approx(16 / 4.0)
    words = r"epoch=0/micro_step=3/global_step=3, RunningAvgSamplesPerSec=4.00, CurrSamplesPerSec=2.67, "
    assert re.fullmatch(words + r"MemAllocated=\d+\.\d+GB, MaxMemAllocated=\d+\.\d+GB", said[0]) and len(said) == 1
    off = ThroughputTimer(config.model_copy(update={"enabled": False}), 8, 0)
    off.start()
    clock(1.0)
    off.stop(global_step=True)
    assert (off.global_step_count, off.avg_samples_per_sec()) == (0, 0.0)
