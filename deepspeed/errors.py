"""Public exceptions and warnings. Each is also a builtin exception, so `except ValueError` and the like catch it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class DeepSpeedError(Exception):
    """Base class of all errors that this package raises."""


class DeepSpeedConfigError(DeepSpeedError, ValueError, AssertionError):
    """The configuration has unknown, misplaced, conflicting or ill-typed keys. The message lists all of them."""


class BatchSizeError(DeepSpeedConfigError):
    """The batch sizes contradict each other: train_batch_size != micro batch * accumulation * data-parallel ranks."""


class NotAvailableError(DeepSpeedConfigError, NotImplementedError, ImportError):
    """A setting or name needs a feature that this version does not have."""


class ArgumentError(DeepSpeedError, ValueError, AssertionError, TypeError):
    """The arguments of a call contradict each other or have invalid values."""


class UsageError(DeepSpeedError, RuntimeError, AssertionError):
    """A call is not allowed in the current state."""


class OrderError(UsageError):
    """Ranks are about to start different collectives, which would hang or mix their values."""


class MeshError(DeepSpeedConfigError, ArgumentError):
    """The requested mesh contradicts itself or does not fit the number of started ranks."""


class OptimizerError(ArgumentError):
    """The optimizer does not fit the model, the stage or the precision."""


class SchedulerError(ArgumentError):
    """The learning-rate schedule does not fit the optimizer, or has invalid arguments."""


class ShardedParameterError(DeepSpeedError, RuntimeError):
    """A sharded parameter was written to, or its storage was asked for, outside a gather."""


class LossScaleError(DeepSpeedError, RuntimeError):
    """A sharded parameter was written to, or its storage was accessed, outside of a gather."""


class CommError(DeepSpeedError, RuntimeError):
    """A collective failed. The message has its label and the state of the other ranks."""


class CommTimeoutError(CommError, TimeoutError):
    """A collective timed out. The message has the last label of every rank."""


class LaunchError(DeepSpeedError, RuntimeError, ValueError):
    """The launcher cannot start a rank, or a rank ended unexpectedly."""


class DataError(DeepSpeedError, ValueError):
    """A data loader or batch does not support the requested use."""


class StorageError(DeepSpeedError, OSError):
    """A file with training state could not be created, read or written. The message has tensor, file and disk."""


class CheckpointError(DeepSpeedError, RuntimeError, ValueError):
    """A checkpoint could not be written, or does not match the model or engine that loads it."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is incomplete, or its bytes differ from those that were written."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """The named checkpoint does not exist, or one of its files is on no rank's disk."""


class MemoryExhaustedError(DeepSpeedError, MemoryError, RuntimeError):
    """The training state does not fit in memory. The message names the keys that move parts of it to other memory.

    Attributes:
        category: kind of memory that ran out, as in `engine.memory_by_category()`; "" if unknown.
        suggestion: part of a JSON to merge into the run's JSON so that the state fits; empty if no key helps.
    """

    category: str = ""
    suggestion: Mapping[str, object] = MappingProxyType({})


class CompressionError(DeepSpeedError, ValueError):
    """A model cannot be compressed as requested. The message says why and suggests an alternative."""


class TensorParallelError(DeepSpeedError, ValueError):
    """A model cannot be split over ranks, or the split model gives other results than the dense model."""


class ExpertParallelError(DeepSpeedError, ValueError):
    """Experts cannot be divided among ranks, or give other results than the whole layer. The message names it."""


class SequenceParallelError(DeepSpeedError, ValueError):
    """A sequence-parallel model gives other results than the same model on the whole sequence."""


class PipelineError(UsageError):
    """Pipeline parallelism does not support a model, schedule or call, or a stage failed. The message says which."""


class RequestError(ArgumentError):
    """A request cannot be generated with the given settings. If a limit is exceeded, the message has both numbers."""


class LengthError(RequestError, RuntimeError):
    """A prompt, alone or with the requested output, is longer than the model or a key allows. Names both numbers."""


class PackingError(DeepSpeedError, RuntimeError):
    """A model's modules cannot process rows of several packed sequences in one pass. The message says why."""


class ContractError(DeepSpeedError, AssertionError):
    """A third-party object does not follow the protocol through which it is used."""


class SecondCopyWarning(UserWarning):
    """Another installation of the same package is on Python's path, or its files are mixed with this one's."""
