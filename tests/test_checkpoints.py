"""Checkpoints of one plan resume under another with the losses of never stopping."""

from __future__ import annotations

import dataclasses
import os
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autoplan import checkpoints
from autoplan.chunks import chunked
from autoplan.emitter import parallelize
from autoplan.errors import EmitError
from autoplan.models import LoadedModel
from autoplan.plan import Plan
from autoplan.runtime import ParallelModule
from autoplan.training import train
from tests.distributed import run_workers
from tests.layouts import megatron, sliced_ties
from tests.numerics import build, global_batch, program_of
from tests.plans import hand_plan

ROWS = 4
STEPS = 2


def plan_of(name: str, **arguments: Any) -> Plan:
    """Return a plan for a global batch of four rows; over tp=2 the tied weight lies in slices."""
    program = program_of(name, 1)
    model, _ = build(name)
    tp = arguments.get("tp", 1)
    layouts = megatron(program, tp) if tp > 1 else {}
    if tp == 2:
        layouts |= sliced_ties(program, tp)
    count = ROWS // int(arguments.get("dp", 1))
    return hand_plan(
        program, type(model).__name__, num_microbatches=count, layouts=layouts, **arguments
    )


def make(name: str, plan: Plan) -> tuple[ParallelModule, torch.optim.Optimizer]:
    """Return the module and its optimizer."""
    model, loss = build(name)
    with unittest.mock.patch("autoplan.recapture.capture", return_value=program_of(name, 1)):
        module = parallelize(plan, model, global_batch(1), loss, device="cpu")
    # A large eps: key biases have gradients that are zero but for rounding.
    return module, torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3)


def steps(
    module: ParallelModule, optimizer: torch.optim.Optimizer, first: int, count: int
) -> list[float]:
    """Train and return the losses; the batch of a step depends on its number."""
    losses = []
    for step in range(first, first + count):
        batch = {k: v.roll(step, 1) for k, v in global_batch(ROWS).items()}
        losses.append(float(module.train_step(module.shard_batch(batch))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _chain(rank: int, name: str, plans: list[Plan], folder: str) -> list[float]:
    """Train a few steps under each plan, a checkpoint in between; return all losses."""
    losses: list[float] = []
    for number, plan in enumerate(plans):
        module, optimizer = make(name, plan)
        if number:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            done = module.load_checkpoint(folder, optimizer)
            assert done == {"steps": len(losses)}
        losses += steps(module, optimizer, len(losses), STEPS)
        module.save_checkpoint(folder, optimizer, extra={"steps": len(losses)})
    return losses


def _straight(rank: int, name: str, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    module, optimizer = make(name, plan_of(name))
    return steps(module, optimizer, 0, count), module.full_state()


CHAINS = {
    # The fused projection of gpt_tied and gpt2 is stored in three pieces under tp.
    ("gpt_tied", 2): [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero_stage": 3}, {"dp": 2}],
    # FSDP stores a parameter without a dimension as one with one.
    ("gpt_scaled", 2): [{"dp": 2, "zero_stage": 3}, {"pp": 2}, {"dp": 2, "zero_stage": 1}],
    ("gpt2", 4): [
        {"dp": 2, "tp": 2, "zero_stage": 3},
        {"dp": 4, "dp_replicate": 2, "zero_stage": 3},
        {"pp": 2, "dp": 2, "zero_stage": 1},
        {"pp": 2, "tp": 2},
        {"tp": 4},
    ],
}


@pytest.mark.parametrize("key", CHAINS, ids=str)
def test_training_resumes_under_other_plans_as_if_it_never_stopped(
    key: tuple[str, int], tmp_path: Path
) -> None:
    name, world_size = key
    plans = [plan_of(name, **arguments) for arguments in CHAINS[key]]
    layouts = [own for plan in plans for own in plan.placements.values()]
    heads = {own.parameters.get(f"{n}.weight", "R") for own in layouts for n in ("head", "lm_head")}
    assert (heads != {"R"}) is any("tp" in own for own in CHAINS[key]), "no tied weight in slices"
    folder = str(tmp_path / "checkpoint")
    found = run_workers(_chain, world_size, name, plans, folder)
    ((expected, state),) = run_workers(_straight, 1, name, STEPS * len(plans))
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-9)
    model = checkpoints.read_model(folder)
    plain, _ = build(name)
    assert set(model) == {n for n, _ in plain.named_parameters()} | {
        n for n, _ in plain.named_buffers() if n in plain.state_dict()
    }
    for fqn, tensor in model.items():
        assert tensor.shape == state[fqn].shape == plain.get_parameter(fqn).shape
        torch.testing.assert_close(tensor, state[fqn], rtol=1e-9, atol=1e-9)
    checkpoints.export_safetensors(folder, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[fqn], tensor) for fqn, tensor in model.items())
    plain.load_state_dict(exported, strict=False)
    assert all(torch.equal(t, exported[n]) for n, t in plain.named_parameters())


def _train(rank: int, plan: Plan, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Return the losses of three steps at once, of two, and of resuming for the third."""

    def run(count: int, checkpoint: Path | None) -> list[float]:
        model, loss = build("gpt")
        loaded = LoadedModel(model=model, batch=global_batch(1), loss_fn=loss, name="gpt")
        return list(train(plan, loaded, count, checkpoint=checkpoint).losses)

    return run(3, None), run(2, Path(folder)), run(3, Path(folder))


def test_the_training_loop_resumes_at_the_step_it_saved(tmp_path: Path) -> None:
    plan = plan_of("gpt", dp=2, zero_stage=2)
    for straight, first, rest in run_workers(_train, 2, plan, str(tmp_path / "checkpoint")):
        assert len(rest) == 1
        assert [*first, *rest] == pytest.approx(straight, rel=1e-9)


def test_an_interrupted_save_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "checkpoint"
    checkpoints.save({"model.a": torch.ones(3), "extra": 1}, target)

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(EmitError, match=r"no space left(.|\n)*still there"):
            checkpoints.save({"model.a": torch.zeros(3), "extra": 2}, target)
    assert torch.equal(checkpoints.read_model(target)["a"], torch.ones(3))
    # Killed between the two renames.
    target.rename(target.with_name("checkpoint.last"))
    assert torch.equal(checkpoints.read_model(target)["a"], torch.ones(3))
    checkpoints.save({"model.a": torch.zeros(3), "extra": 2}, target)
    assert torch.equal(checkpoints.read_model(target)["a"], torch.zeros(3))


def _load(rank: int, name: str, folder: str) -> str:
    module, optimizer = make(name, plan_of(name))
    try:
        module.load_checkpoint(folder, optimizer)
    except EmitError as error:
        return str(error)
    return "no error"


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    (message,) = run_workers(_load, 1, "gpt", folder)
    assert "holds no checkpoint" in message
    run_workers(_chain, 1, "gpt2", [plan_of("gpt2")], folder)
    (message,) = run_workers(_load, 1, "gpt", folder)
    assert "has no model.tokens.weight" in message or "another model" in message


def _resume_with_dropout(rank: int, plan: Plan, other: Plan, folder: str) -> dict[str, Any]:
    """Return losses after a checkpoint, of going on and of resuming, and draws under `other`."""
    module, optimizer = make("gpt_dropout", plan)
    steps(module, optimizer, 0, STEPS)
    module.save_checkpoint(folder, optimizer)
    straight = steps(module, optimizer, STEPS, STEPS)
    module, optimizer = make("gpt_dropout", plan)
    torch.manual_seed(77 + rank)
    module.load_checkpoint(folder, optimizer)
    resumed = steps(module, optimizer, STEPS, STEPS)
    module, optimizer = make("gpt_dropout", other)
    draws = []
    for _ in range(2):
        torch.manual_seed(78 + rank)
        module.load_checkpoint(folder, optimizer)
        draws.append(float(torch.rand(())))
    return {"straight": straight, "resumed": resumed, "draws": draws}


def test_a_resumed_plan_draws_the_dropout_that_it_would_have_drawn(tmp_path: Path) -> None:
    plan, other = plan_of("gpt_dropout", dp=2, zero_stage=1), plan_of("gpt_dropout", pp=2)
    folder = str(tmp_path / "checkpoint")
    first, second = run_workers(_resume_with_dropout, 2, plan, other, folder)
    for found in (first, second):
        assert found["resumed"] == found["straight"]
        assert found["draws"][0] == found["draws"][1]
    # Stages of a pipeline draw differently.
    assert first["draws"][0] != second["draws"][0]


def test_a_plain_tensor_is_one_chunk() -> None:
    found = chunked(torch.arange(6).view(2, 3))
    assert found.shape == (2, 3)
    (chunk,) = found.chunks
    assert dataclasses.astuple(chunk)[0] == (0, 0)
