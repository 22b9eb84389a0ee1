"""How near the predicted peak memory is to the measured one, for many ways to run a small GPT.

    python benchmarks/predicted_peaks.py

Every row is a plan of `autoplan.estimate` or `autoplan.optimize`, trained for three steps on gloo
processes under a meter of live tensor bytes. The ratio is predicted / measured of the stage's
fullest rank; a reserve is neither planned nor measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoplan
from autoplan.models import LoadedModel
from autoplan.plan import Plan
from autoplan.processes import run_worker
from autoplan.report import table
from autoplan.training import RankResult, train
from autoplan.units import format_bytes
from benchmarks.launched_plans import launch_plans, work_through
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn

__all__ = ["CASES", "PeakCase", "gpt", "make_plan", "stage_peaks"]

STEPS = 3
CONFIG = GPTConfig(vocab_size=512, max_tokens=64, num_layers=4, num_heads=4, width=96)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCase:
    """A way to run the model.

    Attributes:
        name: of the row.
        world_size: processes.
        rows: of the global batch.
        options: of `estimate`, or the pins of `optimize` if `memory` is given.
        memory: Device_Memory in which `optimize` must fit a plan.
    """

    name: str
    rows: int
    world_size: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: str | None = None


def _case(name: str, rows: int, memory: str | None = None, **options: Any) -> PeakCase:
    world_size = options.pop("world_size", 4)
    return PeakCase(name=name, rows=rows, world_size=world_size, options=options, memory=memory)


CASES = (
    _case("ZeRO-0, m=1", 8, zero_stage=0, microbatch_size=2),
    _case("ZeRO-0, m=4", 16, zero_stage=0, microbatch_size=1),
    _case("ZeRO-1, m=1", 8, zero_stage=1, microbatch_size=2),
    _case("ZeRO-1, m=4", 16, zero_stage=1, microbatch_size=1),
    _case("ZeRO-2, m=4", 16, zero_stage=2, microbatch_size=1),
    _case("ZeRO-3, m=1", 8, zero_stage=3, microbatch_size=2),
    _case("ZeRO-3, m=4", 16, zero_stage=3, microbatch_size=1),
    _case("ZeRO-3, recompute all", 16, zero_stage=3, microbatch_size=4, recompute="full"),
    _case("pp 2 x ZeRO-1", 16, dp=2, pp=2, zero_stage=1, microbatch_size=2),
    _case("pp 2 x ZeRO-3", 16, dp=2, pp=2, zero_stage=3, microbatch_size=2),
    _case("pp 4", 8, pp=4, microbatch_size=2),
    _case("pp 4, recompute all", 16, pp=4, microbatch_size=2, recompute="full"),
    _case("pp 2, 2 stages a rank, ZeRO-0", 16, dp=2, pp=2, virtual_stages=2, microbatch_size=2),
    _case("pp 2, 2 stages a rank, ZeRO-1", 16, dp=2, pp=2, virtual_stages=2, zero_stage=1),
    _case("pp 2, 2 stages a rank, ZeRO-2", 16, dp=2, pp=2, virtual_stages=2, zero_stage=2),
    _case("pp 2, 2 stages a rank, ZeRO-3", 16, dp=2, pp=2, virtual_stages=2, zero_stage=3),
    _case(
        "pp 2, 2 stages a rank, recompute all", 16, dp=2, pp=2, virtual_stages=2, recompute="full"
    ),
    _case("pp 4, zero bubble", 8, pp=4, schedule="zero_bubble"),
    _case(
        "pp 2, 2 stages a rank, zero bubble",
        16,
        dp=2,
        pp=2,
        virtual_stages=2,
        microbatch_size=2,
        schedule="zero_bubble",
    ),
    _case("optimized, selective, dp 4", 16, "7.5MiB", dp=4, recompute="selective"),
    _case("optimized, any", 16, "6MiB"),
    _case("tp 2 x dp 2", 8, tp=2, dp=2, microbatch_size=2),
    _case("tp 2 x ZeRO-3", 8, tp=2, dp=2, zero_stage=3, microbatch_size=2),
    _case("tp 2 x ZeRO-3, recompute all", 8, tp=2, dp=2, zero_stage=3, recompute="full"),
    _case("pp 2 x tp 2", 8, tp=2, pp=2, microbatch_size=2),
    _case("tp 4, recompute all", 8, tp=4, microbatch_size=4, recompute="full"),
    _case("dp 2 x tp 2 x pp 2, ZeRO-1", 8, world_size=8, dp=2, tp=2, pp=2, zero_stage=1),
    _case("dp 2 x tp 2 x pp 2, ZeRO-3", 8, world_size=8, dp=2, tp=2, pp=2, zero_stage=3),
)


def gpt(rows: int) -> LoadedModel:
    """Return the model with a batch of `rows` rows."""
    torch.manual_seed(0)
    batch = batch_like(CONFIG, rows, CONFIG.max_tokens)
    return LoadedModel(model=GPT(CONFIG), batch=batch, loss_fn=loss_fn, name="GPT")


def make_plan(case: PeakCase) -> Plan:
    """Return the plan of a case."""
    cluster = autoplan.Cluster.parse(f"{case.world_size}:cpu")
    cluster = cluster.with_memory(case.memory or "4GiB", reserve_bytes=0)
    loaded = gpt(case.rows)
    make: Callable[..., Any] = autoplan.estimate
    options = dict(case.options)
    if case.memory is not None:
        make, options["compare"] = autoplan.optimize, False
    made = make(loaded.model, cluster, loaded.batch, loss_fn=loaded.loss_fn, **options)
    return made if isinstance(made, Plan) else made.plan


def stage_peaks(results: Sequence[RankResult]) -> list[int]:
    """Return per stage the peak of its fullest rank."""
    stages = sorted({result.stage for result in results})
    return [max(r.peak_bytes for r in results if r.stage == s) for s in stages]


def measured(plan: Plan) -> RankResult:
    """Train a plan on this rank; return what was measured."""
    return train(plan, gpt(plan.global_batch_size), STEPS)


def main() -> None:
    """Plan, train, and print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    plans = {case.name: make_plan(case) for case in CASES}
    ranks = launch_plans(__file__, plans, RankResult, timeout_s=600)
    rows = [("plan", "stage", "predicted", "measured", "ratio")]
    ratios = []
    for name, plan in plans.items():
        pairs = zip(plan.predicted.peak_memory_bytes, stage_peaks(ranks[name]), strict=True)
        for stage, (predicted, peak) in enumerate(pairs):
            ratios.append(predicted / peak)
            sizes = (format_bytes(predicted), format_bytes(peak))
            rows.append((name, str(stage), *sizes, f"{ratios[-1]:.3f}"))
    print(table(rows))
    mean = sum(abs(r - 1) for r in ratios) / len(ratios)
    extremes = f"ratio {min(ratios):.3f} to {max(ratios):.3f}"
    print(f"{len(ratios)} stages: {extremes}, mean distance {mean:.1%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(lambda: work_through(Path(sys.argv[2]), measured))
    main()
