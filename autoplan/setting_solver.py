"""Level 2 of one setting: its pipeline problem, solved until what wins fits by the exact model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoplan.answer_prices import answer_step_s, rank_excess
from autoplan.bounds import convention_bound, least_bound
from autoplan.calibration import calibrated_capacity
from autoplan.conventions import Convention
from autoplan.dealing import DealtPlan, dealt_plan
from autoplan.interleaving import dealt, lightened, paced
from autoplan.plan_prices import plan_price
from autoplan.search.candidates import NOTHING_FITS, Refinement
from autoplan.search.columns import KnownStages
from autoplan.search.evaluate import stage_costs
from autoplan.search.pipeline import relaxed_bound, solve_pipeline
from autoplan.search.problem import PipelineProblem, PipelineSolution, Status
from autoplan.setting_problem import (
    SettingProblem,
    nothing_below,
    pipeline_problem,
    stage_clusters,
    variants,
)
from autoplan.settings import Setting
from autoplan.split_cuts import cuts_by_lists
from autoplan.units import to_ticks
from autoplan.walked_plans import fastest_walked, has_few_plans, time_bound

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Posed", "relaxation_bound", "solve_setting"]

_MAX_REPAIRS = 8
_DEALT = 0.005  # by which stages may make a step longer than ranks' shares: what a cover loses too


@dataclass(frozen=True, slots=True, kw_only=True)
class Posed:
    """The problem of a setting under one convention.

    Attributes:
        asked: the problem, with the capacities of the devices.
        calibrated: capacities, as far above those as the linear memory is above the exact one.
        bound: ticks below which no solution within them is; None: there is none.
        known: its stages that are solved.
    """

    asked: SettingProblem
    calibrated: tuple[int, ...]
    bound: int | None
    known: KnownStages


def _posed(planner: Planner, setting: Setting, convention: Convention, is_lean: bool) -> Posed:
    """Return the problem of a setting, posed once."""
    key = (setting, convention, is_lean, planner.even_cuts)
    if key not in planner.posed:
        asked = pipeline_problem(planner, setting, convention, is_lean=is_lean)
        calibrated = calibrated_capacity(planner, setting, asked)
        if has_few_plans(planner, setting):
            bound = time_bound(asked)
        else:
            bound = relaxed_bound(replace(asked.problem, capacity=calibrated))
            if bound is None:  # perhaps the leanest plans alone fit
                calibrated = _leaner(planner, setting, asked, calibrated)
                bound = relaxed_bound(replace(asked.problem, capacity=calibrated))
        planner.posed[key] = Posed(
            asked=asked,
            calibrated=calibrated,
            bound=None if bound is None else bound // setting.virtual_stages,
            known={},
        )
    return planner.posed[key]


def solve_setting(
    planner: Planner, setting: Setting, cutoff: int | None, time_limit_s: float
) -> PipelineSolution:
    """Return the best cuts and options of a setting.

    Where there are few plans, they are listed and walked. Elsewhere the linear memory decides, an
    upper estimate almost everywhere. So stages first get as much more as it exceeds the exact model
    by at the fastest options. Where the exact model finds a stage above its capacity, it gets that
    much less and the problem is solved again, so that what is returned fits exactly.
    """
    pricer = planner.pricer(setting.microbatch_size)
    best: PipelineSolution | None = None
    bounds: list[int] = []
    is_final = True
    for variant in reversed(range(len(variants(pricer, setting)))):
        # Simpler ones come last, so they win where both are as fast.
        below = cutoff if best is None else best.objective + 1
        solution = _solve_convention(planner, setting, variant, below, time_limit_s)
        if solution.status != "infeasible":
            bounds.append(solution.bound)
            is_final &= solution.is_final or solution.status == "optimal"
        if solution.options:
            best = solution
        elif best is None:
            without = solution
    if best is None:
        status: Status = "unknown" if bounds else "infeasible"
        bound = min(bounds, default=without.bound)
        return replace(without, status=status, bound=bound, is_final=is_final)
    bound = min(*bounds, best.objective)
    status = "optimal" if bound == best.objective else "feasible"
    return replace(best, status=status, bound=bound, is_final=is_final)


def _solve_convention(
    planner: Planner, setting: Setting, variant: int, cutoff: int | None, time_limit_s: float
) -> PipelineSolution:
    """Return the best cuts and options of one of the problems that a setting is."""
    convention, is_lean = variants(planner.pricer(setting.microbatch_size), setting)[variant]
    first = convention_bound(planner, setting, convention)
    if first.infeasible is not None or (cutoff is not None and first.bound >= cutoff):
        return nothing_below(cutoff)
    posed = _posed(planner, setting, convention, is_lean)
    if posed.bound is None or (cutoff is not None and posed.bound >= cutoff):
        return nothing_below(cutoff)
    if has_few_plans(planner, setting):
        walked = fastest_walked(planner, setting, posed.asked, cutoff)
        if walked is not None:
            return replace(walked, variant=variant)
    by_stages = None
    if setting.virtual_stages > 1 and any(len(own) > 1 for own in posed.asked.options):
        by_stages = dealt_plan(planner, setting, posed.asked, cutoff)
        proven = _proven(by_stages, posed.bound, cutoff)
        if proven is not None:
            return replace(proven, variant=variant)
    for capacity in dict.fromkeys((posed.calibrated, posed.asked.problem.capacity)):
        solution, is_first = _repaired(
            planner, setting, posed, capacity, cutoff, time_limit_s, by_stages
        )
        if solution.options or is_first:
            break
    if not solution.options and cutoff is None:
        capacity = _leaner(planner, setting, posed.asked, posed.calibrated)
        if capacity != posed.calibrated:
            solution, _ = _repaired(planner, setting, posed, capacity, cutoff, time_limit_s)
    return replace(solution, variant=variant)


def _proven(plan: DealtPlan, bound: int, cutoff: int | None) -> PipelineSolution | None:
    """Return a plan that was decided by stages as an answer, if its bound proves it."""
    bound = max(bound, plan.bound)
    if cutoff is not None and bound >= cutoff:
        return nothing_below(cutoff)
    if plan.best is None:
        return None
    step_time_s, solution = plan.best
    found = _as_dealt(replace(solution, status="optimal", bound=bound), step_time_s, cutoff)
    return found if found.status in ("optimal", "infeasible") else None


def _leaner(
    planner: Planner, setting: Setting, asked: SettingProblem, calibrated: tuple[int, ...]
) -> tuple[int, ...]:
    """Return capacities under which the leanest plans are not left out either."""
    leaner = calibrated_capacity(planner, setting, asked, at_leanest=True)
    return tuple(map(max, calibrated, leaner))


def relaxation_bound(planner: Planner, setting: Setting, *, is_quick: bool = False) -> Refinement:
    """Return a bound from the best cuts of a relaxation of each stage, or why nothing fits.

    With `is_quick` only the most promising convention is relaxed, see `least_bound`.
    """
    pricer = planner.pricer(setting.microbatch_size)
    leanness = sorted({is_lean for _, is_lean in variants(pricer, setting)})

    def relaxed(convention: Convention) -> int | None:
        found = [_posed(planner, setting, convention, is_lean).bound for is_lean in leanness]
        return min((bound for bound in found if bound is not None), default=None)

    bound = least_bound(planner, setting, relaxed, is_quick=is_quick)
    return Refinement(infeasible=NOTHING_FITS) if bound is None else Refinement(bound=bound)


def _repaired(
    planner: Planner,
    setting: Setting,
    posed: Posed,
    capacity: tuple[int, ...],
    cutoff: int | None,
    time_limit_s: float,
    by_stages: DealtPlan | None = None,
) -> tuple[PipelineSolution, bool]:
    """Return a solution that fits exactly, or one without options, and if that came at once.

    With several stages a rank one under common paces may fit before the shares, as they are dealt,
    do; where it is not proven by their bound, the shares are repaired all the same. `by_stages`: an
    answer that fits, with a bound of its own.
    """
    pricer, asked = planner.pricer(setting.microbatch_size), posed.asked
    problem = replace(asked.problem, capacity=capacity)
    best: tuple[float, PipelineSolution] | None = None
    if by_stages is not None:
        best = by_stages.best
    limit = cutoff
    for attempt in range(_MAX_REPAIRS):
        found = _solved(setting, problem, limit, time_limit_s, posed.known)
        if not found.options:
            if best is None:
                return found, attempt == 0
            break
        solution, fitting = found, []
        if setting.virtual_stages > 1:
            alike = planner.alike_run(setting.microbatch_size)
            solution = dealt(alike, asked.options, found, asked.counts)
            if attempt == 0:
                fitting = _paced(planner, setting, asked, problem, found)
                if all(to_ticks(own[0]) > found.bound * (1 + _DEALT) for own in fitting):
                    fitting += _paced(planner, setting, asked, problem, found, is_thorough=True)
        step_time_s, excess = _step_and_excess(planner, setting, asked, solution)
        if max(excess) <= 0:
            fitting.append((step_time_s, solution))
        if best is not None:
            fitting.append(best)
        best = min(fitting, key=lambda one: one[0], default=None)
        if best is not None:
            ticks = to_ticks(best[0])
            if max(excess) <= 0 or ticks <= found.bound * (1 + _DEALT):
                break
            limit = ticks if cutoff is None else min(cutoff, ticks)
        # Below what this answer takes by the linear memory, or the same answer would come again.
        # How stages are dealt is not in it: where that is the reason, steps get longer.
        steps = 1 + attempt * (setting.virtual_stages > 1)
        linear = [cost.memory for cost in stage_costs(problem, found.ends, found.options)]
        capacity = tuple(
            used - -(-steps * over // pricer.memory_unit) if over > 0 else room
            for room, used, over in zip(problem.capacity, linear, excess, strict=True)
        )
        problem = replace(problem, capacity=capacity)
    if best is None:
        return nothing_below(cutoff), False
    step_time_s, solution = best
    if setting.virtual_stages > 1:
        step_time_s, solution = _lighter(planner, setting, asked, step_time_s, solution)
        is_proven = found.status in ("optimal", "infeasible")
        status: Status = "optimal" if is_proven else "feasible"
        bound = max(found.bound, 0 if by_stages is None else by_stages.bound)
        solution = replace(solution, status=status, bound=bound)
    return _as_priced(planner, setting, posed, solution, step_time_s, cutoff), False


def _step_and_excess(
    planner: Planner, setting: Setting, asked: SettingProblem, solution: PipelineSolution
) -> tuple[float, list[int]]:
    """Return the seconds of a step, and by how many bytes each rank exceeds its memory."""
    excess = [rank_excess(planner, setting, asked, solution, r) for r in range(setting.pp)]
    return answer_step_s(planner, setting, asked, solution), excess


def _paced(
    planner: Planner,
    setting: Setting,
    asked: SettingProblem,
    problem: PipelineProblem,
    shares: PipelineSolution,
    *,
    is_thorough: bool = False,
) -> list[tuple[float, PipelineSolution]]:
    """Return stages under common paces that fit exactly, with the seconds of a step, as found.

    Stages of a rank keep as many micro-batches each, or as many as they do when the rank keeps
    most. Where the linear memory is too low, ranks get less room, twice as much less every time.
    """
    v = setting.virtual_stages
    even = [(float(live),) * v for live in problem.live]
    uneven = [tuple(v * count for count in own) for own in setting.alive_by_stage()]
    found = (
        _paced_alive(planner, setting, asked, problem, shares, alive, is_thorough=is_thorough)
        for alive in (even, uneven)
    )
    return [one for one in found if one is not None]


def _paced_alive(
    planner: Planner,
    setting: Setting,
    asked: SettingProblem,
    problem: PipelineProblem,
    shares: PipelineSolution,
    alive: Sequence[tuple[float, ...]],
    *,
    is_thorough: bool,
) -> tuple[float, PipelineSolution] | None:
    """Return what `_paced` does where stages of a rank keep so many micro-batches each."""
    alike = planner.alike_run(setting.microbatch_size)
    unit = planner.pricer(setting.microbatch_size).memory_unit
    for attempt in range(_MAX_REPAIRS):
        own = paced(
            alike, asked.options, problem, shares, asked.counts, alive, is_thorough=is_thorough
        )
        if own is None:
            break
        step_time_s, excess = _step_and_excess(planner, setting, asked, own)
        if max(excess) <= 0:
            return step_time_s, own
        capacity = tuple(
            room - -(-max(0, over) * 2**attempt // unit)
            for room, over in zip(problem.capacity, excess, strict=True)
        )
        problem = replace(problem, capacity=capacity)
    return None


def _lighter(
    planner: Planner,
    setting: Setting,
    asked: SettingProblem,
    step_time_s: float,
    solution: PipelineSolution,
) -> tuple[float, PipelineSolution]:
    """Return the seconds of a step with other decisions beside the alike blocks, if they fit."""
    alike = planner.alike_run(setting.microbatch_size)
    other = lightened(alike, asked.options, solution, setting)
    if other.options != solution.options:
        other_s, excess = _step_and_excess(planner, setting, asked, other)
        if other_s < step_time_s and max(excess) <= 0:
            return other_s, other
    return step_time_s, solution


def _as_priced(
    planner: Planner,
    setting: Setting,
    posed: Posed,
    solution: PipelineSolution,
    step_time_s: float,
    cutoff: int | None,
) -> PipelineSolution:
    """Return a solution with the time that it takes, and a better one where the lists know it."""
    if setting.virtual_stages == 1 and setting.schedule != "zero_bubble":
        return solution
    found = _as_dealt(solution, step_time_s, cutoff)
    is_decided = all(len(own) == 1 for own in posed.asked.options)
    if found.status in ("optimal", "infeasible") or not is_decided:
        return found
    objective = max(solution.objective, to_ticks(step_time_s))
    best = replace(solution, objective=objective, bound=objective, status="optimal", is_final=True)
    if setting.virtual_stages == 1:
        listed = _by_lists(planner, setting, posed, best, cutoff)
        if listed is None:
            return found
        best = listed
    # With several stages a rank there is one way to cut, so nothing is left to decide.
    return best if cutoff is None or best.objective < cutoff else nothing_below(cutoff)


def _by_lists(
    planner: Planner,
    setting: Setting,
    posed: Posed,
    best: PipelineSolution,
    cutoff: int | None,
) -> PipelineSolution | None:
    """Return the fastest of all cuts by the lists, or None if there are too many to look at."""
    pricer, asked = planner.pricer(setting.microbatch_size), posed.asked
    limit = best.objective if cutoff is None else min(best.objective, cutoff)
    problem = replace(asked.problem, capacity=posed.calibrated)
    listed = cuts_by_lists(planner, setting, asked, problem, limit)
    if listed is None:
        return None
    totals = [cluster.total_bytes for cluster in stage_clusters(planner.cluster, setting)]
    chosen = [decisions[0] for decisions in asked.per_call]
    for ticks, ends in listed:
        if ticks >= limit:
            break
        price = plan_price(pricer, setting, ends, chosen)
        if all(m.peak <= total for m, total in zip(price.memory, totals, strict=True)):
            objective = min(best.objective, to_ticks(price.step_time_s))
            return replace(best, ends=ends, objective=objective, bound=objective)
    return best


def _as_dealt(
    solution: PipelineSolution, step_time_s: float, cutoff: int | None
) -> PipelineSolution:
    """Return a solution with the time that its stages, as they were dealt, really take.

    Of what lies above the bound of the ranks' shares as much counts as proven as a cover loses.
    """
    objective = max(solution.objective, to_ticks(step_time_s))
    is_final = solution.status == "optimal"
    share = 1 + _DEALT if is_final else 1.0
    bound = min(objective, int(solution.bound * share))
    if cutoff is not None and objective >= cutoff:
        if bound >= cutoff:
            return nothing_below(cutoff)
        return replace(nothing_below(cutoff), status="unknown", bound=bound, is_final=is_final)
    return replace(
        solution,
        objective=objective,
        bound=bound,
        status="optimal" if bound == objective else "feasible",
        is_final=is_final,
    )


def _solved(
    setting: Setting,
    problem: PipelineProblem,
    cutoff: int | None,
    time_limit_s: float,
    known: KnownStages,
) -> PipelineSolution:
    """Return the solution of a problem whose times are a number of ticks for each stage of a rank.

    With v stages a rank a step takes m times the slowest rank and a v-th of the others, so v steps
    take as long as one of m v micro-batches without.
    """
    v = setting.virtual_stages
    scaled = None if cutoff is None else cutoff * v
    found = solve_pipeline(problem, cutoff=scaled, time_limit_s=time_limit_s, known=known)
    return replace(found, objective=found.objective // v, bound=found.bound // v)
