"""Preemption by swap with a real cache: how much host memory it gets, and what it is held to.

That swapped blocks come back as they went is tested with random traces (test_shadow_cache.py)
and against requests that run alone (test_engine.py, test_kv_cache.py).
"""

import pytest
import torch

from nanobatch import EngineConfig, LLMEngine, SamplingParams
from nanobatch.llm import build_runner
from nanobatch.models.loader import load
from nanobatch.utils import cache_size

PROMPTS = [f"{letter} cat sat" for letter in "ABCDE"]


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", torch.float32)


def engine_of(tiny, config=None, **knobs):
    knobs = {"num_blocks": 14, "block_size": 4, "max_num_seqs": 5} | knobs
    runner = build_runner(tiny.model, EngineConfig(dtype="float32", **knobs))
    return LLMEngine(config or runner.config, runner, tokenizer=tiny.tokenizer)


def serve(engine):
    for prompt in PROMPTS:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        engine.add_request(prompt, params, request_id=prompt)
    outputs = {}
    while engine.has_unfinished():
        outputs |= {out.request_id: out.token_ids for out in engine.step()}
    return outputs


def test_swap_alone_works(tiny):
    """Without a number the host has as many blocks as the pool; the outputs are the same."""
    engine = engine_of(tiny, preemption="swap")
    assert engine.config.num_host_blocks == 14
    outputs = serve(engine)
    assert engine.stats.num_preemptions > 0 and engine.stats.num_swapped_blocks > 0
    assert outputs == serve(engine_of(tiny, num_blocks=100))


@pytest.mark.parametrize("num_bytes, expected", [(0, 1), (4, 4), (13.9, 13), (99, 14)])
def test_within_the_bytes_that_a_host_may_give(tiny, monkeypatch, num_bytes, expected):
    """num_bytes: in blocks."""
    of_a_block = 2 * 4 * tiny.model.config.num_layers  # keys and values, float32, 4 tokens
    of_a_block *= 4 * tiny.model.config.num_kv_heads * tiny.model.config.head_dim
    monkeypatch.setattr(cache_size, "HOST_CACHE_BYTES", int(num_bytes * of_a_block))
    engine = engine_of(tiny, preemption="swap")
    assert engine.config.num_host_blocks == expected
    assert engine.scheduler.preemption.host.num_blocks == expected
    assert serve(engine) == serve(engine_of(tiny, num_blocks=100))


@pytest.mark.parametrize("given", [{}, {"num_host_blocks": 8}])
def test_an_engine_does_not_swap_to_what_is_not_there(tiny, given):
    """A configuration that is not the runner's, and would name host blocks past its end."""
    knobs = {"num_blocks": 14, "block_size": 4, "max_num_seqs": 5, "preemption": "swap"}
    config = EngineConfig(**knobs, **given)
    with pytest.raises(ValueError, match=r"num_host_blocks is .*; the runner's cache has 3"):
        engine_of(tiny, config, preemption="swap", num_host_blocks=3)
    with pytest.raises(ValueError, match=r"num_host_blocks is .*; the runner's cache has 0"):
        engine_of(tiny, config)
    engine_of(tiny, config, preemption="swap")
