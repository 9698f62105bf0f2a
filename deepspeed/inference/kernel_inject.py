"""`replace_with_kernel_inject`: greedy `generate` calls use the native executor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.foundation.log import warn_once
from deepspeed.inference.executors.native import FusedExecutor
from deepspeed.inference.generator import Generator
from deepspeed.inference.request import SamplingParams, new_tokens

# What a call or a generation config may hold: what is read here, and what decides nothing where tokens are not drawn.
_READ = {
    "inputs", "input_ids", "attention_mask", "generation_config", "max_new_tokens", "max_length", "min_new_tokens",
    "eos_token_id", "pad_token_id",
}  # fmt: skip
_IDLE = {"bos_token_id", "use_cache", "temperature", "top_k", "top_p", "transformers_version", "_from_model_config"}
_NOTHING: tuple[Any, ...] = (None, False)  # values that ask for nothing


class Injected:
    """Answers calls of a model's `generate` in native passes.

    Args:
        generator: of the model, in its native form.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._model: Any = generator.model

    @classmethod
    def of(cls, model: nn.Module, lossless: bool = False) -> Injected | None:
        """For a model that has a native form, which may pack its weights; else None, and a line with the reason."""
        why = "it has no generate"
        if callable(getattr(model, "generate", None)):
            generator = Generator(model, prefix_cache=False, lossless_weights=lossless)
            executor = generator._executor
            if isinstance(executor, FusedExecutor):
                return cls(generator)
            why = getattr(executor, "unfused", "") or generator.why or "the native library is not there"
            generator.close()
        warn_once(f"init_inference: replace_with_kernel_inject: {type(model).__name__} keeps its own layers: {why}")
        return None

    def generate(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """What `generate` returns for these arguments, int64 [batch, prompt + new]; None where it has to be asked
        itself, and then a line says why."""
        why = self._why_not_native(inputs, kwargs)
        if why is not None:
            warn_once(f"generate goes through {type(self._model).__name__}'s own: {why}")
            return None
        ids = _ids(inputs, kwargs)
        mask = kwargs.get("attention_mask")
        begins = [0] * len(ids) if mask is None else (mask.shape[1] - mask.long().sum(1)).tolist()
        prompts = [row[begin:] for row, begin in zip(ids.tolist(), begins, strict=True)]
        own = self._model.generation_config
        ends, pad = (self._argument(name, kwargs) for name in ("eos_token_id", "pad_token_id"))
        ends = tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (ends,)
        least = self._argument("min_new_tokens", kwargs) or 0
        sampling = SamplingParams(
            max_new_tokens=new_tokens(ids.shape[1], kwargs, own), min_new_tokens=least, ignore_eos=True,
            stop_token_ids=ends,
        )  # fmt: skip
        found = self._generator.generate(prompts, sampling)
        longest = max(map(len, found))
        filler = pad if pad is not None else ends[0] if ends else 0
        rows = [tokens + [filler] * (longest - len(tokens)) for tokens in found]
        return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype)], dim=1)

    def close(self) -> None:
        """Let the cache go."""
        self._generator.close()

    def _argument(self, name: str, kwargs: dict[str, Any]) -> Any:
        config = kwargs.get("generation_config") or self._model.generation_config
        return kwargs[name] if name in kwargs else getattr(config, name, None)

    def _why_not_native(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why the native form does not answer a call."""
        config = kwargs.get("generation_config") or self._model.generation_config
        if kwargs.get("do_sample", getattr(config, "do_sample", False)) not in _NOTHING:
            return "tokens are drawn, with torch's own random numbers"
        if kwargs.get("num_beams", getattr(config, "num_beams", 1)) not in (None, 1):
            return "beams"
        told = {**config.to_diff_dict(), **kwargs}
        known = _READ | _IDLE | {"do_sample", "num_beams"}
        others = sorted(
            name for name, value in told.items() if name not in known and not any(value is idle for idle in _NOTHING)
        )
        if others or len(inputs) > 1:
            return f"{', '.join(others[:3]) or 'several arguments without names'}"
        if "eos_token_id" in kwargs and kwargs["eos_token_id"] is None:
            return "eos_token_id is None"
        if any(module._forward_hooks or module._forward_pre_hooks for module in self._model.modules()):
            return "a forward is hooked"
        ids = _ids(inputs, kwargs)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.long or not ids.numel():
            return "the prompts are no matrix of tokens"
        return self._padding(ids, kwargs.get("attention_mask"), kwargs)

    def _padding(self, ids: torch.Tensor, mask: Any, kwargs: dict[str, Any]) -> str | None:
        if mask is None:
            pad = self._argument("pad_token_id", kwargs)
            return (
                "prompts hold the pad token, and there is no mask" if pad is not None and (ids == pad).any() else None
            )
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
            return "the mask has another shape than the prompts"
        mask = mask.long()
        plain = bool((mask[:, -1] == 1).all()) and bool((mask.diff(dim=1) >= 0).all()) and int(mask.min()) >= 0
        return None if plain else "prompts are padded elsewhere than on the left"


def _ids(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The prompts of a call."""
    return inputs[0] if inputs else kwargs.get("input_ids", kwargs.get("inputs"))
