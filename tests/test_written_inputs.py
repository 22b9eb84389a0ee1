"""A block that writes to its input is run, or refused where the write would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoplan.capturer import capture
from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, PlanError
from autoplan.optimizing import optimize
from autoplan.plan import Plan, Recompute
from autoplan.program import Program
from autoplan.shared_writes import changed_states
from autoplan.stage_check import check_stages
from autoplan.stages import slice_program
from autoplan.tracer import trace_program
from autoplan.verifier import verify_plan
from autoplan.written_inputs import check_writes
from benchmarks.equality_draws import program_of
from benchmarks.equality_families import FAMILIES, build
from tests.plans import hand_plan


class _Block(nn.Module):
    """Writes to its input, and returns it with another view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x *= 2
        y = self.mix(x)
        return y, y.view(-1, 2, 2)


class _Net(nn.Module):
    def __init__(self, reads_view: bool) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(4, 4), nn.ModuleList(_Block() for _ in range(3))
        self.reads_view = reads_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, view = self.blocks[0](self.stem(x))
        x, _ = self.blocks[1](x)
        if self.reads_view:
            x = x + view.flatten(1)
        x, _ = self.blocks[2](x)
        return x.square().mean()


def program_with(reads_view: bool) -> Program:
    return capture(_Net(reads_view), torch.randn(2, 4), lambda out: out)


def test_a_view_of_what_another_block_writes_to_is_refused_by_name() -> None:
    program = program_with(True)
    told: list[dict[str, Any]] = [{"pp": 2, "num_microbatches": 2}, {"dp": 2, "zero_stage": 1}]
    told += [{"recompute": Recompute(mode="full")}]
    for options in told:
        plan = hand_plan(program, "Net", **options)
        with pytest.raises(PlanError, match=r"blocks\.1 writes to its input.* reads another view"):
            check_writes(plan, program)


def test_writes_that_are_seen_are_run() -> None:
    check_writes(hand_plan(program_with(True), "Net", dp=2), program_with(True))  # nothing copied
    program = program_with(False)
    check_writes(hand_plan(program, "Net", pp=2, num_microbatches=2), program)
    for family in ("convnet", "views", "shared_norm"):  # these write in place
        program = program_of(family, 1)
        check_writes(hand_plan(program, family, dp=2, zero_stage=3), program)


def rules_of(plan: Plan, program: Program) -> list[str]:
    """Return what the rules say of writes."""
    cluster = Cluster.parse(f"1x{plan.mesh.world_size}:a100_sxm_40gb")
    trace = trace_program(program, model_name="Net")
    return [str(one) for one in verify_plan(plan, trace, cluster) if one.rule == "V14"]


def planned(**pins: Any) -> Plan:
    """Return the plan of the net whose write a view must show."""
    net, cluster = _Net(True), "1x2:a100_sxm_40gb"
    found = optimize(net, cluster, torch.randn(2, 4), global_batch_size=4, compare=False, **pins)
    check_writes(found, program_with(True))
    return found


def test_the_search_chooses_no_plan_that_would_lose_a_write() -> None:
    plan = planned()
    assert (plan.mesh.pp, plan.zero_stage) == (1, 0)
    reasons = [text for name, text in plan.search.outcomes.items() if "pp=2" in name]
    assert reasons
    assert all("blocks.1 writes to a copy of its input" in text for text in reasons)
    assert rules_of(plan, program_with(True)) == []


def test_a_block_whose_write_would_be_lost_is_not_recomputed() -> None:
    plan = planned(recompute="full")
    modes = {b.fqn: plan.recompute[b.recompute].mode for s in plan.stages for b in s.blocks}
    assert modes["blocks.1"] == "none"


@pytest.mark.parametrize("pins", [{"pp": 2}, {"dp": 2, "zero_stage": 3}])
def test_settings_that_would_lose_a_write_are_refused_with_the_reason(pins: dict[str, int]) -> None:
    with pytest.raises(InfeasibleError, match="writes to a copy of its input"):
        planned(**pins)


def test_a_plan_that_loses_a_write_breaks_a_rule() -> None:
    program = program_with(True)
    told: list[dict[str, Any]] = [{"pp": 2, "num_microbatches": 2}, {"dp": 2, "zero_stage": 1}]
    for options in told:
        plan = hand_plan(program, "Net", **options)
        assert any("writes to a copy" in text for text in rules_of(plan, program))


def test_a_buffer_that_two_blocks_change_is_a_state_of_both() -> None:
    program = program_of("shared_norm", 1)
    first, second = (i for i, call in enumerate(program.calls) if "normed" in call.fqn)
    assert set(program.calls[second].states) >= {"normed.1.norm.running_mean"}
    assert program.calls[second].args == program.calls[first].outs
    changed = changed_states(program)
    assert len(changed) == 3  # mean, variance, and how many batches were seen
    assert {state.calls for state in changed} == {(first, second)}


def test_a_changed_buffer_is_kept_on_one_stage() -> None:
    program = program_of("shared_norm", 1)
    second = next(i for i, call in enumerate(program.calls) if call.fqn == "normed.1")
    plan = hand_plan(program, "Net", pp=2, num_microbatches=2, first_calls=[second])
    cuts = [[block.call for block in stage.blocks] for stage in plan.stages]
    names = {name for name, _ in build("shared_norm").named_parameters()}
    with pytest.raises(PlanError, match=r"which stages \[0, 1\] use"):
        check_stages(plan, program, slice_program(program, cuts), names)
    assert any("running_mean" in text for text in rules_of(plan, program))
    found = optimize(
        build("shared_norm"),
        "1x4:a100_sxm_40gb",
        FAMILIES["shared_norm"].batch(4, torch.Generator()),
        global_batch_size=4,
        loss_fn=FAMILIES["shared_norm"].loss_fn,
        pp=4,
        compare=False,
    )
    assert len(found.stages) == 4
    assert rules_of(found, program_of("shared_norm", found.microbatch_size)) == []
