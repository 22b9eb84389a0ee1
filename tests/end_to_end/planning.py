"""Plans made by the planner for the models of `tests.numerics`, each model traced once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from autoplan.cluster import Cluster
from autoplan.frontiers import Decision
from autoplan.graph import Trace
from autoplan.optimizing import find_plan
from autoplan.plan import Plan, SearchRecord
from autoplan.planner import Planner, make_planner
from autoplan.settings import Setting
from autoplan.stage_ends import even_ends
from autoplan.training_job import TrainingJob
from tests.numerics import build, global_batch

__all__ = ["decided_plan", "planned", "planner_of"]


@functools.cache
def _traces(name: str) -> dict[int, Trace]:
    """Return the traces of a model by micro-batch size; filled by the planners that share it."""
    return {}


def planner_of(
    name: str, world_size: int, *, rows: int, memory: str | None = None, **pins: Any
) -> Planner:
    """Return the planning problem of a model on CPU processes, of `memory` each without reserve."""
    model, loss = build(name)
    cluster = Cluster.parse(f"{world_size}:cpu")
    if memory is not None:
        cluster = cluster.with_memory(memory, reserve_bytes=0)
    planner = make_planner(TrainingJob(model, cluster, global_batch(rows), loss_fn=loss), pins=pins)
    planner.traces.captured = _traces(name)
    return planner


def planned(name: str, world_size: int, **options: Any) -> Plan:
    """Return what `autoplan.optimize` returns; options as in `planner_of`."""
    planner = planner_of(name, world_size, **options)
    return find_plan(planner, 60.0, None, False)


def decided_plan(planner: Planner, setting: Setting, decisions: Sequence[Decision]) -> Plan:
    """Return the plan of given decisions, one per call, with even cuts."""
    ends = even_ends(len(decisions), setting.pp)
    record = SearchRecord(status="priced", objective_s=0.0, bound_s=0.0, gap=0.0, wall_time_s=0.0)
    return planner.write(setting, ends, decisions, record)
