"""Calls every name of deepspeed.comm on two ranks and compares with what torch.distributed promises."""

from __future__ import annotations

import math

import torch

import deepspeed.comm as dist


def mine(count: int = 2) -> torch.Tensor:
    return torch.full((count,), float(dist.get_rank() + 1))


def same(got: torch.Tensor | list[torch.Tensor], *wanted: float) -> None:
    flat = torch.cat(got) if isinstance(got, list) else got
    assert flat.tolist() == list(wanted), (flat, wanted)


def reductions() -> None:
    for arguments in ({}, {"prof": False, "log_name": "named", "debug": None}, {"group": dist.new_group([0, 1])}):
        x = mine()
        dist.all_reduce(x, dist.ReduceOp.SUM, **arguments)
        same(x, 3, 3)
    x = mine()
    dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
    same(x, 2, 2)
    x = mine()
    dist.inference_all_reduce(x)
    same(x, 3, 3)
    x = mine()
    dist.reduce(x, 0)
    if dist.get_rank() == 0:
        same(x, 3, 3)
    x, y = mine(), mine(1)
    dist.all_reduce_coalesced([x, y])
    same([x, y], 3, 3, 3)
    for name in ("reduce_scatter_tensor", "reduce_scatter_fn"):
        out = torch.zeros(1)
        getattr(dist, name)(out, mine(), log_name="named")
        same(out, 3)
    out = torch.zeros(dist.get_rank() + 1)
    dist.reduce_scatter(out, [torch.ones(1), torch.ones(2)])
    same(out, *[2] * len(out))


def exchanges() -> None:
    me = dist.get_rank()
    x = mine()
    dist.broadcast(x, 1)
    same(x, 2, 2)
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts, mine())
    same(parts, 1, 1, 2, 2)
    for name in ("all_gather_into_tensor", "allgather_fn"):
        out = torch.zeros(4)
        getattr(dist, name)(out, mine(), async_op=True).wait()
        same(out, 1, 1, 2, 2)
    outs = [torch.zeros(4), torch.zeros(2)]
    dist.all_gather_coalesced(outs, [mine(), mine(1)], async_op=True).wait()
    same(outs, 1, 1, 2, 2, 1, 2)
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_to_all(parts, [mine(1), mine(1)])
    same(parts, 1, 2)
    out = torch.zeros(2)
    dist.all_to_all_single(out, mine())
    same(out, 1, 2)
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.gather(mine(), parts if me == 0 else None, 0)
    same(parts, *([1, 1, 2, 2] if me == 0 else [0] * 4))
    out = torch.zeros(1)
    dist.scatter(out, [torch.ones(1), torch.ones(1) * 2] if me == 0 else None, 0)
    same(out, me + 1)


def messages() -> None:
    me, other = dist.get_rank(), 1 - dist.get_rank()
    got = torch.zeros(2)
    if me == 0:
        dist.send(mine(), 1)
    else:
        assert dist.recv(got, 0) == 0
        same(got, 1, 1)
    for work in (dist.isend(mine(), other), dist.irecv(got, other)):
        work.wait()
    same(got, other + 1, other + 1)
    got.zero_()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine(), other), dist.P2POp(dist.irecv, got, other)]):
        work.wait()
    same(got, other + 1, other + 1)
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": 0}, {"rank": 1}]
    objects = [me]
    dist.broadcast_object_list(objects, 0)
    assert objects == [0]
    dist.barrier()
    dist.barrier(group=dist.get_world_group())
    dist.monitored_barrier()


def groups() -> None:
    single = dist.new_group([1])
    assert dist.get_rank(single) == (0 if dist.get_rank() == 1 else -1)
    assert dist.get_global_rank(dist.get_world_group(), 1) == dist.get_global_rank(None, 1) == 1
    assert dist.get_all_ranks_from_group(None) == [0, 1]
    assert dist.get_backend() == "gloo"
    dist.set_backend("gloo")
    assert dist.initialize_mesh_device((2, 1), ("replicate", "shard"))["replicate"].size() == 2
    assert dist.has_all_gather_into_tensor() and dist.has_reduce_scatter_tensor()
    assert dist.has_all_reduce_coalesced() and dist.has_coalescing_manager() and dist.is_available()
    assert not (dist.in_aml() or dist.in_aws_sm() or dist.in_dlts())


def the_log() -> None:
    dist.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}})
    dist.all_reduce(torch.ones(1000))
    dist.all_reduce(torch.ones(1000), async_op=True).wait()
    dist.all_reduce(torch.ones(1000, dtype=torch.bfloat16))  # one call, by however many messages
    dist.barrier()
    dist.broadcast(torch.ones(10), 0, prof=True)
    told = dist.log_summary(show_straggler=True, return_dict=True)
    assert list(told) == ["summary", "straggler_analysis", "metadata"]
    summary, waits = told["summary"]["all_reduce"], told["straggler_analysis"]["all_reduce"]
    assert summary[2000]["count"] == 1 and summary[2000]["msg_size_str"] == "1.95 KB"
    row = summary[4000]
    assert row["count"] == 2 and math.isclose(row["total_latency_ms"], 2 * row["avg_latency_ms"])
    assert math.isclose(row["tput_avg_gbps"], 2 * row["busbw_avg_gbps"])  # (n - 1) / n of it, n = 2
    assert waits[4000]["total_straggler_ms"] >= 0 and waits[4000]["count"] == 2
    assert told["metadata"]["world_size"] == 2 and told["metadata"]["rank"] == dist.get_rank()
    assert dist.log_summary(return_dict=True)["straggler_analysis"] is None and dist.log_summary() is None
    raw = dist.comms_logger.comms_dict["all_reduce"][4000]
    assert raw[0] == 2 and len(raw[1]) == len(raw[2]) == len(raw[3]) == 2
    assert dist.get_logged_comm_ops() == ["all_reduce", "broadcast"]
    assert (dist.get_comm_operation_count(), dist.get_comm_operation_count("broadcast")) == (4, 1)
    dist.reset_log()
    assert not dist.has_comm_data()


if __name__ == "__main__":
    dist.init_distributed(verbose=False)
    for check in (reductions, exchanges, messages, groups, the_log):
        check()
    print("all as expected")
