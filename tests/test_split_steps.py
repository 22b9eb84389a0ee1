"""Steps whose backwards are split: a closed form where stages are even, brute force elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.schedules import schedule_actions
from autoplan.settings import Setting
from autoplan.split_steps import list_times, saved_by_block, steps_with_split
from autoplan.step_costs import pipeline_step_s
from tests.costs_for_tests import brute_force_step

LAWS = settings(deadline=None, derandomize=True, max_examples=60)

Stages = list[tuple[int, int, int]]
"""Forward, backward to the inputs, backward to the parameters, of each stage."""


def setting_of(pp: int, m: int, v: int) -> Setting:
    return Setting(
        dp=1,
        tp=1,
        pp=pp,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=m,
        schedule="zero_bubble",
        virtual_stages=v,
    )


def step(setting: Setting, stages: Stages) -> float:
    """Return the ticks of a step of stages, each a block."""
    parts = np.array(stages, dtype=np.float64)
    times = parts.sum(axis=1)
    ranks = [float(times[rank :: setting.pp].sum()) for rank in range(setting.pp)]
    by_stage = times.tolist() if setting.virtual_stages > 1 else ()
    whole = pipeline_step_s(ranks, setting, by_stage)
    saved = sum(saved_by_block(*stage) for stage in stages)
    forward, inputs, weights = parts.T
    return float(steps_with_split(whole, setting, forward, inputs, weights, saved))


@st.composite
def pipelines(draw: st.DrawFn, *, is_even: bool, most: int = 3) -> tuple[Setting, Stages]:
    """Draw stages, at most `most` a rank."""
    pp, v = draw(st.integers(1, 4)), draw(st.integers(1, most))
    m = pp * draw(st.integers(1, 3))
    stage = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
    count = pp * v
    stages = [draw(stage)] * count if is_even else [draw(stage) for _ in range(count)]
    return setting_of(pp, m, v), stages


@LAWS
@given(pipelines(is_even=True))
def test_even_stages_take_the_closed_form(case: tuple[Setting, Stages]) -> None:
    setting, stages = case
    f, b, w = stages[0]
    m, v, pp = setting.num_microbatches, setting.virtual_stages, setting.pp
    expected = m * v * (f + b + w) + (pp - 1) * max(f, b, f + b - w)
    assert step(setting, stages) == pytest.approx(expected)


@LAWS
@given(pipelines(is_even=False), st.sampled_from(["zero_bubble", "interleaved"]))
def test_lists_take_what_a_simulation_tick_by_tick_takes(
    case: tuple[Setting, Stages], name: str
) -> None:
    setting, stages = case
    stages = [(f + 1, b + 1, w + 1) for f, b, w in stages]
    pp, m, v = setting.pp, setting.num_microbatches, setting.virtual_stages
    ticks: dict[tuple[int, str], int] = {}
    for stage, (f, b, w) in enumerate(stages):
        ticks |= {(stage, "F"): f, (stage, "I"): b, (stage, "W"): w, (stage, "B"): b + w}
    expected = brute_force_step(schedule_actions(name, pp, m, v), ticks, 0, overlaps=True)
    found = list_times(name, pp, m, v, *np.array(stages, dtype=np.float64).T)
    assert float(found) == expected


@LAWS
@given(pipelines(is_even=False, most=1))
def test_a_step_of_one_stage_a_rank_is_no_shorter_than_its_lists(
    case: tuple[Setting, Stages],
) -> None:
    setting, stages = case
    pp, m = setting.pp, setting.num_microbatches
    lists = list_times("zero_bubble", pp, m, 1, *np.array(stages, dtype=np.float64).T)
    assert step(setting, stages) >= float(lists) * (1 - 1e-12)


def test_several_pipelines_at_once_take_what_each_takes() -> None:
    setting = setting_of(3, 6, 1)
    drawn = np.random.default_rng(0).integers(1, 9, size=(5, 3, 3))
    parts = drawn.astype(np.float64)
    steps = parts.sum(axis=2).max(axis=1)
    saved = np.arange(5.0)
    f, b, w = np.moveaxis(parts, 2, 0)
    both = steps_with_split(steps, setting, f, b, w, saved)
    each = [
        float(steps_with_split(steps[i], setting, f[i], b[i], w[i], saved[i]))
        for i in range(len(parts))
    ]
    assert both.tolist() == each


def test_more_rounds_only_add_the_pace_of_the_slowest_rank() -> None:
    stages = [(2, 3, 1), (3, 3, 2), (2, 4, 2), (4, 4, 3)]
    short, long = (step(setting_of(4, m, 1), stages) for m in (16, 64))
    assert long - short == pytest.approx(48 * 11)
