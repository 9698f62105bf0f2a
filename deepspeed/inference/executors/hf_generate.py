"""Fallback for models that no executor supports: each request runs the model's own `generate` in a thread.

A thread waits before each token until `step` is called, so only one runs at a time, and options, outputs and
cancellation work as for other requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.inference.executors.gathered import ModuleState
from deepspeed.inference.executors.select import device_of

# Options of a model's generation config that are disabled: the request alone determines sampling and stopping,
# as for batched models.
_TURNED_OFF = (
    "guidance_scale", "sequence_bias", "encoder_repetition_penalty", "repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "max_time", "stop_strings", "watermarking_config", "prompt_lookup_num_tokens", "num_return_sequences",
)  # fmt: skip


class _Cancelled(BaseException):
    """Exception that ends `generate` in the thread of a finished or cancelled request."""


class Thread:
    """One request that runs `model.generate` in a thread, token by token.

    Args:
        model: model with `generate`.
        tokens: prompt.
        new: maximum number of new tokens.
        choose: function of logits [vocabulary] that returns the next token, or None at the end of the request.
    """

    def __init__(
        self, model: nn.Module, tokens: Sequence[int], new: int, choose: Callable[[torch.Tensor], Any]
    ) -> None:
        self._model, self._tokens, self._new, self._choose = model, list(tokens), new, choose
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stop = False
        self._module_state = ModuleState(model)
        self.done = False

    def step(self) -> None:
        """Let `generate` compute one token, which `choose` selects. Exceptions of `generate` are re-raised here.

        Raises:
            UsageError: `generate` has ended before the request.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="deepspeed generate", daemon=True)
            self._thread.start()
        with self._module_state.turn():
            self._turn.release()
            self._back.acquire()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End the thread and wait for it, so that its memory is free on return."""
        self._stop = True
        if self._thread is not None and not self.done:
            self._turn.release()
            self._thread.join()
        self.done = True

    def let_go(self) -> None:
        """End the thread without waiting for it; safe in a finalizer, which may run in any thread."""
        self._stop = True
        self._turn.release()

    def _run(self) -> None:
        try:
            self._turn.acquire()
            if not self._stop:
                self._generate()
                self._error = UsageError(
                    f"{type(self._model).__name__}.generate ended by itself before it had the {self._new} tokens of "
                    "the request: look at its generation_config"
                )
        except _Cancelled:
            pass
        except BaseException as error:  # re-raised in step
            self._error = error
        self.done = True
        self._back.release()

    def _generate(self) -> None:
        from transformers import LogitsProcessorList

        ids = torch.tensor([self._tokens], device=device_of(self._model))
        options: dict[str, Any] = {"max_new_tokens": self._new, "do_sample": False, "num_beams": 1}
        own = getattr(self._model, "generation_config", None)
        options |= {name: None for name in _TURNED_OFF if getattr(own, name, None) is not None}
        if "num_return_sequences" in options:
            options["num_return_sequences"] = 1
        if getattr(self._model.config, "is_encoder_decoder", False):
            options["max_length"] = None
        method: Any = self._model.generate
        if isinstance(vars(type(method)).get("own"), property):  # an engine's, which waits for this thread's generator
            method = method.own
        method(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList([self._process]),  # type: ignore[list-item]
            eos_token_id=10**9,  # no end token: the request's own rules end it
            pad_token_id=0,
            **options,
        )

    def _process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process logits inside `generate`: choose a token, wait for the next step, return scores that force it."""
        token = self._choose(scores[0])
        if token is None:
            raise _Cancelled
        self._back.release()
        self._turn.acquire()
        if self._stop:
            raise _Cancelled
        forced = torch.full_like(scores, -torch.inf)
        forced[0, token] = 0
        return forced
