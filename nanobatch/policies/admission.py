"""Who may enter when memory is short.

A request's cache grows by a token a step until it ends, and nobody knows when. The three rules
differ in how much of that they count beforehand, for those that run and for who wants in.
(What can never fit is refused when it is added: `check_fits`.)

    tokens so far  [###########]
    on_demand      [###########|#]            one step more; preempt when that was too little
    reserve        [###########|###########]  to max_tokens; nobody is ever preempted
    predict        [###########|####]         to the length expected; a peak, not a sum: who
                                              ends early makes room for who goes on

Blocks that a request shares are counted for each that holds them, which is safe; cached blocks
that lie in the free list count as taken by whoever hits them.

Always holds: under "reserve" the pool has room for all that run, to their ends.

Taught in notebooks/03_iteration_level_scheduling.ipynb. Sources: vLLM and TensorRT-LLM's
MAX_UTILIZATION; TGI and TensorRT-LLM's GUARANTEED_NO_EVICT; LightLLM's router and its
past-future scheduler (Gong et al., ASPLOS 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.policies.ordering import LearnedLengths, PredictLength, observe
from nanobatch.request import Request, RequestStatus
from nanobatch.utils.arithmetic import cdiv


class Admission(Protocol):
    """A rule, asked for one request after another while a step is planned."""

    def begin(self, running: Sequence[Request]) -> None:
        """A step's admissions begin; these run, with their blocks for the step."""
        ...

    def has_room(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether the request may enter; `cached` are the blocks of its prefix hit."""
        ...

    def admitted(self, request: Request) -> None:
        """It did, and has its blocks for the step."""
        ...


class _CountsBlocks:
    """Counts, for each request, blocks that it may yet want, and keeps them free."""

    def __init__(self, allocator: BlockAllocator):
        self.allocator = allocator
        self.num_promised = 0  # blocks that those who run may yet want

    def num_blocks(self, request: Request) -> int:
        """The blocks that are counted for a request, those it holds included."""
        raise NotImplementedError

    def begin(self, running: Sequence[Request]) -> None:
        self.num_promised = 0
        for request in running:
            self.admitted(request)

    def has_room(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether all that is counted is free."""
        num_taken = num_free_among(cached, self.allocator)
        num_new = self.num_blocks(request) - len(cached) + num_taken
        return self.num_promised + num_new <= self.allocator.num_free_blocks

    def admitted(self, request: Request) -> None:
        self.num_promised += self.num_blocks(request) - len(request.block_table)


class OnDemand(_CountsBlocks):
    """Room for all tokens that a request has so far, and one more: it looks one step ahead,
    so that nobody is admitted only to be preempted at once."""

    def num_blocks(self, request: Request) -> int:
        # The very last token of a request is never computed.
        num_tokens = min(request.num_tokens + 1, request.max_total_tokens - 1)
        return cdiv(num_tokens, self.allocator.block_size)


class Reserve(_CountsBlocks):
    """Room to the end, however long that is: prompt + max_tokens."""

    def num_blocks(self, request: Request) -> int:
        return cdiv(request.max_total_tokens - 1, self.allocator.block_size)


class Predict:
    """Room for the largest that the cache is expected to get.

    Args:
        allocator: the pool.
        predict: from a request to the output tokens expected of it in all; by default
            learned from those that finish.
    """

    def __init__(self, allocator: BlockAllocator, predict: PredictLength | None = None):
        self.allocator = allocator
        self.predict = LearnedLengths() if predict is None else predict
        self._running: list[tuple[float, int]] = []  # (tokens to come, tokens now)

    def begin(self, running: Sequence[Request]) -> None:
        self._running = [self._expected(request) for request in running]

    def has_room(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether the expected peak fits, with the request in it, and its tokens fit now."""
        peak = expected_peak([*self._running, self._expected(request)])
        # Each may fill its last block with a single token.
        num_slots = peak + (len(self._running) + 1) * (self.allocator.block_size - 1)
        pool = self.allocator
        is_expected_to_fit = num_slots <= pool.num_blocks * pool.block_size
        # Whatever is expected, what it has now must fit now.
        num_now = cdiv(request.num_tokens, pool.block_size) - len(cached)
        num_now += num_free_among(cached, pool)
        is_alone = not self._running  # and then nothing will ever be better
        return num_now <= pool.num_free_blocks and (is_expected_to_fit or is_alone)

    def admitted(self, request: Request) -> None:
        self._running.append(self._expected(request))

    def observe(self, request: Request) -> None:
        """Let the prediction learn, if it does."""
        observe(self.predict, request)

    def _expected(self, request: Request) -> tuple[float, int]:
        num_left = self.predict(request) - len(request.output_token_ids)
        return max(1.0, num_left), request.num_tokens


def expected_peak(requests: Sequence[tuple[float, int]]) -> float:
    """The most tokens held at once, if all go on together and each ends when it is expected to.

    Args:
        requests: of each (tokens to come, tokens now).

    The total grows until somebody ends; so the peak is at one of the ends. When the i-th
    from the last ends, it and those after it have all grown by what it had to come.
    """
    peak = held = 0.0
    for i, (num_left, num_now) in enumerate(sorted(requests, reverse=True)):
        held += num_now
        peak = max(peak, held + (i + 1) * num_left)
    return peak


def limits(config: EngineConfig) -> dict[str, int]:
    """What prompt + output of one request must fit into, by name, in tokens."""
    sizes = {"the pool (num_blocks * block_size)": config.num_blocks * config.block_size}
    if config.max_model_len is not None:
        sizes["max_model_len"] = config.max_model_len
    if not config.enable_chunked_prefill:
        # After a preemption, prompt and output must be recomputed in one step.
        sizes["max_num_batched_tokens (chunked prefill is off)"] = config.max_num_batched_tokens
    return sizes


def check_fits(request: Request, config: EngineConfig) -> None:
    """Raise ValueError if the prompt and one token of output can never fit."""
    num_prompt = len(request.prompt_token_ids)
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
    """How many blocks of a prefix hit nobody holds: the hit takes them off the free list."""
    return sum(allocator.ref_count(block) == 0 for block in cached)


def waits_for_leader(request: Request, allocator: BlockAllocator) -> bool:
    """Whether waiting a little turns the prompt of one of n siblings into a prefix hit."""
    leader = request.leader
    if leader is None or not allocator.enable_prefix_caching:
        return False
    num_full_blocks = (len(leader.prompt_token_ids) - 1) // allocator.block_size
    num_shared = num_full_blocks * allocator.block_size
    is_running = leader.status is RequestStatus.RUNNING
    return is_running and leader.num_computed_tokens < num_shared
