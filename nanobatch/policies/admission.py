"""Admission: decide whether a waiting request may start when memory is short.

A running request needs more cache with every token, and its length is not known before. The
rules differ in how many future tokens they count, for those that run and for the newcomer.

    tokens so far  [###########]
    on_demand      [###########|#]            one step more; preempt if that was too little
    reserve        [###########|###########]  up to max_tokens; never preempts
    predict        [###########|####]         up to the expected length. What counts is the peak
                                              over time: requests that end early make room

A shared block is counted for each request that shares it, so the estimate is never too low. A
cached block that no table holds is free, but a prefix hit takes it off the free list, so it is
counted as needed.

Always holds: under "reserve" the pool has room for all running requests until they end; a
request that could never fit is refused when it is added (`check_fits`).

Taught in notebooks/03_iteration_level_scheduling.ipynb. Sources: vLLM and TensorRT-LLM's
MAX_UTILIZATION; TGI and TensorRT-LLM's GUARANTEED_NO_EVICT; LightLLM's router and its
past-future scheduler (Gong et al., ASPLOS 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.policies.lengths import LearnedLengths, PredictLength, observe
from nanobatch.request import Request
from nanobatch.utils.arithmetic import cdiv


class Admission(Protocol):
    """A rule. The scheduler calls begin() once, before it admits requests in a step; then, for
    each request in turn, has_room(), and admitted() if the request has joined."""

    def begin(self, running: Sequence[Request]) -> None:
        """A step's admissions begin; those in `running` have their blocks for the step."""
        ...

    def has_room(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether the request may start; `cached` are the blocks of its prefix hit."""
        ...

    def admitted(self, request: Request) -> None:
        """The request was admitted and has its blocks for the step."""
        ...


class _CountsBlocks:
    """Promise each running request some blocks, and keep them free."""

    def __init__(self, allocator: BlockAllocator):
        self.allocator = allocator
        self.num_promised = 0  # blocks that running requests may still take

    def num_blocks(self, request: Request) -> int:
        """The blocks promised to a request, including those it holds."""
        raise NotImplementedError

    def begin(self, running: Sequence[Request]) -> None:
        self.num_promised = 0
        for request in running:
            self.admitted(request)

    def has_room(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether the free blocks cover all promises, with this request's among them."""
        num_taken = num_free_among(cached, self.allocator)
        num_new = self.num_blocks(request) - len(cached) + num_taken
        return self.num_promised + num_new <= self.allocator.num_free_blocks

    def admitted(self, request: Request) -> None:
        self.num_promised += self.num_blocks(request) - len(request.block_table)


class OnDemand(_CountsBlocks):
    """Room for the tokens so far and one more. Looking one step ahead avoids admitting a
    request only to preempt it at once."""

    def num_blocks(self, request: Request) -> int:
        # The last token of a request is only output: it is never computed.
        num_tokens = min(request.num_tokens + 1, request.max_total_tokens - 1)
        return cdiv(num_tokens, self.allocator.block_size)


class Reserve(_CountsBlocks):
    """Room for all tokens that a request may ever have: prompt + max_tokens."""

    def num_blocks(self, request: Request) -> int:
        return cdiv(request.max_total_tokens - 1, self.allocator.block_size)


class Predict:
    """Room for the largest number of tokens that all requests are expected to hold at once.

    Args:
        allocator: the pool.
        predict: the expected output tokens of a request in all; by default learned from
            finished requests.
    """

    def __init__(self, allocator: BlockAllocator, predict: PredictLength | None = None):
        self.allocator = allocator
        self.predict = LearnedLengths() if predict is None else predict
        self._running: list[tuple[float, int]] = []  # (tokens to come, tokens now)

    def begin(self, running: Sequence[Request]) -> None:
        self._running = [self._expected(request) for request in running]

    def has_room(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether the expected peak fits with this request, and its present tokens fit now."""
        peak = expected_peak([*self._running, self._expected(request)])
        # Each request may fill its last block with a single token.
        num_slots = peak + (len(self._running) + 1) * (self.allocator.block_size - 1)
        pool = self.allocator
        is_expected_to_fit = num_slots <= pool.num_blocks * pool.block_size
        # Whatever is expected later, the tokens it has must fit now.
        num_now = cdiv(request.num_tokens, pool.block_size) - len(cached)
        num_now += num_free_among(cached, pool)
        is_alone = not self._running  # there will never be more room than now
        return num_now <= pool.num_free_blocks and (is_expected_to_fit or is_alone)

    def admitted(self, request: Request) -> None:
        self._running.append(self._expected(request))

    def observe(self, request: Request) -> None:
        """Pass a finished request on to the prediction."""
        observe(self.predict, request)

    def _expected(self, request: Request) -> tuple[float, int]:
        num_left = self.predict(request) - len(request.output_token_ids)
        return max(1.0, num_left), request.num_tokens


def expected_peak(requests: Sequence[tuple[float, int]]) -> float:
    """The most tokens held at once if each request grows by a token a step until it ends.

    Args:
        requests: (tokens to come, tokens now) of each.

    The total grows until a request ends, so the peak is just before one of the ends. Before
    a request with n tokens to come ends, it and all that end later have grown by n each.
    """
    peak = held = 0.0
    for i, (num_left, num_now) in enumerate(sorted(requests, reverse=True)):
        held += num_now
        peak = max(peak, held + (i + 1) * num_left)
    return peak


def limits(config: EngineConfig) -> dict[str, int]:
    """{what limits it: most tokens that one request may have, prompt and output}."""
    sizes = {"the pool (num_blocks * block_size)": config.num_blocks * config.block_size}
    if config.max_model_len is not None:
        sizes["max_model_len"] = config.max_model_len
    return sizes


def check_fits(request: Request, config: EngineConfig) -> None:
    """Raise ValueError if the prompt and one token of output can never fit, or if the prompt
    must be computed in one step and exceeds its budget."""
    num_prompt = len(request.prompt_token_ids)
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        raise ValueError(
            f"request {request.request_id!r}: without chunked prefill its {num_prompt} prompt "
            f"tokens need one step, but max_num_batched_tokens is "
            f"{config.max_num_batched_tokens}"
        )
    for limit, size in limits(config).items():
        if num_prompt + 1 > size:
            raise ValueError(
                f"request {request.request_id!r}: a prompt of {num_prompt} tokens and one "
                f"token of output need {num_prompt + 1}, but {limit} is {size}"
            )


def make_admission(
    name: str, allocator: BlockAllocator, predict: PredictLength | None = None
) -> Admission:
    """The rule that EngineConfig.admission names (config.py has checked the name)."""
    if name == "predict":
        return Predict(allocator, predict)
    return {"on_demand": OnDemand, "reserve": Reserve}[name](allocator)


def num_free_among(cached: Sequence[int], allocator: BlockAllocator) -> int:
    """How many blocks of a prefix hit are free: using them takes them off the free list."""
    return sum(allocator.ref_count(block) == 0 for block in cached)
