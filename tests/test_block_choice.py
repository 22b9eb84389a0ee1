"""What the search thinks that a block costs is what it is priced at."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch

from autoplan.block_choice import ChoiceModel
from autoplan.graph import BlockTrace
from autoplan.planner import Planner, make_planner
from autoplan.search.frontier import whole_frontier
from autoplan.tensor_layout import Border, Borders
from autoplan.training_job import TrainingJob
from tests.models import MODELS, TOKENS

TICK_S = 1e-9


def planner_of(name: str) -> Planner:
    """Return the planning problem of a small model on devices whose collectives are dear."""
    ids = torch.zeros(8, TOKENS, dtype=torch.long)
    batch = {"labels": ids, "ids" if name.startswith("gpt_") else "input_ids": ids}
    return make_planner(
        TrainingJob(MODELS[name](), "1x4:h100_sxm_80gb", batch, mixed_precision="none")
    )


def num_roundings(block: BlockTrace) -> int:
    """Return ticks by which the search may be above the price: one for each of its costs."""
    return 4 * (len(block.ops) + len(block.states) + len(block.inputs))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_repeated_keys"])
@pytest.mark.parametrize("borders", product(get_args(Border), repeat=2), ids=str)
def test_times_of_a_frontier_without_recomputation_are_the_prices_of_its_decisions(
    name: str, borders: Borders
) -> None:
    pricer = planner_of(name).pricer(1)
    for degree in (2, 4):
        for index, block in enumerate(pricer.trace.blocks):
            model = ChoiceModel(
                block,
                pricer.layouts.timer(degree),
                pricer.layouts.whole_states(index),
                region=False,
            )
            fixed = model.fixed[model.nearest(borders)]
            points = whole_frontier(model.problem, fixed=fixed)
            assert points, block.name
            for point in points[:: max(1, len(points) // 4)]:
                base = pricer.base(index, model.read(point, borders), degree)
                price_s = base.forward_s + base.backward_s + base.summed_s
                rounded_s = num_roundings(block) * TICK_S
                assert price_s <= point.time * TICK_S <= price_s + rounded_s, (block.name, point)
