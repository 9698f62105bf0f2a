"""Operator builders with the names of upstream DeepSpeed. They return modules of this package; nothing is compiled."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import ClassVar

import torch

from deepspeed.errors import NotAvailableError
from deepspeed.native import library

__all__ = [
    "ALL_OPS",
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "DeepCompileBuilder",
    "EvoformerAttnBuilder",
    "FPQuantizerBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "InferenceCoreBuilder",
    "InferenceCutlassBuilder",
    "OpBuilder",
    "QuantizerBuilder",
    "RaggedOpsBuilder",
    "RaggedUtilsBuilder",
    "RandomLTDBuilder",
    "ShareMemCommBuilder",
    "SparseAttnBuilder",
    "SpatialInferenceBuilder",
    "StochasticTransformerBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
]


class OpBuilder:
    """Builder of one operator.

    Attributes:
        NAME: name of the operator, the key of `deepspeed.ops.__compatible_ops__`.
        MODULE: module of the operator; None if this version does not have it.
        INSTEAD: short description of the implementation in this package, or of the replacement.
    """

    NAME: ClassVar[str] = ""
    MODULE: ClassVar[str | None] = None
    INSTEAD: ClassVar[str] = ""

    @property
    def name(self) -> str:
        return self.NAME

    def absolute_name(self) -> str:
        """Return the import path of the operator; a path that does not exist if the operator is unavailable."""
        return self.MODULE or f"deepspeed.ops.{self.NAME}"

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Return whether this torch is built for AMD GPUs."""
        return torch.version.hip is not None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether `load` works on this machine."""
        return self.MODULE is not None

    def load(self, verbose: bool = False) -> ModuleType:
        """Return the module of the operator; nothing is compiled.

        Raises:
            NotAvailableError: this version does not have the operator.
        """
        if self.MODULE is None:
            raise NotAvailableError(f"{type(self).__name__}: '{self.NAME}' is not available yet: {self.INSTEAD}")
        return importlib.import_module(self.MODULE)


def _builder(class_name: str, operator: str, instead: str, module: str | None = None) -> type[OpBuilder]:
    """Create the builder class of an operator; without `module`, the operator is unavailable."""
    doc = f"{instead[0].upper()}{instead[1:]}." if module else f"Not available yet: {instead}."
    return type(class_name, (OpBuilder,), {"__doc__": doc, "NAME": operator, "MODULE": module, "INSTEAD": instead})


class ShareMemCommBuilder(OpBuilder):
    """Builder of the collectives between CPU ranks of one machine."""

    NAME = "deepspeed_shm_comm"
    MODULE = "deepspeed.comm.shared_memory.transport"
    INSTEAD = "collectives of one machine's CPU ranks"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the native library is available."""
        return library() is not None


AsyncIOBuilder = _builder(
    "AsyncIOBuilder", "async_io", "reads and writes of files past the page cache", "deepspeed.ops.aio.handle"
)
CPUAdamBuilder = _builder(
    "CPUAdamBuilder",
    "cpu_adam",
    "Adam over host memory, in one pass of native code or in torch",
    "deepspeed.ops.adam.cpu_adam",
)
CPUAdagradBuilder = _builder(
    "CPUAdagradBuilder", "cpu_adagrad", "Adagrad over host memory", "deepspeed.ops.adagrad.cpu_adagrad"
)
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", "Lion over host memory", "deepspeed.ops.lion.cpu_lion")
FusedAdamBuilder = _builder(
    "FusedAdamBuilder", "fused_adam", "Adam on torch's fused kernel", "deepspeed.ops.adam.fused_adam"
)
FusedLambBuilder = _builder(
    "FusedLambBuilder", "fused_lamb", "LAMB over all tensors of a group", "deepspeed.ops.lamb.fused_lamb"
)
FusedLionBuilder = _builder(
    "FusedLionBuilder", "fused_lion", "Lion over all tensors of a group", "deepspeed.ops.lion.fused_lion"
)
UtilsBuilder = _builder("UtilsBuilder", "utils", "several tensors as one, and back", "deepspeed.ops.flatten")
CCLCommBuilder = _builder(
    "CCLCommBuilder", "deepspeed_ccl_comm", "CPU ranks communicate through shared memory and gloo"
)
DeepCompileBuilder = _builder("DeepCompileBuilder", "dc", "it belongs to whole-graph compilation")
EvoformerAttnBuilder = _builder(
    "EvoformerAttnBuilder",
    "evoformer_attn",
    "Evoformer attention in tiles, in torch",
    "deepspeed.ops.deepspeed4science.evoformer_attn",
)
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer", "it belongs to quantized weights")
GDSBuilder = _builder("GDSBuilder", "gds", "GPUDirect Storage; async_io goes through host memory")
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference", "it belongs to the inference engine")
InferenceCoreBuilder = _builder("InferenceCoreBuilder", "inference_core_ops", "it belongs to the inference engine")
InferenceCutlassBuilder = _builder("InferenceCutlassBuilder", "cutlass_ops", "it belongs to the inference engine")
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer", "it belongs to quantized communication")
RaggedOpsBuilder = _builder("RaggedOpsBuilder", "ragged_device_ops", "it belongs to the inference engine")
RaggedUtilsBuilder = _builder("RaggedUtilsBuilder", "ragged_ops", "it belongs to the inference engine")
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd", "random-LTD gathers and scatters tokens in torch")
SparseAttnBuilder = _builder("SparseAttnBuilder", "sparse_attn", "block-sparse attention layouts")
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference", "it belongs to the inference engine")
StochasticTransformerBuilder = _builder(
    "StochasticTransformerBuilder", "stochastic_transformer", "training uses torch's own layers instead"
)
TransformerBuilder = _builder("TransformerBuilder", "transformer", "training uses torch's own layers instead")

ALL_OPS: dict[str, OpBuilder] = {
    builder.NAME: builder() for name, builder in sorted(globals().items()) if name.endswith("Builder") and builder.NAME
}
"""Builders of all operators, by name."""


def compatible_ops() -> dict[str, bool]:
    """Return whether each operator can be loaded on this machine, by name."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
