"""Inputs that rotate, so that what is timed comes from memory and not from a warm cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["CACHE_BYTES", "num_copies", "rotating"]

T = TypeVar("T")

CACHE_BYTES = {"cpu": 2**26, "cuda": 2**27}  # at least the last-level cache of large devices
MOST_COPIES = 8


def num_copies(device: Any, nbytes: int) -> int:
    """Return how many sets of inputs of `nbytes` together pass the cache, 1 to 8."""
    return max(1, min(MOST_COPIES, -(-CACHE_BYTES[device.type] // max(1, nbytes))))


def rotating(
    device: Any, nbytes: int, make: Callable[[], T], run: Callable[[T], object]
) -> Callable[[], object]:
    """Return a function that runs on one set of inputs after the other.

    Args:
        device: a `torch.device`.
        nbytes: of one set.
        make: gives a new set.
        run: what is timed.
    """
    turn = itertools.cycle([make() for _ in range(num_copies(device, nbytes))])
    return lambda: run(next(turn))
