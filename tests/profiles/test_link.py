"""Laws and equations of collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan import codec
from autoplan.errors import ProfileError
from autoplan.profiles import LinkProfile, load_profile
from autoplan.profiles.link import broadcast_time_s
from autoplan.profiles.tables import COLLECTIVES, Collective
from tests.strategies import link_profiles

LAWS = settings(derandomize=True, deadline=None, max_examples=150)


def plain_link() -> LinkProfile:
    return LinkProfile.from_numbers(
        name="plain", level="intra", latency_s=1e-6, bytes_per_s=1e9, source="made up"
    )


@LAWS
@given(link=link_profiles())
def test_link_profile_round_trips_through_json(link: LinkProfile) -> None:
    assert codec.loads(LinkProfile, codec.dumps(link)) == link


@LAWS
@given(
    link=link_profiles(),
    collective=st.sampled_from(COLLECTIVES),
    nbytes=st.integers(1, 2**33),
    more=st.integers(0, 2**33),
    degree=st.integers(2, 64),
    speed_up=st.floats(1.0, 100.0),
)
def test_more_bytes_are_never_faster_and_more_bandwidth_never_slower(
    link: LinkProfile,
    collective: Collective,
    nbytes: int,
    more: int,
    degree: int,
    speed_up: float,
) -> None:
    time_s = link.collective_time_s(collective, nbytes, degree)
    assert 0 < time_s <= link.collective_time_s(collective, nbytes + more, degree) * (1 + 1e-9)
    faster = link.scaled(bandwidth=speed_up)
    assert faster.collective_time_s(collective, nbytes, degree) <= time_s * (1 + 1e-9)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_group_of_one_costs_nothing(collective: Collective) -> None:
    assert plain_link().collective_time_s(collective, 2**30, 1) == 0


def test_equations_give_their_textbook_values() -> None:
    link = plain_link()
    large = 4 * 10**9
    times = {c: link.collective_time_s(c, large, 4) for c in COLLECTIVES}
    assert times["all_gather"] == pytest.approx(3 * (1e-6 + 1.0))
    assert times["reduce_scatter"] == times["all_gather"]
    assert times["all_reduce"] == pytest.approx(2 * times["all_gather"])
    assert times["all_to_all"] == pytest.approx(3 * (1e-6 + 1.0))
    assert times["send"] == pytest.approx(1e-6 + 4.0)
    assert broadcast_time_s(large, 4, link) == pytest.approx(3e-6 + 4.0)
    assert broadcast_time_s(large, 1, link) == broadcast_time_s(0, 4, link) == 0.0
    small = link.collective_time_s("all_reduce", 1, 1024)
    assert small < 2 * 1023 * 1e-6  # the tree wins where latency counts


def test_curve_is_read_exactly_for_its_group_and_carried_to_others() -> None:
    link = load_profile("a100").intra
    assert link is not None
    nbytes, time_s = link.curves[0].rows[-1]
    assert link.collective_time_s("all_reduce", nbytes, 8) == pytest.approx(time_s)
    four = link.collective_time_s("all_reduce", nbytes, 4)
    assert 0.8 * time_s < four < time_s
    half = link.collective_time_s("all_gather", nbytes, 8)
    assert half == pytest.approx(time_s / 2, rel=0.01)


def test_rings_over_nodes_lie_between_the_measured_ones() -> None:
    link = replace(
        plain_link(),
        node_rings=((16, 1e9), (4, 4e9)),
        origin_by_field={**plain_link().origin_by_field, "node_rings": "given"},
    )
    assert plain_link().node_ring_bytes_per_s(8) is None
    found = [link.node_ring_bytes_per_s(nodes) for nodes in (2, 4, 8, 16, 64)]
    assert found == pytest.approx([4e9, 4e9, 2e9, 1e9, 1e9])
    assert link.scaled(bandwidth=2.0).node_ring_bytes_per_s(8) == pytest.approx(4e9)
    with pytest.raises(ValueError, match="node_rings"):
        replace(link, node_rings=((4, 0.0),))


def test_unknown_collective_and_bad_degree_raise() -> None:
    with pytest.raises(ProfileError, match=r"'gossip'.*all_reduce"):
        plain_link().collective_time_s("gossip", 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="degree must be at least 1"):
        plain_link().collective_time_s("send", 1, 0)
