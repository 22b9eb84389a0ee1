"""Run CP-SAT so that the answer repeats, the status has a name, and Ctrl-C is heard."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoplan.search.problem import Status

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

__all__ = ["SolverOutcome", "run_solver"]

# Wall-clock limits below this are raised to it, so that presolve alone cannot exhaust them.
_LEAST_TIME_LIMIT_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOutcome:
    """What one call of CP-SAT proved.

    Attributes:
        status: "feasible" and "unknown" mean that a limit ended the call.
        values: of the variables that were asked for; empty without a solution.
        objective: of the solution; 0 without one.
        bound: no solution is below it; meaningless if the status is "infeasible".
        wall_time_s: seconds in CP-SAT.
    """

    status: Status
    values: tuple[int, ...]
    objective: int
    bound: int
    wall_time_s: float


def run_solver(
    model: cp_model.CpModel,
    variables: Sequence[Any],
    *,
    time_limit_s: float,
    seed: int = 0,
    workers: int = 1,
    deterministic_limit: float | None = None,
    tuning: Mapping[str, int | bool] | None = None,
    log: Callable[[str], None] | None = None,
) -> SolverOutcome:
    """Minimise `model` and return the values of `variables`.

    Args:
        model: has an integer objective to minimise.
        variables: or literals, whose values the caller wants.
        time_limit_s: wall-clock limit; where it strikes, the answer depends on the machine.
        seed: of the solver's random choices.
        workers: threads; more than one run interleaved, which keeps the answer deterministic.
        deterministic_limit: limit in the solver's own units (about a second), for optional work.
        tuning: CP-SAT parameters by name that suit the model's structure.
        log: receives each line of the solver's log.

    Returns:
        The outcome; limits are a status, not an error.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after the solver has stopped.
        RuntimeError: if CP-SAT calls the model invalid.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.random_seed = seed
    parameters.num_workers = workers
    parameters.interleave_search = workers > 1
    parameters.max_time_in_seconds = max(time_limit_s, _LEAST_TIME_LIMIT_S)
    for name, value in (tuning or {}).items():
        setattr(parameters, name, value)
    parameters.catch_sigint_signal = False
    if deterministic_limit is not None:
        parameters.max_deterministic_time = deterministic_limit
    if log is not None:
        parameters.log_search_progress = True
        parameters.log_to_stdout = False
        solver.log_callback = log
    code = _solve_interruptibly(solver, model)
    status = _status_name(code, model)
    if status in ("infeasible", "unknown"):
        bound = _to_int(solver.best_objective_bound) if status == "unknown" else 0
        return SolverOutcome(
            status=status, values=(), objective=0, bound=bound, wall_time_s=solver.wall_time
        )
    return SolverOutcome(
        status=status,
        values=tuple(int(solver.value(variable)) for variable in variables),
        objective=_to_int(solver.objective_value),
        bound=_to_int(solver.best_objective_bound),
        wall_time_s=solver.wall_time,
    )


def _solve_interruptibly(solver: cp_model.CpSolver, model: cp_model.CpModel) -> Any:
    """Solve in a thread, so that the main thread can receive Ctrl-C and stop the solver.

    CP-SAT's own handler would end this one call and hide the signal from the caller, and without
    it Python would deliver the signal only after the call.
    """
    codes: list[Any] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def solve() -> None:
        try:
            codes.append(solver.solve(model))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=solve, name="cp-sat", daemon=True)
    thread.start()
    try:
        done.wait()
    except KeyboardInterrupt:
        # A stop that comes before the solver listens is lost, so it is repeated.
        while not done.wait(0.05):
            solver.stop_search()
        raise
    thread.join()
    if errors:
        raise errors[0]
    return codes[0]


def _status_name(code: Any, model: cp_model.CpModel) -> Status:
    """Return our name of a CP-SAT status; an unknown code or an invalid model is our own bug."""
    from ortools.sat.python import cp_model

    if code == cp_model.OPTIMAL:
        return "optimal"
    if code == cp_model.FEASIBLE:
        return "feasible"
    if code == cp_model.INFEASIBLE:
        return "infeasible"
    if code == cp_model.UNKNOWN:
        return "unknown"
    if code == cp_model.MODEL_INVALID:
        raise RuntimeError(f"CP-SAT refuses the model: {model.validate()}")
    raise RuntimeError(f"CP-SAT returned the status {code!r}, which this code does not know")


def _to_int(value: float) -> int:
    """Return the integer that the solver reports as a float; infinities become 0 as a bound.

    Objectives are sums of non-negative costs, so 0 is a bound of each. Below 2**53 the float of an
    integer is exact, and rounding only undoes the solver's own scaling.
    """
    return round(value) if math.isfinite(value) else 0
