"""No test reads what was measured on this machine, or leaves a process group to those after it."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run two at once; torch reads it when imported

import pytest
import torch.distributed as dist

from autoplan.profiles.op_times import CACHE_VARIABLE

os.environ[CACHE_VARIABLE] = "off"


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail the test that leaves one: processes forked from here could make none of their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group")
