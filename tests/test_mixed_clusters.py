"""Clusters of two types of devices: stages are sized to theirs, and what cannot be is refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.cluster import Cluster, NodeGroup
from autoplan.errors import ProfileError
from autoplan.estimating import estimate
from autoplan.meshes import AXIS_ORDERS, AxisOrder, ranks_of_stage, runs_stage
from autoplan.optimizing import find_plan
from autoplan.plan import Mesh, Plan
from autoplan.profiles import load_profile
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.small_traces import BodySpec, ChainSpec, planner_of, workload_of

CONFIG = GPTConfig(vocab_size=256, max_tokens=64, num_layers=8, num_heads=4, width=256)
FAST = load_profile("a100_sxm_80gb")
# A made-up device of a third of the speed in everything.
SLOW = replace(FAST.scaled(flops=1 / 3, bandwidth=1 / 3), name="third", launch_overhead_s=3e-5)
MIXED = replace(
    Cluster.from_device(replace(FAST, launch_overhead_s=1e-5), num_nodes=2, gpus_per_node=2),
    slower=(NodeGroup(num_nodes=1, device=SLOW),),
)


def optimized(cluster: Cluster, **options: Any) -> Plan:
    batch = batch_like(CONFIG, 8, 64)
    return autoplan.optimize(GPT(CONFIG), cluster, batch, loss_fn=loss_fn, **options)


def test_a_stage_sees_its_own_type_of_device() -> None:
    assert str(MIXED) == "1x2:a100_sxm_80gb + 1x2:third"
    mesh = Mesh(dp=2, tp=1, pp=2)
    assert [MIXED.on_stage(mesh, stage).device.name for stage in (0, 1)] == [FAST.name, "third"]
    assert Cluster.from_json(MIXED.to_json()) == MIXED


def test_stages_are_sized_to_their_devices() -> None:
    plan = optimized(MIXED, dp=2, pp=2, microbatch_size=1, recompute="none")
    sizes = [sum(bool(block.fqn) for block in stage.blocks) for stage in plan.stages]
    assert sum(sizes) == 8
    alike = optimized(replace(MIXED, slower=()), dp=2, pp=2, microbatch_size=1, recompute="none")
    even = [sum(bool(block.fqn) for block in stage.blocks) for stage in alike.stages]
    assert sizes[0] > even[0]
    assert plan.predicted.step_time_s > alike.predicted.step_time_s
    times = plan.predicted.stage_time_s
    assert max(times) < 1.5 * min(times)


def test_ranks_of_several_types_count_as_the_slowest_and_the_smallest() -> None:
    small = replace(SLOW, name="small", memory_bytes=FAST.memory_bytes // 2)
    quick = replace(FAST.scaled(flops=1 / 2, bandwidth=1), name="quick", memory_bytes=2**32)
    cluster = Cluster.from_device(FAST, num_nodes=1, gpus_per_node=2).with_slower(
        [NodeGroup(num_nodes=1, device=own) for own in (quick, small)]
    )
    whole = cluster.on_stage(Mesh(dp=6, tp=1, pp=1), 0)
    assert whole.device.name == "small"
    assert whole.capacity_bytes == 2**32 - quick.reserve_bytes
    two = [cluster.on_stage(Mesh(dp=3, tp=1, pp=2), stage) for stage in (0, 1)]
    assert [own.device.name for own in two] == ["quick", "small"]
    assert two[1].total_bytes == 2**32
    across = cluster.on_stage(Mesh(dp=2, tp=1, pp=3, axis_order="tp-pp-dp"), 0)
    assert across.device.name == "quick"
    assert cluster.on_stage(Mesh(dp=1, tp=1, pp=1), 0).device.name == FAST.name


@pytest.mark.parametrize("order", AXIS_ORDERS)
def test_ranks_of_a_stage_are_found_without_a_list_of_all(order: AxisOrder) -> None:
    for dp, tp, pp in itertools.product((1, 2, 3, 4), (1, 2), (1, 2, 3, 5)):
        mesh = Mesh(dp=dp, tp=tp, pp=pp, axis_order=order)
        for stage in range(pp):
            ranks = ranks_of_stage(stage, mesh)
            for start, stop in itertools.combinations(range(dp * tp * pp + 2), 2):
                has = any(rank in range(start, stop) for rank in ranks)
                assert runs_stage(range(start, stop), stage, mesh) == has


def test_data_parallel_ranks_may_be_of_several_types() -> None:
    batch = batch_like(CONFIG, 8, 64)
    options: dict[str, Any] = {"dp": 4, "microbatch_size": 1, "zero_stage": 0}
    both = estimate(GPT(CONFIG), MIXED, batch, loss_fn=loss_fn, **options)
    slow = replace(MIXED, device=SLOW, slower=())
    alone = estimate(GPT(CONFIG), slow, batch, loss_fn=loss_fn, **options)
    assert both.step_time_s == pytest.approx(alone.step_time_s, rel=1e-9)
    plan = optimized(MIXED, dp=4, microbatch_size=1, recompute="none", zero_stage=0)
    assert plan.predicted.step_time_s <= both.step_time_s * (1 + 1e-9)
    assert "third" in plan.report()


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_no_slower_than_ddp_over_all_or_says_which_type_alone_is_faster(
    seed: int,
) -> None:
    draw = random.Random(seed)
    body = BodySpec(
        count=draw.choice((2, 4, 6)), hidden=draw.choice((256, 8192)), has_norm=draw.random() < 0.5
    )
    spec = ChainSpec(width=draw.choice((64, 4096)), vocabulary=32, bodies=(body,))
    slow = replace(
        FAST.scaled(flops=draw.choice((0.1, 0.8)), bandwidth=draw.choice((0.2, 0.9))), name="slow"
    )
    cluster = Cluster.from_device(FAST, num_nodes=1, gpus_per_node=2).with_slower(
        [NodeGroup(num_nodes=1, device=slow)]
    )
    workload = workload_of(draw.choice((4, 8)))
    plan = find_plan(planner_of(spec, cluster, workload))
    own_s = plan.predicted.step_time_s
    ddp = next(row for row in plan.simpler if row.name == "DDP")
    assert ddp.fits
    assert own_s <= ddp.step_time_s * (1 + 1e-9)
    faster = {}
    for index, group in enumerate(cluster.groups):
        half = Cluster.from_device(group.device, num_nodes=1, gpus_per_node=2)
        assert cluster.of_type(index).link_for(2) == half.link_for(2)
        alone = find_plan(planner_of(spec, half, workload), compare=False)
        if alone.predicted.step_time_s < own_s:
            faster[alone.predicted.step_time_s] = str(half)
    told = [note.split(" alone")[0] for note in plan.notes if note.endswith("for these alone")]
    assert told == [faster[min(faster)]] if faster else not told


def test_text_joins_nodes_of_several_types() -> None:
    cluster = Cluster.parse("2x8:h100 + 1x8:a100_sxm_40gb")
    assert str(cluster) == "2x8:h100_sxm_80gb + 1x8:a100_sxm_40gb"
    assert Cluster.parse(str(cluster)) == cluster
    a100 = load_profile("a100_sxm_40gb")
    assert cluster.inter == a100.inter  # the slowest network
    assert cluster.on_stage(Mesh(dp=8, tp=1, pp=3), 2).intra == a100.intra
    assert cluster.on_stage(Mesh(dp=8, tp=1, pp=3), 0).intra == load_profile("h100").intra
    with pytest.raises(ValueError, match=r"perhaps '1x8:h100_sxm_80gb \+ 1x8:a100_sxm_80gb'"):
        Cluster.parse("1x8:a100 + 1x8:h100")
    with pytest.raises(ValueError, match="every node must have as many"):
        Cluster.parse("1x8:h100 + 2x4:a100")
    with pytest.raises(ValueError, match=r"'' is not a cluster: write .* \+ 1x8:a100"):
        Cluster.parse("1x8:h100 +")


def test_a_file_describes_nodes_of_several_types(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    text = "num_nodes: 2\ngpus_per_node: 8\ndevice: h100_sxm_80gb\nslower:\n"
    path.write_text(text + "- {num_nodes: 1, device: a100_sxm_80gb}\n")
    cluster = Cluster.parse(path)
    assert str(cluster) == "2x8:h100_sxm_80gb + 1x8:a100_sxm_80gb"
    assert cluster.world_size == 24
    path.write_text(text + "- {num_nodes: 1, device: b200_sxm}\n")
    with pytest.raises(ValueError, match=r"mixed\.yaml: b200_sxm is faster than h100_sxm_80gb"):
        Cluster.parse(path)
    path.write_text(text + "- {num_nodes: 1, device: a100_sxm_81gb}\n")
    with pytest.raises(ProfileError, match=r"mixed\.yaml: no profile named 'a100_sxm_81gb'"):
        Cluster.parse(path)
    path.write_text(text + "- {num_nodes: -1, device: a100_sxm_80gb}\n")
    with pytest.raises(ValueError, match=r"mixed\.yaml: slower\[0\]\.num_nodes: must be a whole"):
        Cluster.parse(path)
    path.write_text(
        "inter: {latency_s: 1e-6, bytes_per_s: 1e9}\nintra: {latency_s: 1e-6, bytes_per_s: 9e9}\n"
        + text
        + "- {num_nodes: 1, device: a100_sxm_80gb}\n"
    )
    given = Cluster.parse(path)
    assert given.inter.bytes_per_s == 1e9
    assert [given.of_type(index).intra.bytes_per_s for index in (0, 1)] == [9e9, 9e9]
    path.write_text(text + "- {device: a100_sxm_80gb}\n")
    with pytest.raises(ValueError, match=r"mixed\.yaml: slower\[0\]: num_nodes: missing key"):
        Cluster.parse(path)
