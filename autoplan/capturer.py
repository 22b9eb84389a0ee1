"""Capture a model and its loss as a `Program`, on fake tensors, without touching the model.

The model is copied with every tensor replaced by a fake CPU tensor, so neither weights nor random
state are read or changed and nothing is allocated. Long runs of equal blocks are shortened before
`torch.export` and put back as calls afterwards, so the time does not grow with depth.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan import hf
from autoplan.autocast import around_step
from autoplan.axis_labels import arguments, op_name
from autoplan.batches import (
    BatchDims,
    LossFn,
    LossModule,
    OutputModule,
    batch_dims,
    batch_rows,
    microbatch_like,
    split_batch,
)
from autoplan.collecting import without_collections
from autoplan.errors import TraceError
from autoplan.exporter import export
from autoplan.flattener import ExportError
from autoplan.opaque import OpaqueCalls, empty_copy, empty_like
from autoplan.program import Program
from autoplan.segments import FlatProgram, NotAChain, build_program
from autoplan.shortening import find_runs

__all__ = ["LossFn", "capture", "capture_outputs", "meta_copy", "microbatch_like", "split_batch"]

_MOST_ATTEMPTS = 16
EVAL_NOTE = "the model is in eval mode: dropout and batch statistics are traced as switched off"


def capture(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    microbatch_size: int | None = None,
    batch_dim: Any = 0,
    full_depth: bool = False,
    allow_opaque: bool = True,
    autocast: torch.dtype | None = None,
) -> Program:
    """Return the program of `model` and its loss for one micro-batch.

    Args:
        model: any module, on any device, `meta` too; it is left as it is.
        batch: example input. A mapping is passed by keyword (keys that `forward` does not take are
            left to `loss_fn`), a tuple by position (its last element is the target if `loss_fn`
            takes two arguments), anything else as the only argument.
        loss_fn: `loss_fn(output)` or `loss_fn(output, target)`; for a mapping the target is the
            whole mapping. None: the output is the loss, or has it as `.loss`.
        microbatch_size: rows to capture; None takes the batch as it is.
        batch_dim: where the batch lies in each tensor: an int for all tensors that have the size of
            the first one there (others have no batch), or a mapping, tuple or list of the form of
            `batch` with an int or None (no batch) for each; see `autoplan.batches.batch_dims`.
        allow_opaque: keep a module that cannot be exported as one op instead of raising.
        autocast: the training step runs under `torch.autocast` to this dtype; None if it does not.
        full_depth: export every block instead of two of each run of equal blocks.

    Raises:
        TraceError: the model could not be exported, or has no scalar loss; names module and line.
        ValueError: `batch_dim` does not fit the batch.
    """
    task = _task(model, batch, loss_fn, microbatch_size, batch_dim, autocast)
    return _capture(task, full_depth=full_depth, allow_opaque=allow_opaque)


def capture_outputs(
    model: nn.Module, batch: Any, *, batch_dim: Any = 0, autocast: torch.dtype | None = None
) -> tuple[Program, Callable[[Sequence[torch.Tensor]], Any]]:
    """Return the program of a model without a loss, and what makes its output of its tensors.

    The program's `loss` is the output: one tensor, or a tuple of all tensors of the output.

    Args:
        model, batch_dim, autocast: as for `capture`.
        batch: what `forward` takes: a mapping by keyword, a tuple by position.

    Raises:
        TraceError: the model could not be exported, or returns no tensor.
        ValueError: `batch_dim` does not fit the batch.
    """
    made: list[OutputModule] = []
    task = replace(_task(model, batch, None, None, batch_dim, autocast), outputs=made)
    program = _capture(task)
    return program, made[-1].output_of


def _task(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    microbatch_size: int | None,
    batch_dim: Any,
    autocast: torch.dtype | None,
) -> _Task:
    dims = batch_dims(batch, batch_dim)
    rows = microbatch_size if microbatch_size is not None else batch_rows(batch, dims)
    return _Task(model, microbatch_like(batch, rows, dims), loss_fn, rows, dims, autocast)


@without_collections()
def _capture(task: _Task, *, full_depth: bool = False, allow_opaque: bool = True) -> Program:
    if not full_depth:
        with contextlib.suppress(TraceError, NotAChain):
            return _capture_once(task, {}, is_short=True)
    try:
        return _capture_once(task, {}, is_short=False)
    except ExportError as error:
        if not allow_opaque or not error.fqn:
            raise
        first = error
    last: Exception = first
    for is_short in (False,) if full_depth else (True, False):
        try:
            return _capture_degrading(task, first, is_short=is_short)
        except (TraceError, NotAChain) as error:
            last = error
    if isinstance(last, ExportError) and first.reason.partition(": ")[2] not in str(last):
        raise ExportError(
            f"{last} (met with {first.fqn} kept as one op, which {first.line or 'its forward'} "
            f"makes necessary: {first.reason})",
            fqn=last.fqn,
            line=last.line,
            reason=last.reason,
        ) from first
    raise first


@dataclass(frozen=True, slots=True)
class _Task:
    model: nn.Module
    example: Any
    loss_fn: LossFn | None
    rows: int
    batch_dims: BatchDims
    autocast: torch.dtype | None
    outputs: list[OutputModule] | None = None


def _capture_degrading(task: _Task, first: ExportError, *, is_short: bool) -> Program:
    """Capture; a module that cannot be exported becomes one op, or else the module around it.

    Raises:
        ExportError: not even the outermost module around it can be one op.
    """
    reasons: dict[str, str] = {}
    error = first
    for _ in range(_MOST_ATTEMPTS):
        fqn = error.fqn
        while fqn in reasons:
            fqn = fqn.rpartition(".")[0]
        if not fqn:
            raise error
        where = f"{error.line}: {error.reason}" if error.line else error.reason
        for name in _siblings(task.model, fqn):
            reasons = {k: v for k, v in reasons.items() if not k.startswith(name + ".")}
            reasons[name] = where
        try:
            return _capture_once(task, reasons, is_short=is_short)
        except ExportError as caught:
            error = caught
    raise error


def _siblings(model: nn.Module, fqn: str) -> list[str]:
    """Return the FQNs that are `fqn` up to numbers and name a module of the same class."""
    kind = type(model.get_submodule(fqn))
    pattern = re.sub(r"\d+", "0", fqn)
    named = model.named_modules(remove_duplicate=False)
    return [n for n, m in named if type(m) is kind and re.sub(r"\d+", "0", n) == pattern]


def _fake_mode() -> FakeTensorMode:
    # A loss function may close over real tensors; they enter the graph as constants.
    return FakeTensorMode(allow_non_fake_inputs=True)


def _capture_once(task: _Task, reasons: Mapping[str, str], *, is_short: bool) -> Program:
    mode = _fake_mode()
    shortening = find_runs(task.model) if is_short else None
    with mode:
        copied = empty_copy(
            task.model, "cpu", without=shortening.dropped(task.model) if shortening else ()
        )
    if shortening:
        shortening.cut(copied)
    example = task.example
    notes = (*hf.prepare(copied), *_opaque_notes(reasons))
    opaque = OpaqueCalls()
    present = dict(copied.named_modules(remove_duplicate=False))
    for fqn in reasons:
        if fqn in present:
            opaque.replace(present[fqn], task.model.get_submodule(fqn))
    if not copied.training:
        notes = (*notes, EVAL_NOTE)
    leaves, spec = pytree.tree_flatten(example)
    tensor_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    wrapper = LossModule(copied, task.loss_fn, spec, leaves, tensor_at)
    if task.outputs is not None:
        wrapper = OutputModule(copied, spec, leaves, tensor_at)
        task.outputs.append(wrapper)
    wrapper.training = copied.training
    with mode:
        tensors = tuple(empty_like(leaves[i], "cpu") for i in tensor_at)
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(example)[0]]
    with hf.exact_masks(copied, example), around_step(task.autocast):
        flat = export(wrapper, tensors, [keys[i] for i in tensor_at], "model", opaque)
    _refuse_sparse(flat)
    program = build_program(flat, copied, shortening, task.rows, notes, task.autocast)
    return replace(program, batch_dims=task.batch_dims)


def _refuse_sparse(flat: FlatProgram) -> None:
    """Refuse embeddings with sparse gradients, which no parallelism of a plan can sum or slice.

    Raises:
        TraceError: names the module.
    """
    for op in flat.ops:
        if op_name(op) in ("embedding", "embedding_bag") and arguments(op)["sparse"]:
            stack = flat.stacks[op.name]
            raise TraceError(
                f"{stack[-1][1] if stack else 'the model'}: {op.target_name} makes sparse "
                "gradients, which a plan cannot sum over ranks: make it with sparse=False"
            )


def _opaque_notes(reasons: Mapping[str, str]) -> tuple[str, ...]:
    groups: dict[tuple[str, str], list[str]] = {}
    for fqn, reason in reasons.items():
        groups.setdefault((re.sub(r"\d+", "*", fqn), reason), []).append(fqn)
    return tuple(
        f"{fqns[0] if len(fqns) == 1 else f'{pattern} ({len(fqns)} modules)'} stays one op that "
        f"cannot be split, and is priced by the dearer of the branches tried ({reason})"
        for (pattern, reason), fqns in groups.items()
    )


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a structural copy of `model` on the meta device: ties are kept, no weight is read."""
    return empty_copy(model, "meta")
