"""Every public exception and warning; each is also the builtin exception that users of the interface catch today."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class DeepSpeedError(Exception):
    """Parent of every error raised by this package."""


class DeepSpeedConfigError(DeepSpeedError, ValueError, AssertionError):
    """The configuration is wrong: unknown, misplaced, conflicting or ill-typed keys, all listed together."""


class BatchSizeError(DeepSpeedConfigError):
    """The batch sizes contradict: train_batch_size != micro * accumulation * data-parallel world."""


class NotAvailableError(DeepSpeedConfigError, NotImplementedError, ImportError):
    """A setting or name needs a feature that this version does not have."""


class ArgumentError(DeepSpeedError, ValueError, AssertionError, TypeError):
    """A call was made with arguments that cannot work together."""


class UsageError(DeepSpeedError, RuntimeError, AssertionError):
    """A call is not allowed in the current state."""


class OrderError(UsageError):
    """Ranks are about to take part in different collectives, on a backend that would hang or mix their values."""


class MeshError(DeepSpeedConfigError, ArgumentError):
    """The mesh of ranks that was asked for contradicts itself, or cannot be made of the ranks that were started."""


class OptimizerError(ArgumentError):
    """The optimizer does not fit the model, the stage or the precision."""


class SchedulerError(ArgumentError):
    """The learning-rate schedule does not fit its arguments or the optimizer."""


class ShardedParameterError(DeepSpeedError, RuntimeError):
    """A sharded parameter was written to, or its storage was asked for, outside a gather."""


class LossScaleError(DeepSpeedError, RuntimeError):
    """The dynamic loss scale is at its minimum and gradients still overflow."""


class CommError(DeepSpeedError, RuntimeError):
    """A collective failed; the message has its label and the state of the other ranks."""


class CommTimeoutError(CommError, TimeoutError):
    """A collective timed out; the message has every rank's last label."""


class LaunchError(DeepSpeedError, RuntimeError, ValueError):
    """The launcher cannot start or lost a rank."""


class DataError(DeepSpeedError, ValueError):
    """A data loader or batch does not support the requested use."""


class StorageError(DeepSpeedError, OSError):
    """A file that holds training state could not be made, read or written; names the tensor, the file and the disk."""


class CheckpointError(DeepSpeedError, RuntimeError, ValueError):
    """A checkpoint could not be written, or does not fit what it is to be loaded into."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is incomplete, or its bytes are not the ones that were written."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was named, or a file of it is on no rank's disk."""


class MemoryExhaustedError(DeepSpeedError, MemoryError, RuntimeError):
    """Training state does not fit in memory; names the keys that move it elsewhere.

    Attributes:
        category: what memory was asked for, in the words of `engine.memory_by_category()`; "" where that is not known.
        suggestion: a part of the JSON that would fit, laid over the one of the run; empty where no key helps.
    """

    category: str = ""
    suggestion: Mapping[str, object] = MappingProxyType({})


class CompressionError(DeepSpeedError, ValueError):
    """A model cannot be made smaller as asked; says what stands against it and what can be done instead."""


class TensorParallelError(DeepSpeedError, ValueError):
    """A model that cannot be split over ranks, or whose slices give other results than the dense model."""


class ExpertParallelError(DeepSpeedError, ValueError):
    """Experts that cannot be divided among ranks, or give other results than the whole layer; says which layer."""


class SequenceParallelError(DeepSpeedError, ValueError):
    """A sequence-parallel model gives other results than on the whole sequence."""


class PipelineError(UsageError):
    """A model, schedule or call that pipelines do not support, or a failed stage; the message says which."""


class RequestError(ArgumentError):
    """A request that cannot be generated as asked; over a limit, the message has both numbers."""


class LengthError(RequestError, RuntimeError):
    """A prompt, or a prompt and what is to follow, is longer than the model or a key allows; names both numbers."""


class PackingError(DeepSpeedError, RuntimeError):
    """A model's modules cannot run rows of several sequences in one pass; says what stands against it."""


class ContractError(DeepSpeedError, AssertionError):
    """A third party's part does not do what the protocol it is used through says."""


class SecondCopyWarning(UserWarning):
    """Another installation of the same name is on Python's path, or its files lie among these; says where."""
