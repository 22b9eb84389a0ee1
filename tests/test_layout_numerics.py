"""Layouts are run in one process and held against the whole block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoplan
from autoplan import layout_numerics, sharded_ops
from autoplan.dry_run_result import LayoutNumerics
from autoplan.layout_numerics import check_layout_numerics
from autoplan.plan import Plan
from autoplan.sharding import shard_options
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.layouts import megatron_axes, random_axes
from tests.models import blocks_of
from tests.numerics import program_of


@pytest.mark.parametrize("name", ["llama_one_kv_head", "gpt2", "gpt_plain_attention"])
def test_random_layouts_compute_what_the_block_does(name: str) -> None:
    for graph in blocks_of(name).values():
        options = shard_options(graph)
        for seed in range(3):
            error, reason, is_wrong = check_layout_numerics(
                graph, random_axes(graph, options, 2, seed), 2
            )
            assert not is_wrong, (graph.name, seed, reason)
            assert error is not None
            assert error < 1e-12, reason


def test_dropout_is_off_while_a_layout_is_checked() -> None:
    graph = next(g for g in program_of("gpt_dropout").graphs if not g.is_glue)
    error, reason, _ = check_layout_numerics(graph, megatron_axes(graph, shard_options(graph)), 2)
    assert error is not None
    assert error < 1e-12, reason


def test_a_wrong_local_form_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = next(g for g in program_of("gpt").graphs if not g.is_glue)
    axes = megatron_axes(graph, shard_options(graph))

    def every_rank_adds(self: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(sharded_ops.RowLinear, "__call__", every_rank_adds)
    error, reason, is_wrong = check_layout_numerics(graph, axes, 2)
    assert is_wrong
    assert error is not None
    assert error > 1e-3
    assert "differs" in reason


def test_a_layout_that_cannot_run_is_wrong_and_a_large_block_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = next(g for g in program_of("gpt").graphs if not g.is_glue)
    axes = megatron_axes(graph, shard_options(graph))
    _, reason, is_wrong = check_layout_numerics(graph, axes, 3)
    assert is_wrong
    assert "allowed degrees are" in reason
    monkeypatch.setattr(layout_numerics, "_MOST_ELEMENTS", 10)
    error, reason, is_wrong = check_layout_numerics(graph, axes, 2)
    assert (error, is_wrong) == (None, False)
    assert "elements" in reason


def test_a_wrong_layout_sends_the_search_to_other_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    def blame(plan: Plan, program: Any) -> tuple[LayoutNumerics, ...]:
        layout = next(name for name, one in plan.placements.items() if one.axes)
        wrong = LayoutNumerics(
            block="block0", layout=layout, degree=2, error=1.0, reason="x differs", is_wrong=True
        )
        return (wrong,)

    # Wide enough that slices are worth their collectives.
    config = GPTConfig(vocab_size=64, num_layers=2, width=512, num_heads=4)
    arguments: dict[str, Any] = {"loss_fn": loss_fn, "pp": 1, "within": {"dp": (1, 1)}}
    batch = batch_like(config, 2, 64)
    monkeypatch.setattr(layout_numerics, "check_plan_layouts", lambda plan, program: ())
    first = autoplan.optimize(GPT(config), "2:cpu", batch, compare=False, **arguments)
    assert first.mesh.tp == 2
    monkeypatch.setattr(layout_numerics, "check_plan_layouts", blame)
    with pytest.raises(autoplan.PlanError, match=r"tp=2 cannot be used: .*x differs"):
        autoplan.optimize(GPT(config), "2:cpu", batch, compare=False, tp=2, **arguments)
    del arguments["within"]
    plan = autoplan.optimize(GPT(config), "2:cpu", batch, compare=False, **arguments)
    assert (plan.mesh.dp, plan.mesh.tp) == (2, 1)
