"""Chapter 5: its checks take right answers and refuse wrong ones; its figures draw."""

import pytest
from matplotlib.patches import Rectangle

from nanobatch import BlockAllocator, EngineConfig, Request, RequestMetrics, Scheduler
from nanobatch.check import ex5_1, ex5_2, ex5_3
from nanobatch.viz import blocks
from nanobatch.viz.pool_state import state_of, take_state

# ---- right and wrong answers -----------------------------------------------------------


def slots_by_divmod(positions, block_table, block_size):
    pairs = [divmod(position, block_size) for position in positions]
    return [block_table[index] * block_size + offset for index, offset in pairs]


def slots_by_listing(positions, block_table, block_size):
    slots = [b * block_size + offset for b in block_table for offset in range(block_size)]
    return [slots[position] for position in positions]


def slots_swapped(positions, block_table, block_size):
    return [block_table[p % block_size] * block_size + p // block_size for p in positions]


def slots_are_positions(positions, block_table, block_size):
    return list(positions)


def slots_without_offset(positions, block_table, block_size):
    return [block_table[p // block_size] * block_size for p in positions]


def slots_from_the_start(positions, block_table, block_size):
    return slots_by_divmod(range(len(positions)), block_table, block_size)


def new_by_ceiling(num_computed, num_new, table_len, block_size):
    return max(0, -(-(num_computed + num_new) // block_size) - table_len)


def new_by_room(num_computed, num_new, table_len, block_size):
    missing = num_computed + num_new - table_len * block_size
    return 0 if missing <= 0 else (missing - 1) // block_size + 1


def new_off_by_one(num_computed, num_new, table_len, block_size):
    return max(0, (num_computed + num_new) // block_size + 1 - table_len)


def new_by_floor(num_computed, num_new, table_len, block_size):
    return max(0, (num_computed + num_new) // block_size - table_len)


def new_may_be_negative(num_computed, num_new, table_len, block_size):
    return -(-(num_computed + num_new) // block_size) - table_len


def new_for_new_alone(num_computed, num_new, table_len, block_size):
    return -(-num_new // block_size)


def matched_by_loop(token_ids, cached, block_size):
    num_blocks = 0
    while (num_blocks + 1) * block_size < len(token_ids):
        if tuple(token_ids[: (num_blocks + 1) * block_size]) not in cached:
            break
        num_blocks += 1
    return num_blocks


def matched_by_recursion(token_ids, cached, block_size, num_found=0):
    end = (num_found + 1) * block_size
    if end > len(token_ids) - 1 or tuple(token_ids[:end]) not in cached:
        return num_found
    return matched_by_recursion(token_ids, cached, block_size, num_found + 1)


def matched_to_the_end(token_ids, cached, block_size):
    num_blocks = 0
    for end in range(block_size, len(token_ids) + 1, block_size):
        if tuple(token_ids[:end]) not in cached:
            break
        num_blocks += 1
    return num_blocks


def matched_with_gaps(token_ids, cached, block_size):
    ends = range(block_size, len(token_ids), block_size)
    return sum(tuple(token_ids[:end]) in cached for end in ends)


def matched_by_own_tokens(token_ids, cached, block_size):
    last_blocks = {key[-block_size:] for key in cached}
    num_blocks = 0
    for end in range(block_size, len(token_ids), block_size):
        if tuple(token_ids[end - block_size : end]) not in last_blocks:
            break
        num_blocks += 1
    return num_blocks


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (ex5_1, slots_by_divmod),
        (ex5_1, slots_by_listing),
        (ex5_2, new_by_ceiling),
        (ex5_2, new_by_room),
        (ex5_3, matched_by_loop),
        (ex5_3, matched_by_recursion),
    ],
)
def test_right_answers_pass(check, answer, capsys):
    check(answer)
    assert capsys.readouterr().out == f"{check.__name__}: right\n"


@pytest.mark.parametrize(
    ("check", "answer", "message"),
    [
        (ex5_1, slots_swapped, r"\(\[0, 1, 2\], \[3\], 4\) raises IndexError"),
        (ex5_1, slots_are_positions, r"for \(\[0, 1, 2\], \[3\], 4\) it gives \[0, 1, 2\]; r"),
        (ex5_1, slots_without_offset, r"it gives \[12, 12, 12\]; right is \[12, 13, 14\]"),
        (
            ex5_1,
            slots_from_the_start,
            r"for \(\[5\], \[2, 0\], 4\) it gives \[8\]; right is \[1\]",
        ),
        (
            ex5_2,
            new_off_by_one,
            r"num_new=4, table_len=0, block_size=4\) it gives 2; right is 1",
        ),
        (ex5_2, new_by_floor, r"num_new=1, table_len=0, block_size=4\) it gives 0; right is 1"),
        (ex5_2, new_may_be_negative, r"table_len=4, block_size=16\) it gives -1; right is 0"),
        (ex5_2, new_for_new_alone, r"\(num_computed=3, num_new=1, .* it gives 1; right is 0"),
        (ex5_3, matched_to_the_end, r"\(\[1, 2, .*, 12\], .* it gives 3; right is 2"),
        (ex5_3, matched_with_gaps, r"\(\[1, 2, .*, 10\], .* it gives 1; right is 0"),
        (ex5_3, matched_by_own_tokens, r"\(\[5, 6, 7, 8, 9\], .* it gives 1; right is 0"),
    ],
)
def test_wrong_answers_are_refused(check, answer, message):
    with pytest.raises(AssertionError, match=message):
        check(answer)


# ---- figures ---------------------------------------------------------------------------


@pytest.fixture
def scheduler():
    """Two running requests on 8 blocks of 4: 9 tokens of r0, and 6 of r1."""
    config = EngineConfig(
        num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32
    )
    scheduler = Scheduler(config, BlockAllocator(8, 4))
    for i, num_tokens in enumerate((9, 6)):
        scheduler.add(Request(f"r{i}", [i] * num_tokens))
    plan = scheduler.schedule(now=0.0)
    scheduler.update(plan, {"r0": [5], "r1": [5]}, now=0.0)
    return scheduler


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_a_state_is_what_the_pool_looks_like_and_stays_so(scheduler):
    state = state_of(scheduler, "now")
    assert state.tables == {0: (0, 1, 2), 1: (3, 4)}
    assert state.num_tokens == {0: 9, 1: 6}
    assert [state.filled(0, i) for i in range(3)] == [1.0, 1.0, 0.25]
    assert state.holders(3) == [1] and state.holders(7) == []
    scheduler.abort("r0")
    assert state.tables[0] == (0, 1, 2) and not state.cached_free
    assert state_of(scheduler).cached_free == {0, 1}  # full; block 2 was not


def test_pool_shows_each_block_and_each_table(scheduler):
    scheduler.abort("r0")
    pool_ax, tables_ax = blocks.pool(state_of(scheduler, "after abort")).axes
    assert pool_ax.get_title(loc="left") == "after abort"
    assert texts(pool_ax).count("1") == 1 + 2  # the id of a block, and two blocks of r1
    hatched = [p for p in pool_ax.patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert len(hatched) == 2
    assert texts(tables_ax) == ["3", "4", "6 tokens"]


def test_a_shared_block_carries_both_numbers():
    allocator = BlockAllocator(4, 2)
    table = allocator.allocate(2)
    allocator.acquire(table[:1])
    pool_ax = blocks.pool(take_state(allocator, {0: table, 5: table[:1]})).axes[0]
    assert "0+5" in texts(pool_ax)


def test_pool_steps_has_a_row_for_each_state(scheduler):
    states = [state_of(scheduler, "one"), state_of(scheduler, "two")]
    (ax,) = blocks.pool_steps(states).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "two"]
    assert ax.get_xlabel() == "block of the pool"


def test_animation_has_a_frame_for_each_state(scheduler):
    states = [state_of(scheduler, "first")]
    scheduler.abort("r1")
    states.append(state_of(scheduler, "second"))
    gif = blocks.as_gif(blocks.animate(states), dpi=30)
    assert gif.startswith(b"GIF8") and len(gif) < 100_000


def test_fragmentation_measures_what_is_reserved_and_empty():
    (ax,) = blocks.fragmentation([1, 7], max_len=16, block_sizes=(1, 4)).axes
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == pytest.approx([75.0, 0.0, 100 * 4 / 12])
    assert "tokens" in ax.get_xlabel() and "%" in ax.get_ylabel()


def test_prefix_hits_splits_each_prompt():
    turns = [[RequestMetrics(num_prompt_tokens=10, num_cached_tokens=4)]] * 2
    (ax,) = blocks.prefix_hits(turns).axes
    assert [bar.get_width() for bar in ax.patches] == [4, 6, 4, 6]
    assert ax.get_yticklabels()[1].get_text() == "turn 2, chat 0"


@pytest.mark.parametrize("name", blocks.EXAMPLES)
def test_examples_draw(name):
    assert blocks.EXAMPLES[name]().axes
