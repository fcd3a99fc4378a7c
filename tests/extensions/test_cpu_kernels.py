"""The CPU's kernels against their torch references, and the engine without them.

test_attention.py runs all of its tests with and without them, against float64. Here: sizes that
are no multiple of a vector, both number formats, NaN, strided tokens, slot -1, and what happens
where a gradient or another number format is wanted. What runs on tiles has test_cpu_tiles.py;
what happens where C cannot be compiled has test_cpu_library.py.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from nanobatch import LLM, SamplingParams
from nanobatch.attention import choose_backend, paged_attention
from nanobatch.batch import Row, pack
from nanobatch.config import EngineConfig
from nanobatch.extensions.cpu import compiler as cpu_compiler
from nanobatch.extensions.cpu import kernels as cpu_kernels
from nanobatch.extensions.cpu import library as cpu_library
from nanobatch.extensions.cpu.backend import CBackend
from nanobatch.extensions.cpu.products import PackedGateUp, PackedLinear, PackedLMHead, packed
from nanobatch.extensions.quantized_cache import LARGEST, SMALLEST_SCALE
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.ops import REFERENCE
from nanobatch.model_runner import ModelRunner
from nanobatch.models.config import ModelConfig
from nanobatch.models.decoder import Linear
from nanobatch.models.loader import make_dummy
from nanobatch.utils.arithmetic import cdiv

pytestmark = pytest.mark.skipif(cpu_compiler.find() is None, reason="no C compiler")
NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16]
C = CBackend()


def rms_norm(ops, *args):
    return ops.rms_norm(*args)


def silu_mul(ops, *args):
    return ops.silu_mul(*args)


def both(operation, *args):
    """(by the kernel, by its reference) on copies of the arguments, which are returned too.

    operation: takes the operations, then the arguments.
    """
    results = []
    for ops in (C, REFERENCE):
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        results.append((operation(ops, *copies), copies))
    return results


def assert_near(a, b, dtype):
    tolerance = (
        {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 1e-2}
    )
    torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, size", [(1, 1), (3, 7), (2, 64), (5, 100), (40, 576)])
def test_elementwise_kernels_equal_their_references(T, size, dtype):
    x = torch.randn(T, size).to(dtype)
    weight, residual = torch.randn(size).to(dtype), torch.randn(T, size)
    for more in ((), (residual,)):
        (ours, _), (reference, _) = both(rms_norm, x, weight, 1e-5, *more)
        assert_near(ours[0], reference[0], dtype)
        torch.testing.assert_close(ours[1], reference[1])
    gate_up = 6 * torch.randn(T, 2 * size).to(dtype)
    (ours, _), (reference, _) = both(silu_mul, gate_up)
    assert_near(ours, reference, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_more_dimensions_and_strides(dtype):
    """The norm of q and k is over heads, which are slices of a wider token."""
    x = torch.randn(5, 12, 16).to(dtype)[:, 2:7]
    (ours, _), (reference, _) = both(rms_norm, x, torch.randn(16).to(dtype), 1e-5)
    assert ours[0].shape == reference[0].shape == (5, 5, 16)
    assert_near(ours[0], reference[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_so(dtype):
    """Invariant 15 begins here: no kernel turns NaN into a number."""
    x = torch.randn(4, 32).to(dtype)
    x[1, 3], x[2, 5] = NAN, INF
    (ours, _), (reference, _) = both(rms_norm, x, torch.ones(32).to(dtype), 1e-5)
    assert torch.equal(ours[0].isnan(), reference[0].isnan()) and ours[0][1].isnan().all()
    residual = torch.zeros(4, 32)
    residual[3, 7] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    (ours, _), _ = both(rms_norm, x, torch.ones(32).to(dtype), 1e-5, residual)
    assert ours[0][3].isnan().all(), "a NaN of all ones was rounded up to a number"
    (ours, _), (reference, _) = both(silu_mul, x)
    assert torch.equal(ours.isnan(), reference.isnan()) and ours[1].isnan().sum() == 1
    far = torch.tensor([[-200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, INF] + [1.0] * 8]).to(
        dtype
    )
    (ours, _), (reference, _) = both(silu_mul, far)
    assert_near(ours, reference, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, K, D, P", [(3, 1, 64, 4), (4, 4, 10, 16), (6, 2, 80, 1)])
def test_rope_and_write_equals_its_reference(H, K, D, P, dtype):
    """Tokens are slices of a wider product; slot -1 is written nowhere."""
    T, N = 9, 12
    heads = torch.randn(T, H + 2 * K, D).to(dtype)
    q, k, v = heads.split([H, K, K], dim=1)
    angles = torch.randn(T, D // 2)
    caches = [torch.full((N, K, P, D), 7.0).to(dtype) for _ in range(2)]
    slots = torch.randperm(N * P)[:T]
    slots[::3] = -1

    def call(ops, heads, cos, sin, k_cache, v_cache, slots):
        q, k, v = heads.split([H, K, K], dim=1)
        return ops.rope_and_write(q, k, v, cos, sin, KVCache(k_cache, v_cache), slots)

    (ours, args), (reference, references) = both(
        call, heads, angles.cos(), angles.sin(), *caches, slots
    )
    assert_near(ours, reference, dtype)
    for a, b in zip(args[3:5], references[3:5], strict=True):
        assert_near(a, b, dtype)
        assert (a != 7).any(dim=-1).sum() == K * (slots >= 0).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 5, 64, 65, 1000])
def test_top_ids_are_torch_s(V, dtype):
    x = torch.randn(6, V).to(dtype)
    x[0], x[1] = 0, -INF
    x[2] = torch.arange(V)
    for k in {1, 2, 5, 32} & set(range(1, V + 1)):
        ids = C.top_ids(x, k)
        assert all(len(set(row)) == k for row in ids.tolist())
        assert torch.equal(x.gather(1, ids).sort().values, x.topk(k).values.sort().values)
    assert C.top_ids(x, 1)[0] == 0, "of equals the first"


def test_of_equal_numbers_the_first_stay():
    assert set(C.top_ids(torch.tensor([[1.0, 1.0, 2.0, 1.0]]), 2)[0].tolist()) == {0, 2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "G, K, D", [(1, 3, 64), (3, 3, 64), (4, 1, 80), (7, 2, 96), (8, 1, 128)]
)
def test_paged_decode_equals_its_reference(G, K, D, dtype):
    """Lengths around the ends of blocks, a window, poison past every end, any block."""
    P, scale = 4, D**-0.5
    lens = [1, 3, 4, 5, 8, 9, 30]
    tables = torch.randperm(100)[: sum(cdiv(n, P) for n in lens)].tolist()
    rows = [Row([0], n - 1, [tables.pop() for _ in range(cdiv(n, P))]) for n in lens]
    caches = [torch.full((100, K, P, D), NAN).to(dtype) for _ in range(2)]
    for n, row in zip(lens, rows, strict=True):
        for pos in range(n):
            for cache in caches:
                cache[row.block_table[pos // P], :, pos % P] = torch.randn(K, D).to(dtype)
    q = torch.randn(len(lens), G * K, D).to(dtype)
    for window in (None, 1, 4, 6):
        batch = pack(rows, P)
        how = {"scale": scale, "sliding_window": window}
        ours = paged_attention(q, *caches, batch, backend="c", **how)
        reference = paged_attention(q, *caches, pack(rows, P), backend="torch", **how)
        assert ours.isfinite().all()
        assert_near(ours, reference, dtype)


def test_decodes_beside_prefills_and_tokens_of_nobody():
    """One step of both kinds, and a softcap that has no kernel."""
    rows = [
        Row([0] * 5, 2, [0, 1]),
        Row([0], 6, [2, 3]),
        Row([0] * 2, 0, [4]),
        Row([0], 0, [5]),
    ]
    caches = [torch.randn(6, 2, 4, 16) for _ in range(2)]
    q = torch.randn(11, 4, 16)  # two more than the rows have
    for softcap in (None, 5.0):
        ours, reference = (
            paged_attention(
                q, *caches, pack(rows, 4), scale=0.25, softcap=softcap, backend=backend
            )
            for backend in ("c", "torch")
        )
        torch.testing.assert_close(ours, reference, atol=2e-3, rtol=1e-3)
        assert (ours[9:] == 0).all() and (ours[:9] != 0).any(dim=-1).all()


# ---- where there are none --------------------------------------------------------------


def test_a_gradient_is_the_reference_s():
    """Of the rows, and of the weight alone."""
    x, weight = torch.randn(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    C.rms_norm(x, torch.ones(8), 1e-5)[0].sum().backward()
    C.rms_norm(x.detach(), weight, 1e-5)[0].sum().backward()
    assert x.grad is not None and weight.grad is not None


def test_mixed_formats_are_the_reference_s():
    """C would read the one as the other."""
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    (found, _), (reference, _) = both(rms_norm, x, weight, 1e-5)
    assert torch.equal(found[0], reference[0])


def test_block_tables_of_64_bits_are_read_as_they_are():
    rows = [Row([0], 6, [3, 1]), Row([0], 0, [0])]
    caches, q = [torch.randn(4, 1, 4, 8) for _ in range(2)], torch.randn(2, 2, 8)
    batch, other = pack(rows, 4), pack(rows, 4)
    other.block_tables_SB, other.seq_lens_S = (
        batch.block_tables_SB.long(),
        other.seq_lens_S.long(),
    )
    found = paged_attention(q, *caches, other, scale=1.0, backend="c")
    torch.testing.assert_close(
        found, paged_attention(q, *caches, batch, scale=1.0, backend="torch")
    )


def test_what_a_kernel_cannot_read_is_refused_by_name():
    x, weight = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(ValueError, match="rms_norm: residual is torch.float64.*torch.float32"):
        cpu_kernels.elementwise(x).rms_norm(x, weight, 1e-5, torch.zeros(3, 8).double())
    with pytest.raises(ValueError, match=r"rms_norm: weight .*strides \(2,\).*dense"):
        cpu_kernels.elementwise(x).rms_norm(x, torch.randn(16)[::2], 1e-5, None)


def test_a_gpu_and_other_formats_have_other_kernels():
    assert cpu_kernels.elementwise(torch.zeros(1, dtype=torch.float16)) is None
    assert cpu_kernels.elementwise(torch.zeros(1, device="meta")) is None
    with pytest.raises(ValueError, match="attention_backend is 'c'.*on a CPU"):
        choose_backend("c", "cuda", block_size=16)
    half = ("cpu", 16, torch.float16)
    with pytest.raises(ValueError, match="attention_backend is 'c'.*not torch.float16"):
        choose_backend("c", *half)
    with warnings.catch_warnings(action="error"):  # nobody can mend that
        assert choose_backend("auto", *half).name == "torch"


def test_float32_models_are_left_alone():
    llm = LLM("tiny", dtype="float32", num_blocks=4)
    assert llm.engine.runner.model.layout is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", "c"])
def test_with_attention_backend_torch_all_of_it_is_torch(monkeypatch, backend, dtype):
    """Norms, RoPE, cache writes, products, attention and the sampler: C runs for "c" only."""
    calls = []
    call = cpu_library.Library._call

    def counted(self, name, *values):
        calls.append(name)
        call(self, name, *values)

    monkeypatch.setattr(cpu_library.Library, "_call", counted)
    llm = LLM("tiny", dtype=dtype, attention_backend=backend, num_blocks=20)
    params = [SamplingParams(max_tokens=3, temperature=t, seed=0) for t in (0, 1)]
    llm.generate(["Once", "One day"], params, progress=False)
    operations = {"rms_norm", "silu_mul", "rope_and_write", "top_ids", "paged_decode"}
    if dtype == "bfloat16" and cpu_kernels.has_amx():
        operations = operations - {"silu_mul"} | {"matmul", "paged_prefill"}
    assert set(calls) == (operations if backend == "c" else set())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_c_and_python_have_the_same_constants_of_8_bits(dtype):
    header = (cpu_library.HERE / "cache.h").read_text()
    of_format = header[header.index(f"#{'ifdef' if dtype == torch.int8 else 'else'}") :]
    assert f"#define LARGEST {LARGEST[dtype]}\n" in of_format.split("typedef")[0]
    assert f"#define SMALLEST_SCALE {SMALLEST_SCALE!r}\n" in header


class Matmul:
    """What matmul.c does, in torch, so that a decoder's packed products are tested anywhere."""

    def pack(self, weight_NK):
        return weight_NK

    def product(self, x_TE, packed, bias_F, dtype, is_gated=False):
        bias_F = None if bias_F is None else bias_F.float()
        out_TF = F.linear(x_TE.float(), packed.float(), bias_F)
        if is_gated:  # 16 of the gate's columns, then 16 of the others, in turns
            gate, up = out_TF.unflatten(-1, (-1, 2, 16)).unbind(-2)
            out_TF = (F.silu(gate) * up).flatten(-2)
        return out_TF.to(dtype)


def test_a_decoder_with_packed_products_is_the_same_decoder(monkeypatch):
    shape = ModelConfig(
        architecture="Qwen2ForCausalLM", vocab_size=100, hidden_size=64,
        intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position_embeddings=64, qkv_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    plain, laid_out = (make_dummy(shape, torch.bfloat16) for _ in range(2))
    monkeypatch.setattr("nanobatch.extensions.cpu.products.products", lambda weight: Matmul())
    config = EngineConfig(num_blocks=4, attention_backend="c")
    ModelRunner(laid_out, config)
    kinds = {PackedLinear: 2 * 3, PackedGateUp: 2, PackedLMHead: 1}  # qkv, o, down
    for kind, number in kinds.items():
        assert sum(type(module) is kind for module in laid_out.modules()) == number
    x = torch.randn(21, 64).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(laid_out.logits(x), plain.logits(x), atol=3e-2, rtol=2e-2)
        for one, other in zip(laid_out.layers, plain.layers, strict=True):
            torch.testing.assert_close(one.qkv(x), other.qkv(x), atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(one.mlp(x), other.mlp(x), atol=2e-2, rtol=2e-2)
    before = laid_out.layers[0].qkv
    ModelRunner(laid_out, config)
    assert laid_out.layers[0].qkv is before, "laid out twice"
    with pytest.raises(ValueError, match="attention_backend is 'torch'.*laid out for 'c'"):
        ModelRunner(laid_out, EngineConfig(num_blocks=4, attention_backend="torch"))


def test_forward_hooks_stay_with_a_packed_product():
    layer = Linear(32, 32).bfloat16().requires_grad_(False)
    layer.weight.normal_()
    layer.register_forward_hook(lambda module, inputs, out: out * 0 + 7)
    assert (packed(layer, Matmul())(torch.randn(3, 32).bfloat16()) == 7).all()
