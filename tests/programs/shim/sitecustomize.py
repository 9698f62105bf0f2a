"""What a program is given from outside, on a machine without CUDA and without the hub: Python imports this at start.

Nothing is patched before a library is imported by the program. `PROGRAM_CUDA=1` lends the calls of `torch.cuda` that
programs make without asking whether there is a device; `PROGRAM_RECORD` is a folder where each rank writes the losses
it hands to `backward`; `PROGRAM_STEPS` ends a program after so many steps where it has no argument for that.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

CUDA = os.environ.get("PROGRAM_CUDA") == "1"
RECORD = os.environ.get("PROGRAM_RECORD")
STEPS = int(os.environ.get("PROGRAM_STEPS", "0"))
DATA = os.environ.get("PROGRAM_DATA", "")
RANK = os.environ.get("RANK", "0")


class Event:
    """`torch.cuda.Event` by the host's clock."""

    def __init__(self, *_, **__):
        self.at = 0.0

    def record(self, *_):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3

    def synchronize(self):
        pass

    def query(self):
        return True


def host(value):
    """`value`, or the host where it names a CUDA device."""
    import torch

    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def lend_cuda(torch):
    """The calls that programs make on `torch.cuda`, and "cuda" as a name of the host."""
    from torch.overrides import TorchFunctionMode

    class OnHost(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = {name: host(value) for name, value in (kwargs or {}).items()}
            if function is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
                args = (args[0], "cpu", *args[2:])  # a device by its number
            return function(*[host(value) for value in args], **kwargs)

    def answer(value):  # one function a name: torch's compiler keeps rules by function
        return lambda *_, **__: value

    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed_all"):
        setattr(torch.cuda, name, answer(None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved",
                 "current_device"):  # fmt: skip
        setattr(torch.cuda, name, answer(0))
    torch.cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.cuda.Event = Event
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.nn.Module.cuda = lambda module, *_, **__: module
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    to = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *args, **kwargs: to(
        module, *["cpu" if type(value) is int else host(value) for value in args],
        **{name: host(value) for name, value in kwargs.items()})  # fmt: skip
    OnHost().__enter__()


def with_gloo(distributed):
    """NCCL is gloo."""
    init = distributed.init_process_group

    @functools.wraps(init)
    def init_process_group(backend=None, *args, **kwargs):
        return init("gloo" if backend and "nccl" in backend else backend, *args, **kwargs)

    distributed.init_process_group = init_process_group


def record(deepspeed):
    """Losses as they are handed to `backward`, or come from `train_batch`, to a file a rank."""
    path = Path(RECORD) / f"rank{RANK}.jsonl"
    initialize, inits, engines = deepspeed.initialize, deepspeed.init_distributed, []

    def write(row):
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def watched(engine):
        engines.append(engine)
        number = len(engines)
        backward, step, steps = engine.backward, engine.step, [0]

        def noted(loss, *args, **kwargs):
            write({"engine": number, "loss": float(loss)})
            return backward(loss, *args, **kwargs)

        def counted(*args, **kwargs):
            result = step(*args, **kwargs)
            steps[0] += 1
            write({"engine": number, "step": steps[0]})
            if STEPS and steps[0] >= STEPS:
                print(f"stopped after {STEPS} steps", flush=True)
                sys.exit(0)
            return result

        if type(engine).__name__ == "PipelineEngine":
            train_batch = engine.train_batch

            def trained(*args, **kwargs):
                loss = train_batch(*args, **kwargs)
                steps[0] += 1
                write({"engine": number, "loss": float(loss), "step": steps[0]})
                return loss

            engine.train_batch = trained
        else:
            engine.backward, engine.step = noted, counted
        return engine

    @functools.wraps(initialize)
    def initialized(*args, **kwargs):
        engine, *rest = initialize(*args, **kwargs)
        return (watched(engine), *rest)

    @functools.wraps(inits)
    def init_distributed(dist_backend=None, *args, **kwargs):
        return inits("gloo" if dist_backend == "nccl" else dist_backend, *args, **kwargs)

    deepspeed.initialize, deepspeed.init_distributed = initialized, init_distributed


def local_cifar(cifar):
    """CIFAR-10 is a folder made on the spot, wherever a program wants to download it to."""
    made = cifar.CIFAR10.__init__

    def __init__(self, root, *args, **kwargs):
        made(self, Path(DATA) / "cifar", *args, **kwargs)

    cifar.CIFAR10.__init__ = __init__
    cifar.check_integrity = lambda path, *_: os.path.exists(path)


def local_metric(datasets):
    """`load_metric` of old releases fetched a script; accuracy is what the programs ask of it."""

    class Accuracy:
        def __init__(self):
            self.right = self.all = 0

        def add_batch(self, predictions, references):
            self.right += int((predictions == references).sum())
            self.all += len(references)

        def compute(self):
            value, self.right, self.all = self.right / max(self.all, 1), 0, 0
            return {"accuracy": value}

    datasets.load_metric = lambda *_, **__: Accuracy()


def without_vision_kernels(_):
    """torchvision's kernels need the CUDA build of torch; its package asks for this one by name when it is imported."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kept.append(library)


kept = []  # a library ends with its object
BEFORE = {"torchvision": without_vision_kernels}
AFTER = {"torchvision.datasets.cifar": local_cifar, "datasets": local_metric}
if CUDA:
    AFTER |= {"torch": lend_cuda, "torch.distributed": with_gloo}
if RECORD and "RANK" in os.environ:
    AFTER["deepspeed"] = record


class Finder(importlib.abc.MetaPathFinder):
    """Finds what others find, and patches it when it is loaded."""

    inside = False

    def find_spec(self, name, path, target=None):
        if self.inside or (name not in AFTER and name not in BEFORE):
            return None
        self.inside = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.inside = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            BEFORE.pop(name, lambda _: None)(module)
            load(module)
            AFTER.pop(name, lambda _: None)(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
