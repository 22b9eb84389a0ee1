"""Export a module with `torch.export` and read the graph as a `FlatProgram`.

Errors of the export are told with the module and the line in which they arose. Gradient
checkpointing in the model is put in line by the export; it is noticed here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from autoplan.autocast import FOREIGN_NOTE
from autoplan.compat import causality_as_told
from autoplan.errors import TraceError
from autoplan.flattener import ExportError, flattened
from autoplan.opaque import OpaqueCalls
from autoplan.segments import FlatProgram

__all__ = ["export"]

CHECKPOINT_NOTE = (
    "the model checkpoints activations itself (torch.utils.checkpoint or "
    "gradient_checkpointing_enable): the trace ignores it, because the plan decides what is "
    "recomputed; switch it off in the model"
)


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
    """Silence the log of symbolic sizes; what matters of it is in the error."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _watch_checkpoints(notes: list[str]) -> Iterator[None]:
    """Add a note when `torch.utils.checkpoint.checkpoint` runs, by either of its ways."""
    module: Any = torch.utils.checkpoint
    generator_name = "_checkpoint_without_reentrant_generator"
    plain: Any = getattr(module, generator_name, None)
    function: Any = module.CheckpointFunction

    def watched_plain(*args: Any, **kwargs: Any) -> Any:
        notes.append(CHECKPOINT_NOTE)
        return plain(*args, **kwargs)

    def watched_reentrant(run: Any, _: bool, *args: Any) -> Any:
        notes.append(CHECKPOINT_NOTE)
        return run(*args)

    if plain is not None:
        setattr(module, generator_name, watched_plain)
    function.apply = watched_reentrant
    try:
        yield
    finally:
        if plain is not None:
            setattr(module, generator_name, plain)
        del function.apply


def _explained(error: Exception, wrapper: nn.Module, prefix: str) -> ExportError:
    """Return the error for a failed export: where, why, what to do."""
    fqn, line = _locate(error, wrapper, prefix)
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0] if text else 'no message'}"
    message = str(error) if isinstance(error, TraceError) else _message(reason, fqn, line, error)
    return ExportError(message, fqn=fqn, line=line, reason=reason)


def _message(reason: str, fqn: str, line: str, error: Exception) -> str:
    where = f"{fqn or 'the model'} ({line or 'line unknown'})"
    if "DataDependent" in type(error).__name__ or "data-dependent" in reason:
        return (
            f"{where}: its control flow or a shape depends on the values of a tensor, so one trace "
            f"cannot stand for every batch; compute both sides and select with torch.where, or "
            f"move the decision out of forward [{reason}]"
        )
    return f"{where}: torch.export could not capture the model [{reason}]"


def _locate(error: BaseException, wrapper: nn.Module, prefix: str) -> tuple[str, str]:
    """Return (module FQN, file:line) of the innermost user frame of an error or its causes."""
    names = {id(module): fqn for fqn, module in wrapper.named_modules()}
    fqn = line = ""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and not fqn:
        seen.add(id(current))
        for frame, number in traceback.walk_tb(current.__traceback__):
            owner = frame.f_locals.get("self")
            if not isinstance(owner, nn.Module) or id(owner) not in names:
                continue
            if frame.f_code.co_filename.startswith(_TORCH_FOLDER):
                continue
            found = names[id(owner)]
            if found == prefix or found.startswith(prefix + "."):
                fqn = found.removeprefix(prefix).removeprefix(".")
                line = f"{frame.f_code.co_filename.rpartition('/')[2]}:{number}"
        current = current.__cause__ or current.__context__
    return fqn, line


_TORCH_FOLDER = torch.__file__.rpartition("/")[0] + "/"

_FOREIGN_AUTOCAST = re.compile(r"is not available.*[Dd]isabling autocast")
