"""A short time measures points that the others are near to."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.profiles import load_profile
from autoplan.profiles.grids import attention_grid, gemm_grid, informative_first, measured_points
from autoplan.profiles.measure import profile_command
from tests.search.profiles import few

Sizes = tuple[int, ...]


def farthest(points: list[Sizes], measured: list[Sizes]) -> float:
    """Return the largest ratio of a size to that of the nearest point, as its logarithm."""
    return max(
        min(max(abs(math.log2(a / b)) for a, b in zip(p, q, strict=True)) for q in measured)
        for p in points
    )


@few
@given(points=st.lists(st.tuples(*[st.integers(1, 2**12)] * 2), min_size=1, unique=True))
def test_every_point_is_measured_once_and_no_prefix_is_lopsided(points: list[Sizes]) -> None:
    ordered = informative_first(points)
    assert sorted(ordered) == sorted(points)
    first = min(farthest(points, [point]) for point in points)
    assert farthest(points, ordered[:1]) <= first + 1e-9
    pairs = min(
        (farthest(points, [a, b]) for a in points for b in points if a < b), default=math.inf
    )
    assert len(points) < 2 or farthest(points, ordered[:2]) <= 2 * pairs + 1e-9


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_first_point_of_a_grid_is_neither_the_smallest_nor_the_largest(kind: str) -> None:
    for grid in (gemm_grid(kind), attention_grid(kind)):
        sizes = list(map(math.prod, grid))
        assert min(sizes) < sizes[0] < max(sizes)


def test_a_profile_knows_how_much_of_its_grids_it_has(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        path = profile_command("cpu", tmp_path / "cpu.json", budget_s=0.3, with_links=False)
        found.append(measured_points(load_profile(path), "cpu"))
    assert 0 < found[0][0] < found[1][0] <= found[0][1] == found[1][1]
