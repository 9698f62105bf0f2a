"""Functions that get, set or change modules by dotted name, with the names of upstream DeepSpeed."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.compression.basic_layer import compress_module, plain_module
from deepspeed.compression.pruning.rules import compressible
from deepspeed.errors import ArgumentError
from deepspeed.zero.parameters.parameter import is_managed


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute at a dotted name; numbers index lists.

    Args:
        model: root object.
        module_name: such as `encoder.layer.0.output`.

    Raises:
        AttributeError, IndexError: there is no such attribute.
    """
    attribute = model
    for part in module_name.split("."):
        indexed = part.isdigit() and not hasattr(attribute, part)
        attribute = attribute[int(part)] if indexed else getattr(attribute, part)
    return attribute


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a dotted name.

    Args:
        model: root object.
        module_name: as in `recursive_getattr`.
        module: new value.

    Raises:
        AttributeError, IndexError: the owner of the attribute does not exist.
    """
    home, _, last = module_name.rpartition(".")
    owner = recursive_getattr(model, home) if home else model
    if isinstance(owner, (nn.ModuleList, nn.Sequential)) and last.isdigit():
        owner[int(last)] = module
    else:
        setattr(owner, last, module)


def module_replacement(
    model: nn.Module, module_name: str, compression_technique: Any = None, mpu: Any = None
) -> nn.Module:
    """Replace the class of one module by a subclass that supports fake quantizers, in place. Returns the module.

    Args:
        model: model with the module.
        module_name: dotted name of the module.
        compression_technique: no effect.
        mpu: no effect.
    """
    return compress_module(recursive_getattr(model, module_name))


def is_module_compressible(module: nn.Module, mpu: Any = None) -> bool:
    """Whether compression techniques support the class of a module; `mpu` has no effect."""
    return compressible(module) or isinstance(module, nn.BatchNorm2d)


def compression_preparation(model: nn.Module, compression_technique_list: Any = None, mpu: Any = None) -> nn.Module:
    """Replace the classes of all compressible modules by subclasses that support fake quantizers. Returns the model.

    `compression_technique_list` and `mpu` have no effect.
    """
    for module in model.modules():
        if is_module_compressible(module):
            compress_module(module)
    return model


def fix_compression(
    model: nn.Module, module_name: str, compression_technique: Any = None, mask: Any = None, dim_reduction: bool = False
) -> None:  # noqa: E501
    """Restore the original class of a module, in place, and remove its quantizers; the weight does not change.

    Args:
        model: model with the module.
        module_name: dotted name of the module.
        compression_technique, mask, dim_reduction: no effect.
    """
    plain_module(recursive_getattr(model, module_name))


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace modules such as Transformers' `Conv1D` by `nn.Linear` with the transposed weight, in place.

    Not necessary for compression techniques, which support `Conv1D`. Modules that occur twice stay shared.

    Args:
        model: model before `deepspeed.initialize`.
        convert_type: class of the modules to replace.

    Returns:
        The model.

    Raises:
        ArgumentError: the model is sharded.
    """
    linears: dict[int, nn.Linear] = {}  # new layers by the replaced module
    target: Any = model.module if hasattr(model, "module") else model
    for module in list(target.modules()):
        for name, child in list(module._modules.items()):
            if not isinstance(child, convert_type):
                continue
            weight: Any = child.weight
            if is_managed(weight):
                raise ArgumentError(
                    "convert_conv1d_to_linear works on whole models: call it before zero.Init or initialize"
                )
            if id(child) not in linears:
                bias: Any = child.bias
                linear = linears[id(child)] = nn.Linear(*weight.shape, bias=bias is not None, device="meta")
                linear.weight = nn.Parameter(weight.data.t().contiguous(), requires_grad=weight.requires_grad)
                if bias is not None:
                    linear.bias = bias
                linear.train(child.training)
            module._modules[name] = linears[id(child)]
    return model
