"""Chapter 3: its checks accept right answers and refuse wrong ones; its figures draw."""

import pytest
from matplotlib.figure import Figure

from nanobatch import check
from nanobatch.block_allocator import BlockAllocator
from nanobatch.check.chapter3 import admission_order
from nanobatch.config import EngineConfig
from nanobatch.plan import ScheduledRequest, SchedulerOutput
from nanobatch.policies.ordering import FCFS, SJF
from nanobatch.request import Request, SamplingParams
from nanobatch.scheduler import Scheduler
from nanobatch.simulation.simulator import simulate
from nanobatch.viz import steps as viz

# ------------------------------------------------------------------------------------- ex3_1


def test_ex3_1_accepts_right_answers():
    def other(num_tokens, num_computed_tokens, budget_left, num_behind):
        for num_behind_yet in range(num_behind):
            del num_behind_yet
            budget_left -= 1
        left = num_tokens - num_computed_tokens
        return left if left < budget_left else budget_left

    check.ex3_1(lambda n, c, b, k: min(n - c, b - k))
    check.ex3_1(other)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda n, c, b, k: min(n - c, b), r"\(400, 0, 400, 1\) it gives 400; right is 399"),
        (lambda n, c, b, k: min(n - c, b) - k, r"\(13, 12, 5, 4\) it gives -3; right is 1"),
        (lambda n, c, b, k: b - k, r"\(13, 12, 100, 0\) it gives 100; right is 1"),
        (lambda n, c, b, k: min(n, b - k), r"\(13, 12, 100, 0\) it gives 13"),
        (lambda n, c, b, k: 1 / 0, r"\(13, 12, 100, 0\) raises ZeroDivisionError"),
    ],
)
def test_ex3_1_refuses_wrong_answers(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check.ex3_1(wrong)


def test_one_token_is_kept_for_each_behind():
    """Where it matters: several tokens a step (accepted drafts) before other requests."""
    config = EngineConfig(
        num_blocks=100, max_num_seqs=3, max_num_batched_tokens=6, enable_prefix_caching=False
    )
    scheduler = Scheduler(config, BlockAllocator(100, 16, False))
    for name in ("r0", "r1", "r2"):
        scheduler.add(Request(name, [1, 1], SamplingParams(max_tokens=50)))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, {name: [1] * 5 for name in ("r0", "r1", "r2")}, 1.0)
    plan = scheduler.schedule(1.0)
    assert [row.num_tokens for row in plan.scheduled] == [4, 1, 1]


# ------------------------------------------------------------------------------------- ex3_2


class Aging:
    def __init__(self, rate):
        self.rate = rate

    def left(self, request):
        num_output = request.max_tokens - len(request.output_token_ids)
        return request.num_uncomputed_tokens + num_output

    def key(self, request, now):
        return self.left(request) - self.rate * (now - request.arrival_time)


class ByArrival(Aging):
    """The same order: what all keys share at one time does not matter."""

    def key(self, request, now):
        prompt = len(request.prompt_token_ids)
        return prompt + request.max_tokens + self.rate * request.arrival_time


class WrongSign(Aging):
    def key(self, request, now):
        return self.left(request) + self.rate * (now - request.arrival_time)


class NoRate(Aging):
    def key(self, request, now):
        return self.left(request) - (now - request.arrival_time)


class OutputOnly(Aging):
    def key(self, request, now):
        return request.max_tokens - self.rate * (now - request.arrival_time)


class NowOnly(Aging):
    def key(self, request, now):
        return self.left(request) - self.rate * now


class Plain(SJF):
    def __init__(self, rate):
        super().__init__()


class Queue(FCFS):
    def __init__(self, rate):
        pass


class NoKey:
    def __init__(self, rate):
        pass


class Crashes(Aging):
    def key(self, request, now):
        return request.tokens_left


def test_ex3_2_accepts_right_answers():
    check.ex3_2(Aging)
    check.ex3_2(ByArrival)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (WrongSign, r"for rate=2.0 .* right is 'long'"),
        (NoRate, r"for rate=2.0 .* gives 'short at 66' place 12; right is 'long'"),
        (OutputOnly, r"for rate=1.0 .* gives 'prompt' place 1; right is 'first'"),
        (NowOnly, r"for rate=2.0 .* right is 'long'"),
        (Plain, r"for rate=2.0 .* right is 'long'"),
        (Queue, r"for rate=0.0 .* gives 'middle' place 1; right is 'short'"),
        (NoKey, r"for \(0.0\) .* no method key"),
        (Crashes, r"\(0.0, .* raises AttributeError"),
    ],
)
def test_ex3_2_refuses_wrong_answers(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check.ex3_2(wrong)


def test_ex3_2_names_the_first_place_only():
    with pytest.raises(AssertionError) as refusal:
        check.ex3_2(WrongSign)
    (message,) = str(refusal.value).splitlines()
    assert "'long' (prompt 100, max_tokens 40) has waited " in message
    assert message.count(" has waited ") == 2 and len(message) < 250


def test_aging_lets_the_long_go_before_those_that_came_much_later():
    jobs = [("long", 0, 100, 40), *[(f"s{t}", t, 4, 6) for t in range(0, 120, 6)]]
    order = admission_order(Aging(2.0), jobs)
    # Tokens left: 140 and 10; at 2 tokens a second that is a head start of 65 s.
    assert order.index("s60") < order.index("long") < order.index("s66")


# ------------------------------------------------------------------------------------- ex3_3


def test_ex3_3_accepts_right_answers():
    check.ex3_3(lambda p, m, b: -(-(p + m - 1) // b))
    check.ex3_3(lambda p, m, b: len(range(0, p + m - 1, b)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p, m, b: -(-(p + m) // b), r"\(10, 7, 16\) it gives 2; right is 1"),
        (lambda p, m, b: (p + m - 1) // b, r"\(10, 6, 16\) it gives 0; right is 1"),
        (lambda p, m, b: (p + m) // b + 1, r"\(10, 6, 16\) it gives 2; right is 1"),
        (
            lambda p, m, b: -(-p // b) + -(-(m - 1) // b),
            r"\(10, 6, 16\) it gives 2; right is 1",
        ),
        (lambda p, m, b: (p + m - 1) / b, r"\(10, 6, 16\) it gives 0.9375; right is 1"),
    ],
)
def test_ex3_3_refuses_wrong_answers(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check.ex3_3(wrong)


# ----------------------------------------------------------------------------------- figures


def drive(config, requests):
    """The plans of a scheduler, a token for whoever samples."""
    allocator = BlockAllocator(config.num_blocks, config.block_size, False)
    scheduler, plans = Scheduler(config, allocator), []
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished():
        plan = scheduler.schedule(float(len(plans)))
        sampled = {row.request.request_id: [1] for row in plan.scheduled if row.samples}
        scheduler.update(plan, sampled, float(len(plans) + 1))
        plans.append(plan)
    return plans


def some_requests(lengths):
    return [
        Request(f"r{i}", [1] * p, SamplingParams(max_tokens=m), arrival_time=0.0)
        for i, (p, m) in enumerate(lengths)
    ]


def config_of(**kwargs):
    given = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    return EngineConfig(enable_prefix_caching=False, **(given | kwargs))


def texts(ax):
    return [text.get_text() for text in ax.texts]


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_step_timelines_draw_plans():
    plans = drive(config_of(), some_requests([(6, 3), (5, 2), (2, 2)]))
    figure = viz.step_timelines({"continuous": plans})
    ax = figure.axes[0]
    assert ax.get_xlabel() == "step" and ax.get_title(loc="left") == "continuous"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["r0", "r1", "r2"]
    assert len(texts(ax)) == sum(len(plan.scheduled) for plan in plans)
    assert "finished, keeps its slot" not in labels(figure)


def test_step_timelines_show_padding_and_preemption():
    requests = [(6, 8), (5, 2), (2, 2)]
    static = drive(config_of(batching="static"), some_requests(requests))
    assert "finished, keeps its slot" in labels(viz.step_timelines({"static": static}))
    small = drive(config_of(num_blocks=4), some_requests([(6, 8), (5, 8)]))
    figure = viz.step_timelines({"small pool": small})
    num_preempted = sum(len(plan.preempted) for plan in small)
    assert num_preempted > 0 and "preempted" in labels(figure)
    assert len(figure.axes[0].lines) == num_preempted


def test_states_of_a_request():
    steps = [viz.as_step(s) for s in ({"b": 2}, {"a": 5}, {"b": 1}, {"a": 1}, {"b": 1})]
    states = ["absent", "prefills", "waits", "decodes", "absent"]
    assert viz.states_of("a", steps, 1) == states
    assert viz.states_of("a", steps, 0) == ["waits", *states[1:]]


def test_numbers_of_requests():
    assert viz.numbers_of([viz.as_step({"r7": 1, "r2": 1})]) == {"r2": 2, "r7": 7}
    assert viz.numbers_of([viz.as_step({"x": 1, "r2": 1})]) == {"x": 0, "r2": 1}
    assert viz.numbers_of([viz.as_step({"a1": 1, "b1": 1})]) == {"a1": 0, "b1": 1}


def test_a_simulation_knows_its_arrivals():
    requests = [Request(f"r{i}", [1] * 20, arrival_time=0.4 * i) for i in range(3)]
    result = simulate(requests, config=EngineConfig(max_num_seqs=1))
    arrivals = viz.arrival_steps(result)
    assert arrivals["r0"] == 0 < arrivals["r1"] < arrivals["r2"] < len(result.timeline)
    assert len(viz.step_timelines({"simulated": result}).axes) == 1
    assert isinstance(viz.token_budget(result, 2048), Figure)


def test_token_budget_stacks_what_was_planned():
    plans = drive(config_of(), some_requests([(6, 3), (5, 2), (2, 2)]))
    ax = viz.token_budget(plans, 8, "stacked").axes[0]
    assert ax.get_ylabel() == "tokens in the step"
    assert len(ax.containers) == 1 + 3  # grey, and a stack for each request
    drawn = sum(bar.get_height() for bars in ax.containers[1:] for bar in bars)
    assert drawn == sum(plan.num_tokens for plan in plans)
    assert {"r0", "r1", "r2"} <= set(texts(ax))


def test_token_budgets_have_one_scale():
    plans = drive(config_of(), some_requests([(6, 3), (5, 2), (2, 2)]))
    low, high = viz.token_budgets({"low": plans, "high": plans}, [8, 24]).axes
    assert low.get_ylim() == high.get_ylim() and low.get_ylim()[1] > 24
    assert [ax.get_title(loc="left") for ax in (low, high)] == ["low", "high"]
    assert "budget 8" in texts(low) and "budget 24" in texts(high)


def test_a_step_is_read_from_each_kind():
    request = Request("r0", [1, 1])
    plan = SchedulerOutput([ScheduledRequest(request, 2)], preempted=[Request("r1", [1])])
    assert viz.as_step(plan) == viz.Step({"r0": 2}, frozenset({"r1"}))
    assert viz.as_step({"r0": 2}) == viz.Step({"r0": 2})


@pytest.mark.parametrize("name", viz.EXAMPLES)
def test_examples_draw(name):
    figure = viz.EXAMPLES[name]()
    figure.canvas.draw()
    assert figure.axes
