"""The figures, drawn from live state: an engine, a plan, an allocator, measured times.

    roofline     measured speeds against what bandwidth and arithmetic allow
    padding      a padded batch, entry by entry, and what each entry is for
    timeline     requests as bars in the slots of the batch
    steps        requests over steps; the token budget of each step
    masks        masks as grids, and what they waste
    pool_state   a copy of the block pool at one moment
    blocks       the pool and the block tables; fragmentation; prefix hits
    kernel       what each program of the attention kernel reads
    watch        records what each step of an engine did
    lives        one engine's requests from arrival to end
    latency      distributions of latency; goodput against the rate
    measure      tables as bars, sweeps as curves

Conventions (style.py): a request has one colour in all figures; grey is idle or wasted; the
dark start of a bar is the time to the first token.

Always holds: a function draws on the axes it is given, or on a new Figure that it returns. It
changes no other state.

`python -m nanobatch.viz --gallery DIR` writes a PNG of each.
"""

from nanobatch.viz.measure import ladder, throughput_against_latency
from nanobatch.viz.timeline import assign_slots, slot_timeline, static_against_continuous

__all__ = [
    "assign_slots",
    "ladder",
    "slot_timeline",
    "static_against_continuous",
    "throughput_against_latency",
]
