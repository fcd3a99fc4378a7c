"""Where each of the decoder's tensors is in a checkpoint, by Hugging Face's names.

    layers.0.qkv.weight    <-   model.layers.0.self_attn.q_proj.weight
                                model.layers.0.self_attn.k_proj.weight     joined along
                                model.layers.0.self_attn.v_proj.weight     dimension 0

Some families change a weight in the same way each time they use it; here it is changed once,
when it is read. Gemma's norms multiply by 1 + weight. Granite scales the outputs of attention
and MLP. If RoPE rotates only a part of each head (Phi), the rows of q and k are reordered so
that its pairs lie half a head apart, as in the other families.

Always holds: every tensor of the checkpoint is read once (loader.py checks that none is left).

Source: Hugging Face's modeling files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nanobatch.models.config import ModelConfig

Parts = list[tuple[str, tuple[int, ...]]]

# Names that differ between families. {} is the number of an expert.
MLP = {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": "mlp.down_proj"}
MLP_OF = {
    "Phi3ForCausalLM": {"gate_up": ("mlp.gate_up_proj",), "down": "mlp.down_proj"},
    "Starcoder2ForCausalLM": {"gate_up": ("mlp.c_fc",), "down": "mlp.c_proj"},
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QKV_OF = {"Phi3ForCausalLM": ("self_attn.qkv_proj",)}
EXPERTS = {
    "router": "mlp.gate",
    "gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "down": "mlp.experts.{}.down_proj",
}
EXPERTS_OF = {
    "MixtralForCausalLM": {
        "router": "block_sparse_moe.gate",
        "gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "down": "block_sparse_moe.experts.{}.w2",
    }
}


@dataclass
class Source:
    """How one of the decoder's tensors is made from the checkpoint's.

    Attributes:
        parts: (name, shape) of the checkpoint's tensors, joined along dimension 0.
        rows: a new order of the joined rows; None: as they are.
        shape: the result is viewed in this shape; None: as it is.
        scale, offset: the result is x * scale + offset.
        is_exact: kept in float32, whatever the model's dtype.
    """

    parts: Parts
    shape: tuple[int, ...] | None = None
    rows: list[int] | None = None
    scale: float = 1.0
    offset: float = 0.0
    is_exact: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether splitting the tensor gives the parts back."""
        return self == Source(self.parts)


def sources(config: ModelConfig) -> Iterator[tuple[str, Source]]:
    """For each tensor of Decoder(config).state_dict(), its name and how it is made. One layer's
    are listed when they are asked for: a config may ask for more than any checkpoint has."""
    E, V = config.hidden_size, config.vocab_size
    embedding = Source([("model.embed_tokens.weight", (V, E))])
    table = {
        "embed.weight": embedding,
        "lm_head.weight": embedding
        if config.tie_word_embeddings
        else Source([("lm_head.weight", (V, E))]),
    }
    _add_norm(table, config, "norm", "model.norm", E)
    yield from table.items()
    for layer in range(config.num_layers):
        table = {}
        _add_attention(table, config, layer)
        if config.has_experts(layer):
            _add_experts(table, config, layer)
        else:
            _add_mlp(table, config, layer)
        yield from table.items()


def _add_norm(
    table: dict, config: ModelConfig, name: str, theirs: str, size: int, kind: str | None = None
) -> None:
    # 1 + weight differs from 1 by little, which bfloat16 would round away.
    weight = Source([(f"{theirs}.weight", (size,))], offset=config.norm_offset)
    weight.is_exact = config.norm_offset != 0
    table[f"{name}.weight"] = weight
    if (kind or config.norm) == "layer":
        table[f"{name}.bias"] = Source([(f"{theirs}.bias", (size,))])


def _add_linear(
    table: dict,
    name: str,
    parts: dict[str, int],
    in_size: int,
    bias: bool,
    scale: float = 1.0,
    rows: list[int] | None = None,
) -> None:
    weights = [(f"{part}.weight", (size, in_size)) for part, size in parts.items()]
    table[f"{name}.weight"] = Source(weights, scale=scale, rows=rows)
    if bias:
        biases = [(f"{part}.bias", (size,)) for part, size in parts.items()]
        table[f"{name}.bias"] = Source(biases, scale=scale, rows=rows)


def _add_attention(table: dict, config: ModelConfig, layer: int) -> None:
    E, D, H, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    names = QKV_OF.get(config.architecture, QKV)
    sizes = (H * D, K * D, K * D) if len(names) == 3 else ((H + 2 * K) * D,)
    qkv = {f"{theirs}.{name}": size for name, size in zip(names, sizes, strict=True)}
    _add_linear(table, f"{ours}.qkv", qkv, E, config.qkv_bias, rows=_rope_order(config))
    out, scale = {f"{theirs}.self_attn.o_proj": E}, config.residual_multiplier
    _add_linear(table, f"{ours}.o", out, H * D, config.o_bias, scale)
    norms = {}
    if config.pre_norm:
        mlp_norm = "pre_feedforward" if config.post_norm else "post_attention"
        norms |= {"input_norm": "input", "mlp_norm": mlp_norm}
    if config.post_norm:
        norms |= {"attention_post_norm": "post_attention", "mlp_post_norm": "post_feedforward"}
    for name, place in norms.items():
        _add_norm(table, config, f"{ours}.{name}", f"{theirs}.{place}_layernorm", E)
    if config.qk_norm is not None:
        is_each = config.qk_norm == "each_head"
        for name, num_heads in (("q_norm", H), ("k_norm", K)):
            size = D if is_each else num_heads * D
            where = f"{theirs}.self_attn.{name}"
            _add_norm(table, config, f"{ours}.{name}", where, size, kind="rms")


def _add_mlp(table: dict, config: ModelConfig, layer: int) -> None:
    E, F = config.hidden_size, config.intermediate_size
    ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}"
    names = MLP_OF.get(config.architecture, MLP)
    size = (2 if config.gated_mlp else 1) * F // len(names["gate_up"])
    gate_up = {f"{theirs}.{name}": size for name in names["gate_up"]}
    _add_linear(table, f"{ours}.gate_up", gate_up, E, config.mlp_bias)
    down, scale = {f"{theirs}.{names['down']}": E}, config.residual_multiplier
    _add_linear(table, f"{ours}.down", down, F, config.mlp_bias, scale)


def _add_experts(table: dict, config: ModelConfig, layer: int) -> None:
    E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
    ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}"
    names = EXPERTS_OF.get(config.architecture, EXPERTS)
    gate_up, down = names["gate_up"], names["down"]
    gate_ups = [
        (f"{theirs}.{name.format(x)}.weight", (F, E)) for x in range(X) for name in gate_up
    ]
    downs = [(f"{theirs}.{down.format(x)}.weight", (E, F)) for x in range(X)]
    router = [(f"{theirs}.{names['router']}.weight", (X, E))]
    table[f"{ours}.router.weight"] = Source(router)
    table[f"{ours}.gate_up_XFE"] = Source(gate_ups, shape=(X, 2 * F, E))
    table[f"{ours}.down_XEF"] = Source(downs, shape=(X, E, F))


def _rope_order(config: ModelConfig) -> list[int] | None:
    """The order of the rows of q, k and v; None: as they are.

    With heads of 8 elements of which RoPE rotates the first 4, in pairs (0, 2) and (1, 3):

        in the checkpoint    0 1 2 3 4 5 6 7
        here                 0 1 4 5 2 3 6 7

    Now each pair lies half a head apart, and the pairs (4, 6) and (5, 7) are rotated by angle
    0. The scores stay the same: a dot product does not depend on the order of elements.
    """
    if config.partial_rotary_dim is None:
        return None
    D, H, K = config.head_dim, config.num_heads, config.num_kv_heads
    half = config.partial_rotary_dim // 2
    rest = list(range(2 * half, D))
    middle = len(rest) // 2
    head = [*range(half), *rest[:middle], *range(half, 2 * half), *rest[middle:]]
    q_and_k = [h * D + i for h in range(H + K) for i in head]
    return q_and_k + list(range((H + K) * D, (H + 2 * K) * D))
