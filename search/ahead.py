"""Refine and solve candidates in forked processes, ahead of the search that asks for them.

The search takes its steps in one order, whatever the number of workers: what it asks for next is
computed before it asks, where that can be foreseen. A refinement depends on its candidate only, so
it is the same whoever computes it and when; solutions depend on the best objective so far, and are
computed when they are asked for. Candidates of one group share what was computed for them, so a
worker rather goes on with a group than begins one that another has begun, where both are about as
urgent.
"""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from autoplan.search.agenda import Agenda
from autoplan.search.candidates import Candidate
from autoplan.search.forks import Forked, first_to_answer

__all__ = ["Crew"]

_BEGUN_BY_ANOTHER = 1.01  # by how much more urgent a group must be, to be begun a second time

# What is done for a candidate: its index, the task's name and arguments.
Task = tuple[int, str, tuple[Any, ...]]


@dataclass(slots=True)
class _Worker:
    forked: Forked
    groups: set[Hashable] = field(default_factory=set)
    task: Task | None = None


class Crew:
    """Forked processes that work for a search.

    Args:
        candidates: what the tasks are about.
        size: number of processes.
        agenda: the refinements that will probably be asked for.
    """

    def __init__(self, candidates: Sequence[Candidate], size: int, agenda: Agenda):
        self._candidates = candidates
        self._agenda = agenda
        self._workers = [_Worker(Forked(self._serve)) for _ in range(size)]
        self._done: dict[Task, Any] = {}

    def call(self, index: int, task: str, *arguments: Any) -> Any:
        """Return what a task of a candidate gives, once its worker has it.

        Raises:
            Exception: what the task raised.
        """
        wanted: Task = (index, task, arguments)
        while wanted not in self._done and self._workers:
            try:
                self._keep_busy(wanted)
                self._hear()
            except (EOFError, OSError):
                self._disband()
        if wanted not in self._done:
            return self._candidates[index].call(task, *arguments)
        is_done, answer = self._done.pop(wanted)
        if not is_done:
            raise answer
        return answer

    def end(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.forked.end()
        self._workers = []

    def _keep_busy(self, wanted: Task) -> None:
        """Give every idle worker something to do, what is wanted first."""
        if wanted not in [worker.task for worker in self._workers]:
            worker = self._idle_for(self._group(wanted[0]))
            if worker is not None:
                self._give(worker, wanted)
        for worker in self._workers:
            if worker.task is not None:
                continue
            found = self._agenda.next(partial(self._handicap, worker))
            if found is None:
                return
            index, level = found
            self._give(worker, (index, "refine", (level,)))

    def _group(self, index: int) -> Hashable:
        return self._candidates[index].group

    def _idle_for(self, group: Hashable) -> _Worker | None:
        """Return an idle worker, rather one that has begun with a group."""
        idle = [worker for worker in self._workers if worker.task is None]
        return min(idle, key=lambda one: (group not in one.groups, len(one.groups)), default=None)

    def _handicap(self, worker: _Worker, group: Hashable) -> float:
        """Return the factor on bounds of a group that a worker would have to begin with."""
        if group in worker.groups:
            return 1.0
        others = any(group in one.groups for one in self._workers)
        return _BEGUN_BY_ANOTHER if others else 1.0

    def _give(self, worker: _Worker, task: Task) -> None:
        index, name, arguments = task
        if name == "refine":
            self._agenda.take(index, arguments[0])
        worker.groups.add(self._group(index))
        worker.task = task
        worker.forked.connection.send(task)

    def _hear(self) -> None:
        """Wait until a worker has something, and take it."""
        busy = [worker for worker in self._workers if worker.task is not None]
        heard = first_to_answer([worker.forked for worker in busy])
        for worker in busy:
            if worker.forked in heard and worker.task is not None:
                self._take_answer(worker.task, worker.forked.connection.recv())
                worker.task = None

    def _take_answer(self, task: Task, answer: tuple[bool, Any]) -> None:
        self._done[task] = answer
        index, name, arguments = task
        if name == "refine" and answer[0]:
            self._agenda.learn(index, arguments[0], answer[1])

    def _disband(self) -> None:
        """Go on alone."""
        codes = [worker.forked.end() for worker in self._workers]
        self._workers = []
        warnings.warn(
            f"a worker process of the search ended or stood still (exit codes {codes}; -9 is often "
            "a lack of memory); the search goes on in one process",
            RuntimeWarning,
            stacklevel=2,
        )

    def _serve(self, pipe: Connection) -> None:
        while True:
            index, task, arguments = pipe.recv()
            pipe.send_bytes(_answer(self._candidates[index], task, arguments))


def _answer(candidate: Candidate, task: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((True, candidate.call(task, *arguments)))
    except Exception as error:  # raised again where the search asks for it
        error.add_note("".join(traceback.format_exception(error)))
        try:
            return pickle.dumps((False, error))
        except Exception:  # an error that does not pickle is told in words
            return pickle.dumps((False, RuntimeError("\n".join(error.__notes__))))
