"""Why a plan has not the settings that someone expected: a rule, memory, or time, and how much.

`Question` is what a plan remembers of the problem that it answers. With it the problem is solved
again under the settings in question; without it (a plan from a file) the outcomes answer that the
search recorded for every setting.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from autoplan.deferral import splits
from autoplan.errors import InfeasibleError, SearchLimitError
from autoplan.limits import constraint_texts
from autoplan.meshes import AXIS_ORDERS
from autoplan.plan import Plan
from autoplan.schedules import SCHEDULES
from autoplan.setting_rules import broken_rules
from autoplan.settings import check_pins
from autoplan.stage_ends import most_stages
from autoplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Question", "WhyNot", "why_not"]

_TIME_LIMIT_S = 60.0
_SHOWN_CATEGORIES = 3


@dataclass(frozen=True, slots=True)
class Question:
    """The planning problem of a plan; it does not keep the user's model alive."""

    planner: Planner
    model: weakref.ref[nn.Module]

    @classmethod
    def of(cls, planner: Planner) -> Question:
        """Return the question of a planner."""
        gone = replace(planner.traces, model=nn.Identity())
        return cls(replace(planner, traces=gone), weakref.ref(planner.traces.model))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: a copy of a plan answers from its record."""
        return type(None), ()

    def with_settings(self, settings: Mapping[str, Any]) -> Planner | None:
        """Return the problem with more settings pinned; None if the model is gone."""
        model = self.model()
        if model is None:
            return None
        changed = replace(
            self.planner,
            traces=replace(self.planner.traces, model=model),
            pins={**self.planner.pins, **settings},
            ops_bounds={},
            posed={},
        )
        if changed.pins.get("recompute") != self.planner.pins.get("recompute"):
            changed.forget_prices()
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The reason.

    Attributes:
        kind: `chosen`: the plan has these settings; `rule`: they cannot be; `memory`: no plan with
            them fits; `time`: the fastest plan with them is slower; `unknown`: not settled.
        text: in words.
        step_time_s: of the fastest plan with them, or a bound of it; None if there is none.
        excess_bytes: by which the leanest plan with them exceeds a device; 0 if one fits.
        plan: the fastest plan with them, if it was solved and fits.
    """

    kind: Literal["chosen", "rule", "memory", "time", "unknown"]
    text: str
    step_time_s: float | None = None
    excess_bytes: int = 0
    plan: Plan | None = None

    def __str__(self) -> str:
        return self.text


def why_not(plan: Plan, settings: Mapping[str, Any]) -> WhyNot:
    """Return why a plan has not some settings; see `Plan.why_not`."""
    check_pins(settings)
    if not settings:
        raise ValueError("name a setting, as in why_not(tp=8, pp=1)")
    wanted = ", ".join(f"{name}={value}" for name, value in settings.items())
    if _has(plan, settings):
        return WhyNot(
            kind="chosen",
            text=f"{wanted} is what the plan does",
            step_time_s=plan.predicted.step_time_s,
            plan=plan,
        )
    planner = None if plan.question is None else plan.question.with_settings(settings)
    if planner is None:
        return _recorded(plan, settings, wanted)
    return _solved(plan, planner, plan.question.planner, settings, wanted)


def _has(plan: Plan, settings: Mapping[str, Any]) -> bool:
    """Return whether a plan has settings already."""
    own: dict[str, Any] = {name: getattr(plan.mesh, name) for name in ("dp", "tp", "pp")}
    own |= {"dp_replicate": plan.mesh.dp_replicate, "axis_order": plan.mesh.axis_order}
    for name in ("zero_stage", "microbatch_size", "num_microbatches", "schedule"):
        own[name] = getattr(plan, name)
    own["virtual_stages"] = plan.num_chunks
    modes = {
        plan.recompute[block.recompute].mode
        for stage in plan.stages
        for block in stage.blocks
        if block.fqn
    }
    own["recompute"] = next(iter(modes)) if len(modes) == 1 else None
    return all(own[name] == value for name, value in settings.items())


def _solved(
    plan: Plan, planner: Planner, asked: Planner, settings: Mapping[str, Any], wanted: str
) -> WhyNot:
    from autoplan.optimizing import find_plan

    conflict = [
        f"you pinned {name}={value}"
        for name, value in asked.pins.items()
        if settings.get(name, value) != value
    ]
    conflict += [
        f"you allowed only {text}"
        for key, text in constraint_texts({}, asked.limits).items()
        for name in (key.split()[1],)
        if name in settings and not asked.limits.allows(name, settings[name])
    ]
    trace = planner.smallest_trace()
    conflict += broken_rules(
        planner.cluster,
        planner.workload,
        most_stages(trace),
        planner.pins,
        can_split=splits(trace),
    )
    if conflict:
        reasons = tuple(dict.fromkeys(conflict))
        return WhyNot(kind="rule", text=f"{wanted} cannot be: " + "; ".join(reasons))
    try:
        other = find_plan(planner, _TIME_LIMIT_S, compare=False)
    except ValueError as error:
        return WhyNot(kind="rule", text=f"{wanted} cannot be: {error}")
    except SearchLimitError as error:
        return WhyNot(kind="unknown", text=f"{wanted} is not settled: {error}")
    except InfeasibleError as error:
        excess = error.need_bytes - error.capacity_bytes
        if not error.need_bytes:
            return WhyNot(kind="rule", text=f"{wanted} cannot be: {error}")
        return WhyNot(
            kind="memory",
            text=f"{wanted} does not fit: the leanest plan with it needs "
            f"{format_bytes(error.need_bytes)} of {format_bytes(error.capacity_bytes)} a device, "
            f"{format_bytes(excess)} too much; the largest part is {error.category}",
            excess_bytes=excess,
        )
    return _slower(plan, other, wanted)


def _slower(plan: Plan, other: Plan, wanted: str) -> WhyNot:
    """Return by how much the fastest plan with the settings is slower, and in which categories."""
    own_s, other_s = plan.predicted.step_time_s, other.predicted.step_time_s
    own, theirs = plan.predicted.time_by_category, other.predicted.time_by_category
    more = sorted(((theirs[name] - own.get(name, 0.0), name) for name in theirs), reverse=True)
    parts = [
        f"{name} +{format_seconds(seconds)}"
        for seconds, name in more[:_SHOWN_CATEGORIES]
        if seconds > 0
    ]
    where = f" ({', '.join(parts)})" if parts else ""
    amount = f"{other_s / own_s - 1:.2%} slower" if other_s > own_s else "no faster"
    return WhyNot(
        kind="time",
        text=f"{wanted} is {amount}: {format_seconds(other_s)} a step against "
        f"{format_seconds(own_s)}{where}",
        step_time_s=other_s,
        plan=other,
    )


def _recorded(plan: Plan, settings: Mapping[str, Any], wanted: str) -> WhyNot:
    """Return the reason that the outcomes of the search give."""
    if "recompute" in settings:
        return WhyNot(
            kind="unknown",
            text=f"{wanted}: outcomes are recorded by mesh, not by recompute; plan again with "
            "recompute pinned",
        )
    matching = {}
    for name, outcome in plan.search.outcomes.items():
        values = _named_values(name)
        if all(values[key] == value for key, value in settings.items()):
            matching[name] = outcome
    if not matching:
        limits = f" under {', '.join(plan.search.constraints)}" if plan.search.constraints else ""
        return WhyNot(
            kind="rule", text=f"{wanted} cannot be: no setting with it obeys the rules{limits}"
        )
    kinds = {name: outcome.partition(": ")[0] for name, outcome in matching.items()}
    order = ("best", "slower", "cut", "unexplored", "infeasible")
    nearest = min(matching, key=lambda name: order.index(kinds[name]))
    reason = matching[nearest].partition(": ")[2]
    kind: Literal["memory", "time", "unknown"] = "time"
    if kinds[nearest] == "infeasible":
        kind = "memory"
    elif kinds[nearest] == "unexplored":
        kind = "unknown"
    more = f" (the nearest of {len(matching)} such settings)" if len(matching) > 1 else ""
    return WhyNot(kind=kind, text=f"{wanted}: {nearest}{more}: {reason}")


def _named_values(name: str) -> dict[str, Any]:
    """Return the settings that the name of one says, by their own names."""
    short = {"zero": "zero_stage", "mbs": "microbatch_size", "m": "num_microbatches"}
    short["v"] = "virtual_stages"
    values: dict[str, Any] = {"virtual_stages": 1, "dp_replicate": 1}
    for key, value in re.findall(r"(\w+)=(\d+)", name):
        values[short.get(key, key)] = int(value)
    words = [word for word in name.split() if "=" not in word]
    usual = "interleaved" if values["virtual_stages"] > 1 else "1f1b"
    schedule = next((word for word in words if word in SCHEDULES), usual)
    values["schedule"] = schedule if values["pp"] > 1 else "none"
    values["axis_order"] = next((word for word in words if word in AXIS_ORDERS), AXIS_ORDERS[0])
    return values
