"""What a search will probably ask for next, so that others can compute it before it asks.

A search refines the candidate of the least bound, so the next refinement of the candidate whose
bound will be least, by all that is known, is the most urgent. Candidates of one group share what is
computed for them, so there is a queue for each, and whoever asks may prefer some.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence

from autoplan.search.candidates import Candidate, Key, Refinement

__all__ = ["Agenda"]


class Agenda:
    """The refinements that nobody has taken yet, most urgent first.

    Args:
        candidates: what is refined.
        is_open: whether a candidate, by its index, may still win with this bound in ticks; one that
            may not never will again.
    """

    def __init__(self, candidates: Sequence[Candidate], is_open: Callable[[int, int], bool]):
        self._candidates = candidates
        self._is_open = is_open
        self._bounds = [candidate.lower_bound for candidate in candidates]
        self._taken: set[tuple[int, int]] = set()
        self._queues: dict[Hashable, list[tuple[int, Key, int, int]]] = {}

    def begin(self, index: int, bound: int, level: int) -> None:
        """Put a candidate in line, whose bound is known after some of its refinements."""
        self._bounds[index] = bound
        self._push(index, level)

    def take(self, index: int, level: int) -> None:
        """Say that a refinement is being computed, so that it is not asked for again."""
        self._taken.add((index, level))

    def learn(self, index: int, level: int, found: Refinement) -> None:
        """Put the next refinement of a candidate in line, now that this one is known."""
        self._bounds[index] = max(self._bounds[index], found.bound)
        if found.infeasible is None:
            self._push(index, level + 1)

    def next(self, handicap: Callable[[Hashable], float]) -> tuple[int, int] | None:
        """Return the candidate and level of the most urgent refinement, and take it.

        Args:
            handicap: the factor by which the bounds of a group count, for whoever asks; at least 1.

        Returns:
            The index and the level; None where there is none.
        """
        groups = [group for group in self._queues if self._has_any(group)]
        if not groups:
            return None
        least = min(groups, key=lambda group: self._urgency(group, handicap(group)))
        _, _, index, level = heapq.heappop(self._queues[least])
        self.take(index, level)
        return index, level

    def _urgency(self, group: Hashable, handicap: float) -> tuple[float, Key]:
        bound, key, *_ = self._queues[group][0]
        return bound * handicap, key

    def _push(self, index: int, level: int) -> None:
        candidate = self._candidates[index]
        if level < len(candidate.refinements):
            queue = self._queues.setdefault(candidate.group, [])
            heapq.heappush(queue, (self._bounds[index], candidate.key, index, level))

    def _has_any(self, group: Hashable) -> bool:
        """Drop what is taken or of no use from the head of a queue; return whether any is left."""
        queue = self._queues[group]
        while queue:
            bound, _, index, level = queue[0]
            if (index, level) not in self._taken and self._is_open(index, bound):
                return True
            heapq.heappop(queue)
        return False
