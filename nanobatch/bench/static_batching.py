"""The classical padded batch: what serving looked like before continuous batching.

A batch is gathered once, its prompts are padded on the left to the longest, and it runs until
the last of its requests has finished. No request joins, and finished rows are still computed,
then discarded:

    row 0   . . p p p | o o E x x x x x     . padding    p prompt    o output
    row 1   p p p p p | o o o o o o o E     E its end    x computed, then discarded
    row 2   . p p p p | o E x x x x x x

Always holds: the tokens of a row are those it would get alone; the batch's shape is fixed.

Taught in notebooks/02_static_batching.ipynb. Source: what `generate` of Hugging Face
transformers does with a batch; the baseline of Orca (Yu et al., OSDI 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from nanobatch.attention import masked_attention
from nanobatch.attention_masks import padded_mask
from nanobatch.kernels.ops import AttentionArgs, apply_rope
from nanobatch.models.decoder import Decoder
from nanobatch.utils.extensions import load_extension


class PaddedAttend:
    """A dense cache with a row for each request; the model calls it in each layer.

    Args:
        model: gives the shape of the cache.
        prompt_lens: tokens of each prompt.
        max_len: positions of a row, padding included.
        cache_dtype: that of the paged cache to agree with. If it has 8 bits, keys and values
            are rounded as there (quantized_cache.py), and kept in the model's format.
    """

    def __init__(
        self,
        model: Decoder,
        prompt_lens: Sequence[int],
        max_len: int,
        cache_dtype: torch.dtype | None = None,
    ):
        config, weight = model.config, model.embed.weight
        shape = (len(prompt_lens), config.num_kv_heads, max_len, config.head_dim)
        self.caches = [
            (weight.new_empty(shape), weight.new_empty(shape)) for _ in range(config.num_layers)
        ]
        # Row s starts with this many pads; its real positions count from there.
        self.num_pads_S = max(prompt_lens) - torch.tensor(prompt_lens, device=weight.device)
        self.max_len, self._rounded = max_len, _rounding(cache_dtype)
        self.start = self.end = 0  # columns that this step writes
        self._masks: dict[int | None, Tensor] = {}  # by window, for all columns

    def advance(self, num_tokens: int) -> Tensor:
        """Begin a step of num_tokens columns; returns positions, int64 [S * num_tokens]."""
        self.start, self.end = self.end, self.end + num_tokens
        columns_T = torch.arange(self.start, self.end, device=self.num_pads_S.device)
        return (columns_T - self.num_pads_S.unsqueeze(1)).clamp(min=0).flatten()

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        args: AttentionArgs,
    ) -> Tensor:
        rows = (len(self.num_pads_S), -1)
        q_THD, k_TKD = apply_rope(q_THD, cos_TR, sin_TR), apply_rope(k_TKD, cos_TR, sin_TR)
        if self._rounded is not None:
            k_TKD, v_TKD = self._rounded(k_TKD), self._rounded(v_TKD)
        k_SKLD, v_SKLD = self.caches[layer]
        k_SKLD[:, :, self.start : self.end] = k_TKD.unflatten(0, rows).transpose(1, 2)
        v_SKLD[:, :, self.start : self.end] = v_TKD.unflatten(0, rows).transpose(1, 2)
        out_SHTD = masked_attention(
            q_THD.unflatten(0, rows).transpose(1, 2),
            k_SKLD[:, :, : self.end],
            v_SKLD[:, :, : self.end],
            self._mask(args.sliding_window),
            scale=args.scale,
            softcap=args.softcap,
        )
        return out_SHTD.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            seq_lens = (self.max_len - self.num_pads_S).tolist()
            mask = padded_mask(seq_lens, self.max_len, window)
            self._masks[window] = mask.to(self.num_pads_S.device)
        return self._masks[window][:, :, self.start : self.end, : self.end]


def _rounding(cache_dtype: torch.dtype | None) -> Callable[[Tensor], Tensor] | None:
    """What a cache in 8 bits makes of keys or values [T, K, D]; None: it has more bits."""
    if cache_dtype is None or cache_dtype.itemsize > 1:
        return None
    cache = load_extension("quantized_cache", f"cache_dtype is {cache_dtype}")

    def rounded(x_TKD: Tensor) -> Tensor:
        return cache.dequantize(*cache.quantize(x_TKD, cache_dtype), x_TKD.dtype)

    return rounded


@torch.inference_mode()
def run_static_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    stop_token_ids: Collection[int] = (),
    cache_dtype: torch.dtype | None = None,
) -> Iterator[dict[int, int]]:
    """Run one static batch greedily; yields after each step.

    Args:
        model: the decoder.
        prompts: token ids, at least one each.
        max_tokens: most output tokens of each.
        stop_token_ids: tokens that end a row; a stop token counts as output.
        cache_dtype: see PaddedAttend.

    Yields:
        {row: token} for the rows that were still alive in this step. The other rows were
        computed too: a step costs len(prompts) rows whatever it yields.
    """
    prompt_lens = [len(p) for p in prompts]
    longest = max(prompt_lens)
    attend = PaddedAttend(model, prompt_lens, longest + max(max_tokens) - 1, cache_dtype)
    padded = [[0] * (longest - len(p)) + list(p) for p in prompts]
    input_ids_ST = torch.tensor(padded, device=model.embed.weight.device)
    alive = dict(enumerate(max_tokens))  # row -> tokens it may still emit
    while alive:
        positions_T = attend.advance(input_ids_ST.shape[1])
        hidden_TE = model(input_ids_ST.flatten(), positions_T, attend)
        last_SE = hidden_TE.unflatten(0, input_ids_ST.shape)[:, -1]
        next_S = model.logits(last_SE).argmax(dim=-1)
        next_tokens = next_S.tolist()
        emitted = {row: next_tokens[row] for row in alive}
        yield emitted
        for row, token_id in emitted.items():
            alive[row] -= 1
            if alive[row] == 0 or token_id in stop_token_ids:
                del alive[row]
        input_ids_ST = next_S.unsqueeze(1)
