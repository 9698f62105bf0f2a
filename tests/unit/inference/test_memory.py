"""What a long-lived generator keeps: nothing."""

from __future__ import annotations

import random

import psutil
import pytest

from deepspeed.inference import Generator, Request, Sampling
from tests.unit.inference.toys import llama


@pytest.mark.slow
def test_ten_thousand_unlike_requests_leave_no_memory_behind() -> None:
    """Two answers of each prompt, every tenth request cancelled: after the first thousand, memory stays."""
    generator = Generator(llama(hidden_size=32, num_hidden_layers=1), cache_bytes=1 << 21, max_sequences=64)
    draw, process, marks = random.Random(3), psutil.Process(), {}
    for number in range(5_000):
        prompt = [draw.randrange(3, 256) for _ in range(draw.randrange(4, 24))]
        for index in range(2):
            sampling = Sampling(max_new_tokens=draw.randrange(1, 6), temperature=1.0, seed=number, index=index)
            generator.submit(Request((number, index), prompt, sampling))
        if number % 5 == 0:
            assert generator.cancel((number, 0))
        while len(generator._live) > 64:
            generator.step()
        if number in (500, 4_999):
            marks[number] = process.memory_info().rss
    while not generator.idle:
        generator.step()
    assert generator.load().free_pages == generator.pages.count
    assert not generator._live and len(generator.pages._nodes) <= generator.pages.count
    grown = marks[4_999] / marks[500] - 1
    print(f"memory after 10,000 requests: {grown:+.2%} of what it was after 1,000 ({marks[500] >> 20} MB)")
    assert grown < 0.01


def test_pages_take_what_the_page_of_docs_says() -> None:
    """pages x page size x layers x (key + value heads x head size) x bytes, and one page of zeros."""
    generator = Generator(llama(), cache_bytes=1 << 20, page_size=16)
    each = 16 * 2 * (2 + 2) * 16 * 4
    assert generator.pages.count == (1 << 20) // each
    held = sum(pool.nbytes for pair in generator._executor.store.layers.values() for pool in pair)
    assert held == (generator.pages.count + 1) * each
