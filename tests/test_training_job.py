"""What planning and pricing have in common: the same arguments, checked once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autoplan
from autoplan.training_job import TrainingJob
from tests.models_for_tests import LinearChain, mean_square

BATCH = torch.zeros(8, 16)
JOB = inspect.signature(TrainingJob).parameters


@pytest.mark.parametrize("function", [autoplan.optimize, autoplan.estimate])
def test_planning_and_pricing_list_the_arguments_of_a_job(function: Callable[..., Any]) -> None:
    """Pricing offloads one thing or nothing, where a plan may choose among several."""
    own = inspect.signature(function).parameters
    for name, parameter in JOB.items():
        if (function, name) != (autoplan.estimate, "offload"):
            assert own[name] == parameter
    assert list(own)[: len(JOB) - 1] == list(JOB)[:-1]


@pytest.mark.parametrize("function", [autoplan.optimize, autoplan.estimate])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0; it must be at least 1"),
        ({"optimizer": "Muonn"}, "Muonn"),
        ({"mixed_precision": "half"}, "mixed_precision='half'; allowed are auto, none, bfloat16"),
        ({"autocast": torch.float16}, "loses small gradients without a GradScaler"),
        ({"cluster": "1x2:abacus"}, "abacus"),
    ],
)
def test_planning_and_pricing_refuse_the_same_arguments(
    function: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"cluster": "1x2:cpu", "loss_fn": mean_square, **options}
    model = LinearChain(width=16, depth=2)
    with pytest.raises((ValueError, autoplan.AutoplanError), match=message):
        function(model, batch=BATCH, **given)


def test_the_rows_of_a_job_are_those_of_its_batch_unless_it_says_more() -> None:
    model = LinearChain(width=16, depth=2)
    for given, rows in ((None, 8), (32, 32)):
        job = TrainingJob(model, "1x2:cpu", BATCH, global_batch_size=given)
        assert job.workload(job.devices(), job.example()).global_batch_size == rows
