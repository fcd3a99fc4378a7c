"""The largest numbers of a row in two steps, against torch.topk on the whole row.

Where numbers are equal any of them will do, but none twice.
"""

import math

import pytest
import torch

from nanobatch.kernels.ops import NUM_CHUNKS, largest_of_chunks

INF = math.inf


def rows_of(kind, num_rows, row_size):
    generator = torch.Generator().manual_seed(row_size)
    x = torch.randn(num_rows, row_size, generator=generator)
    of_kind = {
        "gauss": x,
        "bfloat16": x.bfloat16(),  # equal numbers are common
        "three values": (x > 0.5).float() + (x > 2),
        "flat": torch.zeros_like(x),
        "ascending": x.sort().values,  # the largest are in the last chunk, and behind it
        "descending": x.sort(descending=True).values,  # in the first
        "impossible": torch.where(torch.arange(row_size) % 5 > 0, -INF, x),
        "all impossible": torch.full_like(x, -INF),
    }
    return of_kind[kind]


KINDS = ("gauss", "bfloat16", "three values", "flat", "ascending", "descending", "impossible",
         "all impossible")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "num_rows, row_size, k",
    [(1, 16, 1), (3, 31, 1), (2, 32, 2), (2, 47, 2), (4, 1000, 32), (2, 1007, 62),
     (1, 100_003, 32)],
)  # fmt: skip
def test_two_steps_find_what_one_finds(kind, num_rows, row_size, k):
    assert k <= row_size // NUM_CHUNKS
    x = rows_of(kind, num_rows, row_size)
    values, ids = largest_of_chunks(x, k)
    assert values.shape == ids.shape == (num_rows, k) and ids.dtype == torch.int64
    assert torch.equal(values, x.topk(k).values)
    assert torch.equal(x.gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())
