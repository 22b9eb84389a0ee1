"""Plans in which blocks of a stage hand over in another way for a while equal the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.cluster import Cluster
from autoplan.frontiers import Decision
from autoplan.plan import Plan
from autoplan.planner import Planner
from autoplan.settings import Setting
from autoplan.stage_ends import even_ends
from autoplan.tensor_layout import Border, Borders
from autoplan.verifier import verify_plan
from tests.distributed import run_workers
from tests.end_to_end.planning import decided_plan, planner_of
from tests.numerics import GRADIENT_TOLERANCE, check_plans, program_of

TP = Setting(dp=1, tp=2, pp=1, zero_stage=0, microbatch_size=1, num_microbatches=2, schedule="none")
PIPELINE = replace(TP, pp=2, schedule="1f1b")
WAYS: tuple[tuple[Border, Border], ...] = (
    ("whole", "tokens"),
    ("whole", "features"),
    ("tokens", "whole"),
    ("tokens", "features"),
)


def detour_plan(
    planner: Planner, setting: Setting, base: Border, way: Border, share: float
) -> Plan:
    """Return a plan whose row of alike blocks leaves a way at once, and comes back at its end.

    Args:
        planner, setting: of the plan; a stage of less than two blocks of the row makes no detour.
        base: how all other activations cross borders.
        way: how they do within the row.
        share: how far along the frontiers of classes decisions are, from the fastest on.
    """
    pricer = planner.pricer(setting.microbatch_size)
    blocks = [call.block for call in pricer.trace.calls]
    ends = even_ends(len(blocks), setting.pp)
    row = max(set(blocks), key=blocks.count)
    chosen: list[Decision] = []
    for start, end in zip((0, *ends), ends, strict=False):
        own = [call for call in range(start, end) if blocks[call] == row]
        for call in range(start, end):
            borders: Borders = (base, base)
            if call in own and len(own) > 1:
                borders = (base if call == own[0] else way, base if call == own[-1] else way)
            points = pricer.frontiers.decisions(
                pricer.trace.blocks[blocks[call]],
                pricer.layouts.timer(setting.tp),
                whole=pricer.layouts.whole_states(blocks[call]),
                borders=borders,
            )
            chosen.append(points[round(share * (len(points) - 1))])
    return decided_plan(planner, setting, chosen)


def check(plans: list[tuple[str, str, Plan]]) -> None:
    """Hold plans of one world size against their models, loss and gradients."""
    (world_size,) = {plan.mesh.world_size for _, _, plan in plans}
    for _, name, plan in plans:
        program_of(name, plan.microbatch_size)
    tolerance = GRADIENT_TOLERANCE
    for problems in run_workers(check_plans, world_size, plans, tolerance, timeout_s=150):
        assert problems == []


def plans_of(name: str, setting: Setting) -> list[tuple[str, str, Plan]]:
    planner = planner_of(name, setting.tp * setting.pp, rows=2)
    trace = planner.traces.exact(1)
    cluster = Cluster.parse(f"{setting.tp * setting.pp}:cpu")
    plans = []
    for base, way in WAYS:
        for share in (0.0, 0.5, 1.0):
            plan = detour_plan(planner, setting, base, way, share)
            crossings = {layout.both_borders for layout in plan.placements.values()}
            assert {(base, way), (way, base)} <= crossings
            assert [str(v) for v in verify_plan(plan, trace, cluster) if v.rule == "V15"] == []
            assert Plan.from_json(plan.to_json()) == plan
            plans.append((f"{name} {base} {way} {share}", name, plan))
    return plans


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_blocks_that_leave_the_way_of_their_stage_equal_the_model(name: str) -> None:
    check(plans_of(name, TP))


def test_detours_within_stages_of_a_pipeline_equal_the_model() -> None:
    plans = plans_of("gpt2", PIPELINE)
    assert {plan.slices for _, _, plan in plans} == {1, 2}
    check(plans[::2])


def test_a_block_that_takes_over_what_is_not_handed_on_is_told() -> None:
    planner = planner_of("gpt2", 2, rows=2)
    plan = detour_plan(planner, TP, "whole", "tokens", 0.0)
    cut = {
        name: replace(layout, borders="whole", leaving=None)
        if layout.both_borders == ("tokens", "tokens")
        else layout
        for name, layout in plan.placements.items()
    }
    violations = verify_plan(
        replace(plan, placements=cut), planner.traces.exact(1), Cluster.parse("2:cpu")
    )
    found = [str(v) for v in violations if v.rule == "V15"]
    assert len(found) == 2
    assert "as whole, and it comes as tokens" in found[0]
