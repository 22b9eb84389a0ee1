"""Workers change how long a search takes, and nothing else: not its answer, errors or remains."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.search import forks, mesh
from autoplan.search.agenda import Agenda
from autoplan.search.ahead import Crew
from autoplan.search.candidates import Candidate, Refinement
from autoplan.search.forks import Beside
from autoplan.search.mesh import MeshResult, search_settings
from autoplan.search.problem import PipelineSolution
from tests.search.profiles import few
from tests.search.test_mesh import known_solver

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork")

PARENT = os.getpid()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers start with the search, however short it is."""
    monkeypatch.setattr(mesh, "_ALONE_S", -1.0)


def candidate(
    key: int,
    bounds: Sequence[int],
    objective: int | None,
    *,
    refine: Callable[[], Refinement] | None = None,
    solve: Callable[[int | None, float], PipelineSolution] | None = None,
) -> Candidate:
    refinements = [partial(Refinement, bound=bound) for bound in bounds[1:]]
    return Candidate(
        name=f"c{key}",
        key=(key,),
        lower_bound=bounds[0],
        refinements=tuple(refinements) if refine is None else (refine,),
        solve=solve or known_solver(objective),
        group=key % 3,
        decode=partial(decoded, key),
    )


def decoded(key: int, solution: PipelineSolution) -> tuple[int, int]:
    return (key, solution.objective)


def timeless(result: MeshResult) -> MeshResult:
    outcomes = tuple(replace(outcome, wall_time_s=0.0) for outcome in result.outcomes)
    return replace(result, wall_time_s=0.0, outcomes=outcomes)


@st.composite
def candidates_drawn(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for key in range(draw(st.integers(2, 7))):
        bounds = sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)))
        slack = draw(st.none() | st.integers(0, 5))
        found.append(candidate(key, bounds, None if slack is None else bounds[-1] + slack))
    return found


@few
@given(candidates=candidates_drawn(), workers=st.integers(2, 3))
def test_a_search_takes_the_same_steps_with_any_number_of_workers(
    candidates: list[Candidate], workers: int
) -> None:
    alone = search_settings(candidates, time_limit_s=20)
    together = search_settings(candidates, time_limit_s=20, workers=workers)
    assert timeless(together) == timeless(alone)
    assert multiprocessing.active_children() == []


def test_refinements_are_computed_by_workers_and_once_each(tmp_path: Path) -> None:
    def refine(key: int) -> Refinement:
        with (tmp_path / "log").open("a") as log:
            log.write(f"{key} {os.getpid()}\n")
        return Refinement(bound=key)

    candidates = [candidate(k, [0], k, refine=partial(refine, k)) for k in range(6)]
    assert search_settings(candidates, time_limit_s=20, workers=2).best_name == "c0"
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    keys = [key for key, _ in lines]
    assert len(keys) == len(set(keys))
    assert str(PARENT) not in {pid for _, pid in lines}


class _NoPickleError(Exception):
    def __init__(self, why: str, lock: object):
        super().__init__(why, lock)


def _wrong() -> Refinement:
    raise ValueError("heads do not divide")


def _wrong_without_pickle() -> Refinement:
    raise _NoPickleError("heads do not divide", threading.Lock())


@pytest.mark.parametrize(
    ("refine", "kind"), [(_wrong, ValueError), (_wrong_without_pickle, RuntimeError)]
)
def test_an_error_of_a_worker_is_raised_by_the_search(
    refine: Callable[[], Refinement], kind: type[Exception]
) -> None:
    candidates = [candidate(0, [1], 1, refine=refine), candidate(1, [5], 5)]
    with pytest.raises(kind, match="heads do not divide") as caught:
        search_settings(candidates, time_limit_s=20, workers=2)
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert "test_ahead.py" in "".join(told)
    assert multiprocessing.active_children() == []


def test_an_error_that_the_search_does_not_come_to_is_not_raised() -> None:
    candidates = [candidate(0, [1], 1), candidate(1, [5], 5, refine=_wrong)]
    assert search_settings(candidates, time_limit_s=20, workers=2).best_name == "c0"


def test_a_search_goes_on_without_a_worker_that_was_killed() -> None:
    def refine() -> Refinement:
        if os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return Refinement(bound=3)

    candidates = [candidate(0, [1], 4, refine=refine), candidate(1, [5], 5)]
    with pytest.warns(RuntimeWarning, match=r"ended .*-9.* goes on in one process"):
        result = search_settings(candidates, time_limit_s=20, workers=2)
    assert (result.best_name, result.objective) == ("c0", 4)


def test_a_search_goes_on_without_workers_that_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refine() -> Refinement:
        if os.getpid() != PARENT:
            time.sleep(600)
        return Refinement(bound=3)

    monkeypatch.setattr(forks, "STANDSTILL_S", 0.2)
    candidates = [candidate(0, [1], 4, refine=refine), candidate(1, [5], 5)]
    with pytest.warns(RuntimeWarning, match="stood still"):
        result = search_settings(candidates, time_limit_s=20, workers=2)
    assert (result.best_name, result.objective) == ("c0", 4)


def test_ctrl_c_does_not_wait_for_a_worker() -> None:
    def solve(cutoff: int | None, time_limit_s: float) -> PipelineSolution:
        time.sleep(600)
        raise AssertionError("nobody waits so long")

    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            search_settings(
                [candidate(0, [1], None, solve=solve), candidate(1, [5], 5)],
                time_limit_s=20,
                workers=2,
            )
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert multiprocessing.active_children() == []


def test_a_function_runs_beside_and_here_where_its_process_fails() -> None:
    def here_only() -> int:
        if os.getpid() != PARENT:
            raise ValueError("not in a fork")
        return os.getpid()

    assert Beside(os.getpid).result() != PARENT
    assert Beside(here_only).result() == PARENT
    with pytest.warns(RuntimeWarning, match="done again in this one"):
        assert Beside(lambda: os.getpid() == PARENT or os._exit(3)).result() is True


def test_an_answer_outlives_its_process() -> None:
    beside = Beside(os.getpid)
    while multiprocessing.active_children():  # which reaps those that have ended
        time.sleep(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert beside.result() != PARENT


_ORPHAN = """
import os, signal, time
from autoplan.search.forks import Beside
waiting = Beside(lambda: time.sleep(600))
print(waiting._forked._process.pid, flush=True)
PAUSE
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("pause", ["", "time.sleep(0.3)"])
def test_workers_end_with_a_parent_that_was_killed(pause: str) -> None:
    program = _ORPHAN.replace("PAUSE", pause)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.wait()
    for _ in range(100):
        if not _is_alive(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the worker outlived its parent by 10 s")


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_crew_of_any_size_answers_what_is_asked() -> None:
    candidates = [candidate(key, [0, key], key) for key in range(5)]
    crew = Crew(candidates, 2, Agenda(candidates, lambda index, bound: True))
    try:
        answers = [crew.call(key, "refine", 0) for key in (3, 1, 4, 0, 2)]
    finally:
        crew.end()
    assert [answer.bound for answer in answers] == [3, 1, 4, 0, 2]


def alike(group: Hashable) -> float:
    return 1.0


def test_an_agenda_gives_each_open_refinement_once_and_the_least_bound_first() -> None:
    candidates = [candidate(key, [bound, bound + 3], 9) for key, bound in enumerate((4, 1, 6, 2))]
    agenda = Agenda(candidates, lambda index, bound: bound < 6)
    for index, own in enumerate(candidates):
        agenda.begin(index, own.lower_bound, 0)
    agenda.take(1, 0)
    assert agenda.next(alike) == (3, 0)
    assert agenda.next(alike) == (0, 0)
    assert agenda.next(alike) is None, "taken, or as slow as what is known"


def test_an_agenda_gives_a_group_that_is_preferred_if_it_is_about_as_urgent() -> None:
    candidates = [candidate(key, [bound], 900) for key, bound in enumerate((100, 101, 103))]
    agenda = Agenda(candidates, lambda index, bound: True)
    for index, own in enumerate(candidates):
        agenda.begin(index, own.lower_bound, -1)
    assert agenda.next(lambda group: 1.02 if group == 0 else 1.0) == (1, -1)
    assert agenda.next(lambda group: 1.02 if group == 0 else 1.0) == (0, -1)
    assert agenda.next(lambda group: 1.02 if group == 0 else 1.0) == (2, -1)


def test_a_group_is_shared_where_the_others_are_done(tmp_path: Path) -> None:
    def refine(key: int) -> Refinement:
        with (tmp_path / "log").open("a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(0.05)
        return Refinement(bound=key)

    candidates = [
        replace(candidate(k, [0], 9, refine=partial(refine, k)), group="all") for k in range(6)
    ]
    search_settings(candidates, time_limit_s=20, workers=2)
    assert len(set((tmp_path / "log").read_text().split())) == 2


def test_an_agenda_goes_on_with_what_it_learns() -> None:
    candidates = [candidate(key, [key, key + 1, key + 2], 9) for key in range(2)]
    agenda = Agenda(candidates, lambda index, bound: True)
    for index, own in enumerate(candidates):
        agenda.begin(index, own.lower_bound, 0)
    assert agenda.next(alike) == (0, 0)
    agenda.learn(0, 0, Refinement(bound=5))
    assert agenda.next(alike) == (1, 0)
    agenda.learn(1, 0, Refinement(infeasible="too large"))
    assert agenda.next(alike) == (0, 1)
    assert agenda.next(alike) is None
