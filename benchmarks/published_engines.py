"""Which engine prices a row of published measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["Skipped", "engine_of"]


class Skipped(Exception):
    """A row that cannot be priced; the text is the reason."""


def engine_of(row: Mapping[str, str], family: str, zero_stage: int) -> str:
    """Return the engine that prices a row, by the name of its framework.

    Raises:
        Skipped: no engine is like it.
    """
    dtype = (row.get("dtype") or "").lower()
    if family == "megatron":
        if zero_stage > 1:
            raise Skipped(f"ZeRO-{zero_stage} of {row.get('framework')} is not priced")
        return _megatron_engine(row, dtype)
    if "deepspeed" in row.get("framework", "").lower():
        raise Skipped("the buffers of DeepSpeed's ZeRO are not priced")
    if "internevo" in row.get("framework", "").lower() and zero_stage <= 1:
        return "internevo"
    text = f"{row.get('framework')} {row.get('sharding')}".lower()
    if "torchtitan" in text:
        # The loss is compiled with the model since April 2025 (pull request 1033).
        is_compiled = (
            "compile" in text and _written(row) >= (2025, 4) and row.get("tp") in ("", "1")
        )
        return "torchtitan-compiled-loss" if is_compiled else "torchtitan"
    if "fsdp1" in text or "fsdp (" in text:
        return "fsdp1-bf16" if "mp=pure" in text else "fsdp1"
    return "autoplan"


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
