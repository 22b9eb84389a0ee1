"""Where the stages of a pipeline may end, and simple ways to cut them."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.graph import Trace

__all__ = ["even_block_ends", "even_ends", "even_stage_ends", "holders", "is_runnable"]


def holders(trace: Trace) -> tuple[bool, ...]:
    """Return per call of the chain whether it has parameters.

    A stage without any cannot be run: no optimizer can be made on its ranks.
    """
    has_parameters = [any(s.is_parameter for s in block.states) for block in trace.blocks]
    return tuple(has_parameters[call.block] for call in trace.calls)


def is_runnable(trace: Trace, ends: Sequence[int]) -> bool:
    """Return whether every stage that ends at `ends` has parameters."""
    own = holders(trace)
    return all(any(own[a:b]) for a, b in zip((0, *ends), ends, strict=False))


def even_ends(num_calls: int, num_stages: int) -> tuple[int, ...]:
    """Return stage ends that give every stage the same number of blocks, as near as can be."""
    return tuple(num_calls * (s + 1) // num_stages for s in range(num_stages))


def even_stage_ends(trace: Trace, num_stages: int) -> tuple[int, ...]:
    """Return even ends; where these leave a stage without parameters, ends that give every stage
    the same number of blocks with parameters.

    Raises:
        ValueError: there are fewer such blocks than stages.
    """
    ends = even_ends(len(trace.calls), num_stages)
    if is_runnable(trace, ends):
        return ends
    places = [index for index, holds in enumerate(holders(trace)) if holds]
    if len(places) < num_stages:
        raise ValueError(
            f"pp={num_stages} stages for a chain of {len(places)} blocks with parameters: lower pp"
        )
    inner = [places[end] for end in even_ends(len(places), num_stages)[:-1]]
    return (*inner, len(trace.calls))


def even_block_ends(trace: Trace, num_stages: int) -> tuple[int, ...]:
    """Return stage ends with equal numbers of repeated blocks; glue goes with its neighbours.

    What comes before the first block is on the first stage, what comes after the last on the last,
    as Megatron-LM cuts a decoder.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    blocks = [i for i, call in enumerate(trace.calls) if not trace.blocks[call.block].is_glue]
    if len(blocks) < num_stages:
        raise ValueError(f"pp={num_stages} stages for {len(blocks)} blocks: lower pp")
    inner = [blocks[len(blocks) * (s + 1) // num_stages] for s in range(num_stages - 1)]
    return (*inner, len(trace.calls))
