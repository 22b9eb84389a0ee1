"""What deciding block by block loses: `python benchmarks/decomposition_loss.py`.

A few equal blocks in a row are decided flat: one choice problem over all ops, the whole frontier.
Beside it stands what the search does: a cover of each block's own frontier, for every way to enter
and leave it that the search poses, and the best mix of blocks under a total, in rows that a stage
may be. Both with the linear memory of level 1. The loss is the largest excess of time over the flat
answer at any limit of memory that both can meet, in two parts:

cover     the flat answer too hands values over only as the search poses it
borders   the flat answer may hand values over in any placement: what that freedom would be worth

The ways of stages are posed at the outer borders; at any limit the better one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.block_choice import ChoiceModel
from autoplan.detours import STAGE_WAYS
from autoplan.frontiers import Frontiers
from autoplan.graph import BlockTrace, OpTrace
from autoplan.models import load_model
from autoplan.planner import make_planner
from autoplan.report import table
from autoplan.search.frontier import covering_points, whole_frontier
from autoplan.search.problem import ChoiceProblem
from autoplan.tensor_layout import Border, Borders, boundary_of
from autoplan.times import Timer
from autoplan.training_job import TrainingJob

__all__ = ["chained", "largest_loss", "loss_rows", "mixed"]

MOST_LOSS = 0.005
_MODELS = (("gpt2", None), ("gpt3-175b", None), ("llama3-8b", 4096))
_DEGREES = (1, 2, 8)
_BLOCKS = 3
_ROUNDING = 1.0001  # of limits: units of the two problems differ, and each use is rounded up

Points = Sequence[tuple[int, int]]
"""(time, memory), faster first."""


def chained(block: BlockTrace, count: int) -> BlockTrace:
    """Return `count` copies of a block in a row as one block; a side input is shared.

    Raises:
        ValueError: the block has not one activation in and one out.
    """
    enters = [value.name for value in block.inputs if value.is_activation]
    if len(enters) != 1 or len(block.outputs) != 1:
        raise ValueError(f"{block.name} has {len(enters)} inputs and {len(block.outputs)} outputs")
    states, ops = list(block.states), list(block.ops)
    last = block.outputs[0]
    own = [s.name for s in block.states] + [op.name for op in block.ops]
    for number in range(1, count):
        names = {value.name: value.name for value in block.inputs} | {enters[0]: last}
        names |= {name: f"{name}@{number}" for name in own}
        states += [replace(s, name=names[s.name], fqn=f"{s.fqn}@{number}") for s in block.states]
        ops += [_renamed(op, names) for op in block.ops]
        last = names[block.outputs[0]]
    return replace(block, states=tuple(states), ops=tuple(ops), outputs=(last,))


def _renamed(op: OpTrace, names: Mapping[str, str]) -> OpTrace:
    return replace(
        op,
        name=names[op.name],
        inputs=tuple(names[name] for name in op.inputs),
        storage=names.get(op.storage, op.storage),
        saved=tuple(replace(t, value=names.get(t.value, t.value)) for t in op.saved),
        casts=tuple(replace(t, value=names.get(t.value, t.value)) for t in op.casts),
    )


def mixed(points: Points, count: int) -> list[tuple[int, int]]:
    """Return the undominated sums of `count` points."""
    sums: list[tuple[int, int]] = [(0, 0)]
    for _ in range(count):
        sums = _sums(sums, points)
    return sums


def largest_loss(flat: Points, decomposed: Points) -> float:
    """Return the largest relative excess of time at equal limits of memory."""
    worst = 0.0
    for time, limit in flat:
        own = next((t for t, memory in decomposed if memory <= limit), None)
        if own is not None:
            worst = max(worst, (own - time) / time)
    return worst


def loss_rows(
    name: str, seq: int | None, degrees: Sequence[int] = _DEGREES
) -> list[dict[str, Any]]:
    """Return the losses of the most frequent block class of a preset, per degree and mode."""
    loaded = load_model(name, seq=seq)
    planner = make_planner(
        TrainingJob(loaded.model, "1x8:a100_sxm_80gb", loaded.batch, global_batch_size=8)
    )
    pricer = planner.pricer(1)
    uses = Counter(call.block for call in pricer.trace.calls)
    block = pricer.trace.blocks[uses.most_common(1)[0][0]]
    rows: list[dict[str, Any]] = []
    for degree in degrees:
        for region in (False, True):
            rows.append({"model": name, "tp": degree, "region": region})
            rows[-1] |= _losses(block, pricer.layouts.timer(degree), region)
    return rows


def _losses(block: BlockTrace, timer: Timer, region: bool) -> dict[str, Any]:
    frontiers = Frontiers()
    own, flat = (
        ChoiceModel(part, timer, frozenset(), region) for part in (block, chained(block, _BLOCKS))
    )
    inner = [f"{block.outputs[0]}{f'@{n}' if n else ''}" for n in range(_BLOCKS - 1)]
    pinned = _keeping(flat, inner)
    detours = frontiers.detours(block, timer, recompute="full" if region else "none")
    covers: list[tuple[int, int]] = []
    mixes: list[tuple[int, int]] = []
    flats: list[tuple[int, int]] = []
    counts = []
    for base in (way for way in STAGE_WAYS if way in own.ways):
        free = whole_frontier(pinned, fixed=flat.fixed[base, base])
        whole: dict[Borders, Points] = {}
        cover: dict[Borders, Points] = {}
        for borders in _posed(base, detours.get(base, ())):
            every = whole_frontier(
                own.problem, eliminations=frontiers.eliminations, fixed=own.fixed[borders]
            )
            if every is None or free is None:
                return {"points": None, "cover": None, "borders": None}
            few = covering_points(every, frontiers.tolerance or 0.0)
            held = _input_bytes(block, timer.degree, region, borders[0])
            whole[borders] = [(p.time, p.memory * own.unit + held) for p in every]
            cover[borders] = [(p.time, p.memory * own.unit + held) for p in few]
        counts.append(f"{len(cover[base, base])} of {len(whole[base, base])}")
        first = _input_bytes(block, timer.degree, region, base)  # lies outside the row
        covers += [(time, memory - first) for time, memory in _rows(base, cover)]
        mixes += [(time, memory - first) for time, memory in _rows(base, whole)]
        flats += [(p.time, int(p.memory * flat.unit * _ROUNDING)) for p in free or ()]
    return {
        "points": ", ".join(counts),
        "cover": largest_loss(_undominated(mixes), _undominated(covers)),
        "borders": largest_loss(_undominated(flats), _undominated(covers)),
    }


def _posed(base: Border, ways: Sequence[Border]) -> list[Borders]:
    """Return how blocks of a stage may enter and leave, as `Pricer.detour_decisions` has it."""
    found: list[Borders] = [(base, base)]
    for way in ways:
        found += [(base, way), (way, way), (way, base)]
    return found


def _rows(base: Border, points: Mapping[Borders, Points]) -> list[tuple[int, int]]:
    """Return the undominated sums of rows that a stage may be: with one detour at most."""
    plain = points[base, base]
    found = mixed(plain, _BLOCKS)
    for way in {leaving for _, leaving in points if leaving != base}:
        ends = _sums(points[base, way], points[way, base])
        inner = mixed(_undominated([*plain, *points[way, way]]), _BLOCKS - 2)
        found += _sums(ends, inner)
    return _undominated(found)


def _sums(some: Points, others: Points) -> list[tuple[int, int]]:
    return _undominated([(t + u, m + n) for t, m in some for u, n in others])


def _input_bytes(block: BlockTrace, degree: int, region: bool, way: Border) -> int:
    """Return bytes of what enters a block, where it is kept: by every region, or by an op."""
    value = next(v for v in block.inputs if v.is_activation)
    is_saved = any(t.value == value.name for op in block.ops for t in op.saved)
    is_sliced = boundary_of(value, degree, way) != "R"
    return value.nbytes // (degree if is_sliced else 1) if region or is_saved else 0


def _keeping(model: ChoiceModel, values: Sequence[str]) -> ChoiceProblem:
    """Return the problem of a region that keeps these values, as a border of blocks does."""
    ops = list(model.problem.ops)
    for name in values if model.region else ():
        picks = model.picks[name]
        if any(pick.keep for pick in picks):
            index = model.index[name]
            ops[index] = tuple(
                replace(option, forbidden=option.forbidden or not pick.keep)
                for option, pick in zip(ops[index], picks, strict=True)
            )
    return replace(model.problem, ops=tuple(ops))


def _undominated(points: Points) -> list[tuple[int, int]]:
    left: list[tuple[int, int]] = []
    for point in sorted(points):
        if not left or point[1] < left[-1][1]:
            left.append(point)
    return left


def main() -> None:
    """Print the table, and leave with 1 where a loss is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()
    rows = [row for name, seq in _MODELS for row in loss_rows(name, seq)]
    shown = [
        tuple(f"{v:.3%}" if isinstance(v, float) else str(v) for v in row.values()) for row in rows
    ]
    print(table([tuple(rows[0]), *shown]))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if max(row[part] or 0.0 for row in rows for part in ("cover", "borders")) > MOST_LOSS:
        sys.exit(1)


if __name__ == "__main__":
    main()
