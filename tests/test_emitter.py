"""Emitted modules equal the single-device model: loss and every gradient."""

from __future__ import annotations

import functools
import unittest.mock
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import nn

from autoplan.capturer import capture
from autoplan.emitter import parallelize
from autoplan.errors import EmitError, PlanError
from autoplan.plan import Plan, Recompute
from autoplan.program import Program
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.distributed import run_workers
from tests.layouts import megatron, scattered
from tests.numerics import ROWS, Case, build, check_cases, global_batch, program_of
from tests.plans import hand_plan


def full(program: Program) -> Recompute:
    """Return the mark that keeps nothing."""
    return Recompute(mode="full")


def away(program: Program) -> Recompute:
    return Recompute(mode="offload")


def selective(program: Program) -> Recompute:
    """Return marks on attention and the first linear of the block."""
    block = next(graph for graph in program.graphs if not graph.is_glue)
    names = [op.name for op in block.ops]
    kept = [n for n in names if "scaled_dot_product" in n]
    kept += [n for n in names if "linear" in n or "addmm" in n][:1]
    return Recompute(mode="selective", keep=tuple(kept))


def check(cases: list[Case], world_size: int) -> None:
    """Run cases on forked workers and fail with what does not agree."""
    for name in {c.model for c in cases}:
        program_of(name)
    for problems in run_workers(check_cases, world_size, tuple(cases), timeout_s=100):
        assert problems == []


def case(model: str, **plan: Any) -> Case:
    """Return a case by its plan's arguments."""
    return Case(model=model, plan=plan)


@pytest.mark.parametrize("recompute", [None, full, selective, away])
def test_one_device_equals_the_model(recompute: Any) -> None:
    plan = {} if recompute is None else {"recompute": recompute}
    models = ("gpt", "gpt_tied", "llama", "gpt2")
    host = case("gpt_tied", zero_stage=3, num_microbatches=2, offload="optimizer", **plan)
    check([*(case(m, num_microbatches=2, **plan) for m in models), host], 1)


def test_every_zero_stage_equals_the_model() -> None:
    cases = [
        case(model, dp=2, zero_stage=zero, num_microbatches=m)
        for zero in range(4)
        for model, m in (("gpt_tied", 1), ("gpt", 2), ("llama", 2), ("gpt2", 2))
    ]
    cases += [case("gpt_tied", dp=2, zero_stage=3, num_microbatches=2, offload="optimizer")]
    check(cases, 2)


def test_recompute_under_zero_equals_the_model() -> None:
    cases = [
        case(model, dp=2, zero_stage=zero, num_microbatches=2, recompute=recompute)
        for zero in (0, 3)
        for recompute in (full, selective, away)
        for model in ("gpt", "llama")
    ]
    check(cases, 2)


def test_pipelines_equal_the_model() -> None:
    cases = [
        case("gpt_tied", pp=2, num_microbatches=2),
        case("gpt", pp=2, num_microbatches=4, first_calls=[2], schedule="gpipe"),
        case("llama", pp=2, num_microbatches=4, first_calls=[4]),
        case("gpt2", pp=2, num_microbatches=4, recompute=selective),
        case("gpt_tied", pp=2, num_microbatches=2, recompute=away),
    ]
    check(cases, 2)


def test_interleaved_pipelines_equal_the_model() -> None:
    plan = {"pp": 2, "num_chunks": 2, "schedule": "interleaved"}
    cases = [
        case("gpt_tied", num_microbatches=4, **plan),
        case("gpt", num_microbatches=2, first_calls=[1, 3, 4], recompute=full, **plan),
        case("llama", num_microbatches=4, recompute=selective, **plan),
        case("gpt2", num_microbatches=1, **plan),
        case("gpt", pp=2, num_microbatches=1, schedule="gpipe"),
        case("gpt", pp=2, num_microbatches=4, schedule="zero_bubble"),
        case("llama", pp=2, num_chunks=3, schedule="interleaved", num_microbatches=3),
    ]
    check(cases, 2)


def test_pipelines_under_every_zero_stage_equal_the_model() -> None:
    cases = [
        case("gpt_tied", pp=2, dp=2, zero_stage=zero, num_microbatches=3, recompute=selective)
        for zero in range(4)
    ]
    cases += [case("gpt2", pp=4, num_microbatches=4)]
    plan = {"pp": 2, "dp": 2, "num_chunks": 2, "schedule": "interleaved", "num_microbatches": 4}
    cases += [case("gpt_tied", zero_stage=zero, **plan) for zero in range(4)]
    host = {"zero_stage": 3, "num_microbatches": 2, "offload": "optimizer"}
    cases += [case("gpt_tied", pp=2, dp=2, **host)]
    check(cases, 4)


def test_tensor_parallel_layouts_equal_the_model() -> None:
    cases = [
        case(model, tp=2, num_microbatches=2, layouts=megatron, recompute=recompute)
        for model, recompute in (
            ("gpt_tied", None),
            ("gpt_split", selective),
            ("llama", selective),
            ("gpt2", full),
        )
    ]
    cases += [
        case("gpt_tied", tp=2, layouts=functools.partial(scattered, seed=seed), recompute=selective)
        for seed in range(2)
    ]
    check(cases, 2)


def test_tensor_parallel_under_every_zero_stage_equals_the_model() -> None:
    cases = [
        case("gpt_tied", tp=2, dp=2, zero_stage=zero, num_microbatches=2, layouts=megatron)
        for zero in range(4)
    ]
    check([*cases, case("gpt2", tp=2, dp=2, zero_stage=3, layouts=megatron)], 4)


def test_hybrid_sharding_equals_the_model() -> None:
    replicas = {"dp": 4, "dp_replicate": 2}
    cases = [
        case("gpt_tied", zero_stage=zero, num_microbatches=2, recompute=selective, **replicas)
        for zero in (1, 2, 3)
    ]
    check([*cases, case("gpt2", zero_stage=3, **replicas)], 4)


def test_a_pipeline_inside_the_data_parallel_axis_equals_the_model() -> None:
    inside = {"dp": 2, "pp": 2, "num_microbatches": 2, "axis_order": "tp-pp-dp"}
    check([case("gpt_tied", zero_stage=zero, **inside) for zero in (0, 3)], 4)


def test_three_dimensions_equal_the_model() -> None:
    plan = {"pp": 2, "dp": 2, "tp": 2, "num_microbatches": 2, "layouts": megatron}
    check([case("gpt_tied", zero_stage=z, recompute=selective, **plan) for z in (1, 3)], 8)


def _run(name: str, plan: Plan, rows: int) -> float:
    model, loss = build(name)
    batch = global_batch(rows)
    module = parallelize(plan, model, global_batch(ROWS), loss, device="cpu")
    return float(module.train_step(batch))


def _error(rank: int, name: str, plan: Plan, rows: int) -> str:
    """Return the error that running a plan ends with."""
    try:
        _run(name, plan, rows)
    except (ValueError, PlanError, EmitError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_another_model_is_refused_on_every_rank() -> None:
    plan = hand_plan(program_of("gpt"), "GPT", dp=2)
    for message in run_workers(_error, 2, "gpt_split", plan, ROWS):
        assert "PlanError: the plan is for another model" in message
        assert "a shape, a constant or an op differs" in message


def test_the_first_difference_is_named() -> None:
    plan = hand_plan(program_of("gpt"), "GPT", recompute=Recompute(mode="selective", keep=("v9",)))
    (message,) = run_workers(_error, 1, "gpt_tied", plan, ROWS)
    assert "blocks.0 has no op v9, which the plan keeps" in message


def test_another_world_size_is_refused_with_the_numbers() -> None:
    plan = hand_plan(program_of("gpt"), "GPT", dp=4)
    for message in run_workers(_error, 2, "gpt", plan, ROWS):
        assert "for 4 processes (dp=4 tp=1 pp=1) and 2 are running" in message


def test_a_batch_of_another_size_is_refused() -> None:
    plan = hand_plan(program_of("gpt"), "GPT", num_microbatches=3)
    (message,) = run_workers(_error, 1, "gpt", plan, ROWS)
    assert "ValueError: this rank's batch has 2 rows in ['input_ids'], it must have 6" in message


def _unlike(rank: int, plan: Plan) -> str:
    return _error(rank, "gpt" if rank == 0 else "gpt_split", plan, ROWS)


def test_one_rank_with_another_model_stops_every_rank() -> None:
    plan = hand_plan(program_of("gpt"), "GPT", dp=2)
    first, second = run_workers(_unlike, 2, plan)
    assert "EmitError: rank 1 cannot run the plan: PlanError" in first
    assert second.startswith("PlanError")


def _fail_in_a_step(rank: int, plan: Plan) -> None:
    model, loss = build("gpt")
    module = parallelize(plan, model, global_batch(ROWS), loss, device="cpu")
    module.train_step(global_batch(2 * ROWS))
    if rank == 1:
        raise ArithmeticError("told to fail")
    module.train_step(global_batch(2 * ROWS))


def test_a_rank_that_fails_between_steps_ends_the_run_with_its_error() -> None:
    plan = hand_plan(program_of("gpt"), "GPT", pp=2, num_microbatches=2)
    with pytest.raises(AssertionError, match=r"rank 1 failed first:(.|\n)*told to fail"):
        run_workers(_fail_in_a_step, 2, plan, timeout_s=60)


def _code(rank: int, plan: Plan) -> str:
    model, loss = build("gpt")
    return parallelize(plan, model, global_batch(ROWS), loss, device="cpu").code()


def test_code_shows_what_a_stage_runs() -> None:
    plan = hand_plan(program_of("gpt"), "GPT", pp=2, num_microbatches=2)
    first, second = run_workers(_code, 2, plan)
    assert "aten.embedding.default(" in first
    assert "def stage0(call, side, " in first
    assert "step_mean_cross_entropy_loss(" in second


def _dropout_losses(rank: int, plan: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return loss and gradient norm without and with recompute, from one seed."""
    config = GPTConfig(num_layers=2, vocab_size=64, width=32, num_heads=4, dropout=0.2)
    found = []
    for mark in (None, full, selective):
        torch.manual_seed(3)
        model = GPT(config).double()
        batch = batch_like(config, 4 * plan.get("dp", 1), 16)
        program = capture(model, batch, loss_fn, microbatch_size=2)
        arguments = dict(plan)
        if arguments.get("tp", 1) > 1:
            arguments["layouts"] = megatron(program, arguments["tp"])
        recompute = None if mark is None else mark(program)
        written = hand_plan(program, "GPT", num_microbatches=2, recompute=recompute, **arguments)
        module = parallelize(written, model, batch, loss_fn, device="cpu")
        loss = module.train_step(module.shard_batch(batch))
        found.append((float(loss), float(module.clip_grad_norm_(1e9))))
    return found


@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero_stage": 3}])
def test_recompute_draws_the_same_dropout_again(plan: Mapping[str, Any]) -> None:
    for first, *others in run_workers(_dropout_losses, 2, plan):
        assert others == [first, first]


class _Probe(nn.Module):
    """Linear layers, of which some are frozen."""

    def __init__(self, frozen: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(4))
        for index in frozen:
            self.layers[index].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def _probe_errors(rank: int, runs: Sequence[tuple[Sequence[int], Program, Plan]]) -> list[float]:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    errors = []
    for frozen, program, plan in runs:
        alone = _Probe(frozen)
        alone(batch).backward()
        expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        with unittest.mock.patch("autoplan.recapture.capture", return_value=program):
            module = parallelize(plan, _Probe(frozen), batch, lambda out: out, device="cpu")
        module.train_step(module.shard_batch(batch))
        gradients = module.full_gradients()
        assert gradients.keys() == expected.keys(), (frozen, plan.schedule)
        errors += [float((gradients[n] - g).abs().max()) for n, g in expected.items()]
    return errors


def test_stages_that_are_frozen_whole_leave_the_others_their_gradients() -> None:
    schedules: tuple[Literal["1f1b", "gpipe", "zero_bubble"], ...] = (
        "1f1b",
        "gpipe",
        "zero_bubble",
    )
    runs = []
    for frozen in ((0, 1), (2, 3)):
        program = capture(_Probe(frozen), torch.randn(2, 6).double(), lambda out: out)
        for schedule in schedules:
            plan = hand_plan(
                program, "_Probe", pp=2, num_microbatches=4, schedule=schedule, first_calls=[2]
            )
            runs.append((frozen, program, plan))
    for errors in run_workers(_probe_errors, 2, runs):
        assert max(errors) < 1e-12
