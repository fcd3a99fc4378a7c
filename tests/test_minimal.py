"""minimal.py and the engine: the same greedy tokens for the same random crowds (invariant 12).

Requests come at random steps, with prompts longer than the budget, on pools too small for all.
Each side draws its own budget, block size and pool. The two share no code.
"""

import random
from collections import Counter

import pytest
import torch

from nanobatch import LLM, SamplingParams, minimal
from nanobatch.tiny_model.grammar import story

NUM_CROWDS, NUM_IN_DEFAULT_RUN = 200, 20


@pytest.fixture(scope="module")
def llama():
    return minimal.Llama()


def draw_crowd(rng):
    """(step of arrival, prompt, max_tokens) of each request: pieces of stories, some near their
    end, some the same as others, and a few bytes that are no story."""
    crowd = []
    for _ in range(rng.randint(2, 7)):
        tokens = minimal.encode(story(rng))
        length = rng.choice([1, rng.randint(1, 8), rng.randint(9, 40), len(tokens) - 8])
        prompt = tokens[: min(length, 120)]
        if length == len(tokens) - 8:
            prompt = tokens[-rng.randint(9, 60) : -8]
        if crowd and rng.random() < 0.2:
            prompt = rng.choice(crowd)[1]
        if rng.random() < 0.1:
            prompt = [rng.randrange(258) for _ in range(rng.randint(1, 20))]
        crowd.append((rng.choice([0, 0, rng.randint(0, 25)]), prompt, rng.randint(1, 24)))
    return sorted(crowd, key=lambda arrival: arrival[0])


def draw_sizes(rng, crowd):
    """block_size, num_blocks, budget, max_num_seqs. The longest request always fits alone."""
    block_size, max_num_seqs = rng.choice([1, 2, 3, 4, 5, 8, 16]), rng.randint(1, 6)
    lengths = [len(prompt) + max_tokens for _, prompt, max_tokens in crowd]
    num_blocks = -(-max(lengths) // block_size) + rng.randint(
        0, sum(lengths) // block_size // 2
    )
    return block_size, num_blocks, max_num_seqs + rng.choice([0, 2, 7, 30]), max_num_seqs


def serve_minimal(crowd, llama, sizes, seen):
    """Each request's output. seen counts what happened on the way."""
    engine = minimal.Engine(llama, *sizes)
    engine.kv_cache.fill_(float("nan"))  # what nobody has written reaches no output
    requests = [minimal.Request(str(i), p, n) for i, (_, p, n) in enumerate(crowd)]
    to_come = list(zip((step for step, _, _ in crowd), requests, strict=True))
    step = 0
    while to_come or engine.waiting or engine.running:
        while to_come and to_come[0][0] <= step:
            engine.add(to_come.pop(0)[1])
        before, is_idle = engine.running.copy(), not (engine.running or engine.waiting)
        plan = engine.step()
        assert is_idle == (not plan)  # invariant 8
        check(engine, plan, before)
        seen["chunks"] += sum(n > 1 and r.num_left > 0 for r, n in plan)
        seen["preempted"] += sum(r in engine.waiting for r in before)
        seen["joined others"] += bool(before) and any(r not in before for r, _ in plan)
        seen["left others"] += bool(engine.running) and len(plan) > len(engine.running)
        step += 1
    seen["natural ends"] += sum(r.output[-1] == minimal.END for r in requests)
    assert sorted(engine.free_blocks) == list(range(sizes[1]))
    return [request.output for request in requests]


def check(engine, plan, before):
    """Invariants 1, 7 and 9."""
    held = [block for request in engine.running for block in request.block_table]
    assert sorted(engine.free_blocks + held) == list(range(engine.kv_cache.shape[2]))
    assert sum(n for _, n in plan) <= engine.budget
    assert len(engine.running) <= engine.max_num_seqs
    assert all(n >= 1 for _, n in plan)
    served = [request for request, _ in plan]
    assert all(request in served or request in engine.waiting for request in before)


def serve_engine(crowd, sizes):
    block_size, num_blocks, budget, max_num_seqs = sizes
    llm = LLM("tiny", dtype="float32", block_size=block_size, num_blocks=num_blocks,
              max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)  # fmt: skip
    outputs = {}
    for step in range(10_000):
        for i, (arrival, prompt, max_tokens) in enumerate(crowd):
            if arrival == step:
                params = SamplingParams(temperature=0, max_tokens=max_tokens)
                llm.engine.add_request(prompt, params, request_id=str(i))
        for out in llm.engine.step():
            outputs[int(out.request_id)] = list(out.token_ids)
        if not llm.engine.has_unfinished() and step >= crowd[-1][0]:
            break
    return [outputs[i] for i in range(len(crowd))]


def compare(seeds, llama):
    seen = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        crowd = draw_crowd(rng)
        mine, engines = draw_sizes(rng, crowd), draw_sizes(rng, crowd)
        found = serve_minimal(crowd, llama, mine, seen)
        assert found == serve_engine(crowd, engines), (seed, mine, engines)
    kinds = ("chunks", "preempted", "joined others", "left others", "natural ends")
    assert all(seen[kind] > len(seeds) / 10 for kind in kinds), seen


def test_crowds(llama):
    compare(range(NUM_IN_DEFAULT_RUN), llama)


@pytest.mark.slow
def test_all_crowds(llama):
    compare(range(NUM_CROWDS), llama)


@pytest.mark.parametrize("num_prompt, max_tokens", [(0, 4), (17, 4), (2, 19), (1, 1000)])
def test_what_can_never_end_is_refused(llama, num_prompt, max_tokens):
    engine = minimal.Engine(llama, block_size=4, num_blocks=5)
    with pytest.raises(ValueError, match="must fit in 20"):
        engine.add(minimal.Request("a", [65] * num_prompt, max_tokens))
    assert not engine.waiting
    engine.add(minimal.Request("b", [65] * 16, 4))
    while engine.running or engine.waiting:
        engine.step()


def test_no_longer_than_the_model_s_context(llama):
    engine = minimal.Engine(llama, num_blocks=100)
    with pytest.raises(ValueError, match="must fit in 1024"):
        engine.add(minimal.Request("a", [65] * 1000, 25))


def test_nothing_to_do(llama):
    assert minimal.Engine(llama).step() == []


def test_a_budget_below_max_num_seqs_is_refused(llama):
    with pytest.raises(AssertionError):
        minimal.Engine(llama, budget=3, max_num_seqs=4)


def test_the_demo_shows_each_event(capsys):
    minimal.demo()
    text = capsys.readouterr().out
    assert "A: Once upon a time|" in text
    for event in ("joins", "is preempted", "leaves"):
        assert event in text
    assert text.count("arrives") == text.count("leaves") == 4


def test_logits_are_those_of_transformers(llama):
    """Closer than tokens: the scores after every position of a text."""
    from transformers import LlamaForCausalLM

    tokens = torch.tensor(minimal.encode("One day, a little cat named Ben found a scarf."))
    positions = torch.arange(len(tokens))

    def attend(layer, q_THD, k_TKD, v_TKD):
        return minimal.attention(q_THD, k_TKD, v_TKD, positions)

    found = llama.forward(tokens, positions, positions, attend)
    oracle = LlamaForCausalLM.from_pretrained(minimal.TINY_MODEL, dtype=torch.float32)
    with torch.inference_mode():
        wanted = oracle(tokens.unsqueeze(0)).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
