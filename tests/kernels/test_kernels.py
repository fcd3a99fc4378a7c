"""The Triton kernels in Triton's interpreter, against their torch references.

The references are proved elsewhere against float64 and transformers (test_attention.py). Here:
numbers, layouts, edges and poison (invariants 12, 14, 16; faults 24, 26 to 31). On a
machine with a GPU the same tests run compiled, under -m gpu.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from nanobatch import LLM, SamplingParams, attention
from nanobatch.batch import Row, pack
from nanobatch.kernels import work_list
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.launch_config import (
    CHIPS,
    Chip,
    LaunchConfig,
    choose_launch_config,
)
from nanobatch.kernels.launch_plan import Launch
from nanobatch.kernels.ops import REFERENCE, AttentionArgs, apply_rope
from nanobatch.kernels.work_list import (
    balanced_work,
    equal_work,
    keys_of_item,
    keys_of_program,
)
from nanobatch.utils.arithmetic import cdiv

triton = pytest.importorskip("triton")
from nanobatch.extensions.quantized_kernels import quantized_launch_config  # noqa: E402
from nanobatch.paged_attention_kernel import TritonBackend, chip_of  # noqa: E402

triton_ops = TritonBackend()

H200 = CHIPS[90]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.kernels
ATOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MIXED = [(1, 1), (1, 17), (5, 5), (3, 9), (1, 33), (17, 20)]  # (query tokens, keys)


def launch_of(group, *, block_m=16, tile=16, num_splits=1):
    return LaunchConfig(block_m, block_m // group, tile, num_splits, num_warps=4, num_stages=2)


def case(lens, *, K=2, G=3, D=64, P=4, dtype=torch.float32, seed=0):
    """Queries, caches and batch; every slot that no sequence owns is NaN or inf."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_blocks = sum(cdiv(n, P) for _, n in lens) + 3
    ids = rng.sample(range(num_blocks), num_blocks)
    rows = [Row([0] * t, n - t, [ids.pop() for _ in range(cdiv(n, P))]) for t, n in lens]
    batch = pack(rows, P)
    for row, table in zip(batch.block_tables_SB, rows, strict=True):
        row[len(table.block_table) :] = ids[0]  # padding: a block full of poison
    caches = []
    for poison in (torch.nan, torch.inf):
        cache = torch.full((num_blocks, K, P, D), poison)
        for row, (_, n) in zip(rows, lens, strict=True):
            for p in range(n):
                cache[row.block_table[p // P], :, p % P] = torch.randn(
                    K, D, generator=generator
                )
        caches.append(cache.to(DEVICE, dtype))
    T = sum(t for t, _ in lens)
    q_THD = torch.randn(T, K * G, D, generator=generator).to(DEVICE, dtype)
    for name in ("block_tables_SB", "seq_lens_S", "query_start_loc"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    return q_THD, *caches, batch


def attend(q_THD, k_cache, v_cache, batch, launch, scale, sliding_window=None, softcap=None):
    args = AttentionArgs(sliding_window, scale, softcap)
    return triton_ops.paged_attention(q_THD, KVCache(k_cache, v_cache), batch, args, launch)


def compare(q_THD, k_cache, v_cache, batch, launch=None, equal_nan=False, **how):
    how = {"scale": q_THD.shape[-1] ** -0.5} | how
    found = attend(q_THD, k_cache, v_cache, batch, launch, **how)
    wanted = attention.paged_attention(q_THD, k_cache, v_cache, batch, backend="torch", **how)
    near = {"atol": ATOL[q_THD.dtype], "rtol": 0, "equal_nan": equal_nan}
    torch.testing.assert_close(found, wanted, **near)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("group, head_dim", [(1, 64), (3, 80), (4, 96), (7, 128), (8, 64)])
def test_group_sizes_head_dims_and_dtypes(group, head_dim, dtype):
    args = case(MIXED, G=group, D=head_dim, dtype=dtype)
    compare(*args, launch=launch_of(group))


@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 256])
def test_block_sizes_around_the_tile(block_size):
    lens = [(1, n) for n in (1, block_size - 1, block_size, block_size + 1) if 0 < n < 70]
    args = case(lens + [(9, 9)], P=block_size)
    compare(*args, launch=launch_of(3, tile=16))


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_launches_of_any_size(block_m, tile):
    args = case(MIXED)
    compare(*args, launch=launch_of(3, block_m=block_m, tile=tile))


@pytest.mark.parametrize("num_splits", [2, 4, 16])
def test_splits_and_empty_splits(num_splits, monkeypatch):
    """With 16 splits and tiles of 16 keys most splits of these sequences are empty; what
    they leave unwritten is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    args = case(MIXED)
    compare(*args, launch=launch_of(3, num_splits=num_splits))


NANS = [(torch.nan, position) for position in (1, 20, 39)]  # first split, between, last split
POISONS = [
    (which, *poison)
    for which in ("queries", "keys", "values")
    for poison in (*NANS, (torch.inf, 3), (-torch.inf, 38))
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
def test_what_is_not_a_number_reaches_the_output_of_its_sequence_alone(num_splits):
    """Invariant 15: NaN and infinity in use give exactly what they give in torch, split or not.
    One sequence for each, with one such number; then one that has a split without weight, all
    of its scores being -inf, and a NaN among its values; then one with numbers only."""
    lens = [(1, 40)] * (len(POISONS) + 2)
    q_THD, k_cache, v_cache, batch = case(lens, K=1, D=16, P=8)
    tables = batch.block_tables_SB.tolist()
    for seq, (which, number, position) in enumerate(POISONS):
        if which == "queries":
            q_THD[seq, 1, 5] = number
        else:
            cache = k_cache if which == "keys" else v_cache
            cache[tables[seq][position // 8], 0, position % 8, 5] = number
    q_THD[-2, :, 5] = 1.0
    k_cache[tables[-2][2:4], 0, :, 5] = -torch.inf
    v_cache[tables[-2][2], 0, 3, 7] = torch.nan
    launch = launch_of(3, num_splits=num_splits)
    compare(q_THD, k_cache, v_cache, batch, launch, equal_nan=True)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_a_sequence_without_keys_gets_zeros(num_splits, window):
    """A padding row of a captured decode step: one token, a sequence of length 0."""
    lens = [(1, 17), (1, 5), (1, 1), (1, 1)]
    q_THD, k_cache, v_cache, batch = case(lens)
    wanted = attention.paged_attention(
        q_THD, k_cache, v_cache, batch, scale=0.1, sliding_window=window, backend="torch"
    )
    wanted[2:] = 0
    batch.seq_lens_S[2:] = 0
    batch.block_tables_SB[2:] = 10**6  # not even looked at
    launch = launch_of(3, num_splits=num_splits)
    found = attend(q_THD, k_cache, v_cache, batch, launch, scale=0.1, sliding_window=window)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert keys_of_program(launch, range(5), [17, 5, 0, 0], 2, 0, window)[1:] == (0, 0)


@pytest.mark.parametrize("window", [1, 4, 5, 16, 100])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_sliding_window(window, num_splits):
    lens = [(1, n) for n in (window - 1, window, window + 1, 33) if n > 0] + [(7, 21), (4, 4)]
    args = case(lens)
    launch = launch_of(3, num_splits=num_splits)
    compare(*args, launch=launch, sliding_window=window)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_scores_far_from_zero(num_splits, sign):
    """Around +-300: exp of none of them is a float32."""
    q_THD, k_cache, v_cache, batch = case(MIXED)
    launch = launch_of(3, num_splits=num_splits)
    q_THD, k_cache = sign * q_THD.abs(), k_cache.abs()
    found = attend(q_THD, k_cache, v_cache, batch, launch, scale=8.0)
    wanted = attention.paged_attention(
        q_THD.double(), k_cache.double(), v_cache.double(), batch, scale=8.0, backend="torch"
    )
    torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=0)


def test_softcap_and_scale():
    args = case(MIXED)
    compare(*args, launch=launch_of(3), softcap=2.0, scale=0.3)


def test_the_launch_it_chooses_itself():
    compare(*case(MIXED))
    compare(*case([(1, 5)], K=1, G=5))


def test_decodes_that_are_split_beside_a_prompt(monkeypatch):
    """Two launches, each with work that is split and work that is not."""
    monkeypatch.setattr(work_list, "MIN_TILES", 1)
    monkeypatch.setattr(work_list, "ROWS_PER_SM", 4096)
    args = case([(1, 140), (12, 70), (1, 9), (3, 70), (20, 20)], K=1)
    compare(*args)
    planned = tree_leaves(list(args[-1].derived.values()), lambda x: isinstance(x, Launch))
    launches = [x for x in planned if isinstance(x, Launch)]
    assert [0 < launch.num_parts < len(launch.work) for launch in launches] == [True, True]


def test_queries_that_are_a_slice_of_a_wider_tensor():
    """As the model's q is, of q, k and v side by side."""
    q_THD, *rest = case(MIXED)
    wide = torch.cat([q_THD, torch.full_like(q_THD, torch.nan)], dim=1)
    compare(wide[:, : q_THD.shape[1]], *rest)


def test_slots_past_31_bits():
    """Invariant 16. Only addresses are that large: nothing between is touched or needed."""
    P, D, last = 16, 64, 2**21 + 3  # block * P * D passes 2**31
    num_elements = (last + 1) * P * D
    cache = torch.empty(num_elements, dtype=torch.float16, device=DEVICE)
    cache = cache.view(last + 1, 1, P, D)
    cache[last] = torch.randn(1, P, D, generator=torch.Generator().manual_seed(0)).to(cache)
    cache[0] = torch.nan
    batch = pack([Row([0], 15, [last])], P, DEVICE)
    q_THD = torch.randn(1, 3, D, device=DEVICE).to(torch.float16)
    compare(q_THD, cache, cache, batch)
    slot = torch.tensor([last * P + 2], device=DEVICE)
    new = torch.full((1, 1, D), 7.0, dtype=torch.float16, device=DEVICE)
    cos, sin = torch.ones(1, D // 2, device=DEVICE), torch.zeros(1, D // 2, device=DEVICE)
    triton_ops.rope_and_write(new, new, new, cos, sin, KVCache(cache, cache), slot)
    assert (cache[last, 0, 2] == 7).all()


@pytest.mark.parametrize(
    "triton_version, numpy_version, is_refused",
    [
        ("3.5.0", "1.26.0", False),
        ("3.5.0", "2.3.5", False),
        ("3.5.1", "2.4.6", True),  # "only 0-dimensional arrays can be converted"
        ("3.6.0", "2.4.6", True),
        ("3.7.0", "2.4.6", False),
        ("3.6.0", "2.10.0", True),  # these two: 10 is more than 4
        ("3.10.0", "2.4.6", False),
    ],
)
def test_numpy_that_breaks_triton_s_interpreter_is_refused(
    triton_version, numpy_version, is_refused, monkeypatch
):
    """Each pair as these tests found it when they ran with it."""
    monkeypatch.setattr("triton.__version__", triton_version)
    monkeypatch.setattr("numpy.__version__", numpy_version)
    choose_backend = attention.choose_backend
    if is_refused:
        with pytest.raises(ValueError, match=f"numpy is {numpy_version}; it must be < 2.4 for"):
            choose_backend("triton", "cpu", block_size=16)
    else:
        assert choose_backend("triton", "cpu", block_size=16).name == "triton"
    assert choose_backend("triton", "cuda", block_size=16).name == "triton"


def test_block_sizes_that_are_no_power_of_two_are_refused():
    args = case([(1, 5)], P=3)
    with pytest.raises(ValueError, match="block_size is 3.*power of two"):
        attention.paged_attention(*args, scale=1.0, backend="triton")
    with pytest.raises(ValueError, match="block_size is 3.*power of two"):  # before any step
        LLM("tiny", attention_backend="triton", block_size=3)


# ---- the launch configuration ---------------------------------------------------------


def test_launch_config_by_hand():
    # 64 decodes, group 4: 16 rows are 4 tokens; 512 programs fill 132 SMs twice: no split
    launch = choose_launch_config(64, 64, 1, 32, 8, 128, 2, chip=H200)
    assert (launch.block_m, launch.block_q, launch.tile, launch.num_splits) == (16, 4, 64, 1)
    # one decode: 8 programs; 264 wanted: 33 times as many, so 64, which is the most
    assert choose_launch_config(1, 1, 1, 32, 8, 128, 2, H200).num_splits == 64
    assert choose_launch_config(1, 1, 1, 8, 1, 128, 2, H200).num_splits == 64
    # 16 decodes: 128 programs; 264 wanted: 3 times, so 4
    assert choose_launch_config(16, 16, 1, 32, 8, 128, 2, H200).num_splits == 4
    # a prompt: 128 rows of 32 tokens, 64 query blocks: no split
    launch = choose_launch_config(2048, 1, 2048, 32, 8, 128, 2, H200)
    assert (launch.block_m, launch.block_q, launch.num_splits) == (128, 32, 1)
    assert (launch.tile, launch.num_warps, launch.num_stages) == (64, 8, 3)
    # matrix units that take keys from registers, on chips with 99 KB of shared memory
    assert choose_launch_config(2048, 1, 2048, 32, 8, 128, 2, CHIPS[89]).tile == 32
    # float32 and large heads: smaller, so that nothing spills
    assert choose_launch_config(2048, 1, 2048, 32, 8, 128, 4, H200).block_m == 16
    launch = choose_launch_config(2048, 1, 2048, 32, 8, 256, 2, H200)
    assert (launch.block_m, launch.tile, launch.num_warps) == (64, 32, 8)
    launch = quantized_launch_config(2048, 1, 2048, 32, 8, 128, 2, H200)
    assert (launch.block_m, launch.tile, launch.num_warps) == (64, 32, 8)
    # a group larger than 16 sets the rows
    assert choose_launch_config(4, 4, 1, 71, 1, 64, 2, H200).block_m == 128
    launch = choose_launch_config(4, 4, 1, 71, 1, 64, 4, H200)  # in float32 too
    assert (launch.block_m, launch.block_q) == (128, 1)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("longest", [1, 5, 17, 1000])
@pytest.mark.parametrize("group, head_dim", [(1, 64), (4, 128), (8, 256)])
def test_a_gpu_without_matrix_units_gets_small_tiles(group, head_dim, longest, itemsize):
    """Triton has none for a T4: 128 rows need 98,304 bytes there, and it has 65,536."""
    sizes = (8 * longest, 8, longest, 8 * group, 8, head_dim, itemsize)
    launch = choose_launch_config(*sizes, CHIPS[75])
    assert launch.block_m <= 32 and launch.tile <= 32
    num_columns = triton.next_power_of_2(head_dim)
    # Queries, keys and values, at least, are in shared memory.
    numbers = (launch.block_m + 2 * launch.tile) * num_columns
    assert numbers * itemsize <= CHIPS[75].shared_memory
    assert launch.block_q * group <= launch.block_m


def test_the_chip_of_a_device(monkeypatch):
    """A GPU's own numbers; where torch gives no shared memory, its compute capability's."""
    properties = {"major": 8, "minor": 9, "multi_processor_count": 76}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties)
    )
    gpu = torch.device("cuda", 0)
    assert chip_of(gpu) == Chip((8, 9), 76, 101_376)
    properties["shared_memory_per_block_optin"] = 99_000
    assert chip_of(gpu) == Chip((8, 9), 76, 99_000)
    properties |= {"minor": 8}  # a GPU that is in no table
    assert chip_of(gpu) == Chip((8, 8), 76, 99_000)
    del properties["shared_memory_per_block_optin"]
    assert chip_of(gpu) == Chip((8, 8), 76, 49_152)
    assert chip_of(torch.device("cpu")).num_sms == 1


def needed_tiles(lens, block_q, tile, window):
    """{(sequence, first query): tiles that a query of this block sees a key of}, one by one."""
    needed = {}
    for seq, (query_len, seq_len) in enumerate(lens):
        for query in range(query_len):
            last = seq_len - query_len + query
            first = 0 if window is None else max(0, last - window + 1)
            tiles = needed.setdefault((seq, query // block_q * block_q), set())
            tiles |= {key // tile for key in range(first, last + 1)}
    return needed


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_splits", [1, 4, None])
def test_programs_read_each_key_they_need(num_splits, window):
    """Over all items of a query block: each tile that it needs once, no other; whole tiles,
    but for the sequence's end. None: as many splits as balance the work."""
    lens = [(1, 1), (1, 65), (40, 40), (7, 100), (1, 300)]
    launch = launch_of(3, num_splits=num_splits or 1)
    query_lens, seq_lens = (np.array(x) for x in zip(*lens, strict=True))
    if num_splits is None:
        chip = H200._replace(num_sms=4)
        work = balanced_work(launch, query_lens, seq_lens, 2, chip, window)
    else:
        work = equal_work(launch, query_lens)
    found = {}
    for item in work.items_W4.tolist():
        seq, first_query = item[:2]
        first, end = keys_of_item(launch, item, *lens[seq], window)
        tiles = found.setdefault((seq, first_query), [])
        if end > first:
            assert first % launch.tile == 0 and (end % launch.tile == 0 or end == lens[seq][1])
            tiles += range(first // launch.tile, cdiv(end, launch.tile))
    needed = needed_tiles(lens, launch.block_q, launch.tile, window)
    assert found == {block: sorted(tiles) for block, tiles in needed.items()}
    is_split = [item[3] > 1 for item in work.items_W4.tolist()]
    assert is_split == sorted(is_split, reverse=True) and sum(is_split) == work.num_parts
    if num_splits is None:
        assert 0 < work.num_parts < len(is_split) or window is not None
    else:
        starts = [0, *query_lens.cumsum().tolist()]
        for i, item in enumerate(work.items_W4.tolist()):
            program = keys_of_program(launch, starts, seq_lens, *divmod(i, num_splits), window)
            wanted = keys_of_item(launch, item, *lens[item[0]], window)
            assert program == (item[0], *wanted)


def plan_of(lens, K, chip=H200, **sizes):
    """The launches of a step with 32 query heads of 128 in bfloat16, from lengths alone."""
    rows = [Row([0] * t, n - t, [0] * cdiv(n, 256)) for t, n in lens]
    sizes = {"H": 32, "K": K, "D": 128, "itemsize": 2, "chip": chip} | sizes
    return triton_ops.planner.plan(pack(rows, 256), **sizes)


def tiles_of(launch, lens):
    """(item, tiles that it reads) for all of a launch, in its order."""
    for item in launch.work.tolist():
        first, end = keys_of_item(launch.config, item, *lens[item[0]])
        yield item, cdiv(end - first, launch.config.tile)


@pytest.mark.parametrize("K", [8, 32])
@pytest.mark.parametrize(
    "others",
    [[(2048, 2048)], [(5, 1000)] * 8, [(1, 1000)] * 7 + [(2048, 9000)], []],
    ids=["prefill", "drafts", "decodes and a chunk", "alone"],
)
def test_a_long_decode_is_split_whatever_it_shares_the_step_with(others, K):
    """A decode of 32,768 keys is 512 tiles; no program may run more than 16 of them, at 132
    multiprocessors. Each sequence is in one launch, and memory for partial results is small."""
    lens = [(1, 32_768), *others]
    launches = plan_of(lens, K)
    assert len(launches) == (2 if any(t > 100 for t, _ in others) else 1)
    (first, *_), seen = launches, set()
    of_it = [tiles for item, tiles in tiles_of(first, lens) if item[0] == 0]
    assert max(of_it) <= 16 and sum(of_it) == 512
    for launch in launches:
        seqs = {item[0] for item in launch.work.tolist()}
        assert seen.isdisjoint(seqs)
        seen |= seqs
        assert sum(x.numel() for x in launch.parts) * 4 <= 40e6
    assert seen == set(range(len(lens)))


def test_a_prefill_takes_the_longest_pieces_first():
    """The last query blocks of a prompt read the most keys; a short one is not split."""
    lens = [(1, 40), (600, 600), (2048, 4096)]
    few, many = plan_of(lens, 8)
    assert {item[0] for item in many.work.tolist()} == {1, 2} and few.config.block_m == 16
    found = [(item, tiles) for item, tiles in tiles_of(many, lens) if item[3] == 1]
    assert [tiles for _, tiles in found] == sorted((t for _, t in found), reverse=True)
    assert found[-1][1] == 1 and {item[3] for item in few.work.tolist()} == {1}
    # a chunk that continues a long prompt has few query blocks: split
    (chunk,) = plan_of([(128, 32_768)], 8)
    assert (
        chunk.num_parts == len(chunk.work)
        and max(t for _, t in tiles_of(chunk, [(128, 32_768)])) < 80
    )


def test_work_that_fills_the_chip_is_not_split():
    assert [launch.num_parts for launch in plan_of([(1, 1000)] * 256, 32)] == [0]
    assert [launch.num_parts for launch in plan_of([(2048, 2048)] * 4, 8)] == [0]
    assert [launch.num_parts for launch in plan_of([(1, 200)], 8)] == [0]  # and what is tiny


def test_a_captured_step_is_planned_from_its_shape():
    """What the host knows of lengths changes nothing there, and nothing comes from the host."""
    batch = pack([Row([0], n - 1, [0] * 40) for n in (600, 3)], 16)
    batch.derived = {"max_query_len": 1}
    sizes = {
        "H": 8,
        "K": 2,
        "D": 64,
        "itemsize": 2,
        "chip": H200._replace(num_sms=3),
        "window": None,
    }
    (launch,) = triton_ops.planner.plan(batch, **sizes)
    wanted = equal_work(launch.config, [1, 1])
    assert launch.config.num_splits == 2 and launch.num_parts == wanted.num_parts == 4
    assert launch.work.tolist() == wanted.items_W4.tolist() and launch.work.dtype == torch.int32
    (again,) = triton_ops.planner.plan(batch, **sizes)
    assert again.work.data_ptr() == launch.work.data_ptr()  # a graph keeps reading it


def test_layers_share_a_plan(monkeypatch):
    """The host lists the work once a batch; another window or another step is another list."""
    q_THD, k_cache, v_cache, batch = case([(1, 5), (2, 3)], K=1, D=16)
    planned, plan = [], triton_ops.planner.plan
    monkeypatch.setattr(triton_ops.planner, "plan", lambda *a: planned.append(a[6]) or plan(*a))
    for window in (None, 2, None, 2):
        compare(q_THD, k_cache, v_cache, batch, sliding_window=window)
    assert planned == [None, 2]


def test_tokens_of_no_sequence_get_zeros():
    q_THD, k_cache, v_cache, batch = case([(1, 5), (2, 3)], K=1, D=16)
    more = torch.cat([q_THD, torch.full_like(q_THD, torch.nan)])
    compare(more, k_cache, v_cache, batch)


def test_few_variants_are_compiled():
    """One for each number of rows, whatever the lengths and the number of sequences."""
    variants = {
        choose_launch_config(S * n, S, n, 32, 8, 128, 2, H200).variant
        for S in (1, 7, 64)
        for n in range(1, 300)
    }
    assert sorted(variant[0] for variant in variants) == [16, 32, 64, 128]


# ---- elementwise -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("size", [64, 96, 200])
def test_rms_norm(size, dtype):
    x, residual = torch.randn(2, 5, size).to(DEVICE, dtype)
    weight = torch.randn(size).to(DEVICE, dtype)
    for r in (None, residual):
        r = None if r is None else r.float()
        found = triton_ops.rms_norm(x, weight, 1e-5, r)
        wide = x.float() if r is None else x.float() + r
        wanted = torch.nn.functional.rms_norm(wide, (size,), weight.float(), 1e-5)
        torch.testing.assert_close(found[0].float(), wanted, atol=4 * ATOL[dtype], rtol=1e-2)
        torch.testing.assert_close(found[1], wide)
    # Qwen3's norm of each head, where queries, keys and values lie side by side; OLMo-2's
    qkv = torch.randn(3, 7, size).to(DEVICE, dtype)
    qkv[:, 6:] = float("nan")
    flat = qkv.flatten(1)
    for rows in (qkv[:, :4], qkv[:, 4:6], flat[:, :size], flat[:, 2 * size : 3 * size]):
        found, total = triton_ops.rms_norm(rows, weight, 1e-5)
        wanted = torch.nn.functional.rms_norm(rows.float(), (size,), weight.float(), 1e-5)
        torch.testing.assert_close(found.float(), wanted, atol=4 * ATOL[dtype], rtol=1e-2)
        assert found.is_contiguous() and torch.equal(total, rows.float())


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("head_dim, group", [(64, 3), (80, 4), (128, 1)])
def test_rope_and_write(head_dim, group, dtype):
    T, K, P, N = 6, 2, 4, 5
    qkv = torch.randn(T, (group + 2) * K, head_dim).to(DEVICE, dtype)
    q, k, v = qkv.split([group * K, K, K], dim=1)
    angles = torch.randn(T, head_dim // 2, device=DEVICE)
    slots = torch.tensor([7, -1, 0, 19, -1, 8], device=DEVICE)
    found, wanted = (torch.full((2, N, K, P, head_dim), 5.0).to(DEVICE, dtype) for _ in "ab")
    cos, sin = angles.cos(), angles.sin()
    q_found = triton_ops.rope_and_write(q, k, v, cos, sin, KVCache(*found), slots)
    REFERENCE.rope_and_write(q, k, v, cos, sin, KVCache(*wanted), slots)
    tolerance = {"atol": ATOL[dtype], "rtol": 1e-2}
    torch.testing.assert_close(q_found, apply_rope(q, cos, sin), **tolerance)
    torch.testing.assert_close(found, wanted, **tolerance)
    untouched = torch.ones(N * P, dtype=torch.bool)
    untouched[[7, 0, 19, 8]] = False
    rows = found.transpose(2, 3).reshape(2, N * P, K, head_dim)
    assert (rows[:, untouched] == 5).all(), "a slot was written that nobody named"


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("size", [8, 1000, 1024, 1500])
def test_silu_mul(size, dtype):
    gate_up = torch.randn(3, 2 * size).to(DEVICE, dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    found = triton_ops.silu_mul(gate_up).float()
    torch.testing.assert_close(found, wanted, atol=ATOL[dtype], rtol=1e-2)


# ---- the engine ------------------------------------------------------------------------


def test_the_engine_says_the_same_with_either_backend():
    """Eight ragged requests, float32, a preemption forced (invariant 12)."""
    prompts = ["Once upon", "One day", "L", "There once was a fox", "A", "So", "The end", "Ivy"]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + i % 5, ignore_eos=True) for i in range(8)
    ]
    outs = {}
    for backend in ("torch", "triton"):
        llm = LLM("tiny", dtype="float32", attention_backend=backend, num_blocks=9,
                  block_size=4, max_num_seqs=8)  # fmt: skip
        outs[backend] = llm.generate(prompts, params, progress=False)
        assert llm.engine.stats.num_preemptions > 0
    assert [o.token_ids for o in outs["triton"]] == [o.token_ids for o in outs["torch"]]
