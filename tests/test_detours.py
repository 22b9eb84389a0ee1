"""Where blocks hand over in another way than their stage: where it gains, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from autoplan.cluster import Cluster
from autoplan.conventions import WHOLE
from autoplan.costs import Pricer
from autoplan.detours import gaining_ways, hands_to_alike
from autoplan.graph import Trace
from autoplan.models import LoadedModel, load_model
from autoplan.optimizing import find_plan
from autoplan.plan import Plan
from autoplan.planner import Planner, make_planner
from autoplan.tensor_layout import Border
from autoplan.training_job import TrainingJob
from autoplan.verifier import verify_plan
from tests.models import MODELS, TOKENS

WAYS: tuple[Border, ...] = ("whole", "tokens", "features")


def sums(entering: list[list[float]], leaving: list[list[float]]) -> NDArray[np.float64]:
    """Return costs that are the sum of what either end takes, [way, price] each."""
    first = np.asarray(entering, dtype=np.float64)[:, None, :]
    return np.add(first, np.asarray(leaving, dtype=np.float64)[None, :, :])


def test_no_detour_gains_where_one_way_is_best_at_every_price() -> None:
    ends = [[50.0, 90.0], [48.0, 80.0], [55.0, 85.0]]
    assert gaining_ways(WAYS, sums(ends, ends)) == {}


def test_ways_that_are_best_at_different_prices_are_mixed() -> None:
    ends = [[48.0, 90.0], [50.0, 80.0], [55.0, 95.0]]
    assert gaining_ways(WAYS, sums(ends, ends)) == {"whole": ("tokens",), "tokens": ("whole",)}


def test_a_way_that_is_cheap_to_enter_and_to_leave_gains() -> None:
    costs = np.full((3, 3, 2), 100.0)
    costs[0, 2] = costs[2, 0] = 90.0
    assert gaining_ways(WAYS, costs) == {"whole": ("features",)}
    costs[2, 0] = 110.0
    assert gaining_ways(WAYS, costs) == {}


def trace_of(name: str) -> Trace:
    ids = torch.zeros(2, TOKENS, dtype=torch.long)
    batch = {"labels": ids, "ids" if name.startswith("gpt_") else "input_ids": ids}
    return make_planner(TrainingJob(MODELS[name](), "1x2:cpu", batch)).trace(1)


def test_alike_blocks_in_a_row_hand_on_to_each_other_only() -> None:
    trace = trace_of("gpt2")
    blocks = [call.block for call in trace.calls]
    row = max(set(blocks), key=blocks.count)
    assert [b for b in sorted(set(blocks)) if hands_to_alike(trace, b)] == [row]
    first = blocks.index(row)
    last = trace.calls[-1]
    also = replace(last, args=(*last.args, trace.calls[first].outs[0]))
    assert not hands_to_alike(replace(trace, calls=(*trace.calls[:-1], also)), row)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("gpt2", seq=None)


@pytest.fixture(scope="module")
def traces() -> dict[int, Trace]:
    return {}


def problem(loaded: LoadedModel, traces: dict[int, Trace], memory: str) -> Planner:
    """Return GPT-2 over eight ranks, which twelve heads do not divide by."""
    planner = make_planner(
        TrainingJob(
            loaded.model,
            Cluster.parse("1x8:a100_sxm_80gb").with_memory(memory),
            loaded.batch,
            global_batch_size=8,
            loss_fn=loaded.loss_fn,
        ),
        pins={"tp": 8, "pp": 1, "microbatch_size": 1},
        workers=1,
    )
    planner.traces.captured = traces
    return planner


def is_mixed(plan: Plan) -> bool:
    return len({layout.borders for layout in plan.placements.values()}) > 1


def test_plans_with_detours_are_never_slower_and_fit(
    loaded: LoadedModel, traces: dict[int, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory lies where blocks are faster whole, and leaner in slices of tokens."""
    gains = []
    for memory in ("2.92GiB", "2.94GiB"):
        planner = problem(loaded, traces, memory)
        plan = find_plan(planner, 60.0, None, False)
        assert verify_plan(plan, planner.traces.exact(1), planner.cluster) == ()
        with monkeypatch.context() as patched:
            patched.setattr(Pricer, "detours", lambda *_: ())
            plain = find_plan(problem(loaded, traces, memory), 60.0, None, False)
        assert not is_mixed(plain)
        assert plan.search.status == plain.search.status == "optimal"
        assert plan.search.objective_s <= plain.search.objective_s
        if is_mixed(plan):
            gains.append(plain.search.objective_s / plan.search.objective_s - 1)
    assert max(gains) > 0.005


def test_the_bound_of_a_block_counts_the_ends_of_a_detour_as_their_mean(
    loaded: LoadedModel, traces: dict[int, Trace]
) -> None:
    pricer = problem(loaded, traces, "4GiB").pricer(1)
    blocks = [call.block for call in pricer.trace.calls]
    row = max(set(blocks), key=blocks.count)
    assert pricer.detours(row, 8, WHOLE) == ("tokens", "features")
    bound = pricer.fastest_s(row, 8, WHOLE)
    for detour in pricer.detour_decisions(row, 8, WHOLE):
        for own in (detour.first, detour.inner, detour.last):
            assert len({decision.borders for decision in own}) == 1
        seconds = {
            decision.borders: work.forward_s + work.backward_s + work.summed_s
            for decision in (detour.first[0], detour.inner[0], detour.last[0])
            for work in (pricer.base(row, decision, 8),)
        }
        (first, inner, last) = seconds.values()
        assert bound <= min(inner, (first + last) / 2)


def test_a_class_that_is_best_in_slices_of_tokens_makes_no_detour() -> None:
    llama = load_model("llama3-8b", seq=4096)
    planner = make_planner(
        TrainingJob(
            llama.model,
            "1x8:h100_sxm_80gb",
            llama.batch,
            global_batch_size=8,
            loss_fn=llama.loss_fn,
        ),
        pins={"microbatch_size": 1},
        workers=1,
    )
    pricer = planner.pricer(1)
    for block in range(len(pricer.trace.blocks)):
        for convention in pricer.conventions(8):
            assert pricer.detours(block, 8, convention) == ()
    solved = {borders for _, _, borders, _ in pricer._decisions}
    assert solved <= {("whole", "whole"), ("tokens", "tokens")}
