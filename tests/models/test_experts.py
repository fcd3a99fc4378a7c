"""A mixture of experts: the grouped product and its kernel against one product for each row.

Whole models are held against transformers in test_models.py. Here: experts without rows, rows
around the ends of tiles, sizes that fill no tile, formats, and who gets which expert.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from nanobatch.kernels.ops import REFERENCE
from nanobatch.models.config import ModelConfig
from nanobatch.models.experts import Experts, count_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTS = [[5], [0, 3, 0], [16, 17, 0, 1], [0, 0, 33, 15, 2]]


def row_by_row(x_MK, weight_XNK, counts):
    """float64, each row with its own expert's weights."""
    expert_M = [x for x, count in enumerate(counts) for _ in range(count)]
    rows = [x.double() @ weight_XNK[e].double().T for x, e in zip(x_MK, expert_M, strict=True)]
    return torch.stack(rows)


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_matmul(counts):
    torch.manual_seed(0)
    x, weight = torch.randn(sum(counts), 24), torch.randn(len(counts), 10, 24)
    found = REFERENCE.grouped_matmul(x, weight, torch.tensor(counts))
    torch.testing.assert_close(found.double(), row_by_row(x, weight, counts), atol=1e-5, rtol=0)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("N, K", [(64, 64), (70, 40)])
def test_the_kernel_equals_its_reference(counts, N, K, dtype):
    pytest.importorskip("triton")
    from nanobatch.kernels.grouped_matmul import triton_grouped_matmul

    torch.manual_seed(0)
    M, X = sum(counts), len(counts)
    x = torch.randn(M, K).to(DEVICE, dtype)
    weight = (torch.randn(X, N, K) * K**-0.5).to(DEVICE, dtype)
    found = triton_grouped_matmul(x, weight, torch.tensor(counts, device=DEVICE))
    wanted = row_by_row(x.cpu(), weight.cpu(), counts).to(dtype)
    assert found.dtype == dtype
    atol = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.cpu(), wanted, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("counts", [*COUNTS, [0, 0], [100, 1, 200]])
def test_tiles_hold_every_row_once(counts):
    pytest.importorskip("triton")
    from nanobatch.kernels.grouped_matmul import BLOCK_M, lay_tiles

    tiles = lay_tiles(torch.tensor(counts), sum(counts))
    found = []
    for expert, start, end in zip(*(x.tolist() for x in tiles), strict=True):
        if expert >= 0:
            rows = range(start, min(start + BLOCK_M, end))
            assert len(rows) > 0, "a tile of nothing"
            found += [(row, expert) for row in rows]
    assert found == list(enumerate(x for x, n in enumerate(counts) for _ in range(n)))


def experts(num_experts=5, num_chosen=2, **changes):
    config = ModelConfig(
        architecture="MixtralForCausalLM", vocab_size=8, hidden_size=16, intermediate_size=8,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, num_experts=num_experts,
        num_experts_per_tok=num_chosen, moe_intermediate_size=12, **changes,
    )  # fmt: skip
    layer = Experts(config).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


def token_by_token(layer, x_TE):
    """Each token through its best experts, one at a time, in float64."""
    out = []
    for x in x_TE.double():
        shares = (layer.router.weight.double() @ x).softmax(dim=0)
        best = shares.topk(layer.num_chosen)
        total = best.values.sum() if layer.norms else 1
        sums = torch.zeros_like(x)
        for share, expert in zip(best.values / total, best.indices.tolist(), strict=True):
            gate, up = (layer.gate_up_XFE[expert].double() @ x).chunk(2)
            sums += share * (layer.down_XEF[expert].double() @ (F.silu(gate) * up))
        out.append(sums)
    return torch.stack(out)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("num_experts, num_chosen", [(1, 1), (5, 2), (5, 5), (64, 3)])
def test_each_token_goes_through_its_best(num_experts, num_chosen, norm_topk_prob):
    torch.manual_seed(0)
    layer, x = (
        experts(num_experts, num_chosen, norm_topk_prob=norm_topk_prob),
        torch.randn(9, 16),
    )
    torch.testing.assert_close(
        layer(x).double(), token_by_token(layer, x), atol=1e-3, rtol=1e-4
    )


def test_company_changes_nothing():
    """Invariant 12: a token alone, and in another order among others."""
    torch.manual_seed(1)
    layer, x = experts(), torch.randn(12, 16)
    together = layer(x)
    shuffled = torch.randperm(12)
    torch.testing.assert_close(layer(x[shuffled]), together[shuffled], atol=1e-4, rtol=1e-5)
    for i in range(12):
        torch.testing.assert_close(layer(x[i : i + 1])[0], together[i], atol=1e-4, rtol=1e-5)


@pytest.mark.kernels
def test_the_kernel_in_a_whole_layer():
    pytest.importorskip("triton")
    from nanobatch.kernels.triton_ops import TritonOps

    torch.manual_seed(0)
    layer, x = experts(), torch.randn(20, 16)
    wanted = token_by_token(layer, x)
    layer = layer.to(DEVICE)
    layer.ops = TritonOps()
    torch.testing.assert_close(layer(x.to(DEVICE)).cpu().double(), wanted, atol=1e-3, rtol=1e-4)


def test_ids_are_counted():
    assert count_ids(torch.tensor([3, 0, 3, 3]), 5).tolist() == [1, 0, 0, 3, 0]
