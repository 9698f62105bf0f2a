"""Encoded gradients and weights at every stage: replicas equal to the bit, values within the codec's bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.collectives.encoded import error_sample
from tests.harness.pool import WorkerPool
from tests.parallel.tiny import (
    STAGES,
    Tiny,
    loss_of,
    masters,
    micro_step,
    rows,
    said,
    start,
    tiny,
    with_words,
)

Workers = Callable[[int], WorkerPool]
LIMIT = {"int8": 127, "int4": 7}


def equal_everywhere(tensors: dict[str, torch.Tensor], at: Any) -> None:
    """All ranks have the same bits."""
    for name, tensor in tensors.items():
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.contiguous())
        assert all(torch.equal(copies[0].view(torch.uint8), copy.view(torch.uint8)) for copy in copies), (at, name)


def values_in_forward(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters as a forward sees them."""
    seen: dict[str, torch.Tensor] = {}
    names = {id(param): name for name, param in engine.module.named_parameters()}

    def note(module: nn.Module, _inputs: Any) -> None:
        for param in module.parameters(recurse=False):
            seen[names[id(param)]] = param.detach().float().clone()

    hooks = [module.register_forward_pre_hook(note) for module in engine.module.modules()]
    with torch.no_grad():
        engine(rows(99, 0).to(next(iter(engine.module.parameters())).dtype))
    for hook in hooks:
        hook.remove()
    return seen


def local_gradients(model: nn.Module, values: dict[str, torch.Tensor], step: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of each rank's rows at these values, in one plain process."""
    gradients = []
    for rank in range(dist.get_world_size()):
        twin = Tiny()
        twin.load_state_dict(values)
        loss_of(twin, rows(step, rank)).backward()
        gradients.append(
            {name: param.grad.clone() for name, param in twin.named_parameters() if param.grad is not None}
        )
    return gradients


def cell(stage: int, codec: str, precision: str, accumulation: int) -> None:
    wire: dict[str, Any] = {"gradients_within_host": codec, "error_memory": False}
    if stage:
        wire["weights_within_host"] = codec
    settings: dict[str, Any] = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    zero = {"stage3_param_persistence_threshold": 0}
    with start(stage, wire=wire, accumulation=accumulation, zero=zero, **settings) as engine:
        at, ranks = (stage, codec, precision, accumulation), dist.get_world_size()
        for step in range(3):
            before = values_in_forward(engine)
            equal_everywhere(before, at)
            exact = masters(engine)
            equal_everywhere(exact, at)
            if stage and step:
                changed = 0
                for name, value in before.items():
                    bound = exact[name].abs().max() / LIMIT[codec] / 2 * 1.01 + (0.005 if precision == "bf16" else 0)
                    assert (value - exact[name]).abs().max() <= bound, (at, name)
                    rounded = exact[name].to(torch.bfloat16).float() if precision == "bf16" else exact[name]
                    changed += not torch.equal(value, rounded)
                assert changed > 4, (at, "weights were not encoded")
            for micro in range(accumulation):
                engine.backward(loss_of(engine, rows(10 * step + micro, dist.get_rank())))
                if micro + 1 < accumulation:
                    engine.step()
            if precision == "fp32":
                every = [local_gradients(tiny(), before, 10 * step + micro) for micro in range(accumulation)]
                for name, param in engine.module.named_parameters():
                    total = sum(g[name] for micro in every for g in micro) / ranks / accumulation
                    room = sum(float(g[name].abs().max()) for micro in every for g in micro) / ranks / accumulation
                    room += room * 2 if stage == 0 else 0  # the sum is encoded again
                    gap = (param.grad - total).abs().max()
                    assert gap <= room / LIMIT[codec] / 2 * 1.01 + 1e-6, (at, step, name, float(gap))
            engine.step()


def cells(stages: tuple[int, ...], codecs: tuple[str, ...]) -> None:
    for stage in stages:
        for codec in codecs:
            cell(stage, codec, "fp32", 1)
        cell(stage, codecs[0], "bf16", 2)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_values_are_within_the_bound_and_equal_on_all_ranks(workers: Workers, ranks: int) -> None:
    workers(ranks).run(cells, STAGES, ("int8", "int4"))


def wired(stage: int, gradients: str = "int8", weights: str = "int8", **more: Any) -> dict[str, Any]:
    """A block `wire` for ranks of one host."""
    wire: dict[str, Any] = {"gradients_within_host": gradients, **more}
    return wire | ({"weights_within_host": weights} if stage else {})


def losses(engine: Any, steps: range) -> list[float]:
    return [micro_step(engine, step) for step in steps]


def resumed(folder: str) -> None:
    """A run that is saved and loaded goes on with the same losses, error memories included."""
    for stage in STAGES:
        for codec in ("int4", "int8"):
            wire, zero = wired(stage, codec, error_memory=True), {"stage3_param_persistence_threshold": 0}
            with start(stage, wire=wire, zero=zero) as engine:
                losses(engine, range(3))
                engine.save_checkpoint(f"{folder}/{stage}{codec}")
                undisturbed, errors = losses(engine, range(3, 6)), memories(engine)
                assert errors and any(bool(error.any()) for error in errors.values())
            with start(stage, tiny(7), wire=wire, zero=zero) as engine:
                engine.load_checkpoint(f"{folder}/{stage}{codec}")
                assert losses(engine, range(3, 6)) == undisturbed, (stage, codec)
                for name, error in memories(engine).items():
                    assert torch.equal(error, errors[name]), (stage, name)
            with start(stage, tiny(7), wire=wired(stage, codec, error_memory=False), zero=zero) as engine:
                engine.load_checkpoint(f"{folder}/{stage}{codec}")
                without = losses(engine, range(3, 6))
                assert codec == "int8" or without != undisturbed, (stage, "the memory does nothing")


def memories(engine: Any) -> dict[str, torch.Tensor]:
    reducer = engine._state.components.reducer
    return {name: memory.error.clone() for name, memory in reducer.error_memories().items()}


def test_a_loaded_run_goes_on_with_the_same_losses(workers: Workers, tmp_path: Any) -> None:
    workers(2).run(resumed, str(tmp_path))


def recut(folder: str, save: bool) -> None:
    wire, zero = wired(2, "int4"), {"stage3_param_persistence_threshold": 0}
    with said() as lines, start(2, wire=wire, zero=zero) as engine:
        if save:
            losses(engine, range(3))
            engine.save_checkpoint(folder)
            return
        engine.load_checkpoint(folder)
        assert not any(bool(error.any()) for error in memories(engine).values())
        losses(engine, range(3, 5))
    if dist.get_rank() == 0:
        assert with_words(lines, "error memories", "start at zero") == 1, lines


def test_another_number_of_ranks_drops_the_error_memory_with_a_word(workers: Workers, tmp_path: Any) -> None:
    workers(2).run(recut, str(tmp_path), True)
    workers(3).run(recut, str(tmp_path), False)


def overflow() -> None:
    """An infinity on one rank is seen by all through the codec: the step is skipped and the memory stays finite."""
    fp16 = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1}
    for stage in STAGES:
        with start(stage, wire=wired(stage, "int4"), fp16=fp16) as engine:
            losses(engine, range(2))
            before = masters(engine)
            if dist.get_rank() == 1:
                hook = engine.module.layers[1][0].register_forward_hook(lambda _m, _i, out: out * float("inf"))
            micro_step(engine, 2)
            if dist.get_rank() == 1:
                hook.remove()
            assert engine.skipped_steps == 1 and not engine.was_step_applied(), stage
            after = masters(engine)
            assert all(torch.equal(after[name], before[name]) for name in before), stage
            assert all(bool(error.isfinite().all()) for error in memories(engine).values()), stage
            assert all(loss == loss for loss in losses(engine, range(3, 5))), stage
            equal_everywhere(values_in_forward(engine), stage)


def test_an_overflow_is_seen_through_the_codec(workers: Workers) -> None:
    workers(2).run(overflow)


def exact_reads() -> None:
    """Stage 3: what users read and write are the exact values, what modules compute with the decoded ones."""
    import deepspeed

    with start(3, wire=wired(3), zero={"stage3_param_persistence_threshold": 0}) as engine:
        losses(engine, range(2))
        exact, weight = masters(engine), engine.module.layers[0][0].weight
        with deepspeed.zero.GatheredParameters([weight]):
            assert torch.equal(weight.detach(), exact["layers.0.0.weight"])
        seen = values_in_forward(engine)["layers.0.0.weight"]
        assert not torch.equal(seen, exact["layers.0.0.weight"])
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data[0, 0] = 0.123
        edited = masters(engine)["layers.0.0.weight"]
        assert edited[0, 0] == 0.123
        edited[0, 0] = exact["layers.0.0.weight"][0, 0]
        assert torch.equal(edited, exact["layers.0.0.weight"])
        gap = (values_in_forward(engine)["layers.0.0.weight"] - masters(engine)["layers.0.0.weight"]).abs().max()
        assert gap <= edited.abs().max() / 127 / 2 * 1.01
    for stage in (1, 2):  # a write to the decoded values changes the elements that were written, and no other
        with start(stage, wire=wired(stage)) as engine:
            losses(engine, range(2))
            exact, weight = masters(engine), engine.module.layers[0][0].weight
            with torch.no_grad():
                weight[0, 0] = 0.123
            losses(engine, range(0))
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                pass
            edited = masters(engine)["layers.0.0.weight"]
            assert edited[0, 0] == 0.123, stage
            edited[0, 0] = exact["layers.0.0.weight"][0, 0]
            assert torch.equal(edited, exact["layers.0.0.weight"]), stage


def test_users_read_and_write_exact_values(workers: Workers) -> None:
    workers(2).run(exact_reads)


def secondary() -> None:
    """hpZ: gathers of backward stay in the pair; losses are those of plain stage 3, with and without a codec."""
    limits = dict.fromkeys(
        ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
    )
    zero = {"stage3_param_persistence_threshold": 0, **limits}
    for wire in ({}, wired(3)):
        with start(3, wire=wire, zero=zero, accumulation=2) as engine:
            plain = losses(engine, range(6))
        with start(3, wire=wire, zero={**zero, "zero_hpz_partition_size": 2}, accumulation=2) as engine:
            groups = [group for group in engine._state.components.groups if group.secondary is not None]
            assert len(groups) == 4 and all(group.secondary.axis.size == 2 for group in groups)
            begin = engine._state.components.lifecycle.prefetcher.gathers
            assert losses(engine, range(6)) == plain
            every = engine._state.components.lifecycle.prefetcher.gathers - begin
            inside = sum(group.secondary.gathers for group in groups)
            assert 0.2 * every <= inside < every, (inside, every)  # a rank that is ahead of the other gathers over all


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_secondary_shards_change_no_loss(workers: Workers, ranks: int) -> None:
    workers(ranks).run(secondary)


def hybrid() -> None:
    """Both sums of hybrid sharding are encoded."""
    zero = {"stage3_param_persistence_threshold": 0}
    for codec in ("int8", "int4"):
        with start(3, wire=wired(3, codec), zero=zero, mesh={"dp_replicate": 2}) as engine:
            for step in range(3):
                micro_step(engine, step)
                equal_everywhere(masters(engine), step)
                equal_everywhere(values_in_forward(engine), step)
            kinds = {name.rpartition(": ")[2] for name in memories(engine)}
            assert kinds == ({"contribution", "sum"} if codec == "int4" else set())


def test_hybrid_sharding(workers: Workers) -> None:
    workers(4).run(hybrid)


def on_one_host() -> None:
    with said() as lines, start(2, wire={"gradients": "int8", "weights": "int8"}) as engine:
        encoded = losses(engine, range(3))
    with start(2) as engine:
        assert losses(engine, range(3)) == encoded
    if dist.get_rank() == 0:
        assert with_words(lines, "wire.gradients = int8", "nothing is encoded", "on one host") == 1, lines


def test_codecs_between_hosts_say_that_there_is_one_host(workers: Workers) -> None:
    workers(2).run(on_one_host)


def encoded_bytes(lengths: list[int], bits: int) -> int:
    """Bytes of segments of these lengths: a scale of 2 bytes for each 256 elements, and the codes."""
    return sum(2 * -(-length // 256) + -(-length * bits // 8) for length in lengths)


def counted() -> None:
    """What a rank receives in a step is the formula's, rounded up to 64 bytes for each message."""
    from deepspeed.comm.watchdog.comms_logger import comms_logger

    for stage, codec, bits in ((0, "int8", 8), (1, "int8", 8), (2, "int4", 4), (3, "int8", 8)):
        zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 40}
        limits = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 10**9)
        wire = wired(stage, codec, codec)
        with start(stage, wire=wire, zero=zero | limits, sharded=False, comms_logger={"enabled": True}) as engine:
            losses(engine, range(2))
            comms_logger.reset()
            losses(engine, range(2, 3))
            comms_logger.enabled = False
            received: dict[str, int] = {}
            for row in comms_logger.summary():
                received[row["op"]] = received.get(row["op"], 0) + row["received_bytes"]
            rank, ranks = dist.get_rank(), dist.get_world_size()
            wanted = {"reduce": 0, "others": 0}
            for group in engine._state.components.groups:
                for owner in range(ranks):
                    lengths = [r.numel for r in group.layout.ranges(owner)]
                    beyond = group.layout.cuts[owner + 1] - max(group.layout.cuts[owner], group.layout.numel)
                    lengths += [beyond] if beyond > 0 else []
                    slice_bytes = -(-encoded_bytes(lengths, bits) // 64) * 64
                    if owner == rank:
                        wanted["reduce"] += (ranks - 1) * slice_bytes
                    else:
                        wanted["others"] += slice_bytes
            second = {0: "share", 1: "publish", 2: "publish", 3: "gather"}[stage]
            assert received["reduce"] == wanted["reduce"], (stage, received, wanted)
            assert received[second] == wanted["others"], (stage, received, wanted)
            rows = {row["Comm. Op"]: row for row in comms_logger.encoding_rows()}
            assert {"reduce", second} <= set(rows), rows
            limit = {"int8": 0.01, "int4": 0.2}[codec]
            assert all(0 < row["Relative error"] < limit and row["Codec"] == codec for row in rows.values()), rows
            comms_logger.reset()


def test_bytes_are_those_of_the_formula(workers: Workers) -> None:
    workers(2).run(counted)


def offloaded(folder: str) -> None:
    """Where the state rests changes no bit of an encoded run."""
    for stage in (1, 2, 3):
        results = []
        for device in (None, "cpu", "nvme"):
            zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
            place = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
            if device is not None:
                zero |= {"offload_optimizer": place} | ({"offload_param": place} if stage == 3 else {})
            with start(stage, wire=wired(stage, "int4"), zero=zero, accumulation=2, precision="bf16") as engine:
                results.append((losses(engine, range(6)), masters(engine)))
        for got, values in results[1:]:
            assert got == results[0][0], stage
            assert all(torch.equal(values[name], results[0][1][name]) for name in values), stage


def with_other_axes(kind: str) -> None:
    """Beside tensor and sequence parallelism and experts, an encoded run stays near the plain one and is one model."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    import deepspeed

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    extra = {"tp": {"tensor_parallel": {"autotp_size": 2}}, "sp": {"sequence_parallel_size": 2},
             "ep": {"expert_parallel": {"size": 2}}}[kind]  # fmt: skip

    def run(stage: int, wire: dict[str, Any]) -> list[float]:
        torch.manual_seed(0)
        if kind == "ep":
            model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "wire": wire, **extra,
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        dp_rank = dist.get_rank() // 2 if kind in ("tp", "sp") else dist.get_rank()
        found = []
        for step in range(4):
            ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(10 * step + dp_rank))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found

    for stage in (1, 3):
        plain, encoded = run(stage, {}), run(stage, wired(stage, "int8"))
        assert plain != encoded, stage
        assert max(abs(a - b) for a, b in zip(plain, encoded, strict=True)) < 0.02, (kind, stage, plain, encoded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp", "sp", "ep"])
def test_beside_other_axes(workers: Workers, kind: str) -> None:
    workers(4).run(with_other_axes, kind)


@pytest.mark.slow
def test_offload_changes_no_bit(workers: Workers, tmp_path: Any) -> None:
    workers(2).run(offloaded, str(tmp_path))


def monitored(folder: str) -> None:
    monitor = {"enabled": True, "output_path": folder, "job_name": "wire"}
    with start(2, wire=wired(2, "int4"), jsonl_monitor=monitor) as engine:
        losses(engine, range(3))
    assert error_sample.value is None and not error_sample.due  # a later engine gets none of this one's errors


def test_monitors_get_the_error(workers: Workers, tmp_path: Any) -> None:
    workers(2).run(monitored, str(tmp_path))
    lines = [line for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    errors = [json.loads(line)["value"] for line in lines if "Train/Samples/wire_error" in line]
    assert len(errors) == 2 and all(0.01 < error < 0.2 for error in errors), errors


def piped() -> None:
    """Two pipeline stages with tied embeddings on two replicas each."""
    from deepspeed.comm.process_groups.mesh import current_mesh
    from tests.parallel import pipeline_runs

    found = []
    for wire in ({}, wired(1)):
        model = pipeline_runs.deep("Llama", 4, tie_word_embeddings=True)
        engine = pipeline_runs.engine_of(model, pipeline_runs.config_of(1, 2, 2, wire=wire))
        with engine:
            rank = pipeline_runs.replica(current_mesh())
            taken = [engine.train_batch(pipeline_runs.batches(model, 10 * step, 2, rank)) for step in range(4)]
            found.append([float(loss) for loss in taken])
    plain, encoded = found
    assert plain != encoded and max(abs(a - b) for a, b in zip(plain, encoded, strict=True)) < 0.02, found


@pytest.mark.slow
def test_under_a_pipeline(workers: Workers) -> None:
    workers(4).run(piped)


def edited_twice() -> None:
    """An edit that changes a block's scale moves no other element of the exact weights."""
    import deepspeed

    for stage in (1, 2):
        with start(stage, wire=wired(stage)) as engine:
            losses(engine, range(2))
            exact, weight = masters(engine), engine.module.layers[0][0].weight
            for value in (5.0, 0.25):
                with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                    weight.data[0, 0] = value
                edited = masters(engine)["layers.0.0.weight"]
                assert edited[0, 0] == value, stage
                edited[0, 0] = exact["layers.0.0.weight"][0, 0]
                assert torch.equal(edited, exact["layers.0.0.weight"]), stage


def frozen(folder: str) -> None:
    """Frozen parameters of the optimizer stay exact through a load."""
    for stage in (1, 2, 3):
        model = tiny()
        model.layers[0].requires_grad_(requires_grad=False)
        before = model.layers[0][0].weight.detach().clone()
        zero = {"stage3_param_persistence_threshold": 0}
        with start(stage, model, wire=wired(stage), zero=zero) as engine:
            losses(engine, range(2))
            engine.save_checkpoint(f"{folder}/{stage}")
            engine.load_checkpoint(f"{folder}/{stage}")
            assert torch.equal(masters(engine)["layers.0.0.weight"], before), stage


def few_after_many() -> None:
    """The error memory of a window with many items fits one with few."""
    gaps = {}
    for memory in (False, True):
        with start(
            2, wire=wired(2, "int4", error_memory=memory), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
        ) as engine:
            for step, items in enumerate((1000, 1000, 1)):
                x = rows(step, dist.get_rank())
                engine.backward(loss_of(engine, x) * items, num_items=items)
                if items == 1:
                    grads = {name: p.grad.clone() for name, p in engine.module.named_parameters()}
                engine.step()
            every = local_gradients(tiny(), {n: p.detach() for n, p in engine.module.named_parameters()}, 2)
            exact = {name: sum(g[name] for g in every) / len(every) for name in every[0]}
        # Before the division by the items of the window the gradient is a sum.
        gaps[memory] = sum(float((grads[n] / len(every) - exact[n]).norm()) for n in exact) / sum(
            float(exact[n].norm()) for n in exact
        )
    assert gaps[True] < 3 * gaps[False] + 0.05, gaps


def edits_that_are_lost() -> None:
    """A forward over edits that end with their context leaves no secondary shard with them."""
    import deepspeed

    limits = dict.fromkeys(
        ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
    )
    zero = {"stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2, **limits}
    with start(3, zero=zero) as engine:
        losses(engine, range(1))
        parameters, x = list(engine.module.parameters()), rows(50, 0)
        with torch.no_grad():
            wanted = engine(x)
        with deepspeed.zero.GatheredParameters(parameters):
            with torch.no_grad():
                parameters[0].add_(1.0)
            engine(x)
        with torch.no_grad():
            assert torch.equal(engine(x), wanted)


def wide() -> None:
    model = tiny().double()
    with start(2, model, wire=wired(2)) as engine:
        for step in range(2):
            engine.backward(engine(rows(step, dist.get_rank()).double()).square().mean())
            engine.step()


@pytest.mark.parametrize("run", [edited_twice, few_after_many, edits_that_are_lost, wide], ids=lambda run: run.__name__)
def test_what_a_critic_proved(workers: Workers, run: Callable[[], None]) -> None:
    workers(2).run(run)


def test_frozen_weights_stay_exact(workers: Workers, tmp_path: Any) -> None:
    workers(2).run(frozen, str(tmp_path))
