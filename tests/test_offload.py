"""States on the host: off unless allowed, the last resort, and what they take and need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autoplan
from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.leanest import least_memory
from autoplan.offload import host_bytes
from autoplan.optimizing import find_plan
from autoplan.plan import Plan, Recompute
from autoplan.planner import Planner
from autoplan.stage_bytes import stage_blocks
from autoplan.verifier import verify_plan
from tests.models_for_tests import LinearChain, mean_square
from tests.small_traces import BodySpec, ChainSpec, planner_of, workload_of

CHAIN = ChainSpec(width=32, vocabulary=32, bodies=(BodySpec(count=4, hidden=64, has_norm=True),))


def planner(gpus: int, memory: int | str, *, offloads: bool) -> Planner:
    cluster = Cluster.parse(f"1x{gpus}:v100").with_memory(memory, reserve_bytes=0)
    workload = workload_of(4)
    if offloads:
        workload = replace(workload, offload=("optimizer",))
    return planner_of(CHAIN, cluster, workload)


@pytest.fixture(scope="module", params=[1, 2])
def tight(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Return numbers of devices, and bytes that are too few for states on the device."""
    gpus = int(request.param)
    return gpus, least_memory(planner(gpus, "1GiB", offloads=False)).need_bytes * 3 // 4


def test_states_go_to_the_host_where_nothing_else_fits(tight: tuple[int, int]) -> None:
    gpus, memory = tight
    with pytest.raises(InfeasibleError) as caught:
        find_plan(planner(gpus, memory, offloads=False))
    assert any(r.startswith("offload='optimizer'") for r in caught.value.remedies)
    allowed = planner(gpus, memory, offloads=True)
    plan = find_plan(allowed)
    assert (plan.offload, plan.zero_stage) == ("optimizer", 3)
    assert verify_plan(plan, allowed.traces.exact(plan.microbatch_size), allowed.cluster) == ()
    for parts in plan.predicted.memory_by_category:
        assert parts["parameters"] == parts["optimizer"] == 0
    assert "of each rank's states in host memory" in plan.report()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.timeline().peak_bytes() == plan.predicted.peak_memory_bytes


def test_states_stay_on_the_device_where_they_fit() -> None:
    allowed, plain = (find_plan(planner(2, "1GiB", offloads=o)) for o in (True, False))
    assert allowed.offload == "none"
    assert allowed.predicted.step_time_s == plain.predicted.step_time_s
    rows = {row.name: row for row in allowed.simpler}
    host, device = rows["ZeRO-3, states on the host"], rows["ZeRO-3"]
    assert host.peak_memory_bytes < device.peak_memory_bytes
    assert host.step_time_s > device.step_time_s


def test_host_bytes_are_all_states_once_over_the_ranks() -> None:
    made = planner(2, "1GiB", offloads=True)
    setting = next(s for s in made.settings() if s.offload != "none" and s.dp == 2)
    pricer = made.pricer(setting.microbatch_size)
    calls = range(len(pricer.trace.calls))
    decisions = [pricer.plain_decision(pricer.trace.calls[c].block, 1) for c in calls]
    groups = [b.group for b in stage_blocks(pricer, calls, decisions, setting)]
    stored = sum(g.stored for g in groups)
    # AdamW: a gradient and two moments beside each parameter, all of one size, all trained.
    assert host_bytes(groups, setting, made.workload) == 4 * stored // 2


def test_saved_activations_wait_on_the_host_where_that_is_faster_than_running_again() -> None:
    chain = ChainSpec(width=8, vocabulary=8, bodies=(BodySpec(count=6, hidden=32, has_norm=True),))
    device = replace(Cluster.parse("1x1:v100").device, host_link_bytes_per_s=1e13)

    def made(memory: int | str, offload: tuple[str, ...]) -> Planner:
        cluster = Cluster.from_device(device).with_memory(memory, reserve_bytes=0)
        workload = replace(workload_of(32), offload=offload)
        return planner_of(chain, cluster, workload, {"microbatch_size": 32})

    memory = least_memory(made("1GiB", ())).need_bytes
    again, away = (find_plan(made(memory, offload)) for offload in ((), ("activations",)))
    assert away.predicted.step_time_s < again.predicted.step_time_s
    modes = {away.recompute[b.recompute].mode for s in away.stages for b in s.blocks}
    assert "offload" in modes
    assert away.predicted.time_by_category["offload"] > 0
    assert max(away.predicted.peak_memory_bytes) <= memory


def test_block_with_its_saved_tensors_on_the_host_keeps_its_inputs_alone() -> None:
    made = planner(2, "1GiB", offloads=False)
    pricer = made.pricer(2)
    block = next(c.block for c in pricer.trace.calls if c.fqn)
    plain = pricer.plain_decision(block, 1)
    away = replace(plain, recompute=Recompute(mode="offload"))
    here, there = (pricer.base(block, d, 1) for d in (plain, away))
    assert there.memory.kept == sum(there.local.inputs[n] for n in there.memory.held_inputs)
    assert there.memory.kept < here.memory.kept
    assert there.memory.backward_peak <= here.memory.backward_peak
    assert there.forward_s > here.forward_s
    assert there.backward_s > here.backward_s
    assert there.redo_s == 0


@pytest.mark.parametrize(
    ("cluster", "offload", "message"),
    [
        ("1x2:cpu", "optimizer", "a CPU computes in host memory already"),
        ("1x2:v100", "disk", "offload='disk'; allowed are optimizer, activations"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(cluster: str, offload: str, message: str) -> None:
    batch = torch.randn(4, 16)
    with pytest.raises(ValueError, match=message):
        autoplan.optimize(LinearChain(), cluster, batch, loss_fn=mean_square, offload=offload)


def test_estimate_prices_offload_and_names_the_stage_it_needs() -> None:
    arguments: dict[str, Any] = {"batch": torch.randn(4, 16), "loss_fn": mean_square}
    host, device = (
        autoplan.estimate(LinearChain(), "1x2:v100", zero_stage=3, offload=offload, **arguments)
        for offload in ("optimizer", "none")
    )
    assert host.step_time_s > device.step_time_s
    assert max(host.peak_memory_bytes) < max(device.peak_memory_bytes)
    with pytest.raises(ValueError, match="it needs zero_stage=3"):
        autoplan.estimate(LinearChain(), "1x2:v100", offload="optimizer", **arguments)
