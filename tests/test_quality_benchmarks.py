"""The benchmarks of how good plans are: what is one problem, what is faster, what is an error."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from autoplan.cluster import Cluster
from autoplan.models import LoadedModel
from benchmarks import peers, plan_quality
from benchmarks.plan_quality import VARIANTS, ablation_row
from benchmarks.published_quality import is_beaten, problems_of, published_rows, shown, sources
from tests.models_for_tests import TinyGPT, mean_square
from tests.test_published_runs import ROW


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a table of three configurations of one problem, and rows that pose none."""
    small = {"gpus": "2", "gpus_per_node": "2", "tp": "1", "dp": "2", "global_batch": "2"}
    own = {**ROW, **small, "sequence_parallel": "false", "cp": "1"}
    rows = [
        own,
        {**own, "framework": "Megatron-LM 2022"},
        {**own, "recompute": "full"},
        {**own, "recompute": "selective", "zero_stage": "0"},
        {**own, "hidden": "64", "layers": "x"},
        {**own, "cp": "2", "dp": "1"},
    ]
    path = tmp_path / "made_up.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(own))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_of_one_model_cluster_and_batch_are_one_problem(published: Path) -> None:
    found = problems_of([published])
    assert len(found) == 1
    (configurations,) = found.values()
    assert sorted(one.rows for one in configurations.values()) == [1, 1, 2]


def test_plans_are_never_slower_than_a_published_configuration_that_fits(published: Path) -> None:
    rows = published_rows([published])
    assert len(rows) == 3
    assert all(row["fits"] and row["ratio"] <= 1 for row in rows)
    assert not any(map(is_beaten, rows))
    assert is_beaten({**rows[0], "ratio": 1.01})
    assert not is_beaten({**rows[0], "ratio": 1.01, "fits": False})
    assert "made_up made_up/one" in sources(rows)
    assert "recompute=full" in shown(rows)


def tiny() -> LoadedModel:
    return LoadedModel(
        model=TinyGPT(depth=2), batch=torch.randint(50, (2, 16)), loss_fn=mean_square, name="tiny"
    )


def test_restricted_searches_find_nothing_faster() -> None:
    cluster = Cluster.parse("1x2:a100_sxm_40gb")
    row = ablation_row("tiny", tiny(), cluster, ("joint", "cuts", "ZeRO-3"), workers=1)
    assert row["joint_s"] > 0
    assert min(row["cuts"], row["ZeRO-3"]) >= 1
    assert row["reasons"] == {}
    assert not plan_quality.is_broken(row)
    assert plan_quality.is_broken({**row, "cuts": 0.99})


def test_a_model_that_fits_nowhere_is_named_with_its_reason() -> None:
    small = Cluster.parse("1x1:cpu").with_memory("400KiB", reserve_bytes=0)
    row = ablation_row("tiny", tiny(), small, workers=1)
    assert row["joint_s"] is None
    assert {row[variant] for variant in VARIANTS if variant != "joint"} == {None}
    assert "of 400.00 KiB" in row["reasons"]["joint"]
    assert "tiny on 1x1:cpu, joint: the leanest plan needs" in plan_quality.report([row])


def test_what_other_planners_answered_can_be_read() -> None:
    asked = [question for question in peers.QUESTIONS if question.readings]
    assert len(asked) >= 4
    assert all(question.microbatch_sizes for question in asked)
