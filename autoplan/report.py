"""A plan as text: what was chosen, what it is predicted to take, why, and what else was there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoplan.plan import Plan, StagePlan
from autoplan.plan_timeline import simulate
from autoplan.timeline import Timeline
from autoplan.units import format_bytes, format_seconds

__all__ = ["plan_report", "table"]


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Return rows as aligned text; the first is the heading, numbers sit right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def plan_report(plan: Plan) -> str:
    """Return the report of a plan; every number in it is a prediction unless it says measured."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    predicted, search = plan.predicted, plan.search
    yield f"Plan of {plan.model} for {plan.provenance.get('cluster', 'a cluster')}"
    yield (
        f"  mesh {plan.mesh}, ZeRO stage {plan.zero_stage}, schedule {plan.schedule}, "
        f"{plan.num_microbatches} micro-batches of {plan.microbatch_size} "
        f"(global batch {plan.global_batch_size}), {plan.optimizer}"
        + (f", {plan.mixed_precision} mixed precision" if plan.mixed_precision != "none" else "")
        + (f", autocast to {plan.autocast}" if plan.autocast != "none" else "")
    )
    yield (
        f"  predicted step time {format_seconds(predicted.step_time_s)}, predicted peak "
        f"{format_bytes(max(predicted.peak_memory_bytes))} of "
        f"{format_bytes(predicted.capacity_bytes)} a device"
    )
    if predicted.host_bytes:
        most = format_bytes(max(predicted.host_bytes))
        yield f"  offload: up to {most} of each rank's states in host memory, where it steps"
    if search.status == "priced":
        yield "  given, not searched"
    else:
        counts = ", ".join(f"{n} {kind}" for kind, n in search.settings.items() if n)
        yield (
            f"  search: {search.status}, bound {format_seconds(search.bound_s)}, gap "
            f"{search.gap:.2%}, {search.wall_time_s:.1f} s, settings: {counts}"
        )
    if search.constraints:
        yield f"  under {', '.join(search.constraints)}"
    yield ""
    yield "Stages"
    yield table(
        [("stage", "blocks", "recompute", "time", "peak"), *(_stage(plan, s) for s in plan.stages)]
    )
    yield ""
    place = "rank" if plan.num_chunks > 1 else "stage"
    yield f"Memory by category at the peak of each {place}"
    names = list(predicted.memory_by_category[0])
    yield table(
        [
            (place, *names),
            *(
                (str(i), *(format_bytes(parts[n]) for n in names))
                for i, parts in enumerate(predicted.memory_by_category)
            ),
        ]
    )
    yield ""
    yield from _step(plan)
    yield from _decisions(plan)
    if plan.simpler:
        yield ""
        yield "Simpler strategies, priced by the same model"
        yield table([("strategy", "step time", "of the plan's", "peak", "fits"), *_simpler(plan)])
    yield ""
    looked = ", ".join(f"{n} {how}" for how, n in predicted.lookups.items())
    profile = plan.provenance.get("profile", "unknown")
    yield f"Predicted with profile {profile}; kernels of a micro-batch: {looked}"
    for note in plan.notes:
        yield f"Note: {note}"


def _step(plan: Plan) -> Iterator[str]:
    """Yield the simulated step by part, or for a plan without costs what the search added up."""
    if plan.costs is None:
        yield "Time of a step by category"
        shown = {k: v for k, v in plan.predicted.time_by_category.items() if v > 0}
        yield table([("category", "time"), *((k, format_seconds(v)) for k, v in shown.items())])
        return
    timeline = simulate(plan, with_memory=False)
    parts = {k: v for k, v in timeline.mean_parts().items() if v > 0}
    yield f"Simulated step, a prediction: {format_seconds(timeline.step_time_s)}"
    rows = [("part, mean over stages", "time", "share")]
    for name, seconds in parts.items():
        rows.append((_PART_TITLES[name], format_seconds(seconds), _share(seconds, timeline)))
    yield table(rows)


def _share(seconds: float, timeline: Timeline) -> str:
    return f"{seconds / timeline.step_time_s:.1%}"


_PART_TITLES = {
    "compute": "compute",
    "recompute": "recompute",
    "tensor_parallel": "exposed tensor-parallel communication",
    "zero": "exposed ZeRO communication",
    "pipeline": "exposed pipeline communication",
    "optimizer": "optimizer",
    "bubble": "bubble (waiting for other stages)",
}


def _stage(plan: Plan, stage: StagePlan) -> tuple[str, str, str, str, str]:
    first, last = stage.blocks[0], stage.blocks[-1]
    counts: dict[str, int] = {}
    for block in stage.blocks:
        counts[block.recompute] = counts.get(block.recompute, 0) + 1
    modes = ", ".join(f"{n} x {name}" for name, n in counts.items())
    rank = stage.index % plan.mesh.pp
    return (
        str(stage.index) if plan.num_chunks == 1 else f"{stage.index} on rank {rank}",
        f"{first.fqn or first.block} .. {last.fqn or last.block} ({len(stage.blocks)})",
        modes,
        format_seconds(plan.predicted.stage_time_s[rank]),
        format_bytes(plan.predicted.peak_memory_bytes[rank]),
    )


def _decisions(plan: Plan) -> Iterator[str]:
    kept = {name: entry for name, entry in plan.recompute.items() if entry.keep}
    if kept:
        yield ""
        yield "Recompute marks: kept results, everything else in the block runs again"
        for name, entry in kept.items():
            yield f"  {name}: {', '.join(entry.keep)}"
    if plan.mesh.tp > 1:
        yield ""
        yield "Tensor-parallel placements of parameters (S: sharded dimension, R: replicated)"
        for name, layout in plan.placements.items():
            sharded = {k: v for k, v in layout.parameters.items() if v != "R"}
            text = ", ".join(f"{k} {v}" for k, v in sharded.items()) or "all replicated"
            yield f"  {name}: {text}"
        yield from _shared(plan)


def _shared(plan: Plan) -> Iterator[str]:
    """Yield how parameters that several calls have lie: the same for each of them."""
    stored: dict[str, str] = {}
    for stage in plan.stages:
        for block in stage.blocks:
            for key, text in plan.placements[block.placements].parameters.items():
                stored.setdefault(f"{block.fqn}.{key}" if block.fqn else key, text)
                stored.setdefault(key, text)
    for group in plan.shared:
        text = next((stored[name] for name in group if name in stored), "R")
        how = "whole on every rank" if text == "R" else f"in slices {text}"
        yield f"  one parameter, {how}: {' = '.join(group)}"


def _simpler(plan: Plan) -> Iterator[tuple[str, str, str, str, str]]:
    own_s = plan.predicted.step_time_s
    rows = [
        (s.name, s.step_time_s, s.peak_memory_bytes, "yes" if s.fits else "no")
        for s in plan.simpler
    ]
    rows.append(("this plan", own_s, max(plan.predicted.peak_memory_bytes), "yes"))
    for name, seconds, peak, fits in rows:
        yield name, format_seconds(seconds), f"{seconds / own_s:.2f}", format_bytes(peak), fits
