"""Pipelines are cut by time: of the blocks, or of the values that cross, where the link is slow."""

from __future__ import annotations

import pytest
import torch

from autoplan.cluster import Cluster
from autoplan.optimizing import find_plan
from autoplan.planner import make_planner
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from autoplan.training_job import TrainingJob
from tests.models_for_tests import LinearChain
from tests.reported_models import SmallUNet

WIDTH, LAYERS, ROWS = 128, 8, 64


def devices(num_devices: int, flops_per_s: float, link_bytes_per_s: float) -> Cluster:
    """Return devices on which nothing but arithmetic and messages takes time."""
    link = LinkProfile.from_numbers(
        name="link",
        level="intra",
        latency_s=0.0,
        bytes_per_s=link_bytes_per_s,
        source="made for this test",
    )
    device = DeviceProfile.from_datasheet(
        name="arithmetic",
        memory_bytes=2**30,
        peak_flops_per_s={"float32": flops_per_s},
        memory_bandwidth_bytes_per_s=1e16,
        source="made for this test",
        launch_overhead_s=1e-15,
        intra=link,
    )
    return Cluster.from_device(device, gpus_per_node=num_devices)


@pytest.mark.parametrize(
    ("pp", "firsts", "units"),
    [(2, ["blocks.6"], (34, 36)), (3, ["blocks.4", "head"], (22, 24, 24))],
)
def test_a_head_worth_four_layers_is_cut_where_the_stages_balance(
    pp: int, firsts: list[str], units: tuple[int, ...]
) -> None:
    """A layer takes 6 units, the first 4 (its input has no gradient), the head 24."""
    planner = make_planner(
        TrainingJob(
            LinearChain(WIDTH, LAYERS),
            devices(pp, 1e12, 1e16),
            torch.randn(8 * ROWS, WIDTH),
            loss_fn=lambda out: (out - 1).square().mean(),
        ),
        pins={"pp": pp, "num_microbatches": 8},
    )
    plan = find_plan(planner)
    calls = planner.trace(ROWS).calls
    held = [[fqn for b in stage.blocks for fqn in calls[b.call].states] for stage in plan.stages]
    every = [*(f"blocks.{i}.weight" for i in range(LAYERS)), "head.weight"]
    assert [fqn for stage in held for fqn in stage] == every
    assert [stage[0] for stage in held[1:]] == [f"{name}.weight" for name in firsts]
    assert (plan.search.status, plan.search.gap) == ("optimal", 0.0)
    shares = [seconds / max(plan.predicted.stage_time_s) for seconds in plan.predicted.stage_time_s]
    assert shares == pytest.approx([n / max(units) for n in units], rel=1e-3)


def test_over_a_slow_link_the_cut_is_where_the_fewest_bytes_cross() -> None:
    """After `up1` 16 KiB of a row cross; after `mid`, where the main path is narrowest, 52 KiB."""
    planner = make_planner(
        TrainingJob(SmallUNet(), devices(2, 1e15, 1e5), SmallUNet.batch(), loss_fn=SmallUNet.loss),
        pins={"pp": 2, "num_microbatches": 4},
    )
    plan = find_plan(planner)
    calls = planner.trace(plan.microbatch_size).calls
    assert [fqn for b in plan.stages[1].blocks for fqn in calls[b.call].states] == [
        "out.weight",
        "out.bias",
    ]
    assert (plan.search.status, plan.search.gap) == ("optimal", 0.0)
    message_s = 16_384 / 1e5  # four there, and back at the same time but for the first
    assert plan.predicted.step_time_s == pytest.approx(5 * message_s, rel=1e-3)
