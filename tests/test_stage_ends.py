"""Stages have parameters: the search, estimates and simple strategies never leave one without."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.cluster import Cluster
from autoplan.estimating import estimate
from autoplan.optimizing import find_plan
from autoplan.planner import Planner, make_planner
from autoplan.stage_ends import even_ends, even_stage_ends, holders, is_runnable
from autoplan.training_job import TrainingJob
from autoplan.verifier import verify_plan


class Mixer(nn.Module):
    """Attention of a sequence to itself: much work, no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.softmax(x @ x.transpose(1, 2), -1) @ x


class Tempting(nn.Module):
    """Two layers with parameters and then all the work: even stages leave the last without any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.mixers = nn.ModuleList(Mixer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.layers, *self.mixers):
            x = module(x)
        return x


def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output.square().mean()


BATCH = {"x": torch.zeros(4, 256, 16)}
CLUSTER = Cluster.parse("2:cpu")


@functools.cache
def planner(**pins: int) -> Planner:
    return make_planner(TrainingJob(Tempting(), CLUSTER, BATCH, loss_fn=loss_fn), pins=pins)


def test_the_search_leaves_no_stage_without_parameters() -> None:
    asked = planner(pp=2, microbatch_size=1)
    trace = asked.smallest_trace()
    assert not is_runnable(trace, even_ends(len(trace.calls), 2))
    plan = find_plan(asked, 60.0)
    assert plan.mesh.pp == 2
    ends = [stage.blocks[-1].call + 1 for stage in plan.stages]
    assert is_runnable(trace, ends)
    assert verify_plan(plan, trace, CLUSTER) == ()


def test_even_stages_have_parameters() -> None:
    trace = planner(pp=2, microbatch_size=1).smallest_trace()
    ends = even_stage_ends(trace, 2)
    assert is_runnable(trace, ends)
    assert ends[-1] == len(trace.calls)


def test_more_stages_than_blocks_with_parameters_are_no_setting() -> None:
    cluster = Cluster.parse("4:cpu")
    asked = make_planner(
        TrainingJob(Tempting(), cluster, BATCH, loss_fn=loss_fn), pins={"microbatch_size": 1}
    )
    count = sum(holders(asked.smallest_trace()))
    assert count == 2
    assert {setting.pp for setting in asked.settings()} == {1, 2}


def test_an_estimate_of_a_stage_without_parameters_is_no_plan() -> None:
    options: dict[str, Any] = {"loss_fn": loss_fn, "pp": 2, "dp": 1}
    whole = len(planner(pp=2, microbatch_size=1).smallest_trace().calls)
    priced = estimate(Tempting(), CLUSTER, BATCH, stage_ends=(whole - 2, whole), **options)
    with pytest.raises(autoplan.PlanError, match="a block with parameters"):
        _ = priced.plan
    assert estimate(Tempting(), CLUSTER, BATCH, **options).plan.mesh.pp == 2


def test_the_verifier_names_a_stage_without_parameters() -> None:
    asked = planner(pp=2, microbatch_size=1)
    plan = find_plan(asked, 60.0)
    first, last = plan.stages
    blocks = (*first.blocks, *last.blocks)
    stages = (replace(first, blocks=blocks[:-2]), replace(last, blocks=blocks[-2:]))
    found = verify_plan(replace(plan, stages=stages), asked.smallest_trace(), CLUSTER)
    assert "V13: stage 1 has no parameters" in map(str, found)
