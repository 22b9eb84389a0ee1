"""Numbers of the trace on models after faults that users of other planners reported.

Each expected value was worked out by hand or measured on a real run, independent of the trace.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capturer import capture
from autoplan.tracer import trace, trace_program
from tests.kept_bytes import kept_by_autograd, kept_by_block, kept_by_trace
from tests.models_for_tests import mean_square
from tests.numerics import compare
from tests.programs import gradients_of, run_program


def test_states_of_adam_are_sixteen_bytes_a_parameter() -> None:
    """Source: pytorch/pytorch#9439; 12 square layers of 1024 without bias."""
    with torch.device("meta"):
        layers = [x for _ in range(12) for x in (nn.Linear(1024, 1024, bias=False), nn.ReLU())]
        model = nn.Sequential(*layers)
    result = trace(model, torch.empty(16, 1024, device="meta"), mean_square)
    assert result.num_parameters == result.num_trained == 12_582_912
    assert 4 * result.num_parameters + 12 * result.num_trained == 201_326_592


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(192), nn.Linear(192, 768), nn.Linear(768, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward() for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_kept_bytes_of_a_tower_with_and_without_recompute_are_those_measured() -> None:
    """Source: pytorch/pytorch#82001; 2048 rows through 24 residual blocks."""
    with torch.device("meta"):
        model = Tower()
    result = trace(model, torch.empty(2048, 192, device="meta"), mean_square)
    assert result.num_parameters == 7_110_144
    assert sum(kept_by_trace(result)) == 379_453_440
    sizes = [result.blocks[call.block].inputs[0].nbytes for call in result.calls if call.fqn]
    assert sum(sizes) + sum(kept_by_block(result.blocks[-1])) == 39_321_600


class Adapted(nn.Module):
    """A frozen layer with a trained adapter of rank 8."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(768, 768, bias=False).requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(8, 768))
        self.widen = nn.Parameter(torch.randn(768, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + (x @ self.narrow.T) @ self.widen.T
        return out


class AdaptedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_frozen_weights_have_neither_gradient_nor_moments() -> None:
    """Source: pytorch/pytorch#104690."""
    model, x = AdaptedNet(), torch.randn(32, 768)
    result = trace(model, x, mean_square)
    assert (result.num_parameters, result.num_trained) == (3_612_672, 73_728)
    assert 4 * result.num_parameters + 12 * result.num_trained == 15_335_424
    assert kept_by_trace(result) == kept_by_autograd(model, lambda: mean_square(model(x)))
    for block in result.blocks:
        trained = {state.fqn: state.is_trained for state in block.states}
        assert trained in ({}, {"base.weight": False, "narrow": True, "widen": True})


class Shared(nn.Module):
    """One residual block of width 32 applied four times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(32, 32)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = x + self.down(torch.relu(self.up(self.norm(x))))
        out: torch.Tensor = self.head(x)
        return out


def test_layers_applied_four_times_count_once_and_gather_four_gradients() -> None:
    """Source: pytorch/torchtitan#2817; here without a module around the four layers."""

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return (output - 1).square().mean()

    model, x = Shared(), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    program = capture(model, x, loss_fn)
    result = trace_program(program, model_name="Shared")
    assert result.num_parameters == 9_571
    assert kept_by_trace(result) == kept_by_autograd(model, lambda: loss_fn(model(x)))
    loss = loss_fn(model(x))
    got, found = run_program(program, model, [x])
    torch.testing.assert_close(got, torch.tensor(1.48580873))
    assert compare(found, gradients_of(loss, model)) == []
    assert abs(float(found["up.weight"].norm()) - 3.25646877) < 1e-5


class Experts(nn.Module):
    """Every expert runs on every token; two of four are weighed in. Also gives a balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, 16, 24) / 16**0.5)
        self.w2 = nn.Parameter(torch.randn(4, 24, 16) / 24**0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chances = self.router(x).softmax(-1)
        best, places = chances.topk(2, -1)
        weights = best / best.sum(-1, keepdim=True)
        gate = torch.zeros_like(chances).scatter(-1, places, weights)
        hidden = torch.relu(torch.einsum("td,edh->teh", x, self.w1))
        y = torch.einsum("te,ted->td", gate, torch.einsum("teh,ehd->ted", hidden, self.w2))
        used = torch.zeros_like(chances).scatter(-1, places, 1.0)
        return x + y, 4 * (used.mean(0) * chances.mean(0)).sum()


class ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros(())
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.head(x), total


def balanced_loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output[0], torch.arange(24) % 5) + 0.1 * output[1]


def test_the_balance_loss_of_every_expert_layer_is_in_the_graph_and_crosses_the_cuts() -> None:
    """Source: NVIDIA-NeMo/Automodel#2635."""
    model, x = ExpertNet(), torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    program = capture(model, x, balanced_loss)
    result = trace_program(program, model_name="ExpertNet")
    assert result.num_parameters == 6_357
    assert [call.fqn for call in result.calls] == ["layers.0", "layers.1", ""]
    assert result.crossing_bytes == (24 * 16 * 4 + 4, 24 * 16 * 4 + 8)
    assert kept_by_trace(result) == kept_by_autograd(model, lambda: balanced_loss(model(x)))
    loss = balanced_loss(model(x))
    got, found = run_program(program, model, [x])
    torch.testing.assert_close(got, torch.tensor(2.45110846))
    assert compare(found, gradients_of(loss, model)) == []
    assert all(float(found[f"layers.{i}.router.weight"].norm()) > 0 for i in range(2))
