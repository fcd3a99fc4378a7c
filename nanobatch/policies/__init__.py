"""Decisions that the scheduler hands over, one in each module.

    ordering      which request is next            FCFS, SJF, Priority
    lengths       how long an output will be       max_tokens, LearnedLengths
    admission     whether there is room            OnDemand, Reserve, Predict
    static_batch  when requests may join           ContinuousBatch, StaticBatch
    preemption    how a victim's blocks are freed  Recompute (extensions/swap.py adds Swap)

A new policy goes beside those it competes with.
"""
