"""Weights in huge pages: which are moved, and that they keep their values."""

import mmap

import pytest
import torch
from torch import nn

from sage.runtime.cpu import huge_pages, use_huge_pages


class Tied(nn.Module):
    """Two layers with one weight, an empty parameter and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(3, 5).bfloat16()
        self.second.weight = self.first.weight
        self.empty, self.transposed = nn.Parameter(torch.empty(0)), nn.Parameter(torch.rand(4, 3).T)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages on request")
def test_weights_keep_values_and_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    before = {name: (weight.data_ptr(), weight.detach().clone()) for name, weight in model.named_parameters()}
    use_huge_pages(model)
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == {
        k: v[0] for k, v in before.items()
    }  # small
    monkeypatch.setattr(huge_pages, "MIN_BYTES", 1)
    monkeypatch.setattr(huge_pages, "free_bytes", lambda device: 100)
    use_huge_pages(model)  # no room
    assert model.first.weight.data_ptr() == before["first.weight"][0]
    monkeypatch.undo()
    monkeypatch.setattr(huge_pages, "MIN_BYTES", 1)
    use_huge_pages(model)
    moved = {name for name, weight in model.named_parameters() if weight.data_ptr() != before[name][0]}
    assert moved == before.keys() - {"empty", "transposed"}
    assert all(torch.equal(weight, before[name][1]) for name, weight in model.named_parameters())
    assert model.second.weight is model.first.weight
    assert all(weight.data_ptr() % huge_pages.ALIGNMENT == 0 for name, weight in model.named_parameters() if name in moved)
    model.first.weight.data.zero_()  # they can be written
    assert torch.equal(model.other.weight, before["other.weight"][1])
