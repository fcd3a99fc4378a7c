"""What Triton compiles, run thread by thread without a GPU (ptx/, see its docstring).

Each kernel is launched by its own wrapper, for the chips that have no matrix instructions but
mma.sync: grid, constants and arguments are what an engine launches. Results are held against
torch's operations in float32 or float64; slots that nobody owns and memory that nobody wrote
are NaN. Then each barrier is removed in turn, and each wait for copies is shortened: all of it
must be found. In the default run: the interpreter itself, and one kernel; the others are slow.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nanobatch import LLM, SamplingParams
from nanobatch.attention import TorchBackend
from nanobatch.kernels import work_list
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.launch_config import CHIPS
from nanobatch.kernels.ops import REFERENCE, AttentionArgs, apply_rope

triton = pytest.importorskip("triton")
from ptx import arithmetic, warp  # noqa: E402
from ptx.compiler import Compiled, Compiler  # noqa: E402
from ptx.launch import Launch, execute, run_on  # noqa: E402
from ptx.memory import Fault  # noqa: E402
from ptx.mutants import mutants  # noqa: E402
from ptx.parse import parse  # noqa: E402
from test_kernels import ATOL, MIXED, case  # noqa: E402

from nanobatch.extensions.quantized_cache import QuantizedCache  # noqa: E402
from nanobatch.extensions.quantized_kernels import QuantizedTritonBackend  # noqa: E402
from nanobatch.paged_attention_kernel import TritonBackend  # noqa: E402

BACKEND, QUANTIZED = TritonBackend(), QuantizedTritonBackend()
ALL = (75, 80, 89, 120)  # compute capabilities
# How many multiprocessors the launch is told of: with one nothing is split.
NO_SPLIT, SPLIT = 1, 8
# (query tokens, keys). The last is the longest: past its row of block tables there is nothing.
DECODES = [(1, 9), (1, 64), (1, 1), (1, 140)]
PREFILL = [(70, 280)]


@pytest.fixture(scope="module")
def compiler(request, tmp_path_factory) -> Iterator[Compiler]:
    """Its cache lives from one run to the next."""
    cache = getattr(request.config, "cache", None)
    found = Compiler(cache.mkdir("ptx") if cache else tmp_path_factory.mktemp("ptx"))
    yield found
    found.close()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """What torch.empty gives (torch.utils.deterministic)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def dtypes_of(capability: int) -> list[torch.dtype]:
    half = torch.bfloat16 if capability >= 80 else torch.float16
    return [half, torch.float32]


def attend(
    compiler: Compiler, capability: int, q_THD, cache, batch, *,
    num_sms=NO_SPLIT, backend=BACKEND, **how,
) -> list[Launch]:  # fmt: skip
    """Run attention, compare it, and give the launches as they were before they ran."""
    args = AttentionArgs(how.get("window"), q_THD.shape[2] ** -0.5, how.get("softcap"))
    if num_sms == SPLIT:  # as in a captured step of decodes: shapes alone decide
        del batch.derived["lens"]
    before = []

    def run(launch: Launch) -> None:
        before.append(launch.copy())
        execute(launch)

    with run_on(CHIPS[capability]._replace(num_sms=num_sms), compiler, run):
        found = backend.paged_attention(q_THD, cache, batch, args)
    exact = cache
    if not isinstance(cache, QuantizedCache):
        exact = KVCache(cache.keys.double(), cache.values.double())
    wide = torch.float32 if exact is cache else torch.float64
    wanted = TorchBackend().paged_attention(q_THD.to(wide), exact, batch, args)
    how = {"atol": ATOL[q_THD.dtype], "rtol": 0, "equal_nan": True}
    torch.testing.assert_close(found.to(wide), wanted, **how)
    return before


def attention_case(lens, **sizes):
    q_THD, keys, values, batch = case(lens, **sizes)
    return q_THD, KVCache(keys, values), batch


# ---- the interpreter itself ------------------------------------------------------------------


def run_text(body: str, *tensors, grid=(1,), num_threads=64, order=None) -> None:
    """Run a kernel whose arguments are tensors: %rd1 is the address of the first, and so on;
    %r1 is the number of the thread, %r2 four times that, and %r3 that of a thread of the
    other warp."""
    head = "".join(f".param .u64 k_param_{i}, " for i in range(len(tensors)))
    loads = "".join(f"ld.param.b64 %rd{i + 1}, [k_param_{i}];\n" for i in range(len(tensors)))
    ptx = f""".visible .entry k({head}) .reqntid {num_threads} {{
        $L__func_begin0: {loads} mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2;
        xor.b32 %r3, %r2, 128; {body} ret; $L__func_end0: }}"""
    names = [f"x{i}" for i in range(len(tensors))]
    execute(Launch("k", Compiled(ptx, 1024, names), grid, list(tensors)), order=order)


PUT = "st.shared.b32 [%r2], %r1;"  # each thread its number; read by one of the other warp
TAKE = "ld.shared.b32 %r4, [%r3]; mad.wide.u32 %rd9, %r1, 4, %rd1; st.global.b32 [%rd9], %r4;"
COPY = "mad.wide.u32 %rd8, %r1, 4, %rd1; cp.async.ca.shared.global [%r2], [%rd8], 4;"
COMMIT, WAIT, BARRIER = "cp.async.commit_group;", "cp.async.wait_group 0;", "bar.sync 0;"


@pytest.mark.parametrize(
    "body, message",
    [
        ("ld.global.b32 %r4, [%rd1+256];", "out of all tensors"),
        ("ld.global.b32 %r4, [%rd1+-4];", "out of all tensors"),
        ("ld.global.v2.b32 {%r4, %r5}, [%rd1+4];", "misaligned"),
        ("st.shared.b32 [%r2+1020], %r1;", "past shared memory"),
        ("st.shared.b32 [%r2+2], %r1;", "misaligned in shared"),
        (PUT + TAKE, "race"),
        (PUT + "st.shared.b32 [%r3], %r1;", "race: warp . writes"),
        (TAKE + COPY, "race|has not landed"),
        (COPY + COMMIT + BARRIER + TAKE, "has not landed"),
        (COPY + BARRIER + COMMIT + WAIT + TAKE, "race|has not landed"),
        (COPY + COMMIT + "cp.async.wait_group 1;" + BARRIER + TAKE, "has not landed"),
        ("setp.eq.u32 %p1, %r1, 5; @%p1 bar.sync 0;", "some threads of a warp"),
        (
            "setp.eq.u32 %p1, %r1, 5; @%p1 shfl.sync.idx.b32 %r4, %r1, 0, 31, -1;",
            "some threads",
        ),
    ],
)
def test_faults(body, message):
    for order in (None, [[0], [1]]):
        with pytest.raises(Fault, match=message):
            run_text(body, torch.zeros(64, dtype=torch.int32), order=order)


@pytest.mark.parametrize("order", [None, [[0], [1]], [[1], [0]]])
def test_a_barrier_makes_it_right(order):
    for body, factor in ((PUT + BARRIER + TAKE, 1), (COPY + COMMIT + WAIT + BARRIER + TAKE, 3)):
        x = factor * torch.arange(64, dtype=torch.int32)
        wanted = factor * torch.arange(64).roll(32)
        run_text(body, x, order=order)
        assert x.tolist() == wanted.tolist()


def test_a_view_owns_its_elements_only():
    wide = torch.zeros(64, 4, dtype=torch.int32)
    body = "mad.wide.u32 %rd9, %r1, 16, %rd1; st.global.b32 [%rd9+{}], %r1;"
    run_text(body.format(4), wide[:, :2])
    assert wide[:, 1].tolist() == list(range(64)) and wide[:, [0, 2, 3]].sum() == 0
    with pytest.raises(Fault, match="out of all tensors"):
        run_text(body.format(8), wide[:, :2])


def test_programs_must_not_write_the_same_bytes():
    body = "mad.wide.u32 %rd9, %r1, 4, %rd1; st.global.b32 [%rd9], %r1;"
    with pytest.raises(Fault, match="two programs write the same bytes"):
        run_text(body, torch.zeros(64, dtype=torch.int32), grid=(2,))
    apart = "mov.u32 %r5, %ctaid.x; mad.wide.u32 %rd1, %r5, 256, %rd1;"
    x = torch.zeros(128, dtype=torch.int32)
    run_text(apart + body, x, grid=(2,))
    assert x.tolist() == [*range(64)] * 2


def test_threads_part_and_meet_again():
    """Thread i counts to i; then all add one."""
    x = torch.zeros(64, dtype=torch.int32)
    run_text(
        """mov.b32 %r4, 0; $L_loop: setp.ge.u32 %p1, %r4, %r1; @%p1 bra $L_end;
        add.s32 %r4, %r4, 1; bra.uni $L_loop; $L_end: add.s32 %r4, %r4, 1;
        shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
        mad.wide.u32 %rd9, %r1, 4, %rd1; st.global.b32 [%rd9], %r5;""",
        x,
    )
    assert x.tolist() == [(i ^ 1) + 1 for i in range(64)]


@pytest.mark.parametrize(
    "kind, dtype",
    [("bf16", torch.bfloat16), ("f16", torch.float16), ("e4m3", torch.float8_e4m3fn)],
)
def test_formats(kind, dtype):
    """As torch reads all their codes, and rounds to them."""
    num_bits = 8 * dtype.itemsize
    codes = np.arange(1 << num_bits).astype(f"u{dtype.itemsize}")
    wide = torch.from_numpy(codes).view(dtype).float()
    np.testing.assert_array_equal(arithmetic.numbers(codes, kind), wide.numpy())
    x = torch.cat([wide.nan_to_num().clamp(-448, 448), 3 * torch.randn(1000)])
    x = torch.cat([x, (x[1:] + x[:-1]) / 2])  # ties
    wanted = x.to(dtype).float().numpy()
    rounded = arithmetic.bits(x.numpy(), kind)
    np.testing.assert_array_equal(arithmetic.numbers(rounded, kind), wanted)


@pytest.mark.parametrize(
    "text, sources, wanted",
    [
        ("shr.s32", (-8, 1), -4),
        ("shr.u32", (-8, 28), 15),
        ("shl.b32", (3, 40), 0),
        ("bfe.u32", (0xABCD, 4, 8), 0xBC),
        ("bfe.s32", (0xABCD, 4, 8), -0x44),
        ("prmt.b32", (0x33221100, 0x77665544, 0x7531), 0x77553311),
        ("prmt.b32", (0x80, 0, 0x8800), 0xFFFF8080),
        ("div.s32", (-7, 2), -3),
        ("rem.s32", (-7, 2), -1),
        ("mad.lo.s32", (3, -5, 1), -14),
        ("mul.hi.s32", (1 << 30, 8), 2),
        ("min.s32", (-3, 2), -3),
        ("min.u32", (-3, 2), 2),
        ("cvt.s32.s8", (0xFF,), -1),
        ("cvt.u32.u8", (0x1FF,), 255),
    ],
)
def test_whole_numbers(text, sources, wanted):
    name, *modifiers = text.split(".")
    kinds, function, kind = arithmetic.meaning(name, tuple(modifiers), len(sources))
    arrays = [
        arithmetic.numbers(
            np.array([x & 0xFFFFFFFF], np.uint32).astype(f"u{arithmetic.size_of(k)}"), k
        )
        for x, k in zip(sources, kinds, strict=True)
    ]
    found = arithmetic.bits(function(*arrays), kind)
    assert int(found[0]) == wanted & 0xFFFFFFFF


@pytest.mark.parametrize("kind, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_mma_holds_its_matrices_as_the_manual_says(kind, dtype):
    """Figures of "mma.m16n8k16" in the PTX ISA, element by element."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=generator).to(dtype) for s in ((16, 16), (16, 8)))
    c = torch.randn(16, 8, generator=generator)

    def packed(low, high):
        return torch.stack([low, high]).view(torch.int32).item() & 0xFFFFFFFF

    a_regs, b_regs = np.zeros((4, 1, 32), np.uint32), np.zeros((2, 1, 32), np.uint32)
    c_regs = np.zeros((4, 1, 32), np.float32)
    for lane in range(32):
        group, in_group = lane >> 2, lane & 3
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            col = in_group * 2 + (i & 1) + (8 if i >= 4 else 0)
            if i % 2 == 0:
                a_regs[i // 2, 0, lane] = packed(a[row, col], a[row, col + 1])
        for i in (0, 2):
            row = in_group * 2 + (8 if i >= 2 else 0)
            b_regs[i // 2, 0, lane] = packed(b[row, group], b[row + 1, group])
        for i in range(4):
            c_regs[i, 0, lane] = c[group + (8 if i >= 2 else 0), in_group * 2 + (i & 1)]
    found = warp.mma(a_regs, b_regs, c_regs.view(np.uint32), kind).view(np.float32)
    wanted = a.double() @ b.double() + c
    for lane in range(32):
        for i in range(4):
            row, col = (lane >> 2) + (8 if i >= 2 else 0), (lane & 3) * 2 + (i & 1)
            assert abs(found[i, 0, lane] - wanted[row, col]) < 1e-4


def test_ldmatrix_and_stmatrix():
    """Thread t has row t // 4, columns 2 * (t % 4) and the next; transposed: rows."""
    matrices = np.arange(2 * 4 * 64, dtype=np.uint16).reshape(2, 4, 8, 8)
    for is_transposed in (False, True):
        registers = warp.registers_of(matrices, is_transposed)
        for i, t in ((0, 0), (1, 5), (3, 31)):
            row, col = t // 4, 2 * (t % 4)
            low, high = (
                matrices[1, i, x, row] if is_transposed else matrices[1, i, row, x]
                for x in (col, col + 1)
            )
            assert registers[i, 1, t] == int(low) | int(high) << 16
        np.testing.assert_array_equal(warp.matrices_of(registers, is_transposed), matrices)


# ---- kernels: right ------------------------------------------------------------------------


def test_decodes_on_a_t4(compiler):
    attend(compiler, 75, *attention_case(DECODES, P=16, dtype=torch.float16))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
@pytest.mark.parametrize("group, head_dim", [(1, 64), (3, 80), (4, 128), (7, 64), (8, 96)])
def test_attention(compiler, capability, group, head_dim):
    for dtype in dtypes_of(capability):
        sizes = {"P": 16, "G": group, "D": head_dim, "dtype": dtype}
        attend(compiler, capability, *attention_case(MIXED, **sizes))
        args = attention_case(DECODES, **sizes)
        launches = attend(compiler, capability, *args, num_sms=SPLIT)
        assert [x.name for x in launches] == ["paged_attention_kernel", "reduce_splits_kernel"]
        if dtype != torch.float32:  # it has one launch for decodes and prompts
            attend(compiler, capability, *args)
            attend(compiler, capability, *attention_case(PREFILL, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
def test_windows_soft_caps_and_block_sizes(compiler, capability):
    dtype = dtypes_of(capability)[0]
    for lens in (DECODES, PREFILL):
        args = attention_case(lens, P=16, dtype=dtype)
        attend(compiler, capability, *args, window=20)
        attend(compiler, capability, *args, softcap=2.0)
    for block_size in (1, 4, 64, 256):
        attend(compiler, capability, *attention_case(MIXED, P=block_size, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
def test_splits_beside_a_prefill(compiler, capability, monkeypatch):
    monkeypatch.setattr(work_list, "MIN_TILES", 2)
    lens = [(40, 300), (1, 400), (5, 200), (1, 1)]
    for dtype in dtypes_of(capability):
        args = attention_case(lens, P=16, dtype=dtype)
        launches = attend(compiler, capability, *args, num_sms=4)
        assert sum(x.name == "reduce_splits_kernel" for x in launches) > 0
        args = quantized_case(lens, torch.int8, dtype=dtype)
        attend(compiler, capability, *args, num_sms=4, backend=QUANTIZED)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
@pytest.mark.parametrize("num_sms", [NO_SPLIT, SPLIT])
def test_a_nan_key_reaches_its_own_request_only(compiler, capability, num_sms):
    q_THD, cache, batch = attention_case(DECODES, P=16, dtype=dtypes_of(capability)[0])
    cache.keys[batch.block_tables_SB[1, 2], :, 3] = torch.nan
    attend(compiler, capability, q_THD, cache, batch, num_sms=num_sms)  # as torch in float64


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_caches_in_8_bits(compiler, capability, cache_dtype):
    if cache_dtype != torch.int8 and capability < 89:
        pytest.skip("no conversion of float8")
    for dtype in dtypes_of(capability):
        for lens, num_sms in ((MIXED, NO_SPLIT), (PREFILL, NO_SPLIT), (DECODES, SPLIT)):
            args = quantized_case(lens, cache_dtype, dtype=dtype)
            attend(compiler, capability, *args, num_sms=num_sms, backend=QUANTIZED)


def quantized_case(lens, cache_dtype, **sizes):
    """As attention_case, with caches in 8 bits; the scales of slots without a token are NaN."""
    q_THD, keys, values, batch = case(lens, P=16, **sizes)
    N, K, P, D = keys.shape
    cache = QuantizedCache.allocate((N, K, P, D), cache_dtype, "cpu")
    rows = [x.transpose(1, 2).reshape(N * P, K, D).float() for x in (keys, values)]
    cache.write(*rows, torch.arange(N * P))
    is_unused = ~keys.isfinite().all(-1)
    cache.k_scales[is_unused] = torch.nan
    cache.v_scales[is_unused] = torch.nan
    return q_THD, cache, batch


def run(compiler: Compiler, capability: int, call) -> tuple[object, list[Launch]]:
    """What call() gives, and the launches as they were before they ran."""
    before = []

    def keep(launch: Launch) -> None:
        before.append(launch.copy())
        execute(launch)

    with run_on(CHIPS[capability], compiler, keep):
        return call(), before


def rope_case(dtype, head_dim, group=3, T=6, K=2):
    """Queries, keys and values side by side, as a model has them; angles; slots."""
    qkv_TXD = torch.randn(T, (group + 2) * K, head_dim).to(dtype)
    angles_TR = torch.randn(T, head_dim // 2)
    slots_T = torch.tensor([7, -1, 0, 19, -1, 8])[:T]
    return *qkv_TXD.split([group * K, K, K], dim=1), angles_TR.cos(), angles_TR.sin(), slots_T


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
def test_rope_and_write(compiler, capability):
    for dtype in dtypes_of(capability):
        for head_dim in (64, 80, 128):
            *args, slots_T = rope_case(dtype, head_dim)
            found, wanted = (torch.full((2, 5, 2, 4, head_dim), 5.0, dtype=dtype) for _ in "ab")
            q_found, _ = run(
                compiler,
                capability,
                lambda: BACKEND.rope_and_write(*args, KVCache(*found), slots_T),  # noqa: B023
            )
            q_wanted = REFERENCE.rope_and_write(*args, KVCache(*wanted), slots_T)
            how = {"atol": ATOL[dtype], "rtol": 1e-2}
            torch.testing.assert_close(q_found, q_wanted, **how)
            torch.testing.assert_close(found, wanted, **how)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rope_and_write_in_8_bits(compiler, capability, cache_dtype):
    if cache_dtype != torch.int8 and capability < 89:
        pytest.skip("no conversion of float8")
    for dtype in dtypes_of(capability):
        for head_dim in (64, 80):
            *args, slots_T = rope_case(dtype, head_dim)
            caches = [
                QuantizedCache.allocate((5, 2, 4, head_dim), cache_dtype, "cpu") for _ in "ab"
            ]
            for cache in caches:
                for part in cache.raw_parts():
                    part.fill_(1)
            found, wanted = caches
            q_found, _ = run(
                compiler,
                capability,
                lambda: QUANTIZED.rope_and_write(*args, found, slots_T),  # noqa: B023
            )
            q_wide, k_wide = (apply_rope(x.float(), *args[3:]) for x in args[:2])
            torch.testing.assert_close(q_found.float(), q_wide, atol=ATOL[dtype], rtol=1e-2)
            wanted.write(k_wide, args[2].float(), slots_T)
            runs = torch.arange(5 * 2)
            pairs = zip(
                found.gather(runs, torch.float32),
                wanted.gather(runs, torch.float32),
                strict=True,
            )
            # Half a step of int8 and one of the scale; half a step of e4m3, rounded twice.
            step = 2**-6 if cache_dtype == torch.int8 else 2**-3
            for x, y in pairs:
                torch.testing.assert_close(x, y, atol=2**-5, rtol=step)
            untouched = torch.ones(20, dtype=torch.bool)
            untouched[slots_T[slots_T >= 0]] = False
            for part in found.raw_parts():
                rows = part.transpose(1, 2).flatten(0, 1)[untouched]
                assert (rows == 1).all(), "a slot was written that nobody named"


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
def test_what_works_on_rows(compiler, capability):
    """RMSNorm with and without a residual, SiLU times gate, experts."""
    for dtype in dtypes_of(capability):
        how = {"atol": 4 * ATOL[dtype], "rtol": 1e-2}
        for size in (64, 200, 1024):
            x_TE, weight_E = torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
            for residual_TE in (None, torch.randn(5, size)):
                args = x_TE, weight_E, 1e-5, residual_TE
                found, _ = run(compiler, capability, lambda: BACKEND.rms_norm(*args))  # noqa: B023
                wide = x_TE.float(), weight_E.float(), 1e-5, residual_TE
                for x, y in zip(found, REFERENCE.rms_norm(*wide), strict=True):
                    torch.testing.assert_close(x.float(), y, **how)
            gate_up_TF = torch.randn(3, 2 * size + 16).to(dtype)
            found, _ = run(compiler, capability, lambda: BACKEND.silu_mul(gate_up_TF))  # noqa: B023
            wanted = REFERENCE.silu_mul(gate_up_TF.float())
            torch.testing.assert_close(found.float(), wanted, **how)
        for K, N in ((64, 64), (200, 96)):
            args = experts_case(dtype, K, N)
            found, _ = run(compiler, capability, lambda: BACKEND.grouped_matmul(*args))  # noqa: B023
            x_MK, weight_XNK, counts_X = args
            wanted = REFERENCE.grouped_matmul(x_MK.double(), weight_XNK.double(), counts_X)
            atol = 0.1 if dtype == torch.bfloat16 else 0.02 if dtype == torch.float16 else 1e-4
            torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=1e-2)


def experts_case(dtype, K=128, N=96):
    return (
        torch.randn(37, K).to(dtype),
        torch.randn(4, N, K).to(dtype),
        torch.tensor([3, 0, 33, 1]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
def test_the_engine_s_tokens(compiler, capability):
    """A crowd of ragged requests with chunks and a preemption, in every step by PTX."""
    prompts = ["Once upon", "L", "There once was a fox", "So"]
    params = [
        SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True) for i in range(4)
    ]
    outs = {}
    for backend in ("torch", "triton"):
        llm = LLM("tiny", dtype="float32", attention_backend=backend, num_blocks=8,
                  block_size=4, max_num_seqs=4, max_num_batched_tokens=16)  # fmt: skip
        with run_on(CHIPS[capability], compiler):
            outs[backend] = llm.generate(prompts, params, progress=False)
    assert [o.token_ids for o in outs["triton"]] == [o.token_ids for o in outs["torch"]]


# ---- kernels: what a synchronization is for -------------------------------------------------

# How many may go for want of a conflict, at most, by their roles (ptx/mutants.py).
PIPELINED = {
    # Between the copies of the first tile and those of the second, which have buffers of their
    # own.
    "prologue": 1,
    # The last group of copies is of a tile past the end: it fills a buffer that nobody uses
    # again with zeros.
    "drain by one": 1,
}
# "other": results or factors change their layout in shared memory, and what a warp uses after
# this barrier, only the same warp used before.
UNNEEDED = {
    "decode": PIPELINED,
    "float32": PIPELINED,
    # Partial results do not pass through shared memory, and whole ones pass beside the buffers.
    "prefill": {**PIPELINED, "drain": 1},
    "8 bits": {"prologue": 1, "other": 1},
    "experts": {"prologue": 1},
}
# Without matrix units there are more layouts, and no copies.
UNNEEDED_ON_75 = {"prefill": {"other": 2}, "8 bits": {"other": 3}}


def check_mutants(launch: Launch, unneeded: dict[str, int]) -> int:
    """A launch's mutants are found, but for so many of each role; how many were."""
    program = parse(launch.compiled.ptx)
    right = launch.copy()
    execute(right, program)
    one_by_one = [[w] for w in range(program.num_threads // 32)]
    for order in (one_by_one, one_by_one[::-1]):
        again = launch.copy()
        execute(again, program, order)
        assert again.bytes() == right.bytes(), "the order of the warps shows"
    everything = list(mutants(program))
    missed = [
        (role, name) for name, role, mutant in everything if not is_found(launch, right, mutant)
    ]
    too_many = Counter(role for role, _ in missed) - Counter(unneeded)
    assert not too_many, f"{launch.name}: {missed}"
    return len(everything) - len(missed)


def is_found(launch: Launch, right: Launch, mutant) -> bool:
    """Whether it faults, or gives something else."""
    found = launch.copy()
    try:
        execute(found, mutant)
    except Fault:
        return True
    return found.bytes() != right.bytes()


def test_each_barrier_of_decode_is_needed(compiler, monkeypatch):
    """Both kernels, and both ends of the first: one sequence is split, the other is not."""
    monkeypatch.setattr(work_list, "MIN_TILES", 2)
    args = attention_case([(1, 9), (1, 140)], K=1, P=16, dtype=torch.bfloat16)
    launches = attend(compiler, 80, *args, num_sms=4)
    assert [x.name for x in launches] == ["paged_attention_kernel", "reduce_splits_kernel"]
    assert all(check_mutants(launch, PIPELINED) for launch in launches)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ALL)
def test_each_synchronization_is_needed(compiler, capability, monkeypatch):
    half, _ = dtypes_of(capability)
    monkeypatch.setattr(work_list, "MIN_TILES", 2)  # the first of two is split, the other not
    launches, chunks = [], [(40, 280), (40, 40)]
    for kind, lens, dtype in (
        ("decode", [(4, 300), (1, 9)], half),  # drafts: rows enough for two turns of each split
        ("prefill", chunks, half),
        ("float32", [(9, 200), (9, 9)], torch.float32),
    ):
        args = attention_case(lens, P=16, dtype=dtype)
        attention = attend(compiler, capability, *args, num_sms=4)
        assert len(attention) == 2, "nothing is split"
        launches += [(kind, x) for x in attention]
    for cache_dtype in (torch.int8, *([torch.float8_e4m3fn] if capability >= 89 else [])):
        args = quantized_case(chunks, cache_dtype, dtype=half)
        attention = attend(compiler, capability, *args, num_sms=4, backend=QUANTIZED)
        *args, slots_T = rope_case(half, 64)
        cache = QuantizedCache.allocate((5, 2, 4, 64), cache_dtype, "cpu")
        _, write = run(
            compiler,
            capability,
            lambda: QUANTIZED.rope_and_write(*args, cache, slots_T),  # noqa: B023
        )
        launches += [("8 bits", x) for x in (*attention, *write)]
    _, norm = run(
        compiler,
        capability,
        lambda: BACKEND.rms_norm(torch.randn(2, 512).to(half), torch.ones(512).to(half), 1e-5),
    )
    _, experts = run(
        compiler, capability, lambda: BACKEND.grouped_matmul(*experts_case(half, K=400))
    )
    launches += [("norm", x) for x in norm] + [("experts", x) for x in experts]
    table = UNNEEDED_ON_75 if capability == 75 else UNNEEDED
    found = {f"{kind}, {x.name}": check_mutants(x, table.get(kind, {})) for kind, x in launches}
    print(f"\nsm_{capability}", found)
    assert all(found.values())
