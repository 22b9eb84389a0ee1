"""Make the plans of the GPU benchmark, and price them again with a measured profile; needs no GPU.

    python benchmarks/gpu/solve.py                                 # writes plans/*.json
    python benchmarks/gpu/solve.py --results FILE --profile FILE   # prices what was measured again

Each model gets three memory budgets between what full recompute and no recompute need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import autoplan
from autoplan import codec
from autoplan.frontiers import Decision
from autoplan.plan import Plan
from autoplan.plan_prices import PlanPrice, plan_price
from autoplan.planner import make_planner
from autoplan.profiles import load_profile
from autoplan.settings import Setting
from autoplan.training_job import TrainingJob
from benchmarks.gpu.models import MODELS, build
from benchmarks.gpu.run import PLANS, Results, table_of

__all__ = ["BUDGETS", "make_plans", "price_again"]

CLUSTER = "1x1:h200_sxm"
ROWS = {"gpt2_medium": 16, "llama_1b": 8}
MICROBATCHES = 2
# Share of the way from the leanest plan's peak to that of keeping everything.
BUDGETS = {"tight": 0.1, "middle": 0.5, "ample": 1.05}


def make_plans(
    cluster: str = CLUSTER, *, is_tiny: bool = False, models: Sequence[str] = MODELS
) -> dict[str, Plan]:
    """Return the plans by name, `MODEL_BUDGET`; all with the same micro-batches."""
    plans = {}
    for name in models:
        rows = 4 if is_tiny else ROWS[name]
        loaded = build(name, rows, is_tiny=is_tiny, device="meta")
        target = autoplan.Cluster.parse(cluster)
        size = rows // MICROBATCHES
        peaks = {}
        for recompute in ("none", "full"):
            priced = autoplan.estimate(
                loaded.model,
                target,
                loaded.batch,
                loss_fn=loaded.loss_fn,
                microbatch_size=size,
                recompute=recompute,
                name=name,
            )
            peaks[recompute] = max(priced.peak_memory_bytes)
        for budget, share in BUDGETS.items():
            memory = int(peaks["full"] + share * (peaks["none"] - peaks["full"]))
            plans[f"{name}_{budget}"] = autoplan.optimize(
                loaded.model,
                target.with_memory(memory),
                loaded.batch,
                loss_fn=loaded.loss_fn,
                microbatch_size=size,
                compare=False,
                name=name,
            )
    return plans


def price_again(plan: Plan, profile: str, *, is_tiny: bool = False) -> PlanPrice:
    """Return the price of a saved plan of this benchmark under another profile (name or file)."""
    loaded = build(plan.model, plan.global_batch_size, is_tiny=is_tiny, device="meta")
    cluster = autoplan.Cluster.from_device(load_profile(profile))
    planner = make_planner(
        TrainingJob(loaded.model, cluster, loaded.batch, loss_fn=loaded.loss_fn),
        pins={"microbatch_size": plan.microbatch_size},
    )
    setting = Setting(
        dp=1,
        tp=1,
        pp=1,
        zero_stage=plan.zero_stage,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        schedule="none",
    )
    decisions = [
        Decision(axes=plan.placements[b.placements].axes, recompute=plan.recompute[b.recompute])
        for b in plan.stages[0].blocks
    ]
    pricer = planner.pricer(plan.microbatch_size)
    return plan_price(pricer, setting, [len(decisions)], decisions)


def _compare(results: Results, profile: str) -> Mapping[str, float]:
    return {
        row.name: price_again(Plan.load(PLANS / f"{row.name}.json"), profile).step_time_s
        for row in results.rows
    }


def main() -> None:
    """Write the plans, or print results beside predictions from a measured profile."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--results", type=Path, default=None, help="what the GPU run wrote")
    parser.add_argument("--profile", default=None, help="profile that the GPU run measured")
    options = parser.parse_args()
    if (options.results is None) != (options.profile is None):
        parser.error("--results and --profile belong together")
    if options.results is not None:
        results = codec.loads(Results, options.results.read_text())
        print(table_of(results, _compare(results, options.profile)))
        return
    PLANS.mkdir(exist_ok=True)
    for name, plan in make_plans().items():
        plan.save(PLANS / f"{name}.json")
        print(f"{name}: {plan.predicted.step_time_s:.4g} s, written")


if __name__ == "__main__":
    main()
