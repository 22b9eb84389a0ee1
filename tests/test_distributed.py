from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_workers


def _sum_of_ranks(rank: int, scale: int) -> float:
    value = torch.tensor([rank * scale], dtype=torch.float64)
    dist.all_reduce(value)
    return float(value)


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("told to fail")
    dist.barrier()


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def _sleep(rank: int) -> None:
    time.sleep(60)


def test_workers_share_a_group_and_return_their_results() -> None:
    assert run_workers(_sum_of_ranks, 2, 10) == [10.0, 10.0]


def test_the_first_failing_rank_is_named() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed first:(.|\n)*told to fail"):
        run_workers(_fail_on_one, 2)


def test_a_rank_that_dies_silently_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"exit codes|failed first"):
        run_workers(_die_on_one, 2)


def test_a_hanging_launch_is_killed_at_its_limit() -> None:
    with pytest.raises(AssertionError, match="still run after"):
        run_workers(_sleep, 2, timeout_s=1)
