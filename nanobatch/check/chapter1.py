"""Checks of notebooks/01_why_decoding_is_slow.ipynb.

ex1_1    bytes that one token holds in the cache
ex1_2    the batch size at which reading weights and computing take equally long
"""

from __future__ import annotations

from collections.abc import Callable

from nanobatch.check.compare import call, expect, right
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.simulation.cost_model import GPUS


class _Name:
    """A short name for a long input in a message."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name


def ex1_1(answer: Callable) -> None:
    """kv_bytes_per_token(model, itemsize): bytes of the keys and values of one token.

    Args (of the answer): model, a ModelConfig; itemsize, bytes of one number.
    Returns (the answer): bytes over all layers.
    """
    cases = [
        ("llama-2-7b", 2),  # as many key/value heads as query heads
        ("llama-3.1-8b", 2),  # a quarter as many
        ("llama-3.1-8b", 1),  # an 8-bit cache
        ("tiny", 4),
        ("qwen3-0.6b", 2),  # head_dim is not hidden_size / num_heads
    ]
    for name, itemsize in cases:
        model = MODEL_PRESETS[name]
        numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        found = call(answer, model, itemsize)
        expect(found, numbers * itemsize, _Name(f"MODEL_PRESETS[{name!r}]"), itemsize)
    right("ex1_1")


def ex1_2(answer: Callable) -> None:
    """batch_at_the_knee(bandwidth, flop_rate, itemsize): batch size at which the bounds meet.

    Args (of the answer): bandwidth in bytes/s, flop_rate in FLOP/s, itemsize in bytes.
    Returns (the answer): the batch size as a float, not rounded. Only the weights are read;
    a multiply-add is two operations.
    """
    a100 = GPUS["a100-80gb"]
    cases = [
        (a100.bandwidth, a100.flop_rate, 2),
        (a100.bandwidth, 2 * a100.flop_rate, 1),  # in 8 bits: twice the rate, half the bytes
        (30e9, 70e9, 4),  # a core of a CPU, in float32
        (1e12, 0.5e12, 2),  # below a batch of one
    ]
    for bandwidth, flop_rate, itemsize in cases:
        found = call(answer, bandwidth, flop_rate, itemsize)
        wanted = itemsize * flop_rate / (2 * bandwidth)
        expect(found, wanted, bandwidth=bandwidth, flop_rate=flop_rate, itemsize=itemsize)
    right("ex1_2")
