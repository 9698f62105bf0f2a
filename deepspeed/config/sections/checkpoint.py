"""`checkpoint`, `nebula`: how training state is written and read."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.fields import Int, Section, TagValidation, key, later


class ParallelWrite(Section):
    """`checkpoint.parallel_write`."""

    pipeline_stage: bool = later(False, "data-parallel ranks share the layers of a pipeline stage")


class Writer(Section):
    """`checkpoint.writer`."""

    type: Literal["FAST", "PYTHON", "MOCK"] | None = later(None, "which writer")
    decoupled: bool = later(False, "write while training goes on")
    io_buffer_size: Int = later(64 * 1024**2, "bytes of its buffer", ge=1)
    io_buffer_double: bool = later(True, "two buffers")
    show_statistics: bool = later(False, "print its speed")
    data_parallel: Literal["replica", "socket", "machine"] | None = later(None, "who writes")
    io_multiplier: Int = later(1, "writers per rank", ge=1)


class Checkpoint(Section):
    """`checkpoint`."""

    tag_validation: TagValidation = later("Warn", "when ranks disagree on the tag")
    load_universal: bool = later(False, "read the universal layout")
    use_node_local_storage: bool = later(False, "the first rank of each node writes its shared files")
    checkpoint_serialization: bool = later(True, "serialize tensors")
    parallel_write: ParallelWrite = key(ParallelWrite, "who writes what")
    writer: Writer = key(Writer, "how bytes reach the disk")


class Nebula(Section):
    """`nebula`: a cloud checkpoint service."""

    switch = "enabled"
    enabled: bool = later(False, "checkpoints through Nebula")
    persistent_storage_path: str | None = later(None, "folder")
    persistent_time_interval: Int = later(100, "seconds between checkpoints", ge=0)
    num_of_version_in_retention: Int = later(2, "checkpoints kept", ge=0)
    enable_nebula_load: bool = later(True, "load through Nebula")
    load_path: str | None = later(None, "folder to load from")
