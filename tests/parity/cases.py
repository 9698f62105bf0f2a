"""Training programs that are hard for a sharding engine, each written once for both worlds of `worlds.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.parity.models import SmallLM, batch

STEPS = 3
WIDTH = 12


def data(step: int, rank: int, rows: int = 4) -> torch.Tensor:
    """`[rows, WIDTH]` fp32 inputs of one micro-batch."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(17 * step + rank))


class Layer(nn.Module):
    """A residual MLP; `shape` says in what container it hands its output on."""

    def __init__(self, shape: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        return self.shape(x + self.down(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Three layers in a list, a projection outside of it, and a parameter of the root itself."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, open_output: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.open_output = open_output

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.open_output(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x)) * self.gain


def square(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def loop(world: Any, model: nn.Module, **how: Any) -> None:
    """The plain loop: one batch, one step."""
    trainer = world.train(model)
    for step in range(STEPS):
        trainer.backward(lambda m, rank, step=step: square(m(data(step, rank))), **how)
        trainer.step()


def plain(world: Any) -> None:
    loop(world, seeded(Net))


def plain_backward(world: Any) -> None:
    loop(world, seeded(Net), plain=True)


def tied_embedding(world: Any) -> None:
    trainer = world.train(seeded(lambda: SmallLM(vocabulary=1003)))
    for step in range(STEPS):
        trainer.backward(lambda m, rank, step=step: m(*batch(step, 0, rank, 1003)))
        trainer.step()


def frozen_layers(world: Any) -> None:
    model = seeded(Net)
    model.layers[1].requires_grad_(False)
    model.out.weight.requires_grad_(False)
    loop(world, model)


class Thrice(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.layers[1](self.layers[2](self.layers[1](x)))))


def module_used_three_times(world: Any) -> None:
    loop(world, seeded(Thrice))


class Unused(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[0](x))


def unused_module(world: Any) -> None:
    loop(world, seeded(Unused))


class External(Net):
    """The forward of the root reads parameters that belong to other modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(self.body(x), self.layers[0].up.weight, self.layers[1].up.bias)
        return functional.linear(x, self.layers[0].up.weight.t()) * self.gain + self.out.bias


def external_parameter(world: Any) -> None:
    loop(world, seeded(External))


class Branch(Net):
    def forward(self, x: torch.Tensor, taken: bool = False) -> torch.Tensor:
        x = self.layers[0](x)
        if taken:
            x = self.layers[2](self.layers[1](x))
        return self.out(x) * self.gain


def branch_on_one_rank(world: Any) -> None:
    trainer = world.train(seeded(Branch))
    for step in range(STEPS):
        trainer.backward(lambda m, rank, step=step: square(m(data(step, rank), taken=(rank + step) % 2 == 0)))
        trainer.step()


def branch_in_evaluation(world: Any) -> None:
    trainer = world.train(seeded(Branch))
    trainer.backward(lambda m, rank: square(m(data(0, rank))))
    trainer.step()
    trainer.evaluate(lambda m, rank: m(data(1, rank), taken=rank == 0))


@dataclass
class Output:
    hidden: torch.Tensor
    name: str = "hidden"


def list_output(world: Any) -> None:
    loop(world, seeded(lambda: Net(lambda: Layer(lambda x: [x, None]), lambda y: y[0])))


def dict_output(world: Any) -> None:
    loop(world, seeded(lambda: Net(lambda: Layer(lambda x: {"hidden": x, "count": 1}), lambda y: y["hidden"])))


def dataclass_output(world: Any) -> None:
    loop(world, seeded(lambda: Net(lambda: Layer(Output), lambda y: y.hidden)))


def two_losses_on_one_graph(world: Any) -> None:
    trainer = world.train(seeded(Net))
    for step in range(STEPS):

        def losses(m: Any, rank: int, step: int = step) -> tuple[torch.Tensor, torch.Tensor]:
            y = m(data(step, rank))
            return square(y), y.float().abs().mean()

        trainer.backward(losses)
        trainer.step()


def two_forwards_before_backward(world: Any) -> None:
    trainer = world.train(seeded(Net))
    for step in range(STEPS):
        trainer.backward(lambda m, rank, step=step: square(m(data(step, rank)) - m(data(step + 10, rank))))
        trainer.step()


def no_sync(world: Any) -> None:
    trainer = world.train(seeded(Net))
    for step in range(STEPS):
        trainer.backward(lambda m, rank, step=step: square(m(data(step, rank))), synced=False)
        trainer.backward(lambda m, rank, step=step: square(m(data(step + 10, rank))))
        trainer.step()


def partial_window(world: Any) -> None:
    trainer = world.train(seeded(Net), accumulation=4)
    for step in range(STEPS):
        for micro in range(2):
            trainer.backward(lambda m, rank, seed=2 * step + micro: square(m(data(seed, rank))))
            trainer.micro_step()
        trainer.flush(seen=2)


def unfreezing_later(world: Any) -> None:
    model = seeded(Net)
    model.layers[0].requires_grad_(False)
    trainer = world.train(model)
    for step in range(STEPS + 1):
        if step == 1:
            trainer.each_model(lambda m: m.layers[0].requires_grad_(True))
        if step == 2:
            trainer.each_model(lambda m: m.out.requires_grad_(False))
        if step == 3:
            trainer.each_model(lambda m: m.out.requires_grad_(True))
        trainer.backward(lambda m, rank, step=step: square(m(data(step, rank))))
        trainer.step()


def gan(world: Any) -> None:
    """Two engines, each of which sees gradients that are meant for the other."""
    generator, critic = world.train(seeded(Net)), world.train(seeded(Net))
    for step in range(STEPS):

        def critic_loss(c: Any, rank: int, step: int = step) -> torch.Tensor:
            fake = generator.model(rank)(data(step, rank)).detach()
            return square(c(data(step + 10, rank)) - 1) + square(c(fake))

        def generator_loss(g: Any, rank: int, step: int = step) -> torch.Tensor:
            return square(critic.model(rank)(g(data(step, rank))) - 1)

        critic.backward(critic_loss)
        critic.step()
        generator.backward(generator_loss)
        generator.step()
        critic.discard()


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(self.batch_norm(x))


def batch_norm(world: Any) -> None:
    trainer = world.train(seeded(Normed))
    for step in range(STEPS):
        trainer.backward(lambda m, rank, step=step: square(m(data(step, rank))))
        trainer.step()
    trainer.evaluate(lambda m, rank: m(data(99, rank)))


class Positions(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(self.layers[0](x) + self.table)


def fp32_position_table(world: Any) -> None:
    loop(world, seeded(Positions))


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def checkpoint_reentrant(world: Any) -> None:
    loop(world, seeded(lambda: Checkpointed(reentrant=True)))


def checkpoint_not_reentrant(world: Any) -> None:
    loop(world, seeded(lambda: Checkpointed(reentrant=False)))


def compile_per_block(world: Any) -> None:
    model = seeded(Net)
    if hasattr(world, "stage"):  # the reference stays eager
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    loop(world, model)


def compiled_forward(world: Any) -> None:
    model = seeded(Net)
    if hasattr(world, "stage"):
        for layer in model.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
    loop(world, model)


def deepcopied(world: Any) -> None:
    trainer = world.train(seeded(Net))
    for step in range(STEPS):
        trainer.backward(lambda m, rank, step=step: square(m(data(step, rank))))
        trainer.step()

    def run_copy(m: Any, rank: int) -> torch.Tensor:
        copied = copy.deepcopy(getattr(m, "module", m))
        return copied(data(99, rank).to(copied.gain.dtype))  # a copy is a plain module: nobody casts for it

    trainer.evaluate(run_copy)
    trainer.backward(lambda m, rank: square(m(data(50, rank))))
    trainer.step()


def gradient_inspection(world: Any) -> None:
    trainer = world.train(seeded(Unused), accumulation=2)
    for step in range(STEPS):
        trainer.backward(lambda m, rank, step=step: square(m(data(step, rank))))
        trainer.micro_step()
        trainer.backward(lambda m, rank, step=step: square(m(data(step + 10, rank))))
        trainer.gradients()
        trainer.step()


CASES = {
    case.__name__: case
    for case in (
        plain,
        plain_backward,
        tied_embedding,
        frozen_layers,
        module_used_three_times,
        unused_module,
        external_parameter,
        branch_on_one_rank,
        branch_in_evaluation,
        list_output,
        dict_output,
        dataclass_output,
        two_losses_on_one_graph,
        two_forwards_before_backward,
        no_sync,
        partial_window,
        unfreezing_later,
        gan,
        batch_norm,
        fp32_position_table,
        checkpoint_reentrant,
        checkpoint_not_reentrant,
        compile_per_block,
        compiled_forward,
        deepcopied,
        gradient_inspection,
    )
}
