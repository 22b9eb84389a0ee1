"""Clusters of two types of devices: stages are sized to theirs, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.cluster import Cluster, NodeGroup
from autoplan.estimating import estimate
from autoplan.plan import Mesh, Plan
from autoplan.profiles import load_profile
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn

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
    with pytest.raises(ValueError, match=r"stage 0 of dp=4 .* would lie on a100.* and third"):
        MIXED.on_stage(Mesh(dp=4, tp=1, pp=1), 0)


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


def test_a_search_leaves_out_what_would_mix_types() -> None:
    plan = optimized(MIXED, microbatch_size=1)
    assert plan.mesh.pp >= 2
    assert "third" in plan.report()
    reason = next(text for name, text in plan.search.outcomes.items() if name.startswith("dp=4"))
    assert "data and tensor parallel ranks must be alike" in reason
    with pytest.raises(ValueError, match="dp \\* tp must divide each of 2 \\+ 2 devices"):
        estimate(GPT(CONFIG), MIXED, batch_like(CONFIG, 8, 64), loss_fn=loss_fn, dp=4)


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
    path.write_text(text + "- {device: a100_sxm_80gb}\n")
    with pytest.raises(ValueError, match=r"mixed\.yaml: slower\[0\]: num_nodes: missing key"):
        Cluster.parse(path)
