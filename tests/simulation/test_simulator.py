"""The simulator: the engine's own plans, at times that a cost model gives.

The cost model is held against measured times of Llama-2-7B's layers: medians from Vidur's
profiles (Microsoft, MIT licence; data/profiling/compute/<gpu>/meta-llama/Llama-2-7b-hf/mlp.csv
at commit 7d47513; one GPU, fp16), ms for the four matrix products of a layer.
"""

import dataclasses
import itertools

import pytest
import test_engine
from test_engine import CROWD, check_crowd, tiny_engine

from nanobatch import (
    EngineConfig,
    LLMEngine,
    Request,
    SamplingParams,
    SimulatedRunner,
    VirtualClock,
    simulate,
)
from nanobatch.bench.simulated import COMPARISONS, requests_of, run
from nanobatch.bench.workload import random_requests
from nanobatch.config import ADMISSIONS, BATCHING, POLICIES, PREEMPTIONS
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.plan import ScheduledRequest, SchedulerOutput
from nanobatch.simulation.cost_model import GPUS, CostModel
from nanobatch.simulation.replica import Replica
from nanobatch.simulation.simulator import make_cost_model
from nanobatch.utils.arithmetic import keys_seen

# fmt: off
MEASURED_MS = {  # tokens: ms of a layer's products
    "a100-80gb": {
        1: 0.266, 8: 0.26, 16: 0.263, 32: 0.273, 48: 0.272, 64: 0.278, 80: 0.331, 96: 0.341,
        128: 0.3515, 144: 0.52, 160: 0.52, 192: 0.4595, 224: 0.5195, 256: 0.5025, 288: 0.649,
        320: 0.65, 352: 0.654, 384: 0.671, 400: 0.877, 448: 0.922, 480: 0.941, 512: 0.953,
        768: 1.3165, 1024: 1.959, 1280: 2.2115, 1536: 2.838, 1792: 3.357, 2048: 3.8235,
        2304: 4.2895, 2560: 4.605, 2816: 5.1625, 3072: 5.6425, 3328: 6.096, 3584: 6.6005,
        3840: 6.971, 4096: 7.3985,
    },
    "h100": {
        1: 0.156, 8: 0.152, 16: 0.1605, 32: 0.159, 48: 0.162, 64: 0.162, 80: 0.203, 96: 0.204,
        128: 0.18, 144: 0.2125, 160: 0.2055, 192: 0.2055, 224: 0.257, 256: 0.26, 288: 0.2605,
        320: 0.264, 352: 0.301, 384: 0.304, 400: 0.3525, 448: 0.3475, 480: 0.3315,
        512: 0.3285, 768: 0.521, 1024: 0.565, 1280: 0.716, 1536: 0.909, 1792: 1.01, 2048: 1.08,
        2304: 1.4065, 2560: 1.4165, 2816: 1.5655, 3072: 1.703, 3328: 1.992, 3584: 2.0135,
        3840: 2.1825, 4096: 2.222,
    },
}
# fmt: on


# ---- the cost model --------------------------------------------------------------------


@pytest.mark.parametrize("gpu", MEASURED_MS)
def test_products_against_measured_times(gpu):
    model = make_cost_model("llama-2-7b", gpu)
    errors = {n: model.products_seconds(n) * 1e3 / ms - 1 for n, ms in MEASURED_MS[gpu].items()}
    mean = sum(map(abs, errors.values())) / len(errors)
    worst = max(errors, key=lambda n: abs(errors[n]))
    print(f"\n{gpu}: mean error {mean:.1%}, worst {errors[worst]:+.1%} at {worst} tokens")
    assert mean <= 0.06 and abs(errors[worst]) <= 0.25


def model_of(**changes):
    return CostModel(MODEL_PRESETS["llama-2-7b"], GPUS["a100-80gb"], **changes)


def plan_of(*rows, padding=(), swap_out=(), swap_in=()):
    """Rows as (computed before, tokens now, whether the last one is among them)."""
    plan = SchedulerOutput(swap_out=list(swap_out), swap_in=list(swap_in))
    for i, (start, n, samples) in enumerate(rows):
        request = Request(str(i), [1] * (start + n + (not samples)))
        request.num_computed_tokens = start
        plan.scheduled.append(ScheduledRequest(request, n))
    for length in padding:
        plan.padding.append(Request("p", [1] * length))
    return plan


def test_a_plan_is_what_it_computes():
    model = model_of()
    seconds = model.step_seconds(plan_of((99, 1, True), (0, 50, True), (64, 16, False)))
    keys = 100 + 50 + 80
    scores = 100 + 50 * 51 // 2 + keys_seen(64, 16, None)[1]
    assert seconds == model.seconds(1 + 50 + 16, keys, scores, num_logits=2)


def test_padding_rows_cost_their_share():
    model = model_of()
    padded = model.step_seconds(plan_of((99, 1, True), padding=[70]))
    assert padded == model.seconds(2, 100 + 70, 100 + 70, num_logits=2)


def test_copies_take_the_bus():
    model = model_of()
    alone = model.step_seconds(plan_of((99, 1, True)))
    copied = model.step_seconds(plan_of((99, 1, True), swap_out=[(1, 2)] * 3, swap_in=[(0, 0)]))
    block = 2 * 32 * 32 * 128 * 16 * 2  # keys and values, layers, heads, their size, slots
    assert copied - alone == pytest.approx(4 * block / 25e9)


def test_decoding_alone_reads_the_weights():
    """Little more than weights / bandwidth, and hardly more for eight."""
    model = model_of(host_seconds=0.0)
    weights = 6.6e9 * 2 / (2.039e12 * 0.86)
    one, eight = (model.seconds(n, 0, 0, n) for n in (1, 8))
    assert weights < one < 1.3 * weights and eight < 1.02 * one


def test_a_long_prompt_runs_at_the_matrix_rate():
    seconds = model_of().seconds(4096, 4096, 4096 * 4097 // 2, 1)
    flops = 2 * 6.5e9 * 4096
    assert 0.5 < flops / seconds / 312e12 < 0.75


def test_tensor_parallel_shares_weights_and_pays_for_it():
    one, two, four = (
        model_of(tensor_parallel_size=tp, host_seconds=0.0).seconds(64, 64_000, 64_000, 64)
        for tp in (1, 2, 4)
    )
    assert one / 2 < two < one / 1.5 and two / 2 < four < two


@pytest.mark.parametrize("tp", [2, 4])
def test_all_reduces_by_hand(tp):
    """Two in each layer: a ring sends each of T x E 16-bit numbers 2 (tp - 1) / tp times."""
    T, gpu = 64, dataclasses.replace(GPUS["a100-80gb"], kernel_seconds=0.0)
    slow, fast = (
        CostModel(
            MODEL_PRESETS["llama-2-7b"],
            dataclasses.replace(gpu, link=link),
            tensor_parallel_size=tp,
        ).seconds(T, 0, 0, 0)
        for link in (300e9, 1e30)
    )
    one_layer = 2 * (2 * (tp - 1) / tp * T * 4096 * 2) / 300e9
    assert slow - fast == pytest.approx(32 * one_layer)


def test_memory_by_hand_and_a_model_that_does_not_fit():
    model = model_of()
    weights = 2 * 6_738_149_376  # bytes
    assert model.num_blocks(0.9) == int((72e9 - weights) // 8_388_608)
    most = int((72e9 - weights) // (8_388_608 // 16))  # tokens
    assert model_of(block_size=most).num_blocks(0.9) == 1
    with pytest.raises(ValueError, match=f"block_size is {most + 1}; it must be <= {most}"):
        model_of(block_size=most + 1).num_blocks(0.9)
    with pytest.raises(ValueError, match=r"does not fit.*138\.0 GB.*1 GPU.*80 GB have 72\.0"):
        simulate([], model="llama-2-70b")
    assert simulate([], model="llama-2-70b", tensor_parallel_size=4).timeline == []


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"model": "gpt-5"}, "model is 'gpt-5'; it must be one of 'tiny'"),
        ({"gpu": "abacus"}, "gpu is 'abacus'; it must be one of 'a100-80gb'"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3; it must divide the 32 heads"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"config": EngineConfig(max_model_len=5000)}, "max_model_len is 5000.*at most 4096"),
    ],
)
def test_what_there_is_not_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        simulate([], **wrong)


# ---- simulations -----------------------------------------------------------------------


def made_up(n=20, rate=4.0, **params):
    return [
        Request(
            f"r{i}",
            [i % 7 + 1] * (10 + 3 * i),
            SamplingParams(max_tokens=5 + i % 11, ignore_eos=True, **params),
            arrival_time=i / rate,
        )
        for i in range(n)
    ]


def test_everybody_ends_at_max_tokens_and_the_timeline_adds_up():
    requests = made_up()
    result = simulate(requests, config=EngineConfig(max_num_seqs=4))
    assert result.metrics["completed"] == 20
    assert result.metrics["total_output_tokens"] == sum(5 + i % 11 for i in range(20))
    for name, m in result.requests.items():
        i = int(name[1:])
        assert m.num_output_tokens == 5 + i % 11 and m.arrival_time == i / 4.0
        assert m.arrival_time <= m.first_scheduled_time < m.first_token_time <= m.finish_time
        # each computed token is in some step: prompt and output but for the last token
        computed = sum(step.num_tokens.get(name, 0) for step in result.timeline)
        assert computed == 10 + 3 * i + 5 + i % 11 - 1 - m.num_cached_tokens
    for step, after in itertools.pairwise(result.timeline):
        assert step.duration > 0 and after.start >= step.start + step.duration - 1e-12
    assert result.metrics["duration"] == pytest.approx(
        result.timeline[-1].start + result.timeline[-1].duration
    )


def test_the_same_requests_give_the_same_result():
    a, b = (simulate(made_up(), config=EngineConfig(max_num_seqs=4)) for _ in range(2))
    assert a == b


def test_an_iterator_is_read_as_time_goes_on():
    asked = []

    def coming():
        for request in made_up(rate=0.5):
            asked.append(request.arrival_time)
            yield request

    as_list = simulate(made_up(rate=0.5))
    as_iterator = simulate(coming())
    assert as_list == as_iterator and len(asked) == 20


def test_idle_time_passes():
    late = [Request("a", [1], SamplingParams(max_tokens=1), arrival_time=100.0)]
    metrics = simulate(late).requests["a"]
    assert metrics.first_scheduled_time == 100.0 and metrics.queue_time == 0.0


def test_texts_that_end_by_themselves():
    requests = [
        Request("a", [5], SamplingParams(max_tokens=50), eos_token_ids=(9,)),
        Request("b", [6], SamplingParams(max_tokens=4), eos_token_ids=(9,)),
    ]
    result = simulate(requests, output_lens={"a": 7, "b": 7})
    assert result.requests["a"].num_output_tokens == 7
    assert result.requests["b"].num_output_tokens == 4
    assert [r.finish_reason for r in requests] == ["stop", "length"]


def test_a_request_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="max_model_len is 4096"):
        simulate([Request("a", [1] * 5000)])


def test_the_timeline_need_not_be_kept():
    with_it = simulate(made_up())
    without = simulate(made_up(), keep_timeline=False)
    assert without.timeline == [] and without.metrics == with_it.metrics


# ---- the simulator and the engine ------------------------------------------------------


class Watched:
    """Notes the plans that a runner is given."""

    def __init__(self, runner):
        self.runner, self.plans = runner, []
        self.vocab_size, self.eos_token_ids = 258, ()

    def run(self, plan):
        tokens = {row.request.request_id: row.num_tokens for row in plan.scheduled}
        self.plans.append((tokens, [r.request_id for r in plan.preempted]))
        return self.runner.run(plan)


@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batching", BATCHING)
def test_the_engine_makes_the_same_plans(batching, policy, admission, preemption):
    """The same steps, batches and preemptions; all that differs is time."""
    knobs = {
        "block_size": 4, "num_blocks": 14, "max_num_seqs": 5, "max_num_batched_tokens": 16,
        "max_model_len": 100, "batching": batching, "policy": policy, "admission": admission,
        "preemption": preemption, "num_host_blocks": 10, "enable_prefix_caching": False,
    }  # fmt: skip

    def requests():
        return [
            Request(f"r{i}", [97 + i] * (3 + 5 * (i % 4)),
                    SamplingParams(max_tokens=4 + 7 * (i % 3), temperature=0, ignore_eos=True),
                    priority=i % 3)
            for i in range(10)
        ]  # fmt: skip

    simulated = simulate(requests(), model="tiny", config=EngineConfig(**knobs))
    engine = tiny_engine(Watched, **knobs)
    for r in requests():
        engine.add_request(r.prompt_token_ids, r.params, request_id=r.request_id,
                           arrival_time=0.0, priority=r.priority)  # fmt: skip
    while engine.has_unfinished():
        engine.step()
    steps = [(step.num_tokens, step.preempted) for step in simulated.timeline]
    assert engine.runner.plans == steps
    if admission == "reserve":
        assert not any(preempted for _, preempted in steps)


def test_an_engine_runs_on_a_simulated_runner():
    clock = VirtualClock()
    config = EngineConfig(num_blocks=100, max_num_seqs=4, max_model_len=200)
    runner = SimulatedRunner(make_cost_model("llama-2-7b", "h100"), clock)
    engine = LLMEngine(config, runner, clock=clock)
    ids = [
        engine.add_request([i] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
        for i in range(6)
    ]
    outs = {}
    while engine.has_unfinished():
        outs |= {out.request_id: out for out in engine.step()}
    assert sorted(outs) == sorted(ids) and all(len(o.token_ids) == 3 for o in outs.values())
    assert clock.now() > 0 and outs[ids[-1]].metrics.queue_time > 0


# ---- outputs are the same under all of them --------------------------------------------


# Pools that preempt some and many; one where everything fits, which preempts nobody.
POOLS = [(64, 64, "recompute")]
POOLS += [(*pool, preemption) for pool in ((15, 16), (12, 16)) for preemption in PREEMPTIONS]


@pytest.mark.parametrize("num_blocks, chunk, preemption", POOLS)
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batching", BATCHING)
def test_outputs_do_not_depend_on_any_of_it(
    batching, policy, admission, preemption, num_blocks, chunk
):
    """Invariants 10, 12, 13: on `tiny`, against the dense solo run."""
    engine = tiny_engine(
        batching=batching,
        policy=policy,
        admission=admission,
        preemption=preemption,
        num_host_blocks=6,
        num_blocks=num_blocks,
        max_num_batched_tokens=chunk,
        max_wait=1.0 if policy == "sjf" else None,
    )
    check_crowd(engine, CROWD, at_once=4)
    if num_blocks < 64 and admission == "on_demand" and batching == "continuous":
        assert engine.stats.num_preemptions > 0
        assert (engine.stats.num_swapped_blocks > 0) == (preemption == "swap")


def test_swapped_out_and_back_in_a_poisoned_pool():
    """Invariant 14 with swap: what comes back is what went, and nothing else."""
    engine = tiny_engine(
        test_engine.Poison, num_blocks=12, max_num_batched_tokens=16, preemption="swap",
        num_host_blocks=8, enable_prefix_caching=False,
    )  # fmt: skip
    engine.runner.scheduler = engine.scheduler
    check_crowd(engine, CROWD)
    assert engine.stats.num_swapped_blocks > 0


# ---- what the comparisons show ---------------------------------------------------------


def compare(kind, items, config, gpu="a100-80gb", model="llama-2-7b", **how):
    longest = max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)
    return {
        name: run(system, items, model=model, gpu=gpu, **how).metrics
        for name, system in COMPARISONS[kind](config, longest).items()
    }


def test_continuous_batching_is_worth_two_to_three_static_ones():
    items = list(random_requests(300, "uniform:50:300", "lognormal:200:0.5", vocab_size=1000))
    m = compare("ladder", items, EngineConfig(max_num_seqs=32))
    static, continuous = m["static"], m["continuous"]
    assert 2 < continuous["request_throughput"] / static["request_throughput"] < 3
    assert continuous["median_e2el_ms"] < 0.5 * static["median_e2el_ms"]
    assert m["sequential"]["request_throughput"] < static["request_throughput"]
    assert static["padding_share"] > 0.4 and continuous["padding_share"] == 0


def test_sjf_lowers_the_mean_and_starves_the_long_and_max_wait_bounds_it():
    items = list(
        random_requests(400, "uniform:50:300", "bimodal:50:1500:0.9", request_rate=5.5,
                        vocab_size=1000)
    )  # fmt: skip
    m = compare("policy", items, EngineConfig(max_num_seqs=16))
    fcfs, sjf, bounded = m["fcfs"], m["sjf"], m["sjf, 10 s"]
    assert sjf["mean_queue_ms"] < 0.6 * fcfs["mean_queue_ms"]
    assert sjf["max_queue_ms"] > 1.5 * fcfs["max_queue_ms"]
    # 10 s, and the time until somebody ends
    assert bounded["max_queue_ms"] < 12_500 < sjf["max_queue_ms"]
    assert bounded["mean_queue_ms"] < fcfs["mean_queue_ms"]
    assert m["sjf, learned"]["mean_queue_ms"] < fcfs["mean_queue_ms"]


def test_admission_trades_preemption_for_slots():
    items = list(random_requests(600, "uniform:50:600", "lognormal:400:0.5", vocab_size=1000))
    config = EngineConfig(max_num_seqs=256)
    m = compare("admission", items, config, max_tokens=2048)
    on_demand, reserve, predict = m["on_demand"], m["reserve"], m["predict"]
    assert reserve["num_preemptions"] == 0
    assert on_demand["num_preemptions"] > 5 * max(1, predict["num_preemptions"])
    assert (
        on_demand["slot_utilization"]
        > predict["slot_utilization"]
        > reserve["slot_utilization"]
    )
    assert reserve["request_throughput"] < predict["request_throughput"]


def test_chunked_prefill_cuts_the_tail_of_inter_token_latency():
    items = list(
        random_requests(200, "bimodal:100:3000:0.5", 200, request_rate=2.5, vocab_size=1000)
    )
    m = compare("ladder", items, EngineConfig(max_num_seqs=32, max_num_batched_tokens=512))
    whole, chunked = m["continuous"], m["+ chunked prefill"]
    assert chunked["p99_itl_ms"] < 0.5 * whole["p99_itl_ms"]


@pytest.mark.parametrize("gpus, num_blocks, expected", [
    # Llama-3.1-8B: 32 layers, 8 KV heads of 128, keys and values in 2 bytes: 2 MiB a block of
    # 16 tokens; 4 GiB are 2,048 of them, on each GPU.
    (1, 5000, 2048), (1, 2048, 2048), (1, 2047, 2047), (4, 5000, 5000), (4, 9000, 8192),
])  # fmt: skip
def test_swap_alone_has_host_memory_for_as_many_blocks_within_4_gib(gpus, num_blocks, expected):
    cost_model = make_cost_model("llama-3.1-8b", "a100-80gb", gpus)
    replica = Replica(EngineConfig(preemption="swap", num_blocks=num_blocks), cost_model)
    assert replica.engine.config.num_host_blocks == expected
    assert replica.engine.scheduler.preemption.host.num_blocks == expected
    replica = Replica(
        EngineConfig(preemption="swap", num_blocks=num_blocks, num_host_blocks=7), cost_model
    )
    assert replica.engine.scheduler.preemption.host.num_blocks == 7


def test_swap_saves_what_recompute_computes_again():
    items = list(random_requests(150, 512, "lognormal:400:0.5", vocab_size=1000))
    config = EngineConfig(max_num_seqs=64, num_blocks=2500, enable_prefix_caching=False)
    m = compare("preemption", items, config, model="llama-3.1-8b")
    assert m["recompute"]["recompute_share"] > 0.05 and m["swap"]["recompute_share"] == 0
    assert m["swap"]["num_preemptions"] > 0
    assert m["swap"]["request_throughput"] > m["recompute"]["request_throughput"]


def test_requests_ask_for_more_than_they_get():
    items = list(random_requests(5, 10, "uniform:1:20"))
    for request, item in zip(requests_of(items, 100), items, strict=True):
        assert request.params.max_tokens == 100
        assert request.prompt_token_ids == item.prompt_token_ids
    exact = [r.params.max_tokens for r in requests_of(items, None)]
    assert exact == [i.num_output_tokens for i in items]


def test_progress_is_shown_on_request(capsys):
    result = simulate(made_up(), progress=True)
    assert result.metrics["completed"] == 20
    assert "20/20" in capsys.readouterr().err


def test_an_engine_needs_to_know_its_pool():
    runner = SimulatedRunner(make_cost_model("llama-2-7b", "h100"), VirtualClock())
    with pytest.raises(ValueError, match="config.num_blocks is None"):
        LLMEngine(EngineConfig(), runner)
