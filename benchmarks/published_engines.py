"""Which engine prices a row of published measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from autoplan.engines import AUTOPLAN, ENGINES, ContextExchange, Engine, LossKind

__all__ = ["COMPILED", "Skipped", "engine_of", "rung_of"]

COMPILED, _CHUNKED, _IN_BACKWARD = 2, 3, 5  # rungs of `_LADDER`


class Skipped(Exception):
    """A row that cannot be priced; the text is the reason."""


def engine_of(
    row: Mapping[str, str], family: str, zero_stage: int, *, steps_in_backward: bool = False
) -> str | Engine:
    """Return the engine that prices a row, by the name of its framework.

    Args:
        row: of published measurements.
        family: of kernels.
        zero_stage: that it is priced with.
        steps_in_backward: where the row leaves that open.

    Raises:
        Skipped: no engine is like it.
    """
    dtype = (row.get("dtype") or "").lower()
    is_deepspeed = "deepspeed" in row.get("framework", "").lower()
    if family == "megatron":
        if zero_stage > 1:
            raise Skipped(f"ZeRO-{zero_stage} of {row.get('framework')} is not priced")
        return _with_stated(_megatron_engine(row, dtype), row)
    if is_deepspeed:
        return "deepspeed"
    if "torchtune" in row.get("framework", "").lower():
        return _torchtune_engine(row, steps_in_backward)
    if "internevo" in row.get("framework", "").lower() and zero_stage <= 1:
        return "internevo"
    text = f"{row.get('framework')} {row.get('sharding')}".lower()
    if "litgpt" in text and zero_stage == 3:
        return "litgpt"
    if "torchtitan" in text:
        # The loss is compiled with the model since April 2025 (pull request 1033).
        is_compiled = (
            "compile" in text and _written(row) >= (2025, 4) and row.get("tp") in ("", "1")
        )
        name = "torchtitan-compiled-loss" if is_compiled else "torchtitan"
        return replace(ENGINES[name], decomposes=True) if "async_tp" in text else name
    if "fsdp1" in text or "fsdp (" in text:
        return "fsdp1-bf16" if "mp=pure" in text else "fsdp1"
    return "autoplan"


def _with_stated(name: str, row: Mapping[str, str]) -> str | Engine:
    """Return an engine with the loss and the exchange of keys that a row or its source states.

    Megatron's exchange is a ring unless told otherwise. What SimuMax measured with context
    parallelism ran with `cp_comm_type=a2a` (`docs/b200/b200_real_repro_guide.md`, section 7).

    Raises:
        Skipped: two exchanges, one inside the other.
    """
    engine = ENGINES[name]
    if "CE fusion" in (row.get("framework") or ""):
        engine = replace(engine, loss="fused")
    stated = re.search(r"cp-comm-type=(\S+)", row.get("args") or "")
    kind = stated.group(1) if stated else "p2p"
    if (row.get("source_id") or "").startswith("simumax"):
        kind = "a2a"
    if (row.get("cp") or "1") != "1":
        if kind not in _EXCHANGES:
            raise Skipped(f"cp-comm-type {kind} is not priced")
        engine = replace(engine, context_exchange=_EXCHANGES[kind])
    return name if engine == ENGINES[name] else engine


_EXCHANGES: dict[str, ContextExchange] = {"p2p": "ring", "a2a": "all_to_all"}

# What torchtune's ladder of techniques adds, one after the other.
_LADDER = ("baseline", "+packed", "+compile", "+chunked ce", "+act ckpt", "+optimizer in bwd")


def rung_of(row: Mapping[str, str]) -> int | None:
    """Return how far up the ladder of torchtune's techniques a row is; None: it names none."""
    text = (row.get("notes") or "").lower()
    if "techniques applied cumulatively" not in text:
        return None
    return next((i for i, name in enumerate(_LADDER) if f": {name}" in text), len(_LADDER))


def _torchtune_engine(row: Mapping[str, str], steps_in_backward: bool) -> Engine:
    rung = rung_of(row)
    compiles_loss = "compile" in row.get("framework", "") if rung is None else rung >= _CHUNKED
    loss: LossKind = "compiled" if compiles_loss else "torch"
    steps = steps_in_backward if rung is None else rung >= _IN_BACKWARD
    return replace(AUTOPLAN, name="torchtune", is_foreach=False, loss=loss, steps_in_backward=steps)


def _megatron_engine(row: Mapping[str, str], dtype: str) -> str:
    args = row.get("args") or ""
    is_te = "transformer_engine" in row.get("framework", "") or " TE " in row.get("framework", "")
    overlap = "-overlap" if "overlap-grad-reduce" in args else ""
    if dtype.startswith("fp16"):
        is_deepspeed = "deepspeed" in row.get("framework", "").lower()
        return "megatron-deepspeed" if is_deepspeed else "megatron-fp16"
    if is_te and "no-gradient-accumulation-fusion" in args:
        return "megatron-unfused-overlap"
    return f"megatron-te{overlap}" if is_te else f"megatron{overlap}"


def _written(row: Mapping[str, str]) -> tuple[int, int]:
    """Return year and month in the name of the file that a row is from; (0, 0): not there."""
    found = re.search(r"(20\d\d)-?(0[1-9]|1[0-2])", row.get("source") or "")
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)
