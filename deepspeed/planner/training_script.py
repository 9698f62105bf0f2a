"""A user's training script or model, in the form that the planner runs."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.load import load_raw
from deepspeed.config.sections.parallel import Autotuning
from deepspeed.engine.initialize import add_config_arguments, initialize
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.foundation.pytree import map_tensors
from deepspeed.planner.train_program import Program
from deepspeed.planner.trials import Command

_FLAGS = ("--deepspeed_config", "--deepspeed", "--deepscale_config")
_MICRO, _STEPS, _TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
_MAPPED = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Script:
    """Arguments of `deepspeed --autotuning`.

    Args:
        options: the launcher's options, without --autotuning.
        name: name of the script.
        arguments: arguments of the script.
        ranks: number of ranks that the options start.
    """

    options: Sequence[str]
    name: str
    arguments: Sequence[str]
    ranks: int

    @property
    def _place(self) -> int:
        """Return the index of the JSON's path in the arguments; raises ArgumentError if there is none."""
        for position, word in enumerate(self.arguments):
            flag, _, joined = word.partition("=")
            if flag in _FLAGS and joined.endswith(".json"):
                return position
            if word in _FLAGS and position + 1 < len(self.arguments) and self.arguments[position + 1].endswith(".json"):
                return position + 1
        raise ArgumentError(
            "--autotuning needs the JSON in the script's arguments: --deepspeed_config, or --deepspeed, and a FILE.json"
        )

    @property
    def json(self) -> Path:
        """Return the path of the user's JSON.

        Raises:
            ArgumentError: the arguments name no JSON.
        """
        return Path(self.arguments[self._place].rpartition("=")[2])

    def base(self) -> tuple[dict[str, Any], Autotuning]:
        """Return the user's JSON and its `autotuning` block.

        Raises:
            ArgumentError: the arguments name no JSON, or the block is not enabled.
            DeepSpeedConfigError: the file does not exist, or the block is invalid.
        """
        config = load_raw(str(self.json))
        block = DeepSpeedConfig.for_init({"autotuning": config.get("autotuning") or {}}).top.autotuning
        if not block.enabled:
            raise ArgumentError(f'--autotuning needs "autotuning": {{"enabled": true}} in {self.json}')
        return config, block

    def with_json(self, path: str, config: Mapping[str, Any], flags: Mapping[str, str]) -> list[str]:
        """Return the script's arguments for another JSON.

        Args:
            path: path of the other JSON.
            config: its content.
            flags: flags of the script that are set to values of `config`, by key.

        Raises:
            ArgumentError: the arguments name no JSON.
        """
        words, position = list(self.arguments), self._place
        before = words[position].rpartition("=")
        words[position] = f"{before[0]}{before[1]}{path}"
        for key, flag in flags.items():
            value = str(self._value(config, key))
            places = [where for where, word in enumerate(words) if word.partition("=")[0] == flag]
            if places and "=" in words[places[-1]]:
                words[places[-1]] = f"{flag}={value}"
            elif places:
                words[places[-1] + 1 : places[-1] + 2] = [value]
            else:
                words += [flag, value]
        return words

    def command(self, config: Mapping[str, Any], flags: Mapping[str, str], path: str = "{config}") -> Command:
        """Return the command that starts the script with another JSON; each trial's path replaces `{config}` in `path`.

        `config`, `flags` and errors as in `with_json`.
        """
        return Command(self.options, [self.name, *self.with_json(path, config, flags)])

    def train_batch(self, base: Mapping[str, Any], flags: Mapping[str, str]) -> tuple[int, int]:
        """Return the global batch and the micro-batch (0: unknown), from the JSON `base` or the script's `flags`.

        Raises:
            ArgumentError: neither has the global batch or the micro-batch.
        """
        train, micro, steps = (self._number(base, flags, key) for key in (_TRAIN, _MICRO, _STEPS))
        if not train and micro:
            train = micro * (steps or 1) * self.ranks
        if not train:
            raise ArgumentError(
                f"the global batch is not known: give {_TRAIN}, or {_MICRO}, as a number in {self.json}, or name the "
                f"script's own flags in autotuning.arg_mappings"
            )
        if not micro and steps:
            micro = train // (steps * self.ranks)
        return train, micro

    @staticmethod
    def _value(config: Mapping[str, Any], key: str) -> Any:
        """Return the value of a key such as "zero_optimization.stage", or None."""
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _number(self, base: Mapping[str, Any], flags: Mapping[str, str], key: str) -> int:
        value = base.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, (int, float)):
            return int(value)
        flag, words = flags.get(key), list(self.arguments)
        for position, word in enumerate(words):
            name, _, joined = word.partition("=")
            text = joined or (words[position + 1] if position + 1 < len(words) else "")
            if flag and name == flag and _MAPPED.fullmatch(text):
                return int(text)
        return 0


Source = tuple[Callable[[], nn.Module], Callable[[int], Any]]


def model_named(name: str, length: int) -> Source:
    """Load a model; returns a function that creates it, and one that creates a micro-batch of a given size.

    Args:
        name: `file.py:factory` or `package.module:factory`, a callable that returns (module, callable that creates a
            micro-batch of a given size); or a folder with Transformers' config.json; or the name of one of
            Transformers' model classes, which is created in its default size.
        length: tokens of a sequence, for Transformers models.

    Raises:
        ArgumentError: the name does not exist, the factory returns something else, or the model takes no tokens.
        NotAvailableError: Transformers is required and not installed.
    """
    return _from_script(name) if ":" in name else _from_transformers(name, length)


def _from_script(name: str) -> Source:
    where, _, attribute = name.rpartition(":")
    path = Path(where)
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise ArgumentError(f"{where}: no such file")
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent.resolve()))
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ImportError as error:
            raise ArgumentError(f"{where} cannot be imported: {error}") from error
    if not callable(getattr(module, attribute, None)):
        raise ArgumentError(f"{where} has no callable {attribute!r}")
    factory: Callable[[], Any] = getattr(module, attribute)
    source = factory()
    pair: Any = source if isinstance(source, tuple) and len(source) == 2 else (None, None)
    if isinstance(pair[0], nn.Module) and callable(pair[1]):
        return lambda: factory()[0], pair[1]
    if isinstance(source, nn.Module):
        raise ArgumentError(
            f"{name} returns a module alone: return (module, batch) with batch(n) that makes a micro-batch of n samples"
        )
    raise ArgumentError(f"{name} returned a {type(source).__name__}; it is to return (module, batch)")


def _from_transformers(name: str, length: int) -> Source:
    if find_spec("transformers") is None:
        raise NotAvailableError("models by name come from Transformers: pip install 'deepspeed[clients]'")
    transformers: Any = importlib.import_module("transformers")
    if Path(name, "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(name)
        classes = getattr(config, "architectures", None) or []
        named = getattr(transformers, classes[0], None) if classes else None
        cls: Any = named or transformers.AutoModelForCausalLM
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


_FOREVER = 1 << 30  # the engine ends the process after the last measured update


def main(args: Sequence[str] | None = None) -> None:
    """Train the model of the command line `args` (None: that of the process) until the trial ends the process."""
    parser = add_config_arguments(
        argparse.ArgumentParser(prog="deepspeed.planner.training_script", description=__doc__)
    )
    parser.add_argument("model", help="as `ds_plan` takes it")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence, for models of Transformers")
    parser.add_argument("--local_rank", type=int, default=0, help="the launcher's")
    options = parser.parse_args(args)
    comm.init_distributed()
    make, batch = model_named(options.model, options.length)
    torch.manual_seed(0)
    model = make()
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = initialize(model=model, model_parameters=trained, config=options.deepspeed_config)
    del model, trained
    device = torch.device(get_accelerator().current_device_name())
    moved = map_tensors(lambda tensor: tensor.to(device), batch(engine.train_micro_batch_size_per_gpu()))
    Program(engine, options.deepspeed_config, moved, updates=_FOREVER).run(engine, lambda: None)


if __name__ == "__main__":
    main()
