"""Attention of models of proteins, in tiles: memory is linear in the length."""

from deepspeed.ops.deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention

__all__ = ["DS4Sci_EvoformerAttention"]
