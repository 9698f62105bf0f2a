"""Every torch function on a sharded parameter gives the dense value or raises by name; nothing stays gathered."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import warnings
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.pool import WORKER_IMPORTS
from tests.parallel.tiny import expect_close, loss_of, micro_step, raises, rows, start, tiny
from tests.parity.configs import config
from tests.parity.function_arguments import BARS, KINDS, MATRIX, PARAMETER, UNDEFINED, Kind
from tests.parity.functions import Call, dense, find_calls, last_part, public_functions, same, same_form
from tests.unit.comm.ranks import run_ranks

# Functions that hand out or replace memory: the list in the docs.
RAW_STORAGE = frozenset(
    "data_ptr const_data_ptr untyped_storage storage storage_type is_shared share_memory_ numpy __array__ __dlpack__ "
    "set_ is_set_to module_load __setstate__ __cuda_array_interface__".split()
)
TEXT = frozenset(["__repr__", "__format__", "__reduce_ex__"])  # says that the parameter is sharded; pickling is below
IN_PLACE_BUT_NO_WRITE = frozenset(["requires_grad_"])
# Functions that no argument makes work on a dense parameter either, and why.
SPARSE = """
ccol_indices ccol_indices_copy coalesce col_indices col_indices_copy crow_indices crow_indices_copy indices indices_copy
is_coalesced native_norm resize_as_sparse_ row_indices row_indices_copy sparse_resize_ sparse_resize_and_clear_ values
values_copy
"""
QUANTIZED = "int_repr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point qscheme"
ACCELERATOR = """
batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
batch_norm_gather_stats_with_counts batch_norm_stats cuda __cuda_array_interface__ ipu miopen_batch_norm
miopen_convolution miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose
miopen_depthwise_convolution miopen_rnn mtia pin_memory record_stream xpu
"""
NEVER_ACCEPT_A_PARAMETER = {
    **dict.fromkeys(SPARSE.split(), "takes a sparse tensor"),
    **dict.fromkeys(QUANTIZED.split(), "takes a quantized tensor"),
    **dict.fromkeys(ACCELERATOR.split(), "needs an accelerator"),
    **dict.fromkeys(["sym_max", "sym_min"], "takes numbers"),
    "__deepcopy__": "Tensor's refuses a Parameter, which has its own",
}


def writes(call: Call, parameter: nn.Parameter, before: torch.Tensor) -> bool:
    """Whether a call on a dense parameter changes its values or its layout, by name or by what it did."""
    name = last_part(call.name)
    in_place = name.endswith("_") and not name.endswith("__") and name not in IN_PLACE_BUT_NO_WRITE
    return in_place or parameter.shape != before.shape or not torch.equal(parameter.detach(), before)


class Holder(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.weight = dense(kind)

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def sharded_engine(model: nn.Module) -> Any:
    import deepspeed

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trained,
        config=config(3, model),
        optimizer=torch.optim.SGD(trained, lr=0.1) if trained else None,
    )
    return engine


def judge(call: Call, sharded: nn.Parameter) -> str:
    """What is wrong with one call on the sharded parameter; empty when nothing is."""
    from deepspeed.errors import ShardedParameterError

    plain, name = dense(call.kind), last_part(call.name)
    before = plain.detach().clone()
    expected = call(plain)
    wrote = writes(call, plain, before)
    try:
        result = call(sharded)
    except ShardedParameterError as error:
        if "weight" not in str(error):
            return f"the error does not name the parameter: {error}"
        return "" if wrote or name in RAW_STORAGE else f"refused, but only computes: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if wrote or name in RAW_STORAGE:
        return "wrote, or gave its storage away, without an error"
    if name in TEXT:
        return ""
    agrees = same_form(result, expected) if name in UNDEFINED else same(result, expected, BARS.get(call.name, 0.0))
    return "" if agrees else f"gave {result!r} instead of {expected!r}"


def try_calls(calls: list[Call], kind: Kind) -> list[str]:
    engine = sharded_engine(Holder(kind))
    parameter, found = engine.module.weight, []
    for call in calls:
        wrong = judge(call, parameter)
        if wrong:
            found.append(f"{call.name}{call.arguments} ({call.mode}): {' '.join(wrong.split())[:300]}")
        parameter.requires_grad_(kind.dtype.is_floating_point)
        parameter.grad = None
        if not same(parameter, dense(kind)):
            found.append(f"{call.name}{call.arguments} ({call.mode}) changed the parameter")
            engine.destroy()
            engine = sharded_engine(Holder(kind))
            parameter = engine.module.weight
    engine.destroy()
    return found


@pytest.fixture(scope="module", params=[20, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def calls(request: Any, workers: Any) -> tuple[set[str], list[list[Call]]]:
    """Names that were tried (every twentieth function, or all), and the calls that were found for them."""
    (found,) = workers(1).run(find_calls, request.param, timeout=240)
    return set(list(public_functions())[:: request.param]), found


@pytest.mark.drawn(5)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_public_function(workers: Any, calls: tuple[set[str], list[list[Call]]], kind: Kind) -> None:
    known = calls[1][KINDS.index(kind)]
    for rank, found in enumerate(workers(2).run(try_calls, known, kind, timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


def failure(name: str, parameter: nn.Parameter) -> type[Exception] | None:
    """What a function raises when every argument it must have is the parameter."""
    needed = [p for p in public_functions()[name][1].parameters.values() if p.default is p.empty]
    try:
        Call(name, tuple([PARAMETER] * len(needed)), "no_grad", MATRIX)(parameter)
    except Exception as error:
        return type(error)
    return None


def try_failures(names: list[str]) -> list[str]:
    from deepspeed.errors import ShardedParameterError

    with sharded_engine(Holder(MATRIX)) as engine:
        found = []
        for name in names:
            wanted, got = failure(name, dense(MATRIX)), failure(name, engine.module.weight)
            if got not in (wanted, ShardedParameterError):
                found.append(f"{name}: {got} instead of {wanted}")
        return found


def test_functions_that_never_accept_a_parameter(workers: Any, calls: tuple[set[str], list[list[Call]]]) -> None:
    tried, found_calls = calls
    names = tried - {call.name for found in found_calls for call in found}
    unlisted = [name for name in names if last_part(name) not in NEVER_ACCEPT_A_PARAMETER]
    assert not unlisted, "give them arguments in function_arguments.SPECIAL, or list them here with a reason"
    for found in workers(2).run(try_failures, sorted(names)):
        assert not found


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether the values are away and their memory is given back."""
    from deepspeed.zero.parameters.parameter import ShardedParameter

    return isinstance(parameter, ShardedParameter) and not parameter._ds_member.group.full.untyped_storage().nbytes()


def copies() -> None:
    from deepspeed.zero import GatheredParameters

    with start(3) as engine:
        parameter = engine.module.out.weight
        with GatheredParameters(parameter):
            wanted = parameter.detach().clone()
        saved = io.BytesIO()
        torch.save(parameter, saved)
        saved.seek(0)
        made = [copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)), torch.load(saved)]
        assert all(type(one) is nn.Parameter and one.requires_grad for one in made)
        for guarded in (parameter.detach(), parameter.t().t()):
            made += [copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded))]
        for one in made:
            assert torch.equal(one, wanted)
            one.detach().zero_()  # its own memory, open to writes
        assert torch.equal(parameter.clone(), wanted)
        assert is_sharded(parameter)


def test_deepcopy_and_pickle_give_dense_tensors(workers: Any) -> None:
    workers(2).run(copies)


def stand_ins() -> None:
    from deepspeed.errors import ShardedParameterError

    with start(3) as engine:
        parameter = engine.module.out.weight
        made = {
            "detach": parameter.detach(),
            "data": parameter.data,
            "state_dict": engine.module.state_dict()["out.weight"],
        }
        micro_step(engine, 0)
        for name, one in made.items():
            assert one.shape == parameter.shape and one.dtype == parameter.dtype and not one.requires_grad, name
            assert torch.equal(one.clone(), parameter.clone()), name  # the values of now, not of then
            assert torch.equal(one[0] * 2, parameter[0] * 2), name
            for write in (one.zero_, lambda one=one: one.copy_(torch.ones(one.shape)), lambda one=one: one[0].fill_(1)):
                with raises(ShardedParameterError, "out.weight"):
                    write()
        assert is_sharded(parameter)


def test_stand_ins_read_as_tensors_and_refuse_writes(workers: Any) -> None:
    workers(2).run(stand_ins)


def replaced() -> None:
    from deepspeed.errors import ShardedParameterError

    with start(3) as engine:
        parameter = engine.module.out.weight
        wanted, shape, stand_in = parameter.detach().clone(), parameter.shape, parameter.detach()
        for target in (parameter, stand_in):
            for others in ((), (torch.ones(shape),)):
                with torch.no_grad():
                    torch.Tensor.set_(target, *others)
                with raises(ShardedParameterError, "set_ on parameter 'out.weight'"):
                    target.sum()
                assert target.shape == shape and torch.equal(target.clone(), wanted)
        with torch.no_grad():
            torch.Tensor.set_(parameter)
        with raises(ShardedParameterError, "set_ on parameter 'out.weight'"):
            engine(rows(0, 0))
        assert parameter.shape == shape and torch.equal(parameter.clone(), wanted)


def test_unbound_set_is_refused_at_the_next_use(workers: Any) -> None:
    """Torch hands the unbound method to no class."""
    workers(2).run(replaced)


TRANSFORMED = {  # of a parameter, and of one closed over
    "vmap": lambda p, x: torch.vmap(lambda row: row.exp().sum())(p),
    "vmap of a read": lambda p, x: torch.vmap(lambda row: p @ row)(x),
    "grad": lambda p, x: torch.func.grad(lambda q: q.pow(3).sum())(p),
    "grad of a read": lambda p, x: torch.func.grad(lambda y: (y @ p.t()).exp().sum())(x),
    "vjp": lambda p, x: torch.func.vjp(lambda q: q.pow(3).sum(), p)[1](torch.ones(())),
    "jvp": lambda p, x: torch.func.jvp(lambda q: q.pow(3).sum(), (p,), (torch.ones(p.shape),)),
    "jacrev": lambda p, x: torch.func.jacrev(lambda q: q.square().sum(0))(p),
    "jacfwd": lambda p, x: torch.func.jacfwd(lambda q: q.square().sum(0))(p),
    "hessian": lambda p, x: torch.func.hessian(lambda q: q.pow(3).sum())(p),
    "per sample": lambda p, x: torch.vmap(torch.func.grad(lambda q, y: (q @ y).exp().sum()), (None, 0))(p, x),
    "jacobian": lambda p, x: torch.autograd.functional.jacobian(lambda q: q.pow(3).sum(), p),
    "leaf": lambda p, x: torch.autograd.grad((leaf := p.detach().requires_grad_()).pow(3).sum(), leaf)[0],
    "as_subclass": lambda p, x: p.as_subclass(torch.Tensor).exp(),
}


def transforms() -> None:
    """torch.func and its relatives wrap their arguments below `__torch_function__`."""
    from deepspeed.errors import ShardedParameterError

    with start(3) as engine:
        parameter, x = engine.module.out.weight, rows(0, 0)
        plain = nn.Parameter(parameter.detach().clone())
        for name, transform in TRANSFORMED.items():
            for ours, theirs in ((parameter, plain), (parameter.detach(), plain.detach())):
                assert same(transform(ours, x), transform(theirs, x)), name
        with raises(ShardedParameterError, "functionalize", "out.weight"):
            torch.func.functionalize(torch.exp)(parameter)
        (gradient,) = torch.autograd.grad(loss_of(engine.module, x), parameter)
        twin = tiny()
        loss_of(twin, x).backward()
        expect_close({"grad": gradient}, {"grad": twin.out.weight.grad})
        torch.vmap(lambda row: row.exp().sum())(parameter).sum().backward()
        expect_close({"grad": parameter.grad * dist.get_world_size()}, {"grad": 2 * plain.detach().exp()})


def test_transforms_of_torch_func_see_dense_values(workers: Any) -> None:
    workers(2).run(transforms)


def functional_calls() -> None:
    """A transform around a sharded module: what it gathers belongs to no transform."""

    def loss(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(engine.module, state, (rows(0, 0),)).square().mean()

    twin = tiny()
    loss_of(twin, rows(0, 0)).backward()
    wanted = {name: parameter.grad for name, parameter in twin.named_parameters()}
    with start(3) as engine:
        for state in (dict(engine.module.named_parameters()), engine.module.state_dict()):
            expect_close(torch.func.grad(loss)(state), wanted)


def test_functional_calls_of_a_sharded_module(workers: Any) -> None:
    workers(2).run(functional_calls)


UNSEEN = {  # constructors that read a tensor's memory below every hook: the list in the docs
    "tensor": lambda p: torch.tensor(p),
    "Tensor": lambda p: torch.Tensor(p),
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "asarray": lambda p: torch.asarray(p, dtype=torch.float64),
    "sparse_coo_tensor": lambda p: torch.sparse_coo_tensor(torch.arange(len(p))[None], p).to_dense(),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p]).to_padded_tensor(0.0),
}


def unseen() -> None:
    with start(3) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in UNSEEN.items():
            assert make(engine.module.out.weight).isnan().all(), name


def test_constructors_that_see_no_class_give_nan_and_never_a_number(workers: Any) -> None:
    workers(2).run(unseen)


class Wide(nn.Module):
    """50 MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(12))


def growth_of_state_dict() -> tuple[int, int]:
    """Bytes by which `state_dict()` grows the process, and bytes of the model."""
    start(3).module.state_dict()  # the first call of all loads code
    with start(3, Wide()) as engine:
        gc.collect()
        before = psutil.Process().memory_info().rss
        state = engine.module.state_dict()
        grown = psutil.Process().memory_info().rss - before
        assert all(is_sharded(parameter) for parameter in engine.module.parameters())
        return grown, sum(value.nbytes for value in state.values())


def test_state_dict_costs_no_memory(workers: Any) -> None:
    for grown, size in workers(2).run(growth_of_state_dict, timeout=60):
        assert size > 50_000_000
        assert grown < 0.01 * size


def test_a_read_on_one_rank_alone_needs_no_other_rank() -> None:
    ends = run_ranks(
        """
dist.init_distributed(verbose=False)
from tests.parallel.tiny import start
engine = start(3)
if dist.get_rank() == 0:
    print(float(engine.module.out.weight.sum()))
dist.barrier()
""",
        world=2,
        limit=120,
        imported=WORKER_IMPORTS,
        DEEPSPEED_TIMEOUT="0.5",
    )
    assert [end.code for end in ends] == [0, 0], ends[0].err
    assert math.isfinite(float(ends[0].out))
