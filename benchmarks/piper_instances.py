"""Exact search on the layer graphs of Piper under Piper's own objective.

Source of the problem: Tarnawski, Narayanan, Phanishayee: Piper (NeurIPS 2021), section 3. A graph
of layers is cut into stages along downsets. Stage i runs on d[i] * t[i] devices, d[i] a divisor of
the micro-batches of a batch; every layer has one of its options for t[i]. With s[i] the sum of d
over stage i and the stages after it, and y[i] = ceil(s[i] / d[i]) micro-batches in flight:

    minimise   max_i  (sum of compute and of bytes over crossing edges / bandwidth) / d[i]
                      + 4 (d[i] - 1) / d[i] * parameter bytes / micro-batches / bandwidth
    subject to sum of A * y[i] + B over the layers of stage i <= memory of a device
               sum_i d[i] t[i] <= devices

For a threshold T the least s for every (downset, devices) follows by dynamic programming over
downsets (_least_degrees). The least compute of a stage within memory is a knapsack; first its
linear relaxation stands for it, which makes every infeasible T a lower bound; the stages of each
partition that it allows are then solved exactly by `autoplan.search.stage` (_bisect).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.search.problem import BlockOption, Run
from autoplan.search.stage import solve_stage

__all__ = ["PiperAnswer", "PiperInstance", "load_instance", "solve_instance"]

_TICKS = 1e9  # per unit of time of an instance
_MEMORY_UNITS = 100  # per byte: some instances count hundredths of bytes
_TOLERANCE = 1e-7
_MAX_DOWNSETS = 1000
_NEVER = 1e30
_CHUNK = 64  # numbers of micro-batches in flight that are bounded at once

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperInstance:
    """A layer graph with its options; arrays are per tensor-parallel degree.

    Attributes:
        times, held, constant: [layer, option] time, and the memory coefficients A and B.
        sync_in, sync_out: [edge, option] bytes that an edge adds where it enters or leaves a stage.
        parameters: [layer] bytes.
        edges: (source, target, bytes).
        downsets: closed under successors, as bits, smallest first.
    """

    name: str
    bandwidth: float
    edges: tuple[tuple[int, int, float], ...]
    times: Mapping[int, _Floats]
    held: Mapping[int, _Floats]
    constant: Mapping[int, _Floats]
    sync_in: Mapping[int, _Floats]
    sync_out: Mapping[int, _Floats]
    parameters: Mapping[int, _Floats]
    downsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperAnswer:
    """Time per sample, its proven bound, seconds taken, and stages as (layers, d, t)."""

    time: float
    bound: float
    seconds: float
    stages: tuple[tuple[int, int, int], ...]


def load_instance(path: Path, bandwidth: float) -> PiperInstance | None:
    """Return the instance in a file, or None if it has too many downsets for this search.

    The listed values were reached with a bandwidth (bytes per unit of time) of their own.
    """
    document = json.loads(path.read_text())
    nodes = document["nodes"]
    index = {node["id"]: number for number, node in enumerate(nodes)}
    edges = tuple(
        (index[e["sourceId"]], index[e["destId"]], float(e["communicationCost"]))
        for e in document["edges"]
    )
    downsets = _downsets(len(nodes), edges)
    if downsets is None:
        return None
    degrees = sorted({int(degree) for node in nodes for degree in node["TMPCs"]})
    tables: dict[str, dict[int, _Floats]] = {
        key: {} for key in ("times", "held", "constant", "sync_in", "sync_out", "parameters")
    }
    ids = [node["id"] for node in nodes]
    for degree in degrees:
        options = [_options(node, degree) for node in nodes]
        tables["times"][degree] = _column(options, "timePerSample")
        tables["held"][degree] = _column(options, "memoryUsageA")
        tables["constant"][degree] = _column(options, "memoryUsageB")
        tables["parameters"][degree] = _column(options, "parameterSize")[:, 0]
        tables["sync_in"][degree] = np.array(
            [[o["syncTimeFw"].get(str(ids[u]), 0.0) for o in options[v]] for u, v, _ in edges]
        )
        tables["sync_out"][degree] = np.array(
            [[o["syncTimeBw"].get(str(ids[v]), 0.0) for o in options[u]] for u, v, _ in edges]
        )
    return PiperInstance(
        name=path.stem,
        bandwidth=bandwidth,
        edges=edges,
        downsets=downsets,
        **tables,
    )


def _options(node: Mapping[str, Any], degree: int) -> list[Mapping[str, Any]]:
    """Return two options of a layer at a degree; a layer without any gets ones that never fit."""
    options = node["TMPCs"].get(str(degree), [])
    if not options:
        never = {
            "timePerSample": _NEVER,
            "parameterSize": 0.0,
            "memoryUsageA": _NEVER,
            "memoryUsageB": _NEVER,
            "syncTimeFw": {},
            "syncTimeBw": {},
        }
        return [never, never]
    return [options[0], options[-1]]


def _column(options: Sequence[Sequence[Mapping[str, Any]]], key: str) -> _Floats:
    return np.array([[float(option[key]) for option in own] for own in options])


def _downsets(size: int, edges: Sequence[tuple[int, int, float]]) -> tuple[int, ...] | None:
    """Return the sets of layers that hold every successor of theirs, smallest first."""
    after = [0] * size
    for source, target, _ in edges:
        after[source] |= 1 << target
    seen = {0}
    pending = [0]
    while pending:
        current = pending.pop()
        for layer in range(size):
            grown = current | 1 << layer
            if grown not in seen and not after[layer] & ~current:
                seen.add(grown)
                pending.append(grown)
                if len(seen) > _MAX_DOWNSETS:
                    return None
    return tuple(sorted(seen, key=lambda bits: (bits.bit_count(), bits)))


@dataclass(slots=True)
class _Part:
    """All stages that end with one downset, at one tensor-parallel degree.

    Attributes:
        inner: index of the downset that each stage leaves to those after it.
        layers: [stage, layer] whether the stage has the layer.
        times: [stage, layer, option] compute and edges, in time.
        parameters: [stage] bytes.
        least: [stage, y - 1] bound of the sum of times with y in flight; infinite: does not fit.
        is_exact: of `least`.
    """

    degree: int
    inner: NDArray[np.int64]
    layers: NDArray[np.bool_]
    times: _Floats
    parameters: _Floats
    least: _Floats
    is_exact: NDArray[np.bool_]


@dataclass(slots=True)
class _Problem:
    instance: PiperInstance
    devices: int
    memory: float
    microbatches: int
    parts: list[list[_Part]] = field(default_factory=list)

    @property
    def divisors(self) -> list[int]:
        """Return the degrees of data parallelism."""
        return [d for d in range(1, self.devices + 1) if self.microbatches % d == 0]

    @property
    def most_degrees(self) -> int:
        """Return the largest sum of degrees of data parallelism."""
        return min(self.microbatches, self.devices)


def solve_instance(
    instance: PiperInstance, *, devices: int, memory: float, microbatches: int
) -> PiperAnswer:
    """Return the least time per sample with its bound.

    Raises:
        ValueError: no partition fits the memory.
    """
    started = time.perf_counter()
    problem = _Problem(instance, devices, memory, microbatches)
    problem.parts.append([])
    for index in range(1, len(instance.downsets)):
        problem.parts.append(
            [_part(problem, index, degree) for degree in instance.times if degree <= devices]
        )
    low, best, stages = _bisect(problem)
    if stages is None:
        raise ValueError(f"{instance.name}: no partition fits {memory:g} bytes")
    return PiperAnswer(
        time=best,
        bound=min(low, best),
        seconds=time.perf_counter() - started,
        stages=tuple((int(part.layers[row].sum()), d, part.degree) for part, row, d, _ in stages),
    )


_Stage = tuple[_Part, int, int, int]
"""Part, row in it, d, y."""


def _part(problem: _Problem, index: int, degree: int) -> _Part:
    """Return the stages that a downset may end with."""
    instance = problem.instance
    outer = instance.downsets[index]
    inner = [i for i, d in enumerate(instance.downsets[:index]) if d & outer == d]
    size = len(instance.times[degree])
    layers = np.array(
        [[bool((outer & ~instance.downsets[i]) >> v & 1) for v in range(size)] for i in inner]
    ).reshape(-1, size)
    times = np.where(layers[:, :, None], instance.times[degree][None], 0.0)
    for edge, (source, target, nbytes) in enumerate(instance.edges):
        enters = layers[:, target] & ~layers[:, source]
        leaves = layers[:, source] & ~layers[:, target]
        cost_in = 2 * (nbytes + instance.sync_in[degree][edge]) / instance.bandwidth
        cost_out = 2 * (nbytes + instance.sync_out[degree][edge]) / instance.bandwidth
        times[:, target] += enters[:, None] * cost_in
        times[:, source] += leaves[:, None] * cost_out
    least = _relaxed(problem, degree, layers, times)
    return _Part(
        degree=degree,
        inner=np.array(inner, dtype=np.int64),
        layers=layers,
        times=times,
        parameters=layers @ instance.parameters[degree],
        least=least,
        is_exact=np.zeros(least.shape, dtype=np.bool_),
    )


def _relaxed(problem: _Problem, degree: int, layers: NDArray[np.bool_], times: _Floats) -> _Floats:
    """Return [stage, y - 1] linear relaxations of the least sum of times; infinite: no fit."""
    most = problem.most_degrees
    chunks = [np.zeros((len(layers), 0))]
    for first in range(1, most + 1, _CHUNK):
        in_flight = np.arange(first, min(first + _CHUNK, most + 1))
        chunks.append(_relaxed_chunk(problem, degree, layers, times, in_flight))
        if not np.isfinite(chunks[-1][:, -1]).any():
            break
    return np.concatenate(chunks, axis=1)


def _relaxed_chunk(
    problem: _Problem,
    degree: int,
    layers: NDArray[np.bool_],
    times: _Floats,
    in_flight: NDArray[np.int64],
) -> _Floats:
    """Return `_relaxed` at some numbers of micro-batches in flight, [stage, y]."""
    instance, memory = problem.instance, problem.memory
    held = instance.held[degree] * in_flight[:, None, None] + instance.constant[degree]
    first_is_quick = times[:, :, 0] <= times[:, :, 1]
    first_is_lean = held[:, :, 0] <= held[:, :, 1]
    fast = np.where(first_is_quick[:, None], held[None, :, :, 0], held[None, :, :, 1])
    lean = held.min(axis=2)
    need = (layers[:, None] * fast).sum(axis=2) - memory
    quick = times.min(axis=2)
    least = np.where(layers @ lean.T > memory, np.inf, quick.sum(axis=1)[:, None])
    row, y = np.nonzero((need > 0) & np.isfinite(least))
    leaner = np.where(first_is_lean[y], times[row, :, 0], times[row, :, 1])
    gain = layers[row] * (fast[row, y] - lean[y])
    cost = np.maximum(leaner - quick[row], 0.0) * layers[row]
    least[row, y] += _fractional(gain, cost, need[row, y])
    return least


def _fractional(gain: _Floats, cost: _Floats, need: _Floats) -> _Floats:
    """Return per row the least cost of gaining `need` from divisible items."""
    rate = np.full(gain.shape, np.inf)
    np.divide(cost, gain, out=rate, where=gain > 0)
    order = np.argsort(rate, axis=1)
    gains = np.take_along_axis(gain, order, axis=1)
    costs = np.take_along_axis(cost, order, axis=1)
    before = np.cumsum(gains, axis=1) - gains
    share = np.zeros(gains.shape)
    np.divide(need[:, None] - before, gains, out=share, where=gains > 0)
    return np.asarray((np.clip(share, 0.0, 1.0) * costs).sum(axis=1))


def _bisect(problem: _Problem) -> tuple[float, float, list[_Stage] | None]:
    """Return a threshold that no partition is below, and the time and stages of the best one.

    A threshold is given up when the bounds allow no partition. A partition that they allow has its
    stages solved; if that shows it to be slower, the same threshold is asked again.
    """
    every = [p.least[np.isfinite(p.least)] for own in problem.parts for p in own]
    threshold = 2 * max((float(values.max()) for values in every if len(values)), default=0.0)
    low, best, stages = 0.0, np.inf, None
    while best > low * (1 + _TOLERANCE):
        found = _partition(problem, threshold)
        if found is None and stages is None:
            break
        if found is None:
            low = threshold
        else:
            value = max(_exact_time(problem, stage) for stage in found)
            if value < best:
                best, stages = value, found
            if value > threshold:
                continue
        threshold = (low + best) / 2
    return low, best, stages


def _sync(problem: _Problem, part: _Part, d: int) -> _Floats:
    """Return [stage] time of reducing gradients over d replicas."""
    rate = 4 * (d - 1) / d / problem.microbatches / problem.instance.bandwidth
    return part.parameters * rate


def _partition(problem: _Problem, threshold: float) -> list[_Stage] | None:
    """Return a partition whose bounds are within a threshold, or None."""
    degrees, choices = _least_degrees(problem, threshold)
    last = degrees[-1]
    if not np.isfinite(last).any():
        return None
    index, used = len(degrees) - 1, int(np.argmin(last))
    stages: list[_Stage] = []
    while index > 0:
        part_index, row, d = choices[index][:, used].tolist()
        part = problem.parts[index][part_index]
        y = -(-int(degrees[index][used]) // d)
        stages.append((part, row, d, y))
        index = int(part.inner[row])
        used -= d * part.degree
    return stages


def _least_degrees(
    problem: _Problem, threshold: float
) -> tuple[list[_Floats], list[NDArray[np.int64]]]:
    """Return per downset [devices] the least sum of d, and the [part, row, d] that it arises by."""
    devices = problem.devices
    degrees = [np.zeros(devices + 1)]
    choices = [np.full((3, devices + 1), -1)]
    for own in problem.parts[1:]:
        best = np.full(devices + 1, np.inf)
        how = np.full((3, devices + 1), -1)
        for part_index, part in enumerate(own):
            after = np.stack([degrees[i] for i in part.inner])
            for d in problem.divisors:
                used = d * part.degree
                if used > devices:
                    break
                budget = d * (threshold - _sync(problem, part, d))
                most_y = (part.least <= budget[:, None]).sum(axis=1)
                rows = np.nonzero(most_y > 0)[0]
                if not len(rows):
                    continue
                sums = after[rows, : devices + 1 - used] + d
                limit = np.minimum(most_y[rows] * d, problem.most_degrees)
                sums = np.where(sums <= limit[:, None], sums, np.inf)
                pick = sums.argmin(axis=0)
                value = sums[pick, np.arange(sums.shape[1])]
                better = np.nonzero(value < best[used:])[0]
                how[0, used + better] = part_index
                how[1, used + better] = rows[pick[better]]
                how[2, used + better] = d
                best[used + better] = value[better]
        degrees.append(best)
        choices.append(how)
    return degrees, choices


def _bounded_time(problem: _Problem, stage: _Stage) -> float:
    part, row, d, y = stage
    return float(part.least[row, y - 1] / d + _sync(problem, part, d)[row])


def _exact_time(problem: _Problem, stage: _Stage) -> float:
    """Return the time of a stage with its knapsack solved exactly, and keep that as its bound."""
    part, row, _, y = stage
    if not part.is_exact[row, y - 1]:
        part.least[row, y - 1] = _knapsack(problem, part, row, y)
        part.least[row] = np.maximum.accumulate(part.least[row])
        part.is_exact[row, y - 1] = True
    return _bounded_time(problem, stage)


def _knapsack(problem: _Problem, part: _Part, row: int, y: int) -> float:
    instance, degree = problem.instance, part.degree
    counts: dict[tuple[BlockOption, ...], int] = {}
    for layer in np.nonzero(part.layers[row])[0].tolist():
        options = tuple(
            BlockOption(
                forward=round(float(part.times[row, layer, o]) * _TICKS),
                backward=0,
                once=0,
                kept=round(float(instance.held[degree][layer, o]) * _MEMORY_UNITS),
                static=round(float(instance.constant[degree][layer, o]) * _MEMORY_UNITS),
                working=0,
            )
            for o in (0, 1)
        )
        counts[options] = counts.get(options, 0) + 1
    runs = [Run(count=count, options=options) for options, count in counts.items()]
    room = round(problem.memory * _MEMORY_UNITS)
    found = solve_stage(runs, y, room, 0, time_limit_s=60, seed=0, workers=1)
    return found.time / _TICKS if found.counts else float("inf")
