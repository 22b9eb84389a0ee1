"""What blocks agree on: borders, and how parameters that several calls share lie."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from autoplan.conventions import WHOLE, Convention
from autoplan.costs import Pricer
from autoplan.framework_configs import framework_config
from autoplan.optimizing import find_plan
from autoplan.plan import Plan
from autoplan.planner import Planner, make_planner
from autoplan.training_job import TrainingJob
from autoplan.verifier import verify_plan
from examples.gpt import GPT, GPTConfig, loss_fn
from tests.models_for_tests import TinyGPT, mean_square


class Inner(nn.Module):
    """Two products with an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class Repeated(nn.Module):
    """One block that is called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.inner(x)
        return x


def planner_of(model: nn.Module, batch: torch.Tensor, **pins: int) -> Planner:
    """Return the planning problem on four GPUs."""
    pins = {"microbatch_size": 1, **pins}
    return make_planner(
        TrainingJob(model, "1x4:h100_sxm_80gb", batch, loss_fn=mean_square), pins=pins
    )


def sliced(pricer: Pricer, degree: int) -> Iterator[set[str]]:
    """Yield the placements of shared states under each convention with whole borders."""
    for convention in pricer.conventions(degree):
        if not convention.is_sequence_parallel:
            yield {placement for _, _, placement in convention.slices}


def test_a_tied_weight_is_whole_or_sliced_along_a_dimension_that_the_degree_divides() -> None:
    pricer = planner_of(TinyGPT(), torch.zeros(4, 16, dtype=torch.long)).pricer(1)
    assert pricer.conventions(1) == (WHOLE,)
    assert list(sliced(pricer, 2)) == [set(), {"S(1)"}, {"S(0)"}]
    assert list(sliced(pricer, 4)) == [set(), {"S(1)"}]  # a vocabulary of 50


def test_without_shared_parameters_borders_are_all_there_is_to_agree_on() -> None:
    model = TinyGPT()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    pricer = planner_of(model, torch.zeros(4, 16, dtype=torch.long)).pricer(1)
    assert pricer.conventions(2) == (WHOLE, Convention(is_sequence_parallel=True))


def test_a_block_that_is_called_again_keeps_the_slices_of_its_fastest_decision() -> None:
    with torch.device("meta"):
        model, batch = Repeated(), torch.zeros(4, 2048, 1024)
    pricer = planner_of(model, batch).pricer(1)
    for convention in pricer.conventions(2)[2:]:
        for block in {call.block for call in pricer.trace.calls[:4]}:
            up, up_bias, down, _ = (state.name for state in pricer.trace.blocks[block].states)
            slices = dict(convention.of(block))
            assert (slices[up], slices[up_bias], slices[down]) == ("S(0)", "S(0)", "S(1)")
    assert len(pricer.conventions(2)) > 2


def test_every_decision_under_a_convention_stores_shared_states_as_it_says() -> None:
    pricer = planner_of(TinyGPT(), torch.zeros(4, 16, dtype=torch.long)).pricer(1)
    for convention in pricer.conventions(2):
        for block in range(len(pricer.trace.blocks)):
            shared = pricer.layouts.whole_states(block)
            wanted = dict.fromkeys(shared, "R") | dict(convention.of(block))
            for decision in pricer.decisions(block, 2, convention):
                stored = pricer.base(block, decision, 2).local.state_placements
                assert {name: stored[name] for name in wanted} == wanted


@functools.cache
def tied_plan() -> tuple[Planner, Plan]:
    """Return a problem whose fastest plan slices the tied weight, and that plan."""
    config = GPTConfig(vocab_size=65536, max_tokens=1024, num_layers=2, num_heads=16, width=1024)
    with torch.device("meta"):
        model = GPT(config).bfloat16()
        batch = {"input_ids": torch.zeros(4, 1024, dtype=torch.long)}
    pins = {"tp": 4, "microbatch_size": 1}
    planner = make_planner(
        TrainingJob(model, "1x4:h100_sxm_80gb", batch, loss_fn=loss_fn), pins=pins
    )
    return planner, find_plan(planner, compare=False)


def test_a_large_tied_weight_is_sliced_and_the_plan_says_so() -> None:
    planner, plan = tied_plan()
    stored = {text for own in plan.placements.values() for text in own.parameters.values()}
    assert "S(0)" in stored
    assert "one parameter, in slices S(0): tokens.weight = head.weight" in plan.report()
    assert Plan.from_json(plan.to_json()) == replace(plan, attached=None, question=None)
    flags = framework_config(plan, "megatron")
    assert "--untie-embeddings-and-output-weights" not in flags.text
    assert not any("shared parameters" in line for line in flags.missing)
    assert verify_plan(plan, planner.trace(1), planner.cluster) == ()


def test_calls_that_store_one_parameter_differently_break_a_rule() -> None:
    planner, plan = tied_plan()
    (name, layout) = next(
        (name, own) for name, own in plan.placements.items() if "S(0)" in own.parameters.values()
    )
    whole = dict.fromkeys(layout.parameters, "R")
    placements = {**plan.placements, name: replace(layout, parameters=whole)}
    broken = replace(plan, placements=placements)
    (found,) = verify_plan(broken, planner.trace(1), planner.cluster)
    assert found.rule == "V8"
    assert "one parameter, stored as" in found.message


def test_the_choice_never_makes_the_optimum_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.zeros(4, 16, dtype=torch.long)
    free = find_plan(planner_of(TinyGPT(), batch, tp=2), compare=False)

    def none(*_: object) -> Iterator[tuple[tuple[int, str, str], ...]]:
        return iter(())

    monkeypatch.setattr("autoplan.conventions.shared_slices", none)
    bound = find_plan(planner_of(TinyGPT(), batch, tp=2), compare=False)
    assert free.predicted.step_time_s <= bound.predicted.step_time_s
    assert free.search.status == bound.search.status == "optimal"
