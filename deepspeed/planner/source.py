"""What a user names on the command line, as something that makes models and micro-batches."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from deepspeed.errors import ArgumentError, NotAvailableError

Source = tuple[Callable[[], nn.Module], Callable[[int], Any]]


def model_named(name: str, length: int) -> Source:
    """The model of a name.

    Args:
        name: `file.py:factory` or `package.module:factory`, a callable that returns a module, or (module, callable that
            makes a micro-batch of so many samples); or a folder with Transformers' config.json, or the name of one of
            its model classes, which is taken in its default size.
        length: tokens of a sequence, for models of Transformers.

    Raises:
        ArgumentError: there is no such thing, or it makes no module.
        NotAvailableError: Transformers is needed and not installed.
    """
    return _from_script(name) if ":" in name else _from_transformers(name, length)


def _first_of(factory: Any) -> Callable[[], nn.Module]:
    return lambda: factory()[0]


def _from_script(name: str) -> Source:
    where, _, attribute = name.rpartition(":")
    found = getattr(_module(where), attribute, None)
    if not callable(found):
        raise ArgumentError(f"{where} has no callable {attribute!r}")
    factory = cast("Callable[[], Any]", found)
    made = factory()
    pair: Any = made if isinstance(made, tuple) and len(made) == 2 else (None, None)
    if isinstance(pair[0], nn.Module) and callable(pair[1]):
        return lambda: factory()[0], pair[1]
    if isinstance(made, nn.Module):
        raise ArgumentError(
            f"{name} returns a module alone: return (module, batch) with batch(n) that makes a micro-batch of n samples"
        )
    raise ArgumentError(f"{name} returned a {type(made).__name__}; it is to return (module, batch)")


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ArgumentError(f"{where} cannot be imported: {error}") from error
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ArgumentError(f"{where}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _from_transformers(name: str, length: int) -> Source:
    if find_spec("transformers") is None:
        raise NotAvailableError("models by name come from Transformers: pip install 'deepspeed[clients]'")
    transformers: Any = importlib.import_module("transformers")
    if Path(name, "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(name)
        classes = getattr(config, "architectures", None) or []
        found = getattr(transformers, classes[0], None) if classes else None
        cls: Any = found or transformers.AutoModelForCausalLM
    else:
        cls = getattr(transformers, name, None)
        if cls is None or not hasattr(cls, "config_class"):
            raise ArgumentError(f"{name!r} is no folder with a config.json, and no model class of Transformers")
        config = cls.config_class()

    def make() -> nn.Module:
        return cls(config) if hasattr(cls, "config_class") else cls.from_config(config)

    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    if not vocabulary:
        raise ArgumentError(f"{name} takes no tokens: name a factory, file.py:factory, that returns (module, batch)")

    def batch(rows: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(rows * length).view(rows, length) % vocabulary
        return {"input_ids": tokens, "labels": tokens}

    return make, batch
