"""Where stages and replicas lie over nodes: links between them, prices, and what is searched."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.estimating import estimate
from autoplan.meshes import AXIS_ORDERS, ranks_of_stage, stage_of_rank, stride_of
from autoplan.optimizers import Optimizer
from autoplan.plan import Mesh, Plan
from autoplan.profiles import load_profile
from autoplan.profiles.tables import CollectiveTable
from autoplan.settings import NO_LIMITS, Setting, Workload, settings_of
from autoplan.stage_costs import GroupBytes
from autoplan.step_costs import data_parallel_times
from autoplan.tracer import trace
from autoplan.verifier import verify_plan
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn

TWO_NODES = Cluster.parse("2x4:a100_sxm_80gb")
WORKLOAD = Workload(global_batch_size=64, optimizer=Optimizer.named("AdamW", is_foreach=True))
GROUP = GroupBytes(stored=2**26, trained=2**26, gathered=2**26, gathered_grads=2**26)
CONFIG = GPTConfig(vocab_size=64, max_tokens=8, num_layers=4, num_heads=2, width=32)


def setting_of(**options: Any) -> Setting:
    degrees: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1, "zero_stage": 0, "microbatch_size": 1}
    options = {**degrees, "num_microbatches": 8, "schedule": "1f1b", **options}
    return Setting(**options)


def priced(cluster: Cluster, **options: Any) -> Plan:
    batch = batch_like(CONFIG, 32, 8)
    return estimate(GPT(CONFIG), cluster, batch, loss_fn=loss_fn, **options).plan


@given(st.sampled_from(AXIS_ORDERS), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_every_rank_has_one_place_and_peers_are_a_stride_apart(
    order: Any, dp: int, tp: int, pp: int
) -> None:
    mesh = Mesh(dp=dp, tp=tp, pp=pp, axis_order=order)
    by_stage = [ranks_of_stage(stage, mesh) for stage in range(pp)]
    assert sorted(rank for ranks in by_stage for rank in ranks) == list(range(mesh.world_size))
    for first, second in itertools.pairwise(by_stage):
        assert {b - a for a, b in zip(first, second, strict=True)} == {stride_of("pp", mesh)}
    assert all(stage_of_rank(rank, mesh) == s for s, ranks in enumerate(by_stage) for rank in ranks)
    places = {
        d * stride_of("dp", mesh) + p * stride_of("pp", mesh) + t * stride_of("tp", mesh)
        for d in range(dp)
        for p in range(pp)
        for t in range(tp)
    }
    assert places == set(range(mesh.world_size))


@given(
    st.sampled_from(AXIS_ORDERS),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(1, 4),
)
def test_a_stage_sends_over_the_network_where_any_of_its_ranks_does(
    order: Any, dp: int, tp: int, pp: int, gpus: int
) -> None:
    mesh = Mesh(dp=dp, tp=tp, pp=pp, axis_order=order)
    cluster = replace(TWO_NODES, num_nodes=math.ceil(mesh.world_size / gpus), gpus_per_node=gpus)
    levels = []
    for stage in range(pp - 1):
        pairs = zip(ranks_of_stage(stage, mesh), ranks_of_stage(stage + 1, mesh), strict=True)
        levels.append("inter" if any(a // gpus != b // gpus for a, b in pairs) else "intra")
    if mesh.world_size == cluster.world_size:
        found = [cluster.link_between_stages(mesh, stage).level for stage in range(pp - 1)]
        assert found == levels
        worst = "inter" if "inter" in levels else "intra"
        assert cluster.link_between_stages(mesh).level == worst


def test_each_order_pays_the_network_where_it_crosses_it() -> None:
    outside = setting_of(dp=4, pp=2)
    inside = replace(outside, axis_order="tp-pp-dp")
    assert TWO_NODES.link_between_stages(outside).level == "inter"
    assert TWO_NODES.link_between_stages(inside).level == "intra"
    near = data_parallel_times(GROUP, outside, WORKLOAD, TWO_NODES).once_reduce_s
    far = data_parallel_times(GROUP, inside, WORKLOAD, TWO_NODES).once_reduce_s
    assert near < far


def test_hybrid_sharding_gathers_inside_the_node_and_sums_shards_across() -> None:
    whole = setting_of(dp=8, zero_stage=3, schedule="none")
    hybrid = replace(whole, dp_replicate=2)
    one_node, across = TWO_NODES.link_for(4), TWO_NODES.link_for(2, 4)
    found = data_parallel_times(GROUP, hybrid, WORKLOAD, TWO_NODES)
    assert found.gather_s == one_node.collective_time_s("all_gather", 2**26, 4)
    assert found.reduce_s == one_node.collective_time_s("reduce_scatter", 2**26, 4)
    assert found.once_reduce_s == across.collective_time_s("all_reduce", 2**24, 2)
    assert found.gather_s < data_parallel_times(GROUP, whole, WORKLOAD, TWO_NODES).gather_s


def test_replicas_need_the_memory_of_fewer_shards() -> None:
    whole = priced(TWO_NODES, zero_stage=3)
    hybrid = priced(TWO_NODES, zero_stage=3, dp_replicate=2)
    parameters = [plan.predicted.memory_by_category[0]["parameters"] for plan in (whole, hybrid)]
    assert parameters[1] == pytest.approx(2 * parameters[0], rel=0.01)
    assert "dp_replicate=2" in hybrid.report()
    assert Plan.from_json(hybrid.to_json()).mesh == hybrid.mesh
    traced = trace(GPT(CONFIG), batch_like(CONFIG, 32, 8), loss_fn, microbatch_size=1)
    assert not [v for v in verify_plan(hybrid, traced, TWO_NODES) if v.rule in ("V9", "V12")]
    broken = replace(hybrid, zero_stage=0)
    assert any("2 replicas of dp=8" in v.message for v in verify_plan(broken, traced, TWO_NODES))


def test_only_orders_and_replicas_that_may_win_are_tried() -> None:
    def tried(cluster: Cluster, **pins: Any) -> set[tuple[int, str]]:
        listed = settings_of(cluster, WORKLOAD, 8, pins, limits=NO_LIMITS)
        return {(s.dp_replicate, s.axis_order) for s in listed}

    assert tried(Cluster.parse("8:a100_sxm_80gb"), dp=2, pp=4) == {(1, "tp-dp-pp")}
    assert tried(TWO_NODES, dp=8) == {(1, "tp-dp-pp"), (2, "tp-dp-pp")}
    assert tried(TWO_NODES, dp=4, pp=2, zero_stage=0) == {(1, "tp-dp-pp"), (1, "tp-pp-dp")}
    assert tried(TWO_NODES, dp=4, pp=2) == {
        (1, "tp-dp-pp"), (1, "tp-pp-dp"), (2, "tp-pp-dp"),
    }  # fmt: skip
    assert tried(TWO_NODES, dp=8, dp_replicate=4) == {(4, "tp-dp-pp")}
    assert tried(TWO_NODES, dp=8, dp_replicate=8) == set()
    assert tried(TWO_NODES, dp=2, pp=4, axis_order="tp-pp-dp") == {(1, "tp-pp-dp")}


@pytest.mark.parametrize("options", [{"dp_replicate": 3}, {"dp_replicate": 8}, {"zero_stage": 0}])
def test_impossible_replicas_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"dp_replicate=\d must divide dp=8, be below it"):
        priced(TWO_NODES, **{"zero_stage": 3, "dp_replicate": 2, **options})


def test_a_curve_over_nodes_prices_its_own_kind_of_group_and_scales_to_others() -> None:
    rows = ((2**15, 1e-4), (2**20, 2e-4), (2**30, 1e-2))
    table = CollectiveTable(
        collective="all_reduce", degree=8, origin="latency", rows=rows, ranks_per_node=4
    )
    inter = load_profile("a100_sxm_80gb").inter
    assert inter is not None
    cluster = replace(TWO_NODES, inter=replace(inter, curves=(table,)))
    assert cluster.link_for(8).collective_time_s("all_reduce", 2**20, 8) == pytest.approx(2e-4)
    one_port = cluster.link_for(2, 4)
    assert one_port.ranks_per_node == 1
    small, large = (one_port.collective_time_s("all_reduce", n, 2) for n in (2**10, 2**28))
    assert small < 2e-4
    assert large > one_port.collective_time_s("all_reduce", 2**26, 2)


def test_small_messages_over_many_nodes_go_along_a_tree() -> None:
    many = Cluster.parse("64x8:h100_sxm_80gb")
    link = replace(many.link_for(512), curves=())
    depth_s = 6 * many.inter.latency_s + 7 * many.intra.latency_s
    found = link.collective_time_s("all_reduce", 1024, 512)
    assert found == pytest.approx(link.setup_s + 2 * depth_s + 2048 / link.bus_bytes_per_s)
