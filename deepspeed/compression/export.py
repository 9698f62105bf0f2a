"""Export of a compressed model to a folder for `from_pretrained`; quantized weights are stored as packed integers."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import CONV
from deepspeed.compression.pruning.transformers_groups import dense_class, inside, on_meta, plain_state
from deepspeed.compression.utils import four_bit_scales
from deepspeed.errors import CompressionError, NotAvailableError
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.transformers_model import config_of

BITS = {"int8": 8, "int4": 4, "w8a8": 8}
_SMALL = 2_000_000_000  # maximum parameters for which a second copy in memory is allowed


def export(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    folder: str | Path,
    weights: str = "float",
    group_size: int = 32,
) -> dict[str, Any]:
    """Write a model folder that Transformers' `from_pretrained` loads.

    Args:
        model: provides class and config; its weights are not used.
        state: state dict of the unsharded model, with the values that its forward uses.
        folder: created if missing.
        weights: `float`, `int8` (a scale per output row), `int4` (a scale per row and `group_size` inputs, with small
            squared error), or `w8a8`: int8 weights, and inputs rounded to 8 bits with a dynamic scale per token.
        group_size: number of inputs per scale of int4.

    Returns:
        `parameters`, `bytes` of the weights, `weights` and `class`; also written to `compression.json` in the folder.

    Raises:
        CompressionError: `weights` is unknown, there is no Transformers config, `state` does not fit, or packing fails.
        NotAvailableError: compressed-tensors is needed for packed integers and not installed.
    """
    inner = inside(model)[1]
    if weights not in ("float", *BITS):
        raise CompressionError(f"weights={weights!r}: export writes float, {', '.join(BITS)}")
    config = config_of(inner)
    if config is None or not hasattr(inner, "save_pretrained"):
        raise CompressionError(
            f"export writes folders of Transformers models; {type(model).__name__} has no config: save its state dict"
        )
    plain = _build_filled(dense_class(inner), config, plain_state(model, state))
    if getattr(inner, "generation_config", None) is not None:
        plain.generation_config = copy.deepcopy(inner.generation_config)
    folder = Path(folder)
    count = sum(param.numel() for param in plain.parameters())
    if weights == "float":
        plain.save_pretrained(folder)
    else:
        unpacked = [type(m).__name__ for m in plain.modules() if type(m).__name__ == "Conv1D" or isinstance(m, CONV)]
        if unpacked:
            kinds = ", ".join(f"{unpacked.count(kind)} {kind}" for kind in dict.fromkeys(unpacked))
            advice = "only Linears are packed (Conv1D: convert_conv1d_to_linear before initialize)"
            log_rank0(f"{kinds} stay float: {advice}")
        _pack_aside(plain, weights, group_size, folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    report = {"parameters": count, "bytes": size, "weights": weights, "class": type(plain).__name__}
    (folder / "compression.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _build_filled(model_class: type[nn.Module], config: Any, state: Mapping[str, torch.Tensor]) -> Any:
    """Build a model of an unmodified class with these weights, in eval mode; CompressionError if they do not fit."""
    small = sum(value.numel() for value in state.values()) < _SMALL
    model: Any = model_class(copy.deepcopy(config)) if small else on_meta(model_class, config)
    missing, unexpected = model.load_state_dict(dict(state), strict=False, assign=True)
    loaded = {param for name, param in model.named_parameters(remove_duplicate=False) if name not in missing}
    model.tie_weights()  # a tied weight may be missing; any other missing weight would stay random
    lost = [name for name, param in model.named_parameters() if param not in loaded]
    if unexpected or lost:
        raise CompressionError(f"the weights do not fit {model_class.__name__}: {lost[:3]}, {list(unexpected)[:3]}")
    dtypes = {value.dtype for value in state.values() if value.is_floating_point()}
    if len(dtypes) == 1:
        model.config.dtype = next(iter(dtypes))
    return model.eval()


# -- packed integers --------------------------------------------------------------------------------------------------


def packable(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers to store as integers, by name: all but the LM head and layers tied to an embedding."""
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and id(module.weight) not in embedded
    }


def _pack_aside(model: Any, weights: str, group_size: int, folder: Path) -> None:
    """Run `_pack` in another process, because compressed-tensors would wait for all ranks; errors as in `export`."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise NotAvailableError("packed integers on disk need compressed-tensors: pip install 'deepspeed[compression]'")
    with tempfile.TemporaryDirectory() as whole:
        model.save_pretrained(whole)
        command = [sys.executable, "-m", __name__, whole, str(folder), type(model).__name__, weights, str(group_size)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompressionError(f"packing failed: {done.stderr.strip().splitlines()[-1:]}")


def _pack(model: Any, weights: str, group_size: int, folder: Path) -> None:
    bits = BITS[weights]
    library: Any = importlib.import_module("compressed_tensors")
    forms: Any = importlib.import_module("compressed_tensors.quantization")
    chosen = packable(model)
    if not chosen:
        raise CompressionError(f"{type(model).__name__} has no Linear to pack (Conv1D: convert_conv1d_to_linear first)")
    if bits == 4 and any(module.in_features % group_size for module in chosen.values()):
        raise CompressionError(f"int4: the inputs of some Linear are no multiple of group_size {group_size}")
    grouped: Any = {"strategy": "group", "group_size": group_size} if bits == 4 else {"strategy": "channel"}
    stored = forms.QuantizationArgs(num_bits=bits, type="int", symmetric=True, **grouped)
    inputs = None
    if weights == "w8a8":
        inputs = forms.QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scheme = forms.QuantizationScheme(targets=["Linear"], weights=stored, input_activations=inputs)
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in chosen]
    form = "pack-quantized" if inputs is None else "int-quantized"
    settings = forms.QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=ignored,
        format=form,
        quantization_status=forms.QuantizationStatus.COMPRESSED,
    )
    forms.apply_quantization_config(model, settings)
    with torch.no_grad():
        for module in chosen.values():
            scale: Any = module.weight_scale
            if bits == 4:
                groups = module.weight.view(module.out_features, scale.shape[-1], -1)
                scale.copy_(four_bit_scales(groups.float()).view(scale.shape))
            else:
                largest = module.weight.float().abs().amax(-1).view(scale.shape)
                scale.copy_((largest / 127).clamp(min=1e-12))
    compressor = library.ModelCompressor.from_pretrained_model(model, quantization_format=form)
    if compressor is None:
        raise CompressionError("compressed-tensors finds nothing to pack")
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


if __name__ == "__main__":
    _whole, _folder, _class, _weights, _size = sys.argv[1:]
    _model = getattr(importlib.import_module("transformers"), _class).from_pretrained(_whole)
    _pack(_model, _weights, int(_size), Path(_folder))
