"""Configurations of the example scripts' models, as plain data."""

from __future__ import annotations

from typing import Any, NamedTuple


class Config(NamedTuple):
    """Arguments of `AutoConfig.for_model(kind, **settings)`."""

    kind: str
    """transformers' `model_type`."""
    architecture: str
    """The model class."""
    settings: dict[str, Any]


# The tiny ones have no dropout: with it, so few steps show mostly noise, and runs would differ between world sizes.
_GPT2_TINY = {
    "vocab_size": 4096, "n_positions": 256, "n_embd": 192, "n_layer": 4, "n_head": 6, "resid_pdrop": 0, "embd_pdrop": 0,
    "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_BERT_TINY = {
    "vocab_size": 4096, "max_position_embeddings": 256, "hidden_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 6, "intermediate_size": 768, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip
_LLAMA_TINY = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_MOE_TINY = {**_LLAMA_TINY, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_T5_TINY = {
    "vocab_size": 4096, "d_model": 96, "d_kv": 24, "d_ff": 192, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
}  # fmt: skip
_T5_220M = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
_SPEECH_TINY = {
    "vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 100,
    "max_target_positions": 32, "begin_suppress_tokens": None, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
_WHISPER_74M = {
    "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
}  # fmt: skip
# Brown et al., "Language Models are Few-Shot Learners" (arXiv 2005.14165), table 2.1: layers, width, heads. Where width is no
# multiple of the table's heads (1.3B, 13B), the nearest that is.
GPT3 = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 16), "1.3b": (24, 2048, 16), "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32), "13b": (40, 5120, 40), "175b": (96, 12288, 96),
}  # fmt: skip

CONFIGS = {
    "gpt2-tiny": Config("gpt2", "GPT2LMHeadModel", _GPT2_TINY),
    "gpt2-124m": Config("gpt2", "GPT2LMHeadModel", {}),
    "bert-tiny": Config("bert", "BertForMaskedLM", _BERT_TINY),
    "bert-110m": Config("bert", "BertForMaskedLM", {}),
    "llama-tiny": Config("llama", "LlamaForCausalLM", _LLAMA_TINY),
    "qwen3-tiny": Config("qwen3", "Qwen3ForCausalLM", {**_LLAMA_TINY, "head_dim": 32, "tie_word_embeddings": True}),
    "moe-tiny": Config("mixtral", "MixtralForCausalLM", _MOE_TINY),
    "t5-tiny": Config("t5", "T5ForConditionalGeneration", _T5_TINY),
    "t5-220m": Config("t5", "T5ForConditionalGeneration", _T5_220M),
    "speech-tiny": Config("whisper", "WhisperForConditionalGeneration", _SPEECH_TINY),
    "whisper-74m": Config("whisper", "WhisperForConditionalGeneration", _WHISPER_74M),
    **{
        f"gpt3-{size}": Config(
            "gpt2", "GPT2LMHeadModel", {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": 2048}
        )
        for size, (layers, width, heads) in GPT3.items()
    },
}
"""Configurations by lower-case name."""
