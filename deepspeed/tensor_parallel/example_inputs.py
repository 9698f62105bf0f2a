"""Makes a small example input for a model, and records its modules' inputs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.foundation.hf_forward import accepts, caches_at_all, without_cache
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.foundation.pytree import tensors_in
from deepspeed.tensor_parallel.channel_dependencies import ModuleInputs

TOKENS = 12


def inputs_of(model: nn.Module, example: Any = None, shape: tuple[int, int] = (1, TOKENS)) -> dict[str, Any]:
    """Arguments of the model's forward: the example, or made up from the config of a Transformers model.

    Args:
        model: to be called.
        example: a dict of arguments, or positional ones: a tensor or a tuple.
        shape: of tokens that are made up: rows, and their length.

    Raises:
        ArgumentError: nothing says what the model takes.
    """
    example = getattr(model, "example_input_array", None) if example is None else example
    if example is not None:
        names = list(inspect.signature(model.forward).parameters)
        given = example if isinstance(example, dict) else dict(zip(names, _tuple(example), strict=False))
        return {name: _here(value, model) for name, value in given.items()}
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ArgumentError(
            f"cutting a model follows one forward of it, and {type(model).__name__} does not say what it "
            f"takes: give it an attribute example_input_array (a tensor, or a tuple of forward's arguments)"
        )
    made = _made_up(model, config, *shape) | without_cache(model)
    return {name: _here(value, model) for name, value in made.items()}


def _made_up(model: nn.Module, config: Any, rows: int, tokens: int) -> dict[str, Any]:
    main = getattr(model, "main_input_name", "input_ids")
    generator = torch.Generator().manual_seed(1)
    if main == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary = min(int(getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 32), 1000)
        draw = lambda count: torch.randint(min(3, vocabulary - 1), vocabulary, (rows, count), generator=generator)  # noqa: E731
        given: dict[str, Any] = {"input_ids": draw(tokens)}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = draw(tokens - 2)
        return given
    if main == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {main: torch.randn(rows, getattr(config, "num_channels", 3), height, width, generator=generator)}
    raise ArgumentError(
        f"the input {main!r} of {type(model).__name__} cannot be made up: give the model an attribute "
        f"example_input_array, a dict of forward's arguments"
    )


def _tuple(example: Any) -> tuple[Any, ...]:
    return example if isinstance(example, tuple) else (example,)


def _here(value: Any, model: nn.Module) -> Any:
    """Where the model is, in its dtype."""
    param = next(model.parameters(), None)
    if not isinstance(value, torch.Tensor) or param is None:
        return value
    return value.to(param.device, param.dtype if value.is_floating_point() else value.dtype)


@contextlib.contextmanager
def quiet(model: nn.Module, caches: bool = False) -> Iterator[None]:
    """Evaluation mode, no gradients, and random states as they were; nothing is cached, or everything.

    A cache that a module was called with would be longer each time it is called so again. Wrappers such as PEFT's hide
    the argument `use_cache`, so the configs say it.
    """
    before = [module for module in model.modules() if module.training]
    configs = _configs(model)
    said = [config.use_cache for config in configs]
    model.eval()
    try:
        for config in configs:
            config.use_cache = caches
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for config, value in zip(configs, said, strict=True):
            config.use_cache = value
        for module in before:
            module.training = True


def _configs(model: nn.Module) -> list[Any]:
    """Those that say whether to cache."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_dict") and isinstance(getattr(config, "use_cache", None), bool):
            found[id(config)] = config
    return list(found.values())


PADDED = 3  # tokens at the end of the masked input


def masked(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The small input with padding at its end; None where a model takes no mask, or is given one already.

    Attention takes another way then: what it reads of itself, such as how often heads are repeated, shows only there.
    """
    ids = inputs.get("input_ids")
    if (
        not accepts(model, "attention_mask")
        or "attention_mask" in inputs
        or not isinstance(ids, torch.Tensor)
        or ids.dim() != 2
    ):
        return None
    mask = torch.ones_like(ids)
    mask[:, -PADDED:] = 0
    return {**inputs, "attention_mask": mask}


def all_calls(
    model: nn.Module, names: Iterable[str], inputs: dict[str, Any]
) -> tuple[dict[str, list[ModuleInputs]], Any, str]:
    """What modules are called with, plain and beside padding where they are given something else there.

    Returns:
        Calls by name, what the model returns, and what it raised beside padding.
    """
    names = list(names)
    plain, output = calls_of(model, names, inputs)
    found, padded = {name: [call] for name, call in plain.items()}, masked(model, inputs)
    if padded is None:
        return found, output, ""
    try:
        others = calls_of(model, names, padded)[0]
    except Exception as error:  # a model's forward may raise what it likes
        why = describe_error(error)
        log_rank0(f"attention beside padding is not looked at: {type(model).__name__} ended in {why}")
        return found, output, why
    for name, call in others.items():
        plainly = found.setdefault(name, [])
        if not plainly or (call.given(), call.told()) != (plainly[0].given(), plainly[0].told()):
            plainly.append(call)
    return found, output, ""


def calls_of(model: nn.Module, names: Iterable[str], inputs: dict[str, Any]) -> tuple[dict[str, ModuleInputs], Any]:
    """What modules are called with first in a forward, in their order, and what the model returns.

    Args:
        model: to be called.
        names: of the modules.
        inputs: of the model.
    """
    found: dict[str, ModuleInputs] = {}

    def note(name: str, call: ModuleInputs) -> None:
        if name not in found:
            found[name] = call.apart()

    with quiet(model):
        return found, _noted(model, names, inputs, note)


def _noted(
    model: nn.Module, names: Iterable[str], inputs: dict[str, Any], note: Callable[[str, ModuleInputs], None]
) -> Any:
    """What the model returns; `note` is told of each call of the modules."""
    modules = dict(model.named_modules())

    def noting(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: note(name, ModuleInputs.of(module, args, kwargs))

    handles = [modules[name].register_forward_pre_hook(noting(name), with_kwargs=True) for name in dict.fromkeys(names)]
    try:
        return model(**inputs)
    finally:
        for handle in handles:
            handle.remove()


def handed_states(model: nn.Module, calls: dict[str, ModuleInputs], inputs: dict[str, Any]) -> set[str]:
    """The modules that a model hands states of its own when it generates, as recurrent ones do: tensors in a list, of
    sizes that no module knows. What one module of a class is handed, all may be.

    Args:
        model: to be called once.
        calls: of its modules, in their order, without a cache.
        inputs: of the model.
    """
    caching = caches_at_all(model, inputs)
    if not calls or not (caching != inputs or _configs(model)):
        return set()
    modules = dict(model.named_modules())
    kinds: set[type] = set()

    def note(name: str, call: ModuleInputs) -> None:
        if _has_states(call, calls[name]):
            kinds.add(type(modules[name]))

    # A model may do without a cache, and raise what it likes.
    with quiet(model, caches=True), contextlib.suppress(Exception):
        _noted(model, calls, caching, note)
    return {name for name in calls if type(modules[name]) in kinds}


def _has_states(call: ModuleInputs, without: ModuleInputs) -> bool:
    """Whether a list of tensors is among the arguments that is not there without a cache."""
    there = {key for key, value in without.arguments.items() if value is not None}
    return any(
        type(value) in (list, tuple) and key not in there and next(iter(tensors_in(value)), None) is not None
        for key, value in call.arguments.items()
    )
