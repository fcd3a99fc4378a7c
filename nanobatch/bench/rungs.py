"""The ladder of batching, as engine configurations: measured by ladder.py, simulated by
simulated.py.

    sequential         one request at a time
    static             a batch runs until its last request has finished; none joins
    continuous         requests join and leave at every step; whole prompts
    + chunked prefill  prompts share the token budget with those that decode
    + prefix cache     blocks of a shared prefix are computed once

Always holds: each rung has all of the one before and one thing more. Source: the comparison is
that of Orca (Yu et al., OSDI 2022).
"""

from __future__ import annotations

from dataclasses import replace

from nanobatch.config import EngineConfig


def make_rungs(config: EngineConfig, longest: int) -> dict[str, EngineConfig]:
    """The rungs by name, from the lowest.

    Args:
        config: the highest rung.
        longest: tokens of the longest request; whole prompts need a budget of as many.
    """
    chunked = replace(config, enable_prefix_caching=False)
    whole = replace(
        chunked,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(longest, config.max_num_batched_tokens),
        max_model_len=longest,
    )
    return {
        "sequential": replace(whole, max_num_seqs=1),
        "static": replace(chunked, batching="static", admission="reserve"),
        "continuous": whole,
        "+ chunked prefill": chunked,
        "+ prefix cache": config,
    }
