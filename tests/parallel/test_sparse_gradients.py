"""`sparse_gradients`: gradients of embeddings are sent by rows, with the numbers of whole gradients and fewer bytes."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.collectives import collectives
from deepspeed.comm.process_groups import axis as axes
from tests.harness.pool import WorkerPool
from tests.parallel.tiny import masters, raises, said, start, with_words

Workers = Callable[[int], WorkerPool]
WORDS, WIDTH, LENGTH = 700, 6, 6
STAGES = (0, 1, 2)


class Lookup(nn.Module):
    """A table of which each rank reads few rows, one of which all rows are read, and a head.

    Args:
        sparse: autograd returns sparse gradients of the tables.
        tied: the head has the weight of the large table.
    """

    def __init__(self, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.all = nn.Embedding(LENGTH, WIDTH * LENGTH * 200, sparse=sparse)
        self.out = nn.Linear(WIDTH, WORDS if tied else 3, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, words: torch.Tensor, uses_table: bool = True) -> torch.Tensor:
        positions = self.all(torch.arange(LENGTH, device=words.device))[:, :WIDTH]
        hidden = positions + self.table(words) if uses_table else positions.expand(*words.shape, WIDTH)
        return self.out(hidden.tanh())


def model_of(**kinds: bool) -> Lookup:
    torch.manual_seed(0)
    return Lookup(**kinds)


def words_of(step: int, rank: int) -> torch.Tensor:
    """Words of a batch: repeated ones, one that only this rank has, and rows that boundaries of shards divide."""
    source = torch.Generator().manual_seed(100 * step + rank)
    common = torch.randint(0, 40, (2, LENGTH), generator=source)
    common[0, 0] = WORDS - 1 - rank
    common[1, :3] = torch.tensor([350, 233, 466])  # 350 with two ranks, the others with three
    return common


def train(engine: Any, steps: range, uses_table: Callable[[int], bool] = lambda _rank: True) -> list[float]:
    """Losses of micro-batches."""
    losses, rank = [], dist.get_rank()
    for step in steps:
        loss = engine(words_of(step, rank).to(engine.device), uses_table(rank)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def over_gloo() -> Iterator[None]:
    """Inside, ranks share no memory; afterwards their pool has to be closed, since its shared memory is."""
    axes.forget_axes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(axes, "shared_memory_of", lambda _group: None)
        yield


def run_on(pool: WorkerPool, shared: bool, function: Callable[..., Any], *args: Any) -> None:
    pool.run(function, *args, shared)
    if not shared:
        pool.kill()  # it starts anew in its next call


def rows_sent(engine: Any) -> list[str]:
    """Names of the groups whose gradients may be sent by rows."""
    return [bucket.group.name for bucket in engine._state.components.reducer.buckets if bucket.rows is not None]


def compare(stage: int, steps: int, how: dict[str, Any], **settings: Any) -> None:
    """Train with and without the key; losses, norms and fp32 weights are equal to the bit."""
    sparse, uses_table = how.get("sparse", False), how.get("uses_table", lambda _rank: True)
    seen = []
    for key in (False, True):
        with start(stage, model_of(sparse=sparse), sparse_gradients=key, **settings) as engine:
            losses = train(engine, range(steps), uses_table)
            seen.append((losses, engine.get_global_grad_norm(), masters(engine)))
            assert rows_sent(engine) == (["table.weight", "all.weight"] if key else []), (stage, settings)
    (losses, norm, whole), (ours, our_norm, by_rows) = seen
    assert losses == ours, (stage, settings)
    assert norm == pytest.approx(our_norm, rel=1e-12), (stage, settings)
    for name, weight in whole.items():
        assert torch.equal(weight, by_rows[name]), (stage, settings, name, float((weight - by_rows[name]).abs().max()))
    trained = (whole["table.weight"] - model_of().table.weight).abs().sum(1).count_nonzero()
    assert 0 < trained < WORDS / 4, trained


def cells(stage: int, precision: str, accumulation: int, sparse: bool, shared: bool) -> None:
    with contextlib.nullcontext() if shared else over_gloo():
        compare(stage, 3 * accumulation, {"sparse": sparse}, precision=precision, accumulation=accumulation, clip=0.01)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "gloo"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "strided"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_whole_gradients(
    workers: Workers, ranks: int, stage: int, precision: str, accumulation: int, sparse: bool, shared: bool
) -> None:
    run_on(workers(ranks), shared, cells, stage, precision, accumulation, sparse)


def absent_tokens() -> None:
    """A rank whose batch does not use the table: it has no gradient there, and its rounds are zeros."""
    for stage in STAGES:
        for accumulation in (1, 2):
            how = {"uses_table": lambda rank: rank != 1, "sparse": accumulation == 2}
            compare(stage, 2 * accumulation, how, accumulation=accumulation, precision="bf16" if stage else "fp32")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_without_tokens(workers: Workers, ranks: int) -> None:
    workers(ranks).run(absent_tokens)


def delayed(shared: bool) -> None:
    """Ranks that start messages at other times, and in another order, have the same sums."""
    source = random.Random(dist.get_rank())
    with contextlib.nullcontext() if shared else over_gloo(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "PLANTED_DELAY", lambda _label: time.sleep(source.random() / 500))
        for stage in STAGES:
            compare(stage, 4, {"sparse": True}, precision="bf16", zero={"reduce_bucket_size": 50})


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "gloo"])
def test_delays_change_no_bit(workers: Workers, shared: bool) -> None:
    run_on(workers(3), shared, delayed)


def received(engine: Any, step: int) -> dict[str, int]:
    """Bytes that this rank receives in a step, by the first words of messages."""
    from deepspeed.comm.watchdog.comms_logger import comms_logger

    comms_logger.reset()
    train(engine, range(step, step + 1))
    found: dict[str, int] = {}
    for row in comms_logger.summary():
        found[row["op"]] = found.get(row["op"], 0) + row["received_bytes"]
    return found


def counted() -> None:
    """Bytes of a step are those of the formula, and fewer than those of whole gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for stage in STAGES:
        for precision, itemsize in (("fp32", 4), ("bf16", 2)):
            seen: dict[bool, dict[str, int]] = {}
            for key in (False, True):
                settings = {"comms_logger": {"enabled": True}, "precision": precision, "sparse_gradients": key}
                with start(stage, model_of(), **settings) as engine:
                    train(engine, range(2))
                    seen[key] = received(engine, 2)
                    layout = engine.module.table.weight._ds_member.group.layout
            low, high = layout.cuts[rank : rank + 2] if stage else (0, layout.padded)
            assert stage == 0 or any(cut % WIDTH for cut in layout.cuts)
            mine = range(low // WIDTH, -(-high // WIDTH))
            rows = [len(set(words_of(2, other).flatten().tolist()) & set(mine)) for other in range(ranks)]
            peers = sum(rows) - rows[rank]
            at = (stage, precision, seen)
            assert peers > 0, at
            assert seen[True].get("rows", 0) == peers * (WIDTH * itemsize + 8), at
            assert seen[True]["count"] == 2 * (ranks - 1) * (ranks if stage else 1) * 8, at  # of two tables
            dense, sparse = (sum(seen[key].get(n, 0) for n in ("reduce", "share", "rows")) for key in (False, True))
            table = (WORDS * WIDTH if stage == 0 else len(mine) * WIDTH) * itemsize * (ranks - 1)
            assert dense - sparse > 0.7 * (table if stage or ranks == 2 else 2 * table / ranks), at


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_formula(workers: Workers, ranks: int) -> None:
    workers(ranks).run(counted)


def fallbacks() -> None:
    """Gradients with all rows, and those of tied tables, are sent whole; each is said once."""
    for stage in STAGES:
        with said() as lines, start(stage, model_of(), sparse_gradients=True) as engine:
            train(engine, range(3))
        if dist.get_rank() == 0:
            assert with_words(lines, "sent by rows of table.weight, all.weight") == 1, lines
            told = "rows of all.weight were not fewer bytes", f"up to {LENGTH} of {LENGTH} rows"
            assert with_words(lines, *told) == 1, lines
            assert with_words(lines, "rows of table.weight were not fewer") == 0, lines
        found = []
        for key in (False, True):
            with said() as lines, start(stage, model_of(tied=True), sparse_gradients=key) as engine:
                found.append((train(engine, range(2)), masters(engine)))
                assert rows_sent(engine) == (["all.weight"] if key else [])
            if dist.get_rank() == 0 and key:
                assert with_words(lines, "'table.weight' is also a weight of 'out'", "sent whole") == 1, lines
        assert found[0][0] == found[1][0] and all(torch.equal(found[0][1][n], w) for n, w in found[1][1].items())
    with said() as lines, start(0, nn.Linear(WIDTH, 3), sparse_gradients=True) as engine:
        pass
    assert dist.get_rank() or with_words(lines, "sparse_gradients has no effect") == 1, lines
    with raises(Exception, "sparse_gradients", "needs stage 0, 1 or 2, not 3"):
        start(3, model_of(), sparse_gradients=True)


def test_gradients_that_are_not_sparse_are_sent_whole(workers: Workers) -> None:
    workers(2).run(fallbacks)


def overflow() -> None:
    """NaN and infinity in one row of one rank are seen by all ranks."""
    for stage in STAGES:
        for value in (float("inf"), float("nan")):
            fp16 = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1}
            with start(stage, model_of(sparse=True), fp16=fp16, sparse_gradients=True) as engine:
                train(engine, range(2))
                before = masters(engine)
                if dist.get_rank() == 1:
                    hook = engine.module.table.register_forward_hook(lambda _m, _i, out, by=value: out * by)
                train(engine, range(2, 3))
                if dist.get_rank() == 1:
                    hook.remove()
                assert engine.skipped_steps == 1 and not engine.was_step_applied(), (stage, value)
                after = masters(engine)
                assert all(torch.equal(after[name], before[name]) for name in before), (stage, value)
                assert all(loss == loss for loss in train(engine, range(3, 5))), (stage, value)


def test_an_overflow_in_a_row_is_seen_by_all(workers: Workers) -> None:
    workers(2).run(overflow)


def edits() -> None:
    """Users read the sums of ranks, and may fill other rows of a gradient before the step."""
    for stage in STAGES:
        for accumulation in (1, 2):
            found = []
            for key in (False, True):
                with start(stage, model_of(), sparse_gradients=key, accumulation=accumulation) as engine:
                    for step in range(2 * accumulation):
                        train_loss = engine(words_of(step, dist.get_rank())).square().mean()
                        engine.backward(train_loss)
                        if step % 2:
                            grad = engine.module.table.weight.grad
                            found.append(grad.clone())
                            grad[500] = 1.0
                            grad[WORDS - 1].mul_(3.0)
                        engine.step()
                    found.append(masters(engine)["table.weight"])
            half = len(found) // 2
            assert all(torch.equal(one, other) for one, other in zip(found[:half], found[half:], strict=True)), stage
            assert found[-1][500].ne(model_of().table.weight[500]).all(), stage


def test_gradients_are_read_and_edited(workers: Workers) -> None:
    workers(2).run(edits)


def encoded() -> None:
    """With a codec, rows travel exactly, and gradients that are sent whole are encoded."""
    wire = {"gradients_within_host": "int8", "error_memory": False}
    for stage in STAGES:
        first: dict[str, dict[str, torch.Tensor]] = {}
        runs = {"exact": {}, "encoded": {"wire": wire}, "rows": {"wire": wire, "sparse_gradients": True}}
        for name, settings in runs.items():
            with start(stage, model_of(), **settings) as engine:
                train(engine, range(1))
                first[name] = masters(engine)
        assert torch.equal(first["rows"]["table.weight"], first["exact"]["table.weight"]), stage
        assert not torch.equal(first["encoded"]["table.weight"], first["exact"]["table.weight"]), stage
        assert not torch.equal(first["rows"]["all.weight"], first["exact"]["all.weight"]), stage
        # With communication_data_type, rows are rounded as whole gradients are.
        compare(stage, 2, {}, communication_data_type="bf16")


def test_codecs_and_rows(workers: Workers) -> None:
    workers(2).run(encoded)


def resumed(folder: str) -> None:
    """Checkpoints with and without the key, whose shards differ, are the same."""
    for stage, other in ((1, 2), (2, 0)):
        for key in (True, False):
            with start(stage, model_of(), sparse_gradients=key) as engine:
                train(engine, range(2))
                engine.save_checkpoint(f"{folder}/{stage}{key}")
                undisturbed = train(engine, range(2, 4))
            with start(other, model_of(), sparse_gradients=not key) as engine:
                engine.load_checkpoint(f"{folder}/{stage}{key}")
                assert train(engine, range(2, 4)) == undisturbed, (stage, key)


def test_checkpoints_do_not_depend_on_the_key(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(resumed, str(tmp_path))


def other_optimizers() -> None:
    """Optimizers of whole matrices, whose shards are not equal, and offloaded optimizer state."""
    from deepspeed.ops.lamb import FusedLamb

    for stage in (1, 2):
        compare(stage, 2, {}, optimizer=lambda params: FusedLamb(params, lr=1e-2))
        zero = {"offload_optimizer": {"device": "cpu"}}
        compare(stage, 4, {"sparse": True}, zero=zero, accumulation=2, precision="bf16")


@pytest.mark.slow
def test_unequal_shards_and_offload(workers: Workers) -> None:
    workers(3).run(other_optimizers)
