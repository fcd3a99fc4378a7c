"""The layouts of a ragged batch: padded, packed dense, packed in tiles, with cached prefixes.

The oracle is a softmax in float64 over one query at a time and the keys it may see: it has no
mask and no layout. Counts of scores are held against counting entries, tiles against looking
into each. A mask with one wrong entry is shown to change the text of another request.
"""

import warnings
from random import Random

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from nanobatch import paged_attention
from nanobatch.attention import masked_attention
from nanobatch.attention_masks import (
    block_diagonal_mask,
    block_sparse_mask,
    causal_mask,
    computed_scores,
    needed_scores,
    padded_mask,
    paged_mask,
    wasted_share,
)
from nanobatch.batch import Row, pack
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.ops import apply_rope
from nanobatch.models.loader import load
from nanobatch.utils.arithmetic import cdiv

H, K, D, P = 6, 2, 16, 4
SCALE = D**-0.5
LENS = [5, 11, 1, 4, 8]
QUERY_LENS = [1, 3, 1, 4, 5]  # decode, chunk, prompt of one, prompt, chunk
WINDOWS = [None, 1, 3, 100]
NAN = float("nan")


@pytest.fixture
def qkv():
    """Packed q_THD, k_TKD, v_TKD of whole requests."""
    generator = torch.Generator().manual_seed(0)
    T = sum(LENS)
    return [torch.randn(T, heads, D, generator=generator) for heads in (H, K, K)]


def oracle(q_THD, k_TKD, v_TKD, window):
    out, first = [], 0
    for n in LENS:
        for position in range(n):
            start = 0 if window is None else max(0, position + 1 - window)
            seen = slice(first + start, first + position + 1)
            q_HD = q_THD[first + position].double()
            k_HLD, v_HLD = (
                x[seen].double().repeat_interleave(H // K, dim=1).transpose(0, 1)
                for x in (k_TKD, v_TKD)
            )
            weights_HL = (SCALE * k_HLD @ q_HD.unsqueeze(2)).squeeze(2).softmax(dim=1)
            out.append((weights_HL.unsqueeze(1) @ v_HLD).squeeze(1))
        first += n
    return torch.stack(out).float()


def heads_first(x_TXD):
    return x_TXD.transpose(0, 1).unsqueeze(0)


def run_dense(q_THD, k_TKD, v_TKD, mask):
    out = masked_attention(*map(heads_first, (q_THD, k_TKD, v_TKD)), mask, scale=SCALE)
    return out[0].transpose(0, 1)


def run_padded(q_THD, k_TKD, v_TKD, mask):
    longest = mask.shape[-1]

    def pad(x_TXD):
        rows = [
            torch.cat([torch.full((longest - len(x), *x.shape[1:]), 1e4), x])
            for x in x_TXD.split(LENS)
        ]
        return torch.stack(rows).transpose(1, 2)

    out = masked_attention(pad(q_THD), pad(k_TKD), pad(v_TKD), mask, scale=SCALE)
    return torch.cat([row[:, -n:].transpose(0, 1) for row, n in zip(out, LENS, strict=True)])


def run_flex(q_THD, k_TKD, v_TKD, mask, flex=flex_attention):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # called without torch.compile
        out = flex(
            *map(heads_first, (q_THD, k_TKD, v_TKD)),
            block_mask=mask,
            enable_gqa=True,
            scale=SCALE,
        )
    return out[0].transpose(0, 1)


def run_paged(q_THD, k_TKD, v_TKD, query_lens, window):
    """The package's paged attention, with every slot of nobody NaN."""
    tables, num_blocks = [], 1
    for n in LENS:
        tables.append(list(range(num_blocks, num_blocks + cdiv(n, P)))[::-1])
        num_blocks += cdiv(n, P)
    k_cache, v_cache = (torch.full((num_blocks + 1, K, P, D), NAN) for _ in range(2))
    whole = pack([Row([0] * n, 0, t) for n, t in zip(LENS, tables, strict=True)], P)
    KVCache(k_cache, v_cache).write(k_TKD, v_TKD, whole.slot_mapping_T)
    rows = zip(LENS, query_lens, tables, strict=True)
    batch = pack([Row([0] * t, n - t, table) for n, t, table in rows], P)
    return paged_attention(q_THD, k_cache, v_cache, batch, scale=SCALE, sliding_window=window)


def last_of_each(x_T, query_lens):
    pieces = zip(x_T.split(LENS), query_lens, strict=True)
    return torch.cat([piece[len(piece) - t :] for piece, t in pieces])


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


# ---- all layouts, the same outputs -----------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
def test_all_layouts_give_the_same_outputs(qkv, window):
    wanted = oracle(*qkv, window)
    assert_same(run_dense(*qkv, block_diagonal_mask(LENS, window)), wanted)
    assert_same(run_padded(*qkv, padded_mask(LENS, sliding_window=window)), wanted)
    assert_same(run_dense(*qkv, paged_mask(LENS, LENS, window)), wanted)
    assert_same(run_paged(*qkv, LENS, window), wanted)
    for tile in (4, 128):
        assert_same(run_flex(*qkv, block_sparse_mask(LENS, tile, window)), wanted)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("query_lens", [QUERY_LENS, [1] * 5, [2, 4, 1, 1, 3], LENS])
def test_with_a_cached_prefix_the_outputs_are_the_last_of_the_whole(qkv, query_lens, window):
    q_THD, k_TKD, v_TKD = qkv
    wanted = last_of_each(oracle(*qkv, window), query_lens)
    q_THD = last_of_each(q_THD, query_lens)
    mask_TL = paged_mask(query_lens, LENS, window)
    assert_same(run_dense(q_THD, k_TKD, v_TKD, mask_TL), wanted)
    assert_same(run_paged(q_THD, k_TKD, v_TKD, query_lens, window), wanted)


def test_a_mask_aligned_at_the_top_left_gives_something_else(qkv):
    q_THD, k_TKD, v_TKD = qkv
    q_THD = last_of_each(q_THD, QUERY_LENS)
    right = paged_mask(QUERY_LENS, LENS)
    pairs = zip(QUERY_LENS, LENS, strict=True)
    wrong = torch.block_diag(*[torch.ones(t, n).tril() for t, n in pairs]).bool()
    found, wanted = (run_dense(q_THD, k_TKD, v_TKD, mask) for mask in (wrong, right))
    differs = (found - wanted).abs().flatten(1).amax(dim=1) > 1e-3
    by_request = [bool(piece.any()) for piece in differs.split(QUERY_LENS)]
    has_cached = [t < n for t, n in zip(QUERY_LENS, LENS, strict=True)]
    assert by_request == has_cached


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
def test_compiled_flex_attention_skips_tiles_and_gives_the_same(window):
    lens = [300, 17, 150]
    q, k, v = (torch.randn(sum(lens), heads, 32) for heads in (H, K, K))
    wanted = run_dense(q, k, v, block_diagonal_mask(lens, window))
    mask = block_sparse_mask(lens, 128, window)
    assert_same(run_flex(q, k, v, mask, torch.compile(flex_attention)), wanted)


# ---- the masks themselves --------------------------------------------------------------


def picture(text):
    rows = [line.replace("|", " ").split() for line in text.split("\n") if line.strip()]
    return torch.tensor([[c == "1" for c in row] for row in rows])


def test_the_paged_mask_of_the_docstring():
    wanted = picture("""
        1 1 1 . . .
        . . . 1 . .
        . . . 1 1 .
        . . . 1 1 1""")
    assert torch.equal(paged_mask([1, 3], [3, 3]), wanted)


def test_the_tiles_of_the_docstring():
    mask = block_sparse_mask([2, 3], block_size=2)
    assert torch.equal(mask.to_dense()[0, 0].bool(), picture("1 . .\n. 1 .\n. 1 1"))
    assert computed_scores(mask) == 4 * 4


@pytest.mark.parametrize("window", WINDOWS)
def test_paged_mask_is_the_rows_that_are_new_of_the_block_diagonal_one(window):
    whole = block_diagonal_mask(LENS, window)
    assert torch.equal(paged_mask(LENS, LENS, window), whole)
    assert torch.equal(paged_mask(QUERY_LENS, LENS, window), last_of_each(whole, QUERY_LENS))
    assert torch.equal(paged_mask([3], [8], window), causal_mask(3, 8, window))


def test_a_request_that_computes_nothing_has_columns_and_no_rows():
    assert torch.equal(paged_mask([0, 1], [2, 2]), picture(". . 1 1"))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tile", [1, 3, 4, 16, 128])
def test_block_sparse_mask_names_the_tiles_that_hold_an_entry_and_no_other(tile, window):
    """Uncompiled, flex_attention applies the rule alone: so the tiles are looked at here."""
    wanted = block_diagonal_mask(LENS, window)
    mask, T = block_sparse_mask(LENS, tile, window), sum(LENS)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, T, T, device="cpu")[0, 0], wanted)
    num_tiles = cdiv(T, tile)
    whole = torch.zeros(num_tiles * tile, num_tiles * tile, dtype=torch.bool)
    whole[:T, :T] = wanted
    tiles = whole.unflatten(0, (-1, tile)).unflatten(2, (-1, tile))
    has_entry = tiles.any(dim=3).any(dim=1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), has_entry)
    assert computed_scores(mask) == int(has_entry.sum()) * tile * tile


# ---- waste -----------------------------------------------------------------------------


def test_needed_scores_are_the_entries_of_the_mask():
    random = Random(0)
    for _ in range(200):
        seq_lens = [random.randrange(1, 12) for _ in range(random.randrange(1, 5))]
        query_lens = [random.randrange(0, n + 1) for n in seq_lens]
        for window in (None, 1, 2, 5, 50):
            wanted = int(paged_mask(query_lens, seq_lens, window).sum())
            assert needed_scores(query_lens, seq_lens, window) == wanted


@pytest.mark.parametrize("window", WINDOWS)
def test_each_row_of_a_padded_mask_sees_a_key(window):
    """A pad too: a softmax over no keys would be NaN."""
    mask = padded_mask(LENS, max_len=max(LENS) + 3, sliding_window=window)
    assert mask.any(dim=-1).all()


def test_waste_counted_by_hand():
    # A window of 2: of 2 and 3 tokens 1 + 2 and 1 + 2 + 2 scores are needed.
    assert wasted_share(block_diagonal_mask([2, 3], 2), [2, 3], 2) == pytest.approx(1 - 8 / 25)
    padded = padded_mask([2, 3], sliding_window=2)
    assert wasted_share(padded, [2, 3], sliding_window=2) == pytest.approx(1 - 8 / 18)
    # Four tiles of 2 x 2, of which 9 entries are needed.
    sparse = block_sparse_mask([2, 3], 2)
    assert wasted_share(sparse, [2, 3]) == pytest.approx(1 - 9 / 16)
    assert wasted_share(block_sparse_mask([2, 3], 128), [2, 3]) == pytest.approx(1 - 9 / 128**2)
    # A decode over 3 keys and a prompt of 3: 3 + 6 of 4 * 6.
    mixed = paged_mask([1, 3], [3, 3])
    assert wasted_share(mixed, [3, 3], query_lens=[1, 3]) == pytest.approx(1 - 9 / 24)
    # Tiles of which some have no masked entry: one request of 8, tiles of 2, 4 + 3 + 2 + 1.
    assert computed_scores(block_sparse_mask([8], 2)) == 10 * 4
    assert wasted_share(block_sparse_mask([8], 1), [8]) == 0


@pytest.mark.parametrize("count", [paged_mask, needed_scores])
@pytest.mark.parametrize(
    "query_lens, seq_lens, message",
    [
        ([1, 3], [2, 2], r"query_lens\[1\] is 3 and seq_lens\[1\] is 2"),
        ([-1], [2], r"query_lens\[0\] is -1"),
        ([1], [2, 2], "query_lens has 1 requests and seq_lens 2"),
    ],
)
def test_lengths_that_cannot_be_are_refused(count, query_lens, seq_lens, message):
    with pytest.raises(ValueError, match=message):
        count(query_lens, seq_lens)


# ---- a leak, in the text ---------------------------------------------------------------

STORIES = [
    "Long ago there lived a clever fox named Finn. "
    "His only treasure was a golden feather. One evening",
    "Once upon a time there was a quiet cat",
    "Long ago, by the river, there lived a kind mouse named Tom. "
    "His only treasure was a tiny drum. One evening ",
]


def attend_with(mask):
    """What the model calls in each layer: attention over packed tokens with this mask."""

    def attend(layer, q_THD, k_TKD, v_TKD, cos_TR, sin_TR, sliding_window=None):
        q_THD, k_TKD = apply_rope(q_THD, cos_TR, sin_TR), apply_rope(k_TKD, cos_TR, sin_TR)
        packed = map(heads_first, (q_THD, k_TKD, v_TKD))
        out = masked_attention(*packed, mask, scale=q_THD.shape[-1] ** -0.5)
        return out[0].transpose(0, 1)

    return attend


@torch.no_grad()
def greedy_texts(tiny, stories, num_tokens, leak=None):
    """Continue the stories in one packed row, every token computed anew at each step.

    leak: ((request, position) of a query, (request, position) of a key that it sees too).
    """
    prompts = [tiny.tokenizer.encode(story) for story in stories]
    seqs = [list(ids) for ids in prompts]
    for _ in range(num_tokens):
        lens = [len(s) for s in seqs]
        mask = block_diagonal_mask(lens)
        if leak is not None:
            row, column = (sum(lens[:request]) + position for request, position in leak)
            assert not mask[row, column]
            mask[row, column] = True
        positions_T = torch.cat([torch.arange(n) for n in lens])
        hidden_TE = tiny.model(torch.tensor(sum(seqs, [])), positions_T, attend_with(mask))
        last_S = torch.tensor(lens).cumsum(0) - 1
        for s, token in zip(seqs, tiny.model.logits(hidden_TE[last_S]).argmax(-1), strict=True):
            s.append(int(token))
    pairs = zip(seqs, prompts, strict=True)
    return [tiny.tokenizer.decode(s[len(prompt) :]) for s, prompt in pairs]


def test_one_wrong_entry_of_the_mask_writes_one_request_into_anothers_text():
    tiny = load("tiny", torch.float32)
    alone = [greedy_texts(tiny, [story], 24)[0] for story in STORIES]
    together = greedy_texts(tiny, STORIES, 24)
    assert together == alone
    assert together[2] == "Tom took the drum and cl"

    last_of_2 = len(tiny.tokenizer.encode(STORIES[2])) - 1
    f_of_finn = tiny.tokenizer.encode(STORIES[0]).index(ord("F"))
    leaked = greedy_texts(tiny, STORIES, 24, leak=((2, last_of_2), (0, f_of_finn)))
    assert leaked[:2] == alone[:2]
    assert leaked[2] == "Finn took the drum and c"
    assert "Finn" not in STORIES[2]
