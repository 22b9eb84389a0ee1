"""Training on batches of another shape than the plan's equals one device, or is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from autoplan.emitter import parallelize
from autoplan.errors import EmitError
from autoplan.plan import Plan, Recompute
from tests.distributed import run_workers
from tests.layouts import megatron, scattered
from tests.numerics import ROWS, build, global_batch, program_of
from tests.plans import hand_plan

TOLERANCE = 1e-9
LENGTHS = ((16, 16), (10, 10), (6, 12), (16, 16))  # of rank 0 and rank 1, step by step


def tokens(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(64, (rows, length), generator=generator)}


def expected(name: str, batches: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients of one device: every predicted token counts alike."""
    model, loss = build(name)
    counts = [batch["input_ids"][:, 1:].numel() for batch in batches]
    total = sum(
        loss(model(batch["input_ids"]), batch) * count
        for batch, count in zip(batches, counts, strict=True)
    ) / sum(counts)
    assert isinstance(total, torch.Tensor)
    total.backward()  # type: ignore[no-untyped-call]
    return float(total), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def train(rank: int, name: str, plan: Plan) -> list[str]:
    """Train one step of each shape; returns what differs from one device."""
    model, loss = build(name)
    module = parallelize(plan, model, global_batch(ROWS), loss, device="cpu")
    rows = plan.microbatch_size * plan.num_microbatches
    problems = []
    for step, lengths in enumerate(LENGTHS):
        if plan.mesh.dp == 1 and len(set(lengths)) > 1:
            continue  # ranks of one data-parallel rank share their rows
        batches = [tokens(rows, lengths[i], 10 * step + i) for i in range(plan.mesh.dp)]
        wanted, gradients = expected(name, batches)
        for parameter in module.parameters():
            parameter.grad = None
        value = float(module.train_step(batches[rank % plan.mesh.dp]))
        if abs(value - wanted) > TOLERANCE * wanted:
            problems.append(f"step {step}: loss {value} is not {wanted}")
        for key, gradient in module.full_gradients().items():
            error = float((gradient - gradients[key]).norm() / (gradients[key].norm() + 1e-7))
            if error > TOLERANCE:
                problems.append(f"step {step}: gradient of {key} differs by {error:.1e}")
    return problems


def train_all(rank: int, plans: list[tuple[str, Plan]]) -> list[str]:
    """Train under each plan."""
    return [f"{plan.mesh}: {p}" for name, plan in plans for p in train(rank, name, plan)]


KEEP = Recompute(mode="full")
PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt", {"dp": 2}),
    ("llama", {"dp": 2, "zero_stage": 3, "recompute": KEEP}),
    ("llama", {"tp": 2}),
    ("gpt", {"tp": 2, "num_microbatches": 2}),
    ("gpt_tied", {"pp": 2, "num_microbatches": 2}),
    ("gpt", {"pp": 2, "num_chunks": 2, "schedule": "interleaved", "num_microbatches": 2}),
)


def plan_of(name: str, layouts: Any = megatron, **options: Any) -> Plan:
    """Return a plan for batches of 16 tokens."""
    program = program_of(name)
    if "tp" in options:
        options["layouts"] = layouts(program, options["tp"])
    return hand_plan(program, type(build(name)[0]).__name__, **options)


def test_other_lengths_train_as_on_one_device() -> None:
    plans = [(name, plan_of(name, **options)) for name, options in PLANS]
    assert run_workers(train_all, 2, plans, timeout_s=240) == [[], []]


def refused(rank: int, plan: Plan, batch: dict[str, torch.Tensor]) -> tuple[str, float, float]:
    """Return the error of a batch, and the losses of the planned one before and after it."""
    model, loss = build("gpt")
    module = parallelize(plan, model, global_batch(ROWS), loss, device="cpu")
    planned = tokens(plan.microbatch_size * plan.num_microbatches, 16, 1)
    before = float(module.train_step(planned))
    with pytest.raises((EmitError, ValueError)) as caught:
        module.train_step(batch)
    return f"{caught.typename}: {caught.value}", before, float(module.train_step(planned))


def test_a_length_that_a_layout_cannot_slice_is_refused_on_every_rank() -> None:
    plan = plan_of("gpt", lambda program, degree: scattered(program, degree, 1), tp=2)
    for message, before, after in run_workers(refused, 2, plan, tokens(ROWS, 9, 2)):
        assert "EmitError: the plan cannot run micro-batches of ['input_ids'] (2, 9)" in message
        assert "pad batches to a shape that can" in message
        assert before == after


def test_another_dtype_or_number_of_dimensions_is_refused_on_every_rank() -> None:
    plan = plan_of("gpt", pp=2, num_microbatches=2)
    rows = tokens(2 * ROWS, 16, 2)["input_ids"]
    for batch, got in ((rows.int(), "torch.int32 of 2"), (rows[:, :, None], "torch.int64 of 3")):
        for message, before, after in run_workers(refused, 2, plan, {"input_ids": batch}):
            assert f"ValueError: this rank's batch has {got} dimensions in ['input_ids']" in message
            assert "the plan was made for torch.int64 of 2: convert it" in message
            assert before == after


def left_of_another_stage(rank: int, plan: Plan) -> tuple[int, float]:
    """Return how many parameters of the other stage are still there, and a loss at a new length."""
    model, loss = build("gpt")
    own = {n: weakref.ref(p) for n, p in model.named_parameters()}
    module = parallelize(plan, model, global_batch(ROWS), loss, device="cpu")
    del model
    value = float(module.train_step(tokens(plan.num_microbatches * ROWS, 10, 1)))
    gc.collect()
    mine = {name for name, _ in module.named_parameters()}
    return sum(ref() is not None for n, ref in own.items() if n not in mine), value


def test_a_stage_lets_go_of_the_weights_of_others() -> None:
    plan = plan_of("gpt", pp=2, num_microbatches=2)
    (first, loss), (second, same) = run_workers(left_of_another_stage, 2, plan)
    assert (first, second) == (0, 0)
    assert loss == same
