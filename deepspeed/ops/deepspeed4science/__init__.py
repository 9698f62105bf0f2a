"""Attention for protein models in tiles, with memory linear in the sequence length."""

from deepspeed.ops.deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention

__all__ = ["DS4Sci_EvoformerAttention"]
