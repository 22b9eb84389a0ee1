"""Hypothesis strategies for the search problems, small enough for the exhaustive references."""

from __future__ import annotations

from hypothesis import strategies as st

from autoplan.search.problem import (
    BlockOption,
    ChoiceOption,
    ChoiceProblem,
    Consumer,
    Link,
    PipelineProblem,
    Run,
)

__all__ = ["block_options", "choice_problems", "pipeline_problems"]


@st.composite
def choice_problems(draw: st.DrawFn, *, max_ops: int = 5) -> ChoiceProblem:
    """Draw up to `max_ops` ops of 1..3 options, linked to one, several or no later ops."""
    num_states = draw(st.integers(1, 3))
    states = st.integers(0, num_states - 1)
    small = st.integers(0, 12)
    option = st.builds(
        ChoiceOption,
        produces=states,
        time=small,
        memory=small,
        forbidden=st.sampled_from((False, False, False, False, True)),
    )
    ops = draw(st.lists(st.lists(option, min_size=1, max_size=3), min_size=1, max_size=max_ops))
    cost = st.one_of(st.tuples(small, st.integers(0, 4)), st.just((0, 0)), st.none())
    row = st.lists(cost, min_size=num_states, max_size=num_states)
    links = []
    for producer in range(len(ops) - 1):
        later = range(producer + 1, len(ops))
        consumers = tuple(
            Consumer(op=op, requires=tuple(draw(states) for _ in ops[op]))
            for op in draw(st.lists(st.sampled_from(later), max_size=3))
        )
        rows = draw(st.lists(row, min_size=num_states, max_size=num_states))
        transitions = tuple(tuple(own) for own in rows)
        links.append(Link(producer=producer, consumers=consumers, transitions=transitions))
    return ChoiceProblem(ops=tuple(tuple(own) for own in ops), links=tuple(links))


@st.composite
def block_options(draw: st.DrawFn, *, once: int | None = None) -> BlockOption:
    """Draw an option of small numbers; `once` is fixed if given."""
    small = st.integers(0, 9)
    return BlockOption(
        forward=draw(small),
        backward=draw(small),
        once=draw(small) if once is None else once,
        kept=draw(small),
        static=draw(small),
        working=draw(small),
    )


@st.composite
def pipeline_problems(draw: st.DrawFn, *, max_blocks: int = 6) -> PipelineProblem:
    """Draw up to `max_blocks` blocks in runs of 1..3 options, in 1..3 stages.

    Half of the problems have options that differ in `once`.
    """
    is_once_fixed = draw(st.booleans())
    runs: list[Run] = []
    room = draw(st.integers(1, max_blocks))
    while room > 0:
        count = draw(st.integers(1, room))
        once = draw(st.integers(0, 9)) if is_once_fixed else None
        options = draw(st.lists(block_options(once=once), min_size=1, max_size=3))
        runs.append(Run(count=count, options=tuple(options)))
        room -= count
    num_blocks = sum(run.count for run in runs)
    num_stages = draw(st.integers(1, min(3, num_blocks)))
    num_microbatches = draw(st.integers(1, 8))

    def per_stage(least: int, most: int) -> tuple[int, ...]:
        values = st.integers(least, most)
        return tuple(draw(st.lists(values, min_size=num_stages, max_size=num_stages)))

    cuts = st.lists(
        st.sampled_from((True, True, False)), min_size=num_blocks - 1, max_size=num_blocks - 1
    )
    group = st.lists(st.integers(0, num_blocks - 1), max_size=2).map(tuple)
    return PipelineProblem(
        runs=tuple(runs),
        num_microbatches=num_microbatches,
        live=tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages)),
        capacity=per_stage(25, 160),
        fixed=per_stage(0, 6),
        boundary=per_stage(0, 5),
        constant=draw(st.integers(0, 20)),
        cut_allowed=draw(st.one_of(st.just(()), cuts.map(tuple))),
        together=draw(st.one_of(st.just(()), st.tuples(group))),
        min_blocks=draw(st.sampled_from((1, 1, 2))),
    )
