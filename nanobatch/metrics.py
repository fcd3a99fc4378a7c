"""What is measured: one request's times, a workload's percentiles, the engine's use of itself.

Names and definitions are those of `vllm bench serve`:

    TTFT     time to first token: from arrival to the first token
    TPOT     time per output token: (last token - first token) / (output tokens - 1)
    E2EL     end-to-end latency: from arrival to the last token

Taught in notebooks/08_measuring_honestly.ipynb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanobatch.request import RequestMetrics


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100), interpolated linearly as numpy does; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(metrics: Sequence[RequestMetrics], duration: float) -> dict[str, float]:
    """Throughput and latency of finished requests, under the keys of `vllm bench serve`.

    Args:
        metrics: of requests that have finished.
        duration: seconds from the first arrival to the last token.

    Returns:
        counts, rates per second, and mean, median, p90, p99 of ttft, tpot, e2el in ms.
    """
    num_input = sum(m.num_prompt_tokens for m in metrics)
    num_output = sum(m.num_output_tokens for m in metrics)
    summary = {
        "completed": len(metrics),
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(metrics) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    spans = {
        "ttft": [m.ttft for m in metrics],
        "tpot": [m.tpot for m in metrics],
        "e2el": [m.latency for m in metrics],
    }
    for name, seconds in spans.items():
        ms = [1e3 * s for s in seconds if s is not None]
        summary[f"mean_{name}_ms"] = sum(ms) / len(ms) if ms else 0.0
        summary[f"median_{name}_ms"] = percentile(ms, 50)
        summary[f"p90_{name}_ms"] = percentile(ms, 90)
        summary[f"p99_{name}_ms"] = percentile(ms, 99)
    return summary


@dataclass
class EngineStats:
    """Counts over an engine's steps.

    num_steps: steps that computed something.
    num_tokens: tokens computed; num_rows: request turns, one a request and step.
    num_preemptions: how often a request lost its blocks.
    num_slots: max_num_seqs summed over the steps: the turns there could have been.
    num_budget_tokens: max_num_batched_tokens summed over the steps.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_preemptions: int = 0
    num_slots: int = 0
    num_budget_tokens: int = 0

    @property
    def slot_utilization(self) -> float:
        """Share of the batch's slots that did useful work, over all steps."""
        return self.num_rows / self.num_slots if self.num_slots else 0.0

    @property
    def budget_utilization(self) -> float:
        """Share of the token budget that was computed, over all steps."""
        return self.num_tokens / self.num_budget_tokens if self.num_budget_tokens else 0.0
