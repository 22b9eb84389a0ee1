"""What several blocks of a stage hold lives once, from the first that makes it to the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoplan.estimating import estimate
from autoplan.meter import StorageMeter
from autoplan.training import make_optimizer
from tests.models_for_tests import mean_square


class Rectified(nn.Module):
    """Ends in a ReLU, which keeps its own result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.relu(self.linear(x))
        return result


class Reread(nn.Module):
    """Every block reads one value again, as the blocks of a decoder read the encoder's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(_Product(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.first(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


class _Product(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.linear(x) * memory
        return result


class Tied(nn.Module):
    """The head's weight is the embedding's, and larger than everything else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Rectified(width) for _ in range(4))
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x[:, -1])
        return result


def measured_peak(plan: Any, model: nn.Module, batch: torch.Tensor) -> int:
    module = plan.parallelize(model, batch, mean_square, device="cpu")
    optimizer = make_optimizer(plan.optimizer, module.parameters())
    with StorageMeter() as meter:
        meter.baseline(module, optimizer)
        for _ in range(2):
            module.train_step(batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return meter.peak_bytes


def _rank(rank: int, kind: str, recompute: str, num_microbatches: int = 1) -> tuple[int, int]:
    torch.manual_seed(0)
    width, batch = 16, torch.randn(512, 16)
    model: nn.Module = nn.Sequential(*(Rectified(width) for _ in range(6)))
    if kind != "rectified":
        model = Reread(width) if kind == "reread" else Tied(width)
    if kind == "tied":
        batch = torch.randint(512, (8, 32))
    plan = estimate(
        model,
        "1:cpu",
        batch,
        loss_fn=mean_square,
        microbatch_size=len(batch) // num_microbatches,
        recompute=recompute,
    ).plan
    reserve = plan.predicted.memory_by_category[0]["reserve"]
    predicted = plan.predicted.peak_memory_bytes[0] - reserve
    return predicted, measured_peak(plan, model, batch)


@pytest.mark.parametrize("kind", ["rectified", "reread"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_value_that_several_blocks_keep_counts_once(kind: str, recompute: str) -> None:
    from tests.distributed import run_workers

    ((predicted, measured),) = run_workers(_rank, 1, kind, recompute)
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_gradient_of_a_tied_weight_lives_from_the_head_on(num_microbatches: int) -> None:
    from tests.distributed import run_workers

    ((predicted, measured),) = run_workers(_rank, 1, "tied", "none", num_microbatches)
    assert predicted == pytest.approx(measured, rel=0.04)
