"""The least work that a step can be: bytes to move, operations to compute.

A step reads all weights once, reads every key and value that its queries see once, writes the
new ones, and multiplies. However it is programmed, it takes at least

    seconds = max(bytes / bandwidth, operations / rate)            the roofline

    decode, batch 1     2 operations for each weight read: the bandwidth decides
    decode, batch 64    128 for each weight, but 8 for each number of the cache (groups of 4)
    prefill             2 x tokens for each weight: the matrix rate decides

What is left out is small: norms, biases, activations (which a fused engine keeps on the chip),
embeddings (a row for each token). A mixture of experts does the least work when all tokens
choose the same experts. Plain arithmetic, without torch.

Taught in notebooks/01_why_decoding_is_slow.ipynb. Source: the roofline model (Williams,
Waterman and Patterson, CACM 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nanobatch.models.config import ModelConfig
from nanobatch.utils.arithmetic import keys_seen
from nanobatch.utils.cache_size import row_bytes


class Work(NamedTuple):
    """bytes: to and from memory. flops: floating-point operations, a multiply-add is two."""

    bytes: int
    flops: int

    def seconds(self, bandwidth: float, flop_rate: float) -> float:
        """The least time, on a machine of that bandwidth (bytes/s) and rate (FLOP/s)."""
        return max(self.bytes / bandwidth, self.flops / flop_rate)


def weights_of_layers(model: ModelConfig) -> int:
    """The weights of all layers' matrix products; of experts, those that one token uses."""
    E, D = model.hidden_size, model.head_dim
    qkv = E * (model.num_heads + 2 * model.num_kv_heads) * D
    o = model.num_heads * D * E
    mlps = sum(_mlp_weights(model, layer) for layer in range(model.num_layers))
    return model.num_layers * (qkv + o) + mlps


def _mlp_weights(model: ModelConfig, layer: int) -> int:
    """gate, up and down; or the router, and the experts that one token uses."""
    E = model.hidden_size
    if model.has_experts(layer):
        num_chosen = model.num_experts_per_tok
        return E * model.num_experts + num_chosen * 3 * E * model.moe_intermediate_size
    return (3 if model.gated_mlp else 2) * E * model.intermediate_size


def num_weights(model: ModelConfig) -> int:
    """The weights of the layers' products, of the embedding and of lm_head."""
    num_tables = 1 if model.tie_word_embeddings else 2
    return weights_of_layers(model) + num_tables * model.vocab_size * model.hidden_size


def step_work(
    model: ModelConfig,
    rows: Iterable[tuple[int, int]],
    num_logits: int,
    itemsize: int,
    kv_itemsize: int | None = None,
) -> Work:
    """The least work of one step.

    Args:
        model: the decoder's shape.
        rows: for each sequence (tokens in the cache before the step, tokens to compute).
        num_logits: rows that sample, and so go through lm_head.
        itemsize: bytes of one number of the weights.
        kv_itemsize: bytes of one number of the cache; None: itemsize.
    """
    rows = list(rows)
    num_tokens = sum(n for _, n in rows)
    num_keys = num_scores = 0
    for layer in range(model.num_layers):
        seen = [keys_seen(start, n, model.window(layer)) for start, n in rows]
        num_keys += sum(keys for keys, _ in seen)
        num_scores += sum(scores for _, scores in seen)
    num_written = num_tokens * model.num_layers
    lm_head = model.vocab_size * model.hidden_size if num_logits else 0
    row = row_bytes(model.head_dim, itemsize if kv_itemsize is None else kv_itemsize)
    num_bytes = (weights_of_layers(model) + lm_head) * itemsize
    num_bytes += (num_keys + num_written) * 2 * model.num_kv_heads * row
    num_multiplies = (
        num_tokens * weights_of_layers(model)
        + num_logits * lm_head
        + num_scores * 2 * model.num_heads * model.head_dim  # query x key, weight x value
    )
    return Work(num_bytes, 2 * num_multiplies)
