"""Presets: the configs of well-known models, for "dummy:NAME" and for the simulator.

This module needs no torch. Sources: each model's config.json on the Hugging Face hub; "tiny" is
the bundled model's.
"""

from __future__ import annotations

from nanobatch.models.config import ModelConfig

_LLAMA = {"architecture": "LlamaForCausalLM"}
_QWEN3 = {
    "architecture": "Qwen3ForCausalLM", "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "qk_norm": "each_head",
}  # fmt: skip
_LLAMA_3 = _LLAMA | {
    "vocab_size": 128256, "head_dim": 128, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip

# fmt: off
MODEL_PRESETS = {
    "tiny": ModelConfig(
        **_LLAMA, vocab_size=258, hidden_size=192, intermediate_size=256, num_layers=4,
        num_heads=6, num_kv_heads=2, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": ModelConfig(
        **_LLAMA, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30,
        num_heads=9, num_kv_heads=3, head_dim=64, max_position_embeddings=8192,
        rope_theta=100000.0, tie_word_embeddings=True,
    ),
    "llama-2-7b": ModelConfig(
        **_LLAMA, vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32,
        num_heads=32, num_kv_heads=32, head_dim=128, max_position_embeddings=4096,
    ),
    "llama-2-13b": ModelConfig(
        **_LLAMA, vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_layers=40,
        num_heads=40, num_kv_heads=40, head_dim=128, max_position_embeddings=4096,
    ),
    "llama-2-70b": ModelConfig(
        **_LLAMA, vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_layers=80,
        num_heads=64, num_kv_heads=8, head_dim=128, max_position_embeddings=4096,
    ),
    "llama-3.1-8b": ModelConfig(
        **_LLAMA_3, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8,
    ),
    "llama-3.1-70b": ModelConfig(
        **_LLAMA_3, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64,
        num_kv_heads=8,
    ),
    "qwen3-0.6b": ModelConfig(
        **_QWEN3, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, tie_word_embeddings=True,
    ),
    "qwen3-8b": ModelConfig(
        **_QWEN3, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
        num_kv_heads=8,
    ),
}
# fmt: on
