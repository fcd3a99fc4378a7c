"""Every figure, drawn from live state: what was measured, not what should have been.

    roofline    measured speeds against what bandwidth and arithmetic allow
    padding     a padded batch, place by place, and what its places are for
    timeline    requests as bars in the slots of the batch
    steps       requests over steps; the token budget of each step
    masks       masks as grids, and what they waste
    blocks      the pool and the block tables; fragmentation; prefix hits
    kernel      what each program of the attention kernel reads
    lives       one engine's requests from arrival to end
    latency     distributions of latency; goodput against the rate
    measure     tables as bars, sweeps as curves

One visual grammar: a request has one colour everywhere; grey is what does nothing; the dark
start of a bar is the time to its first token (style.py).

Always holds: functions draw on the axes they are given, or on a new Figure which they return,
and change no other state.
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
