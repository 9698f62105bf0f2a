"""Toy models of the families of the installed Transformers: class name, config name, sizes."""

from __future__ import annotations

from typing import Any

BASE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**BASE, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
EXPERTS = {**GQA, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 40}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 32, "patch_size": 8}  # fmt: skip
NEO = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
       "attention_types": [[["global", "local"], 1]]}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQ = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
       "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
       "max_position_embeddings": 64}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, GQA)
        for name in (
            "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "Starcoder2", "Olmo", "Olmo2",
            "Cohere", "Granite", "Glm", "Glm4", "SmolLM3", "Ernie4_5", "Nemotron", "StableLm", "Exaone4", "Helium",
            "Persimmon", "Seed_Oss", "Arcee", "HunYuanDenseV1", "Cohere2", "Apertus",
        )
    },
    **{name: (name, EXPERTS) for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "PhiMoE", "GraniteMoe")},
    "Gemma3": ("Gemma3:Gemma3TextConfig", GQA),
    "GPTNeoX": ("GPTNeoX", {**BASE, "max_position_embeddings": 64}),
    "GPTNeo": ("GPTNeo", NEO),
    "GPT2": ("GPT2:GPT2Config:GPT2LMHeadModel", GPT2),
    "GPTJ": ("GPTJ", {**GPT2, "rotary_dim": 4}),
    "CodeGen": ("CodeGen", {**GPT2, "rotary_dim": 4}),
    "GPTBigCode": ("GPTBigCode", GPT2),
    "OPT": ("OPT", {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "Falcon": ("Falcon", {**BASE, "ffn_hidden_size": 48}),
    "Bloom": ("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Mamba": ("Mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "T5": ("T5:T5Config:T5ForConditionalGeneration", T5),
    "MT5": ("MT5:MT5Config:MT5ForConditionalGeneration", T5),
    "Bart": ("Bart:BartConfig:BartForConditionalGeneration", SEQ),
    "Pegasus": ("Pegasus:PegasusConfig:PegasusForConditionalGeneration", SEQ),
    "Marian": ("Marian:MarianConfig:MarianMTModel", {**SEQ, "pad_token_id": 0, "decoder_start_token_id": 0}),
    **{
        name: (f"{name}:{name}Config:{name}ForMaskedLM", {**BASE, "max_position_embeddings": 64, "pad_token_id": 0})
        for name in ("Bert", "Roberta", "Electra", "RoFormer", "MegatronBert", "Camembert", "XLMRoberta",
                     "Data2VecText")
    },
    "ModernBert": ("ModernBert:ModernBertConfig:ModernBertForMaskedLM", {**BASE, "pad_token_id": 0}),
    "Albert": ("Albert:AlbertConfig:AlbertForMaskedLM", {**BASE, "embedding_size": 16}),
    "DistilBert": ("DistilBert:DistilBertConfig:DistilBertForMaskedLM",
                   {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "DebertaV2": ("DebertaV2:DebertaV2Config:DebertaV2ForMaskedLM", BASE),
    **{
        name: (f"{name}:{name}Config:{name}ForImageClassification", VISION)
        for name in ("ViT", "DeiT", "Dinov2", "Beit")
    },
}  # fmt: skip


def architecture(name: str) -> tuple[Any, Any]:
    """(model class, config) of a family."""
    import transformers

    spelled, sizes = FAMILIES[name]
    parts = spelled.split(":")
    stem = parts[0]
    config = getattr(transformers, parts[1] if len(parts) > 1 else f"{stem.replace('_', '')}Config")
    model = getattr(transformers, parts[2] if len(parts) > 2 else f"{stem.replace('_', '')}ForCausalLM")
    return model, config(**sizes)
