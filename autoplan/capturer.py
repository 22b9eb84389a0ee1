"""Capture a model and its loss as a `Program`, on fake tensors, without touching the model.

The model is copied with every tensor replaced by a fake CPU tensor, so neither weights nor random
state are read or changed and nothing is allocated. Long runs of equal blocks are shortened before
`torch.export` and put back as calls afterwards, so the time does not grow with depth.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan import hf
from autoplan.batches import LossFn, LossModule, batch_rows, microbatch_like, split_batch
from autoplan.errors import TraceError
from autoplan.exporter import export
from autoplan.program import Program
from autoplan.segments import NotAChain, build_program
from autoplan.shortening import Shortening, shorten

__all__ = ["LossFn", "capture", "meta_copy", "microbatch_like", "split_batch"]

EVAL_NOTE = "the model is in eval mode: dropout and batch statistics are traced as switched off"


def capture(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    microbatch_size: int | None = None,
    full_depth: bool = False,
) -> Program:
    """Return the program of `model` and its loss for one micro-batch.

    Args:
        model: any module, on any device, `meta` too; it is left as it is.
        batch: example input. A mapping is passed by keyword (keys that `forward` does not take are
            left to `loss_fn`), a tuple by position (its last element is the target if `loss_fn`
            takes two arguments), anything else as the only argument. Dimension 0 of every tensor
            whose first size equals that of the first tensor is the batch dimension.
        loss_fn: `loss_fn(output)` or `loss_fn(output, target)`; for a mapping the target is the
            whole mapping. None: the output is the loss, or has it as `.loss`.
        microbatch_size: rows to capture; None takes the batch as it is.
        full_depth: export every block instead of two of each run of equal blocks.

    Raises:
        TraceError: the model could not be exported, or has no scalar loss; names module and line.
    """
    rows = microbatch_size if microbatch_size is not None else batch_rows(batch)
    example = microbatch_like(batch, rows)
    if not full_depth:
        mode = _fake_mode()
        copied = _empty_copy(model, mode)
        shortening = shorten(copied)
        try:
            return _capture_once(copied, mode, example, loss_fn, rows, shortening)
        except (TraceError, NotAChain):
            if not shortening.runs:
                raise
    mode = _fake_mode()
    return _capture_once(_empty_copy(model, mode), mode, example, loss_fn, rows, None)


def _fake_mode() -> FakeTensorMode:
    # A loss function may close over real tensors; they enter the graph as constants.
    return FakeTensorMode(allow_non_fake_inputs=True)


def _capture_once(
    copied: nn.Module,
    mode: FakeTensorMode,
    example: Any,
    loss_fn: LossFn | None,
    rows: int,
    shortening: Shortening | None,
) -> Program:
    notes = hf.prepare(copied, example)
    if not copied.training:
        notes = (*notes, EVAL_NOTE)
    leaves, spec = pytree.tree_flatten(example)
    tensor_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    wrapper = LossModule(copied, loss_fn, spec, leaves, tensor_at)
    wrapper.training = copied.training
    with mode:
        tensors = tuple(_empty_like(leaves[i], "cpu") for i in tensor_at)
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(example)[0]]
    flat = export(wrapper, tensors, [keys[i] for i in tensor_at], "model")
    return build_program(flat, copied, shortening, rows, notes)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a structural copy of `model` on the meta device: ties are kept, no weight is read."""
    return _copy(model, "meta")


def _empty_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a structural copy of `model` of fake CPU tensors, which take no memory."""
    with mode:
        return _copy(model, "cpu")


def _copy(model: nn.Module, device: str) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = _empty_like(parameter, device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _empty_like(buffer, device)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(f"{type(model).__name__} cannot be copied: {error}") from error


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device
    )
