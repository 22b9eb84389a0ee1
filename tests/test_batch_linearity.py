"""A loss that a split of the batch changes is told in the notes of the trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.batch_linearity import linearity_notes
from autoplan.dimensions import program_dimensions
from autoplan.tracer import trace
from benchmarks.equality_draws import program_of

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
    "picked": lambda p, x: p[torch.arange(len(p)), (x[:, 0] > 0).long()].log().mean(),
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


COMPARING: dict[str, Loss] = {
    "pairs": lambda p, x: (p @ p.T).logsumexp(1).mean(),
    "differences": lambda p, x: (p[:, None] - p[None]).square().sum(-1).exp().mean(),
    "softmax": lambda p, x: (p.softmax(0) * x[:, :4]).sum(),
    "next ones": lambda p, x: (p * p[(torch.arange(len(p)) + 1) % len(p)]).sum(-1).exp().mean(),
    "selected ones": lambda p, x: (
        (p * p.index_select(0, torch.arange(len(p) - 1, -1, -1))).sum(-1).exp().mean()
    ),
    "neighbours": lambda p, x: (p * p.roll(1, 0)).sum(-1).exp().mean(),
}


def notes_on(loss: Loss, words: str = "linear in the batch", rows: int = 8) -> list[str]:
    batch = torch.randn(8, 6)
    found = trace(_Router(loss), batch, lambda out: out, microbatch_size=rows).notes
    return [note for note in found if words in note]


@pytest.mark.parametrize("name", LINEAR)
def test_a_mean_over_rows_has_no_note(name: str) -> None:
    assert notes_on(LINEAR[name]) == []


@pytest.mark.parametrize("name", OTHER)
def test_a_loss_of_all_rows_together_has_a_note(name: str) -> None:
    (note,) = notes_on(OTHER[name])
    assert "dp or num_microbatches above 1" in note


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", COMPARING)
def test_a_loss_that_compares_rows_has_a_note_at_any_size(name: str, rows: int) -> None:
    (note,) = notes_on(COMPARING[name], "compares rows of the batch", rows)
    assert "pin dp=1 and num_microbatches=1" in note


@pytest.mark.parametrize("name", [*LINEAR, *OTHER])
def test_a_loss_of_rows_one_by_one_compares_none(name: str) -> None:
    assert notes_on({**LINEAR, **OTHER}[name], "compares rows of the batch") == []


class _Clip(nn.Module):
    """Two encoders, and the loss that matches their rows (Radford et al. 2021, figure 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        images, texts = (F.normalize(x, dim=-1) for x in (self.image(image), self.text(text)))
        logits = self.scale.exp() * images @ texts.T
        target = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@pytest.mark.parametrize("rows", [1, 4])
def test_a_contrastive_model_is_told_before_it_is_trained(rows: int) -> None:
    batch = {"image": torch.randn(4, 6), "text": torch.randn(4, 5)}
    found = trace(_Clip(), batch, lambda out: out, microbatch_size=rows).notes
    assert any("matmul" in note and "compares rows of the batch" in note for note in found)


def test_routed_experts_compare_no_rows() -> None:
    for rows in (1, 2):
        program = program_of("mixtral", rows)
        assert linearity_notes(program, program_dimensions(program)) == ()


@pytest.mark.parametrize("name", [*LINEAR, *OTHER, *COMPARING])
def test_the_note_is_right_about_two_halves_of_the_batch(name: str) -> None:
    torch.manual_seed(3)
    rows = torch.randn(8, 6, dtype=torch.float64)
    rows[:, 0] = rows[:, 0].abs() * torch.tensor([1, -1]).repeat(4)  # as many valid in each half
    model = _Router({**LINEAR, **OTHER, **COMPARING}[name]).double()
    whole, halves = model(rows), (model(rows[:4]) + model(rows[4:])) / 2
    is_equal = torch.allclose(whole, halves, rtol=1e-9)
    assert is_equal == (name in LINEAR)
