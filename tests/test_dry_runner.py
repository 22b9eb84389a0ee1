"""Dry runs of ranks of a plan measure what the plan predicts, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoplan
from autoplan.dry_runner import dry_run, representative_ranks
from autoplan.estimating import estimate
from autoplan.models import LoadedModel, load_model
from autoplan.profiles import load_profile
from benchmarks.executed_plans import Case, load
from benchmarks.executed_plans import make_plan as make_executed_plan
from benchmarks.predicted_peaks import CASES, gpt, make_plan
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.distributed import run_workers


def _dry(rank: int, name: str) -> list[Any]:
    case = next(case for case in CASES if case.name == name)
    plan = make_plan(case)
    return list(dry_run(plan, gpt(case.rows), representative_ranks(plan)))


def _in_a_process(function: Any, *args: Any) -> Any:
    """Run in a fork without a group of its own: a dry run makes a fake one."""

    def alone(rank: int) -> Any:
        torch.distributed.destroy_process_group()
        result = function(rank, *args)
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        return result

    return run_workers(alone, 1)[0]


NAMES = ("ZeRO-3, recompute all", "pp 2 x ZeRO-3", "dp 2 x tp 2 x pp 2, ZeRO-1")


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_holds_what_was_predicted(name: str) -> None:
    runs = _in_a_process(_dry, name)
    assert [run.stage for run in runs] == list(range(len(runs)))
    assert all(abs(run.error) < 0.1 for run in runs), runs


def _border(rank: int, model: str, recompute: str) -> list[float]:
    options = {"dp": 1, "tp": 1, "pp": 2, "zero_stage": 0, "microbatch_size": 4}
    case = Case(model=model, world_size=2, options={**options, "recompute": recompute})
    plan = make_executed_plan(case, load_profile("cpu"))
    return [run.error for run in dry_run(plan, load(model), range(2))]


@pytest.mark.parametrize(("model", "recompute"), [("cnn", "full"), ("gpt", "none")])
def test_activations_at_the_border_of_stages_count_once_each(model: str, recompute: str) -> None:
    """What was sent, what a second forward makes again, the gradient in its receive buffer.

    One of them too many or too few is 1 to 4 % of these stages.
    """
    errors = _in_a_process(_border, model, recompute)
    assert all(abs(error) < 0.001 for error in errors), errors


def _large(rank: int) -> tuple[list[Any], bool]:
    loaded: LoadedModel = load_model("gpt2", seq=64, dtype=torch.bfloat16)
    plan = autoplan.estimate(
        loaded.model,
        "128x8:h100_sxm_80gb",
        loaded.batch,
        global_batch_size=256,
        tp=4,
        pp=4,
        zero_stage=1,
        recompute="full",
    ).plan
    runs = dry_run(plan, loaded, (1023,))
    is_on_meta = all(p.is_meta for p in loaded.model.parameters())
    return list(runs), is_on_meta


def test_a_rank_of_a_plan_for_1024_gpus_runs_in_one_process() -> None:
    runs, is_on_meta = _in_a_process(_large)
    assert is_on_meta
    assert [(run.rank, run.stage) for run in runs] == [(1023, 3)]
    assert all(abs(run.error) < 0.25 for run in runs), runs


def _no_such_rank(rank: int) -> str:
    try:
        _dry_rank(99)
    except ValueError as error:
        return str(error)
    return "no error"


def _dry_rank(rank: int) -> None:
    case = CASES[0]
    dry_run(make_plan(case), gpt(case.rows), (rank,))


def test_a_rank_that_is_not_there_is_refused() -> None:
    assert "the plan has ranks 0 to 3" in _in_a_process(_no_such_rank)


def _hybrid(rank: int) -> list[Any]:
    config = GPTConfig(
        num_layers=8, vocab_size=256, width=128, num_heads=4, max_tokens=64, is_head_tied=False
    )
    batch = batch_like(config, 16, 64)
    loaded = LoadedModel(model=GPT(config), batch=batch, loss_fn=loss_fn, name="gpt")
    plan = autoplan.estimate(
        loaded.model, "2x4:cpu", batch, loss_fn=loss_fn, dp=4, pp=2, dp_replicate=2,
        zero_stage=3, microbatch_size=1, recompute="full",
    ).plan  # fmt: skip
    return list(dry_run(plan, loaded, (0,)))


def test_replicas_under_a_pipeline_hold_no_more_than_shards_do() -> None:
    """Summed over replicas in every micro-batch, each shard of a gradient would be there twice."""
    runs = _in_a_process(_hybrid)
    assert all(abs(run.error) < 0.02 for run in runs), runs


def _offloaded_dry(rank: int, chunks: int) -> list[float]:
    config = GPTConfig(vocab_size=512, max_tokens=128, num_layers=8, num_heads=4, width=128)
    batch = batch_like(config, 8, 128)
    plan = estimate(
        GPT(config),
        "1x2:v100",
        batch,
        loss_fn=loss_fn,
        pp=2,
        zero_stage=3,
        offload="optimizer",
        virtual_stages=chunks,
        microbatch_size=1,
    ).plan
    loaded = LoadedModel(model=GPT(config), batch=batch, loss_fn=loss_fn, name="GPT")
    return [run.error for run in dry_run(plan, loaded, range(2))]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_dry_run_of_several_stages_with_states_on_the_host_holds_what_was_predicted(
    chunks: int,
) -> None:
    """The device's peak and the host's bytes together are at most what both hold at once."""
    errors = _in_a_process(_offloaded_dry, chunks)
    assert all(-0.01 < error < 0.08 for error in errors), errors
