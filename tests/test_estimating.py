"""A given configuration is priced as the plan is, and impossible numbers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoplan.cluster import Cluster
from autoplan.estimating import Estimate, estimate
from autoplan.optimizing import optimize
from autoplan.planner import make_planner
from autoplan.training_job import TrainingJob
from autoplan.verifier import verify_plan
from tests.models_for_tests import LinearChain, mean_square

CLUSTER = Cluster.parse("1x4:cpu").with_memory("1GiB", reserve_bytes=0)
BATCH = torch.randn(8, 16)


def priced(**options: Any) -> Estimate:
    model = LinearChain(width=16, depth=3)
    return estimate(model, CLUSTER, BATCH, loss_fn=mean_square, **options)


def test_estimate_of_what_was_planned_gives_the_numbers_of_the_plan() -> None:
    model = LinearChain(width=16, depth=3)
    pins: dict[str, Any] = {
        "dp": 2,
        "tp": 1,
        "pp": 2,
        "zero_stage": 1,
        "microbatch_size": 2,
        "recompute": "none",
    }
    plan = optimize(model, CLUSTER, BATCH, loss_fn=mean_square, compare=False, **pins)
    ends = [stage.blocks[-1].call + 1 for stage in plan.stages]
    again = priced(dp=2, pp=2, zero_stage=1, microbatch_size=2, stage_ends=ends)
    assert again.step_time_s == plan.predicted.step_time_s
    assert again.peak_memory_bytes == plan.predicted.peak_memory_bytes
    assert again.memory_by_category == plan.predicted.memory_by_category
    assert again.time_by_category == plan.predicted.time_by_category
    assert (again.plan.stages, again.plan.fingerprint) == (plan.stages, plan.fingerprint)


def test_estimated_plan_is_priced_and_obeys_the_rules() -> None:
    found = priced(dp=4, zero_stage=3, recompute="full")
    assert found.plan.search.status == "priced"
    planner = make_planner(
        TrainingJob(LinearChain(width=16, depth=3), CLUSTER, BATCH, loss_fn=mean_square)
    )
    assert verify_plan(found.plan, planner.traces.exact(1), CLUSTER) == ()


def test_what_does_not_fit_is_priced_and_says_so() -> None:
    small = CLUSTER.with_memory("10KiB")
    model = LinearChain(width=16, depth=3)
    found = estimate(model, small, BATCH, loss_fn=mean_square)
    assert not found.fits
    assert found.margin_bytes < 0
    assert str(found).startswith("does not fit: ")
    assert priced().fits
    assert priced().margin_bytes == 2**30 - max(priced().peak_memory_bytes)


def test_gpipe_holds_every_micro_batch_and_1f1b_at_most_one_a_stage() -> None:
    gpipe, one = (
        priced(dp=1, pp=4, schedule=schedule, microbatch_size=1) for schedule in ("gpipe", "1f1b")
    )
    assert gpipe.step_time_s == one.step_time_s
    pairs = list(zip(gpipe.memory_by_category, one.memory_by_category, strict=True))
    assert all(a["activations"] >= b["activations"] for a, b in pairs)
    assert all(a >= b for a, b in zip(gpipe.peak_memory_bytes, one.peak_memory_bytes, strict=True))
    assert gpipe.peak_memory_bytes[0] > one.peak_memory_bytes[0]


def test_recompute_takes_time_and_gathering_parameters_saves_memory() -> None:
    assert priced(recompute="full").step_time_s > priced().step_time_s
    peaks = [max(priced(zero_stage=stage).peak_memory_bytes) for stage in (0, 1, 2, 3)]
    assert min(peaks) == peaks[3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp=0: must be at least 1"),
        ({"microbatch_size": 0}, "microbatch_size=0: must be a"),
        ({"dp": 3}, r"dp=3 \* tp=1 \* pp=1 is not the 4 devices"),
        ({"tp": 3}, r"dp=1 \* tp=3 \* pp=1 is not the 4 devices"),
        ({"microbatch_size": 3}, "global batch 8 does not divide into dp=4 times micro-batches"),
        ({"pp": 4, "microbatch_size": 4}, "needs at least 4 micro-batches, the batch gives 2"),
        ({"schedule": "zb"}, "schedule='zb'; allowed are 1f1b, gpipe, interleaved, zero_bubble"),
        ({"recompute": "some"}, "recompute='some'; estimate takes none, full"),
        ({"zero_stage": 5}, "zero_stage=5; allowed are 0, 1, 2, 3"),
        ({"pp": 2, "stage_ends": [4, 2]}, r"stage_ends \(4, 2\): needs 2 rising numbers"),
        ({"pp": 2, "stage_ends": [0, 4]}, r"stage_ends \(0, 4\): needs 2 rising numbers above 0"),
        ({"pp": 16, "dp": 1}, "pp=16 is not the 4 devices"),
    ],
)
def test_impossible_numbers_say_what_is_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        priced(**options)


def test_several_recompute_words_go_round_the_repeated_blocks() -> None:
    kept = {
        str(words): priced(dp=4, recompute=words).step_time_s
        for words in ("none", ("full", "none"), ("full",), "full")
    }
    assert kept["('full',)"] == kept["full"]
    assert kept["none"] < kept["('full', 'none')"] < kept["full"]


def test_fewer_micro_batches_than_stages_are_priced_for_engines_that_run_them() -> None:
    """torch's 1F1B refuses them, Megatron-LM does not; the pipeline is never full."""
    options: dict[str, Any] = {"dp": 1, "pp": 4, "engine": "megatron"}
    two, four = (priced(microbatch_size=size, **options) for size in (4, 2))
    assert two.written is None
    assert two.step_time_s > 0
    assert two.time_by_category["pipeline"] > 0
    assert len(four.peak_memory_bytes) == 4


def test_more_stages_than_blocks_are_refused() -> None:
    model = LinearChain(width=16, depth=2)
    with pytest.raises(ValueError, match=r"pp=4 stages for a chain of \d blocks: lower pp"):
        estimate(model, CLUSTER, BATCH, loss_fn=mean_square, pp=4)
