"""A small twin of a model trains under the decisions of its plan, and equals one device."""

from __future__ import annotations

import unittest.mock
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autoplan import codec
from autoplan.capturer import capture
from autoplan.dry_run_result import TwinRun
from autoplan.models import LoadedModel
from autoplan.plan import Mesh, Plan, Recompute
from autoplan.program import Program
from autoplan.twin_steps import Step, captured_twin, compare_step, within_own_error
from autoplan.twins import run_twins, shrink, twin_degrees, twin_dtypes, twin_plan
from examples.gpt import loss_fn
from tests.distributed import run_workers
from tests.layouts import megatron, sliced_ties
from tests.numerics import build, global_batch, program_of
from tests.plans import hand_plan


def large() -> LoadedModel:
    """Return a Llama without weights whose plan is for 64 processes."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=8, attention_dropout=0.1,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.empty((1, 32), dtype=torch.int64, device="meta")
    return LoadedModel(
        model=model, batch={"input_ids": tokens, "labels": tokens}, loss_fn=None, name="llama"
    )


def _run(rank: int, plan: Plan, twin: LoadedModel) -> TwinRun:
    return compare_step(plan, twin)


def test_the_twin_of_a_large_plan_equals_one_device() -> None:
    loaded = large()
    program = capture(loaded.model, loaded.batch, microbatch_size=1)
    plan = hand_plan(
        program, "Llama", dp=2, tp=8, pp=1, zero_stage=3, layouts=megatron(program, 8),
        recompute=Recompute(mode="full"),
    )  # fmt: skip
    twin = shrink(loaded)
    small = capture(twin.model, twin.batch, microbatch_size=2)
    made = twin_plan(plan, program, small, Mesh(dp=1, tp=2, pp=1))
    blocks = [b for s in made.stages for b in s.blocks if b.fqn]
    assert len(blocks) == 4
    assert all(made.placements[b.placements].axes for b in blocks)
    assert {made.recompute[b.recompute].mode for b in blocks} == {"full"}
    for found in run_workers(_run, 2, made, twin):
        assert found.is_equal, found
        assert found.loss_error < 1e-6


def _run_all(rank: int, runs: list[tuple[Plan, LoadedModel, Program]]) -> list[TwinRun]:
    """Run twins whose programs are there: eight processes would capture each again."""
    found = []
    for plan, twin, program in runs:
        with (
            unittest.mock.patch("autoplan.recapture.capture", return_value=program),
            unittest.mock.patch("autoplan.twin_steps.capture", return_value=program),
        ):
            found.append(compare_step(plan, twin))
    return found


def test_twins_have_the_replicas_the_stages_a_rank_and_the_precision_of_the_plan() -> None:
    model, loss = build("gpt_tied")
    loaded = LoadedModel(model=model, batch=global_batch(2), loss_fn=loss, name="gpt")
    program = program_of("gpt_tied")
    plan = hand_plan(
        program, "GPT", dp=8, dp_replicate=4, pp=2, num_chunks=2, zero_stage=3,
        schedule="interleaved", num_microbatches=4, recompute=Recompute(mode="full"),
        mixed_precision="bfloat16",
    )  # fmt: skip
    (mesh,) = twin_degrees(plan.mesh)
    assert mesh == Mesh(dp=4, tp=1, pp=2, dp_replicate=2)
    runs = []
    for dtype in twin_dtypes(plan):
        twin = shrink(loaded, dtype)
        is_exact = dtype == torch.float64
        small = captured_twin(twin)
        made = twin_plan(plan, program, small, mesh, is_exact=is_exact)
        assert (made.schedule, made.num_chunks, made.zero_stage) == ("interleaved", 2, 3)
        runs.append((made, twin, small))
    assert [made.mixed_precision for made, *_ in runs] == ["none", "bfloat16"]
    exact, rounded = run_workers(_run_all, mesh.world_size, runs)[0]
    assert exact.is_equal, exact
    assert exact.tolerance == 1e-9
    assert rounded.is_equal, rounded
    assert 1e-4 < rounded.gradient_error < rounded.tolerance < 0.5


def test_every_twin_has_the_program_of_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = build("gpt")
    loaded = LoadedModel(model=model, batch=global_batch(2), loss_fn=loss, name="gpt")
    layouts = megatron(program_of("gpt"), 2)
    plan = hand_plan(
        program_of("gpt"), "GPT", dp=2, tp=2, pp=2, num_microbatches=2, layouts=layouts,
        mixed_precision="bfloat16",
    )  # fmt: skip
    monkeypatch.setattr("autoplan.twins.captured_for", lambda *_: program_of("gpt"))
    fingerprints: dict[str, set[str]] = {"none": set(), "bfloat16": set()}

    def run(arguments: list[str], nproc: int, **_: Any) -> None:
        folder = Path(arguments[2])
        made = Plan.load(folder / "plan.json")
        fingerprints[made.mixed_precision].add(made.fingerprint)
        result = TwinRun(mesh="", loss_error=0.0, gradient_error=0.0, worst="", tolerance=1.0)
        (folder / "result.json").write_text(codec.dumps(result))

    monkeypatch.setattr("autoplan.twins.launch", run)
    assert len(run_twins(plan, loaded, "gpt")) == 6  # three pairs of degrees in two precisions
    assert [len(own) for own in fingerprints.values()] == [1, 1]


def test_a_loss_that_is_no_mean_over_rows_is_held_against_its_parts() -> None:
    model, _ = build("gpt")

    def balanced(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return loss_fn(logits, batch) + logits.mean().square()

    loaded = LoadedModel(model=model, batch=global_batch(2), loss_fn=balanced, name="gpt")
    twin = shrink(loaded)
    program = captured_twin(twin)
    plan = hand_plan(program, "GPT", dp=2, zero_stage=3, num_microbatches=2)
    (found, _) = run_workers(_run_all, 2, [(plan, twin, program)])
    assert found[0].is_equal, found
    assert found[0].mesh.endswith("beside one device in 4 parts")


def test_a_twin_is_interleaved_only_where_no_rank_reads_a_parameter_twice() -> None:
    program = program_of("gpt_tied")
    plan = hand_plan(program, "GPT", pp=2, num_chunks=2, schedule="interleaved", num_microbatches=4)
    tied = replace(program, aliases=dict.fromkeys(program.aliases, "tokens.weight"))
    made = twin_plan(plan, program, tied, Mesh(dp=1, tp=1, pp=2))
    assert (made.schedule, len(made.stages)) == ("1f1b", 2)


def test_stages_of_a_twin_store_a_shared_parameter_alike() -> None:
    program = program_of("gpt_tied")
    layouts = sliced_ties(program, 2)
    assert len(layouts) == 2

    def stored(*names: str) -> set[str]:
        own = {name: layouts[name] for name in names}
        plan = hand_plan(program, "GPT", tp=2, pp=2, num_microbatches=2, layouts=own)
        made = twin_plan(plan, program, program, Mesh(dp=1, tp=2, pp=2))
        return {
            text
            for layout in made.placements.values()
            for fqn, text in layout.parameters.items()
            if fqn == "head.weight"
        }

    assert stored(*layouts) == set()  # as all of them read it
    assert stored(next(iter(layouts))) == {"R"}


def test_a_gradient_is_wrong_beyond_what_rounding_does_to_one_device() -> None:
    true, alone = ({"w": torch.tensor([1.0, x])} for x in (2.0, 2.01))
    for value, is_right in ((2.03, True), (1.98, True), (4.0, False), (1.0, False)):
        got = Step(loss=1.0, gradients={"w": torch.tensor([1.0, value])})
        found = within_own_error("", got, Step(1.0, alone), Step(1.0, true))
        assert found.is_equal == is_right, found


def test_meshes_of_twins_split_what_the_plan_splits_on_four_processes() -> None:
    assert twin_degrees(Mesh(dp=64, tp=1, pp=4)) == [Mesh(dp=2, tp=1, pp=2)]
    assert twin_degrees(Mesh(dp=1, tp=8, pp=1)) == [Mesh(dp=1, tp=2, pp=1)]
    every = twin_degrees(Mesh(dp=64, tp=4, pp=4))
    assert every == [Mesh(dp=2, tp=2, pp=1), Mesh(dp=2, tp=1, pp=2), Mesh(dp=1, tp=2, pp=2)]


def test_a_run_is_equal_within_its_tolerance_only() -> None:
    run = TwinRun(mesh="", loss_error=1e-12, gradient_error=2e-9, worst="w", tolerance=1e-9)
    assert not run.is_equal
