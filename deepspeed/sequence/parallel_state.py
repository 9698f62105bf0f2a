"""The sequence-parallel state of scripts: a mesh that is also their model-parallel unit."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups.init import init_distributed
from deepspeed.comm.process_groups.mesh import Mesh, mesh_for, ranks_started, resolve
from deepspeed.comm.process_groups.process_group import is_initialized
from deepspeed.errors import ArgumentError
from deepspeed.foundation.transformers_model import HEAD_KEYS, config_number, text_config
from deepspeed.sequence.layer import check_heads
from deepspeed.sequence.transformers_adapter import cut_sequence


@dataclass(frozen=True)
class SequenceSettings:
    """What a script asked for: see `cut_sequence`."""

    core: str | None = None
    disable_in_eval: bool = False


_asked: WeakKeyDictionary[Mesh, SequenceSettings] = WeakKeyDictionary()  # by the unit that was handed out


def settings_of(mpu: Any) -> SequenceSettings:
    """What was registered with a model-parallel unit; with any other, or None, nothing was."""
    return _asked.get(mpu, SequenceSettings()) if isinstance(mpu, Mesh) else SequenceSettings()


def initialize_sequence_parallel(sequence_parallel_size: int) -> Mesh:
    """The mesh whose ranks share sequences in rows of that many neighbours; it answers as a model-parallel unit.

    All ranks call together; process groups are started where there are none.

    Raises:
        MeshError: the ranks that were started do not divide so.
    """
    if not is_initialized():
        init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    return mesh_for(resolve(ranks_started(), [("sp", sequence_parallel_size, "sequence_parallel_size")]), None, device)


class UlyssesSPAttentionHF:
    """Attention of models of Transformers over a sequence that is cut."""

    @staticmethod
    def register_with_transformers(
        model_name_or_path: Any,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Mesh:
        """Make ready for `initialize(…, mpu=…)`, which cuts the model; one that is given is cut at once.

        Args:
            model_name_or_path: a model of Transformers, or where its configuration is found.
            core_attn_implementation: what each rank computes with, such as "sdpa"; None: the model's own.
            sequence_parallel_size: ranks that share a sequence.
            micro_batch_size: accepted for old scripts; batches say it themselves.
            seq_length: tokens of every sequence, where they are as many.
            seq_length_is_variable: they are not.
            disable_in_eval: compute whole sequences in evaluation.
            max_length: old name of `seq_length`.

        Returns:
            A mesh of this call's own, which answers `get_sequence_parallel_group()` and its like.

        Raises:
            ArgumentError: the sequence does not divide.
            MeshError: ranks or query heads do not, with the nearest sizes.
            NotAvailableError: the model's attention cannot be reached.
        """
        tokens = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and (tokens is None or tokens % sequence_parallel_size):
            raise ArgumentError(
                f"seq_length is {tokens}, not a multiple of {sequence_parallel_size} ranks of a sequence"
            )
        mesh = initialize_sequence_parallel(sequence_parallel_size)
        model = model_name_or_path if isinstance(model_name_or_path, nn.Module) else None
        config: Any = getattr(model, "config", None) if model is not None else _config_of(model_name_or_path)
        if (heads := config_number(text_config(config), HEAD_KEYS[:1])) is not None:
            check_heads(heads, mesh.axis("sp"))
        unit = copy(mesh)  # meshes of equal sizes are one object: what is asked for here is nothing to others that ask
        _asked[unit] = settings = SequenceSettings(core_attn_implementation, disable_in_eval)
        if model is not None:
            cut_sequence(model, mesh.axis("sp"), settings.core, settings.disable_in_eval)
        return unit


def _config_of(path: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)
