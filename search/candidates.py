"""What a search over candidates knows of one: bounds, how to solve it, which others are like it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from autoplan.search.problem import PipelineSolution

__all__ = ["NOTHING_FITS", "Candidate", "Key", "Refinement"]

Key = tuple[int, ...]

NOTHING_FITS = "no cut and choice of options fits the memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """A tighter look at a candidate: a lower bound in ticks, or why it cannot be."""

    bound: int = 0
    infeasible: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setting of the mesh.

    Attributes:
        name: for reports.
        key: order of simplicity, unique; of equally fast settings the smaller key wins.
        lower_bound: ticks; no solution of the candidate is below it.
        solve: `(cutoff, time_limit_s)` -> solution, with the statuses of `solve_pipeline`.
        refinements: each gives a tighter bound or a reason why the setting cannot be; cheap first,
            each is called at most once.
        infeasible: reason why the setting cannot be, if that is known from the start.
        reason_without: what to say where `solve` finds no solution at all.
        group: of candidates that share what is computed for them.
        decode: what a solution of the candidate means to the caller.
    """

    name: str
    key: Key
    lower_bound: int
    solve: Callable[[int | None, float], PipelineSolution]
    refinements: tuple[Callable[[], Refinement], ...] = ()
    infeasible: str | None = None
    reason_without: str = NOTHING_FITS
    group: Hashable = None
    decode: Callable[[PipelineSolution], Any] = lambda solution: None

    def call(self, task: str, *arguments: Any) -> Any:
        """Return what one of `refine` (by its index), `solve` and `decode` gives."""
        if task == "refine":
            return self.refinements[arguments[0]]()
        return (self.solve if task == "solve" else self.decode)(*arguments)
