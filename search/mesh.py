"""Level 3: the best setting of the mesh, by best-first branch and bound over candidates.

A candidate is anything with a cheap lower bound of its objective and a way to solve it. The search
takes the candidate of the least bound, first refines its bound if it can, then solves it with the
best objective so far as a cutoff. It ends when no open bound is below that objective:

    minimise   over candidates c    objective(c)            ties: the smaller key
    bound      min(objective of the best, least bound of a candidate that is not settled)

A candidate with a smaller key than the best one's still gets the chance to tie, so its cutoff is
one tick above. Every candidate ends with an outcome that says why it is not the answer.
"""

from __future__ import annotations

import heapq
import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoplan.search.agenda import Agenda
from autoplan.search.ahead import Crew
from autoplan.search.candidates import Candidate, Key, Refinement
from autoplan.search.problem import PipelineSolution, Status

__all__ = ["MeshResult", "Outcome", "OutcomeKind", "Progress", "search_settings"]

OutcomeKind = Literal["best", "slower", "cut", "infeasible", "unexplored"]

_ALONE_S = 0.1  # a shorter search needs no workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a candidate is or is not the answer.

    Attributes:
        kind: "best"; "slower": solved, `objective` is known; "cut": proven to be no better than the
            best, `bound` says how far; "infeasible": `reason` says why; "unexplored": the search
            ended first, the candidate may hold a solution anywhere from `bound` up.
        objective: ticks of the candidate's own solution; None without one.
        bound: ticks; proven for this candidate.
        solution: the candidate's own solution; None without one.
        wall_time_s: seconds spent in refinements and `solve`.
    """

    name: str
    key: Key
    kind: OutcomeKind
    objective: int | None
    bound: int
    reason: str
    solution: PipelineSolution | None
    wall_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the search stands: candidates settled and open, best objective, proven bound."""

    num_settled: int
    num_open: int
    best_name: str | None
    objective: int | None
    bound: int
    wall_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshResult:
    """The answer of the search.

    Attributes:
        status: "optimal": proven; "feasible": ended early with a solution; "infeasible": no
            candidate has a solution, or none below the cutoff; "unknown": ended early without one.
        best_name: of the winning candidate; None without a solution.
        solution: of the winning candidate; None without a solution.
        objective: ticks; None without a solution.
        bound: ticks; no candidate has a solution below it.
        outcomes: one per candidate, in the order given.
        is_interrupted: Ctrl-C or `should_stop` ended the search.
        num_refined: calls of refinements.
        num_solved: calls of `solve`.
        decoded: what `Candidate.decode` of the winner gives; None without a solution.
        wall_time_s: seconds of the whole search.
    """

    status: Status
    best_name: str | None
    solution: PipelineSolution | None
    objective: int | None
    bound: int
    outcomes: tuple[Outcome, ...]
    is_interrupted: bool
    num_refined: int
    num_solved: int
    wall_time_s: float
    decoded: Any = None

    @property
    def gap(self) -> float | None:
        """Return (objective - bound) / objective, 0.0 if proven, None without a solution."""
        if self.objective is None:
            return None
        return (self.objective - self.bound) / self.objective if self.objective else 0.0

    def count(self, kind: OutcomeKind) -> int:
        """Return the number of candidates with this kind of outcome."""
        return sum(outcome.kind == kind for outcome in self.outcomes)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """What is known of one candidate.

    `is_settled`: it is the best, or proven not to be. `is_exhausted`: more is not to be learned.
    """

    candidate: Candidate
    bound: int
    slice_s: float
    num_refined: int = 0
    is_settled: bool = False
    is_exhausted: bool = False
    infeasible: str | None = None
    solution: PipelineSolution | None = None
    wall_time_s: float = 0.0


class _MeshSearch:
    """The state of one search."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        time_limit_s: float,
        slice_s: float,
        workers: int = 1,
        cutoff: int | None = None,
    ):
        self.candidates = candidates
        self.cutoff = cutoff
        self.workers = min(workers, len(candidates))
        self.crew: Crew | None = None
        self.started = clock.monotonic()
        self.deadline = self.started + time_limit_s
        self.entries = [
            _Entry(
                candidate=candidate,
                bound=candidate.lower_bound,
                slice_s=slice_s,
                is_settled=candidate.infeasible is not None,
                infeasible=candidate.infeasible,
            )
            for candidate in candidates
        ]
        self.best: _Entry | None = None
        self.num_refined = 0
        self.num_solved = 0
        self.queue: list[tuple[int, Key, int]] = []
        for index, entry in enumerate(self.entries):
            if not entry.is_settled:
                self.push(index)

    def push(self, index: int) -> None:
        """Put a candidate in line by its bound, then by its key."""
        entry = self.entries[index]
        heapq.heappush(self.queue, (entry.bound, entry.candidate.key, index))

    @property
    def objective(self) -> int | None:
        """Return the best objective so far."""
        if self.best is None or self.best.solution is None:
            return None
        return self.best.solution.objective

    @property
    def to_beat(self) -> int | None:
        """Return the objective of the best candidate, before there is one the search's cutoff."""
        return self.cutoff if self.objective is None else self.objective

    def cutoff_of(self, entry: _Entry) -> int | None:
        """Return the objective that a candidate must stay below to become the best."""
        if self.best is None or self.objective is None:
            return self.cutoff
        return self.objective + (entry.candidate.key < self.best.candidate.key)

    def bound(self) -> int:
        """Return the proven bound of the whole search."""
        bounds = [entry.bound for entry in self.entries if not entry.is_settled]
        if self.to_beat is not None:
            bounds.append(self.to_beat)
        return min(bounds, default=0)

    def step(self) -> None:
        """Refine, solve or settle the candidate of the least bound."""
        _, _, index = heapq.heappop(self.queue)
        entry = self.entries[index]
        cutoff = self.cutoff_of(entry)
        if cutoff is not None and entry.bound >= cutoff:
            entry.is_settled = True
            return
        started = clock.monotonic()
        try:
            if entry.num_refined < len(entry.candidate.refinements):
                self.refine(index, entry)
            else:
                self.solve(index, entry, cutoff)
        finally:
            entry.wall_time_s += clock.monotonic() - started
            if not entry.is_settled and not entry.is_exhausted:
                self.push(index)

    def call(self, index: int, task: str, *arguments: Any) -> Any:
        """Return what a task of a candidate gives, here or by a worker."""
        if self.crew is None and self.workers > 1 and self.is_long():
            self.crew = Crew(self.candidates, self.workers, self.agenda())
        if self.crew is None:
            return self.candidates[index].call(task, *arguments)
        return self.crew.call(index, task, *arguments)

    def is_long(self) -> bool:
        """Return whether the search has taken so long that processes of its own are worth it."""
        return clock.monotonic() - self.started > _ALONE_S

    def agenda(self) -> Agenda:
        """Return the refinements that are left, as far as the search has come."""
        agenda = Agenda(self.candidates, self.is_open)
        for index, entry in enumerate(self.entries):
            if self.is_open(index, entry.bound):
                agenda.begin(index, entry.bound, entry.num_refined)
        return agenda

    def is_open(self, index: int, bound: int) -> bool:
        """Return whether a candidate may still win, if its objective is as low as a bound."""
        entry = self.entries[index]
        cutoff = self.cutoff_of(entry)
        return not entry.is_settled and (cutoff is None or bound < cutoff)

    def end(self) -> None:
        """End the workers."""
        if self.crew is not None:
            self.crew.end()
            self.crew, self.workers = None, 1

    def refine(self, index: int, entry: _Entry) -> None:
        """Tighten the bound of a candidate, or learn that it cannot be."""
        self.num_refined += 1
        refinement: Refinement = self.call(index, "refine", entry.num_refined)
        entry.num_refined += 1
        entry.bound = max(entry.bound, refinement.bound)
        if refinement.infeasible is not None:
            entry.infeasible = refinement.infeasible
            entry.is_settled = True

    def solve(self, index: int, entry: _Entry, cutoff: int | None) -> None:
        """Solve a candidate for its share of the time, and keep it if it is the best."""
        self.num_solved += 1
        left_s = max(self.deadline - clock.monotonic(), 0.0)
        solution: PipelineSolution = self.call(index, "solve", cutoff, min(entry.slice_s, left_s))
        entry.slice_s *= 2
        if solution.status == "infeasible":
            entry.is_settled = True
            if cutoff is None:
                entry.infeasible = entry.candidate.reason_without
            else:
                entry.bound = max(entry.bound, cutoff)
            return
        entry.bound = max(entry.bound, solution.bound)
        entry.is_exhausted = solution.is_final
        if solution.status == "unknown":
            return
        if entry.solution is None or solution.objective < entry.solution.objective:
            entry.solution = solution
        if cutoff is None or solution.objective < cutoff:
            self.best = entry
        entry.is_settled = solution.status == "optimal"

    def progress(self) -> Progress:
        """Return where the search stands."""
        num_settled = sum(entry.is_settled for entry in self.entries)
        return Progress(
            num_settled=num_settled,
            num_open=len(self.entries) - num_settled,
            best_name=None if self.best is None else self.best.candidate.name,
            objective=self.objective,
            bound=self.bound(),
            wall_time_s=clock.monotonic() - self.started,
        )

    def result(self, is_interrupted: bool) -> MeshResult:
        """Return the answer as far as it is known."""
        for entry in self.entries:
            cutoff = self.cutoff_of(entry)
            if cutoff is not None and entry.bound >= cutoff:
                entry.is_settled = True
        is_proven = all(entry.is_settled or entry is self.best for entry in self.entries)
        if self.best is None:
            status: Status = "infeasible" if is_proven else "unknown"
        else:
            status = "optimal" if self.bound() == self.objective else "feasible"
        return MeshResult(
            status=status,
            best_name=None if self.best is None else self.best.candidate.name,
            solution=None if self.best is None else self.best.solution,
            objective=self.objective,
            bound=self.bound(),
            outcomes=tuple(self.outcome(entry) for entry in self.entries),
            is_interrupted=is_interrupted,
            num_refined=self.num_refined,
            num_solved=self.num_solved,
            decoded=self.decoded(),
            wall_time_s=clock.monotonic() - self.started,
        )

    def decoded(self) -> Any:
        """Return what the best solution means to the caller, None without one."""
        if self.best is None:
            return None
        index = next(i for i, entry in enumerate(self.entries) if entry is self.best)
        return self.call(index, "decode", self.best.solution)

    def outcome(self, entry: _Entry) -> Outcome:
        """Return why a candidate is or is not the answer."""
        kind, reason = self.kind_of(entry)
        return Outcome(
            name=entry.candidate.name,
            key=entry.candidate.key,
            kind=kind,
            objective=None if entry.solution is None else entry.solution.objective,
            bound=entry.bound,
            reason=reason,
            solution=entry.solution,
            wall_time_s=entry.wall_time_s,
        )

    def kind_of(self, entry: _Entry) -> tuple[OutcomeKind, str]:
        """Return the kind of a candidate's outcome and the reason in words."""
        if entry is self.best:
            return "best", "the fastest setting that was found"
        if entry.infeasible is not None:
            return "infeasible", entry.infeasible
        if not entry.is_settled:
            if entry.is_exhausted:
                return "unexplored", "what was found is not faster, its bound is"
            return "unexplored", "the search ended before this setting was settled"
        assert self.to_beat is not None, "settled without a solution, but not infeasible"
        if entry.solution is not None:
            return "slower", _slower_by(entry.solution.objective, self.to_beat, "it is")
        return "cut", _slower_by(entry.bound, self.to_beat, "it is at least")


def search_settings(
    candidates: Sequence[Candidate],
    *,
    time_limit_s: float,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
    first_slice_s: float = 10.0,
    workers: int = 1,
    cutoff: int | None = None,
) -> MeshResult:
    """Return the candidate of least objective, and why every other one is not it.

    Args:
        candidates: the settings; their keys must differ.
        time_limit_s: wall-clock seconds; at the limit the best so far is the answer, with its gap.
        should_stop: asked between solves; True ends the search as the time limit does.
        progress: told after every step.
        first_slice_s: seconds that one candidate may take before the others get their turn; it
            comes back with twice as much.
        workers: processes that may work ahead; the steps of the search and its result are the same
            with any number.
        cutoff: ticks; only a candidate below it is wanted, as if it were the objective of another.

    Returns:
        The result; time-out and infeasibility are statuses, not errors.

    Raises:
        ValueError: if two candidates have the same key.
        KeyboardInterrupt: on Ctrl-C before any solution was found; after that Ctrl-C ends the
            search as the time limit does.
    """
    if len({candidate.key for candidate in candidates}) != len(candidates):
        raise ValueError("two candidates have the same key: keys break ties, so make them differ")
    search = _MeshSearch(candidates, time_limit_s, first_slice_s, workers, cutoff)
    is_interrupted = False
    try:
        while search.queue and clock.monotonic() < search.deadline:
            if should_stop is not None and should_stop():
                is_interrupted = True
                break
            search.step()
            if progress is not None:
                progress(search.progress())
        return search.result(is_interrupted)
    except KeyboardInterrupt:
        search.end()  # what a worker is at may take long
        if search.best is None:
            raise
        return search.result(True)
    finally:
        search.end()


def _slower_by(value: int, best: int, subject: str) -> str:
    """Return in words by how much a candidate is slower."""
    if value <= best:
        return f"{subject} as slow as the best, which is simpler"
    return f"{subject} {100 * (value - best) / max(best, 1):.2f} % slower than the best"
