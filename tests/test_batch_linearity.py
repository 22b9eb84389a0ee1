"""A loss that a split of the batch changes is told in the notes of the trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.tracer import trace

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Router(nn.Module):
    """A linear layer with softmax, whose loss is of its rows."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.scores, self.loss = nn.Linear(6, 4), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.scores(x).softmax(-1), x)


def balance(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the loss that balances experts: shares of tokens times shares of probabilities."""
    used = torch.zeros_like(p).scatter(-1, p.topk(2).indices, 1.0)
    return (used.mean(0) * p.mean(0)).sum()


LINEAR: dict[str, Loss] = {
    "mean": lambda p, x: p.log().mean(),
    "entropy": lambda p, x: -(p * p.log()).sum(-1).mean(),
    "class": lambda p, x: F.cross_entropy(p, (x[:, 0] > 0).long()),
    "scaled": lambda p, x: 3 * p.square().mean() + p.mean(0)[1] / 7,
    "valid": lambda p, x: (p[:, 0] * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum(),
}
OTHER: dict[str, Loss] = {
    "balance": balance,
    "root": lambda p, x: p.square().mean().sqrt(),
    "largest": lambda p, x: p[:, 0].amax(0),
    "variance": lambda p, x: p.var(0).sum(),
    "ratio": lambda p, x: p[:, 0].sum() / p[:, 1].sum(),
    "centred": lambda p, x: (p - p.mean(0)).square().mean(),
}


def notes_on(loss: Loss) -> list[str]:
    found = trace(_Router(loss), torch.randn(8, 6), lambda out: out).notes
    return [note for note in found if "linear in the batch" in note]


@pytest.mark.parametrize("name", LINEAR)
def test_a_mean_over_rows_has_no_note(name: str) -> None:
    assert notes_on(LINEAR[name]) == []


@pytest.mark.parametrize("name", OTHER)
def test_a_loss_of_all_rows_together_has_a_note(name: str) -> None:
    (note,) = notes_on(OTHER[name])
    assert "dp or num_microbatches above 1" in note


@pytest.mark.parametrize("name", [*LINEAR, *OTHER])
def test_the_note_is_right_about_two_halves_of_the_batch(name: str) -> None:
    torch.manual_seed(3)
    rows = torch.randn(8, 6, dtype=torch.float64)
    rows[:, 0] = rows[:, 0].abs() * torch.tensor([1, -1]).repeat(4)  # as many valid in each half
    model = _Router({**LINEAR, **OTHER}[name]).double()
    whole, halves = model(rows), (model(rows[:4]) + model(rows[4:])) / 2
    is_equal = torch.allclose(whole, halves, rtol=1e-9)
    assert is_equal == (name in LINEAR)
