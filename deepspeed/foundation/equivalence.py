"""Comparison of models on small inputs: example inputs, evaluation mode, tolerances."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.foundation.hf_forward import without_cache
from deepspeed.foundation.transformers_model import caching_configs, vocabulary_size

TOKENS = 12  # of a sequence that is made up
_LARGEST_TOKEN = 1000
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
_COARSEST = 6e-2


def tolerance(dtype: torch.dtype, factor: float = 1.0) -> float:
    """Return the tolerance, relative to the largest value, between two equivalent computations in a dtype.

    Args:
        dtype: the least precise dtype of the computation.
        factor: more than 1 for sums over more operations, less if the operations are equal.
    """
    return factor * _TOLERANCES.get(dtype, _COARSEST)


def largest_value(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of a tensor, in one pass; NaN if it contains NaN, 0 if it is empty."""
    if not tensor.numel():
        return 0.0
    low, high = map(float, tensor.aminmax())
    return high if math.isnan(high) else max(-low, high)


def relative_difference(
    actual: torch.Tensor, expected: torch.Tensor, scale: float | None = None, floor: float = 1e-30
) -> float:
    """Return the largest difference relative to the largest expected value; inf for other shapes or non-finite values.

    Args:
        actual: tensor of any floating-point dtype and device; compared in fp32.
        expected: tensor of any floating-point dtype and device.
        scale: divisor; None: the largest absolute expected value.
        floor: minimum of the divisor.
    """
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = actual.detach().float(), expected.detach().float()
    gap = largest_value(actual - expected.to(actual.device))
    relative = gap / max(largest_value(expected) if scale is None else scale, floor)
    return math.inf if math.isnan(relative) else relative


@contextlib.contextmanager
def evaluating(model: nn.Module, use_cache: bool | None = None) -> Generator[None]:
    """Context in evaluation mode without gradients; it restores all modes and the CPU's random state.

    Args:
        model: the model.
        use_cache: value of `use_cache` in the model's configs inside the context (wrappers such as PEFT's hide the
            argument of that name); None: unchanged.
    """
    training = [module for module in model.modules() if module.training]
    configs = [] if use_cache is None else caching_configs(model)
    before = [config.use_cache for config in configs]
    model.eval()
    try:
        for config in configs:
            config.use_cache = use_cache
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            yield
    finally:
        for config, caches in zip(configs, before, strict=True):
            config.use_cache = caches
        for module in training:
            module.training = True


def example_inputs(model: nn.Module, example: Any = None, shape: tuple[int, int] = (1, TOKENS)) -> dict[str, Any]:
    """Return arguments for a model's forward on its device and in its dtype: an example, or random inputs.

    Args:
        model: the model; its attribute `example_input_array`, if present, is the default example.
        example: a dict of arguments, or positional arguments: a tensor or a tuple; None: the default.
        shape: (rows, tokens) of random inputs, for a model with a config of Transformers and without example.

    Returns:
        The arguments by name; floating-point tensors have the dtype of the model's first parameter.

    Raises:
        ArgumentError: there is no example, and random inputs cannot be generated.
    """
    example = getattr(model, "example_input_array", None) if example is None else example
    config: Any = getattr(model, "config", None)
    if isinstance(example, dict):
        inputs = cast("dict[str, Any]", example)
    elif example is not None:
        values = cast("tuple[Any, ...]", example if isinstance(example, tuple) else (example,))
        inputs = dict(zip(inspect.signature(model.forward).parameters, values, strict=False))
    elif hasattr(config, "to_dict"):
        inputs = made_up_inputs(model, config, *shape)
    else:
        raise ArgumentError(
            f"{type(model).__name__} does not say what its forward takes, and one forward of it is needed: give it an "
            f"attribute example_input_array (a tensor, or a tuple of forward's arguments)"
        )
    param = next(model.parameters(), None)
    if param is None:
        return inputs
    return {
        name: entry.to(param.device, param.dtype if entry.is_floating_point() else entry.dtype)
        if isinstance(entry, torch.Tensor)
        else entry
        for name, entry in inputs.items()
    }


def made_up_inputs(model: nn.Module, config: Any, rows: int, tokens: int) -> dict[str, Any]:
    """Create random inputs on the CPU for a Transformers model: tokens or images, and arguments that disable the cache.

    Args:
        model: the model.
        config: config of the model.
        rows: batch size.
        tokens: sequence length.

    Raises:
        ArgumentError: the model takes neither tokens nor images.
    """
    main, inputs = getattr(model, "main_input_name", "input_ids"), dict[str, Any]()
    if main == "input_ids":
        inputs["input_ids"] = example_tokens(config, rows, tokens, generator := torch.Generator().manual_seed(1))
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = example_tokens(config, rows, tokens - 2, generator)
    elif main == "pixel_values":
        size = getattr(config, "image_size", 32)
        sides = cast("list[int]", [*size]) if isinstance(size, (list, tuple)) else [size, size]
        shape = (rows, getattr(config, "num_channels", 3), *sides)
        inputs[main] = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    else:
        raise ArgumentError(
            f"the input {main!r} of {type(model).__name__} cannot be made up: give the model an attribute "
            f"example_input_array, a dict of forward's arguments"
        )
    return inputs | without_cache(model)


def example_tokens(config: Any, rows: int, tokens: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw random tokens [rows, tokens] from the first 1,000 of a vocabulary, without the first three (special) tokens.

    Args:
        config: config of a Transformers model; without a vocabulary size, tokens are below 32.
        rows: number of sequences.
        tokens: sequence length.
        generator: random generator; None: a new one with seed 1.
    """
    size = min(int(vocabulary_size(config) or getattr(config, "vocab_size", None) or 32), _LARGEST_TOKEN)
    generator = torch.Generator().manual_seed(1) if generator is None else generator
    return torch.randint(min(3, size - 1), size, (rows, tokens), generator=generator)
