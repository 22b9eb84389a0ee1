"""Where the stages of a pipeline may end, and simple ways to cut them."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.graph import Trace

__all__ = [
    "even_block_ends",
    "even_ends",
    "even_stage_ends",
    "holders",
    "is_runnable",
    "joined_calls",
    "most_stages",
]


def holders(trace: Trace) -> tuple[bool, ...]:
    """Return per call of the chain whether it has parameters.

    A stage without any cannot be run: no optimizer can be made on its ranks.
    """
    has_parameters = [any(s.is_parameter for s in block.states) for block in trace.blocks]
    return tuple(has_parameters[call.block] for call in trace.calls)


def joined_calls(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Return the groups of calls that must be on one stage: those of a state that changes."""
    return tuple(state.calls for state in trace.changed if len(state.calls) > 1)


def most_stages(trace: Trace) -> int:
    """Return into how many stages the chain can be cut."""
    return len(_places(trace))


def is_runnable(trace: Trace, ends: Sequence[int]) -> bool:
    """Return whether stages that end at `ends` have parameters, and states that change lie in one.

    Not whether two stages of one rank share a parameter.
    """
    own = holders(trace)
    if not all(any(own[a:b]) for a, b in zip((0, *ends), ends, strict=False)):
        return False
    return not any(min(g) < end <= max(g) for g in joined_calls(trace) for end in ends)


def _places(trace: Trace) -> list[int]:
    """Return the first calls of the parts with parameters that the chain can be cut into."""
    groups, own = joined_calls(trace), holders(trace)
    borders = [
        call
        for call in range(1, len(own))
        if not any(min(group) < call <= max(group) for group in groups)
    ]
    spans = zip((0, *borders), (*borders, len(own)), strict=True)
    return [start for start, end in spans if any(own[start:end])]


def even_ends(num_calls: int, num_stages: int) -> tuple[int, ...]:
    """Return stage ends that give every stage the same number of blocks, as near as can be."""
    return tuple(num_calls * (s + 1) // num_stages for s in range(num_stages))


def even_stage_ends(trace: Trace, num_stages: int) -> tuple[int, ...]:
    """Return even ends; where these make a stage that cannot be run, ends that give every stage
    the same number of parts with parameters, each a block or those that must be on one stage.

    Raises:
        ValueError: there are fewer such parts than stages.
    """
    ends = even_ends(len(trace.calls), num_stages)
    if is_runnable(trace, ends):
        return ends
    places = _places(trace)
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
