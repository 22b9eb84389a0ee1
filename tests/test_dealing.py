"""Plans of several stages a rank that are decided stage by stage, against every plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoplan.answer_prices import answer_step_s, rank_excess
from autoplan.cluster import Cluster
from autoplan.dealing import dealt_plan, instants
from autoplan.interleaving import stage_ends
from autoplan.plan_prices import plan_price
from autoplan.planner import Planner, make_planner
from autoplan.search.problem import PipelineSolution
from autoplan.setting_problem import SettingProblem, pipeline_problem, variants
from autoplan.settings import Setting
from autoplan.training_job import TrainingJob
from autoplan.units import to_ticks
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn

_MOST_LOST = 1.005  # what counts as proven all the same


def posed(memory: str) -> tuple[Planner, Setting, SettingProblem]:
    """Return a problem of two ranks of two stages, each of one block of three ways."""
    sizes: dict[str, Any] = {"vocab_size": 4096, "max_tokens": 1024, "width": 2048}
    config = GPTConfig(num_layers=4, num_heads=16, is_head_tied=False, **sizes)
    with torch.device("meta"):
        model = GPT(config)
    cluster = Cluster.parse("1x2:h100_sxm_80gb").with_memory(memory, reserve_bytes=0)
    pins = {"pp": 2, "tp": 1, "virtual_stages": 2, "microbatch_size": 2, "schedule": "interleaved"}
    batch = batch_like(config, 16, 1024)
    planner = make_planner(
        TrainingJob(model, cluster, batch, loss_fn=loss_fn), pins=pins, workers=1
    )
    (setting,) = planner.settings()
    pricer = planner.pricer(setting.microbatch_size)
    convention, is_lean = variants(pricer, setting)[0]
    asked = pipeline_problem(planner, setting, convention, is_lean=is_lean)
    places = [sorted({0, len(own) // 2, len(own) - 1}) for own in asked.options]
    return (
        planner,
        setting,
        replace(
            asked,
            options=[
                tuple(o[i] for i in own) for o, own in zip(asked.options, places, strict=True)
            ],
            per_call=[
                tuple(d[i] for i in own) for d, own in zip(asked.per_call, places, strict=True)
            ],
        ),
    )


def every_step(planner: Planner, setting: Setting, asked: SettingProblem) -> list[float]:
    """Return the seconds of a step of every plan that fits."""
    ends = stage_ends(planner.alike_run(setting.microbatch_size), asked.counts)
    found = []
    for options in itertools.product(*(range(len(own)) for own in asked.options)):
        answer = PipelineSolution(
            status="feasible", ends=ends, options=options, objective=0, bound=0
        )
        if all(rank_excess(planner, setting, asked, answer, r) <= 0 for r in range(setting.pp)):
            found.append(answer_step_s(planner, setting, asked, answer))
    return found


@pytest.mark.parametrize("memory", ["80GB", "3.9GB", "3.5GB", "3.2GB", "3GB"])
def test_stages_decided_one_by_one_are_as_fast_as_any_plan_and_bounded(memory: str) -> None:
    planner, setting, asked = posed(memory)
    steps = every_step(planner, setting, asked)
    found = dealt_plan(planner, setting, asked, None)
    if not steps:
        assert found.best is None
        return
    assert found.bound <= to_ticks(min(steps)) * (1 + 1e-6)  # ticks of options are rounded up
    assert found.best is not None
    step_s, answer = found.best
    assert step_s <= min(steps) * _MOST_LOST
    price = plan_price(planner.pricer(2), setting, answer.ends, asked.chosen(answer.options))
    assert price.step_time_s == step_s
    assert price.peak_memory_bytes <= planner.cluster.total_bytes
    below = dealt_plan(planner, setting, asked, to_ticks(min(steps) * 0.99))
    assert below.best is None or below.best[0] >= min(steps)


def test_instants_keep_what_no_other_instant_of_the_stage_exceeds() -> None:
    _, setting, _ = posed("80GB")
    for rank in range(setting.pp):
        own = instants(setting, rank)
        assert {part for part, _ in own} == set(range(setting.virtual_stages))
        most = max(sum(alive) for _, alive in own)
        assert most == setting.alive()[rank] * setting.virtual_stages
        for one, other in itertools.permutations(own, 2):
            beaten = all(a <= b for a, b in zip(one[1], other[1], strict=True))
            assert one[0] != other[0] or not beaten
