"""Rows of published measurements beside their predictions, and the numbers of a source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autoplan.report import table

__all__ = ["Outcome", "document_of", "print_sources", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row beside its prediction.

    Attributes:
        source: the source_id, up to its first slash.
        file, line, model: where the row is and what it trained.
        skipped: why it was not priced, or empty.
        left_out: what was measured and is not compared, and why.
        assumed: what the row left open.
        time_s, predicted_time_s: measured, and the range predicted; None: not compared.
        memory_bytes, predicted_bytes: likewise, of the same kind.
        memory_kind: what was counted.
        is_oom, predicted_oom: whether it ran out of memory; two values where the range is open.
    """

    source: str
    file: str
    line: int
    model: str
    skipped: str = ""
    left_out: str = ""
    assumed: str = ""
    time_s: float | None = None
    predicted_time_s: tuple[float, float] | None = None
    memory_bytes: float | None = None
    predicted_bytes: tuple[float, float] | None = None
    memory_kind: str = ""
    is_oom: bool | None = None
    predicted_oom: tuple[bool, bool] | None = None
    categories: Mapping[str, float] = field(default_factory=dict)

    @property
    def time_error(self) -> float | None:
        """Return predicted / measured - 1, 0 inside the range."""
        return _error(self.time_s, self.predicted_time_s)

    @property
    def memory_error(self) -> float | None:
        """Return predicted / measured - 1, 0 inside the range."""
        return _error(self.memory_bytes, self.predicted_bytes)


def _error(measured: float | None, predicted: tuple[float, float] | None) -> float | None:
    if measured is None or predicted is None:
        return None
    low, high = predicted
    return (
        (min(max(measured, low), high) / measured - 1)
        if low <= measured <= high
        else ((low if measured < low else high) / measured - 1)
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the numbers of one source; None where nothing was compared."""
    used = [o for o in outcomes if not o.skipped]
    times = [o.time_error for o in used if o.time_error is not None]
    memories = [o.memory_error for o in used if o.memory_error is not None]
    calls = [o for o in used if o.is_oom is not None and o.predicted_oom is not None]
    right = [o for o in calls if o.is_oom in (o.predicted_oom or ())]
    return {
        "rows_used": len(used),
        "rows_skipped": len(outcomes) - len(used),
        "rows_with_open_fields": sum(bool(o.assumed) for o in used),
        "time_rows": len(times),
        "time_mape": _mean([abs(e) for e in times]),
        "time_worst": max(times, key=abs, default=None),
        "time_bias": _mean(times),
        "time_rank_correlation": _rank_correlation(
            [
                (o.time_s, sum(o.predicted_time_s) / 2)
                for o in used
                if o.time_s and o.predicted_time_s
            ]
        ),
        "memory_rows": len(memories),
        "memory_mape": _mean([abs(e) for e in memories]),
        "memory_worst": max(memories, key=abs, default=None),
        "memory_worst_under": min(
            [e for e in memories if e < 0], default=0.0 if memories else None
        ),
        "memory_bias": _mean(memories),
        "oom_right": len(right),
        "oom_wrong": len(calls) - len(right),
        "oom_open": sum(len(set(o.predicted_oom or ())) > 1 for o in calls),
        "fit_called_oom": sum(not o.is_oom for o in calls if o not in right),
        "oom_called_fit": sum(bool(o.is_oom) for o in calls if o not in right),
        "skipped": dict(Counter(o.skipped for o in outcomes if o.skipped).most_common()),
        "left_out": dict(Counter(o.left_out for o in outcomes if o.left_out).most_common()),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 0, equal values sharing the mean of theirs."""
    order = sorted(values)
    first = {v: order.index(v) for v in set(values)}
    return [first[v] + (order.count(v) - 1) / 2 for v in values]


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, None for fewer than three pairs."""
    if len(pairs) < 3:
        return None
    xs, ys = (_ranks(side) for side in zip(*pairs, strict=True))
    mean = (len(xs) - 1) / 2
    cross = sum((x - mean) * (y - mean) for x, y in zip(xs, ys, strict=True))
    norm = math.sqrt(sum((x - mean) ** 2 for x in xs) * sum((y - mean) ** 2 for y in ys))
    return cross / norm if norm else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def print_sources(by_source: Mapping[str, Sequence[Outcome]]) -> None:
    """Print a table with a line per source, and why rows were skipped."""
    head = (
        "source", "used", "skipped", "open", "time", "mean", "worst", "bias", "rank",
        "memory", "mean", "worst", "under", "bias", "fit/OOM right", "open", "wrong",
    )  # fmt: skip
    rows = [head]
    for source, outcomes in by_source.items():
        s = summary(outcomes)
        rank = s["time_rank_correlation"]
        rows.append(
            (
                source, str(s["rows_used"]), str(s["rows_skipped"]),
                str(s["rows_with_open_fields"]), str(s["time_rows"]),
                _percent(s["time_mape"]).lstrip("+"), _percent(s["time_worst"]),
                _percent(s["time_bias"]), "" if rank is None else f"{rank:.3f}",
                str(s["memory_rows"]), _percent(s["memory_mape"]).lstrip("+"),
                _percent(s["memory_worst"]), _percent(s["memory_worst_under"]),
                _percent(s["memory_bias"]), str(s["oom_right"]), str(s["oom_open"]),
                str(s["oom_wrong"]),
            )
        )  # fmt: skip
    print(table(rows))
    for source, outcomes in by_source.items():
        for reason, count in summary(outcomes)["skipped"].items():
            print(f"  {source}: {count} skipped: {reason}")
        for reason, count in summary(outcomes)["left_out"].items():
            print(f"  {source}: {count} not compared, {reason}")


def document_of(by_source: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Return the numbers of every source, and every row, as JSON types."""
    rows = [
        {**asdict(o), "time_error": o.time_error, "memory_error": o.memory_error}
        for outcomes in by_source.values()
        for o in outcomes
    ]
    return {"sources": {name: summary(o) for name, o in by_source.items()}, "rows": rows}
