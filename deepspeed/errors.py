"""Public exceptions and warnings. Most are also builtin exceptions, so `except ValueError` and the like catch them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class DeepSpeedError(Exception):
    """Base class of the errors in this module."""


class DeepSpeedConfigError(DeepSpeedError, ValueError, AssertionError):
    """The configuration cannot be read, or has unknown, misplaced, missing or conflicting keys or invalid values."""


class BatchSizeError(DeepSpeedConfigError):
    """Batch sizes are unknown, or train_batch_size is not micro batch * accumulation steps * data-parallel ranks."""


class NotAvailableError(DeepSpeedConfigError, NotImplementedError, ImportError):
    """A configuration key, argument or name needs a feature that this version does not have."""


class ArgumentError(DeepSpeedError, ValueError, AssertionError, TypeError):
    """The arguments of a call contradict each other or have invalid values."""


class UsageError(DeepSpeedError, RuntimeError, AssertionError):
    """A call is not allowed in the current state, for example `engine.step` while the optimizer state is offloaded."""


class OrderError(UsageError):
    """Ranks would start different collectives, which would deadlock or corrupt their results."""


class MeshError(DeepSpeedConfigError, ArgumentError):
    """Parallel sizes are inconsistent or do not fit the ranks or the model, or ranks have different models."""


class InputError(ArgumentError, RuntimeError):
    """The input of a layer has a dtype or a width that the layer does not take."""


class OptimizerError(ArgumentError):
    """The optimizer is unknown, has invalid arguments, or cannot be used with this model or configuration."""


class SchedulerError(ArgumentError):
    """The learning-rate schedule is unknown, has invalid arguments, or cannot be used with this optimizer."""


class ShardedParameterError(DeepSpeedError, RuntimeError):
    """A sharded parameter, or a view of one, was changed or accessed in a way that would lose values."""


class LossScaleError(DeepSpeedError, RuntimeError):
    """Gradients overflowed although the dynamic loss scale was already at its minimum (`fp16.min_loss_scale`)."""


class CommError(DeepSpeedError, RuntimeError):
    """A collective or message failed, another rank failed, or the ranks could not connect to each other."""


class CommTimeoutError(CommError, TimeoutError):
    """A collective, or the start of the process group, timed out. The message describes the other ranks' state."""


class LaunchError(DeepSpeedError, RuntimeError, ValueError):
    """The launcher cannot start a rank, or a rank ended unexpectedly."""


class DataError(DeepSpeedError, ValueError):
    """A data loader or batch failed or cannot be used as requested, for example because a mask has a wrong shape."""


class StorageError(DeepSpeedError, OSError):
    """Block I/O failed: a file could not be created, opened, read or written, or no I/O thread could start."""


class CheckpointError(DeepSpeedError, RuntimeError, ValueError):
    """A checkpoint could not be written or loaded, for example because it does not match the model or engine."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint, or a file of compiled kernels, is missing parts, unreadable, or differs from what was written."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """The requested checkpoint or one of its files does not exist, or no rank can read it."""


class MemoryExhaustedError(DeepSpeedError, MemoryError, RuntimeError):
    """The training state does not fit in memory. The message names the configuration keys that offload parts of it.

    Attributes:
        category: key of `engine.memory_by_category()` whose memory ran out; "" if unknown.
        suggestion: configuration keys to merge into the run's configuration so that the state fits; empty if none help.
    """

    category: str = ""
    suggestion: Mapping[str, object] = MappingProxyType({})


class CompressionError(DeepSpeedError, ValueError):
    """A model cannot be compressed or compared as requested. The message has the reason."""


class TensorParallelError(DeepSpeedError, ValueError):
    """A model cannot be split by tensor parallelism as requested, or its outputs differ from the unsplit model's."""


class ExpertParallelError(DeepSpeedError, ValueError):
    """Experts cannot be divided among ranks, called or balanced as requested, or a divided layer's outputs differ."""


class SequenceParallelError(DeepSpeedError, ValueError):
    """A sequence-parallel model's outputs differ from the unsplit model's, or a tensor for backward was changed."""


class PipelineError(UsageError):
    """Pipeline parallelism does not support a model, schedule or call, or a stage failed or differs from others."""


class RequestError(ArgumentError):
    """A generation request or an option of the generator is invalid or exceeds a limit."""


class LengthError(RequestError, RuntimeError):
    """A prompt, alone or with the requested output, exceeds the length limit of the model or of the configuration."""


class PackingError(DeepSpeedError, RuntimeError):
    """Inference cannot pack sequences or weights of the model, or run its native passes. The message has the reason."""


class ContractError(DeepSpeedError, AssertionError):
    """An object from other code does not implement the protocol that this package expects of it."""


class SecondCopyWarning(UserWarning):
    """`sys.path` has a second installation of this package, or two versions share one folder."""
