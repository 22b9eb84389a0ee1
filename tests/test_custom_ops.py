"""Unknown operators are priced by a stated rule, named in the notes, and can be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan import custom_ops
from autoplan.graph import OpTrace, Trace
from autoplan.tracer import trace
from tests.kept_bytes import kept_by_autograd, kept_by_trace
from tests.models_for_tests import mean_square


@torch.library.custom_op("autoplan_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@scaled.register_fake
def _scaled_fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, gradient: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return gradient * weight, (gradient * x).sum(0)


scaled.register_autograd(_gradient, setup_context=_keep)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.autoplan_tests.scaled(self.inner(x), self.weight)
        return out


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_ops, "_registered", {})


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Scaled() for _ in range(2))), torch.randn(4, 8)


def own_op(result: Trace) -> OpTrace:
    return next(op for op in result.blocks[0].ops if "scaled" in op.target)


def test_an_unknown_operator_is_priced_by_its_bytes_and_named(registry: None) -> None:
    model, x = model_and_batch()
    result = trace(model, x, mean_square)
    op = own_op(result)
    assert (op.kind, op.forward_flops) == ("opaque", 0)
    assert op.forward_bytes == (2 * 4 * 8 + 8) * 4
    assert any("autoplan_tests.scaled.default: no law" in note for note in result.notes)
    assert [option.axis for option in op.options] == ["whole"]


def test_kept_bytes_of_an_unknown_operator_are_those_of_its_own_formula(registry: None) -> None:
    model, x = model_and_batch()
    real = kept_by_autograd(model, lambda: mean_square(model(x)))
    assert kept_by_trace(trace(model, x, mean_square)) == real


def test_a_registered_operator_has_what_was_told(registry: None) -> None:
    @autoplan.register_op(
        "autoplan_tests::scaled",
        backward_flops=lambda x, weight: 3 * x.numel(),
        saved=lambda x, weight, result: [result, 100],
        shardings=[(("S(0)", "R*"), "S(0)"), (("S(1)", "S(0)"), "S(1)")],
    )
    def flops(x: torch.Tensor, weight: torch.Tensor) -> int:
        return x.numel()

    model, x = model_and_batch()
    result = trace(model, x, mean_square)
    op = own_op(result)
    assert (op.forward_flops, op.backward_flops) == (4 * 8, 3 * 4 * 8)
    assert [(saved.value, saved.nbytes) for saved in op.saved] == [(op.name, 4 * 8 * 4), ("", 100)]
    assert [(o.axis, o.size, o.output) for o in op.options[1:]] == [
        ("told0", 4, "S(0)"),
        ("told1", 8, "S(1)"),
    ]
    assert not any("no law" in note for note in result.notes)


def test_a_backward_that_is_not_told_is_twice_the_forward(registry: None) -> None:
    autoplan.register_op("autoplan_tests::scaled")(lambda x, weight: 7)
    model, x = model_and_batch()
    op = own_op(trace(model, x, mean_square))
    assert (op.forward_flops, op.backward_flops) == (7, 14)


def test_malformed_registrations_are_errors() -> None:
    with pytest.raises(ValueError, match="write namespace::name"):
        autoplan.register_op("scaled")
    with pytest.raises(ValueError, match="is no placement"):
        autoplan.register_op("mylib::scaled", shardings=[(("T(0)",), "R")])
