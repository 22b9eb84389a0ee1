"""The timeline of a plan: the plan's own peaks, what it saves, what the report and a trace show."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import autoplan
from autoplan.cluster import Cluster
from autoplan.errors import PlanError
from autoplan.estimating import estimate
from autoplan.plan import Plan
from examples.gpt import GPT, GPTConfig, batch_like
from examples.gpt import loss_fn as gpt_loss
from tests.models_for_tests import LinearChain, mean_square
from tests.strategies import plans

CPU = Cluster.parse("1x4:cpu").with_memory("1GiB", reserve_bytes=0)
GPU = Cluster.parse("1x4:a100_sxm_80gb")
BATCH = torch.randn(16, 16)


def priced(cluster: Cluster = CPU, **options: Any) -> Plan:
    model = LinearChain(width=16, depth=6)
    return estimate(model, cluster, BATCH, loss_fn=mean_square, **options).plan


@given(plans())
@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_memory_of_the_timeline_peaks_where_the_plan_says(plan: Plan) -> None:
    found = plan.timeline()
    assert found.peak_bytes() == plan.predicted.peak_memory_bytes
    for curve in found.memory:
        assert all(a[0] < b[0] for a, b in itertools.pairwise(curve))
        assert curve[-1][0] <= found.step_time_s


@given(plans())
@settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_saved_plan_has_the_timeline_of_the_plan(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()).timeline() == plan.timeline()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_without_pipeline_and_overlap_the_step_is_what_the_search_adds_up(
    zero: int, m: int, is_tied: bool
) -> None:
    config = GPTConfig(
        vocab_size=64, max_tokens=8, num_layers=2, num_heads=2, width=16, is_head_tied=is_tied
    )
    batch = batch_like(config, 16, 8)
    options: dict[str, Any] = {"zero_stage": zero, "microbatch_size": 4 // m}
    plan = estimate(GPT(config), CPU, batch, loss_fn=gpt_loss, **options).plan
    found = plan.timeline()
    assert found.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-12)
    gathers = [i.name for i in found.intervals if i.kind == "gather"]
    assert gathers.count("all-gather root") == (0, 1, 1, m)[zero]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("is_tied", [False, True])
def test_gradients_of_a_tied_weight_are_summed_over_stages_once_a_step(
    zero: int, is_tied: bool
) -> None:
    config = GPTConfig(
        vocab_size=64, max_tokens=8, num_layers=2, num_heads=2, width=16, is_head_tied=is_tied
    )
    options: dict[str, Any] = {"pp": 2, "dp": 2, "zero_stage": zero, "microbatch_size": 4}
    batch = batch_like(config, 16, 8)
    plan = estimate(GPT(config), CPU, batch, loss_fn=gpt_loss, **options).plan
    ties = [i for i in plan.timeline().intervals if i.kind == "ties"]
    assert [i.rank for i in ties] == ([0, 1] if is_tied else [])
    held = 64 * 16 * 4 // (2 if zero else 1)
    seconds = CPU.link_for(2, 2).collective_time_s("all_reduce", held, 2)
    assert all(i.end_s - i.start_s == pytest.approx(seconds) for i in ties)


@pytest.mark.parametrize("cluster", [CPU, GPU], ids=str)
@pytest.mark.parametrize("options", [{"dp": 4, "zero_stage": 3}, {"pp": 4}, {"dp": 2, "tp": 2}])
def test_faster_links_never_slow_the_simulated_step(cluster: Cluster, options: Any) -> None:
    faster = replace(cluster, intra=cluster.intra.scaled(bandwidth=2.0))
    slow = priced(cluster, **options).timeline().step_time_s
    assert priced(faster, **options).timeline().step_time_s <= slow


def test_another_schedule_over_the_same_stages_is_a_what_if() -> None:
    plan = priced(pp=4, microbatch_size=2)
    own, gpipe = plan.timeline(), autoplan.simulate(plan, schedule="gpipe")
    assert own == autoplan.simulate(plan, schedule="1f1b")
    assert own.peak_bytes()[0] < gpipe.peak_bytes()[0]
    bubble = autoplan.simulate(plan, schedule="zero_bubble").mean_parts()["bubble"]
    assert bubble < own.mean_parts()["bubble"]


def test_the_report_shows_the_simulated_step_by_part() -> None:
    plan = priced(pp=4)
    text = plan.report()
    assert str(plan) == text
    line = repr(plan)
    assert "\n" not in line
    assert str(plan.mesh) in line
    assert plan.search.status in line
    assert "Simulated step, a prediction: " in text
    for part in ("compute", "exposed pipeline communication", "optimizer", "bubble"):
        assert f"\n  {part}" in text
    without = replace(plan, costs=None).report()
    assert "Simulated" not in without
    assert "Time of a step by category" in without


def test_a_plan_without_costs_says_how_to_get_them() -> None:
    with pytest.raises(PlanError, match=r"carries no costs .* autoplan.estimate"):
        replace(priced(), costs=None).timeline()


def test_explain_writes_a_chrome_trace_of_the_whole_step(tmp_path: Path) -> None:
    plan = priced(pp=4)
    plan.save(tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, "-m", "autoplan.cli", "explain", "plan.json", "--timeline", "out.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "predicted timeline written to out.json" in done.stdout
    trace = json.loads((tmp_path / "out.json").read_text())
    assert "prediction" in trace["otherData"]["kind"]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    step_us = plan.timeline().step_time_s * 1e6
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(step_us)
    forwards = [e for e in events if e["cat"] == "forward" and e["pid"] == 0]
    blocks = len(plan.stages[0].blocks)
    assert len(forwards) <= plan.num_microbatches * blocks
    assert {e["pid"] for e in events} == {0, 1, 2, 3}
    assert any(e["ph"] == "C" for e in trace["traceEvents"])


def test_simulating_needs_neither_torch_nor_the_solver(tmp_path: Path) -> None:
    priced(pp=2).save(tmp_path / "plan.json")
    program = (
        "import sys, autoplan\n"
        "plan = autoplan.Plan.load('plan.json')\n"
        "assert plan.timeline().step_time_s > 0\n"
        "plan.report()\n"
        "assert not {'torch', 'ortools'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
