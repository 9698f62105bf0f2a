"""Calls of Transformers' `generate` that are answered by a `Generator`, in native passes where a model has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.log import warn_once
from deepspeed.foundation.transformers_model import vocabulary_size
from deepspeed.inference.request import length_limit, new_tokens
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.moe.expert_parallel import is_divided

# Arguments of a call or generation config that are followed, and those without effect on the tokens of such calls.
_READ = {
    "inputs", "input_ids", "attention_mask", "generation_config", "max_new_tokens", "max_length", "min_new_tokens",
    "eos_token_id", "pad_token_id", "do_sample", "num_beams", "repetition_penalty",
}  # fmt: skip
_DRAWN = {"temperature", "top_k", "top_p", "min_p", "num_return_sequences", "return_dict_in_generate"}
_IDLE = {
    "bos_token_id", "use_cache", "temperature", "top_k", "top_p", "transformers_version", "_from_model_config",
}  # fmt: skip
_IDLE_IN_TRAINING = {"disable_compile", "cache_implementation", "synced_gpus", "min_p", "token_type_ids"}
_NOTHING: tuple[Any, ...] = (None, False)  # values that request nothing
_NEUTRAL = {
    "length_penalty": 1.0, "num_return_sequences": 1, "num_beam_groups": 1,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "diversity_penalty": 0.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "renormalize_logits": False, "top_h": None,
}  # fmt: skip


@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate` in the terms of a `Generator`.

    Args:
        ids: prompts, padded on the left, int64 [batch, longest].
        prompts: their tokens without padding.
        sampling: options of all of them.
        samples: number of answers to each prompt.
        pad: token after the end of an answer.
        as_output: whether an output object is returned in place of tokens.
    """

    ids: torch.Tensor
    prompts: list[list[int]]
    sampling: SamplingParams
    samples: int
    pad: int
    as_output: bool

    def result(self, answers: list[list[int]]) -> Any:
        """Return what `generate` returns for these answers, those of one prompt one after the other."""
        longest = max(map(len, answers))
        rows = [tokens + [self.pad] * (longest - len(tokens)) for tokens in answers]
        ids = self.ids.repeat_interleave(self.samples, 0)
        tokens = torch.cat([ids, torch.tensor(rows, dtype=ids.dtype).to(ids.device)], dim=1)
        if not self.as_output:
            return tokens
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=tokens)  # type: ignore[arg-type]


class CallReader:
    """Reader of the arguments of `generate`.

    Args:
        model: the model whose `generate` is called.
        draws: whether calls that draw tokens are read too. They get other random numbers than Transformers would draw.
    """

    def __init__(self, model: Any, draws: bool = False) -> None:
        self._model, self._draws = model, draws

    def read(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> GenerateCall | str:
        """Return the call, or the reason why it is left to the model's own `generate`."""
        reason = self._why_not(inputs, kwargs)
        if reason is not None:
            return reason
        ids = self._ids(inputs, kwargs)
        mask = kwargs.get("attention_mask")
        begins = [0] * len(ids) if mask is None else (mask.shape[1] - mask.long().sum(1)).tolist()
        prompts = [row[begin:] for row, begin in zip(ids.tolist(), begins, strict=True)]
        ends, pad = (self._argument(name, kwargs) for name in ("eos_token_id", "pad_token_id"))
        ends = ends.tolist() if isinstance(ends, torch.Tensor) else ends
        ends = tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (ends,)
        size = vocabulary_size(self._model, decoder=True)
        # Configs of small models may name end tokens of the original's vocabulary.
        ends = tuple(int(end) for end in ends if end >= 0 and (size is None or end < size))
        least = self._argument("min_new_tokens", kwargs) or 0
        new = new_tokens(ids.shape[1], kwargs, self._model.generation_config, length_limit(self._model))
        filler = pad if pad is not None else ends[0] if ends else 0
        sampling = SamplingParams(
            max_new_tokens=new, min_new_tokens=min(least, new), ignore_eos=True, stop_token_ids=ends,
            repetition_penalty=self._penalty(kwargs), **self._drawing(kwargs),
        )  # fmt: skip
        samples = self._argument("num_return_sequences", kwargs) or 1
        as_output = bool(self._argument("return_dict_in_generate", kwargs))
        return GenerateCall(ids, prompts, sampling, samples, int(filler), as_output)

    def _penalty(self, kwargs: dict[str, Any]) -> Any:
        """Return the repetition penalty of the call; 1: none."""
        penalty = self._argument("repetition_penalty", kwargs)
        return 1.0 if penalty is None or penalty == 1 else penalty

    def _drawing(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not self._argument("do_sample", kwargs):
            return {}
        names = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
        chosen = {name: self._argument(name, kwargs) for name in names}
        off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # what None as an argument means
        options = {
            name: (off if name in kwargs else names)[name] if value is None else value for name, value in chosen.items()
        }
        return options

    def _argument(self, name: str, kwargs: dict[str, Any]) -> Any:
        """Return an argument of the call, else of its generation config, else of the model's."""
        if name in kwargs:
            return kwargs[name]
        config = kwargs.get("generation_config")
        value = getattr(config, name, None) if config is not None else None
        return getattr(self._model.generation_config, name, None) if value is None else value

    def _why_not(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        own: dict[str, Any] = self._model.generation_config.to_diff_dict()  # fills what a passed config leaves out
        passed = kwargs.get("generation_config")
        config = own | ({} if passed is None else {k: v for k, v in passed.to_diff_dict().items() if v is not None})
        if not self._draws and self._argument("do_sample", kwargs) not in _NOTHING:
            return "tokens are drawn, with torch's own random numbers"
        if self._argument("num_beams", kwargs) not in (None, 1):
            return "beams"
        if not self._argument("do_sample", kwargs) and self._argument("num_return_sequences", kwargs) not in (None, 1):
            return "several answers that are not drawn"
        options = {**config, **kwargs}
        known = _READ | _IDLE | (_DRAWN | _IDLE_IN_TRAINING if self._draws else set())
        others = sorted(
            name
            for name, value in options.items()
            if name not in known
            and not any(value is idle for idle in _NOTHING)
            and not (name in _NEUTRAL and value == _NEUTRAL[name])
        )
        if others or len(inputs) > 1:
            return f"{', '.join(others[:3]) or 'several arguments without names'}"
        return self._why_not_prompts(self._ids(inputs, kwargs), kwargs)

    def _why_not_prompts(self, ids: Any, kwargs: dict[str, Any]) -> str | None:
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.long or not ids.numel():
            return "the prompts are no matrix of tokens"
        mask = kwargs.get("attention_mask")
        if mask is None:
            pad = self._argument("pad_token_id", kwargs)
            padded = pad is not None and (ids == pad).any()
            return (
                "prompts hold the pad token, and there is no mask" if padded else self._why_not_penalty(kwargs, False)
            )
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
            return "the mask has another shape than the prompts"
        mask = mask.long()
        if not (bool((mask[:, -1] == 1).all()) and bool((mask.diff(dim=1) >= 0).all()) and int(mask.min()) >= 0):
            return "prompts are padded elsewhere than on the left"
        return self._why_not_penalty(kwargs, padded=not bool(mask.all()))

    def _why_not_penalty(self, kwargs: dict[str, Any], padded: bool) -> str | None:
        penalty = self._penalty(kwargs)
        if not isinstance(penalty, float) or not 0 < penalty < math.inf:
            return f"repetition_penalty is {penalty!r}"
        return "repetition_penalty, for which padding counts in Transformers" if padded and penalty != 1 else None

    @staticmethod
    def _ids(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the prompts among the arguments of `generate`."""
        return inputs[0] if inputs else kwargs.get("input_ids", kwargs.get("inputs"))


class NativeGenerate:
    """Greedy `generate` on the native executor, for the key `replace_with_kernel_inject`."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._model: Any = generator.model
        self._reader = CallReader(self._model)

    @classmethod
    def of(cls, model: nn.Module, lossless: bool) -> NativeGenerate | None:
        """Create the native form of a model; if it is unsupported, log the reason and return None.

        Args:
            lossless: pack bf16 matrices in 12 bits, as for the key `lossless_weights`.
        """
        try:
            from deepspeed.inference.executors.native import FusedExecutor
            from deepspeed.inference.generator import Generator
        except ImportError as error:  # Transformers is optional for plain modules
            warn_once(f"init_inference: replace_with_kernel_inject: nothing is replaced: {error}")
            return None
        why = "it has no generate"
        if is_divided(model):
            why = "its experts are divided among ranks"
        elif callable(getattr(model, "generate", None)):
            generator = Generator(model, prefix_cache=False, lossless_weights=lossless)
            executor = generator._executor
            if isinstance(executor, FusedExecutor):
                return cls(generator)
            why = getattr(executor, "unfused", "") or generator.why or "the native library is not there"
            generator.close()
        warn_once(f"init_inference: replace_with_kernel_inject: {type(model).__name__} keeps its own layers: {why}")
        return None

    def generate(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the tokens of `generate` for these arguments: prompts and answers, int64 [batch, prompt + new].

        If the native executor does not support the call, log the reason and return None.
        """
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self._model.modules())
        call = "a forward is hooked" if hooked else self._reader.read(inputs, kwargs)
        if isinstance(call, str):
            warn_once(f"generate goes through {type(self._model).__name__}'s own: {call}")
            return None
        return call.result(self._generator.generate(call.prompts, call.sampling))

    def close(self) -> None:
        self._generator.close()
