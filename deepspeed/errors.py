"""Public exceptions and warnings. Each is also a builtin exception, so `except ValueError` and the like catch it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class DeepSpeedError(Exception):
    """Base class of all errors that this package raises."""


class DeepSpeedConfigError(DeepSpeedError, ValueError, AssertionError):
    """The configuration has unknown, misplaced or conflicting keys or invalid values. The message lists all of them."""


class BatchSizeError(DeepSpeedConfigError):
    """Batch sizes conflict: train_batch_size != micro batch * gradient_accumulation_steps * data-parallel ranks."""


class NotAvailableError(DeepSpeedConfigError, NotImplementedError, ImportError):
    """A configuration key, argument or name needs a feature that this version does not have."""


class ArgumentError(DeepSpeedError, ValueError, AssertionError, TypeError):
    """The arguments of a call contradict each other or have invalid values."""


class UsageError(DeepSpeedError, RuntimeError, AssertionError):
    """A call is not allowed in the current state, for example `engine.step` while the optimizer state is offloaded."""


class OrderError(UsageError):
    """Ranks would start different collectives, which would deadlock or corrupt their results."""


class MeshError(DeepSpeedConfigError, ArgumentError):
    """Parallel sizes are inconsistent or do not fit the number of ranks, or replicas have different parameters."""


class OptimizerError(ArgumentError):
    """The optimizer cannot be used with this model, ZeRO stage or precision."""


class SchedulerError(ArgumentError):
    """The learning-rate schedule cannot be used with this optimizer, or has invalid arguments."""


class ShardedParameterError(DeepSpeedError, RuntimeError):
    """A sharded parameter was written, or its storage was accessed, outside of `GatheredParameters`."""


class LossScaleError(DeepSpeedError, RuntimeError):
    """Gradients overflowed although the dynamic loss scale was already at its minimum (`fp16.min_loss_scale`)."""


class CommError(DeepSpeedError, RuntimeError):
    """A collective failed. The message names the collective and reports the state of the other ranks."""


class CommTimeoutError(CommError, TimeoutError):
    """A collective timed out. The message names the last collective of every rank."""


class LaunchError(DeepSpeedError, RuntimeError, ValueError):
    """The launcher cannot start a rank, or a rank ended unexpectedly."""


class DataError(DeepSpeedError, ValueError):
    """A data loader or batch cannot be used as requested, for example because a mask has a wrong shape."""


class StorageError(DeepSpeedError, OSError):
    """An offload file could not be created, read or written. The message names the tensor or folder and the cause."""


class CheckpointError(DeepSpeedError, RuntimeError, ValueError):
    """A checkpoint could not be written, or does not match the model or engine that loads it."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is incomplete, or its contents differ from what was saved."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """The requested checkpoint does not exist, or no rank can read one of its files."""


class MemoryExhaustedError(DeepSpeedError, MemoryError, RuntimeError):
    """The training state does not fit in memory. The message names the configuration keys that offload parts of it.

    Attributes:
        category: key of `engine.memory_by_category()` whose memory ran out; "" if unknown.
        suggestion: configuration keys to merge into the run's configuration so that the state fits; empty if none help.
    """

    category: str = ""
    suggestion: Mapping[str, object] = MappingProxyType({})


class CompressionError(DeepSpeedError, ValueError):
    """A model cannot be compressed as requested. The message says why and suggests an alternative."""


class TensorParallelError(DeepSpeedError, ValueError):
    """A model cannot be split by tensor parallelism, or its outputs differ from those of the unsplit model."""


class ExpertParallelError(DeepSpeedError, ValueError):
    """Experts cannot be divided among ranks, or a divided layer's outputs differ. The message names the layer."""


class SequenceParallelError(DeepSpeedError, ValueError):
    """The outputs of a sequence-parallel model differ from those of the same model on the whole sequence."""


class PipelineError(UsageError):
    """Pipeline parallelism does not support a model, schedule or call, or a pipeline stage failed."""


class RequestError(ArgumentError):
    """A generation request has invalid options or exceeds a limit; the message then states both numbers."""


class LengthError(RequestError, RuntimeError):
    """A prompt, alone or with the requested output, exceeds the length limit of the model or of the configuration."""


class PackingError(DeepSpeedError, RuntimeError):
    """The model cannot process several sequences packed into one row. The message states the reason."""


class ContractError(DeepSpeedError, AssertionError):
    """An object from other code does not implement the protocol that this package expects of it."""


class SecondCopyWarning(UserWarning):
    """`sys.path` has a second installation of this package, or two versions share one folder."""
