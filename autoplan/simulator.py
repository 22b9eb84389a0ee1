"""Execute a schedule's action lists on streams and return the predicted step.

Each pipeline rank has a compute stream and, where the device overlaps communication, a stream for
tensor-parallel collectives, one for ZeRO's, and one per direction for sends. A stream runs its work
in order; work also waits for what it needs. Where nothing overlaps (CPU), all work of a rank is on
one stream and a sender is busy until its message is out. Times are sums and maxima of the given
seconds in a fixed order, so no shorter piece of work can make a step longer.

What waits for what, for FSDP2 (torch 2.13, `_fsdp_param_group.py`):
- the all-gather of the next block is issued when the block before it starts, forward and backward;
- a reduce-scatter follows its block's backward, and the backward after the next waits for it;
- the collectives of a rank run one at a time, in the order in which they were issued.
The step ends with the loss averaged over all ranks, and then every rank's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoplan.schedules import Action, ActionLists
from autoplan.stage_costs import BlockSeconds, PlanCosts
from autoplan.timeline import MAIN_STREAM, Interval, Timeline

__all__ = ["Work", "run_streams", "simulate_actions"]

Label = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something to run on a stream of a rank.

    Attributes:
        label: unique in the simulation.
        stream, kind, name: as in `Interval`.
        seconds: how long, at least 0.
        after: labels that must have ended.
        action, block: as in `Interval`.
    """

    label: Label
    stream: str
    kind: str
    name: str
    seconds: float
    after: tuple[Label, ...] = ()
    action: str = ""
    block: int = -1


def run_streams(works_by_rank: Sequence[Sequence[Work]]) -> Timeline:
    """Return when each piece of work runs; on a stream, work starts in the order given.

    Raises:
        ValueError: some work waits for what never ends; names the first of each rank that does.
    """
    intervals: list[Interval] = []
    index_of: dict[Label, int] = {}
    last_on: dict[tuple[int, str], int] = {}
    position = [0] * len(works_by_rank)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, works in enumerate(works_by_rank):
            while position[rank] < len(works):
                work = works[position[rank]]
                if any(label not in index_of for label in work.after):
                    break
                causes = [index_of[label] for label in work.after]
                stream = (rank, work.stream)
                if stream in last_on:
                    causes.append(last_on[stream])
                cause = max(causes, key=lambda i: intervals[i].end_s, default=None)
                start = 0.0 if cause is None else intervals[cause].end_s
                index_of[work.label] = last_on[stream] = len(intervals)
                intervals.append(
                    Interval(
                        rank=rank,
                        stream=work.stream,
                        kind=work.kind,
                        name=work.name,
                        start_s=start,
                        end_s=start + work.seconds,
                        cause=cause,
                        action=work.action,
                        block=work.block,
                    )
                )
                position[rank] += 1
                is_moving = True
    stuck = [w[p].name for w, p in zip(works_by_rank, position, strict=True) if p < len(w)]
    if stuck:
        raise ValueError(f"the actions wait for each other at {', '.join(stuck)}")
    return Timeline(
        intervals=tuple(intervals),
        num_ranks=len(works_by_rank),
        step_time_s=max((i.end_s for i in intervals), default=0.0),
    )


def simulate_actions(
    costs: PlanCosts,
    actions: ActionLists,
    *,
    zero_stage: int = 0,
    titles: Mapping[int, Sequence[str]] | None = None,
) -> Timeline:
    """Return the predicted step of a schedule's action lists.

    Args:
        costs: of every stage that the actions name.
        actions: per pipeline rank, in the order in which it runs them.
        zero_stage: 0 to 3; which collectives run, and when.
        titles: per stage the names of its blocks for the trace; default: their names in `costs`.

    Raises:
        ValueError: the lists do not run every micro-batch of every stage once forward and once
            backward, or wait for each other, or split a backward under ZeRO 2 or 3.
    """
    check_actions(actions, len(costs.stages), zero_stage)
    names = titles or {index: stage.blocks for index, stage in enumerate(costs.stages)}
    programs = [
        _RankProgram(rank, own, costs, zero_stage, names) for rank, own in enumerate(actions)
    ]
    ends = [label for program in programs for label in program.ends()]
    for program in programs:
        program.step(ends)
    return run_streams([program.works for program in programs])


def check_actions(actions: ActionLists, num_stages: int, zero_stage: int) -> None:
    """Refuse action lists that are no step; see `simulate_actions`."""
    every = [action for own in actions for action in own]
    split = {a.stage for a in every if a.kind in ("I", "W")}
    if split and zero_stage >= 2:
        raise ValueError(
            f"zero_stage={zero_stage} with a split backward: its gradients would be reduced before "
            "they are there; use zero_stage 0 or 1, or another schedule"
        )
    microbatches = {a.microbatch for a in every}
    for stage in range(num_stages):
        for kind in ("F", "I", "W") if stage in split else ("F", "B"):
            found = sorted(a.microbatch for a in every if (a.stage, a.kind) == (stage, kind))
            if found != sorted(microbatches):
                raise ValueError(
                    f"stage {stage} runs {kind} of micro-batches {found}: it must run each of "
                    f"{sorted(microbatches)} once"
                )
    if any(a.stage >= num_stages for a in every):
        raise ValueError(f"the actions name more than the {num_stages} stages that have costs")
    for own in actions:
        seen: set[tuple[int, int]] = set()
        for action in own:
            key = (action.stage, action.microbatch)
            if action.kind == "F":
                seen.add(key)
            elif key not in seen:
                raise ValueError(
                    f"stage {action.stage} runs the backward of micro-batch {action.microbatch} "
                    "before its forward: put the forward first"
                )


class _RankProgram:
    """All work of one rank, in the order in which its host issues it."""

    def __init__(
        self,
        rank: int,
        actions: Sequence[Action],
        costs: PlanCosts,
        zero_stage: int,
        names: Mapping[int, Sequence[str]],
    ) -> None:
        self.rank = rank
        self.works: list[Work] = []
        self._costs = costs
        self._zero = zero_stage
        self._names = names
        self._is_pipeline = len(costs.stages) > 1
        self._stages = sorted({a.stage for a in actions})
        self._gathered: set[tuple[int, int]] = set()
        self._prefetched: dict[tuple[int, int], list[Label]] = {}
        self._left = {
            stage: sum(a.stage == stage and a.kind in ("B", "W") for a in actions)
            for stage in self._stages
        }
        self._last_compute: Label | None = None
        self._block_start: Label | None = None
        self._waits: list[Label] = []
        for action in actions:
            {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}[
                action.kind
            ](action)
        if self._is_pipeline and self._zero <= 1:
            for stage in self._stages:
                self._reduce_all(stage)

    def ends(self) -> list[Label]:
        """Return the last label of every stream."""
        return list({work.stream: work.label for work in self.works}.values())

    def step(self, ends: Iterable[Label]) -> None:
        """Add sums over stages, and the optimizer step, after `ends`."""
        blocks = [s for stage in self._stages for s in self._seconds(stage)]
        ties_s = sum(s.ties for s in blocks)
        if ties_s:
            ends = [self._add(MAIN_STREAM, "ties", "all-reduce of ties", ties_s, ends)]
        seconds = sum(s.optimizer for s in blocks)
        self._add(MAIN_STREAM, "optimizer", "optimizer step", seconds, ends)

    def _seconds(self, stage: int) -> list[BlockSeconds]:
        return [self._costs.blocks[name].seconds for name in self._costs.stages[stage].blocks]

    def _is_glue(self, stage: int, block: int) -> bool:
        return self._costs.blocks[self._costs.stages[stage].blocks[block]].bytes.is_glue

    def _add(
        self,
        stream: str,
        kind: str,
        name: str,
        seconds: float,
        after: Iterable[Label],
        label: Label | None = None,
        action: str = "",
        block: int = -1,
    ) -> Label:
        label = label or (self.rank, len(self.works))
        self.works.append(
            Work(
                label=label,
                stream=stream if self._costs.overlaps else MAIN_STREAM,
                kind=kind,
                name=name,
                seconds=seconds,
                after=tuple(after),
                action=action,
                block=block,
            )
        )
        return label

    def _compute(
        self, kind: str, action: Action, block: int, seconds: float, after: Sequence[Label] = ()
    ) -> None:
        name = f"{action} {self._names[action.stage][block]}"
        waits = (*after, *self._waits)
        self._last_compute = self._add(
            MAIN_STREAM, kind, name, seconds, waits, None, str(action), block
        )
        self._waits = []

    @property
    def _computed(self) -> list[Label]:
        """Return the label of the last kernels, if there are any."""
        return [self._last_compute] if self._last_compute else []

    def _tensor_parallel(self, name: str, seconds: float) -> None:
        """Add collectives of a block: they need what was computed, what follows needs them."""
        if seconds > 0:
            stream = "tensor_parallel"
            self._waits.append(self._add(stream, stream, f"{name} tp", seconds, self._computed))

    def _arrived(self, action: Action, sender: int) -> list[Label]:
        if not 0 <= sender < len(self._costs.stages):
            return []
        kind = "F" if action.kind == "F" else "B"
        return [("sent", sender, kind, action.microbatch)]

    def _send(self, action: Action, receiver: int) -> None:
        """Send an action's result to another stage; one on the same rank has it at once."""
        if not 0 <= receiver < len(self._costs.stages):
            return
        seconds = self._costs.stages[min(action.stage, receiver)].send_s
        kind = "F" if action.kind == "F" else "B"
        label = ("sent", action.stage, kind, action.microbatch)
        after = [*self._waits, *self._computed]
        name = f"send {action} to stage {receiver}"
        stream = "send forward" if kind == "F" else "send backward"
        is_own = receiver in self._stages
        self._add(stream, "send", name, 0.0 if is_own else seconds, after, label)

    def _forward(self, action: Action) -> None:
        stage = action.stage
        arrived = self._arrived(action, stage - 1)
        self._gather_root(stage)
        for block, seconds in enumerate(self._seconds(stage)):
            name = f"{action} {self._names[stage][block]}"
            after = [*(arrived if block == 0 else ()), *self._gather(stage, block)]
            self._block_start = self._last_compute
            self._compute("forward", action, block, seconds.forward, after)
            self._tensor_parallel(name, seconds.forward_tensor_parallel)
            if self._zero == 3 and not self._is_glue(stage, block):
                self._gathered.discard((stage, block))
        if self._zero == 3 and self._is_pipeline:
            self._gathered.discard((stage, -1))
        self._send(action, stage + 1)

    def _gather_root(self, stage: int) -> None:
        """Gather the parameters of glue, which FSDP's root holds, where they are not there."""
        blocks = enumerate(self._seconds(stage))
        seconds = sum(s.gather for i, s in blocks if self._is_glue(stage, i))
        self._waits += self._gather_group((stage, -1), seconds)

    def _gather(self, stage: int, block: int) -> list[Label]:
        if self._is_glue(stage, block):
            return []
        return self._gather_group((stage, block), self._seconds(stage)[block].gather)

    def _gather_group(self, group: tuple[int, int], seconds: float) -> list[Label]:
        if group in self._prefetched:
            return self._prefetched.pop(group)
        if self._zero == 0 or seconds == 0 or group in self._gathered:
            return []
        self._gathered.add(group)
        after = [self._block_start] if self._block_start else []
        what = "root" if group[1] < 0 else f"{self._names[group[0]][group[1]]}"
        return [self._add("zero", "gather", f"all-gather {what}", seconds, after)]

    def _prefetch(self, stage: int, block: int) -> None:
        """Gather the block whose backward is next, before the reduction of this one is issued."""
        groups = (i for i in reversed(range(block)) if not self._is_glue(stage, i))
        following = next(groups, None)
        if following is not None:
            self._prefetched[stage, following] = self._gather(stage, following)

    def _backward(self, action: Action) -> None:
        stage = action.stage
        self._left[stage] -= action.kind == "B"
        arrived = self._arrived(action, stage + 1)
        if self._zero == 3:
            self._gather_root(stage)
        reductions: list[Label] = []
        for block in reversed(range(len(self._seconds(stage)))):
            seconds = self._seconds(stage)[block]
            name = f"{action} {self._names[stage][block]}"
            after = [*arrived, *self._gather(stage, block), *reductions[-2:-1]]
            arrived = []
            self._block_start = self._last_compute
            self._prefetch(stage, block)
            if seconds.recompute + seconds.recompute_tensor_parallel > 0:
                self._compute("recompute", action, block, seconds.recompute, after)
                self._tensor_parallel(name, seconds.recompute_tensor_parallel)
                after = []
            length = seconds.backward - (seconds.weight_backward if action.kind == "I" else 0.0)
            self._compute("backward", action, block, length, after)
            self._tensor_parallel(name, seconds.backward_tensor_parallel)
            if action.kind == "B":
                reductions += self._reduce(stage, block)
            if self._zero == 3 and not self._is_glue(stage, block):
                self._gathered.discard((stage, block))
        if self._zero == 3:
            self._gathered.discard((stage, -1))
        if action.kind == "B":
            self._reduce_root(stage)
        self._send(action, stage - 1)

    def _weights(self, action: Action) -> None:
        stage = action.stage
        self._left[stage] -= 1
        for block in reversed(range(len(self._seconds(stage)))):
            seconds = self._seconds(stage)[block].weight_backward
            self._compute("weights", action, block, seconds)
            self._reduce(stage, block)
        self._reduce_root(stage)

    def _reduces_now(self, stage: int) -> bool:
        """Return whether this backward reduces: each under ZeRO 2 and 3, else the last."""
        return self._zero >= 2 or (self._left[stage] == 0 and not self._is_pipeline)

    def _reduce(self, stage: int, block: int) -> list[Label]:
        is_in_root = self._zero > 0 and self._is_glue(stage, block)
        if is_in_root or not self._reduces_now(stage):
            return []
        seconds = self._seconds(stage)[block].reduce
        return self._reduction(f"{self._names[stage][block]}", seconds)

    def _reduce_root(self, stage: int) -> None:
        if self._zero > 0 and self._reduces_now(stage):
            blocks = enumerate(self._seconds(stage))
            seconds = sum(s.reduce for i, s in blocks if self._is_glue(stage, i))
            self._reduction("root", seconds)

    def _reduce_all(self, stage: int) -> None:
        seconds = self._seconds(stage)
        glue = [i for i in range(len(seconds)) if self._is_glue(stage, i)]
        self._reduction("root", sum(seconds[i].reduce for i in glue))
        for block in range(len(seconds)):
            if block not in glue:
                self._reduction(f"{self._names[stage][block]}", seconds[block].reduce)

    def _reduction(self, what: str, seconds: float) -> list[Label]:
        if seconds == 0:
            return []
        after = [*self._waits, *self._computed]
        return [self._add("zero", "reduce", f"reduce {what}", seconds, after)]
