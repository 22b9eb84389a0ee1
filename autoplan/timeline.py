"""A simulated step as intervals on streams, with its parts, and as a Chrome trace.

Everything here is a prediction. `Timeline.parts` splits the step of one rank into what its kernels
do and why they wait; the parts add up to the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PARTS", "Interval", "Timeline"]

MAIN_STREAM = "compute"
PARTS = ("compute", "recompute", "tensor_parallel", "zero", "pipeline", "optimizer", "bubble")
_PART_OF = {
    "forward": "compute",
    "backward": "compute",
    "weights": "compute",
    "recompute": "recompute",
    "tensor_parallel": "tensor_parallel",
    "gather": "zero",
    "reduce": "zero",
    "send": "pipeline",
    "ties": "pipeline",
    "optimizer": "optimizer",
}
_COMMUNICATION = ("tensor_parallel", "zero", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One piece of work on one stream of one rank.

    Attributes:
        rank: pipeline rank; its data- and tensor-parallel replicas do the same.
        stream: `compute`, or the stream of a kind of communication.
        kind: forward, backward, weights, recompute, tensor_parallel, gather, reduce, send, ties,
            optimizer.
        name: for people, such as `2F0 blocks.3`.
        start_s, end_s: since the step began.
        cause: index of the interval whose end let this one start; None at the very beginning.
        action: text of the action that it belongs to; empty for gathers, reductions, ties, the
            optimizer.
        block: index of the block in the action's stage; -1 where it belongs to none.
    """

    rank: int
    stream: str
    kind: str
    name: str
    start_s: float
    end_s: float
    cause: int | None = None
    action: str = ""
    block: int = -1

    @property
    def part(self) -> str:
        """Return the part of the step that it counts for, one of `PARTS`."""
        return _PART_OF[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A predicted step.

    Attributes:
        intervals: in the order in which they were fixed; on each stream in order of time.
        num_ranks: pipeline ranks.
        step_time_s: when the last rank has stepped its optimizer.
        memory: per rank (seconds, bytes from then on), reserve included; empty if not asked for.
        title: what was simulated.
    """

    intervals: tuple[Interval, ...]
    num_ranks: int
    step_time_s: float
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    title: str = ""

    def busy_s(self, rank: int) -> dict[str, float]:
        """Return the seconds that each part's work takes on a rank, exposed or not."""
        busy = dict.fromkeys((p for p in PARTS if p != "bubble"), 0.0)
        for interval in self.intervals:
            if interval.rank == rank:
                busy[interval.part] += interval.end_s - interval.start_s
        return busy

    def on_cores_s(self, num_cores: int, replicas: int = 1) -> float:
        """Return the seconds of the step where processes share the cores of a machine.

        It is as long as the simulated one, in which every process has a core, but no shorter than
        what all of them have to do spread over the cores (the work law, Brent 1974): a process that
        waits for another lends it its core.

        Args:
            num_cores: that run the processes, each of which computes with one thread.
            replicas: data- and tensor-parallel ranks of each pipeline rank.
        """
        work_s = replicas * sum(sum(self.busy_s(r).values()) for r in range(self.num_ranks))
        return max(self.step_time_s, work_s / num_cores)

    def parts(self, rank: int) -> dict[str, float]:
        """Return the seconds of a rank's step by part; they add up to the step.

        A gap between kernels counts for the communication that the next kernel waited for, as far
        back as that explains the gap; waiting for another stage's kernels is bubble.
        """
        parts = dict.fromkeys(PARTS, 0.0)
        now = 0.0
        for interval in self.intervals:
            if interval.rank == rank and interval.stream == MAIN_STREAM:
                if interval.start_s > now:
                    self._explain(interval, now, parts)
                parts[interval.part] += interval.end_s - interval.start_s
                now = interval.end_s
        parts["bubble"] += self.step_time_s - now
        return parts

    def mean_parts(self) -> dict[str, float]:
        """Return `parts` averaged over the ranks."""
        by_rank = [self.parts(rank) for rank in range(self.num_ranks)]
        return {name: sum(parts[name] for parts in by_rank) / self.num_ranks for name in PARTS}

    def peak_bytes(self) -> tuple[int, ...]:
        """Return the largest memory of each rank."""
        return tuple(max(nbytes for _, nbytes in curve) for curve in self.memory)

    def _explain(self, waiting: Interval, since: float, parts: dict[str, float]) -> None:
        until, cause = waiting.start_s, waiting.cause
        while until > since and cause is not None:
            earlier = self.intervals[cause]
            start = max(since, earlier.start_s)
            part = earlier.part
            is_own = earlier.rank == waiting.rank or part == "pipeline"
            parts[part if part in _COMMUNICATION and is_own else "bubble"] += until - start
            until, cause = start, earlier.cause
        parts["bubble"] += until - since

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline as a Chrome trace (chrome://tracing, Perfetto): times in us."""
        return {
            "displayTimeUnit": "ms",
            "otherData": {"title": self.title, "kind": "prediction, not a measurement"},
            "traceEvents": list(self._events()),
        }

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace as JSON to `path`."""
        Path(path).write_text(json.dumps(self.chrome_trace()) + "\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        streams = list(dict.fromkeys(i.stream for i in self.intervals))
        for rank in range(self.num_ranks):
            yield _named("process_name", rank, 0, f"stage rank {rank} (predicted)")
            for number, stream in enumerate(streams):
                yield _named("thread_name", rank, number, stream)
        for interval in self.intervals:
            if interval.end_s > interval.start_s:
                yield {
                    "ph": "X",
                    "pid": interval.rank,
                    "tid": streams.index(interval.stream),
                    "name": interval.name,
                    "cat": interval.kind,
                    "ts": interval.start_s * 1e6,
                    "dur": (interval.end_s - interval.start_s) * 1e6,
                }
        for rank, curve in enumerate(self.memory):
            for seconds, nbytes in curve:
                yield {
                    "ph": "C",
                    "pid": rank,
                    "name": "predicted bytes",
                    "ts": seconds * 1e6,
                    "args": {"bytes": nbytes},
                }


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}


def step_function(samples: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Return samples in order without repetitions; of one instant's bytes the most count."""
    curve: list[tuple[float, int]] = []
    for seconds, nbytes in samples:
        if curve and curve[-1][0] == seconds:
            curve[-1] = (seconds, max(nbytes, curve[-1][1]))
        elif not curve or curve[-1][1] != nbytes:
            curve.append((seconds, nbytes))
    return tuple(curve)
