"""Chapter 7: its checks accept right answers and refuse wrong ones; its figures draw."""

from itertools import takewhile

import pytest

from nanobatch import EngineConfig, LLMEngine, SamplingParams, StepResult, check
from nanobatch.utils.arithmetic import cdiv
from nanobatch.viz import lives
from nanobatch.viz.watch import Watch

# ------------------------------------------------------------------------------- exercise 7.1


def chunks(num_prompt_tokens, budget, num_decoding):
    sizes = []
    while sum(sizes) < num_prompt_tokens:
        sizes.append(min(num_prompt_tokens - sum(sizes), budget - num_decoding))
    return sizes


def chunks_by_division(num_prompt_tokens, budget, num_decoding):
    each = budget - num_decoding
    num_full, rest = divmod(num_prompt_tokens, each)
    return [each] * num_full + ([rest] if rest else [])


@pytest.mark.parametrize("answer", [chunks, chunks_by_division])
def test_ex7_1_accepts(answer, capsys):
    check.ex7_1(answer)
    assert capsys.readouterr().out == "ex7_1: right\n"


def chunks_without_decodes(num_prompt_tokens, budget, num_decoding):
    return chunks(num_prompt_tokens, budget, 0)


def chunks_with_an_empty_one(num_prompt_tokens, budget, num_decoding):
    each = budget - num_decoding
    return [each] * (num_prompt_tokens // each) + [num_prompt_tokens % each]


def chunks_and_the_sampled_token(num_prompt_tokens, budget, num_decoding):
    return [*chunks(num_prompt_tokens, budget, num_decoding), 1]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (chunks_without_decodes, r"for \(20, 8, 3\) it gives \[8, 8, 4\]; right is \[5, 5"),
        (chunks_with_an_empty_one, r"for \(8, 4, 0\) it gives \[4, 4, 0\]; right is \[4, 4\]"),
        (chunks_and_the_sampled_token, r"for \(10, 4, 0\) it gives \[4, 4, 2, 1\]"),
    ],
)
def test_ex7_1_refuses(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex7_1(answer)


# ------------------------------------------------------------------------------- exercise 7.2


def safe_delta(text, sent, stops):
    for start in range(sent, len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[sent:start]
    return text[sent:]


def safe_delta_by_length(text, sent, stops):
    held = 0
    for stop in stops:
        for n in range(1, min(len(stop) - 1, len(text)) + 1):
            if text.endswith(stop[:n]):
                held = max(held, n)
    return text[sent : len(text) - held]


@pytest.mark.parametrize("answer", [safe_delta, safe_delta_by_length])
def test_ex7_2_accepts(answer):
    check.ex7_2(answer)


def send_everything(text, sent, stops):
    return text[sent:]


def hold_back_the_shortest(text, sent, stops):
    for n in range(1, len(text) + 1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return text[sent : len(text) - n]
    return text[sent:]


def hold_back_for_the_first_stop(text, sent, stops):
    return safe_delta(text, sent, stops[:1])


def held_back_for(text, stop):
    """The length of the longest end of text that could become this stop."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


def hold_back_for_the_first_that_matches(text, sent, stops):
    held = next((n for n in (held_back_for(text, stop) for stop in stops) if n), 0)
    return text[sent : len(text) - held]


def hold_back_for_the_last_that_matches(text, sent, stops):
    held = 0
    for stop in stops:
        held = held_back_for(text, stop) or held
    return text[sent : len(text) - held]


def always_hold_back_the_longest(text, sent, stops):
    return text[sent : len(text) - max(map(len, stops), default=1) + 1]


def send_it_all_again(text, sent, stops):
    return text[:sent] + safe_delta(text, sent, stops)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (send_everything, r"for \('the E', 4, \['END!'\]\) it gives 'E'; right is ''"),
        (hold_back_the_shortest, r"for \('xaba', 1, \['abab!'\]\) it gives 'ab'; right is ''"),
        (hold_back_for_the_first_stop, r"\['stop', 'said no'\]\) it gives .*; right is ''"),
        (
            hold_back_for_the_first_that_matches,
            r"for \('xab', 1, \['bc', 'abd'\]\) it gives 'a'; right is ''",
        ),
        (
            hold_back_for_the_last_that_matches,
            r"for \('xab', 1, \['abd', 'bc'\]\) it gives 'a'; right is ''",
        ),
        (always_hold_back_the_longest, r"\['END!'\]\) it gives ''; right is 't"),
        (send_it_all_again, r"for \('On', 1, \[\]\) it gives 'On'; right is 'n'"),
    ],
)
def test_ex7_2_refuses(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex7_2(answer)


# ------------------------------------------------------------------------------- exercise 7.3


def recomputed_tokens(num_computed, is_cached, block_size):
    return num_computed - block_size * len(list(takewhile(bool, is_cached)))


def recomputed_tokens_by_a_loop(num_computed, is_cached, block_size):
    left = num_computed
    for found in is_cached:
        if not found:
            break
        left -= block_size
    return left


@pytest.mark.parametrize("answer", [recomputed_tokens, recomputed_tokens_by_a_loop])
def test_ex7_3_accepts(answer):
    check.ex7_3(answer)


def count_all_cached(num_computed, is_cached, block_size):
    return num_computed - block_size * sum(is_cached)


def forget_the_half_full_block(num_computed, is_cached, block_size):
    return block_size * (len(is_cached) - len(list(takewhile(bool, is_cached))))


def count_the_new_token(num_computed, is_cached, block_size):
    return recomputed_tokens(num_computed, is_cached, block_size) + 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (count_all_cached, r"for \(40, \[False, True\], 16\) it gives 24; right is 40"),
        (
            forget_the_half_full_block,
            r"for \(40, \[True, False\], 16\) it gives 16; right is 24",
        ),
        (count_the_new_token, r"for \(40, \[True, False\], 16\) it gives 25; right is 24"),
    ],
)
def test_ex7_3_refuses(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex7_3(answer)


# ------------------------------------------------------------------------------------ figures


class SevenRunner:
    """Samples token 7 for whoever samples."""

    vocab_size = 100

    def run(self, plan):
        rows = [row for row in plan.scheduled if row.samples]
        return StepResult({row.request.request_id: [7] for row in rows})


def watched(prompt_lens, num_outputs, **knobs):
    config = EngineConfig(block_size=4, max_num_seqs=4, **knobs)
    engine = LLMEngine(config, SevenRunner())
    watch = Watch(engine)
    for i, length in enumerate(prompt_lens):
        prompt = [(i + j) % 100 for j in range(length)]
        engine.add_request(prompt, SamplingParams(max_tokens=num_outputs))
    while engine.has_unfinished():
        engine.step()
    return engine, watch


def texts(figure):
    return [t.get_text() for ax in figure.axes for t in ax.texts]


def legend(figure):
    return [t.get_text() for t in figure.legends[0].get_texts()]


def test_a_watch_notes_chunks_waiting_and_decodes():
    _, watch = watched([10, 6], 3, num_blocks=64, max_num_batched_tokens=4)
    first, second = watch.requests
    kinds = [(s.cells[first].kind, s.cells[first].num_tokens) for s in watch.steps[:5]]
    assert kinds == [
        ("prefill", 4),
        ("prefill", 4),
        ("prefill", 2),
        ("decode", 1),
        ("decode", 1),
    ]
    assert watch.steps[0].cells[second].kind == "waiting"
    assert len(watch.token_gaps(first)) == 2 and min(watch.token_gaps(first)) > 0
    figure = lives.lives(watch, "chunks")
    assert {"4", "2", "r0", "r1", "length"} <= set(texts(figure))
    assert legend(figure) == [
        "waits",
        "prefill, with its tokens",
        "decode: one token",
        "ended",
    ]
    assert figure.axes[0].get_xlabel() == "step of the engine"


def test_a_watch_delegates_and_leaves():
    engine, watch = watched([3], 2, num_blocks=64, max_num_batched_tokens=4)
    with pytest.raises(ValueError, match="has 100; not in"):
        engine.add_request([100])
    watch.leave()
    assert isinstance(engine.runner, SevenRunner)


def test_a_cached_prefix_is_hatched():
    engine, watch = watched([9], 2, num_blocks=64, max_num_batched_tokens=16)
    engine.add_request(list(range(9)), SamplingParams(max_tokens=2))
    while engine.has_unfinished():
        engine.step()
    cells = [step.cells[watch.requests[1]] for step in watch.steps[2:]]
    assert [cell.num_cached for cell in cells] == [8, 0]
    figure = lives.lives(watch, "a hit")
    assert "cached tokens" in legend(figure) and "8" in texts(figure)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemptions_are_marked(preemption):
    swap = {"num_host_blocks": 16} if preemption == "swap" else {}
    _, watch = watched(
        [9, 9],
        12,
        num_blocks=cdiv(21, 4) + 2,
        max_num_batched_tokens=32,
        preemption=preemption,
        **swap,
    )
    num_preemptions = sum(len(step.preempted) for step in watch.steps)
    assert num_preemptions > 0
    figure = lives.lives(watch, preemption)
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert len(crosses) == num_preemptions
    assert ("on the host" in legend(figure)) == (preemption == "swap")
    is_back = any(cell.num_back for step in watch.steps for cell in step.cells.values())
    assert is_back == (preemption == "swap")


def test_lives_compared_has_one_time_axis():
    watches = {
        f"budget {n}": watched([30, 5], 4, num_blocks=64, max_num_batched_tokens=n)[1]
        for n in (64, 8)
    }
    figure = lives.lives_compared(watches)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["budget 64", "budget 8"]
    assert figure.axes[1].get_xlabel() == "time (ms)"


def test_what_cannot_be_drawn_is_refused():
    watch = Watch(LLMEngine(EngineConfig(num_blocks=4), SevenRunner()))
    with pytest.raises(ValueError, match="recorded no step"):
        lives.lives(watch, "nothing")
    with pytest.raises(ValueError, match="by is 'day'"):
        lives.lives(watch, "nothing", by="day")


@pytest.mark.parametrize("name", lives.EXAMPLES)
def test_examples_draw(name):
    figure = lives.EXAMPLES[name]()
    assert len(figure.axes[0].patches) > 10
