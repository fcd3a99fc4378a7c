"""From logits to tokens: each request by its own parameters and its own random stream.

    logits -> repetition, frequency, presence penalties -> min_tokens -> temperature
           -> min_p -> top_k -> top_p -> one draw                      (vLLM's order)

What one request asks for is read in sampling_row.py, its distribution is computed in
kernels/distribution.py. The draw is inverse-CDF sampling: one uniform number picks the token at
which the cumulative probability passes it.

Sampling has two parts. begin_sample() only queues work, and its tokens stay on the device,
where the next step may use them. Draws.read() waits for them:

    host     begin_sample  | schedules the next step |  read
    device      model .........  sampling .. copy .. | the next step's model ...

Sampling is not fused with lm_head: to read 64 rows of 128,256 logits takes 10 microseconds of a
large GPU, in a step of milliseconds (`python bench.py kernels` times it).

Always holds (invariants 13 and 15): no row depends on another; one draw for each emitted
token; NaN logits, and whatever is raised for one row, are an error of that row only.

Source: vLLM's V1 sampler, for the order of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from nanobatch.kernels.distribution import Rules, distribution, pick
from nanobatch.kernels.ops import REFERENCE, Ops, largest
from nanobatch.sampling_row import SamplingRow, logit_changes, settings, uniform
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.transfer import HostCopy, to_device

NOT_NUMBERS = "the model's logits are NaN or infinite"
NOTHING_LEFT = "penalties and min_tokens leave no token to sample"
# As many rows are sampled at once as take this much memory for a moment.
MAX_BYTES = 256 * 2**20
BYTES_PER_LOGIT = 64  # the most is 56, for drafts with penalties; without drafts it is 47
FAULTS = (None, NOTHING_LEFT, NOT_NUMBERS)


@dataclass
class Sampled:
    """One row's result: a token and its log-probabilities if asked for, or an error."""

    token_id: int = -1
    logprobs: dict[int, float] | None = None
    error: str | None = None


# Draws a token from each distribution, float64 [R, V], for some rows: int64 [R].
Draw = Callable[[Tensor, Sequence[SamplingRow]], Tensor]


@dataclass(frozen=True)
class Draws:
    """What is sampled, on the device, perhaps not computed yet.

    tokens_S: int64 [S], on the device of the logits; some token where a row ends with an error.
    read: waits for the tokens, and for no later work; returns one Sampled for each row.
    """

    tokens_S: Tensor
    read: Callable[[], list[Sampled]]


def sample(
    logits_SV: Tensor,
    rows: Sequence[SamplingRow],
    ops: Ops = REFERENCE,
    draw: Draw | None = None,
) -> list[Sampled]:
    """Choose one token for each row: begin_sample(), and read at once."""
    return begin_sample(logits_SV, rows, ops, draw).read()


def begin_sample(
    logits_SV: Tensor,
    rows: Sequence[SamplingRow],
    ops: Ops = REFERENCE,
    draw: Draw | None = None,
) -> Draws:
    """Begin to choose one token for each row. Nothing here waits for the device.

    Args:
        logits_SV: float32 [S, V], the model's raw logits; not changed, nor read later on.
        rows: S of them.
        ops: finds the largest logits.
        draw: draws a token from each distribution; None: draw_tokens.
    """
    try:
        return _begin(logits_SV, rows, ops, draw_tokens if draw is None else draw)
    except Exception as error:
        if len(rows) == 1:
            failed = Sampled(error=f"its token cannot be sampled: {error!r}")
            no_token = torch.zeros(1, dtype=torch.int64, device=logits_SV.device)
            return Draws(no_token, lambda: [failed])
    alone = [begin_sample(logits_SV[i : i + 1], [row], ops, draw) for i, row in enumerate(rows)]
    return Draws(
        torch.cat([one.tokens_S for one in alone]),
        lambda: [sampled for one in alone for sampled in one.read()],
    )


def rows_at_once(vocab_size: int) -> int:
    """Rows that begin_sample() computes at once; it takes more in slices of as many."""
    return max(1, MAX_BYTES // (BYTES_PER_LOGIT * vocab_size))


def sampling_bytes(num_rows: int, vocab_size: int) -> int:
    """The most memory that begin_sample() takes for a moment, beside what it is given."""
    return BYTES_PER_LOGIT * vocab_size * min(num_rows, rows_at_once(vocab_size))


def _begin(raw_SV: Tensor, rows: Sequence[SamplingRow], ops: Ops, draw: Draw) -> Draws:
    some = rows_at_once(raw_SV.shape[1])
    slices = [slice(start, start + some) for start in range(0, max(1, len(rows)), some)]
    chosen = [_choose(raw_SV[part], rows[part], ops, draw) for part in slices]
    tokens_S, fault_S = map(torch.cat, zip(*chosen, strict=True))
    asking: dict[int, list[int]] = {}  # rows by the number of log-probabilities they ask for
    for i, row in enumerate(rows):
        if row.params.logprobs is not None:
            asking.setdefault(min(row.params.logprobs, raw_SV.shape[1]), []).append(i)
    found = [
        _logprobs(raw_SV, k, which[part], tokens_S)
        for k, which in asking.items()
        for part in slices[: cdiv(len(which), some)]
    ]
    # All in one transfer. float64 holds token ids and float32 exactly.
    parts = [tokens_S.double(), fault_S.double(), *(part.flatten() for part in found)]
    copy = HostCopy(torch.cat(parts))
    return Draws(tokens_S, lambda: _results(copy, len(rows), asking))


def _results(copy: HostCopy, num_rows: int, asking: dict[int, list[int]]) -> list[Sampled]:
    """What _begin() has put together, once it is here."""
    numbers = iter(copy.tolist())
    tokens = [int(number) for number in islice(numbers, num_rows)]
    faults = [FAULTS[int(number)] for number in islice(numbers, num_rows)]
    logprobs: dict[int, dict[int, float]] = {}
    for k, which in asking.items():
        for i in which:
            token_ids = [int(number) for number in islice(numbers, k + 1)]
            logprobs[i] = dict(zip(token_ids, islice(numbers, k + 1), strict=True))
    return [
        Sampled(token, logprobs.get(i)) if fault is None else Sampled(error=fault)
        for i, (token, fault) in enumerate(zip(tokens, faults, strict=True))
    ]


def _choose(
    raw_SV: Tensor, rows: Sequence[SamplingRow], ops: Ops, draw: Draw
) -> tuple[Tensor, Tensor]:
    """Each row's token, int64 [S], and what is wrong with it, an index into FAULTS [S]."""
    logits_SV = adjust(raw_SV, rows)
    best_S1 = ops.top_ids(logits_SV, 1)
    # NaN and inf survive a maximum; a row of nothing but -inf has the maximum -inf.
    is_number_S1 = raw_SV.amax(dim=-1, keepdim=True).isfinite()
    is_ok_S1 = is_number_S1 & logits_SV.gather(1, best_S1).isfinite()
    tokens_S = best_S1.squeeze(1)
    which = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if which:
        which_R = to_device(which, torch.int64, raw_SV.device)
        # A row with a fault has equal logits here: a number is drawn, and read() ignores it.
        logits_RV = torch.where(is_ok_S1[which_R], logits_SV[which_R], 0.0)
        drawn_rows = [rows[i] for i in which]
        drawn_R = draw(probabilities(logits_RV, drawn_rows), drawn_rows)
        tokens_S = tokens_S.index_copy(0, which_R, drawn_R)
    return tokens_S, ((~is_number_S1).long() + (~is_ok_S1).long()).squeeze(1)


def adjust(raw_SV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply penalties and min_tokens; rows without either keep their logits."""
    vocab_size = raw_SV.shape[1]
    entries = [
        (i, token_id, *change)
        for i, row in enumerate(rows)
        for token_id, change in logit_changes(row, vocab_size).items()
    ]
    if not entries:
        return raw_SV
    # In float64, which holds token ids exactly, and the penalties as they were given.
    where_X, token_X, factor_X, minus_X = to_device(
        list(zip(*entries, strict=True)), torch.float64, raw_SV.device
    )
    index = where_X.long(), token_X.long()
    x_X = raw_SV[index].double()
    x_X = torch.where(x_X > 0, x_X / factor_X, x_X * factor_X) - minus_X
    return raw_SV.index_put(index, x_X.float())


def draw_tokens(probs_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """int64 [R]: a token of each distribution, float64 [R, V], by the row's next number."""
    numbers = [uniform(row) for row in rows]
    return pick(probs_RV, to_device(numbers, torch.float64, probs_RV.device))


def probabilities(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """float64 [R, V]: the distribution of each row's next token, by its temperature and what
    min_p, top_k and top_p keep. No logit is NaN, and each row has one above -inf."""
    vocab_size = logits_RV.shape[1]
    of_rows = [settings(row.params, vocab_size) for row in rows]
    return distribution(logits_RV, Rules.of(of_rows, vocab_size, logits_RV.device))


def _logprobs(raw_SV: Tensor, k: int, which: Sequence[int], tokens_S: Tensor) -> Tensor:
    """float64 [A, 2, k + 1]: token ids and log-probabilities, of some rows' k likeliest tokens
    and of the chosen one."""
    which_A = to_device(which, torch.int64, raw_SV.device)
    logprobs_AV = raw_SV[which_A].log_softmax(dim=-1)
    best_AX, chosen_A1 = largest(logprobs_AV, k)[1], tokens_S[which_A].unsqueeze(1)
    ids_AX = torch.cat((best_AX, chosen_A1), dim=1)
    return torch.stack((ids_AX.double(), logprobs_AV.gather(1, ids_AX).double()), dim=1)
