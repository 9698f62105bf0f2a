"""Optimizers of other packages, at every stage and tier, against one process that holds all parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import OptimizerError, UsageError
from tests.parallel.tiny import STAGES, WIDTH, expect_close, loss_of, masters, raises, rows, said, start, with_words
from tests.parity.reference import Reference

# more rows than columns: preconditioners of few samples are so badly conditioned that rounding shows
RANKS, STEPS, ROWS = 2, 13, 16
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Matrices, vectors, and one parameter whose gradient is missing in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return 3 * self.out(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def of(module: str, name: str, **options: Any) -> Make:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = getattr(importlib.import_module(module), name)(list(parameters), **options)
        if module == "schedulefree":
            optimizer.train()
        return optimizer

    return make


def around(module: str, name: str, inner: Make, **options: Any) -> Make:
    return lambda parameters: getattr(importlib.import_module(module), name)(inner(list(parameters)), **options)


class Counting(torch.optim.Optimizer):
    """Lookahead that counts on the object: every third step parameters go half the way back to slow copies."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slow = self.state[p].setdefault("slow", p.clone())
                p.sub_(group["lr"] * p.grad)
                if self.updates % 3 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


class Named(torch.optim.Optimizer):
    """Counts under a name of its own in its state, as MADGRAD does; the rate falls with the count."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.state["k"] = torch.tensor([0])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["k"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / self.state["k"].item() * p.grad)


class Replacing(torch.optim.Optimizer):
    """Puts another tensor under each parameter, as old code does."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class Clipping(torch.optim.SGD):
    """Clips over all gradients inside of its step."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


# Listed before the work; each steps without a closure.
FOREIGN: dict[str, Make] = {
    "schedulefree.AdamW": of("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=3),
    "schedulefree.SGD": of("schedulefree", "SGDScheduleFree", lr=1e-2),
    "schedulefree.RAdam": of("schedulefree", "RAdamScheduleFree", lr=1e-2),
    "prodigyopt.Prodigy": of("prodigyopt", "Prodigy", d0=1e-3),
    "adan_pytorch.Adan": of("adan_pytorch", "Adan"),
    "lion_pytorch.Lion": of("lion_pytorch", "Lion", lr=1e-3),
    "pytorch_optimizer.SOAP": of("pytorch_optimizer", "SOAP", precondition_frequency=3, eps=1.0),
    "pytorch_optimizer.Shampoo": of("pytorch_optimizer", "Shampoo", lr=1e-2, matrix_eps=1e-1),
    "pytorch_optimizer.Adan with clipping": of("pytorch_optimizer", "Adan", lr=1e-2, max_grad_norm=0.5),
    "pytorch_optimizer.Lamb with clipping": of("pytorch_optimizer", "Lamb", lr=1e-2, max_grad_norm=0.05, pre_norm=True),
    "pytorch_optimizer.DAdaptAdam": of("pytorch_optimizer", "DAdaptAdam"),
    "pytorch_optimizer.ADOPT": of("pytorch_optimizer", "ADOPT", lr=1e-2),
    "pytorch_optimizer.StableAdamW": of("pytorch_optimizer", "StableAdamW", lr=1e-2),
    "pytorch_optimizer.CAME": of("pytorch_optimizer", "CAME", lr=1e-3),
    "pytorch_optimizer.Lookahead": around("pytorch_optimizer", "Lookahead", of("torch.optim", "AdamW", lr=1e-2)),
    "torch_optimizer.NovoGrad": of("torch_optimizer", "NovoGrad", lr=1e-2),
    "torch_optimizer.Ranger": of("torch_optimizer", "Ranger", lr=1e-2),
    "torch_optimizer.Yogi": of("torch_optimizer", "Yogi", lr=1e-2),
    "torch_optimizer.Lookahead": around("torch_optimizer", "Lookahead", of("torch.optim", "SGD", lr=1e-2)),
    "bitsandbytes.AdamW8bit": of("bitsandbytes.optim", "AdamW8bit", lr=1e-2),
    "transformers.Adafactor": of("transformers.optimization", "Adafactor", lr=1e-2, relative_step=False),
    "counting on the object": Counting,
    "counting in its state": Named,
    "replacing data": Replacing,
    "clipping inside": lambda parameters: Clipping(parameters, lr=0.1),
}
TIERS = ("cpu", "nvme")


def engine_of(stage: int, make: Make, tier: str = "", folder: str = "", **settings: Any) -> Any:
    if tier:
        path = {"nvme_path": folder} if tier == "nvme" else {}
        settings["zero"] = {"offload_optimizer": {"device": tier, **path}}
    return start(stage, net(), make, **settings)


def micro_batch(engine: Any, step: int) -> None:
    engine.backward(loss_of(engine, rows(step, dist.get_rank(), ROWS)))


def train(stage: int, name: str, tier: str, precision: str, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(stage, FOREIGN[name], tier, folder, precision=precision)
    for step in range(STEPS):
        micro_batch(engine, step)
        engine.step()
    values = masters(engine)
    engine.destroy()
    return values


def dense(name: str, precision: str = "fp32") -> dict[str, torch.Tensor]:
    twin = Reference(net(), FOREIGN[name], RANKS, precision=precision)
    for step in range(STEPS):
        for rank in range(RANKS):
            twin.backward(rank, loss_of(twin.copies[rank], rows(step, rank, ROWS)))
        twin.step()
    return twin.parameters()


FAST = {
    ("schedulefree.AdamW", 3),
    ("prodigyopt.Prodigy", 1),
    ("pytorch_optimizer.SOAP", 2),
    ("pytorch_optimizer.Adan with clipping", 3),
    ("torch_optimizer.Lookahead", 3),
    ("bitsandbytes.AdamW8bit", 2),
    ("counting on the object", 0),
    ("replacing data", 2),
    ("clipping inside", 1),
}
CELLS = [
    pytest.param(name, stage, marks=() if (name, stage) in FAST else pytest.mark.slow)
    for name in FOREIGN
    for stage in STAGES
]


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("name", "stage"), CELLS)
def test_a_foreign_optimizer_equals_one_process(workers: Any, tmp_path: Any, name: str, stage: int) -> None:
    for values in workers(RANKS).run(train, stage, name, "", "fp32", str(tmp_path), timeout=120):
        expect_close(values, dense(name), 1e-5)


FAST_OFFLOADED = {("counting on the object", 3, "cpu"), ("clipping inside", 2, "nvme"), ("replacing data", 3, "cpu")}
OFFLOADED = [
    pytest.param(name, stage, tier, marks=() if (name, stage, tier) in FAST_OFFLOADED else pytest.mark.slow)
    for name in FOREIGN
    for stage in STAGES[1:]
    for tier in TIERS
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "stage", "tier"), OFFLOADED)
def test_an_offloaded_foreign_optimizer_equals_one_process(
    workers: Any, tmp_path: Any, name: str, stage: int, tier: str
) -> None:
    for values in workers(RANKS).run(train, stage, name, tier, "fp32", str(tmp_path), timeout=120):
        expect_close(values, dense(name), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_optimizer_in_bf16_equals_one_process(workers: Any, tmp_path: Any, name: str, stage: int) -> None:
    for values in workers(RANKS).run(train, stage, name, "", "bf16", str(tmp_path), timeout=120):
        expect_close(values, dense(name, "bf16"), 2e-2)


# -- methods that write outside of step() -----------------------------------------------------------------------------

FREE = ("schedulefree.AdamW", "schedulefree.SGD")
PROBE = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def averaged(stage: int, name: str, tier: str, precision: str, folder: str, client: bool) -> list[torch.Tensor]:
    """Outputs in evaluation mode, back in training mode, and the masters' effect after more steps."""
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(FOREIGN[name](parameters))
        return made[0]

    engine = engine_of(stage, make, tier, folder, precision=precision)
    optimizer = made[0] if client else engine.optimizer
    outputs = []
    for step in range(6):
        micro_batch(engine, step)
        engine.step()
        if step in (2, 5):
            optimizer.eval()
            with torch.no_grad():
                outputs.append(engine(PROBE).float().clone())
            optimizer.train()
            with torch.no_grad():
                outputs.append(engine(PROBE).float().clone())
    engine.destroy()
    assert "eval" not in vars(made[0])  # the class's own again
    return outputs


def dense_averaged(name: str, precision: str) -> list[torch.Tensor]:
    twin = Reference(net(), FOREIGN[name], RANKS, precision=precision)
    outputs = []
    for step in range(6):
        for rank in range(RANKS):
            twin.backward(rank, loss_of(twin.copies[rank], rows(step, rank, ROWS)))
        twin.step()
        for mode in ("eval", "train") if step in (2, 5) else ():
            getattr(twin.optimizer, mode)()
            with torch.no_grad():
                for replica, master in zip(twin.copies[0].parameters(), twin.master.parameters(), strict=True):
                    replica.copy_(master)
                outputs.append(twin.copies[0](PROBE).float().clone())
        for copy in twin.copies:
            for replica, master in zip(copy.parameters(), twin.master.parameters(), strict=True):
                replica.data.copy_(master)
    return outputs


def check_averaged(got: list[list[torch.Tensor]], name: str, precision: str) -> None:
    expected = dense_averaged(name, precision)
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3  # evaluation has other weights
    for outputs in got:
        for ours, theirs in zip(outputs, expected, strict=True):
            assert float((ours - theirs).abs().max()) <= (1e-5 if precision == "fp32" else 3e-2)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("stage", "client"), [(0, False), (1, True), (2, False), (3, True)])
def test_evaluation_has_the_averaged_weights(workers: Any, tmp_path: Any, stage: int, client: bool) -> None:
    got = workers(RANKS).run(averaged, stage, FREE[0], "", "fp32", str(tmp_path), client, timeout=120)
    check_averaged(got, FREE[0], "fp32")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_of_an_offloaded_optimizer(workers: Any, tmp_path: Any, stage: int, tier: str) -> None:
    got = workers(RANKS).run(averaged, stage, FREE[1], tier, "bf16", str(tmp_path), True, timeout=120)
    check_averaged(got, FREE[1], "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "tier"), [(0, ""), *((stage, tier) for stage in STAGES[1:] for tier in ("", *TIERS))]
)
@pytest.mark.parametrize("name", FREE)
def test_evaluation_everywhere(workers: Any, tmp_path: Any, name: str, stage: int, tier: str, precision: str) -> None:
    check_averaged(
        workers(RANKS).run(averaged, stage, name, tier, precision, str(tmp_path), False, timeout=120), name, precision
    )


# -- updates of two steps, and writes to leaves ------------------------------------------------------------------------


def sharpness_aware(parameters: Any) -> torch.optim.Optimizer:
    from pytorch_optimizer import SAM

    return SAM(list(parameters), torch.optim.AdamW, rho=0.5, lr=1e-2)


def train_by_two_steps(stage: int, tier: str, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(stage, sharpness_aware, tier, folder)
    micro_batch(engine, 0)
    with raises(UsageError, "SAM", "first_step"):
        engine.step()
    engine.optimizer.zero_grad()
    for step in range(4):
        micro_batch(engine, step)
        engine.optimizer.first_step(zero_grad=True)
        micro_batch(engine, step)
        engine.optimizer.second_step(zero_grad=True)
    values = masters(engine)
    engine.destroy()
    return values


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("stage", "tier"), [(0, ""), (1, ""), (2, "nvme"), (3, ""), (3, "cpu")])
def test_sharpness_aware_minimization_in_its_two_steps(workers: Any, tmp_path: Any, stage: int, tier: str) -> None:
    twin = Reference(net(), sharpness_aware, RANKS)
    for step in range(4):
        for half in ("first_step", "second_step"):
            for rank in range(RANKS):
                for replica, master in zip(twin.copies[rank].parameters(), twin.master.parameters(), strict=True):
                    replica.data.copy_(master)
                twin.backward(rank, loss_of(twin.copies[rank], rows(step, rank, ROWS)))
            for parameter, gradient in zip(twin.master.parameters(), twin.gradients().values(), strict=True):
                parameter.grad = gradient
            getattr(twin.optimizer, half)(zero_grad=True)
            twin.discard()
    for values in workers(RANKS).run(train_by_two_steps, stage, tier, str(tmp_path), timeout=120):
        expect_close(values, twin.parameters(), 1e-5)


def write_to_a_leaf(stage: int, everywhere: bool) -> None:
    engine = engine_of(stage, Counting)
    micro_batch(engine, 0)
    engine.step()
    if everywhere or dist.get_rank() == 0:
        for group in engine.optimizer.param_groups:
            for leaf in group["params"]:
                with torch.no_grad():
                    leaf.clamp_(-0.01, 0.01)
    micro_batch(engine, 1)
    with raises(UsageError, "outside of step()" if everywhere else "rank 0 wrote to"):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(("stage", "everywhere"), [(1, True), (2, False), (3, True), (3, False)])
def test_a_write_to_the_parameters_of_the_groups_is_refused_by_all(workers: Any, stage: int, everywhere: bool) -> None:
    workers(RANKS).run(write_to_a_leaf, stage, everywhere)


def resumed(stage: int, name: str, tier: str, folder: str) -> None:
    """What a nested optimizer knows is in a checkpoint."""
    engine = engine_of(stage, FOREIGN[name], tier, f"{folder}/a")
    for step in range(4):
        micro_batch(engine, step)
        engine.step()
    engine.save_checkpoint(f"{folder}/saved")
    for step in range(4, 8):
        micro_batch(engine, step)
        engine.step()
    expected = masters(engine)
    engine.destroy()
    engine = engine_of(stage, FOREIGN[name], tier, f"{folder}/b")
    engine.load_checkpoint(f"{folder}/saved")
    for step in range(4, 8):
        micro_batch(engine, step)
        engine.step()
    expect_close(masters(engine), expected, 0.0)
    engine.destroy()


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("name", "stage", "tier"),
    [
        ("pytorch_optimizer.Lookahead", 0, ""),
        ("pytorch_optimizer.Lookahead", 2, "nvme"),
        ("pytorch_optimizer.Lookahead", 3, ""),
        ("counting in its state", 2, ""),
        ("counting in its state", 3, "nvme"),
        ("prodigyopt.Prodigy", 1, ""),
        ("prodigyopt.Prodigy", 3, "nvme"),
    ],
)
def test_a_checkpoint_has_the_state_of_nested_and_global_optimizers(
    workers: Any, tmp_path: Any, name: str, stage: int, tier: str
) -> None:
    workers(RANKS).run(resumed, stage, name, tier, str(tmp_path), timeout=120)


# -- what is refused by name, and said --------------------------------------------------------------------------------


def refused_in_fp16(stage: int) -> None:
    engine = start(stage, net(), sharpness_aware, precision="fp16")
    with raises(OptimizerError, "SAM", "bf16"):
        engine.optimizer.first_step()
    engine.destroy()


def refused_on_stages() -> None:
    model = net()
    model.example_input_array = rows(0, 0)
    with raises(OptimizerError, "Prodigy", "pp"):
        start(1, model, FOREIGN["prodigyopt.Prodigy"], mesh={"pp": 2})


def warned_of_one_owner() -> int:
    with said() as lines:
        engine = start(2, net(), FOREIGN["prodigyopt.Prodigy"])
    held = sum(len(group["params"]) for group in engine.optimizer.param_groups)
    with raises(AttributeError, "no attribute 'nonsense'"):
        engine.optimizer.nonsense  # noqa: B018
    engine.destroy()
    assert dist.get_rank() or with_words(lines, "Prodigy", "all parameters at once", "rank 0") == 1, lines
    return held


def test_two_steps_under_a_loss_scale_are_refused(workers: Any) -> None:
    workers(RANKS).run(refused_in_fp16, 2)


def test_an_update_over_all_parameters_is_refused_where_stages_have_some_each(workers: Any) -> None:
    workers(RANKS).run(refused_on_stages)


def test_that_an_optimizer_is_not_sharded_is_said(workers: Any) -> None:
    first, second = workers(RANKS).run(warned_of_one_owner)
    assert first == 8 and second == 0


def warned_of_hooks(stage: int) -> int:
    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    with said() as lines:
        engine = start(stage, net(), hooked)
        for step in range(2):
            micro_batch(engine, step)
            engine.step()
    engine.destroy()
    return with_words(lines, "pre-step hook of SGD", "gradient_clipping")


def test_a_hook_that_sees_shards_is_said(workers: Any) -> None:
    assert workers(RANKS).run(warned_of_hooks, 1)[0] == 1
    assert workers(RANKS).run(warned_of_hooks, 0)[0] == 0
