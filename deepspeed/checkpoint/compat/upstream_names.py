"""Keys and file names of upstream DeepSpeed's checkpoints, and its class for reading and writing one file.

Other programs depend on these values, so they must not change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed.errors import CheckpointError

# of the files of optimizer and model states
BUFFER_NAMES = "buffer_names"
DS_VERSION = "ds_version"
FP32_FLAT_GROUPS = "fp32_flat_groups"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
PARAM_SHAPES = "param_shapes"
PARTITION_COUNT = "partition_count"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
ZERO_STAGE = "zero_stage"
# of Megatron's files
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"
# of the block that says how parameters are joined over slices
ORIGINAL_VOCAB_SIZE = "original_vocab_size"
PADDED_VOCAB_SIZE = "padded_vocab_size"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of the model states of model-parallel rank `mp_rank_str`, such as "00", in the tag's folder."""
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of the optimizer states of ranks `dp_rank` (data) and `mp_rank` (model) in the tag's folder."""
    return str(Path(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: int, tp_rank: int) -> str:
    """Return the path of the model states of layer `layer_id` on tensor-parallel rank `tp_rank` in the tag's folder."""
    return str(Path(base_folder, f"layer_{layer_id:02d}-model_{tp_rank:02d}-model_states.pt"))


class TorchCheckpointEngine:
    """Writer and reader of single files with `torch.save` and `torch.load`, for programs that import it.

    The engine of this package saves and loads without this class.
    """

    def __init__(self, config_params: Any = None) -> None:
        """Create the object; `config_params` has no effect."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder and its parents; FileExistsError if it exists, unless `exist_ok`."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def create(self, info: Any) -> None:
        """Start a checkpoint; has no effect."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write nested containers of tensors and plain values to the file `path`."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file of tensors and plain values; code in the file is not executed.

        Args:
            path: path of the file.
            map_location: device for the tensors, as in `torch.load`; None: the devices of the saved tensors.

        Raises:
            CheckpointError: the file contains other objects, or was not written by `torch.save`.
            OSError: the file cannot be opened.
        """
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except (RuntimeError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        except Exception as error:
            if isinstance(error, OSError):
                raise
            raise CheckpointError(
                f"{path} has objects other than tensors and plain values, and reading those would run code of the "
                f"file: {error}"
            ) from error

    def commit(self, info: Any) -> bool:
        """Finish a checkpoint; has no effect, since `save` has already written each file. Returns True."""
        return True
