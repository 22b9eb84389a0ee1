"""The pipeline problem of one setting: options, memory and borders as level 2 sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

from autoplan.border_seconds import actions_s, boundary_s, sent_s
from autoplan.cluster import Cluster
from autoplan.conventions import WHOLE, Convention
from autoplan.costs import Pricer
from autoplan.frontiers import Decision
from autoplan.graph import Trace
from autoplan.interleaving import Alike, Counts, rank_ends, stage_counts
from autoplan.memory import held_send_after
from autoplan.plan_prices import StageSeconds
from autoplan.schedules import MULTI_STAGE
from autoplan.search.problem import (
    SLOWNESS_UNIT,
    BlockOption,
    Detour,
    PipelineProblem,
    PipelineSolution,
    Run,
)
from autoplan.search_options import alike, block_options
from autoplan.settings import Setting
from autoplan.split_steps import saved_at_most, saved_by_block
from autoplan.stage_borders import unkept_bytes
from autoplan.stage_bytes import batch_bytes, side_bytes
from autoplan.stage_ends import even_stage_ends, holders, joined_calls
from autoplan.transfers import most_sent
from autoplan.units import TICK_S, to_ticks

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = [
    "SettingProblem",
    "borders_s",
    "even_ends_of",
    "nothing_below",
    "pipeline_problem",
    "split_saving",
    "stage_clusters",
    "usable_decisions",
    "variants",
    "with_detours",
]

_GRAIN_BITS = 12  # a stage's time is rounded up by 2**-12 of it at most, 0.025 %
_ONCE_GRAIN_BITS = 10  # what is paid once a step by 2**-10 of the step at most, 0.1 %
_MOST_EXACT_BLOCKS = 16

PartKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A stage or a rank, the ends of all stages, and the options of its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingProblem:
    """What a setting asks of level 2 under one convention.

    Attributes:
        problem: with the capacities of the devices.
        per_call: the decisions behind its options.
        options: of each call, with its own times; those of the problem may differ, see `_thinned`.
        counts: alike blocks of each stage, where ranks have several; empty elsewhere.
        stage_s: by stage, ends and its options, the seconds of stages that were priced exactly.
        excess: by rank, ends and its options, by how many bytes ranks that were walked exceed their
            memory.
    """

    problem: PipelineProblem
    per_call: Sequence[tuple[Decision, ...]]
    options: Sequence[tuple[BlockOption, ...]]
    counts: Counts = ()
    stage_s: dict[PartKey, StageSeconds] = field(default_factory=dict, compare=False, repr=False)
    excess: dict[PartKey, int] = field(default_factory=dict, compare=False, repr=False)

    def chosen(self, options: Sequence[int]) -> list[Decision]:
        """Return the decision of each call that an answer's options stand for."""
        return [own[index] for own, index in zip(self.per_call, options, strict=True)]


def nothing_below(cutoff: int | None) -> PipelineSolution:
    """Return that no answer is below the cutoff."""
    return PipelineSolution(
        status="infeasible", ends=(), options=(), objective=0, bound=cutoff or 0
    )


def variants(pricer: Pricer, setting: Setting) -> tuple[tuple[Convention, bool], ...]:
    """Return the problems that a setting is: by convention, and whether blocks are lean in it.

    Where backwards are split all blocks take the fastest decision of their class, or all the
    leanest, so that nothing but the cuts is left to choose. The simplest comes first.
    """
    conventions = pricer.conventions(setting.tp)
    found = [(convention, False) for convention in conventions]
    if setting.schedule == "zero_bubble":
        blocks = {call.block for call in pricer.trace.calls}
        found += [
            (convention, True)
            for convention in conventions
            if any(len(usable_decisions(pricer, b, setting, convention)) > 1 for b in blocks)
        ]
    return tuple(found)


def pipeline_problem(
    planner: Planner, setting: Setting, convention: Convention = WHOLE, *, is_lean: bool = False
) -> SettingProblem:
    """Return the pipeline problem of a setting under a convention.

    As activations cross the borders of blocks that make no detour, they cross those of stages.
    `is_lean`: see `variants`.
    """
    pricer = planner.pricer(setting.microbatch_size)
    known: dict[int, tuple[tuple[Decision, ...], tuple[Detour, ...]]] = {}
    for block in {call.block for call in pricer.trace.calls}:
        plain = usable_decisions(pricer, block, setting, convention)
        if setting.schedule == "zero_bubble":
            plain = (plain[-1] if is_lean else plain[0],)
        known[block] = with_detours(pricer, block, setting, convention, plain)
    per_call = [known[call.block][0] for call in pricer.trace.calls]
    detours = [known[call.block][1] for call in pricer.trace.calls]
    options = _options(pricer, setting, per_call)
    run = planner.alike_run(setting.microbatch_size)
    posed, saved, v = options, 0, setting.virtual_stages
    counts: Counts = ()
    if v > 1:
        least = [min(o.forward + o.backward for o in own) for own in options]
        counts = stage_counts(run, least, setting.pp, v)
        posed, saved = _thinned(run, options, counts)
    fastest = [decisions[0] for decisions in per_call]
    is_sliced = convention.is_sequence_parallel
    runs = _runs(pricer.trace, posed, detours)
    unkept = _unkept_bytes(pricer, setting, per_call, is_sliced)
    problem = _pipeline(planner, setting, runs, fastest, is_sliced, unkept)
    return SettingProblem(
        problem=replace(
            problem,
            cut_allowed=_cuts(planner, setting, counts),
            constant=-saved - split_saving(pricer, setting, convention) * v,
        ),
        per_call=per_call,
        options=options,
        counts=counts,
    )


def usable_decisions(
    pricer: Pricer, block: int, setting: Setting, convention: Convention
) -> tuple[Decision, ...]:
    """Return the decisions of a block class that a setting can run, fastest first.

    Where backwards are split nothing is recomputed or comes back from the host, and of the others
    there are the fastest and the leanest: what a rank keeps of its micro-batches, and parameters
    with their gradients and two states.
    """
    found = pricer.decisions(block, setting.tp, convention)
    if setting.schedule != "zero_bubble":
        return found
    plain = [decision for decision in found if decision.recompute.mode == "none"]
    if len(plain) == 1:
        return tuple(plain)

    def held(decision: Decision) -> int:
        work = pricer.base(block, decision, setting.tp)
        return setting.pp * work.memory.kept + 4 * sum(work.local.state_bytes.values())

    leanest = min(plain, key=held)
    return (plain[0],) if leanest is plain[0] else (plain[0], leanest)


def with_detours(
    pricer: Pricer,
    block: int,
    setting: Setting,
    convention: Convention,
    plain: Sequence[Decision],
) -> tuple[tuple[Decision, ...], tuple[Detour, ...]]:
    """Return decisions of a class, the plain ones first, and which are those of its detours.

    Blocks that ranks of several stages are dealt change places, and under a split backward all take
    one decision, so there none makes a detour.
    """
    if setting.virtual_stages > 1 or setting.schedule == "zero_bubble":
        return tuple(plain), ()
    decisions, detours = list(plain), []
    for detour in pricer.detour_decisions(block, setting.tp, convention):
        ranges = []
        for own in (detour.first, detour.inner, detour.last):
            ranges.append(range(len(decisions), len(decisions) + len(own)))
            decisions += own
        detours.append(Detour(first=ranges[0], inner=ranges[1], last=ranges[2]))
    return tuple(decisions), tuple(detours)


def split_saving(pricer: Pricer, setting: Setting, convention: Convention) -> int:
    """Return ticks that a step is shorter at most because backwards are split."""
    if setting.schedule != "zero_bubble":
        return 0
    total = 0.0
    for calls in alike(pricer, setting):
        block = pricer.trace.calls[calls[0]].block
        most = 0.0
        for decision in usable_decisions(pricer, block, setting, convention):
            price = pricer.price(calls[0], decision, setting)
            later = pricer.deferred_s(pricer.base(block, decision, setting.tp), setting)
            most = max(most, saved_by_block(price.forward_s, price.backward_s - later, later))
        total += most * len(calls)
    return math.ceil(saved_at_most(total, setting) / TICK_S)


def _runs(
    trace: Trace,
    options: Sequence[tuple[BlockOption, ...]],
    detours: Sequence[tuple[Detour, ...]],
) -> tuple[Run, ...]:
    """Return the chain of calls as runs of alike blocks with the same options."""
    alike = groupby(range(len(options)), lambda call: (trace.calls[call].block, options[call]))
    calls = (list(own) for _, own in alike)
    return tuple(
        Run(count=len(own), options=options[own[0]], detours=detours[own[0]]) for own in calls
    )


def _thinned(
    alike: Alike, options: Sequence[tuple[BlockOption, ...]], counts: Counts
) -> tuple[list[tuple[BlockOption, ...]], int]:
    """Return options whose times count what stages with fewer blocks wait for, and ticks of that.

    A stage with x blocks where others have k lasts as long as k of the fastest in any case. So each
    of its blocks takes at least a share of that, and may as well be slow: a bound where all options
    are within the share, or the block is the only one. Other stages keep their times.

    Returns:
        The options of each call; and by how much more all ranks together take than they really do,
        at most.
    """
    run, found, saved = alike.calls, list(options), 0
    fastest = min(map(_time, options[run.start]))
    slowest = max(map(_time, options[run.start]))
    starts = (run.start, *rank_ends(alike, counts))
    widths = [max(own) for own in zip(*counts, strict=True)]
    for rank, sizes in enumerate(counts):
        is_last = rank == len(counts) - 1
        place = run.stop if is_last else starts[rank]
        for chunk, (size, width) in enumerate(zip(sizes, widths, strict=True)):
            beside = _slowest(options[: run.start]) if rank == 0 and chunk == 0 else 0
            if is_last and chunk == len(sizes) - 1:
                beside += _slowest(options[run.stop :])
            if not 0 < size < width:
                continue
            share = max(0, width * fastest - beside) // size
            if share <= fastest or (size > 1 and slowest > share):
                continue
            saved += size * (share - fastest)
            place -= size if is_last else 0
            for call in range(place, place + size):
                found[call] = tuple(_lasting(option, share) for option in options[call])
            place += 0 if is_last else size
    return found, saved


def _time(option: BlockOption) -> int:
    return option.forward + option.backward


def _lasting(option: BlockOption, least: int) -> BlockOption:
    """Return an option that takes no less than so many ticks."""
    return replace(option, backward=max(option.backward, least - option.forward))


def _slowest(options: Sequence[tuple[BlockOption, ...]]) -> int:
    """Return the most ticks of calls, each by an option that no other beats."""
    total = 0
    for own in options:
        numbers = [(_time(o), o.once, o.kept, o.static, o.working) for o in own]
        total += max(
            mine[0]
            for mine in numbers
            if not any(
                other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
                for other in numbers
            )
        )
    return total


def _options(
    pricer: Pricer, setting: Setting, per_call: Sequence[Sequence[Decision]]
) -> list[tuple[BlockOption, ...]]:
    """Return the options of each call, computed once for calls of a kind."""
    live = setting.live()
    found: list[tuple[BlockOption, ...]] = [()] * len(per_call)
    for calls in alike(pricer, setting):
        first = calls[0]
        alive = live[-1] if first == len(per_call) - 1 else live[0]
        own = block_options(pricer, first, per_call[first], setting, alive)
        options = tuple(_by_rank(option, setting) for option in own)
        for call in calls:
            found[call] = options
    return found


def _by_rank(option: BlockOption, setting: Setting) -> BlockOption:
    """Return an option in the ticks of `_solved`, with what a v-th of a micro-batch keeps."""
    v = setting.virtual_stages
    return option if v == 1 else replace(option, once=option.once * v, kept=-(-option.kept // v))


def even_ends_of(planner: Planner, setting: Setting, counts: Counts) -> tuple[int, ...]:
    """Return even ends of the stages, or of the ranks' shares where ranks have several stages."""
    if counts:
        return rank_ends(planner.alike_run(setting.microbatch_size), counts)
    return even_stage_ends(planner.trace(setting.microbatch_size), setting.pp)


def _pipeline(
    planner: Planner,
    setting: Setting,
    runs: tuple[Run, ...],
    fastest: Sequence[Decision],
    is_sliced: bool,
    unkept: int,
) -> PipelineProblem:
    pricer, live = planner.pricer(setting.microbatch_size), setting.live()
    unit = pricer.memory_unit
    num_calls = len(pricer.trace.calls)
    crossing = max(pricer.trace.crossing_bytes, default=0) if setting.pp > 1 else 0
    if is_sliced:
        crossing = -(-crossing // setting.tp)
    side = side_bytes(pricer, range(num_calls), fastest, setting.tp)
    grain, once_grain = _grains(runs, setting)
    fixed, boundary = [], []
    crossing_s: tuple[float, ...] = ()
    v = setting.virtual_stages
    own_s = [actions_s(pricer, setting)] * setting.pp
    if v > 1:  # stages are cut between alike blocks, where the same crosses everywhere
        run = planner.alike_run(setting.microbatch_size).calls
        own_s = borders_s(pricer, setting, run.start + 1, is_sliced)
    elif setting.pp > 1:
        cuts = range(1, num_calls)
        crossing_s = tuple(boundary_s(pricer, setting, cut, is_sliced=is_sliced) for cut in cuts)
    for stage in range(setting.pp):
        transfer = crossing * v * _transfer_copies(setting, stage, live[stage])
        transfer += unkept * v * live[stage] if stage > 0 or v > 1 else 0
        nbytes = side * v * live[stage] + batch_bytes(pricer.trace, setting) + transfer
        fixed.append(-(-nbytes // unit))
        boundary.append(to_ticks(own_s[stage]))
    return PipelineProblem(
        runs=runs,
        num_microbatches=setting.num_microbatches * v,
        live=live if v == 1 else tuple(round(alive * v) for alive in setting.alive()),
        capacity=tuple(
            cluster.capacity_bytes // unit for cluster in stage_clusters(planner.cluster, setting)
        ),
        slowness=_slowness(planner, setting, pricer),
        fixed=tuple(fixed),
        boundary=tuple(boundary),
        crossing=tuple(map(to_ticks, crossing_s)),
        grain=grain,
        once_grain=once_grain,
        anchors=holders(pricer.trace) if setting.pp > 1 else (),
        together=joined_calls(pricer.trace) if setting.pp > 1 else (),
    )


def borders_s(pricer: Pricer, setting: Setting, cut: int, is_sliced: bool) -> list[float]:
    """Return seconds that each rank passes at its borders with a micro-batch, all like one cut."""
    pp, v = setting.pp, setting.virtual_stages
    sends = [sent_s(pricer, setting, cut, rank, is_sliced) for rank in range(pp)]
    around = sends[-1] * (v - 1)  # from the last rank to the first one's later stages
    return [
        (sends[rank] * v if rank < pp - 1 else around)
        + (sends[rank - 1] * v if rank > 0 else around)
        + v * actions_s(pricer, setting)
        for rank in range(pp)
    ]


def stage_clusters(cluster: Cluster, setting: Setting) -> tuple[Cluster, ...]:
    """Return the cluster as each stage sees it."""
    return tuple(cluster.on_stage(setting, stage) for stage in range(setting.pp))


def _slowness(planner: Planner, setting: Setting, pricer: Pricer) -> tuple[int, ...]:
    """Return per stage the time of its type of device, relative to the first; empty if alike."""
    if not planner.cluster.slower:
        return ()
    return tuple(
        round(SLOWNESS_UNIT * pricer.slowness(setting, stage)) for stage in range(setting.pp)
    )


def _grains(runs: Sequence[Run], setting: Setting) -> tuple[int, int]:
    """Return ticks of a stage's time and once that are not told apart; 1 where blocks are few.

    Long chains have so many mixes of almost equal time that to tell them apart would take longer
    than a step that is slower by the grain is worth.
    """
    if sum(run.count for run in runs) <= _MOST_EXACT_BLOCKS:
        return 1, 1
    total = sum(run.count * min(o.forward + o.backward for o in run.options) for run in runs)
    stage = total // setting.pp
    steps = setting.num_microbatches * setting.virtual_stages + setting.pp - 1
    return max(1, stage >> _GRAIN_BITS), max(1, stage * steps >> _ONCE_GRAIN_BITS)


def _cuts(planner: Planner, setting: Setting, counts: Counts) -> tuple[bool, ...]:
    """Return which positions between blocks may end a stage or a rank's share; empty: all."""
    if not counts and not planner.even_cuts:
        return ()
    ends = set(even_ends_of(planner, setting, counts))
    num_calls = len(planner.trace(setting.microbatch_size).calls)
    return tuple(position in ends for position in range(1, num_calls))


def _transfer_copies(setting: Setting, stage: int, live: int) -> int:
    """Return how many micro-batches' worth of activations lie at a stage's borders at most.

    Receive buffers that are no kept activations, but for those of `_unkept_bytes`; stage outputs
    until their backward, and one that its send holds; the gradient on its way back and the one that
    the next backward makes. See docs/design/memory-of-fsdp.md.
    """
    m = setting.num_microbatches
    if setting.schedule in MULTI_STAGE:
        # At most: rings are as large as two rounds.
        sent = most_sent(setting.pp, setting.virtual_stages)
        return max(0, 2 * setting.pp - live) + 1 + sent + 2 + live
    entering = (m if setting.schedule == "gpipe" else live) - live + 2 if stage > 0 else 0
    gradients = m if setting.schedule == "gpipe" else min(2, m)
    held = held_send_after(setting, stage) > 0
    leaving = gradients + live + held if stage < setting.pp - 1 else 0
    return entering + leaving


def _unkept_bytes(
    pricer: Pricer, setting: Setting, per_call: Sequence[tuple[Decision, ...]], is_sliced: bool
) -> int:
    """Return bytes of receive buffers that a stage neither keeps nor sends on, at most."""
    if setting.pp == 1:
        return 0
    known: dict[int, frozenset[str]] = {}
    for call, decisions in zip(pricer.trace.calls, per_call, strict=True):
        if call.block not in known:  # alike calls have the same decisions
            works = (pricer.base(call.block, decision, setting.tp) for decision in decisions)
            held = (frozenset(work.memory.held_inputs) for work in works)
            known[call.block] = frozenset.intersection(*held)
    nbytes = unkept_bytes(pricer.trace, [known[call.block] for call in pricer.trace.calls])
    return -(-nbytes // setting.tp) if is_sliced else nbytes
