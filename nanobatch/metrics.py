"""Measurements: times of requests, percentiles of a workload, utilization of the engine.

Names and definitions are those of `vllm bench serve`:

    TTFT      time to first token: from arrival to the first token
    TPOT      time per output token: (last token - first token) / (output tokens - 1)
    ITL       inter-token latency: each time between two tokens of a request
    E2EL      end-to-end latency: from arrival to the last token
    goodput   requests a second that meet limits on these

TPOT is a mean over a request, ITL is not: a decode that waits for another request's long prompt
shows in the P99 of ITL, and hardly in TPOT.

Taught in notebooks/08_measuring_honestly.ipynb.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.plan import SchedulerOutput
from nanobatch.request import RequestMetrics

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100), interpolated linearly as numpy does; 0 if empty."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


class InterTokenLatencies:
    """Collects the times between tokens in buckets 1% wide, so memory does not grow."""

    def __init__(self):
        self._last: dict[str, float] = {}  # time of each request's last token
        self._buckets: Counter[int] = Counter()
        self._count, self._sum = 0, 0.0

    def step(self, request_ids: Iterable[str], now: float) -> None:
        """Each of these requests got a token now (seconds)."""
        request_ids = list(request_ids)
        # Most had their last token in the step before, so there are few different times.
        for last, count in Counter(map(self._last.get, request_ids)).items():
            if last is not None:
                bucket = round(math.log(max(now - last, 1e-9)) / math.log(1.01))
                self._buckets[bucket] += count
                self._count += count
                self._sum += count * (now - last)
        self._last.update(dict.fromkeys(request_ids, now))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._last.pop(request_id, None)

    def take_in(self, other: InterTokenLatencies) -> None:
        """Add the times that another object has collected."""
        self._buckets.update(other._buckets)
        self._count += other._count
        self._sum += other._sum

    @property
    def mean(self) -> float:
        """Seconds; 0 if there are none."""
        return self._sum / self._count if self._count else 0.0

    def percentile(self, p: float) -> float:
        """Seconds, to half a percent; 0 if there are none."""
        rank, seen = p / 100 * self._count, 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return 1.01**bucket
        return 0.0


def duration_of(metrics: Iterable[RequestMetrics]) -> float:
    """Seconds from the first arrival to the last token; never 0, since rates divide by it."""
    done = list(metrics)
    first = min((m.arrival_time for m in done), default=0.0)
    last = max((m.finish_time for m in done), default=0.0)
    return max(last - first, 1e-9)


def summarize(
    metrics: Sequence[RequestMetrics],
    duration: float,
    itl: InterTokenLatencies | None = None,
    goodput: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Throughput and latency of finished requests, under the keys of `vllm bench serve`.

    Args:
        metrics: of requests that have finished.
        duration: see duration_of; of several engines, that of all.
        itl: the times between their tokens, if they were collected.
        goodput: limits in ms on "ttft", "tpot", "e2el"; a request counts if it meets all.

    Returns:
        counts, rates per second, and mean, median, p90, p99 of queue time, ttft, tpot, itl and
        e2el in ms, and the largest of each but itl.
    """
    num_input = sum(m.num_prompt_tokens for m in metrics)
    num_output = sum(m.num_output_tokens for m in metrics)
    num_recomputed = sum(m.num_recomputed_tokens for m in metrics)
    num_computed = num_input + num_output - sum(m.num_cached_tokens for m in metrics)
    summary = {
        "completed": len(metrics),
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(metrics) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "num_preemptions": sum(m.num_preemptions for m in metrics),
        "recompute_share": num_recomputed / max(1, num_computed + num_recomputed),
    }
    if goodput is not None:
        num_good = sum(_meets(m, goodput) for m in metrics)
        summary["request_goodput"] = num_good / duration
    spans = {
        "queue": [m.queue_time for m in metrics],
        "ttft": [m.ttft for m in metrics],
        "tpot": [m.tpot for m in metrics],
        "e2el": [m.latency for m in metrics],
    }
    for name, seconds in spans.items():
        ms = sorted(1e3 * s for s in seconds if s is not None)
        summary[f"mean_{name}_ms"] = sum(ms) / len(ms) if ms else 0.0
        for key, p in (("median", 50), ("p90", 90), ("p99", 99), ("max", 100)):
            summary[f"{key}_{name}_ms"] = percentile(ms, p)
    if itl is not None:
        summary["mean_itl_ms"] = 1e3 * itl.mean
        for key, p in (("median", 50), ("p90", 90), ("p99", 99)):
            summary[f"{key}_itl_ms"] = 1e3 * itl.percentile(p)
    return summary


def _meets(m: RequestMetrics, limits: Mapping[str, float]) -> bool:
    spans = {"ttft": m.ttft, "tpot": m.tpot, "e2el": m.latency}
    return all(spans[name] is None or 1e3 * spans[name] <= ms for name, ms in limits.items())


@dataclass
class EngineStats:
    """Counts over an engine's steps.

    num_steps: steps that computed something.
    num_tokens: tokens computed.
    num_rows: turns; a turn is one request's part in one step.
    num_padding: turns of finished requests that kept their slot in a static batch.
    num_preemptions: how often a request lost its blocks.
    num_swapped_blocks: blocks copied to the host and back.
    num_slots: max_num_seqs summed over the steps: the largest possible num_rows.
    num_budget_tokens: max_num_batched_tokens summed over the steps.
    num_blocks_in_use, num_pool_blocks: blocks held, and all blocks, summed over the steps.
    num_output_tokens: output tokens; num_samples: the turns that gave any.
    num_draft_tokens: drafts that were checked; num_accepted_tokens: those that were right.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_padding: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    num_slots: int = 0
    num_budget_tokens: int = 0
    num_blocks_in_use: int = 0
    num_pool_blocks: int = 0
    num_output_tokens: int = 0
    num_samples: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def count_step(
        self, plan: SchedulerOutput, config: EngineConfig, pool: BlockAllocator
    ) -> None:
        """Count a plan that was computed; the pool is as it was then."""
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.num_rows += len(plan.scheduled)
        self.num_padding += len(plan.padding)
        self.num_swapped_blocks += len(plan.swap_out) + len(plan.swap_in)
        self.num_slots += config.max_num_seqs
        self.num_budget_tokens += config.max_num_batched_tokens
        self.num_blocks_in_use += pool.num_blocks - pool.num_free_blocks
        self.num_pool_blocks += pool.num_blocks
        self.num_draft_tokens += sum(len(entry.draft_token_ids) for entry in plan.scheduled)

    def count_output(self, counts: Sequence[int]) -> None:
        """Count the tokens that each request got in a step: accepted drafts and one more, or
        none."""
        num_samples, num_tokens = len(counts) - counts.count(0), sum(counts)
        self.num_samples += num_samples
        self.num_output_tokens += num_tokens
        self.num_accepted_tokens += num_tokens - num_samples

    def take_in(self, other: EngineStats) -> None:
        """Add another engine's counts."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)

    @property
    def slot_utilization(self) -> float:
        """Share of the batch's slots that did useful work, over all steps."""
        return _share(self.num_rows, self.num_slots)

    @property
    def budget_utilization(self) -> float:
        """Share of the token budget that was computed, over all steps."""
        return _share(self.num_tokens, self.num_budget_tokens)

    @property
    def pool_utilization(self) -> float:
        """Share of the pool's blocks that were held, over all steps."""
        return _share(self.num_blocks_in_use, self.num_pool_blocks)

    @property
    def padding_share(self) -> float:
        """Share of the turns that were padding."""
        return _share(self.num_padding, self.num_rows + self.num_padding)

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted."""
        return _share(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def tokens_per_turn(self) -> float:
        """Output tokens for each turn that gave any; 1 without drafts."""
        return _share(self.num_output_tokens, self.num_samples)

    def utilizations(self) -> dict[str, float]:
        """The shares above by name."""
        names = ("slot_utilization", "budget_utilization", "pool_utilization", "padding_share")
        return {name: getattr(self, name) for name in names}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
