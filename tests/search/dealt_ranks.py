"""Ranks of a few stages whose ways to run are drawn, and every choice of them that fits."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

__all__ = ["NUMBERS", "Rank", "fitting_costs", "ranks"]

NUMBERS = st.integers(0, 12)
Rank = tuple[list[np.ndarray], list[np.ndarray], float]


@st.composite
def ranks(draw: st.DrawFn) -> Rank:
    """Draw costs by stage and way, what ways hold at each instant, and a room."""
    instants = draw(st.integers(1, 3))
    costs, held = [], []
    for _ in range(draw(st.integers(1, 4))):
        ways = draw(st.integers(1, 4))
        costs.append(np.array(draw(st.lists(NUMBERS, min_size=ways, max_size=ways)), dtype=float))
        rows = st.lists(NUMBERS, min_size=ways, max_size=ways)
        own = draw(st.lists(rows, min_size=instants, max_size=instants))
        held.append(np.array(own, dtype=float))
    return costs, held, float(draw(st.integers(0, 40)))


def fitting_costs(rank: Rank) -> list[float]:
    """Return the costs of all ways that keep to the room at every instant."""
    costs, held, room = rank
    return [
        sum(float(c[way]) for c, way in zip(costs, ways, strict=True))
        for ways in itertools.product(*(range(len(c)) for c in costs))
        if np.max(sum(own[:, way] for own, way in zip(held, ways, strict=True))) <= room
    ]
