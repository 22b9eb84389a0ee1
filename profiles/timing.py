"""Median times of torch functions on one device, within a time budget. Imports torch lazily."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Stopwatch"]

MAX_REPEATS = 15
MIN_REPEATS = 3
SLOW_SLICES = 4  # a call that lasts longer than so many slices is not repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times functions on a device.

    Attributes:
        device: a `torch.device`; on CUDA the time is that between two events.
        slice_s: seconds that the repeats of one measurement should take.
    """

    device: Any
    slice_s: float

    def median_s(self, run: Callable[[], object], *, calls: int = 1) -> float:
        """Return the median seconds of one call, over repeats of `calls` calls each.

        The first call warms up and tells how many repeats the slice allows: 3 to 15, and a single
        one of a call that is longer than four slices.
        """
        run()
        once_s = self._once_s(run, calls)
        repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(self.slice_s / max(once_s, 1e-9))))
        if once_s > SLOW_SLICES * self.slice_s:
            repeats = 0
        times = [once_s, *(self._once_s(run, calls) for _ in range(repeats))]
        return max(statistics.median(times) / calls, 1e-9)

    def _once_s(self, run: Callable[[], object], calls: int) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            return time.perf_counter() - begin
        import torch

        cuda: Any = torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize(self.device)
        first.record()
        for _ in range(calls):
            run()
        last.record()
        cuda.synchronize(self.device)
        return float(first.elapsed_time(last)) * 1e-3
