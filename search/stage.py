"""The fastest way to run an interval of blocks as one stage, bounded and exactly.

The programme of one stage, over its runs c (`count[c]` blocks) and their options o:

    n[c,o]     blocks of run c that use option o                              0 .. count[c]
    level[c,w] run c uses an option whose working memory is w or more         0 or 1

    minimise   grains                                                         solve_stage
    subject to sum (forward + backward)[c,o] n[c,o] <= grain grains           solve_stage
               sum_o n[c,o] = count[c]                                        _add_run
               peak >= sum_w step[w] level[c,w] for every c                   add_peak
               sum of n[c,o] with working[o] >= w  <=  count[c] level[c,w]    add_peak
               sum (static + live kept)[c,o] n[c,o] + peak <= room            solve_stage
               sum once[c,o] n[c,o] <= most_once                              solve_stage

`step[w]` is the distance of w from the next smaller working memory. For a run of one block, level
is a sum of its n. CP-SAT is asked where a mix by prices (mixing.py) is not proven. The bound is the
Lagrangian relaxation of the last row at a grid of prices:

    time >= sum_b min_o (time[o] + price (static + live kept)[o]) - price (room - least peak)

which prefix sums over the blocks give for all intervals at once (stage_time_bounds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoplan.search.detours import block_minima, without_detours
from autoplan.search.evaluate import rounded_up
from autoplan.search.mixing import mix_options
from autoplan.search.partition import UNREACHABLE
from autoplan.search.problem import BlockOption, Run, Status

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

__all__ = [
    "StageSolution",
    "add_peak",
    "memory_prices",
    "option_columns",
    "option_table",
    "solve_stage",
    "stage_by_prices",
    "stage_time_bounds",
    "stage_working",
]

_NUM_PRICES = 24

# Taken off bounds computed in floating point, relative to their largest term. Sums of a few hundred
# terms are wrong by less than 1e-13 of it.
_BOUND_SLACK = 1e-12

_TUNING = {"linearization_level": 2, "cp_model_probing_level": 0, "symmetry_level": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """Counts per run and option; `time` (ticks, without the boundary), its bound, and `once`."""

    status: Status
    counts: tuple[tuple[int, ...], ...]
    time: int
    bound: int
    once: int


def stage_working(runs: Sequence[Run], cuts: Sequence[int] | None = None) -> NDArray[np.float64]:
    """Return [start, end] the most that any of blocks start..end-1 works with at the least."""
    counts = [run.count for run in runs]
    working = np.array([min(option.working for option in run.options) for run in runs])
    places = np.arange(sum(counts) + 1) if cuts is None else np.asarray(cuts)
    return _interval_max(np.repeat(working, counts), places)


def stage_time_bounds(
    runs: Sequence[Run],
    live: int,
    room: int,
    cuts: Sequence[int] | None = None,
    working: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Return [start, end] lower bounds in ticks of running blocks start..end-1 as one stage.

    UNREACHABLE where start >= end or where the blocks need more than `room` in any case. Starts and
    ends are those of `cuts`, or every position. `working`: `stage_working`, where it is at hand.
    """
    counts = [run.count for run in runs]
    times, held = option_table([run.options for run in runs], live)
    size = sum(counts) + 1
    places = np.arange(size) if cuts is None else np.asarray(cuts)

    def sums(of_run: NDArray[Any]) -> NDArray[np.float64]:
        return _interval_sums(np.repeat(of_run, counts), places)

    spare = room - (stage_working(runs, cuts) if working is None else working)
    loose = spare + _BOUND_SLACK * np.abs(spare)
    bounds = sums(block_minima(runs, times))
    relaxed, paid = np.empty_like(bounds), np.empty_like(bounds)
    for price in memory_prices(times, held):
        priced = block_minima(runs, times + price * held)
        until = _prefix_sums(np.repeat(priced, counts), places)
        np.subtract(until, (until + _BOUND_SLACK * (priced * counts).sum())[:, None], out=relaxed)
        np.multiply(loose, price, out=paid)
        relaxed -= paid
        np.maximum(bounds, relaxed, out=bounds)
    rounded = np.ceil(bounds * (1.0 - _BOUND_SLACK))
    impossible = (sums(block_minima(runs, held)) > spare) | (places[:, None] >= places[None, :])
    return np.where(impossible, UNREACHABLE, np.clip(rounded, 0, UNREACHABLE)).astype(np.int64)


def option_table(
    blocks: Sequence[Sequence[BlockOption]], live: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return [block, option] times and memory held by `live` micro-batches.

    Blocks with fewer options than others repeat their last one.
    """
    times, static, kept = option_columns(blocks)
    return times, static + live * kept


def option_columns(
    blocks: Sequence[Sequence[BlockOption]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return [block, option] times, static memory, and what a micro-batch keeps.

    Blocks with fewer options than others repeat their last one.
    """
    width = max(len(block) for block in blocks)
    rows = [[*block, *[block[-1]] * (width - len(block))] for block in blocks]
    numbers = np.array(
        [[(o.forward + o.backward, o.static, o.kept) for o in row] for row in rows],
        dtype=np.float64,
    )
    return numbers[:, :, 0], numbers[:, :, 1], numbers[:, :, 2]


def _interval_sums(values: NDArray[Any], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [start, end] sums of values[start:end] for the starts and ends of `places`."""
    until = _prefix_sums(values, places)
    return np.asarray(until[None, :] - until[:, None])


def _prefix_sums(values: NDArray[Any], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sum of all values before each place."""
    return np.concatenate([[0.0], np.cumsum(values.astype(np.float64))])[places]


def _interval_max(values: NDArray[Any], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [start, end] maxima of values[start:end], 0 where empty."""
    inner = [values[a:b].max() for a, b in pairwise(places.tolist())]
    peaks = np.zeros((len(places), len(places)))
    for start in range(len(inner)):
        peaks[start, start + 1 :] = np.maximum.accumulate(inner[start:])
    return peaks


def memory_prices(times: NDArray[np.float64], held: NDArray[np.float64]) -> list[float]:
    """Return prices of memory in ticks per unit, spread over the blocks' own exchange rates."""
    rates = set()
    unlike = {own.tobytes(): own for own in np.stack([times, held], axis=1)}
    for own_times, own_held in unlike.values():
        points = sorted(zip(own_held.tolist(), own_times.tolist(), strict=True))
        for (less, slow), (more, fast) in pairwise(points):
            if more > less and slow > fast:
                rates.add((slow - fast) / (more - less))
    ordered = sorted(rates)
    if len(ordered) <= _NUM_PRICES:
        return ordered
    picks = np.linspace(0, len(ordered) - 1, _NUM_PRICES).round().astype(int)
    return [ordered[index] for index in picks]


def solve_stage(
    runs: Sequence[Run],
    live: int,
    room: int,
    most_once: int,
    *,
    time_limit_s: float,
    seed: int,
    workers: int,
    grain: int = 1,
) -> StageSolution:
    """Return the fastest options of one stage's runs within its room and `most_once` ticks.

    Times that round up to the same multiple of `grain` count as equal.
    """
    if any(run.detours for run in runs):

        def solve(own: Sequence[Run]) -> StageSolution:
            limits = {"time_limit_s": time_limit_s, "seed": seed, "workers": workers}
            return solve_stage(own, live, room, most_once, grain=grain, **limits)  # type: ignore[arg-type]

        return _over_detours(runs, solve, grain)
    mix = stage_by_prices(runs, live, room, most_once, grain, is_thorough=True)
    if mix.status in ("optimal", "infeasible"):
        return mix
    from ortools.sat.python import cp_model

    from autoplan.search.cp_sat import run_solver

    model = cp_model.CpModel()
    peak = model.new_int_var(0, room, "peak")
    counts = [_add_run(model, run, peak) for run in runs]
    held = sum(
        (option.static + live * option.kept) * n
        for run, own in zip(runs, counts, strict=True)
        for option, n in zip(run.options, own, strict=True)
    )
    model.add(held + peak <= room)
    model.add(_total_once(runs, counts) <= most_once)
    most = _most_time(runs)
    if mix.counts:
        most = mix.time
        for own, values in zip(counts, mix.counts, strict=True):
            for variable, value in zip(own, values, strict=True):
                model.add_hint(variable, value)
    grains = model.new_int_var(-(-mix.bound // grain), -(-most // grain), "grains")
    model.add(_total_time(runs, counts) <= grain * grains)
    model.minimize(grains)
    outcome = run_solver(
        model,
        [n for own in counts for n in own],
        time_limit_s=time_limit_s,
        seed=seed,
        workers=workers,
        tuning=_TUNING,
    )
    found = iter(outcome.values)
    chosen = tuple(tuple(next(found) for _ in run.options) for run in runs if outcome.values)
    return StageSolution(
        status=outcome.status,
        counts=chosen,
        time=_total_time(runs, chosen) if chosen else 0,
        bound=outcome.bound * grain if grain > 1 else outcome.bound,
        once=_total_once(runs, chosen) if chosen else 0,
    )


def stage_by_prices(
    runs: Sequence[Run],
    live: int,
    room: int,
    most_once: int,
    grain: int = 1,
    *,
    is_thorough: bool = False,
) -> StageSolution:
    """Return what is known of one stage without CP-SAT: at the least a bound of its time.

    Args:
        runs, live, room, most_once, grain: as in `solve_stage`.
        is_thorough: see `mix_options`.

    Returns:
        As `solve_stage`, or, where a mix by prices is not proven, that mix as "feasible", and
        "unknown" where there is none; both with a bound that holds for all solutions.
    """
    if any(run.detours for run in runs):

        def price(own: Sequence[Run]) -> StageSolution:
            return stage_by_prices(own, live, room, most_once, grain, is_thorough=is_thorough)

        return _over_detours(runs, price, grain)
    fastest = tuple(_fastest_counts(run) for run in runs)
    once = _total_once(runs, fastest)
    if once <= most_once and _stage_memory(runs, fastest, live) <= room:
        time = _total_time(runs, fastest)
        return StageSolution(status="optimal", counts=fastest, time=time, bound=time, once=once)
    if room < 0:
        return StageSolution(status="infeasible", counts=(), time=0, bound=0, once=0)
    mix = mix_options(runs, live, room, most_once, grain, is_thorough=is_thorough)
    if mix.bound > _most_time(runs):
        return StageSolution(status="infeasible", counts=(), time=0, bound=0, once=0)
    status: Status = "feasible" if mix.counts else "unknown"
    if mix.counts and rounded_up(mix.time, grain) <= rounded_up(mix.bound, grain):
        status = "optimal"
    return StageSolution(
        status=status, counts=mix.counts, time=mix.time, bound=mix.bound, once=mix.once
    )


def _over_detours(
    runs: Sequence[Run], solve: Callable[[Sequence[Run]], StageSolution], grain: int
) -> StageSolution:
    """Return the fastest of the stages that these runs can be, with a bound of them all."""
    found = []
    for way in without_detours(runs):
        own = solve(way.runs)
        if own.counts:
            own = replace(own, counts=way.collected(runs, own.counts))
        if own.status != "infeasible":
            found.append(own)
    if not found:
        return StageSolution(status="infeasible", counts=(), time=0, bound=0, once=0)
    bound = min(own.bound for own in found)
    solved = [own for own in found if own.counts]
    if not solved:
        return StageSolution(status="unknown", counts=(), time=0, bound=bound, once=0)
    best = min(solved, key=lambda own: (rounded_up(own.time, grain), own.once))
    is_proven = rounded_up(best.time, grain) <= rounded_up(bound, grain)
    return replace(best, bound=bound, status="optimal" if is_proven else "feasible")


def _add_run(model: cp_model.CpModel, run: Run, peak: Any) -> list[Any]:
    """Add the counts of one run and the peak that its options need."""
    counts = [model.new_int_var(0, run.count, f"n[{index}]") for index in range(len(run.options))]
    model.add(sum(counts) == run.count)
    add_peak(model, run, counts, peak)
    return counts


def add_peak(model: cp_model.CpModel, run: Run, counts: Sequence[Any], peak: Any) -> None:
    """Make `peak` at least the working memory of every option of the run that is in use."""
    steps: list[Any] = []
    previous = 0
    for working in sorted({option.working for option in run.options}):
        users = sum(
            n for option, n in zip(run.options, counts, strict=True) if option.working >= working
        )
        level = users
        if run.count > 1:
            level = model.new_bool_var(f"level[{working}]")
            model.add(users <= run.count * level)
        steps.append((working - previous) * level)
        previous = working
    model.add(peak >= sum(steps))


def _fastest_counts(run: Run) -> tuple[int, ...]:
    """Return counts that give every block of a run its fastest option."""
    order = [
        (option.forward + option.backward, option.once, option.static + option.kept, index)
        for index, option in enumerate(run.options)
    ]
    best = min(order)[-1]
    return tuple(run.count if index == best else 0 for index in range(len(run.options)))


def _most_time(runs: Sequence[Run]) -> int:
    """Return ticks above which no options of these runs are."""
    return sum(run.count * max(o.forward + o.backward for o in run.options) for run in runs)


def _total_time(runs: Sequence[Run], counts: Sequence[Sequence[Any]]) -> Any:
    """Return the ticks per micro-batch of a stage with these counts, numbers or variables."""
    return sum(
        (option.forward + option.backward) * n
        for run, own in zip(runs, counts, strict=True)
        for option, n in zip(run.options, own, strict=True)
    )


def _total_once(runs: Sequence[Run], counts: Sequence[Sequence[Any]]) -> Any:
    """Return the ticks per step of a stage with these counts, numbers or variables."""
    return sum(
        option.once * n
        for run, own in zip(runs, counts, strict=True)
        for option, n in zip(run.options, own, strict=True)
    )


def _stage_memory(runs: Sequence[Run], counts: Sequence[Sequence[int]], live: int) -> int:
    """Return the memory units of a stage with these counts, fixed not included."""
    used = [
        (option, n)
        for run, own in zip(runs, counts, strict=True)
        for option, n in zip(run.options, own, strict=True)
        if n
    ]
    held = sum((option.static + live * option.kept) * n for option, n in used)
    return held + max((option.working for option, _ in used), default=0)
