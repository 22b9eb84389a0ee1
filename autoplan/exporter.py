"""Export a module with `torch.export` and read the graph as a `FlatProgram`.

Errors of the export are told with the module and the line in which they arose. Gradient
checkpointing in the model is put in line by the export; it is noticed here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import autoplan.missing_fakes  # noqa: F401  (registers what torch lacks)
from autoplan.autocast import FOREIGN_NOTE
from autoplan.batches import reduce_loss
from autoplan.errors import TraceError
from autoplan.flattener import ExportError, flattened
from autoplan.mask_causality import causality_as_told
from autoplan.opaque import OpaqueCalls
from autoplan.patching import replaced
from autoplan.segments import FlatProgram

__all__ = ["export", "import_export"]

CHECKPOINT_NOTE = (
    "the model checkpoints activations itself (torch.utils.checkpoint or "
    "gradient_checkpointing_enable): the trace ignores it, because the plan decides what is "
    "recomputed; switch it off in the model"
)


def import_export() -> None:
    """Import what an export imports when it is first asked for.

    A process that is forked afterwards need not do it again.
    """
    importlib.import_module("torch.export._trace")


def export(
    wrapper: nn.Module,
    tensors: tuple[torch.Tensor, ...],
    keys: Sequence[str],
    prefix: str,
    opaque: OpaqueCalls,
) -> FlatProgram:
    """Return the flat program of a module.

    Args:
        wrapper: module of flat tensor inputs that returns one tensor.
        tensors: its inputs, each a distinct tensor.
        keys: readable names of the inputs.
        prefix: attribute of `wrapper` that holds the user's model; cut from FQNs.
        opaque: where calls that stay one op are kept.

    Raises:
        ExportError: names the module, the line and the reason.
    """
    notes: list[str] = []
    with (
        warnings.catch_warnings(record=True) as warned,
        _quiet_logs(),
        _watch_checkpoints(notes),
        causality_as_told(),
        _traced_data(),
        _refused_gradients(),
        opaque.watch_functions(),
    ):
        warnings.simplefilter("always")
        try:
            # A failed export prints its partial graph to stderr; the message below says more.
            with contextlib.redirect_stderr(io.StringIO()):
                exported = torch.export.export(wrapper, tensors, strict=False)
        except Exception as error:
            raise _explained(error, wrapper, prefix) from error
    if any(_FOREIGN_AUTOCAST.search(str(warning.message)) for warning in warned):
        notes.append(FOREIGN_NOTE)
    return flattened(exported, prefix, opaque.calls, notes, keys)


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Silence the logs of symbolic sizes and failing ops; what matters is in the error."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _traced_data() -> Iterator[None]:
    """Let `tensor.data` be `tensor.detach()`: an export takes the former for a constant.

    Both have the tensor's memory and no gradient, so that what is written to either changes it.
    What is assigned to it is written there.
    """
    plain: Any = torch.Tensor.data
    exporting = threading.current_thread()

    def read(tensor: torch.Tensor) -> Any:
        if threading.current_thread() is exporting:
            return tensor.detach()
        return plain.__get__(tensor)

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        is_here = threading.current_thread() is exporting
        if is_here and (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
            tensor.detach().copy_(value.detach())
        else:
            plain.__set__(tensor, value)

    with replaced(torch.Tensor, data=property(read, write)):
        yield


@contextlib.contextmanager
def _refused_gradients() -> Iterator[None]:
    """Refuse `torch.autograd.grad` in a forward, whose graph an export loses without an error."""
    plain: Any = torch.autograd.grad
    exporting = threading.current_thread()

    def grad(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not exporting:
            return plain(*args, **kwargs)
        raise TraceError(
            "torch.autograd.grad in forward cannot be traced: move what calls it into a module of "
            "its own below the model, which stays one op"
        )

    with replaced(torch.autograd, grad=grad):
        yield


@contextlib.contextmanager
def _watch_checkpoints(notes: list[str]) -> Iterator[None]:
    """Add a note when `torch.utils.checkpoint.checkpoint` runs, by either of its ways."""
    module: Any = torch.utils.checkpoint
    generator_name = "_checkpoint_without_reentrant_generator"
    plain: Any = getattr(module, generator_name, None)

    def watched_plain(*args: Any, **kwargs: Any) -> Any:
        notes.append(CHECKPOINT_NOTE)
        return plain(*args, **kwargs)

    def watched_reentrant(run: Any, _: bool, *args: Any) -> Any:
        notes.append(CHECKPOINT_NOTE)
        return run(*args)

    with (
        replaced(module, **{generator_name: watched_plain}),
        replaced(module.CheckpointFunction, apply=watched_reentrant),
    ):
        yield


def _explained(error: Exception, wrapper: nn.Module, prefix: str) -> ExportError:
    """Return the error for a failed export: where, why, what to do."""
    fqn, line = _locate(error, wrapper, prefix)
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0] if text else 'no message'}"
    in_loss = "" if line else _line_in_loss(error)
    line = line or in_loss
    if isinstance(error, TraceError):
        message = str(error)
    elif "DataDependent" in type(error).__name__ or "data-dependent" in reason:
        where = "loss_fn" if in_loss else fqn or "the model"
        message = (
            f"{where} ({line or 'line unknown'}): its control flow or a shape depends on the "
            "values of a tensor, so one trace cannot stand for every batch; compute both sides "
            "and select with torch.where, or move the decision out of forward (where only the "
            f"loss needs it: leave labels out and pass loss_fn) [{reason}]"
        )
    elif in_loss:
        message = (
            f"loss_fn ({line}) failed [{reason}]; it is called as loss_fn(output), or as "
            "loss_fn(output, target) if it takes two arguments: the target is the whole batch if "
            "the batch is a mapping, else its last element"
        )
    else:
        where = f"{fqn or 'the model'} ({line or 'line unknown'})"
        message = f"{where}: torch.export could not capture the model [{reason}]"
    return ExportError(message, fqn=fqn, line=line, reason=reason)


def _locate(error: BaseException, wrapper: nn.Module, prefix: str) -> tuple[str, str]:
    """Return (module FQN, file:line) of the innermost user frame of an error or its causes."""
    names = {id(module): fqn for fqn, module in wrapper.named_modules()}
    for frames in _tracebacks(error):
        fqn = line = ""
        for frame, number in frames:
            first = frame.f_code.co_varnames[:1]  # `self`, whatever it is called
            owner = frame.f_locals.get(first[0]) if first else None
            if not isinstance(owner, nn.Module) or id(owner) not in names:
                continue
            if frame.f_code.co_filename.startswith((_TORCH_FOLDER, _OWN_FOLDER)):
                continue
            found = names[id(owner)]
            if found == prefix or found.startswith(prefix + "."):
                fqn = found.removeprefix(prefix).removeprefix(".")
                line = _place(frame, number)
        if line:
            return fqn, line
    return "", ""


def _line_in_loss(error: BaseException) -> str:
    """Return file:line of the innermost frame of the user's loss in which an error arose."""
    for frames in _tracebacks(error):
        line = ""
        is_in_loss = False
        for frame, number in frames:
            is_users = not frame.f_code.co_filename.startswith(_TORCH_FOLDER)
            if is_in_loss and is_users:
                line = _place(frame, number)
            is_in_loss = is_in_loss or frame.f_code is reduce_loss.__code__
        if line:
            return line
    return ""


def _tracebacks(error: BaseException) -> Iterator[list[tuple[FrameType, int]]]:
    """Yield the frames, outermost first, of an error, then of its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield list(traceback.walk_tb(current.__traceback__))
        current = current.__cause__ or current.__context__


def _place(frame: FrameType, number: int) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{number}"


_NOISY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")

_OWN_FOLDER = __file__.rpartition("/")[0] + "/"
_TORCH_FOLDER = torch.__file__.rpartition("/")[0] + "/"

_FOREIGN_AUTOCAST = re.compile(r"is not available.*[Dd]isabling autocast")
