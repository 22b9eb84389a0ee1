"""Measure the ops of a model: what its candidate shardings and micro-batches run, each once.

    model, batch, cluster -> candidate settings -> ops with local sizes -> unique signatures

Every op that is no view is measured as one rank runs it, forward and backward, unknown and
registered operators and modules that stay one op included. What is measured goes into the cache
(`autoplan.profiles.op_times`), dearest first, so that a run that ends early has measured what
matters most, and the next one goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from autoplan.autocast import dtype_of
from autoplan.batches import batch_rows
from autoplan.capturer import LossFn, capture
from autoplan.cluster import Cluster
from autoplan.graph import BlockTrace, ShardOption, Trace
from autoplan.lowering import lower
from autoplan.op_runner import OpCall, TensorSpec, measure_call, spec_of
from autoplan.opcost import OpMeter
from autoplan.optimizers import Optimizer
from autoplan.profiles.budgets import Deadline
from autoplan.profiles.op_times import MeasuredOp, OpTimesFile
from autoplan.program import BlockGraph, Op, Program, TensorMeta, map_refs
from autoplan.runner import BlockRun, run_program
from autoplan.settings import Workload, settings_of
from autoplan.sharded_ops import VocabularyCrossEntropy
from autoplan.sharding import shard_options
from autoplan.signatures import local_signature
from autoplan.times import Timer
from autoplan.tracer import trace_program

__all__ = ["Candidate", "Outcome", "candidates_of", "measure_candidates"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One op with sizes that some setting runs.

    Attributes:
        signature: key of its measurement.
        call: how to run it.
        estimate_s: what all its calls in a micro-batch are estimated to take; the dearest setting.
    """

    signature: str
    call: OpCall
    estimate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run measured.

    Attributes:
        measured: signatures measured now.
        known: signatures that were in the cache.
        left: signatures that the budget did not reach.
        failed: per signature that could not be run, why.
    """

    measured: int
    known: int
    left: int
    failed: dict[str, str]


def candidates_of(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    cluster: Cluster,
    *,
    global_batch_size: int | None = None,
    batch_dim: Any = 0,
    autocast: str = "none",
) -> list[Candidate]:
    """Return every op that a setting of the search space runs, each signature once, dearest first.

    Args:
        model, batch, loss_fn, batch_dim: as for `autoplan.optimize`.
        cluster: gives the tensor-parallel degrees and estimates.
        global_batch_size: gives the micro-batch sizes; None: the rows of `batch`.
        autocast: `none` or `bfloat16`.

    Raises:
        TraceError: the model cannot be captured.
    """
    rows = global_batch_size if global_batch_size is not None else batch_rows(batch, batch_dim)
    workload = Workload(global_batch_size=rows, optimizer=Optimizer.named("SGD", is_foreach=False))
    settings = list(settings_of(cluster, workload, cluster.world_size, {}))
    degrees = sorted({setting.tp for setting in settings})
    found: dict[str, Candidate] = {}
    for size in sorted({setting.microbatch_size for setting in settings}):
        program = capture(
            model, batch, loss_fn,
            microbatch_size=size, batch_dim=batch_dim, autocast=dtype_of(autocast),
        )  # fmt: skip
        for candidate in _of_program(program, cluster, degrees):
            known = found.get(candidate.signature)
            if known is None or known.estimate_s < candidate.estimate_s:
                found[candidate.signature] = candidate
    return sorted(found.values(), key=lambda c: (-c.estimate_s, c.signature))


def _of_program(program: Program, cluster: Cluster, degrees: Sequence[int]) -> Iterator[Candidate]:
    backend = "cpu" if cluster.is_cpu else "cuda"
    traced = trace_program(program, backend=backend, model_name="")  # type: ignore[arg-type]
    counts = [0] * len(traced.blocks)
    for call in traced.calls:
        counts[call.block] += 1
    timers = {degree: Timer(cluster, degree) for degree in degrees}
    for index, run in enumerate(_runs(program, traced)):
        graph, block = program.graphs[index], traced.blocks[index]
        for degree, timer in timers.items():
            yield from _of_block(graph, block, run, timer, degree, counts[index], program.autocast)


def _runs(program: Program, traced: Trace) -> list[BlockRun]:
    """Return fake runs of all block graphs, for the layouts of their values."""
    with FakeTensorMode(), torch.enable_grad():
        runs, _ = run_program(program, traced.backend, OpMeter(traced.backend, program.autocast))
    return [runs[index] for index in range(len(program.graphs))]


def _of_block(
    graph: BlockGraph,
    block: BlockTrace,
    run: BlockRun,
    timer: Timer,
    degree: int,
    count: int,
    autocast: torch.dtype | None,
) -> Iterator[Candidate]:
    options = shard_options(graph)
    for op, traced in zip(graph.ops, block.ops, strict=True):
        for option in options[op.name]:
            if not traced.signature or (degree > 1) != (option.axis != "whole"):
                continue
            call = (
                _whole_call(op, run, autocast)
                if degree == 1
                else _local_call(graph, options, op, option, degree, autocast)
            )
            if call is not None:
                yield Candidate(
                    signature=local_signature(traced, option, degree),
                    call=call,
                    estimate_s=count * timer.traced_time(traced, option).total_s,
                )


def _whole_call(op: Op, run: BlockRun, autocast: torch.dtype | None) -> OpCall:
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda name: spec_of(run.values[name]))
    return OpCall(target=op.target, args=args, kwargs=kwargs, autocast=autocast)


def _local_call(
    graph: BlockGraph,
    options: dict[str, tuple[ShardOption, ...]],
    op: Op,
    option: ShardOption,
    degree: int,
    autocast: torch.dtype | None,
) -> OpCall | None:
    """Return what a rank runs of an op, or None where it cannot run so, or not alone."""
    if option.is_split and option.size % degree:
        return None
    try:
        lowered = lower(
            graph, options, {op.name: option.axis}, degree=degree, rank=0, group=None
        ).graph
    except ValueError:
        return None  # no plan can choose it either: `check_axes` refuses the same
    local = next(o for o in lowered.ops if o.name == op.name)
    metas = {name: lowered.meta(name) for name in local.inputs()}
    if isinstance(local.target, VocabularyCrossEntropy) or None in metas.values():
        return None  # it communicates inside, or reads a part of a tuple
    specs = {name: _spec(meta) for name, meta in metas.items() if meta is not None}
    args, kwargs = map_refs((local.args, dict(local.kwargs)), specs.__getitem__)
    return OpCall(target=local.target, args=args, kwargs=kwargs, autocast=autocast)


def _spec(meta: TensorMeta) -> TensorSpec:
    return TensorSpec(
        shape=meta.shape, stride=None, dtype=meta.dtype, requires_grad=meta.requires_grad
    )


def measure_candidates(
    candidates: Sequence[Candidate],
    device: torch.device,
    file: OpTimesFile,
    *,
    budget_s: float,
    progress: Progress = lambda message, done, total: None,
) -> Outcome:
    """Measure candidates in order until the budget is spent or somebody stops; keep each at once.

    Args:
        candidates: dearest first.
        device: where to run.
        file: where to keep what is measured; what it has is not measured again.
        budget_s: seconds, above 0; the first candidate is measured in any case.
        progress: called with what is measured, and how many are done of how many.

    Raises:
        ValueError: the budget is not above 0.
    """
    if budget_s <= 0:
        raise ValueError(f"budget_s must be above 0, got {budget_s}")
    known = file.read()
    pending = [c for c in candidates if c.signature not in known]
    deadline = Deadline(ends_s=time.monotonic() + budget_s)
    slice_s = budget_s / max(1, len(pending)) / 2
    failed: dict[str, str] = {}
    measured = 0
    for index, candidate in enumerate(deadline.points(pending)):
        progress(candidate.signature, len(candidates) - len(pending) + index, len(candidates))
        result = measure_call(candidate.call, device, slice_s)
        if isinstance(result, MeasuredOp):
            file.write(candidate.signature, result)
            measured += 1
        else:
            failed[candidate.signature] = result
    progress("done", len(candidates), len(candidates))
    return Outcome(
        measured=measured,
        known=len(candidates) - len(pending),
        left=len(pending) - measured - len(failed),
        failed=failed,
    )
