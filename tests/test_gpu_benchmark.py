"""The GPU benchmark on tiny models: planned, run on the CPU by the same code, and priced again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan import codec
from autoplan.plan import Plan
from benchmarks.gpu import run, solve
from benchmarks.gpu.models import MODELS, build
from tests.distributed import run_workers

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tiny_plans() -> dict[str, Plan]:
    return solve.make_plans("1x1:cpu", is_tiny=True, models=["llama_1b"])


def test_a_model_gets_three_budgets_and_less_memory_costs_time(
    tiny_plans: dict[str, Plan],
) -> None:
    assert list(tiny_plans) == [f"llama_1b_{budget}" for budget in solve.BUDGETS]
    by_budget = [plan.predicted for plan in tiny_plans.values()]
    peaks = [max(predicted.peak_memory_bytes) for predicted in by_budget]
    times = [predicted.step_time_s for predicted in by_budget]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)


def _measured(rank: int, plans: dict[str, Plan]) -> Any:
    return run.run_all(plans, torch.device("cpu"), is_tiny=True, until=float("inf"))


def test_tiny_plans_run_on_the_cpu_and_peak_as_predicted(tiny_plans: dict[str, Plan]) -> None:
    names = ("llama_1b_tight", "llama_1b_middle")
    plans = {name: tiny_plans[name] for name in names}
    ((rows, left_out),) = run_workers(_measured, 1, plans)
    assert left_out == ()
    for row in rows:
        assert row.measured_s > 0
        assert row.predicted_bytes == pytest.approx(row.measured_bytes, rel=0.03)
    results = run.Results(device="cpu", torch_version=torch.__version__, date="today", rows=rows)
    assert codec.loads(run.Results, codec.dumps(results)) == results
    assert all(name in run.table_of(results, dict.fromkeys(names, 1.0)) for name in names)


def test_what_there_is_no_time_for_is_named(tiny_plans: dict[str, Plan]) -> None:
    rows, left_out = run.run_all(tiny_plans, torch.device("cpu"), is_tiny=True, until=0.0)
    assert rows == ()
    assert [text.split(":")[0] for text in left_out] == list(tiny_plans)


def test_pricing_again_with_the_same_profile_gives_the_prediction(
    tiny_plans: dict[str, Plan],
) -> None:
    plan = tiny_plans["llama_1b_tight"]
    price = solve.price_again(plan, "cpu", is_tiny=True)
    assert price.step_time_s == pytest.approx(plan.predicted.step_time_s)
    assert tuple(m.peak for m in price.memory) == plan.predicted.peak_memory_bytes


def test_stored_plans_are_of_the_models_as_they_are_built() -> None:
    stored = {path.stem: Plan.load(path) for path in run.PLANS.glob("*.json")}
    assert set(stored) == {f"{name}_{budget}" for name in MODELS for budget in solve.BUDGETS}
    for plan in stored.values():
        names = {name for name, _ in build_on_meta(plan.model).named_parameters()}
        planned = {
            fqn.split(".")[0] for s in plan.stages for b in s.blocks for fqn in [b.fqn] if fqn
        }
        assert planned <= {name.split(".")[0] for name in names}
        assert plan.costs is not None


def build_on_meta(name: str) -> torch.nn.Module:
    return build(name, 1, device="meta").model


def test_without_a_gpu_the_script_says_so_and_needs_no_solver(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from benchmarks.gpu import run\n"
        "assert 'ortools' not in sys.modules\n"
        "import torch\n"
        "torch.cuda.is_available = lambda: False\n"
        f"sys.argv = ['run', '--out', {str(tmp_path / 'out')!r}]\n"
        "run.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "no GPU here" in done.stderr
    assert not (tmp_path / "out").exists()
