"""From logits to tokens: each request by its own parameters and its own random stream.

    logits -> repetition, frequency, presence penalties -> min_tokens -> temperature
           -> min_p -> top_k -> top_p -> one draw                      (vLLM's order)

The draw is inverse-CDF sampling: one uniform number picks the token at which the cumulative
probability passes it. The number is a hash of (seed, number of output tokens), so a request's
stream needs no state: it is the same alone, in a crowd, and after a preemption.

Sampling is not fused with lm_head: to read 64 rows of 128,256 logits takes 10 microseconds of a
large GPU, in a step of milliseconds (`python bench.py kernels` times it).

Always holds (invariants 13 and 15): no row depends on another; one draw for each emitted
token; NaN logits, and whatever is raised for one row, are an error of that row only.

Sources: nucleus sampling (Holtzman et al., 2019), min-p (Nguyen et al., 2024); counter-based
random numbers (Salmon et al., SC 2011).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanobatch.kernels.ops import REFERENCE, Ops

if TYPE_CHECKING:
    from nanobatch.request import Request, SamplingParams

NOT_NUMBERS = "the model's logits are NaN or infinite"
NOTHING_LEFT = "penalties and min_tokens leave no token to sample"


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler needs to know about the request of one row of logits.

    params: its SamplingParams. prompt_token_ids, output_token_ids: its tokens so far.
    stop_token_ids: not sampled before min_tokens. seed: of its random stream.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    seed: int


def sampling_row(request: Request) -> SamplingRow:
    """A request's row, for its next token."""
    tokens = (request.prompt_token_ids, request.output_token_ids, request.stop_token_ids)
    return SamplingRow(request.params, *tokens, request.seed)


@dataclass
class Sampled:
    """One row's result: a token and its log-probabilities if asked for, or an error."""

    token_id: int = -1
    logprobs: dict[int, float] | None = None
    error: str | None = None


def sample(
    logits_SV: Tensor,
    rows: Sequence[SamplingRow],
    ops: Ops = REFERENCE,
    draw: Callable[[Tensor, Sequence[SamplingRow]], list[int]] | None = None,
) -> list[Sampled]:
    """Choose one token for each row.

    Args:
        logits_SV: float32 [S, V], the model's raw logits; not changed.
        rows: S of them.
        ops: finds the largest logits.
        draw: draws a token from each distribution; None: draw_tokens.
    """
    try:
        return _sample(logits_SV, rows, ops, draw_tokens if draw is None else draw)
    except Exception as error:
        if len(rows) == 1:
            return [Sampled(error=f"its token cannot be sampled: {error!r}")]
    return [sample(logits_SV[i : i + 1], [row], ops, draw)[0] for i, row in enumerate(rows)]


def _sample(raw_SV: Tensor, rows: Sequence[SamplingRow], ops: Ops, draw) -> list[Sampled]:
    logits_SV = adjust(raw_SV, rows)
    best_S1 = ops.top_ids(logits_SV, 1)
    # NaN and inf survive a maximum; a row of nothing but -inf has the maximum -inf.
    is_number_S = raw_SV.amax(dim=-1).isfinite()
    is_ok_S = is_number_S & logits_SV.gather(1, best_S1).squeeze(1).isfinite()
    # In one transfer, since reading a GPU's numbers waits for all of its work.
    tokens, is_number, is_ok = torch.stack(
        (best_S1.squeeze(1), is_number_S.long(), is_ok_S.long())
    ).tolist()
    random_rows = [i for i, row in enumerate(rows) if is_ok[i] and row.params.temperature > 0]
    if random_rows:
        drawn_rows = [rows[i] for i in random_rows]
        drawn = draw(probabilities(logits_SV[random_rows], drawn_rows), drawn_rows)
        for i, token_id in zip(random_rows, drawn, strict=True):
            tokens[i] = token_id
    return [
        Sampled(tokens[i], _logprobs(raw_SV[i], rows[i].params.logprobs, tokens[i]))
        if is_ok[i]
        else Sampled(error=NOT_NUMBERS if not is_number[i] else NOTHING_LEFT)
        for i in range(len(rows))
    ]


def adjust(raw_SV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply penalties and min_tokens; rows without either keep their logits."""
    logits_SV = raw_SV
    for i, row in enumerate(rows):
        params, num_output = row.params, len(row.output_token_ids)
        has_penalty = params.repetition_penalty != 1 or (
            num_output > 0 and (params.frequency_penalty != 0 or params.presence_penalty != 0)
        )
        holds_back = num_output < params.min_tokens and len(row.stop_token_ids) > 0
        if not has_penalty and not holds_back:
            continue
        if logits_SV is raw_SV:
            logits_SV = raw_SV.clone()
        if has_penalty:
            _penalize(logits_SV[i], row)
        if holds_back:
            in_vocab = [t for t in row.stop_token_ids if t < logits_SV.shape[1]]
            stop = torch.tensor(in_vocab, dtype=torch.int64, device=logits_SV.device)
            logits_SV[i].index_fill_(0, stop, float("-inf"))
    return logits_SV


def _penalize(logits_V: Tensor, row: SamplingRow) -> None:
    """In place. Repetition counts prompt and output, the other two the output only."""
    params, device = row.params, logits_V.device
    seen = torch.tensor(sorted({*row.prompt_token_ids, *row.output_token_ids}), device=device)
    x = logits_V[seen]
    penalty = float(params.repetition_penalty)  # torch takes no int of more than 64 bits
    logits_V[seen] = torch.where(x > 0, x / penalty, x * penalty)
    counts = Counter(row.output_token_ids)
    if counts:
        tokens = torch.tensor(list(counts), device=device)
        count = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits_V[tokens] -= params.frequency_penalty * count + params.presence_penalty


def draw_tokens(probs_RV: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token of each distribution, float64 [R, V], by the row's next random number."""
    return pick(probs_RV, [uniform(row) for row in rows])


def probabilities(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """float64 [R, V]: the distribution of each row's next token, by its temperature and what
    min_p, top_k and top_p keep."""
    # In float64, and the maximum subtracted before the division: no temperature overflows.
    logits_RV = logits_RV.double() - logits_RV.amax(dim=-1, keepdim=True)

    def column(name: str) -> Tensor:
        return logits_RV.new_tensor([[float(getattr(row.params, name))] for row in rows])

    probs_RV = (logits_RV / column("temperature")).softmax(dim=-1)
    probs_RV[probs_RV < column("min_p") * probs_RV.amax(dim=-1, keepdim=True)] = 0
    vocab_size = probs_RV.shape[1]
    asked = (row.params.top_k for row in rows)
    top_k = [k if 0 < k < vocab_size else vocab_size for k in asked]
    cut = [r for r, row in enumerate(rows) if top_k[r] < vocab_size or row.params.top_p < 1]
    if cut:
        top_k_X1 = torch.tensor(top_k, device=probs_RV.device)[cut].unsqueeze(1)
        probs_RV[cut] = _keep_top(probs_RV[cut], top_k_X1, column("top_p")[cut])
    return probs_RV / probs_RV.sum(dim=-1, keepdim=True)


def pick(probs_RV: Tensor, numbers: Sequence[float]) -> list[int]:
    """The token of each row at which the cumulative probability passes the row's number in
    [0, 1). A row of probs_RV may have any sum: the number is a share of it."""
    cumulative_RV = probs_RV.cumsum(dim=-1)
    # A number has 53 bits, so it is at most 1 - 2**-53, and its share rounds to below the sum.
    draw_R1 = probs_RV.new_tensor([[number] for number in numbers]) * cumulative_RV[:, -1:]
    # right=True: the first token whose cumulative probability is above the draw; a token of
    # probability 0 adds nothing and is never the first.
    return torch.searchsorted(cumulative_RV, draw_R1, right=True).flatten().tolist()


def _keep_top(probs_XV: Tensor, top_k_X1: Tensor, top_p_X1: Tensor) -> Tensor:
    """Zero all but a row's top_k likeliest, and of those all past mass top_p."""
    sorted_XV, order_XV = probs_XV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_XV.shape[1], device=probs_XV.device)
    sorted_XV.masked_fill_(rank_V >= top_k_X1, 0)
    mass_XV = sorted_XV.cumsum(dim=-1)  # of what top_k left
    is_past_XV = (mass_XV - sorted_XV >= top_p_X1 * mass_XV[:, -1:]) & (top_p_X1 < 1)
    is_past_XV[:, 0] = False  # the likeliest token always stays
    sorted_XV.masked_fill_(is_past_XV, 0)
    return torch.zeros_like(probs_XV).scatter_(1, order_XV, sorted_XV)


def uniform(row: SamplingRow, use: str = "") -> float:
    """The row's next random number in [0, 1): 53 bits of a hash of its seed and position.

    use: names the draw, where one token needs several.
    """
    text = f"{row.seed}:{len(row.output_token_ids)}{use}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11
    return bits / 2**53


def _logprobs(raw_V: Tensor, k: int | None, token_id: int) -> dict[int, float] | None:
    """{token: log-probability} of the k likeliest tokens and of the chosen one."""
    if k is None:
        return None
    logprobs_V = raw_V.log_softmax(dim=-1)
    best = logprobs_V.topk(min(k, len(logprobs_V)))
    chosen = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return chosen | {token_id: float(logprobs_V[token_id])}
