"""Construction of the configured optimizer, with checks of its parameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.unavailable_keys import REFUSED_OPTIMIZERS
from deepspeed.errors import ArgumentError, DeepSpeedError, NotAvailableError, OptimizerError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.fused_adam import FUSED_DEVICES
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import Muon


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint " (did you mean 'x'?)" if a known name resembles `name`, ignoring case, and "" otherwise."""
    by_lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def construct(section: str, cls: type, first: Any, params: Mapping[str, Any], error: type[ArgumentError]) -> Any:
    """Return `cls(first, **params)`.

    Args:
        section: section of the configuration for error messages, "optimizer" or "scheduler".
        cls: class of the optimizer or scheduler.
        first: parameter groups for an optimizer, the optimizer for a scheduler.
        params: `params` of the section.
        error: class of the error for an unknown or missing key, or a value that `cls` rejects.
    """
    accepted = list(inspect.signature(cls).parameters.values())[1:]
    names = [p.name for p in accepted]
    problems = [
        f"{section}.params.{key} is not a parameter of {cls.__name__}{nearest(key, names)}"
        for key in params
        if key not in names
    ]
    problems += [
        f"{section}.params.{p.name} is required by {cls.__name__}"
        for p in accepted
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in params
    ]
    if problems:
        raise error("; ".join(problems) + f". {cls.__name__} takes: {', '.join(names)}")
    try:
        return cls(first, **params)
    except DeepSpeedError:
        raise
    except (TypeError, ValueError, RuntimeError) as problem:
        raise error(f"{section}.type {cls.__name__} with params {dict(params)}: {problem}") from problem


Params = dict[str, Any]
Recipe = tuple[type[torch.optim.Optimizer], Params]

# Each element's update depends only on its own weight, gradient and state, so tensors can be split anywhere.
ELEMENTWISE = frozenset(
    {
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.SGD,
        FusedAdam,
        DeepSpeedCPUAdam,
        FusedLion,
        DeepSpeedCPULion,
        DeepSpeedCPUAdagrad,
    }
)
UNSUPPORTED = {
    torch.optim.LBFGS: "evaluates the model several times inside one step and takes inner products over all parameters",
    torch.optim.SparseAdam: "updates only the rows that sparse gradients name, and reduced gradients are dense",
}
FUSED_IN_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def _adam(params: Params, name: str) -> Recipe:
    """Return the class and arguments of "adam" or "adamw"."""
    decoupled = params.pop("adam_w_mode", True)
    if name == "adamw" and not decoupled:
        raise OptimizerError(
            'optimizer.params.adam_w_mode is false, but AdamW is decoupled by definition; write "type": "Adam"'
        )
    if params.get("bias_correction"):
        del params["bias_correction"]
    # States have the dtype of the master weights, which the precision sections determine.
    params.pop("fp32_optimizer_states", None)
    asked_for = params.pop("torch_adam", False)
    torch_only = {"amsgrad", "foreach", "fused", "maximize", "capturable", "differentiable"} & params.keys()
    if not asked_for:
        # torch's class, which may be chosen below, has another default decay.
        params.setdefault("weight_decay", 0.0)
    if asked_for or any(params[key] for key in torch_only):
        if "bias_correction" in params:
            raise OptimizerError(
                "optimizer.params.bias_correction: false is not in torch's Adam; leave out torch_adam and the keys "
                f"that only torch's Adam has (here: {', '.join(sorted(torch_only)) or 'none'})"
            )
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), params
    for key in torch_only:
        del params[key]
    return FusedAdam, {**params, "adam_w_mode": decoupled}


NAMED: dict[str, type[torch.optim.Optimizer]] = {
    "adam": FusedAdam,
    "adamw": FusedAdam,
    "adagrad": torch.optim.Adagrad,
    "lion": FusedLion,
    "lamb": FusedLamb,
    "muon": Muon,
    "sgd": torch.optim.SGD,
}
"""Classes by `optimizer.type`, in lower case."""


def _recipe(type_name: str, params: Params) -> Recipe:
    if "max_grad_norm" in params:
        raise OptimizerError(
            f"optimizer.params.max_grad_norm is {params['max_grad_norm']}, but no optimizer clips here: remove it and "
            "set gradient_clipping at the top level of the configuration"
        )
    name = type_name.lower()
    if name in REFUSED_OPTIMIZERS:
        reason = REFUSED_OPTIMIZERS[name]
        raise NotAvailableError(
            f"optimizer.type {type_name!r} is refused for good: {reason}; use one of {', '.join(NAMED)}"
        )
    if name in ("adam", "adamw"):
        return _adam(params, name)
    if name in NAMED:
        params.pop("fp32_optimizer_states", None)
        return NAMED[name], params
    classes = {
        name: cls
        for name in dir(torch.optim)
        if isinstance(cls := getattr(torch.optim, name), type)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    }
    if type_name not in classes:
        raise OptimizerError(
            f"optimizer.type {type_name!r} is unknown{nearest(type_name, [*NAMED, *classes])}; use one of "
            f"{', '.join(NAMED)} or a class of torch.optim"
        )
    return classes[type_name], params


_ON_HOST: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    FusedAdam: DeepSpeedCPUAdam,
    FusedLion: DeepSpeedCPULion,
    torch.optim.Adagrad: DeepSpeedCPUAdagrad,
}


def build_optimizer(
    type_name: str,
    params: dict[str, Any],
    groups: Sequence[dict[str, Any]] | Sequence[Tensor],
    *,
    on_host: bool = False,
) -> torch.optim.Optimizer:
    """Create the optimizer of `optimizer.type` and `optimizer.params`.

    Args:
        type_name: adam, adamw, adagrad, lamb, lion, muon or sgd in any case, or the exact name of a class of
            torch.optim (`optimizer.type`).
        params: arguments of the class, and `torch_adam`, `adam_w_mode` for Adam (`optimizer.params`).
        groups: tensors, or group dicts whose values override `params`; the optimizer uses the dicts themselves.
        on_host: whether the state is offloaded to host memory or disk, so that the CPU runs the update.

    Raises:
        OptimizerError: an unknown type or parameter, or a value that the class rejects.
        NotAvailableError: a type that this version does not have.
    """
    tensors: list[Tensor] = []
    for entry in groups:
        if isinstance(entry, dict):  # a list replaces a generator, which could be read only once
            inside = entry["params"]
            entry["params"] = [inside] if isinstance(inside, Tensor) else list(inside)
            tensors += [p[1] if isinstance(p, tuple) else p for p in entry["params"]]
        else:
            tensors.append(entry)
    cls, arguments = _recipe(type_name, dict(params))
    host = _ON_HOST.get(cls) if on_host else None
    if host is not None:  # fused class for state in host memory, if it accepts the arguments
        renamed = {"adamw_mode" if key == "adam_w_mode" else key: value for key, value in arguments.items()}
        if renamed.keys() <= inspect.signature(host).parameters.keys():
            states = params.get("fp32_optimizer_states", True)
            cls, arguments = host, {**renamed, "fp32_optimizer_states": states}
    if "betas" in arguments:
        arguments["betas"] = tuple(float(beta) for beta in arguments["betas"])
    chosen = arguments.get("foreach") or arguments.get("fused") is not None or arguments.get("differentiable")
    # Torch's fused SGD needs momentum for all parameters or none; one without a gradient so far has none.
    together = cls is torch.optim.SGD and arguments.get("momentum")
    if cls in FUSED_IN_TORCH and not chosen and not together:
        arguments["fused"] = all(t.device.type in FUSED_DEVICES and t.is_floating_point() for t in tensors)
    optimizer = construct("optimizer", cls, list(groups), arguments, OptimizerError)
    check_supported(optimizer)
    return optimizer


def build_configured(
    config: DeepSpeedConfig, groups: Sequence[dict[str, Any]] | Sequence[Tensor]
) -> torch.optim.Optimizer:
    """Create the optimizer of a configuration; `groups` and errors as in `build_optimizer`.

    Raises:
        OptimizerError: the configuration names no optimizer.
    """
    section = config.optimizer
    if section is None or not section.type:
        raise OptimizerError("the configuration names no optimizer")
    arguments = dict(section.params or {})
    if config.bf16.bf16_optimizer_states:
        arguments["fp32_optimizer_states"] = False
    on_host = config.zero.offload_optimizer.device != "none"
    return build_optimizer(section.type, arguments, groups, on_host=on_host)


def leave_embeddings_to_adam(model: nn.Module) -> None:
    """Set `use_muon` to False on parameters of embeddings and output heads, so that `Muon` updates them with AdamW.

    Parameters that have the attribute already keep its value.
    """
    heads = {id(getattr(model, "get_output_embeddings", lambda: None)())}
    for name, module in model.named_modules():
        table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if table or id(module) in heads or name.rpartition(".")[2] == "lm_head":
            for param in module.parameters(recurse=False):
                if not hasattr(param, "use_muon"):
                    param.use_muon = False  # type: ignore[attr-defined]


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer needs each parameter whole and in its original shape.

    False only for classes that are known to update element by element, but not for their subclasses.
    """
    return type(optimizer) not in ELEMENTWISE


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise for optimizer classes that cannot step on reduced gradients.

    Raises:
        OptimizerError: the optimizer is an LBFGS or a SparseAdam.
    """
    for cls, reason in UNSUPPORTED.items():
        if isinstance(optimizer, cls):
            raise OptimizerError(
                f"{type(optimizer).__name__} cannot be used: it {reason}. Use AdamW, SGD or another of torch.optim"
            )
