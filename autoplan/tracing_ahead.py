"""Trace what a search will need, the larger micro-batches in processes beside this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autoplan.autograd_threads import has_autograd_threads
from autoplan.bounds import blocks_bound, frontiers_bound, ops_bound, static_reason
from autoplan.exporter import import_export
from autoplan.graph import Trace
from autoplan.model_traces import TRACED_ROWS
from autoplan.planner import Planner
from autoplan.search.forks import Beside
from autoplan.settings import Setting

__all__ = ["trace_ahead"]

_WORTH_A_PROCESS_MODULES = 50  # smaller models take less than starting one

_Sent = dict[int, tuple[Trace, bytes | None]]


def trace_ahead(planner: Planner) -> None:
    """Trace the sizes that settings need, the larger ones in processes beside this one.

    Which settings there are follows from the smallest trace. The processes start before that is
    there, so what they find may not be needed. This one prepares the search while it waits.
    """
    beside = _traced_beside(planner)
    try:
        settings = planner.settings()
        sizes = {setting.microbatch_size for setting in settings}
        if not beside and has_autograd_threads():
            # A process that is forked for the search could not trace what is missing.
            for size in sorted(sizes):
                planner.trace(size)
        if not beside or max(sizes) == 1:
            return
        _look_ahead(planner, settings, lambda: all(one.is_done() for one in beside))
        begun = time.perf_counter()
        for one in beside:
            for rows, (found, program) in one.result().items():
                planner.traces.receive(rows, found, program)
        planner.traces.trace_time_s += time.perf_counter() - begun
    finally:
        for one in beside:
            one.end()


def _traced_beside(planner: Planner) -> list[Beside[_Sent]]:
    """Start to trace larger sizes in processes of their own, where it is worth it."""
    traces, workers = planner.traces, planner.num_workers()
    most = planner.most_rows()
    missing = [rows for rows in TRACED_ROWS if rows <= most and rows not in traces.captured]
    is_large = sum(1 for _ in traces.model.modules()) > _WORTH_A_PROCESS_MODULES
    if not missing or not is_large or "microbatch_size" in planner.pins or workers == 1:
        return []
    if has_autograd_threads():
        return []
    import_export()
    count = min(workers - 1, len(missing))
    shares = [missing[index::count] for index in range(count)]
    return [
        Beside(lambda share=share: {rows: traces.to_send(rows) for rows in share})  # type: ignore[misc]
        for share in shares
    ]


def _look_ahead(planner: Planner, settings: Sequence[Setting], is_over: Callable[[], bool]) -> None:
    """Bound settings of what is traced, as the search will, until something is over."""
    ready = [one for one in settings if one.microbatch_size in planner.traces.captured]
    for bound in (ops_bound, blocks_bound, frontiers_bound):
        for setting in sorted(ready, key=lambda one: ops_bound(planner, one)):
            if is_over():
                return
            if static_reason(planner, setting) is None:
                bound(planner, setting)
