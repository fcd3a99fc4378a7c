"""Attention over a paged cache, the masks, the packed batch and the small operations.

The oracle of attention is a softmax in float64 over one query at a time, which has no mask,
no group and no block:

    for each query     keys = those of its own request, up to itself, the last W of them
                       out  = softmax(scale * q . keys) . values

A case writes each key and value by hand to its block and offset, in shuffled blocks, and
fills all other slots of the pool with poison (NaN, inf). So every comparison with the oracle
also says that nothing came from a slot that is not the sequence's (invariant 14;
faults 26 to 31). torch's scaled_dot_product_attention and transformers' Llama modules
are second opinions.
"""

from random import Random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from nanobatch import paged_attention
from nanobatch.attention import PagedAttend, choose_backend, masked_attention
from nanobatch.attention_masks import (
    block_diagonal_mask,
    causal_mask,
    padded_mask,
    visible,
    wasted_share,
)
from nanobatch.batch import PADDING_SLOT, Batch, Row, pack
from nanobatch.extensions.cpu import compiler as cpu_compiler
from nanobatch.extensions.cpu import kernels as cpu_kernels
from nanobatch.kernels import gather
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.ops import AttentionArgs, apply_rope
from nanobatch.utils.arithmetic import cdiv

NAN, INF = float("nan"), float("inf")
ATOL = 2e-5


@pytest.fixture(autouse=True, params=["c", "torch"])
def backend(request, monkeypatch):
    """All of it twice: with the CPU's kernels where there is a compiler, and without."""
    torch.manual_seed(0)
    if request.param == "torch":
        monkeypatch.setattr(cpu_kernels, "elementwise", lambda *x: None)
    elif cpu_compiler.find() is None:
        pytest.skip("no C compiler")
    return choose_backend(request.param, "cpu", block_size=16)


# (keys already cached, tokens of this step) of each sequence: decodes, prompts, chunks.
MIXED = [(5, 1), (0, 7), (6, 3), (0, 1), (11, 1), (4, 4)]


class Case:
    """One step's attention: queries, a cache in which only the sequences' slots are clean.

    Args:
        shapes: for each sequence (keys cached before, tokens of this step).
        poison: what the other slots hold, block by block in turn; first and last block of
            the pool belong to nobody.
        more_columns: of the block tables, beyond what the longest sequence needs.
    """

    def __init__(
        self,
        shapes,
        block_size,
        H=4,
        K=2,
        D=32,
        poison=(NAN, INF, -INF),
        more_columns=2,
        seed=0,
    ):
        self.shapes, self.block_size, self.scale = shapes, block_size, D**-0.5
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        lens = [before + now for before, now in shapes]
        tables = shuffled_tables(lens, block_size, seed)
        self.num_blocks = sum(map(len, tables)) + 2
        self.keys, self.values = ([randn(n, K, D) for n in lens] for _ in range(2))
        self.q_THD = randn(sum(now for _, now in shapes), H, D)
        self.k_cache, self.v_cache = (
            self.cache_of(pieces, tables, poison) for pieces in (self.keys, self.values)
        )
        rows = [
            Row([0] * now, before, table)
            for (before, now), table in zip(shapes, tables, strict=True)
        ]
        self.batch = pack(rows, block_size)
        self.pad_tables(tables, more_columns, seed)

    def cache_of(self, pieces, tables, poison):
        _, K, D = pieces[0].shape
        cache = torch.empty(self.num_blocks, K, self.block_size, D)
        for block in range(self.num_blocks):
            cache[block] = poison[block % len(poison)]
        for piece_LKD, table in zip(pieces, tables, strict=True):
            for position, head_KD in enumerate(piece_LKD):
                block, offset = divmod(position, self.block_size)
                cache[table[block], :, offset] = head_KD
        return cache

    def pad_tables(self, tables, more_columns, seed):
        """More columns, and any ids at all behind the end of each table."""
        width = max(map(len, tables)) + more_columns
        random = Random(seed + 1)
        padded = [
            table + [random.randrange(self.num_blocks) for _ in range(width - len(table))]
            for table in tables
        ]
        self.batch.block_tables_SB = torch.tensor(padded, dtype=torch.int32)

    def run(self, **kwargs):
        self.batch.derived.clear()
        return paged_attention(
            self.q_THD, self.k_cache, self.v_cache, self.batch, scale=self.scale, **kwargs
        )

    def oracle(self, sliding_window=None, softcap=None):
        """float64 [T, H, D], one query at a time."""
        out, T = [], 0
        for (before, now), keys, values in zip(
            self.shapes, self.keys, self.values, strict=True
        ):
            for position in range(before, before + now):
                first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
                seen = slice(first, position + 1)
                out.append(
                    attend_one(self.q_THD[T], keys[seen], values[seen], self.scale, softcap)
                )
                T += 1
        return torch.stack(out)

    def check(self, atol=ATOL, **kwargs):
        found, wanted = self.run(**kwargs), self.oracle(**kwargs)
        assert found.isfinite().all(), "poison reached an output"
        torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=0)
        return found


def attend_one(q_HD, k_LKD, v_LKD, scale, softcap=None):
    """The definition, in float64: query head h reads key head h // (H / K)."""
    group_size = q_HD.shape[0] // k_LKD.shape[1]
    out = []
    for h, q_D in enumerate(q_HD.double()):
        k_LD, v_LD = (x[:, h // group_size].double() for x in (k_LKD, v_LKD))
        scores_L = scale * (k_LD @ q_D)
        if softcap is not None:
            scores_L = softcap * torch.tanh(scores_L / softcap)
        weights_L = torch.exp(scores_L - scores_L.max())
        out.append((weights_L / weights_L.sum()) @ v_LD)
    return torch.stack(out)


def shuffled_tables(lens, block_size, seed):
    """Block tables for these lengths in a pool with one spare block at either end."""
    num_blocks = [cdiv(n, block_size) for n in lens]
    ids = list(range(1, sum(num_blocks) + 1))
    Random(seed).shuffle(ids)
    return [[ids.pop() for _ in range(n)] for n in num_blocks]


# ---- paged attention -------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("H, K", [(2, 2), (6, 2), (4, 1), (5, 1), (14, 2), (8, 1), (3, 1)])
def test_equals_the_oracle_for_any_group_size(H, K, block_size):
    Case(MIXED, block_size, H, K).check()


@pytest.mark.parametrize("D", [32, 64, 80, 96, 128])
def test_equals_the_oracle_for_any_head_dim(D):
    Case(MIXED, block_size=4, D=D).check()


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_equals_the_oracle_around_the_ends_of_blocks(block_size):
    P = block_size
    lens = sorted({1, 2, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1} - {0})
    Case([(0, n) for n in lens], P).check()
    Case([(n - 1, 1) for n in lens], P).check()
    Case([(n - 2, 2) for n in lens if n >= 2], P).check()
    for n in lens:  # and alone: what a row gets must not hang on its neighbours
        Case([(n - 1, 1)], P).check()


@pytest.mark.parametrize("window", [1, 2, 4, 5])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_window_of_w_sees_exactly_w_keys(window, block_size):
    lens = [n for n in (window - 1, window, window + 1, 3 * window + 2) if n >= 1]
    Case([(0, n) for n in lens], block_size).check(sliding_window=window)
    Case([(n - 1, 1) for n in lens], block_size).check(sliding_window=window)
    Case([(n - 1, 2) for n in lens], block_size).check(sliding_window=window)
    Case(MIXED, block_size).check(sliding_window=window)


@pytest.mark.parametrize("more_columns", [0, 2])
def test_windows_that_begin_in_different_blocks_share_a_group(more_columns):
    """One reaches from block 1 into block 2, one lies in block 2: the last there is."""
    shapes = [(8, 1), (11, 1)]
    Case(shapes, block_size=4, more_columns=more_columns).check(sliding_window=2)


def test_the_window_counts_the_query_itself():
    """With all scores equal an output is the mean of what is seen: here, by counting."""
    case = Case([(7, 1), (0, 6)], block_size=4, H=1, K=1, D=2)
    case.q_THD.zero_()
    tables = case.batch.block_tables_SB.tolist()
    for table, n in zip(tables, [8, 6], strict=True):
        for position in range(n):
            case.v_cache[table[position // 4], 0, position % 4] = position
    found = case.run(sliding_window=3)[:, 0, 0].tolist()
    # The query at position 7 sees 5, 6, 7; those at 0 to 5 see 0; 0, 1; 0, 1, 2; 1, 2, 3 ...
    assert found == pytest.approx([6, 0, 0.5, 1, 2, 3, 4])


@pytest.mark.parametrize("window", [None, 3])
def test_softcap_is_applied_to_the_scaled_scores(window):
    # A large scale, so that tanh bends.
    case = Case(MIXED, block_size=4)
    case.scale = 2.0
    capped = case.check(sliding_window=window, softcap=3.0)
    assert (capped - case.run(sliding_window=window)).abs().max() > 0.1
    case = Case([(0, 5)], block_size=4)  # plain causal: no mask is built
    case.scale = 2.0
    case.check(sliding_window=window, softcap=3.0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_what_lies_in_other_slots_changes_no_bit(poison, window):
    clean = Case(MIXED, block_size=4, poison=(0.0,)).run(sliding_window=window)
    dirty = Case(MIXED, block_size=4, poison=(poison,)).run(sliding_window=window)
    assert torch.equal(dirty, clean)


def test_where_the_blocks_lie_changes_no_bit():
    case = Case(MIXED, block_size=4)
    wanted = case.run()
    order = torch.randperm(case.num_blocks, generator=torch.Generator().manual_seed(3))
    new_id_of = torch.argsort(order)  # block b moves to where order has b
    case.k_cache, case.v_cache = case.k_cache[order], case.v_cache[order]
    case.batch.block_tables_SB = new_id_of[case.batch.block_tables_SB.long()].int()
    assert torch.equal(case.run(), wanted)


def test_any_id_may_pad_a_block_table():
    case = Case(MIXED, block_size=4)
    wanted = case.run()
    lens = case.batch.seq_lens_S.tolist()
    for id in range(case.num_blocks):
        for row, n in enumerate(lens):
            case.batch.block_tables_SB[row, cdiv(n, 4) :] = id
        assert torch.equal(case.run(), wanted), f"padding {id}"


def test_a_table_may_hold_blocks_for_tokens_that_are_yet_to_come():
    """Blocks that are the request's but not yet written: NaN, and beyond seq_len."""
    case = Case([(4, 1), (0, 3)], block_size=4)
    (a, b, *_), (c, *_) = case.batch.block_tables_SB.tolist()
    last = case.num_blocks - 1
    case.batch.block_tables_SB = torch.tensor([[a, b, last], [c, last, 0]]).int()
    case.check()


def test_queries_are_the_last_of_the_keys_positions():
    """The mask is aligned at the bottom right: torch's own is_causal is not (fault 26)."""
    case = Case([(4, 3)], block_size=4, H=2, K=2)
    q, k, v = (x.transpose(0, 1) for x in (case.q_THD, case.keys[0], case.values[0]))
    full_q = torch.cat([torch.randn(2, 4, 32), q], dim=1)
    wanted = F.scaled_dot_product_attention(full_q, k, v, is_causal=True)[:, -3:]
    top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = case.run().transpose(0, 1)
    torch.testing.assert_close(found, wanted, atol=ATOL, rtol=0)
    assert (found - top_left).abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("block_size", [1, 4])
def test_more_decodes_than_one_group_holds(block_size, window):
    random = Random(1)
    shapes = [(random.randrange(60), 1) for _ in range(60 * block_size)]
    num_blocks = sum(cdiv(before + 1, block_size) for before, _ in shapes)
    assert num_blocks > 2 * gather.MAX_GROUP_BLOCKS
    Case([*shapes, (3, 5)], block_size, H=2, K=1, D=8).check(sliding_window=window)


@pytest.mark.parametrize("max_group_blocks", [1, 3, 7, 10**9])
def test_how_decodes_are_grouped_does_not_matter(max_group_blocks, monkeypatch):
    monkeypatch.setattr(gather, "MAX_GROUP_BLOCKS", max_group_blocks)
    for window in (None, 3):
        Case([(n, 1) for n in (30, 0, 4, 3, 7, 8, 1)], block_size=4).check(
            sliding_window=window
        )


def test_one_batch_serves_layers_with_different_windows():
    """What is derived from a batch is kept for the next layer; not for another window."""
    case = Case(MIXED, block_size=4)
    for window in (None, 3, None, 5, 3):
        found = paged_attention(
            case.q_THD,
            case.k_cache,
            case.v_cache,
            case.batch,
            scale=case.scale,
            sliding_window=window,
        )
        torch.testing.assert_close(found.double(), case.oracle(window), atol=ATOL, rtol=0)


def test_bfloat16():
    case = Case(MIXED, block_size=4)
    for name in ("q_THD", "k_cache", "v_cache"):
        setattr(case, name, getattr(case, name).bfloat16())
    case.keys, case.values = ([x.bfloat16() for x in xs] for xs in (case.keys, case.values))
    for kwargs in ({}, {"sliding_window": 3}, {"softcap": 5.0}):
        assert case.check(atol=3e-2, **kwargs).dtype == torch.bfloat16


def test_tokens_of_no_sequence_get_zeros():
    case = Case(MIXED, block_size=4)
    wanted = case.run()
    case.q_THD = torch.cat([case.q_THD, torch.full((3, 4, 32), NAN)])
    found = case.run()
    assert torch.equal(found[:-3], wanted)
    assert (found[-3:] == 0).all()


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((3, 5, 8), (2, 2, 4, 8), (2, 2, 4, 8)),  # 5 heads over 2
        ((3, 4, 8), (2, 2, 4, 16), (2, 2, 4, 16)),  # another head dim
        ((3, 4, 8), (2, 2, 4, 8), (2, 2, 5, 8)),  # keys and values differ
        ((3, 32), (2, 2, 4, 8), (2, 2, 4, 8)),
        ((3, 4, 8), (8, 4, 8), (8, 4, 8)),
    ],
)
def test_shapes_that_do_not_agree_are_refused(q, k, v):
    batch = pack([Row([1, 2, 3], 0, [0])], 4)
    with pytest.raises(ValueError) as refused:
        paged_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v), batch, scale=1.0)
    for shape in (q, k, v):
        assert str(shape) in str(refused.value)


def test_fewer_queries_than_the_batch_has_tokens_are_refused():
    case = Case([(0, 3), (2, 1)], block_size=4)
    with pytest.raises(ValueError, match="q_THD has 3 rows and the batch 4 tokens"):
        paged_attention(case.q_THD[:3], case.k_cache, case.v_cache, case.batch, scale=1.0)


def test_an_unknown_backend_is_refused_by_name():
    case = Case([(0, 1)], block_size=4)
    with pytest.raises(ValueError, match="backend is 'magic'.*'torch'"):
        case.run(backend="magic")


# ---- writing to the cache --------------------------------------------------------------


def test_a_token_is_written_to_its_slot_and_to_no_other(backend):
    N, K, P, D, T = 3, 2, 4, 8, 6
    slots = [5, -1, 11, 0, -1, 6]
    k_TKD, v_TKD = torch.randn(T, K, D), torch.randn(T, K, D)
    k_cache, v_cache = torch.zeros(N, K, P, D), torch.zeros(N, K, P, D)
    no_turn = torch.ones(T, D // 2), torch.zeros(T, D // 2)
    q_THD, cache = torch.randn(T, 4, D), KVCache(k_cache, v_cache)
    backend.rope_and_write(q_THD, k_TKD, v_TKD, *no_turn, cache, torch.tensor(slots))
    for x_TKD, cache in ((k_TKD, k_cache), (v_TKD, v_cache)):
        wanted = torch.zeros(N, K, P, D)
        for t, slot in enumerate(slots):
            if slot != PADDING_SLOT:
                wanted[slot // P, :, slot % P] = x_TKD[t]
        assert torch.equal(cache, wanted)


def test_slots_of_minus_one_write_nowhere(backend):
    cache = torch.full((2, 1, 4, 2), 7.0)
    angles = torch.ones(3, 1), torch.zeros(3, 1)
    x = torch.full((3, 1, 2), NAN)
    slots = torch.full((3,), PADDING_SLOT)
    backend.rope_and_write(x, x, x, *angles, KVCache(cache, cache), slots)
    assert (cache == 7.0).all()


def test_attend_rotates_writes_and_attends(backend):
    """PagedAttend from nothing but q, k, v: prompt and decode, two layers that differ."""
    H, K, D, P = 4, 2, 8, 4
    torch.manual_seed(0)
    prompt = [torch.randn(6, n, D) for n in (H, K, K)]
    angles_TR = torch.arange(6.0).unsqueeze(1) * torch.rand(D // 2)
    caches = [KVCache(*torch.full((2, 3, K, P, D), NAN)) for _ in range(2)]
    outs = []
    for positions in (slice(0, 4), slice(4, 5), slice(5, 6)):
        num_tokens = positions.stop - positions.start
        batch = pack([Row([0] * num_tokens, positions.start, [2, 1])], P)
        attend = PagedAttend(batch, caches, backend)
        q, k, v = (x[positions] for x in prompt)
        cos, sin = angles_TR[positions].cos(), angles_TR[positions].sin()
        everything, window = AttentionArgs(None, D**-0.5), AttentionArgs(2, D**-0.5)
        first = attend(0, q, k, v, cos, sin, everything)
        outs.append((first, attend(1, q, -k, v, cos, sin, window)))
    for layer, (sign, window) in enumerate([(1, None), (-1, 2)]):
        q, k, v = prompt
        q, k = (apply_rope(x, angles_TR.cos(), angles_TR.sin()) for x in (q, sign * k))
        for t in range(6):
            seen = slice(0 if window is None else max(0, t + 1 - window), t + 1)
            wanted = attend_one(q[t], k[seen], v[seen], D**-0.5)
            found = torch.cat([out[layer] for out in outs])[t]
            torch.testing.assert_close(found.double(), wanted, atol=ATOL, rtol=0)


# ---- masks -----------------------------------------------------------------------------

LENS = (2, 3, 1, 6)
WINDOWS = [None, 1, 3]


def prompts_case():
    return Case([(0, n) for n in LENS], block_size=4)


def packed(pieces_LKD):
    return torch.cat(pieces_LKD).transpose(0, 1).unsqueeze(0)  # [1, heads, T, D]


def run_block_diagonal(case, mask):
    q_1HTD = case.q_THD.transpose(0, 1).unsqueeze(0)
    out = masked_attention(
        q_1HTD, packed(case.keys), packed(case.values), mask, scale=case.scale
    )
    return out[0].transpose(0, 1)


def run_padded(case, mask):
    """Left-padded to the longest; pads hold large numbers. Returns the real rows, packed."""
    max_len = mask.shape[-1]

    def pad(pieces):
        padded = torch.full((len(LENS), max_len, *pieces[0].shape[1:]), 1e4)
        for row, piece in enumerate(pieces):
            padded[row, max_len - len(piece) :] = piece
        return padded.transpose(1, 2)

    q = case.q_THD.split(LENS)
    out = masked_attention(pad(q), pad(case.keys), pad(case.values), mask, scale=case.scale)
    assert out.isfinite().all()
    return torch.cat([out[row, :, -n:].transpose(0, 1) for row, n in enumerate(LENS)])


@pytest.mark.parametrize("window", WINDOWS)
def test_three_layouts_of_a_ragged_batch_give_the_same_outputs(window):
    case = prompts_case()
    wanted = case.check(sliding_window=window)
    block_diagonal = run_block_diagonal(case, block_diagonal_mask(LENS, window))
    padded = run_padded(case, padded_mask(LENS, sliding_window=window))
    wider = run_padded(case, padded_mask(LENS, max_len=9, sliding_window=window))
    for found in (block_diagonal, padded, wider):
        torch.testing.assert_close(found, wanted, atol=ATOL, rtol=0)


def test_one_wrong_entry_of_a_mask_leaks_into_another_request():
    case = prompts_case()
    mask = block_diagonal_mask(LENS)
    wanted = run_block_diagonal(case, mask)
    query, key_of_another = 3, 1  # the second request's second token, the first's last
    assert not mask[query, key_of_another]
    mask[query, key_of_another] = True
    changed = (run_block_diagonal(case, mask) != wanted).flatten(1).any(1)
    assert changed.tolist() == [t == query for t in range(sum(LENS))]


def picture(text):
    return torch.tensor([[c == "1" for c in line.split()] for line in text.split("\n") if line])


def test_the_masks_of_the_docstring():
    padded = padded_mask([2, 3])
    assert padded.shape == (2, 1, 3, 3)
    assert torch.equal(padded[0, 0], picture(". 1 .\n. 1 .\n. 1 1"))
    assert torch.equal(padded[1, 0], picture("1 . .\n1 1 .\n1 1 1"))
    assert torch.equal(
        block_diagonal_mask([2, 3]),
        picture("1 . . . .\n1 1 . . .\n. . 1 . .\n. . 1 1 .\n. . 1 1 1"),
    )
    assert torch.equal(causal_mask(2, 4), picture("1 1 1 .\n1 1 1 1"))
    assert torch.equal(causal_mask(2, 4, 2), picture(". 1 1 .\n. . 1 1"))


@pytest.mark.parametrize("window", WINDOWS)
def test_visible_is_the_rule_behind_every_mask(window):
    positions = torch.arange(7)
    sees = visible(positions.unsqueeze(1), positions, window)
    for query in range(7):
        seen = [key for key in range(7) if sees[query, key]]
        assert seen == list(range(query + 1))[-window if window else 0 :]
    assert torch.equal(causal_mask(7, 7, window), sees)
    assert torch.equal(causal_mask(3, 7, window), sees[4:])


def test_wasted_share_counted_by_hand():
    # 2 and 3 tokens need 3 + 6 scores, of 2 * 9 padded ones or of 25 packed ones.
    assert wasted_share(padded_mask([2, 3]), [2, 3]) == pytest.approx(1 - 9 / 18)
    assert wasted_share(padded_mask([2, 3], max_len=4), [2, 3]) == pytest.approx(1 - 9 / 32)
    assert wasted_share(block_diagonal_mask([2, 3]), [2, 3]) == pytest.approx(1 - 9 / 25)
    assert wasted_share(causal_mask(1, 1), [1]) == 0


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_masked_attention_is_causal_without_a_mask_on_demand(softcap):
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    kwargs = {"scale": 1.0, "softcap": softcap}
    masked = masked_attention(q, k, v, causal_mask(5, 5), **kwargs)
    torch.testing.assert_close(
        masked_attention(q, k, v, None, is_causal=True, **kwargs), masked, atol=ATOL, rtol=0
    )
    everything = masked_attention(q, k, v, None, **kwargs)
    wanted = attend_one(q[1, :, 0], *(x[1].transpose(0, 1) for x in (k, v)), 1.0, softcap)
    torch.testing.assert_close(everything[1, :, 0].double(), wanted, atol=ATOL, rtol=0)


# ---- the packed batch ------------------------------------------------------------------


def test_the_batch_of_the_docstring():
    batch = pack(
        [Row([9], 5, [2, 0]), Row([5, 8, 2], 0, [3]), Row([7, 7], 4, [1, 5])], block_size=4
    )
    assert batch.token_ids_T.tolist() == [9, 5, 8, 2, 7, 7]
    assert batch.positions_T.tolist() == [5, 0, 1, 2, 4, 5]
    assert batch.query_start_loc.tolist() == [0, 1, 4, 6]
    assert batch.seq_lens_S.tolist() == [6, 3, 6]
    assert batch.slot_mapping_T.tolist() == [1, 12, 13, 14, 20, 21]
    assert batch.logits_indices_S.tolist() == [0, 3, 5]
    tables = batch.block_tables_SB.tolist()
    assert [tables[0], tables[1][:1], tables[2]] == [[2, 0], [3], [1, 5]]
    assert 0 <= tables[1][1] < 6


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_pack_equals_a_loop_over_tokens(block_size):
    random = Random(block_size)
    rows = []
    for _ in range(20):
        start, num_tokens = random.randrange(40), random.randrange(1, 9)
        num_blocks = cdiv(start + num_tokens, block_size) + random.randrange(2)
        table = [random.randrange(2**31 // 64) for _ in range(num_blocks)]
        rows.append(Row([random.randrange(100) for _ in range(num_tokens)], start, table))
    batch = pack(rows, block_size)
    tokens = [
        (token, row.start + i, row.block_table[(row.start + i) // block_size])
        for row in rows
        for i, token in enumerate(row.token_ids)
    ]
    assert batch.token_ids_T.tolist() == [token for token, _, _ in tokens]
    assert batch.positions_T.tolist() == [position for _, position, _ in tokens]
    slots = [block * block_size + position % block_size for _, position, block in tokens]
    assert batch.slot_mapping_T.tolist() == slots
    ends = [sum(len(r.token_ids) for r in rows[: i + 1]) for i in range(len(rows))]
    assert batch.query_start_loc.tolist() == [0, *ends]
    assert batch.logits_indices_S.tolist() == [end - 1 for end in ends]
    assert batch.seq_lens_S.tolist() == [r.start + len(r.token_ids) for r in rows]


def test_slots_beyond_31_bits():
    batch = pack([Row([1], 0, [2**31 - 1])], block_size=16)
    assert batch.slot_mapping_T.tolist() == [(2**31 - 1) * 16]


def test_number_formats_of_a_batch():
    batch = pack([Row([1, 2], 0, [0])], block_size=4)
    assert isinstance(batch, Batch)
    for name in ("token_ids_T", "positions_T", "slot_mapping_T", "logits_indices_S"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("query_start_loc", "seq_lens_S", "block_tables_SB"):
        assert getattr(batch, name).dtype == torch.int32, name


@pytest.mark.parametrize(
    "bad", [Row([], 0, [0]), Row([1] * 5, 0, [0]), Row([1], 4, [0]), Row([1], 0, [])]
)
def test_a_row_without_tokens_or_room_is_refused(bad):
    with pytest.raises(ValueError, match=r"rows\[1\]"):
        pack([Row([1], 0, [0]), bad], block_size=4)


# ---- small operations against transformers' Llama --------------------------------------


def test_rms_norm_equals_transformers(backend):
    theirs = modeling_llama.LlamaRMSNorm(48, eps=1e-3)
    theirs.weight.data = torch.randn(48)
    x, residual = 0.05 * torch.randn(5, 48), 0.05 * torch.randn(5, 48)
    with torch.no_grad():
        normed, carried = backend.rms_norm(x, theirs.weight, 1e-3)
        torch.testing.assert_close(normed, theirs(x))
        assert torch.equal(carried, x)
        normed, carried = backend.rms_norm(x, theirs.weight, 1e-3, residual)
        torch.testing.assert_close(normed, theirs(x + residual))
        assert torch.equal(carried, x + residual)


def test_rope_equals_transformers():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    positions = torch.tensor([[0, 1, 5, 1000]])
    q, k = torch.randn(1, 4, 4, 16), torch.randn(1, 2, 4, 16)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, positions)
    wanted = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for x, rotated in zip((q, k), wanted, strict=True):
        found = apply_rope(x[0].transpose(0, 1), cos[0, :, :8], sin[0, :, :8])
        torch.testing.assert_close(found.transpose(0, 1), rotated[0])


def test_rope_keeps_the_number_format():
    x = torch.randn(3, 2, 8, dtype=torch.bfloat16)
    assert apply_rope(x, torch.ones(3, 4), torch.zeros(3, 4)).dtype == torch.bfloat16


def test_silu_mul_equals_transformers(backend):
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    mlp = modeling_llama.LlamaMLP(config)
    x = torch.randn(5, 16)
    gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
    torch.testing.assert_close(mlp.down_proj(backend.silu_mul(gate_up)), mlp(x))


@pytest.mark.parametrize(
    "rows",
    [[], [Row([1], -1, [0])], [Row([1], 0, [-1])], [Row([], 0, [0])], [Row([1], 4, [0])]],
)
def test_pack_refuses_what_lies_nowhere(rows):
    with pytest.raises(ValueError, match="rows"):
        pack(rows, 4)
