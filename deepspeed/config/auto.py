"""What "auto" becomes: one table of rules over the model, the loader and the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed.config.base_model import is_number
from deepspeed.config.errors import wrong
from deepspeed.config.parse import AUTO, Reading
from deepspeed.config.sections.optimizer import DEFAULT_LR

_USUAL_LR = 1e-3


@dataclass(frozen=True)
class Facts:
    """What "auto" may be resolved from; None is unknown.

    Attributes:
        hidden_size: width of the model.
        loader_batch_size: samples per micro-batch of the loader given to `initialize`.
        num_train_steps: optimizer steps of the whole run.
        device: "cpu" or "cuda".
        bf16_fast: whether the device computes bf16 faster than fp32.
        learning_rate: of the client's optimizer.
    """

    hidden_size: int | None = None
    loader_batch_size: int | None = None
    num_train_steps: int | None = None
    device: str | None = None
    bf16_fast: bool | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class AutoRule:
    """One row: how the value is found, in code and in words; `needs` is what to do when it cannot be found.

    With an empty `needs`, a value that cannot be found is the default.
    """

    find: Callable[[Reading, Facts], Any]
    becomes: str
    needs: str = ""


def _times_hidden(factor: Callable[[int], int]) -> Callable[[Reading, Facts], int | None]:
    return lambda _, facts: None if not facts.hidden_size else factor(facts.hidden_size)


def _learning_rate(reading: Reading, facts: Facts) -> float:
    if facts.learning_rate is not None:
        return facts.learning_rate
    rate = reading.find("optimizer.params.lr")
    if is_number(rate):
        return rate
    return DEFAULT_LR.get(str(reading.find("optimizer.type")).lower(), _USUAL_LR)


def _enabled(reading: Reading, *sections: str) -> bool:
    return any(reading.find(f"{section}.enabled") is True for section in sections)


def _bf16(reading: Reading, facts: Facts) -> bool | None:
    return False if _enabled(reading, "fp16", "torch_autocast") else facts.bf16_fast


def _fp16(reading: Reading, facts: Facts) -> bool | None:
    if _enabled(reading, "bf16", "torch_autocast"):
        return False
    return None if facts.bf16_fast is None else facts.device == "cuda" and not facts.bf16_fast


def _constant(value: float) -> Callable[[Reading, Facts], float]:
    return lambda reading, facts: value


def _warmup_steps(_: Reading, facts: Facts) -> int | None:
    return None if facts.num_train_steps is None else min(1000, max(2, facts.num_train_steps // 10))


_MACHINE = "give true or false, or leave it to deepspeed.initialize, which knows the machine"

# In this order: later rules may read what earlier ones found.
RULES: dict[str, AutoRule] = {
    "bf16.enabled": AutoRule(
        _bf16,
        "true where the device computes bf16 faster than fp32, unless another precision is enabled",
        _MACHINE,
    ),
    "fp16.enabled": AutoRule(
        _fp16, "true on a CUDA device without fast bf16, unless another precision is enabled", _MACHINE
    ),
    "optimizer.params.lr": AutoRule(
        _learning_rate,
        "the learning rate of the client's optimizer, else 1e-3 (Adagrad 1e-2, Lion 1e-4)",
    ),
    "scheduler.params.warmup_min_lr": AutoRule(_constant(0.0), "0"),
    "scheduler.params.warmup_max_lr": AutoRule(_learning_rate, "the optimizer's learning rate"),
    "scheduler.params.warmup_num_steps": AutoRule(_warmup_steps, "a tenth of the run, at most 1000; 1000 when unknown"),
    "scheduler.params.total_num_steps": AutoRule(
        lambda _, facts: facts.num_train_steps,
        "the optimizer steps of the run",
        "give the number; the length of the run is not known here",
    ),
    "gradient_clipping": AutoRule(_constant(1.0), "1.0"),
    "zero_optimization.reduce_bucket_size": AutoRule(
        _times_hidden(lambda h: h * h), "hidden_size squared, the default when the model does not tell it"
    ),
    "zero_optimization.prefetch_bucket_size": AutoRule(
        _times_hidden(lambda h: int(0.9 * h * h)), "0.9 x hidden_size squared, or the default"
    ),
    "zero_optimization.param_persistence_threshold": AutoRule(
        _times_hidden(lambda h: 10 * h), "10 x hidden_size, or the default"
    ),
    "zero_optimization.gather_16bit_weights_on_model_save": AutoRule(
        lambda reading, _: reading.find("zero_optimization.stage") == 3, "true at stage 3"
    ),
}
BATCH = {
    "train_batch_size": "derived from the other two and the world",
    "train_micro_batch_size_per_gpu": "derived from the other two, else the batch size of the loader",
    "gradient_accumulation_steps": "derived from the other two, else 1",
}


def resolve_autos(reading: Reading, facts: Facts, *, lenient: bool) -> None:
    """Put a value wherever "auto" was given, except in the batch triple.

    Args:
        reading: what was read; values, origins and problems are added to it.
        facts: what is known of model, loader and machine.
        lenient: a value that cannot be found becomes the default instead of a problem.
    """
    for path in sorted(reading.autos, key=lambda path: list(RULES).index(path) if path in RULES else -1):
        rule = RULES.get(path)
        value = rule.find(reading, facts) if rule else None
        if value is not None:
            reading.put(path, value, "auto: " + (rule.becomes if rule else ""))
        elif rule is not None and rule.needs and not lenient:
            reading.problems.append(wrong(reading.name(path), AUTO, f"cannot be resolved: {rule.needs}"))
        elif path not in BATCH:
            reading.origins[path] = "auto: the default"
