"""Every operator that user code may ask a builder for: what it is here, or what there is in its place."""

from __future__ import annotations

from deepspeed.native import library
from deepspeed.ops.op_builder.builder import OpBuilder


class AsyncIOBuilder(OpBuilder):
    """Reads and writes of files past the page cache."""

    NAME = "async_io"
    MODULE = "deepspeed.ops.aio.handle"
    INSTEAD = "reads and writes of files past the page cache"


class CPUAdamBuilder(OpBuilder):
    """Adam over host memory, in one pass of native code or in torch."""

    NAME = "cpu_adam"
    MODULE = "deepspeed.ops.adam.cpu_adam"
    INSTEAD = "Adam over host memory, in one pass of native code or in torch"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad over host memory."""

    NAME = "cpu_adagrad"
    MODULE = "deepspeed.ops.adagrad.cpu_adagrad"
    INSTEAD = "Adagrad over host memory"


class CPULionBuilder(OpBuilder):
    """Lion over host memory."""

    NAME = "cpu_lion"
    MODULE = "deepspeed.ops.lion.cpu_lion"
    INSTEAD = "Lion over host memory"


class FusedAdamBuilder(OpBuilder):
    """Adam on torch's fused kernel."""

    NAME = "fused_adam"
    MODULE = "deepspeed.ops.adam.fused_adam"
    INSTEAD = "Adam on torch's fused kernel"


class FusedLambBuilder(OpBuilder):
    """LAMB over all tensors of a group."""

    NAME = "fused_lamb"
    MODULE = "deepspeed.ops.lamb.fused_lamb"
    INSTEAD = "LAMB over all tensors of a group"


class FusedLionBuilder(OpBuilder):
    """Lion over all tensors of a group."""

    NAME = "fused_lion"
    MODULE = "deepspeed.ops.lion.fused_lion"
    INSTEAD = "Lion over all tensors of a group"


class ShareMemCommBuilder(OpBuilder):
    """Collectives of one machine's CPU ranks."""

    NAME = "deepspeed_shm_comm"
    MODULE = "deepspeed.comm.shared_memory.transport"
    INSTEAD = "collectives of one machine's CPU ranks"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the native library is there."""
        return library() is not None


class UtilsBuilder(OpBuilder):
    """Several tensors as one, and back."""

    NAME = "utils"
    MODULE = "deepspeed.ops.flatten"
    INSTEAD = "several tensors as one, and back"


class CCLCommBuilder(OpBuilder):
    """Not available yet: CPU ranks communicate through shared memory and gloo."""

    NAME = "deepspeed_ccl_comm"
    INSTEAD = "CPU ranks communicate through shared memory and gloo"


class DeepCompileBuilder(OpBuilder):
    """Not available yet: it belongs to whole-graph compilation."""

    NAME = "dc"
    INSTEAD = "it belongs to whole-graph compilation"


class EvoformerAttnBuilder(OpBuilder):
    """Not available yet: torch's scaled_dot_product_attention takes a bias."""

    NAME = "evoformer_attn"
    INSTEAD = "torch's scaled_dot_product_attention takes a bias"


class FPQuantizerBuilder(OpBuilder):
    """Not available yet: it belongs to quantized weights."""

    NAME = "fp_quantizer"
    INSTEAD = "it belongs to quantized weights"


class GDSBuilder(OpBuilder):
    """Not available yet: GPUDirect Storage; async_io goes through host memory."""

    NAME = "gds"
    INSTEAD = "GPUDirect Storage; async_io goes through host memory"


class InferenceBuilder(OpBuilder):
    """Not available yet: it belongs to the inference engine."""

    NAME = "transformer_inference"
    INSTEAD = "it belongs to the inference engine"


class InferenceCoreBuilder(OpBuilder):
    """Not available yet: it belongs to the inference engine."""

    NAME = "inference_core_ops"
    INSTEAD = "it belongs to the inference engine"


class InferenceCutlassBuilder(OpBuilder):
    """Not available yet: it belongs to the inference engine."""

    NAME = "cutlass_ops"
    INSTEAD = "it belongs to the inference engine"


class QuantizerBuilder(OpBuilder):
    """Not available yet: it belongs to quantized communication."""

    NAME = "quantizer"
    INSTEAD = "it belongs to quantized communication"


class RaggedOpsBuilder(OpBuilder):
    """Not available yet: it belongs to the inference engine."""

    NAME = "ragged_device_ops"
    INSTEAD = "it belongs to the inference engine"


class RaggedUtilsBuilder(OpBuilder):
    """Not available yet: it belongs to the inference engine."""

    NAME = "ragged_ops"
    INSTEAD = "it belongs to the inference engine"


class RandomLTDBuilder(OpBuilder):
    """Not available yet: it belongs to data efficiency."""

    NAME = "random_ltd"
    INSTEAD = "it belongs to data efficiency"


class SparseAttnBuilder(OpBuilder):
    """Not available yet: block-sparse attention layouts."""

    NAME = "sparse_attn"
    INSTEAD = "block-sparse attention layouts"


class SpatialInferenceBuilder(OpBuilder):
    """Not available yet: it belongs to the inference engine."""

    NAME = "spatial_inference"
    INSTEAD = "it belongs to the inference engine"


class StochasticTransformerBuilder(OpBuilder):
    """Not available yet: torch's own layers train."""

    NAME = "stochastic_transformer"
    INSTEAD = "torch's own layers train"


class TransformerBuilder(OpBuilder):
    """Not available yet: torch's own layers train."""

    NAME = "transformer"
    INSTEAD = "torch's own layers train"


ALL_OPS: dict[str, OpBuilder] = {
    builder.NAME: builder()
    for builder in (
        AsyncIOBuilder,
        CCLCommBuilder,
        CPUAdagradBuilder,
        CPUAdamBuilder,
        CPULionBuilder,
        DeepCompileBuilder,
        EvoformerAttnBuilder,
        FPQuantizerBuilder,
        FusedAdamBuilder,
        FusedLambBuilder,
        FusedLionBuilder,
        GDSBuilder,
        InferenceBuilder,
        InferenceCoreBuilder,
        InferenceCutlassBuilder,
        QuantizerBuilder,
        RaggedOpsBuilder,
        RaggedUtilsBuilder,
        RandomLTDBuilder,
        ShareMemCommBuilder,
        SparseAttnBuilder,
        SpatialInferenceBuilder,
        StochasticTransformerBuilder,
        TransformerBuilder,
        UtilsBuilder,
    )
}
"""A builder of each operator, by its name."""


def compatible_ops() -> dict[str, bool]:
    """Whether each operator can be loaded on this machine, by name."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
