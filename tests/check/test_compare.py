"""What counts as the right result of an exercise."""

import pytest
import torch

from nanobatch.check.compare import expect

SAME = [
    (3, 3), (3.0, 3), (1 / 3, 0.3333333), (True, True), (None, None), ("a", "a"),
    ((1, 2), [1, 2]), ({"a": [1.0]}, {"a": [1]}),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6])),
    (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2])),
    (torch.tensor([-torch.inf]), torch.tensor([-torch.inf])),
]  # fmt: skip
OTHER = [
    (3, 4), (True, 1), (False, 0), (1, True), (0, None), ("3", 3), (3, "3"), (None, 0.0),
    ([1, 2], [1, 2, 3]), ([1, True], [1, 1]), ([1], 1), (1, [1]),
    ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 2}), ({}, {"a": 1}),
    (torch.ones(1), torch.ones(3)), (torch.ones(3), torch.ones(1, 3)),
    (torch.ones(3, 1), torch.ones(3)), (torch.tensor([1, 1]), torch.tensor([[1, 1]])),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001])), ([1.0], torch.ones(1)),
]  # fmt: skip


@pytest.mark.parametrize("found, wanted", SAME, ids=str)
def test_harmless_differences_pass(found, wanted):
    expect(found, wanted)


@pytest.mark.parametrize("found, wanted", OTHER, ids=str)
def test_others_are_refused(found, wanted):
    with pytest.raises(AssertionError, match=r"for \(7\) it gives .*; right is "):
        expect(found, wanted, 7)
