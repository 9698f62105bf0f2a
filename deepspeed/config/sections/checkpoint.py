"""`checkpoint`, `nebula`: saving and loading of training state."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.base_model import Int, Section, TagValidation, key, later, moot

_STREAMED = "one writer streams tensors in place"


class ParallelWrite(Section):
    """Block `checkpoint.parallel_write`: accepted without effect, since every rank writes its own slice."""

    open_names = True
    pipeline_stage: bool = moot(False, "data-parallel ranks share a stage's layers", "every rank writes its own slice")


class Writer(Section):
    """Block `checkpoint.writer`: writing of checkpoint files."""

    open_names = True
    type: Literal["FAST", "PYTHON", "MOCK"] | None = moot(None, "which writer", _STREAMED)
    decoupled: bool = key(False, "write while training goes on, as `checkpoint.async_save`")
    io_buffer_size: Int = moot(64 * 1024**2, "bytes of its buffer", _STREAMED, ge=1)
    io_buffer_double: bool = moot(True, "two buffers", _STREAMED)
    show_statistics: bool = key(False, "log duration and speed of a save")
    data_parallel: Literal["replica", "socket", "machine"] | None = moot(
        None, "who writes", "every rank writes its own slice"
    )
    io_multiplier: Int = moot(1, "writers per rank", _STREAMED, ge=1)


class Checkpoint(Section):
    open_names = True
    tag_validation: TagValidation = key("Warn", "when ranks disagree on the tag")
    load_universal: bool = key(False, "without a tag, load the one `latest_universal` names")
    use_node_local_storage: bool = key(False, "the folder is on a disk of each node, with the files of its ranks")
    checkpoint_serialization: bool = moot(True, "serialize tensors", "tensors are written as they are")
    parallel_write: ParallelWrite = key(ParallelWrite, "who writes what")
    writer: Writer = key(Writer, "how bytes reach the disk")
    format: Literal["native", "deepspeed"] = key("native", "`deepspeed`: the file names and layout of upstream")
    async_save: bool = key(False, "write from a host copy while training continues")
    keep_last: Int | None = key(None, "remove older checkpoints of the folder once a new one is complete", ge=1)
    keep_every: Int | None = key(None, "steps whose multiples `keep_last` never removes", ge=1)
    signal_dir: str | None = key(
        None, "folder saved to when SIGTERM, SIGUSR1 or SIGHUP asks the run to stop; without it the one last used"
    )
    client_state_pickle: bool = key(
        False, "objects of client_state that JSON cannot express are pickled; must also be set for loading"
    )


class Nebula(Section):
    """Block `nebula`: a cloud checkpoint service."""

    switch = "enabled"
    enabled: bool = later(False, "checkpoints through Nebula")
    persistent_storage_path: str | None = later(None, "folder")
    persistent_time_interval: Int = later(100, "seconds between checkpoints", ge=0)
    num_of_version_in_retention: Int = later(2, "checkpoints kept", ge=0)
    enable_nebula_load: bool = later(True, "load through Nebula")
    load_path: str | None = later(None, "folder to load from")
