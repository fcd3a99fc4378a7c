"""On a GPU: `python -m pytest -m gpu`. Without one, all of this is skipped.

The kernels run compiled in test_kernels.py, at small sizes against their references. Here they
are held against float64 in every number format, also at sizes that fill a GPU; recorded graphs
against eager steps; and the engine tests of test_engine.py are run again with the model on the
GPU, where the same float32 oracle (dense, on the CPU) says what each request must say.

Tolerances, absolute, of outputs that are averages of numbers of size 1: float32 2e-5,
float16 2e-3, bfloat16 2e-2 (rounding of the output's last place, and of the weights that
multiply the values).
"""

import pytest
import test_engine
import torch
from test_attention import MIXED, Case
from test_engine import (  # noqa: F401 - run again, see on_the_gpu
    test_a_crowd_in_chunks,
    test_a_crowd_on_a_small_pool,
    test_a_hit_in_chunks_beside_misses,
    test_a_pool_that_holds_one,
    test_a_row_of_nan_ends_that_request_alone,
    test_aborted_and_submitted_again,
    test_blocks_in_any_order_and_any_padding,
    test_each_length_twice,
    test_equal_blocks_after_different_prefixes,
    test_evicted_blocks_are_not_found,
    test_greedy_n_gives_equal_outputs,
    test_interrupting_generate_leaves_a_usable_engine,
    test_n_outputs_are_n_requests_with_seeds_of_their_own,
    test_nan_in_every_slot_that_nobody_owns,
    test_preempted_at_each_length,
    test_streams_and_generate_interleave,
    test_the_same_prompt_in_the_same_step,
    test_unseeded_requests_repeat_on_a_fresh_engine,
    test_what_a_seeded_request_samples_is_nobody_elses_business,
)

import bench
from nanobatch import LLM, EngineConfig, SamplingParams
from nanobatch.attention import choose_backend, paged_attention
from nanobatch.batch import Row, pack
from nanobatch.bench.attention_systems import attention_inputs
from nanobatch.bench.hardware import measure_hardware
from nanobatch.bench.kernels import KernelBench
from nanobatch.extensions.async_scheduling import AsyncEngine
from nanobatch.extensions.cuda_graphs import DecodeGraphs, bytes_of_graphs
from nanobatch.llm import build_runner
from nanobatch.model_runner import ModelRunner
from nanobatch.models.loader import load
from nanobatch.sampler import SamplingRow, begin_sample, sample

pytestmark = pytest.mark.gpu
ATOL = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
GPU = "cuda"


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    """What test_engine.py builds, it builds here."""
    monkeypatch.setattr(test_engine, "DEVICE", GPU)


# ---- kernels against float64 -----------------------------------------------------------


@pytest.mark.parametrize("window, softcap", [(None, None), (6, None), (None, 3.0)])
@pytest.mark.parametrize(
    "H, K, D", [(4, 4, 64), (6, 2, 80), (8, 1, 96), (7, 1, 128), (8, 2, 256)]
)
@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
def test_attention_equals_float64(dtype, H, K, D, window, softcap):
    """Ragged batches around the ends of blocks and tiles, all other slots poisoned."""
    shapes = [*MIXED, (63, 1), (64, 1), (0, 65), (100, 30), (200, 1)]
    for block_size, some in ((16, shapes), (1, MIXED), (64, [(n, 1) for n, _ in shapes])):
        case = Case(some, block_size, H=H, K=K, D=D)
        for name in ("q_THD", "k_cache", "v_cache"):
            setattr(case, name, getattr(case, name).to(dtype))
        case.keys, case.values = ([x.to(dtype) for x in xs] for xs in (case.keys, case.values))
        wanted = case.oracle(sliding_window=window, softcap=softcap)
        for name in ("q_THD", "k_cache", "v_cache"):
            setattr(case, name, getattr(case, name).to(GPU))
        on_gpu(case.batch)
        for backend in ("triton", "torch"):
            found = case.run(sliding_window=window, softcap=softcap, backend=backend)
            torch.testing.assert_close(
                found.double().cpu(), wanted, atol=ATOL[dtype], rtol=0, msg=backend
            )


def on_gpu(batch):
    for name in vars(batch).keys() - {"derived"}:
        setattr(batch, name, getattr(batch, name).to(GPU))


@pytest.mark.parametrize("size", [(64, 1, 1000), (1, 1, 32768), (3, 1, 8000), (4, 700, 1500)])
@pytest.mark.parametrize("shape", [(32, 32, 128), (32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_at_the_sizes_of_real_models(dtype, shape, size):
    num_seqs, query_len, seq_len = size
    x = attention_inputs(shape, num_seqs, query_len, seq_len, dtype, torch.device(GPU))
    scale = shape[2] ** -0.5
    found = paged_attention(x.q_THD, x.k_cache_NKPD, x.v_cache_NKPD, x.batch, scale=scale)
    found = found.unflatten(0, (num_seqs, query_len)).transpose(1, 2)
    last = torch.arange(seq_len - query_len, seq_len, device=GPU)
    mask = torch.arange(seq_len, device=GPU) <= last[:, None]
    group = shape[0] // shape[1]
    for s in range(num_seqs):
        k_HLD, v_HLD = (
            y[s].double().repeat_interleave(group, dim=0) for y in (x.k_SKLD, x.v_SKLD)
        )
        scores = (x.q_SHTD[s].double() @ k_HLD.mT * scale).masked_fill(~mask, float("-inf"))
        wanted = scores.softmax(dim=-1) @ v_HLD
        torch.testing.assert_close(found[s].double(), wanted, atol=ATOL[dtype], rtol=0)


def test_a_cache_past_31_bits():
    """Invariant 16, in memory that is there: both ends of a cache of 2**31 + elements."""
    P, K, D = 16, 8, 128
    num_blocks = 2**31 // (P * K * D) + 2
    k_cache = torch.full((num_blocks, K, P, D), torch.nan, dtype=torch.float16, device=GPU)
    v_cache = k_cache.clone()
    tables = [[num_blocks - 1, 0], [1, num_blocks - 2]]
    small = []
    for cache in (k_cache, v_cache):
        for table in tables:
            for block in table:
                cache[block] = torch.randn(K, P, D, device=GPU)
        small.append(torch.stack([cache[b] for table in tables for b in table]))
    batch = pack([Row([0], 30, tables[0]), Row([0] * 5, 15, tables[1])], P, GPU)
    near = pack([Row([0], 30, [0, 1]), Row([0] * 5, 15, [2, 3])], P, GPU)
    q_THD = torch.randn(6, 32, D, device=GPU).to(torch.float16)
    found = paged_attention(q_THD, k_cache, v_cache, batch, scale=0.1)
    assert torch.equal(found, paged_attention(q_THD, *small, near, scale=0.1))


# ---- the model and its graphs ----------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, atol", [("float32", 1e-3), ("float16", 0.1), ("bfloat16", 0.5)]
)
def test_logits_in_each_format(dtype, atol):
    """Against the model in float64 on the CPU; logits reach about 20."""
    prompt = list(test_engine.prompt_of(100))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=258)
    llm = LLM("tiny", dtype=dtype, device=GPU, num_blocks=64)
    found = llm.generate(prompt, params, progress=False)[0].logprobs[0]
    logits_V = test_engine.dense_logits(prompt)[-1].double().log_softmax(dim=-1)
    likely = [t for t in range(258) if logits_V[t] > -10]
    assert max(abs(found[t] - float(logits_V[t])) for t in likely) < atol


@torch.inference_mode()
@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
def test_replay_equals_an_eager_step(dtype):
    """All sizes, ragged lengths, poison in every slot that nobody owns."""
    model = load("tiny", dtype, GPU).model
    runner = build_runner(
        model, EngineConfig(num_blocks=400, max_num_seqs=19, max_num_batched_tokens=19)
    )
    assert runner.compute.sizes == [1, 2, 4, 8, 16, 19]
    generator = torch.Generator(GPU).manual_seed(0)
    parts = [cache.parts for cache in runner.caches]
    for num_rows in (19, 1, 3, 16, 5, 2, 12, 19, 4):
        free = list(range(400))
        rows = []
        for i in range(num_rows):
            start = (37 * i + 11 * num_rows) % 200
            rows.append(Row([97 + i], start, [free.pop() for _ in range(start // 16 + 1)]))
        for pair in parts:
            for cache in pair:
                cache.copy_(torch.randn(cache.shape, generator=generator, device=GPU))
                cache[free] = torch.nan
        replayed = runner.compute.replay(pack(rows, 16)).clone()
        after = [(k.clone(), v.clone()) for k, v in parts]
        eager = runner.forward(pack(rows, 16, GPU))
        assert replayed.isfinite().all()
        # The padded products may be rounded differently, nothing else.
        atol = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 0.3}[dtype]
        torch.testing.assert_close(replayed, eager, atol=atol, rtol=0)
        for pair, new in zip(parts, after, strict=True):
            for cache, one in zip(pair, new, strict=True):
                torch.testing.assert_close(one, cache, atol=atol, rtol=0, equal_nan=True)
                assert one[free].isnan().all(), "a padding row wrote"


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"cuda_graphs": False},
        {"async_scheduling": False},
        {"preemption": "swap", "num_host_blocks": 24},
        {"attention_backend": "torch"},
    ],
)
def test_the_gpu_says_what_the_cpu_says(knobs):
    """Greedy and seeded, in float32, preempted; with graphs and without, with steps that are
    launched ahead and without (invariant 12)."""
    prompts = ["Once upon a time", "One day", "L", "There once was a fox", "Ivy", "So", "A"]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=20 + i, ignore_eos=True)
        for i, t in enumerate([0, 1, 0, 0.7, 0, 1, 0])
    ]
    tokens = []
    for device, more in (("cpu", {}), (GPU, knobs)):
        llm = LLM("tiny", dtype="float32", device=device, num_blocks=24, block_size=4,
                  max_num_seqs=5, **more)  # fmt: skip
        outs = llm.generate(prompts, params, progress=False)
        assert llm.engine.stats.num_preemptions > 0
        tokens.append([out.token_ids for out in outs])
    is_eager = {"cuda_graphs", "attention_backend"} & knobs.keys()
    assert isinstance(llm.engine.runner.compute, DecodeGraphs) == (not is_eager)
    is_plain = {"async_scheduling", "attention_backend"} & knobs.keys()
    assert isinstance(llm.engine, AsyncEngine) == (not is_plain)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_launch_waits_for_nothing(cuda_graphs, monkeypatch):
    """Chunks of prompts, mixed steps and decodes, greedy and drawn; torch raises at a wait."""
    llm = LLM("tiny", dtype="float32", device=GPU, num_blocks=64, max_num_seqs=4,
              max_num_batched_tokens=8, cuda_graphs=cuda_graphs)  # fmt: skip
    prompts = ["Once upon a time", "One day", "L", "There once was a fox"]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=20) for t in (0, 1, 0, 0.7)]
    wanted = llm.generate(prompts, params, progress=False)  # pinned memory is allocated once
    launch, plans = llm.engine.runner.launch, []

    def watched(plan, previous):
        plans.append(plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan, previous)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(llm.engine.runner, "launch", watched)
    outs = llm.generate(prompts, params, progress=False)
    assert [out.token_ids for out in outs] == [out.token_ids for out in wanted]
    assert len(plans) > 20


# ---- memory ----------------------------------------------------------------------------


def test_the_pool_takes_its_share_of_the_memory_and_no_more():
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = 0.5 * free / total
    used_before = total - free
    llm = LLM(
        "dummy:smollm2-135m", device=GPU, gpu_memory_utilization=share + used_before / total
    )
    runner = llm.engine.runner
    cache = sum(part.nbytes for cache in runner.caches for part in cache.parts)
    assert runner.config.num_blocks == runner.caches[0].keys.shape[0] > 1000
    assert cache > 0.3 * free or runner.config.num_blocks == 2**20
    params = SamplingParams(temperature=1, top_p=0.9, max_tokens=4, ignore_eos=True)
    llm.generate([[7] * 100] * 300, params, progress=False)
    free_now, _ = torch.cuda.mem_get_info()
    assert free - free_now <= 1.05 * share * total


@torch.inference_mode()
def test_graphs_take_no_more_memory_than_is_kept_for_them():
    model = load("dummy:smollm2-135m", torch.float16, torch.device(GPU)).model
    runner = ModelRunner(model, EngineConfig(num_blocks=64, max_num_seqs=64))
    expected = bytes_of_graphs(runner)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    DecodeGraphs.add_to(runner)
    torch.cuda.empty_cache()
    free_now, _ = torch.cuda.mem_get_info()
    assert free - free_now <= expected


def test_memory_that_does_not_suffice_is_refused_with_what_to_lower():
    with pytest.raises(ValueError, match="num_blocks is .*GiB of cache do not fit.*lower it"):
        LLM("dummy:llama-2-7b", device=GPU, num_blocks=2**17 - 1)  # 1 TiB
    torch.cuda.empty_cache()
    llm = LLM("tiny", device=GPU, num_blocks=64)  # and the GPU can be used as before
    assert llm.generate("Once", SamplingParams(max_tokens=3), progress=False)[0].token_ids


def test_auto_means_the_gpu():
    runner = LLM("tiny", num_blocks=64).engine.runner
    assert runner.device.type == "cuda" and runner.backend.name == "triton"
    has_bfloat16 = torch.cuda.get_device_capability() >= (8, 0)
    assert runner.dtype == (torch.bfloat16 if has_bfloat16 else torch.float16)


# ---- benches ---------------------------------------------------------------------------


def test_the_ladder_on_a_gpu(capsys):
    flags = ["--num-prompts", "6", "--max-num-seqs", "3", "--output-len", "6", "--repeat", "1"]
    for dtype in ("float32", "auto"):
        report = bench.main([*flags, "--dtype", dtype])
        assert report["machine"]["gpu"] == torch.cuda.get_device_name()
        for figures in report["systems"].values():
            assert 0 < figures["roofline_utilization"] < 1
            assert 0 <= figures.get("nvml_gpu_utilization", 0) <= 1
    assert "of roofline" in capsys.readouterr().out


@torch.inference_mode()
def test_kernels_are_faster_than_nothing_can_be():
    """No share of what was measured may be far above 1: then something was not computed."""
    device, dtype = torch.device(GPU), torch.float16
    table = KernelBench(device, dtype, measure_hardware(device, dtype))
    lines = [table.attention_line("decode", "llama-3-8b", (16, 1024))]
    lines += [table.attention_line("prefill", "smollm2", (2, 512))]
    lines += [case.measure() for case in table.other_cases()]
    assert all(0 < line.share < 1.3 for line in lines), lines


# ---- sampling --------------------------------------------------------------------------

SAMPLING_KINDS = [
    {"temperature": 0}, {}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.999, "min_p": 1e-6},
    {"top_k": 5000, "top_p": 0.95}, {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logprobs": 5}, {"min_tokens": 9, "top_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("num_rows", [9, 300])
def test_sampling_waits_for_nothing_and_equals_the_cpu(num_rows):
    """Few rows of so many logits that topk would sort them, and many rows."""
    vocab_size = 128_256 if num_rows == 9 else 5_000
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    logits = (4 * logits).bfloat16().float()  # many ties
    kinds = [SAMPLING_KINDS[i % len(SAMPLING_KINDS)] for i in range(num_rows)]
    rows = [
        SamplingRow(SamplingParams(**kind), [1, 2], [3], (7,), seed)
        for seed, kind in enumerate(kinds)
    ]
    expected = sample(logits, rows)
    on_gpu, ops = logits.to(GPU), choose_backend("auto", GPU, 16)
    begin_sample(on_gpu, rows, ops).read()  # pinned memory is allocated once
    torch.cuda.set_sync_debug_mode("error")
    try:
        draws = begin_sample(on_gpu, rows, ops)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = draws.read()
    assert [s.token_id for s in found] == [s.token_id for s in expected]
    assert draws.tokens_S.tolist() == [s.token_id for s in expected]
    for a, b in zip(found, expected, strict=True):
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None:
            values = sorted(a.logprobs.values()), sorted(b.logprobs.values())
            assert values[0] == pytest.approx(values[1], abs=1e-4)
