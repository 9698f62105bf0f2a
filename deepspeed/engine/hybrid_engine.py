"""`generate` of an engine and its module over the weights in training, by upstream's names (block `hybrid_engine`)."""

from __future__ import annotations

import time
import types
from typing import Any

from torch import nn

from deepspeed.engine.generation import Generation
from deepspeed.errors import UsageError
from deepspeed.foundation.log import log_once, log_rank0


class GenerateMethod:
    """`generate` of a module that an engine trains; a copy or pickle of the module has its class's own method.

    Args:
        module: the module.
        generation: generation of its engine.
    """

    def __init__(self, module: nn.Module, generation: Generation) -> None:
        self._module, self._generation = module, generation
        self.replaced = vars(module).get("generate")  # what an earlier part of the engine has put there

    @property
    def own(self) -> Any:
        """The method that calls go to which a generator cannot answer."""
        return _own_generate(self._module) if self.replaced is None else self.replaced

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._generation.generate(self.own, *inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_generate(memo.get(id(self._module), self._module))

    def __reduce__(self) -> Any:
        return _own_generate, (self._module,)


def _own_generate(module: Any) -> Any:
    return types.MethodType(type(module).generate, module)


class HybridMethods:
    """Methods of an engine with the block `hybrid_engine` enabled; see `DeepSpeedHybridEngine`."""

    _generation: Generation
    module: Any

    def _begin_hybrid(self) -> None:
        if not callable(getattr(type(self.module), "generate", None)):
            raise UsageError(f"hybrid_engine: {type(self.module).__name__} has no generate; leave the block out")
        self._generation.check_keys()
        vars(self.module)["generate"] = GenerateMethod(self.module, self._generation)
        self._evaluations, self._trained_since = 0, time.perf_counter()

    def _end_hybrid(self) -> None:
        method = vars(self.module).pop("generate", None)
        if isinstance(method, GenerateMethod) and method.replaced is not None:
            vars(self.module)["generate"] = method.replaced

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Generate tokens with the engine's weights; arguments and result as those of Transformers' `generate`.

        All ranks call this. Greedy and drawn calls are answered by a generator, whose random numbers are not those that
        Transformers would draw; other calls (such as beam search) go through the model's own `generate`, said once.

        Raises:
            LengthError: prompt and answer exceed the model's context or `max_out_tokens`.
        """
        return self.module.generate(*inputs, **kwargs)

    def note_evaluation(self) -> None:
        """Log where the time since the last call of `eval` went, from the second call on."""
        now = time.perf_counter()
        if self._evaluations:
            total, times = now - self._trained_since, self._generation.seconds
            other = max(total - times["generate"] - times["gather"], 0.0)
            rate = self._generation.sequences / total if total else 0.0
            log_rank0(
                f"|E2E latency={total:.2f}s |Gather latency={times['gather']:.2f}s "
                f"|Generate time={times['generate']:.2f}s |Training time and others={other:.2f}s "
                f"|CurSamplesPerSec={rate:.2f}"
            )
        self._evaluations += 1
        self._trained_since = now
        self._generation.seconds = {"generate": 0.0, "gather": 0.0}
        self._generation.sequences = 0

    def fuse_lora_weight(self) -> None:
        """Accepted without effect: LoRA's changes are added on the fly, and the weights keep every bit."""
        log_once("fuse_lora_weight has no effect: LoRA is added on the fly, so weights keep every bit")

    unfuse_lora_weight = unfuse_lora_weight_non_pinned = fuse_lora_weight
