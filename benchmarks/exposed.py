"""What the timeline calls exposed communication, against steps without any: two ranks at stage 0, beside two processes
that train the same model alone at the same time. The step less its exposed communication should be their step.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from common import GPT, Shape, World, batch_of, median_interval, print_table, serve, start_world, write_json

BAR = 0.05  # of the step


def make_rank(seed: int, width: int, layers: int) -> Callable[..., Any]:
    """A rank; answers with seconds of a step, and of what was exposed in it."""
    import deepspeed
    from deepspeed.foundation.recorder import now, recorder
    from deepspeed.profiling.timeline import RankRecord, Timeline

    rank, world = start_world()
    shape = Shape(width=width, layers=layers)
    torch.manual_seed(0)
    model = GPT(shape)
    config = {"train_micro_batch_size_per_gpu": shape.batch, "zero_optimization": {"stage": 0}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def handle(index: int) -> tuple[float, float]:
        windows = batch_of(shape, index, seed + rank)
        if world > 1:
            torch.distributed.barrier()
        recorder.start()
        began = now()
        engine.backward(engine(windows))
        engine.step()
        ended = now()
        recorder.stop()
        spans, lost = recorder.take()
        timeline = Timeline([RankRecord(0, spans, [began, ended], threading.get_ident(), lost)])
        return timeline.step_seconds, timeline.exposed

    return handle


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    setup = {"width": arguments.width, "layers": arguments.layers}
    pair = World("exposed.py", 2, {"seed": 0, **setup})
    alone = [World("exposed.py", 1, {"seed": seed, **setup}) for seed in (0, 1)]
    rounds: list[tuple[float, float, float]] = []

    def ask(world: World, index: int, into: list[float]) -> None:
        into.append(world.ask(index=index)[0][0])

    for index in range(arguments.rounds + 2):
        answers = pair.ask(index=index)
        bare: list[float] = []
        threads = [threading.Thread(target=ask, args=(world, index, bare)) for world in alone]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rounds.append((*(statistics.mean(a[at] for a in answers) for at in (0, 1)), statistics.mean(bare)))
        time.sleep(0.05)
    for world in (pair, *alone):
        world.close()
    step, exposed, bare_step = (median_interval([r[at] for r in rounds[2:]]) for at in range(3))
    gap = median_interval([(s - e - b) / s for s, e, b in rounds[2:]])
    row = {"step_ms": 1e3 * step.median, "exposed_ms": 1e3 * exposed.median, "alone_ms": 1e3 * bare_step.median}
    row |= {"gap": gap.median, "gap_low": gap.low, "gap_high": gap.high, "bar": BAR, "rounds": len(rounds) - 2}
    held = "reached" if abs(gap.median) <= BAR else "MISSED"
    cells = [f"{row['step_ms']:.1f}", f"{row['exposed_ms']:.1f}", f"{row['alone_ms']:.1f}"]
    print_table(
        ["step ms", "exposed ms", "alone ms", "gap, of the step [95 %]", "bar"],
        [[*cells, f"{gap.median:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]", f"{BAR} {held}"]],
    )
    if not arguments.dry:
        print(f"written: {write_json('exposed.json', row)}")


if __name__ == "__main__":
    import sys

    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
