"""Every public torch function that takes a tensor, with arguments found by trying them on a dense parameter."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import nn


class Hole(Enum):
    """Where the parameter goes among the arguments of a call."""

    PARAMETER = "parameter"


PARAMETER = Hole.PARAMETER


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # made from the parameter's shape
    "same": lambda p: torch.full(p.shape, 0.5),
    "ints": lambda p: torch.zeros(p.shape, dtype=torch.int64),
    "mask": lambda p: torch.arange(p.numel()).reshape(p.shape) % 2 == 0,
    "row": lambda p: torch.arange(4.0) / 4,
    "square": lambda p: torch.eye(4) * 2,
    "index": lambda p: torch.tensor([0, 1]),
    "one": lambda p: torch.tensor(0.25),
    "image": lambda p: torch.ones(1, 4, 4, 4),
    "kernel1": lambda p: torch.ones(2, 4, p.shape[-1]) / 3,
    "start": lambda p: torch.tensor([0]),
    "grid": lambda p: torch.zeros(1, 2, 2, 2),
    "sparse": lambda p: torch.eye(4).to_sparse(),
}
PLAIN: tuple[Any, ...] = (
    1,
    0,
    2,
    (0,),
    (4,),
    (0, 1),
    (1, 1),
    0.5,
    True,
    torch.float32,
    "mean",
    "ij->ji",
    int,
    slice(2),
)
LISTS = {"tensors", "operands", "seq", "sequence", "arrays", "xs"}
HINTS: dict[str, tuple[Any, ...]] = {
    "dim": (0, 1, (0,)),
    "dims": ((0,), (0, 1), (1, 0)),
    "size": ((2, 2), (4,), (16,), (4, 4)),
    "shape": ((4, 4), (16,), (2, 2)),
    "index": ("ints", "index", 0),
    "mask": ("mask",),
    "condition": ("mask",),
    "dtype": (torch.float64, torch.int32),
    "other": ("same", 2.0, "ints"),
    "weight": ("square", "same"),
    "equation": ("...->...",),
    "n": (1, 2),
    "p": (0.0, 2.0, 2),
    "q": (0.5,),
    "kernel_size": (2, (2, 2)),
    "output_size": (2, (2, 2)),
    "num_groups": (1, 2),
    "normalized_shape": ((4,),),
    "repeats": (2,),
    "chunks": (2,),
    "split_size_or_sections": (2,),
    "indices_or_sections": (2,),
    "pad": ((1, 1),),
    "target": ("ints", "same", "index"),
    "memo": ({},),
    "protocol": (2,),
    "value": (1.0, "same"),
    "source": ("same", "row"),
    "src": ("same", "row"),
    "ord": (2, "fro"),
    "device": ("cpu",),
    "proto": (2,),
    "d": (True, "same"),
}
SPECIAL: dict[str, tuple[tuple[Any, ...], ...]] = {  # what no try would find, by the last part of the name
    "embedding": (("index", PARAMETER),),
    "embedding_bag": ((PARAMETER, "index", "start"),),
    "narrow": ((PARAMETER, 0, 0, 1),),
    "narrow_copy": ((PARAMETER, 0, 0, 1),),
    "renorm": ((PARAMETER, 2, 0, 1.0),),
    "renorm_": ((PARAMETER, 2, 0, 1.0),),
    "unfold": ((PARAMETER, 0, 2, 1),),
    "unfold_copy": ((PARAMETER, 0, 2, 1),),
    "scatter": ((PARAMETER, 0, "ints", "same"),),
    "scatter_": ((PARAMETER, 0, "ints", "same"),),
    "select_scatter": ((PARAMETER, "row", 0, 0),),
    "where": ((PARAMETER, "mask", "same"),),
    "index_put": ((PARAMETER, ["index"], "one"),),
    "index_put_": ((PARAMETER, ["index"], "one"),),
    "batch_norm": ((PARAMETER, None, None, None, None, True, 0.1, 1e-5, False),),
    "instance_norm": ((PARAMETER, None, None, None, None, True, 0.1, 1e-5, False),),
    "layer_norm": ((PARAMETER, (4,), PARAMETER),),
    "cholesky": (("square", PARAMETER),),
    "solve_triangular": (("square", PARAMETER),),
    "polygamma": ((1, PARAMETER),),
    "conv1d": ((PARAMETER, "kernel1"),),
    "bilinear": ((PARAMETER, PARAMETER, "kernel1"),),
    "cross": ((PARAMETER, "same"),),
    "grid_sample": ((PARAMETER, "grid"),),
    "poisson_nll_loss": ((PARAMETER, "same", True, False, 1e-8, "mean"),),
    "map_": ((PARAMETER, "same", max),),
    "map2_": ((PARAMETER, "same", "same", max),),
    "apply_": ((PARAMETER, abs),),
    "resize_": ((PARAMETER, (2,)),),
    "resize_as_": ((PARAMETER, "one"),),
    "module_load": ((PARAMETER, "same"),),
    "sub": ((PARAMETER, "same"),),
    "__format__": ((PARAMETER, ""), (PARAMETER, ".2f")),
    "__dlpack__": ((PARAMETER,),),
    "__setitem__": ((PARAMETER, 0, 1.0),),
    "stft": ((PARAMETER, 4, None, None, None, True, "constant", False, None, True),),
    "quantize_per_tensor": ((PARAMETER, 0.1, 0, torch.qint8),),
    "fake_quantize_per_tensor_affine": ((PARAMETER, 0.1, 0, 0, 255),),
    "sparse_mask": ((PARAMETER, "sparse"),),
}
CRASHES_ON_NONSENSE = {"torch.embedding_bag"}  # torch itself, on a dense tensor; only known arguments are tried
# One dense call after another differs in the last bits (seen over 4,000 calls), perhaps by uninitialised pivots.
BARS = {"torch.linalg.lstsq": 1e-5}
TRIALS = 120  # combinations of arguments tried per function


@dataclass(frozen=True)
class Call:
    """A function by its public name, and arguments with holes for the parameter.

    `mode` is "grad", "no_grad", or "frozen": with a parameter that does not require a gradient.
    """

    name: str
    arguments: tuple[Any, ...]
    mode: str

    def __call__(self, parameter: torch.Tensor) -> Any:
        function, _ = public_functions()[self.name]
        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.set_grad_enabled(self.mode == "grad"):
            warnings.simplefilter("ignore")
            parameter.requires_grad_(self.mode != "frozen")
            arguments = [_place(argument, parameter) for argument in self.arguments]
            if self.arguments == (PARAMETER,) and self.name == "torch.Tensor.set_":
                return parameter.set_()  # torch dispatches no set_ without arguments; the method is what users call
            return function(*arguments)


def _place(argument: Any, parameter: torch.Tensor) -> Any:
    if argument is PARAMETER:
        return parameter
    if isinstance(argument, list):
        return [_place(entry, parameter) for entry in argument]
    if isinstance(argument, dict):
        return dict(argument)
    return TENSORS[argument](parameter) if isinstance(argument, str) and argument in TENSORS else argument


@cache
def public_functions() -> dict[str, tuple[Callable[..., Any], inspect.Signature]]:
    """Overridable functions by name, with the signature torch documents for overriding them."""
    found = {}
    for function, dummy in torch.overrides.get_testing_overrides().items():
        name = torch.overrides.resolve_name(function) or getattr(function, "__name__", "")
        last = name.removesuffix(".__get__").removesuffix(".__set__").removesuffix(".__delete__").rsplit(".", 1)[-1]
        internal = last.startswith("_") and not last.startswith("__")
        if name.startswith("torch.") and not internal and not name.startswith("torch._"):
            found[name] = (function, inspect.signature(dummy))
    return dict(sorted(found.items()))


def _choices(name: str, index: int) -> tuple[Any, ...]:
    if name in LISTS:
        return ([PARAMETER, PARAMETER], PARAMETER)
    if index == 0:
        return (PARAMETER,)
    hinted = HINTS.get(name, ())
    return (*hinted, *(choice for choice in (*TENSORS, *PLAIN) if choice not in hinted))


def candidates(signature: inspect.Signature) -> Iterator[tuple[Any, ...]]:
    """Argument tuples to try, likely ones first; the parameter goes first, or where a lone tensor fits."""
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in positional if p.default is p.empty]
    if any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
        names.append("tensors") if not names else names.append("size")
        yield tuple([PARAMETER] * min(len(names), 2))
    product = itertools.product(*(_choices(name, index) for index, name in enumerate(names)))
    yield from itertools.islice(product, TRIALS)
    yield (PARAMETER, "same")
    for extra in PLAIN:
        yield (PARAMETER, extra)
    yield (PARAMETER, 0, 1)


def find_call(name: str, shape: tuple[int, ...]) -> Call | None:
    """The first call that a dense parameter accepts and that gives the same twice; None when no try does."""
    _, signature = public_functions()[name]
    known = SPECIAL.get(name.rsplit(".", 1)[-1], ())
    for arguments in known if name in CRASHES_ON_NONSENSE else itertools.chain(known, candidates(signature)):
        for mode in ("grad", "no_grad", "frozen"):
            call = Call(name, arguments, mode)
            try:
                if same(call(dense(shape)), call(dense(shape)), BARS.get(name, 0.0)):
                    return call
            except Exception:  # any refusal of these arguments by torch
                continue
    return None


def find_calls(shape: tuple[int, ...], names: list[str]) -> list[Call]:
    """The calls found for a parameter of one shape."""
    return [call for name in names if (call := find_call(name, shape))]


def dense(shape: tuple[int, ...]) -> nn.Parameter:
    """A plain parameter with fixed values in (0.1, 1.1), in the domain of most functions."""
    return nn.Parameter(torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1)


def same(ours: Any, theirs: Any, bar: float = 0.0) -> bool:
    """Whether two results are equal: tensors in shape, dtype and values, containers entry by entry.

    Args:
        ours: any result.
        theirs: what it should be.
        bar: largest difference of floating-point numbers in tensors.
    """
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        a, b = torch.clone(ours).detach(), torch.clone(theirs).detach()
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if not a.is_floating_point():
            return torch.equal(a, b)
        return bool(((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= bar)).all())
    if isinstance(theirs, (list, tuple)):
        alike = type(ours) is type(theirs) and len(ours) == len(theirs)
        return alike and all(same(a, b, bar) for a, b in zip(ours, theirs, strict=True))
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key], bar) for key in theirs)
    if isinstance(theirs, (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)):
        return ours == theirs or (ours != ours and theirs != theirs)
    return type(ours) is type(theirs)  # iterators, hooks, storages: nothing to compare
