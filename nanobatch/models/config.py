"""ModelConfig: the sizes of a decoder, and how its family of models differs from Llama.

A frozen dataclass that checks itself when it is built. The defaults are Llama's; the other
families change some of them (models/families.py):

                 norm    norms of a layer   MLP             also
    Llama        RMS     before             SiLU, gated
    Mistral      RMS     before             SiLU, gated     sliding window
    Qwen2, 3     RMS     before             SiLU, gated     bias of q, k, v; norm of q, k heads
    Phi-3        RMS     before             SiLU, gated     RoPE on a part of each head
    OLMo-2       RMS     after              SiLU, gated     norm of all of q, of all of k
    Granite      RMS     before             SiLU, gated     four multipliers
    Gemma 2      RMS+1   before and after   GELU, gated     alternating windows, soft caps
    Gemma 3      RMS+1   before and after   GELU, gated     the same, two RoPE bases, q, k norm
    StarCoder2   Layer   before             GELU            biases in all linear layers
    Mixtral      RMS     before             experts
    Qwen3-MoE    RMS     before             experts         norm of q, k heads

Always holds: every field has its type and is in its range, and the fields agree with each
other. An error names the field, the value and what is allowed.

This module needs no torch: the simulator uses it. Names follow Hugging Face's config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nanobatch.config import EngineConfig
from nanobatch.utils.cache_size import row_bytes
from nanobatch.utils.checks import check_choice, check_float, check_int

# More is a mistake in the file, and would take hours to build, or give no numbers.
MAX_LAYERS = 1000
MAX_HEADS_SIZE = 2**20  # num_heads * head_dim
MAX_EPS = 0.01
MIN_THETA, MAX_THETA = 1.0, 1e15
NORMS = ("rms", "layer")
QK_NORMS = (None, "each_head", "all_heads")
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and options of a decoder.

    Attributes (sizes in elements):
        architecture: the class name in config.json, for example "LlamaForCausalLM".
        vocab_size, hidden_size, intermediate_size, num_layers: as in config.json.
        num_heads, num_kv_heads: query heads H, key/value heads K; H is a multiple of K.
        head_dim: D; not always hidden_size / num_heads.
        max_position_embeddings: the longest context the model was made for, in tokens.
        rms_norm_eps, rope_theta: as in config.json.
        rope_divisors: RoPE's frequencies are divided by these, one for each pair
            (models/rope_scaling.py); None: not scaled.
        rope_attention_factor: cos and sin are multiplied by it.
        short_rope_divisors, short_context: longrope's divisors for contexts of at most
            short_context tokens (see for_context); None: rope_divisors for all contexts.
        local_rope_theta: rope_theta of layers with a sliding window, whose RoPE is not scaled
            (Gemma 3); None: the same RoPE in all layers.
        partial_rotary_dim: RoPE rotates only this many elements of each head (Phi-4-mini);
            None: all. (rotary_dim is the number in either case.)
        qkv_bias, o_bias, mlp_bias: these linear layers have a bias.
        qk_norm: RMSNorm of q and k before RoPE, over "each_head" (Qwen3), or over
            "all_heads" of a token together (OLMo-2); None: no norm.
        sliding_window: how many keys a query sees, its own included; None: all before it.
        full_attention_layers: layers that ignore sliding_window.
        tie_word_embeddings: lm_head shares the embedding's weights.
        eos_token_ids: a text ends at any of these.
        norm: "rms", or "layer": LayerNorm with a bias.
        norm_offset: added to the weight of each norm (Gemma: 1).
        pre_norm, post_norm: norms before and after attention and MLP, at least one of them.
        activation: of the MLP. gated_mlp: multiplied by a second up projection.
        embedding_multiplier: embeddings are multiplied by it (Granite, Gemma).
        residual_multiplier: so are the outputs of attention and MLP (Granite).
        attention_multiplier: so are the scores; None: by head_dim ** -0.5.
        logits_scaling: logits are divided by it (Granite).
        attn_logit_softcapping, final_logit_softcapping: c in c * tanh(x / c), for scores and
            for logits (Gemma 2); None: no cap.
        num_experts: in each layer except dense_layers; 0: no mixture of experts.
        num_experts_per_tok: how many experts the router chooses for a token.
        moe_intermediate_size: of one expert. norm_topk_prob: the chosen experts' weights are
            scaled to sum to 1.
        dense_layers: layers with an ordinary MLP in a mixture of experts.

    Raises:
        ValueError: a field is out of range, or two fields disagree.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_divisors: tuple[float, ...] | None = None
    rope_attention_factor: float = 1.0
    short_rope_divisors: tuple[float, ...] | None = None
    short_context: int | None = None
    local_rope_theta: float | None = None
    partial_rotary_dim: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    sliding_window: int | None = None
    full_attention_layers: frozenset[int] = field(default_factory=frozenset)
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    norm: str = "rms"
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    activation: str = "silu"
    gated_mlp: bool = True
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 1
    norm_topk_prob: bool = True
    dense_layers: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self):
        sizes = (
            "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads "
            "head_dim max_position_embeddings moe_intermediate_size"
        )
        for name in sizes.split():
            largest = MAX_LAYERS if name == "num_layers" else 2**31 - 1
            check_int(name, getattr(self, name), 1, largest)
        check_int("num_experts", self.num_experts, 0, 2**16)
        if self.num_experts:
            check_int("num_experts_per_tok", self.num_experts_per_tok, 1, self.num_experts)
        check_float("rms_norm_eps", self.rms_norm_eps, 0.0, MAX_EPS, open_low=True)
        check_float("rope_theta", self.rope_theta, MIN_THETA, MAX_THETA)
        if self.local_rope_theta is not None:
            check_float("local_rope_theta", self.local_rope_theta, MIN_THETA, MAX_THETA)
        positive = "rope_attention_factor attention_multiplier logits_scaling "
        positive += "attn_logit_softcapping final_logit_softcapping"
        for name in positive.split():
            if getattr(self, name) is not None:
                check_float(name, getattr(self, name), 0.0, open_low=True)
        for name in ("embedding_multiplier", "residual_multiplier", "norm_offset"):
            check_float(name, getattr(self, name), -1e9)
        check_choice("norm", self.norm, NORMS)
        check_choice("qk_norm", self.qk_norm, QK_NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)
        self._check_heads()
        self._check_rope()

    def _check_heads(self):
        heads_left_over = self.num_heads % self.num_kv_heads
        if heads_left_over:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads, "
                f"which is {self.num_kv_heads}"
            )
        if self.num_heads * self.head_dim > MAX_HEADS_SIZE:
            raise ValueError(
                f"num_heads is {self.num_heads} and head_dim {self.head_dim}; their product "
                f"must be <= {MAX_HEADS_SIZE}"
            )
        if self.sliding_window is not None:
            check_int("sliding_window", self.sliding_window, 1)

    def _check_rope(self):
        for name, dim in (
            ("head_dim", self.head_dim),
            ("partial_rotary_dim", self.partial_rotary_dim or 2),
        ):
            if dim % 2 == 1:
                raise ValueError(f"{name} is {dim}; RoPE needs an even number")
        if self.partial_rotary_dim is not None:
            check_int("partial_rotary_dim", self.partial_rotary_dim, 2, self.head_dim)
            if self.qk_norm is not None:
                raise ValueError(
                    f"partial_rotary_dim is {self.partial_rotary_dim}; with qk_norm it must "
                    "be None"
                )
        num_pairs = self.rotary_dim // 2
        for name in ("rope_divisors", "short_rope_divisors"):
            divisors = getattr(self, name)
            if divisors is not None and len(divisors) != num_pairs:
                raise ValueError(
                    f"{name} has {len(divisors)} entries; it must have {num_pairs}, one for "
                    "each pair that RoPE rotates"
                )

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that RoPE rotates."""
        return self.head_dim if self.partial_rotary_dim is None else self.partial_rotary_dim

    def for_context(self, max_model_len: int | None) -> ModelConfig:
        """The config for sequences of at most max_model_len tokens (None: as many as the model
        was made for). A longrope model within its short context gets its short divisors."""
        longest, short = self.max_position_embeddings, self.short_context
        if short is None or (longest if max_model_len is None else max_model_len) > short:
            return self
        return replace(
            self, rope_divisors=self.short_rope_divisors, short_rope_divisors=None,
            max_position_embeddings=min(longest, short), short_context=None,
        )  # fmt: skip

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer in keys; None if the layer has none."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts for an MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def attention_scale(self) -> float:
        """Attention scores are multiplied by this."""
        scale = self.attention_multiplier
        return self.head_dim**-0.5 if scale is None else scale


def settle_max_model_len(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The engine's config with max_model_len set; if it was None, to the model's own.

    Raises:
        ValueError: max_model_len is more than the model was made for.
    """
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len is {max_model_len}; the model was made for at most {longest}"
        )
    return replace(config, max_model_len=max_model_len)


def bytes_per_block(model: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes of keys and values, over all layers, in one block; itemsize is the cache's."""
    rows_per_token = 2 * model.num_layers * model.num_kv_heads
    return block_size * rows_per_token * row_bytes(model.head_dim, itemsize)
