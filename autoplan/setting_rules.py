"""The rules that pinned settings break by themselves, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from autoplan.cluster import Cluster
from autoplan.schedules import unrunnable_split
from autoplan.settings import Workload

__all__ = ["broken_rules"]


def broken_rules(
    cluster: Cluster,
    workload: Workload,
    num_blocks: int,
    pins: Mapping[str, Any],
    *,
    can_split: bool,
) -> tuple[str, ...]:
    """Return the rules that pinned settings break by themselves, in words; empty if none is.

    `can_split`: whether torch can split the backward of every stage, however the chain is cut.
    """
    world, batch = cluster.world_size, workload.global_batch_size
    given = {name: pins[name] for name in ("dp", "tp", "pp") if name in pins}
    product = math.prod(given.values())
    names = " * ".join(f"{name}={value}" for name, value in given.items())
    found = []
    if world % product or (len(given) == 3 and product != world):
        found.append(f"dp * tp * pp must be the {world} devices, {names} is {product}")
        return tuple(found)
    pp = pins.get("pp", 1)
    if pp > num_blocks:
        found.append(
            f"pp={pp} stages need as many blocks with parameters, the model has {num_blocks}"
        )
    dp = pins.get("dp", world // product if {"tp", "pp"} <= given.keys() else 1)
    size, m = pins.get("microbatch_size", 1), pins.get("num_microbatches", 1)
    if batch % (dp * size * m):
        found.append(
            f"the batch of {batch} rows must divide into dp={dp} times {m} micro-batches of {size}"
        )
    is_short = pp > 1 and batch // (dp * size) < pp and ("dp" in pins or "tp" in pins)
    if is_short and pins.get("schedule") in ("1f1b", "zero_bubble"):
        found.append(
            f"{pins['schedule']} over pp={pp} stages needs as many micro-batches, dp={dp} leaves "
            f"{batch // (dp * size)}"
        )
    found += _split_rules(workload, pins, can_split)
    replicas = pins.get("dp_replicate", 1)
    if replicas > 1 and "dp" in pins and (dp % replicas or replicas >= dp):
        found.append(f"dp_replicate={replicas} must divide dp={dp} and be below it")
    if replicas > 1 and pins.get("zero_stage", 1) == 0:
        found.append(f"dp_replicate={replicas} replicates what ZeRO shards: zero_stage above 0")
    is_whole = dp == 1 and not (workload.offload and pins.get("zero_stage") == 3)
    if pins.get("zero_stage", 0) and is_whole and ("dp" in pins or {"tp", "pp"} <= given.keys()):
        found.append(f"zero_stage={pins['zero_stage']} shards over dp, which is 1")
    return (*found, *_unmixed_rules(cluster, pins))


def _split_rules(workload: Workload, pins: Mapping[str, Any], can_split: bool) -> Iterator[str]:
    """Yield what torch cannot run beside a split backward, where that is asked for."""
    if pins.get("schedule") == "zero_bubble" and not can_split:
        yield (
            "zero_bubble splits backwards, and torch cannot split one that reads a parameter again "
            "on the way to the inputs: use another schedule"
        )
    unrunnable = unrunnable_split(
        pins.get("schedule", ""),
        pins.get("zero_stage", 0),
        is_mixed=workload.mixed_precision != "none",
        recomputes=pins.get("recompute", "none") != "none",
    )
    if unrunnable is not None:
        yield unrunnable


def _unmixed_rules(cluster: Cluster, pins: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the space does not have on devices of several types, where both are asked for."""
    if not cluster.slower:
        return
    if pins.get("virtual_stages", 1) > 1 or pins.get("schedule") == "interleaved":
        yield "several stages a rank are searched on devices of one type only"
    if pins.get("schedule") == "zero_bubble":
        yield "split backwards are searched on devices of one type only"
