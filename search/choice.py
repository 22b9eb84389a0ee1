"""Level 1: one option per op, within a memory limit, at the least time.

The programme, over ops i with options k, links l with consumers c, states f (made) and g (needed):

    x[i,k]      op i runs with option k                                      0 or 1
    y[l,c,f,g]  consumer c of link l needs state g of a value made in f      0 or 1
    z[l,f,g]    link l's value is brought from f to g for some consumer      0 or 1

    minimise    sum time[i,k] x[i,k] + sum time[l,f,g] z[l,f,g]              _cost_terms

    subject to  sum_k x[i,k] = 1                                             _add_choices
                sum_g y[l,c,f,g] = sum of x[producer,k] with k making f      _add_consumer
                sum_f y[l,c,f,g] = sum of x[c,k] with k needing g            _add_consumer
                z[l,f,g] >= y[l,c,f,g] for every consumer c of l             _add_link
                sum memory[i,k] x[i,k] + sum memory[l,f,g] z[l,f,g] <= limit _solve_stage

The marginal equations of y make the linear relaxation tight; with `y >= x + x - 1` in their place
the same problems take a thousand times longer. Where a link has one consumer z is y, and where a
side of a consumer knows one state only y is the other side's marginal: neither gets a variable.
"""

from __future__ import annotations

import time as clock
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoplan.search.cp_sat import SolverOutcome, run_solver
from autoplan.search.evaluate import choice_cost, verify_choice_problem
from autoplan.search.problem import ChoiceProblem, ChoiceSolution, Consumer, Link, Status

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

__all__ = [
    "ChoiceModel",
    "build_choice_model",
    "minimize_built_memory",
    "minimize_memory",
    "prefer_small_indices",
    "solve_built",
    "solve_choice",
]

# Of the solver's own units (about a second): the most that breaking ties may cost.
_TIE_DETERMINISTIC_LIMIT = 0.1

# The linear relaxation is nearly the answer here: without level 2, 15 s in place of 0.1 s for 60
# ops; presolve, symmetry detection and cuts cost more than they save (measured, ortools 9.15).
_TUNING = {
    "linearization_level": 2,
    "cp_model_presolve": False,
    "symmetry_level": 0,
    "cut_level": 0,
}


@dataclass(slots=True, kw_only=True)
class ChoiceModel:
    """The programme without a limit and an objective, to be cloned for each solve.

    Attributes:
        choices: per op the literal of every option that presolve left, by option index.
        time_terms: (ticks, literal) pairs whose sum is the time.
        memory_terms: (units, literal) pairs whose sum is the memory.
    """

    problem: ChoiceProblem
    model: cp_model.CpModel
    choices: list[dict[int, Any]] = field(default_factory=list)
    time_terms: list[tuple[int, Any]] = field(default_factory=list)
    memory_terms: list[tuple[int, Any]] = field(default_factory=list)


def solve_choice(
    problem: ChoiceProblem,
    memory_limit: int | None,
    *,
    time_limit_s: float,
    seed: int = 0,
    hint: Sequence[int] | None = None,
) -> ChoiceSolution:
    """Return the fastest options that fit the limit; among equally fast ones, the least memory.

    Args:
        problem: what to choose.
        memory_limit: units, or None for no limit.
        time_limit_s: wall-clock seconds; breaking ties has its own, small and fixed, allowance.
        seed: of the solver.
        hint: options to start from, for instance those of a lower limit.

    Returns:
        The solution; `bound` is a proven lower bound of `time`. "infeasible" (nothing goes together
        within the limit) and "unknown" (the time limit came first) have no options, and 0 as
        `time` and `memory`; "infeasible" has the bound 0.

    Raises:
        ValueError: if the problem is malformed.
    """
    return solve_built(
        build_choice_model(problem), memory_limit, time_limit_s=time_limit_s, seed=seed, hint=hint
    )


def minimize_memory(
    problem: ChoiceProblem,
    *,
    time_limit_s: float,
    seed: int = 0,
    hint: Sequence[int] | None = None,
) -> ChoiceSolution:
    """Return the options of least memory; among those, the fastest.

    The arguments and the statuses are those of `solve_choice`, except that `bound` is a proven
    lower bound of `memory`.

    Raises:
        ValueError: if the problem is malformed.
    """
    return minimize_built_memory(
        build_choice_model(problem), time_limit_s=time_limit_s, seed=seed, hint=hint
    )


def build_choice_model(problem: ChoiceProblem) -> ChoiceModel:
    """Return the programme of a problem, checked and presolved."""
    verify_choice_problem(problem)
    from ortools.sat.python import cp_model

    built = ChoiceModel(problem=problem, model=cp_model.CpModel())
    _add_choices(built)
    for link in problem.links:
        _add_link(built, link)
    for op, literals in enumerate(built.choices):
        for index, literal in literals.items():
            option = problem.ops[op][index]
            _cost_terms(built, literal, option.time, option.memory)
    return built


def solve_built(
    built: ChoiceModel,
    memory_limit: int | None,
    *,
    time_limit_s: float,
    seed: int,
    hint: Sequence[int] | None,
) -> ChoiceSolution:
    """Solve as `solve_choice` does, on a programme that was built before."""
    limits = [] if memory_limit is None else [(built.memory_terms, memory_limit)]
    return _solve_lexicographic(
        built, built.time_terms, built.memory_terms, limits, time_limit_s, seed, hint
    )


def minimize_built_memory(
    built: ChoiceModel, *, time_limit_s: float, seed: int, hint: Sequence[int] | None
) -> ChoiceSolution:
    """Solve as `minimize_memory` does, on a programme that was built before."""
    return _solve_lexicographic(
        built, built.memory_terms, built.time_terms, [], time_limit_s, seed, hint
    )


def _add_choices(built: ChoiceModel) -> None:
    """Add one literal per undominated option: exactly one per op."""
    signatures = _option_signatures(built.problem)
    for op, choices in enumerate(built.problem.ops):
        if all(option.forbidden for option in choices):
            built.model.add_bool_or([])
            built.choices.append({0: built.model.new_constant(0)})
            continue
        left = _undominated_options(built.problem, op, signatures[op])
        if len(left) == 1:
            built.choices.append({left[0]: built.model.new_constant(1)})
            continue
        literals = {index: built.model.new_bool_var(f"x[{op},{index}]") for index in left}
        built.model.add_exactly_one(literals.values())
        built.choices.append(literals)


def _option_signatures(problem: ChoiceProblem) -> list[list[list[int]]]:
    """Return per op and option the states it makes and needs: what its neighbours see of it."""
    signatures = [[[option.produces] for option in choices] for choices in problem.ops]
    for op, seen in enumerate(signatures):
        if not any(link.producer == op for link in problem.links):
            for signature in seen:
                signature[0] = 0
    for link in problem.links:
        for consumer in link.consumers:
            for index, state in enumerate(consumer.requires):
                signatures[consumer.op][index].append(state)
    return signatures


def _undominated_options(
    problem: ChoiceProblem, op: int, signatures: Sequence[Sequence[int]]
) -> list[int]:
    """Return the options of an op that no option with the same signature beats or equals.

    Of equal options the first stays.
    """
    best: dict[tuple[int, ...], list[int]] = {}
    order = sorted(
        (index for index, option in enumerate(problem.ops[op]) if not option.forbidden),
        key=lambda index: (problem.ops[op][index].time, problem.ops[op][index].memory, index),
    )
    for index in order:
        group = best.setdefault(tuple(signatures[index]), [])
        if not group or problem.ops[op][index].memory < problem.ops[op][group[-1]].memory:
            group.append(index)
    return sorted(index for group in best.values() for index in group)


def _add_link(built: ChoiceModel, link: Link) -> None:
    """Add the transitions of one link, shared by its consumers."""
    flows = [_add_consumer(built, link, consumer) for consumer in link.consumers]
    for made, needed in sorted({pair for flow in flows for pair in flow}):
        cost = link.transitions[made][needed]
        users = [flow[made, needed] for flow in flows if (made, needed) in flow]
        if cost is None or cost == (0, 0):
            continue
        shared = users[0]
        if len(users) > 1:
            shared = built.model.new_bool_var(f"z[{link.producer},{made},{needed}]")
            for user in users:
                built.model.add(shared >= user)
        _cost_terms(built, shared, *cost)


def _add_consumer(built: ChoiceModel, link: Link, consumer: Consumer) -> dict[tuple[int, int], Any]:
    """Return the flow (state made, state needed) -> literal or sum of literals of one consumer."""
    producer_options = built.problem.ops[link.producer]
    made = _group(
        (producer_options[index].produces, literal)
        for index, literal in built.choices[link.producer].items()
    )
    needed = _group(
        (consumer.requires[index], literal) for index, literal in built.choices[consumer.op].items()
    )
    if len(made) == 1:
        (state,) = made
        flow = {(state, other): sum(literals) for other, literals in needed.items()}
    elif len(needed) == 1:
        (state,) = needed
        flow = {(other, state): sum(literals) for other, literals in made.items()}
    else:
        return _add_marginals(built, link, made, needed)
    for (source, target), amount in flow.items():
        if link.transitions[source][target] is None:
            built.model.add(amount == 0)
    return flow


def _add_marginals(
    built: ChoiceModel, link: Link, made: dict[int, list[Any]], needed: dict[int, list[Any]]
) -> dict[tuple[int, int], Any]:
    """Add the flow variables of one consumer and the marginal equations on both sides."""
    flow = {
        (source, target): built.model.new_bool_var(f"y[{link.producer},{source},{target}]")
        for source in made
        for target in needed
        if link.transitions[source][target] is not None
    }
    for source, literals in made.items():
        row = [literal for pair, literal in flow.items() if pair[0] == source]
        built.model.add(sum(row) == sum(literals))
    for target, literals in needed.items():
        column = [literal for pair, literal in flow.items() if pair[1] == target]
        built.model.add(sum(column) == sum(literals))
    return flow


def _group(pairs: Iterable[tuple[int, Any]]) -> dict[int, list[Any]]:
    """Return the literals by state, states in ascending order."""
    groups: dict[int, list[Any]] = {}
    for state, literal in pairs:
        groups.setdefault(state, []).append(literal)
    return dict(sorted(groups.items()))


def _cost_terms(built: ChoiceModel, amount: Any, time: int, memory: int) -> None:
    """Charge `amount` (a literal or a sum of literals that is 0 or 1) its time and memory."""
    if time:
        built.time_terms.append((time, amount))
    if memory:
        built.memory_terms.append((memory, amount))


def _total(terms: Sequence[tuple[int, Any]]) -> Any:
    """Return the linear expression of (coefficient, amount) pairs."""
    from ortools.sat.python import cp_model

    return cp_model.LinearExpr.weighted_sum(
        [amount for _, amount in terms], [coefficient for coefficient, _ in terms]
    )


_Limits = list[tuple[list[tuple[int, Any]], int]]


def _solve_lexicographic(
    built: ChoiceModel,
    first: list[tuple[int, Any]],
    second: list[tuple[int, Any]],
    limits: _Limits,
    time_limit_s: float,
    seed: int,
    hint: Sequence[int] | None,
) -> ChoiceSolution:
    """Minimise `first`, then among its optima `second`, then prefer smaller option indices."""
    started = clock.monotonic()
    outcome = _solve_stage(built, first, limits, time_limit_s, seed, hint)
    if not outcome.values:
        return ChoiceSolution(
            status=outcome.status, options=(), time=0, bound=outcome.bound, memory=0
        )
    options = _chosen(built, outcome.values)
    left_s = time_limit_s - (clock.monotonic() - started)
    if outcome.status == "optimal" and left_s > 0:
        ties = [*limits, (first, outcome.objective)]
        tie = _solve_stage(
            built, second, ties, left_s, seed, options, limit=_TIE_DETERMINISTIC_LIMIT
        )
        options = _chosen(built, tie.values) if tie.values else options
    return _solution(built.problem, options, outcome.status, outcome.bound)


def _solve_stage(
    built: ChoiceModel,
    objective: list[tuple[int, Any]],
    limits: _Limits,
    time_limit_s: float,
    seed: int,
    hint: Sequence[int] | None,
    limit: float | None = None,
) -> SolverOutcome:
    """Minimise one sum of terms under limits on others."""
    model = built.model.clone()
    for terms, most in limits:
        model.add(_total(terms) <= most)
    model.minimize(_total(objective))
    if hint:
        for literals, chosen in zip(built.choices, hint, strict=True):
            if len(literals) > 1:
                for index, literal in literals.items():
                    model.add_hint(literal, index == chosen)
    variables = [literal for literals in built.choices for literal in literals.values()]
    return run_solver(
        model,
        variables,
        time_limit_s=time_limit_s,
        seed=seed,
        deterministic_limit=limit,
        tuning=_TUNING,
    )


def _chosen(built: ChoiceModel, values: Sequence[int]) -> tuple[int, ...]:
    """Return the option index per op from the values of all literals."""
    remaining = iter(values)
    return tuple(
        next(index for index, value in [(i, next(remaining)) for i in literals] if value)
        for literals in built.choices
    )


def _solution(
    problem: ChoiceProblem, options: tuple[int, ...], status: Status, bound: int
) -> ChoiceSolution:
    """Return the solution with smaller indices wherever they cost the same, priced again."""
    options = prefer_small_indices(problem, options)
    cost = choice_cost(problem, options)
    assert cost is not None, "the programme chose options that do not go together"
    return ChoiceSolution(status=status, options=options, time=cost[0], bound=bound, memory=cost[1])


def prefer_small_indices(
    problem: ChoiceProblem, options: Sequence[int], fixed: Collection[int] = ()
) -> tuple[int, ...]:
    """Lower one option index at a time, but of fixed ops, while neither time nor memory grows."""
    current = list(options)
    links: list[list[Link]] = [[] for _ in problem.ops]
    for link in problem.links:
        for op in {link.producer, *(consumer.op for consumer in link.consumers)}:
            links[op].append(link)
    for op, chosen in enumerate(options):
        if chosen == 0 or op in fixed:
            continue
        best = _local_cost(problem, links[op], current, op)
        assert best is not None, "the options do not go together"
        for index in range(chosen):
            current[op] = index
            cost = _local_cost(problem, links[op], current, op)
            if cost is not None and cost[0] <= best[0] and cost[1] <= best[1]:
                break
        else:
            current[op] = chosen
    return tuple(current)


def _local_cost(
    problem: ChoiceProblem, links: Sequence[Link], options: Sequence[int], op: int
) -> tuple[int, int] | None:
    """Return (time, memory) of one op and its links, or None if it does not go with the others."""
    option = problem.ops[op][options[op]]
    if option.forbidden:
        return None
    time, memory = option.time, option.memory
    for link in links:
        row = link.transitions[problem.ops[link.producer][options[link.producer]].produces]
        for state in {consumer.requires[options[consumer.op]] for consumer in link.consumers}:
            cost = row[state]
            if cost is None:
                return None
            time += cost[0]
            memory += cost[1]
    return time, memory
