"""The time that measuring may take, shared out over its parts; what a point costs is seen before.

A machine that does other work too takes longer over everything, also over what is done once. So a
part gets its share of what is left, not of what there was, and no point begins that would end late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from autoplan.profiles.stopping import is_stopped

__all__ = ["Budget", "Clock", "Deadline"]

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a part of measuring ends.

    Attributes:
        ends_s: by the clock.
        clock: seconds that only grow; where several ranks measure together, the same on all.
    """

    ends_s: float
    clock: Clock = time.monotonic

    @property
    def left_s(self) -> float:
        """Return the seconds until then, 0 after it."""
        return max(0.0, self.ends_s - self.clock())

    def slice_s(self, num_points: int) -> float:
        """Return the seconds of each of so many points."""
        return self.left_s / num_points

    def points(self, points: Iterable[T], *, least: int = 1) -> Iterator[T]:
        """Yield points while one that takes as long as the longest so far still ends in time.

        Args:
            points: most informative first.
            least: so many are measured in any case, also where somebody stops.
        """
        longest_s = 0.0
        for index, point in enumerate(points):
            begin_s = self.clock()
            if index >= least and (is_stopped() or begin_s + longest_s > self.ends_s):
                return
            yield point
            longest_s = max(longest_s, self.clock() - begin_s)


@dataclass(slots=True, kw_only=True)
class Budget:
    """Seconds from now on, shared out part by part.

    Attributes:
        seconds: of all parts, above 0.
        shares: sum of the shares of the parts that are still to come.
        clock: of the time that passes, whatever the machine does with it.
    """

    seconds: float
    shares: float = 1.0
    clock: Clock = time.monotonic
    _begun_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun_s = self.clock()

    @property
    def spent(self) -> float:
        """Return the part of the seconds that has passed, above 1 after all."""
        return (self.clock() - self._begun_s) / self.seconds

    def part(self, share: float) -> Deadline:
        """Return when the next part ends.

        What earlier parts took too much is missing to all that come, and what they left is theirs.

        Args:
            share: of all seconds, in units of the sum of all shares.
        """
        now_s = self.clock()
        left_s = max(0.0, self._begun_s + self.seconds - now_s)
        portion = min(1.0, share / max(self.shares, share))
        self.shares -= share
        return Deadline(ends_s=now_s + portion * left_s, clock=self.clock)
