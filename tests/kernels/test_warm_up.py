"""What is run before serving: against all shapes of steps, and the scheduler's own plans."""

import pytest
import torch

from nanobatch import BlockAllocator, EngineConfig, Request, SamplingParams, Scheduler
from nanobatch.extensions.speculative import DraftHook, FromRunner
from nanobatch.kernels.launch_config import CHIPS, choose_launch_config
from nanobatch.kernels.warm_up import (
    Shape,
    largest_steps,
    shapes_to_try,
    starts_of_runs,
)
from nanobatch.model_runner import ModelRunner
from nanobatch.models.loader import load

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H200, T4 = CHIPS[90], CHIPS[75]


def config_of(max_num_seqs, budget, max_model_len, **knobs):
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        **knobs,
    )


def every_shape(config):
    """All (tokens, sequences, longest query) that a plan can have, one by one."""
    for num_seqs in range(1, config.max_num_seqs + 1):
        for longest in range(1, config.max_model_len):  # the last token is never computed
            for num_tokens in range(longest + num_seqs - 1, num_seqs * longest + 1):
                if num_tokens <= config.max_num_batched_tokens:
                    yield num_tokens, num_seqs, longest


@pytest.mark.parametrize("limits", [(8, 40, 30), (4, 50, 90), (20, 20, 9), (1, 70, 60)])
@pytest.mark.parametrize(
    "heads, itemsize, chip",
    [
        ((32, 8, 128), 2, H200._replace(num_sms=40)),
        ((9, 3, 64), 2, H200._replace(num_sms=9)),
        ((8, 1, 256), 4, H200),
        ((4, 4, 64), 2, T4),
    ],
)
def test_each_variant_of_a_launch_is_tried_once(heads, itemsize, chip, limits):
    config = config_of(*limits)

    def variant_of(shape):
        return choose_launch_config(*shape, *heads, itemsize, chip).variant

    shapes = shapes_to_try(variant_of, config)
    tried = [variant_of(shape) for shape in shapes]
    assert len(set(tried)) == len(tried)
    possible = set(every_shape(config))
    assert set(tried) == {variant_of(shape) for shape in possible}
    assert set(shapes) <= possible


def test_looking_for_shapes_takes_no_time():
    """Of a large engine, with 33 million shapes."""
    config, calls = config_of(1024, 8192, 131_072), []

    def variant_of(shape):
        calls.append(shape)
        return choose_launch_config(*shape, 32, 8, 128, 2, H200).variant

    assert len(shapes_to_try(variant_of, config)) < 40
    assert len(calls) < 20_000


@pytest.mark.kernels
@torch.inference_mode()
def test_the_kernel_runs_on_all_of_them():
    """With one block of cache, and no key outside of it."""
    pytest.importorskip("triton")
    config = config_of(2, 24, 50, dtype="float16", attention_backend="triton", num_blocks=1)
    runner = ModelRunner(load("tiny", torch.float16, DEVICE).model, config)
    outputs, real = [], runner.backend.paged_attention

    def paged_attention(*args):
        outputs.append(real(*args))
        return outputs[-1]

    runner.backend.paged_attention = paged_attention
    for cache in runner.caches:
        cache.keys.fill_(1), cache.values.fill_(2)
    layers = runner.model.layers
    runner.backend.warm_up(layers, runner.caches, runner.config, runner.dtype)
    assert len(outputs) > 1
    for out_THD in outputs:  # equal keys: the mean of equal values
        torch.testing.assert_close(out_THD, torch.full_like(out_THD, 2.0))


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 5, 1), (90, 1, 90), (11, 4, 5), (20, 4, 5)])
def test_a_batch_of_a_shape(shape):
    config = config_of(5, 90, 91)
    batch = Shape(*shape).pack(config, torch.device("cpu"))
    lens = batch.query_start_loc.diff().tolist()
    assert (sum(lens), len(lens), max(lens), min(lens) > 0) == (*shape, True)
    assert batch.max_query_len == shape[2]
    assert batch.seq_lens_S.tolist() == [90] * shape[1]  # the longest that compute a token
    assert not batch.block_tables_SB.any()


def test_where_a_key_changes():
    keys = "aaabccccd"
    for first in range(9):
        wanted = [i for i in range(first + 1, 9) if keys[i] != keys[i - 1]]
        assert starts_of_runs(first, 8, keys.__getitem__) == [first, *wanted]


LIMITS = [(3, 200, 1000), (4, 64, 12), (7, 7, 30), (2, 100, 3), (3, 10, 50)]


def planned(config, prompt_lens):
    """The plan of a scheduler for prompts of these lengths, in a pool that holds them all."""
    scheduler = Scheduler(config, BlockAllocator(500, 16, False))
    if config.speculative:
        scheduler.hooks[:] = [DraftHook(scheduler, FromRunner())]
    for i, length in enumerate(prompt_lens):
        scheduler.add(Request(str(i), [0] * length, SamplingParams(max_tokens=900)))
    return scheduler.schedule(0.0).scheduled


@pytest.mark.parametrize("limits", LIMITS)
def test_the_largest_prompts_are_a_plan_of_the_scheduler(limits):
    config = config_of(*limits, num_blocks=500, enable_prefix_caching=False)
    entries = largest_steps(config)[0]
    plan = planned(config, [entry.request.num_tokens for entry in entries])
    assert [e.num_tokens for e in entries] == [e.num_tokens for e in plan]
    assert [e.num_logits for e in entries] == [e.num_logits for e in plan] == [1] * limits[0]
    # and longer prompts would not make it larger
    longer = planned(config, [limits[2] - 1] * limits[0])
    assert sum(e.num_tokens for e in longer) == sum(e.num_tokens for e in entries)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_the_largest_decodes_are_a_plan_of_the_scheduler(limits, num_drafts):
    knobs = {"speculative": "ngram", "num_speculative_tokens": 4} if num_drafts else {}
    config = config_of(*limits, num_blocks=500, enable_prefix_caching=False, **knobs)
    entries = largest_steps(config)[1]
    plan = planned(config, [1] * limits[0])
    for of in (entries, plan):
        assert len(of) == limits[0] and all(e.num_logits == e.num_tokens for e in of)
    assert sum(e.num_tokens for e in entries) == sum(e.num_tokens for e in plan)


def test_one_row_of_the_largest_steps_has_the_logits_copied():
    """Which takes as much memory as if all had a penalty."""
    for entries in largest_steps(config_of(4, 20, 50)):
        params = [entry.request.params for entry in entries]
        assert [p.repetition_penalty != 1 for p in params] == [True, False, False, False]
        assert all(p.temperature > 0 and 0 < p.top_p < 1 for p in params)
