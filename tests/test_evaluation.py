"""Evaluating a parallel module equals evaluating the user's own, for any shape of batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoplan.alike_programs import alike_axes, assign_calls
from autoplan.capturer import capture, capture_outputs
from autoplan.emitter import parallelize
from autoplan.errors import EmitError
from autoplan.plan import Plan
from autoplan.sharding import check_axes, shard_options
from autoplan.stages import slice_program
from tests.distributed import run_workers
from tests.layouts import megatron
from tests.numerics import build, global_batch, program_of
from tests.plans import hand_plan
from tests.reported_models import Dropouts

TOLERANCE = 1e-11
SHAPES = ((3, 7),)  # rows and tokens; trained with 2 and 16


def tokens(rows: int, length: int) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(rows))


def expected(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return per shape output and loss of the user's own model in eval mode."""
    model, loss = build(name)
    model.eval()
    found = []
    with torch.no_grad():
        for shape in SHAPES:
            batch = {"input_ids": tokens(*shape)}
            output = model(**batch)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            found.append((logits, loss(output, batch)))
    return found


def _evaluate(rank: int, name: str, plan: Plan) -> list[str]:
    """Return what differs between the parallel module and the user's own."""
    model, loss = build(name)
    module = parallelize(plan, model, global_batch(2), loss, device="cpu")
    problems = []
    rows = plan.microbatch_size * plan.num_microbatches
    first = module.train_step(global_batch(rows))
    for parameter in module.parameters():
        parameter.grad = None
    module.eval()
    is_last = module.mesh is None or module.mesh.get_local_rank("pp") == plan.mesh.pp - 1
    for shape, (logits, value) in zip(SHAPES, expected(name), strict=True):
        batch = {"input_ids": tokens(*shape)}
        with torch.no_grad():
            output = module(**batch)
        if is_last:
            output = output if isinstance(output, torch.Tensor) else output.logits
            if (output - logits).abs().max() > TOLERANCE:
                problems.append(f"output of {shape}: {(output - logits).abs().max():.1e}")
        elif output is not None:
            problems.append("a stage before the last has an output")
        error = abs(float(module.eval_step(batch)) - float(value))
        if error > TOLERANCE:
            problems.append(f"loss of {shape}: {error:.1e}")
    module.train()
    if name == "gpt" and float(module.train_step(global_batch(rows))) != float(first):
        problems.append("evaluation changed what the next step trains")
    return problems


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero": ("gpt", {"dp": 2, "zero_stage": 1}),
    "tp": ("llama", {"tp": 2}),
    "pp": ("gpt_dropout", {"pp": 2, "num_microbatches": 2}),
    "interleaved": (
        "gpt",
        {"pp": 2, "num_chunks": 2, "schedule": "interleaved", "num_microbatches": 2},
    ),
}


def plan_of(name: str, options: dict[str, Any]) -> Plan:
    """Return a plan; with tensor parallelism Megatron's."""
    program = program_of(name)
    layouts = megatron(program, options["tp"]) if "tp" in options else None
    return hand_plan(program, type(build(name)[0]).__name__, layouts=layouts, **options)


def _evaluate_all(rank: int, plans: dict[str, tuple[str, Plan]]) -> list[str]:
    return [
        f"{key}: {problem}"
        for key, (name, plan) in plans.items()
        for problem in _evaluate(rank, name, plan)
    ]


def test_evaluation_equals_that_of_the_users_model() -> None:
    plans = {key: (name, plan_of(name, options)) for key, (name, options) in PLANS.items()}
    assert run_workers(_evaluate_all, 2, plans, timeout_s=240) == [[], []]


EVAL_LOSS = 21.7821407  # of `Dropouts` without dropout, worked out on one device


def dropouts() -> Dropouts:
    """Return the model with its own weights."""
    torch.manual_seed(0)
    return Dropouts()


def _reported_loss(rank: int, plan: Plan) -> float:
    batch = Dropouts.batch()
    module = parallelize(plan, dropouts(), batch, Dropouts.loss, device="cpu")
    with pytest.raises(EmitError, match="call eval"):
        module.eval_step(batch)
    module.eval()
    with pytest.raises(EmitError, match="no_grad"):
        module(batch)
    with pytest.raises(ValueError, match="call train"):
        module.train_step(batch)
    return float(module.eval_step(batch))


def test_dropout_of_recomputed_layers_is_off_in_evaluation() -> None:
    program = capture(dropouts(), Dropouts.batch(), Dropouts.loss)
    plan = hand_plan(program, "Dropouts", tp=2, layouts=megatron(program, 2))
    for value in run_workers(_reported_loss, 2, plan):
        assert value == pytest.approx(EVAL_LOSS, rel=1e-6)


def test_calls_of_evaluation_stay_on_the_stages_of_their_states() -> None:
    trained = program_of("gpt")
    model, _ = build("gpt")
    program, _ = capture_outputs(model.eval(), {"input_ids": tokens(1, 5)})
    stages = slice_program(trained, [[0, 1], list(range(2, len(trained.calls)))])
    cuts = assign_calls(program, trained, stages)
    assert [program.calls[i].fqn for i in cuts[0]] == ["", "blocks.0"]
    with pytest.raises(EmitError, match="stage 1 has nothing to run"):
        assign_calls(program, trained, [*slice_program(trained, [[0, 1, 2, 3, 4, 5]]), stages[0]])


def test_axes_go_over_to_a_graph_of_another_length() -> None:
    trained = program_of("llama")
    model, _ = build("llama")
    program, _ = capture_outputs(model.eval(), {"input_ids": tokens(3, 7)})
    before = next(g for g in trained.graphs if not g.is_glue)
    after = next(g for g in program.graphs if not g.is_glue)
    axes = megatron(trained, 2)[before.name].axes
    options = shard_options(after)
    found = alike_axes(before, axes, after, options)
    assert len(found) == len(axes)
    check_axes(after, options, found, 2)
