"""How many blocks each stage has where ranks have several, and how ranks deal their blocks out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.interleaving import Alike, Counts, dealt, even_counts, rank_ends
from autoplan.search.problem import BlockOption, PipelineSolution


def pace(counts: Counts, before: float, after: float) -> float:
    """Return what the slowest c-th stages take together, in blocks."""
    stages = [[float(size) for size in own] for own in counts]
    stages[0][0] += before
    stages[-1][-1] += after
    longest: list[float] = [max(own) for own in zip(*stages, strict=True)]
    return sum(longest)


@settings(deadline=None)
@given(
    pp=st.integers(1, 6),
    num_chunks=st.integers(2, 5),
    extra=st.integers(0, 40),
    before=st.floats(0, 3),
    after=st.floats(0, 3),
    least=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_every_block_has_a_stage_and_even_stages_wait_for_no_more_than_plain_ones(
    pp: int, num_chunks: int, extra: int, before: float, after: float, least: tuple[int, int]
) -> None:
    num_blocks = pp * num_chunks + extra
    counts = even_counts(num_blocks, pp, num_chunks, before=before, after=after, least=least)
    sizes = [size for own in counts for size in own]
    assert (len(counts), {len(own) for own in counts}) == (pp, {num_chunks})
    assert sum(sizes) == num_blocks
    assert sizes[0] >= least[0]
    assert sizes[-1] >= least[1]
    assert min(sizes[1:-1], default=1) >= 1
    most = -(-num_blocks // pp)
    assert pace(counts, before, after) <= most + before + after + 1e-9


@pytest.mark.parametrize(
    ("blocks", "pp", "chunks", "after", "last"), [(96, 8, 4, 0.0, 3), (126, 8, 8, 0.8, 1)]
)
def test_the_last_stage_has_fewer_blocks_where_the_head_takes_as_long(
    blocks: int, pp: int, chunks: int, after: float, last: int
) -> None:
    assert even_counts(blocks, pp, chunks, after=after, least=(0, 0))[-1][-1] == last


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="7 alike blocks for 4 ranks of 2 stages"):
        even_counts(7, 4, 2)


OPTIONS = tuple(
    BlockOption(forward=time, backward=0, once=0, kept=0, static=0, working=0)
    for time in (10, 13, 17)
)


@settings(deadline=None)
@given(st.data())
def test_ranks_deal_out_what_they_chose_and_slow_blocks_meet(data: st.DataObject) -> None:
    alike = Alike(calls=range(1, 13), num_calls=14, least=(1, 1))
    counts = even_counts(12, 2, 3)
    options = tuple(data.draw(st.integers(0, 2)) for _ in range(14))
    shares = rank_ends(alike, counts)
    by_rank = PipelineSolution(
        status="feasible", ends=shares, options=options, objective=0, bound=0
    )
    found = dealt(alike, [OPTIONS] * 14, by_rank, counts)
    spans = [found.options[a:b] for a, b in pairwise((0, *found.ends))]
    assert len(spans) == 6
    for rank, (start, end) in enumerate(pairwise((0, *shares))):
        own = sorted(option for span in spans[rank::2] for option in span)
        assert own == sorted(options[start:end])


def test_the_stages_of_ranks_with_the_same_choices_take_the_same_time() -> None:
    alike = Alike(calls=range(12), num_calls=12, least=(1, 1))
    counts = even_counts(12, 2, 3)
    options = (0, 2, 0, 0, 2, 0, 2, 0, 0, 0, 0, 2)
    by_rank = PipelineSolution(
        status="feasible", ends=rank_ends(alike, counts), options=options, objective=0, bound=0
    )
    found = dealt(alike, [OPTIONS] * 12, by_rank, counts)
    spans = [sorted(found.options[a:b]) for a, b in pairwise((0, *found.ends))]
    assert spans[0::2] == spans[1::2]
