"""Decode steps replayed on persistent buffers: the same as eager steps (invariants 12, 14).

Here the "recording" of a step is the step itself, so that padding, buffers and what they keep
from step to step are proved without a GPU, with the real kernel in Triton's interpreter.
test_gpu.py repeats it with recorded graphs.
"""

import functools
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanobatch import EngineConfig, LLMEngine, SamplingParams
from nanobatch.batch import PADDING_SLOT, Row, pack
from nanobatch.extensions.async_scheduling import AsyncEngine
from nanobatch.extensions.cuda_graphs import DecodeGraphs, graph_sizes, pad_decodes
from nanobatch.kernels.ops import REFERENCE
from nanobatch.model_runner import ModelRunner
from nanobatch.models.loader import load

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton's interpreter is off; see test_gpu.py", allow_module_level=True)
P = 4
pytestmark = pytest.mark.kernels


def test_sizes():
    assert graph_sizes(1) == [1]
    assert graph_sizes(2) == [1, 2]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(256) == [1, 2, 4, *range(8, 257, 8)]


def test_padding_rows_read_and_write_nothing():
    batch = pack([Row([7], 5, [2, 9]), Row([8], 0, [3])], P)
    padded = pad_decodes(batch, 4)
    assert padded.token_ids_T.tolist() == [7, 8, 0, 0]
    assert padded.positions_T.tolist() == [5, 0, 0, 0]
    assert padded.slot_mapping_T.tolist() == [37, 12, PADDING_SLOT, PADDING_SLOT]
    assert padded.seq_lens_S.tolist() == [6, 1, 0, 0]
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert padded.block_tables_SB.shape == (4, 2)
    assert padded.logits_indices_S.tolist() == [0, 1, 2, 3]
    for name in vars(batch).keys() - {"derived"}:
        assert getattr(padded, name).dtype == getattr(batch, name).dtype, name


def test_only_decodes_that_fit_are_padded():
    with pytest.raises(AssertionError, match="2 tokens"):
        pad_decodes(pack([Row([1, 2], 0, [0])], P), 2)
    with pytest.raises(AssertionError, match="2 rows do not fit into 1"):
        pad_decodes(pack([Row([1], 0, [0])] * 2, P), 1)


@functools.cache
def tiny():
    return load("tiny", torch.float32).model


def runner_with_graphs(**knobs):
    """A runner whose decode steps go through the buffers, by the Triton kernel."""
    config = EngineConfig(dtype="float32", attention_backend="triton", block_size=P, **knobs)
    runner = ModelRunner(tiny(), config)
    tiny().set_ops(REFERENCE)  # norms take their time in Triton's interpreter
    replayed, sizes = [], graph_sizes(runner.config.max_num_seqs)

    def capture(step):
        size = sizes.pop()

        def replay():
            replayed.append(size)
            step()

        return replay

    runner.compute = DecodeGraphs(runner, capture)
    return runner, replayed


@torch.inference_mode()
def test_replay_is_the_eager_step():
    """Batches of several sizes one after another: what an old one left does not show."""
    num_blocks = 24
    runner, replayed = runner_with_graphs(
        num_blocks=num_blocks, max_num_seqs=5, max_num_batched_tokens=64, max_model_len=40
    )
    generator = torch.Generator().manual_seed(0)
    parts = [cache.parts for cache in runner.caches]
    for k_cache, v_cache in parts:
        k_cache.copy_(torch.randn(k_cache.shape, generator=generator))
        v_cache.copy_(torch.randn(v_cache.shape, generator=generator))
    # (rows, as (start, first block)), each table its own; the last blocks are nobody's
    for starts in [(3, 9, 0, 17, 4), (8,), (11, 2, 30), (5, 5, 5, 5), (0, 1)]:
        tables, free = [], list(range(num_blocks))
        for start in starts:
            tables.append([free.pop() for _ in range(start // P + 1)])
        for pair in parts:
            for cache in pair:
                cache[free] = torch.nan
        rows = [
            Row([40 + i], n, t) for i, (n, t) in enumerate(zip(starts, tables, strict=True))
        ]
        before = [(k.clone(), v.clone()) for k, v in parts]
        found = runner.compute.replay(pack(rows, P)).clone()
        after = [(k.clone(), v.clone()) for k, v in parts]
        for pair, old in zip(parts, before, strict=True):
            for cache, was in zip(pair, old, strict=True):
                cache.copy_(was)
        batch = pack(rows, P)
        wanted = runner.forward(batch)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        for pair, new in zip(parts, after, strict=True):
            for cache, one in zip(pair, new, strict=True):
                # NaN where nobody wrote, in both
                torch.testing.assert_close(one, cache, atol=1e-4, rtol=0, equal_nan=True)
        for pair in parts:
            for cache in pair:
                cache.nan_to_num_()
    assert replayed == [5, 1, 4, 4, 2]


class Recording(TorchDispatchMode):
    """What a step computes, without the Python around it, as a CUDA graph has it: replay runs
    the same operations on the same tensors.

    outside: the memory that it reads or writes and has not made; not kept alive from here.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.inside, self.outside = [], set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inputs = [x.untyped_storage() for x in args if isinstance(x, torch.Tensor)]
        outside = [x for x in inputs if x._cdata not in self.inside]
        self.outside += map(weakref.ref, outside)
        if out.untyped_storage()._cdata not in {x._cdata for x in outside}:  # else a view
            self.inside.add(out.untyped_storage()._cdata)
        self.operations.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.operations:
            new = function(*args, **kwargs)
            if new.data_ptr() != out.data_ptr():
                out.copy_(new)


class LengthsAsLogits:
    """A runner whose logits are the rows' lengths, derived once a batch, in two layers."""

    device, vocab_size = torch.device("cpu"), 3
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=40)

    def forward(self, batch):
        for _ in range(2):
            lens_S = batch.once("a plan", lambda: batch.seq_lens_S.float())
        return lens_S.unsqueeze(1).mul(torch.ones(1, 3))


def record(step, recordings):
    step()  # as CudaCapture does
    with Recording() as recording:
        step()
    recordings.append(recording)
    return recording.replay


@torch.inference_mode()
def test_what_is_derived_from_a_batch_is_recorded():
    """It follows the lengths: they are data, and Python does not run again."""
    recordings = []
    graphs = DecodeGraphs(LengthsAsLogits(), lambda step: record(step, recordings))
    for lens in ([5], [9], [3, 20], [4, 21], [7, 1, 2], [30, 30, 30, 30], [8]):
        found = graphs.replay(pack([Row([0], n - 1, [0, 1, 2]) for n in lens], 16))
        assert found.tolist() == [[n] * 3 for n in lens]


@torch.inference_mode()
def test_what_a_graph_reads_lives_as_long_as_the_graphs():
    recordings = []

    def capture(step):
        record(step, recordings)
        for recording in recordings:
            recording.operations.clear()  # a CUDA graph has addresses only
        return lambda: None

    graphs = DecodeGraphs(LengthsAsLogits(), capture)
    gc.collect()
    outside = [storage for recording in recordings for storage in recording.outside]
    assert len(recordings) == 3 and outside
    assert all(storage() is not None for storage in outside)
    assert graphs.sizes == [1, 2, 4]


@torch.inference_mode()
def test_a_chunk_of_one_token_is_replayed_and_has_no_logits():
    runner, replayed = runner_with_graphs(
        num_blocks=8, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16
    )
    rows = [Row([40], 0, [0]), Row([41], 0, [1], num_logits=0), Row([42], 0, [2])]
    wanted = runner.compute_eagerly(rows)
    assert len(wanted) == 2
    torch.testing.assert_close(runner.compute(rows), wanted, atol=1e-4, rtol=0)
    assert replayed == [4]


def test_an_engine_with_graphs_says_the_same():
    """Eight requests, ragged, preempted; steps with any prefill in them run eagerly."""
    knobs = {"num_blocks": 9, "max_num_seqs": 6, "max_num_batched_tokens": 16}
    runner, replayed = runner_with_graphs(**knobs, max_model_len=64)
    plain = ModelRunner(tiny(), EngineConfig(dtype="float32", block_size=P, **knobs))
    outputs, preemptions = [], []
    for make, one in ((LLMEngine, runner), (AsyncEngine, runner), (LLMEngine, plain)):
        engine = make(one.config, one)
        for i in range(8):
            prompt = [256, *(97 + (i * j) % 26 for j in range(1 + 3 * (i % 4)))]
            kind = {"temperature": 0} if i % 2 else {"temperature": 1, "seed": i}
            params = SamplingParams(**kind, max_tokens=5 + i % 4, ignore_eos=True, logprobs=0)
            engine.add_request(prompt, params)
        done = {}
        while engine.has_unfinished():
            done |= {out.request_id: out for out in engine.step() if out.finished}
        outputs.append([done[str(i)].token_ids for i in range(8)])
        preemptions.append(engine.stats.num_preemptions)
    assert outputs[0] == outputs[1] == outputs[2]
    assert preemptions[0] == preemptions[2] > 0 < preemptions[1]
    assert len(set(replayed)) > 1 and set(replayed) <= {1, 2, 4, 6}
