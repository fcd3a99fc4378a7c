"""What runs on AMX tiles: products, and attention of prompts, against float64 and torch.

Rows and keys around the ends of tiles, pieces and blocks; windows; NaN past every end.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from nanobatch import LLM, SamplingParams
from nanobatch.attention import paged_attention
from nanobatch.batch import Row, pack
from nanobatch.config import EngineConfig
from nanobatch.extensions.cpu import compiler as cpu_compiler
from nanobatch.extensions.cpu import kernels as cpu_kernels
from nanobatch.extensions.cpu.products import PackedGateUp, PackedLinear, PackedLMHead, packed
from nanobatch.model_runner import ModelRunner
from nanobatch.models.config import ModelConfig
from nanobatch.models.decoder import GateUp
from nanobatch.models.loader import make_dummy
from nanobatch.utils.arithmetic import cdiv

pytestmark = [
    pytest.mark.skipif(cpu_compiler.find() is None, reason="no C compiler"),
    pytest.mark.skipif(not cpu_kernels.has_amx(), reason="this CPU has no AMX"),
]
NAN = float("nan")


@pytest.mark.parametrize("N, K", [(32, 32), (96, 64), (1088, 576)])
@pytest.mark.parametrize("M", [1, 15, 16, 17, 32, 33, 128, 129, 257, 333])
def test_products_equal_float64(M, N, K):
    """Rows around the ends of tiles, few and many, several groups of panels; with and without
    a bias; in float32 to the rounding of the sums."""
    x, weight, bias = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N)
    kernels = cpu_kernels.products(weight)
    packed, bias = kernels.pack(weight), bias.bfloat16()
    wanted = x.double() @ weight.double().T
    found = kernels.product(x, packed, None, torch.float32)
    torch.testing.assert_close(found.double(), wanted, atol=2e-4, rtol=1e-5)
    found = kernels.product(x, packed, bias, torch.bfloat16)
    wanted = wanted + bias.double()
    torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=2**-8)


def swapped(layer):
    """The product in C that takes a layer's place."""
    kernels = cpu_kernels.products(layer.weight)
    assert kernels is not None
    return packed(layer, kernels)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("M", [1, 17, 200, 300])
def test_a_gated_product_equals_float64(M, with_bias):
    torch.manual_seed(M)
    layer = GateUp(64, 2 * 96, bias=with_bias).bfloat16().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()
    x = torch.randn(M, 64).bfloat16()
    gate, up = (x.double() @ layer.weight.double().T).chunk(2, dim=1)
    if with_bias:
        gate, up = (
            a + b for a, b in zip((gate, up), layer.bias.double().chunk(2), strict=True)
        )
    found = swapped(layer)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), F.silu(gate) * up, atol=1e-3, rtol=2**-8)


def test_silu_of_far_numbers():
    """e^-x beyond the largest float, and NaN."""
    layer = GateUp(32, 32, bias=False).bfloat16().requires_grad_(False)
    layer.weight.zero_()
    layer.weight[:16, 0], layer.weight[16:, 1] = 1, 1  # gate x[0], up x[1]
    layer = swapped(layer)
    gate = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, NAN]).bfloat16()
    x = torch.zeros(7, 32).bfloat16()
    x[:, 0], x[:, 1] = gate, 1
    found = layer(x)[:, 0]
    torch.testing.assert_close(found, F.silu(gate), equal_nan=True, atol=1e-6, rtol=2**-7)


def test_a_row_of_nan_leaves_the_others_alone():
    x, weight = torch.randn(20, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    x[7, 3] = NAN
    kernels = cpu_kernels.products(weight)
    out = kernels.product(x, kernels.pack(weight), None, torch.float32)
    assert out[7].isnan().all() and out.isnan().any(dim=1).sum() == 1


def small_model(vocab_size):
    config = ModelConfig(
        architecture="Qwen2ForCausalLM", vocab_size=vocab_size, hidden_size=64,
        intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position_embeddings=64, qkv_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    return make_dummy(config, torch.bfloat16)


@pytest.mark.parametrize("vocab_size", [100, 128])  # lm_head: as it is, and laid out
def test_a_model_that_is_laid_out_is_the_same_model(vocab_size):
    plain, laid_out = small_model(vocab_size), small_model(vocab_size)
    ModelRunner(laid_out, EngineConfig(num_blocks=4))
    layer, other = laid_out.layers[1], plain.layers[1]
    assert type(layer.qkv) is PackedLinear and type(layer.mlp.gate_up) is PackedGateUp
    assert laid_out.embed.weight.shape == (vocab_size, 64)
    assert (type(laid_out.lm_head) is not PackedLMHead) == (vocab_size == 100)
    x = torch.randn(21, 64).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(layer.qkv(x), other.qkv(x), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(layer.mlp(x), other.mlp(x), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(laid_out.logits(x), plain.logits(x), atol=3e-2, rtol=2e-2)
        exact = x.float() @ plain.lm_head.weight.float().T
        best = exact.argmax(dim=1)
        torch.testing.assert_close(
            laid_out.logits(x).gather(1, best[:, None]), exact.gather(1, best[:, None])
        )
    before = layer.qkv.packed
    ModelRunner(laid_out, EngineConfig(num_blocks=4))
    assert layer.qkv.packed is before, "laid out twice"
    with pytest.raises(ValueError, match="attention_backend is 'torch'.*laid out for 'c'"):
        ModelRunner(laid_out, EngineConfig(num_blocks=4, attention_backend="torch"))


# ---- attention of prompts --------------------------------------------------------------


def cached(rows, lens, K, P, D):
    """(keys, values) in caches of NaN."""
    num_blocks = 1 + max(block for row in rows for block in row.block_table)
    caches = [torch.full((num_blocks, K, P, D), NAN).bfloat16() for _ in range(2)]
    for row, n in zip(rows, lens, strict=True):
        for pos in range(n):
            for cache in caches:
                cache[row.block_table[pos // P], :, pos % P] = torch.randn(K, D).bfloat16()
    return caches


def both(q, caches, rows, **how):
    P = caches[0].shape[2]
    exact = [x.float() for x in (q, *caches)]
    ours = paged_attention(q, *caches, pack(rows, P), backend="c", **how)
    return ours, paged_attention(*exact, pack(rows, P), backend="torch", **how)


@pytest.mark.parametrize("window", [None, 1, 5, 40, 300])
@pytest.mark.parametrize(
    "G, K, D, P", [(1, 3, 64, 16), (3, 3, 64, 16), (4, 1, 96, 1), (7, 2, 32, 4), (8, 1, 128, 8)]
)
def test_prefill_equals_its_reference(G, K, D, P, window):
    """Prompts, chunks after a cached prefix, a decode between them; shuffled blocks."""
    torch.manual_seed(0)
    lens, query_lens = [2, 17, 290, 40, 600], [2, 16, 290, 1, 90]
    blocks = torch.randperm(sum(cdiv(n, P) for n in lens)).tolist()
    tables = [[blocks.pop() for _ in range(cdiv(n, P))] for n in lens]
    rows = [
        Row([0] * num, n - num, table)
        for n, num, table in zip(lens, query_lens, tables, strict=True)
    ]
    caches = cached(rows, lens, K, P, D)
    q = torch.randn(sum(query_lens), G * K, D).bfloat16()
    assert cpu_kernels.paged_prefill(q, caches[0]) is not None
    ours, reference = both(q, caches, rows, scale=D**-0.5, sliding_window=window)
    torch.testing.assert_close(ours.float(), reference.nan_to_num(99), atol=8e-3, rtol=2e-2)


def test_one_large_score_after_many_small_ones():
    """The largest score comes last: what was summed before must shrink to nothing."""
    rows, D = [Row([0] * 300, 0, list(range(19)))], 64
    caches = cached(rows, [300], 1, 16, D)
    caches[0][-2, 0, 5], q = 30, torch.ones(300, 1, D).bfloat16()  # position 293
    ours, reference = both(q, caches, rows, scale=1.0)
    torch.testing.assert_close(ours.float(), reference, atol=8e-3, rtol=2e-2)


def test_nan_in_a_request_stays_in_it():
    """Invariants 14 and 15: its keys or queries are NaN; the others' numbers are theirs."""
    torch.manual_seed(0)
    rows = [Row([0] * 20, 0, [0, 1]), Row([0] * 20, 0, [2, 3])]
    caches, q = cached(rows, [20, 20], 1, 16, 64), torch.randn(40, 2, 64).bfloat16()
    fine, _ = both(q, caches, rows, scale=0.125)
    caches[0][1, 0, 2], q[5] = NAN, NAN  # position 18 of the first, and its query 5
    ours, _ = both(q, caches, rows, scale=0.125)
    assert torch.equal(ours[20:], fine[20:])
    assert ours[5].isnan().all() and ours[18:20].isnan().all()
    assert torch.equal(ours[:5], fine[:5]) and torch.equal(ours[6:18], fine[6:18])


def test_block_tables_of_64_bits_are_read_as_they_are():
    torch.manual_seed(0)
    rows = [Row([0] * 20, 4, [1, 0])]
    caches, q = cached(rows, [24], 1, 16, 64), torch.randn(20, 2, 64).bfloat16()
    batch, other = pack(rows, 16), pack(rows, 16)
    other.block_tables_SB, other.seq_lens_S = (
        batch.block_tables_SB.long(),
        batch.seq_lens_S.long(),
    )
    found, wanted = (
        paged_attention(q, *caches, b, scale=0.125, backend="c") for b in (other, batch)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("D, G", [(80, 1), (288, 1), (64, 257)])
def test_shapes_without_a_kernel_are_torch_s(D, G):
    caches = [torch.randn(2, 1, 4, D).bfloat16() for _ in range(2)]
    q = torch.randn(3, G, D).bfloat16()
    assert cpu_kernels.paged_prefill(q, caches[0]) is None
    ours, reference = both(q, caches, [Row([0] * 3, 1, [1])], scale=D**-0.5)
    torch.testing.assert_close(ours.float(), reference, atol=2e-2, rtol=2e-2)


def test_a_prompt_in_chunks_is_the_prompt():
    """Through the whole engine, in bfloat16, with chunks that end anywhere."""
    prompt = list(range(40, 120)) * 4
    outs = []
    for budget in (512, 100, 33):
        llm = LLM(
            "tiny", dtype="bfloat16", max_num_batched_tokens=budget, max_num_seqs=8,
            num_blocks=60,
        )  # fmt: skip
        assert llm.engine.runner.backend.name == "c"
        outs += llm.generate(
            prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=5), False
        )
    for out in outs[1:]:
        for token, logprob in outs[0].logprobs[0].items():
            assert out.logprobs[0].get(token, logprob) == pytest.approx(logprob, abs=0.1)
