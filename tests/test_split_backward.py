"""Which backwards torch can split is read off the graph of a forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoplan.split_backward import hands_on_parameters, reads_again


class _Chain(nn.Module):
    """Linear layers one after another, with a skip around each."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


@pytest.mark.parametrize(("order", "expected"), [("ab", False), ("aba", True), ("aa", True)])
def test_a_layer_that_is_applied_again_cannot_be_split(order: str, expected: bool) -> None:
    layers = {name: nn.Linear(3, 3) for name in "ab"}
    entered = torch.randn(2, 3, requires_grad=True)
    made = _Chain(*(layers[name] for name in order))(entered)
    assert reads_again([made], [entered]) is expected
    assert reads_again([made], [entered.detach()]) is False  # a first stage: nothing to split


def test_slices_of_one_weight_side_by_side_can_be_split() -> None:
    weight = nn.Parameter(torch.randn(3, 6))
    entered = torch.randn(2, 3, requires_grad=True)
    first, second = torch.split(weight, 3, 1)
    assert not reads_again([entered @ first, entered @ second], [entered])
    assert reads_again([entered @ first @ second], [entered])


def test_an_output_of_parameters_alone_is_told() -> None:
    weight = nn.Parameter(torch.randn(3))
    entered = torch.randn(2, 3, requires_grad=True)
    bias = weight.exp()
    made = entered * bias
    assert not hands_on_parameters([made], [entered])
    assert hands_on_parameters([made, bias], [entered])
    assert not hands_on_parameters([made, entered], [entered])
