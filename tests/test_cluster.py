"""Clusters: texts, files, capacity, and the link that an axis uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.errors import ProfileError
from autoplan.profiles import DeviceProfile
from autoplan.profiles.tables import COLLECTIVES
from autoplan.units import GIB
from tests.strategies import clusters

LAWS = settings(derandomize=True, deadline=None, max_examples=60)


LINK = "gpus_per_node: 4\ndevice: a100\nintra: {latency_s: 1e-6, bytes_per_s: 1e9, "


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@LAWS
@given(cluster=clusters())
def test_cluster_round_trips_through_json(cluster: Cluster) -> None:
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_texts_give_nodes_devices_and_profile() -> None:
    two = Cluster.parse("2x8:a100_sxm_80gb")
    assert (two.num_nodes, two.gpus_per_node, two.world_size) == (2, 8, 16)
    assert two.device.name == "a100_sxm_80gb"
    one = Cluster.parse("8:h100")
    assert (one.num_nodes, one.gpus_per_node, one.device.name) == (1, 8, "h100_sxm_80gb")
    assert Cluster.parse(" 4 : cpu ").world_size == 4
    assert Cluster.parse(str(two)) == two


@pytest.mark.parametrize("text", ["", "8", "8:", "x8:a100", "2x:a100", "2y8:a100", "-1:a100"])
def test_wrong_text_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a cluster.*4x8:a100_sxm_80gb"):
        Cluster.parse(text)


def test_zero_devices_and_unknown_profile_are_refused() -> None:
    with pytest.raises(ValueError, match="gpus_per_node: must be at least 1"):
        Cluster.parse("0:a100")
    with pytest.raises(ProfileError, match="no profile named 'z100'"):
        Cluster.parse("8:z100")


def test_capacity_is_memory_minus_reserve_and_settable() -> None:
    cluster = Cluster.parse("1x8:a100")
    device = cluster.device
    assert cluster.capacity_bytes == device.memory_bytes - device.reserve_bytes
    assert cluster.with_memory("40GiB").capacity_bytes == 40 * GIB - device.reserve_bytes
    assert cluster.with_memory(40 * GIB) == cluster.with_memory("40GiB")
    with pytest.raises(ValueError, match="nothing is left"):
        cluster.with_memory("1GiB")
    with pytest.raises(ValueError, match="is not a size"):
        cluster.with_memory("much")


def test_link_is_intra_inside_a_node_and_inter_across() -> None:
    cluster = Cluster.parse("4x8:a100")
    assert cluster.link_for(8, 1) is cluster.intra
    assert cluster.link_for(2, 4) is cluster.intra
    assert cluster.link_for(1, 32) is cluster.intra
    across = cluster.link_for(4, 8)
    assert across.level == "inter"
    assert across.bus_bytes_per_s == cluster.inter.bytes_per_s
    whole = cluster.link_for(32, 1)
    assert whole.bus_bytes_per_s == 8 * cluster.inter.bytes_per_s
    assert whole.bytes_per_s == cluster.inter.bytes_per_s
    assert whole.latency_s < across.latency_s


def test_group_that_straddles_two_nodes_has_the_inter_link() -> None:
    cluster = Cluster.parse("3x4:a100")
    assert cluster.link_for(3, 1).level == "inter"
    assert Cluster.parse("8:a100").link_for(3, 1).level == "intra"


def test_ring_over_nodes_is_no_faster_than_the_link_inside_them() -> None:
    cluster = Cluster.parse("2x8:l40s")
    slow = replace(cluster, intra=cluster.intra.scaled(bandwidth=0.01))
    assert slow.link_for(16).bus_bytes_per_s == slow.intra.bytes_per_s
    assert slow.link_for(2, 8).bus_bytes_per_s == slow.inter.bytes_per_s


def test_groups_over_nodes_share_what_rings_over_whole_nodes_reach() -> None:
    cluster = Cluster.parse("4x4:a100")
    rings = replace(
        cluster.inter,
        node_rings=((4, 8e9),),
        origin_by_field={**cluster.inter.origin_by_field, "node_rings": "network"},
    )
    measured = replace(cluster, inter=rings)
    assert measured.link_for(16, 1).bus_bytes_per_s == pytest.approx(8e9)
    assert measured.link_for(8, 2).bus_bytes_per_s == pytest.approx(4e9)
    assert measured.link_for(4, 4).bus_bytes_per_s == pytest.approx(2e9)
    fast = replace(rings, node_rings=((4, 1e15),))
    assert (
        replace(cluster, inter=fast).link_for(16, 1).bus_bytes_per_s
        == cluster.link_for(16, 1).bus_bytes_per_s
    )


def test_axis_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="need 16 ranks, the cluster 1x8:a100_sxm_80gb has 8"):
        Cluster.parse("8:a100").link_for(16)
    with pytest.raises(ValueError, match="at least 1"):
        Cluster.parse("8:a100").link_for(0)


@LAWS
@given(cluster=clusters(), collective=st.sampled_from(COLLECTIVES), nbytes=st.integers(1, 2**30))
def test_a_faster_network_never_slows_an_axis(
    cluster: Cluster, collective: str, nbytes: int
) -> None:
    faster = Cluster(
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node,
        device=cluster.device,
        intra=cluster.intra.scaled(bandwidth=3.0),
        inter=cluster.inter.scaled(bandwidth=3.0),
    )
    degree = cluster.world_size
    before = cluster.link_for(degree).collective_time_s(collective, nbytes, degree)  # type: ignore[arg-type]
    after = faster.link_for(degree).collective_time_s(collective, nbytes, degree)  # type: ignore[arg-type]
    assert after <= before * (1 + 1e-9)


def test_yaml_file_gives_every_setting(tmp_path: Path) -> None:
    path = write_yaml(
        tmp_path,
        "num_nodes: 2\ngpus_per_node: 4\ndevice: a100\ndevice_memory: 40GiB\nreserve: 3 GiB\n"
        "inter:\n  latency_s: 2e-5\n  bytes_per_s: 12.5e9\n",
    )
    cluster = Cluster.parse(path)
    assert cluster.world_size == 8
    assert cluster.capacity_bytes == 37 * GIB
    assert cluster.inter.bytes_per_s == 12.5e9
    assert cluster.inter.origins["given"].text == "given in cluster.yaml"
    assert cluster.intra.bytes_per_s == Cluster.parse("8:a100").intra.bytes_per_s


def test_yaml_file_gives_measured_curves(tmp_path: Path) -> None:
    path = write_yaml(
        tmp_path,
        "num_nodes: 2\ngpus_per_node: 4\ndevice: a100\ninter:\n  latency_s: 2e-5\n"
        "  bytes_per_s: 12.5e9\n  interference: 1.3\n  curves:\n"
        "  - {collective: all_reduce, degree: 8, ranks_per_node: 4, rows: [[1024, 3e-4]]}\n",
    )
    link = Cluster.parse(path).link_for(8)
    assert link.collective_time_s("all_reduce", 1024, 8) == 3e-4
    assert link.interference == 1.3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus_per_node: 4\n", "device: missing key"),
        ("gpus_per_node: 4\ndevice: a100\ngpus: 3\n", "gpus: unknown key; allowed are num_nodes"),
        ("gpus_per_node: four\ndevice: a100\n", "gpus_per_node: must be a whole number"),
        ("gpus_per_node: 4\ndevice: 100\n", "device: must be the name"),
        ("gpus_per_node: 4\ndevice: a100\ndevice_memory: lots\n", "device_memory: 'lots'"),
        ("gpus_per_node: 4\ndevice: a100\nintra: 5\n", "intra: must be a mapping"),
        ("gpus_per_node: 4\ndevice: a100\nintra: {latency_s: 1}\n", "bytes_per_s: missing key"),
        (
            "gpus_per_node: 4\ndevice: a100\nintra: {latency_s: x, bytes_per_s: 1}\n",
            "intra.latency_s: must be a number",
        ),
        (
            f"{LINK}interference: 0.5}}\n",
            "intra.interference: must be at least 1",
        ),
        (f"{LINK}curves: 3}}\n", "intra.curves: must be a list"),
        (f"{LINK}curves: [{{degree: 2, rows: []}}]}}\n", "curves[0]: collective: missing"),
        (
            f"{LINK}curves: [{{collective: send, degree: 2, rows: [7]}}]}}\n",
            "curves[0].rows: must be a list of [bytes, seconds]",
        ),
        (
            f"{LINK}curves: [{{collective: send, degree: 1, rows: [[7, 1]]}}]}}\n",
            "curves[0].degree: a collective needs at least 2 ranks",
        ),
        ("- 1\n", "must be a mapping"),
        ("a: [\n", "cannot read the cluster file"),
    ],
)
def test_wrong_yaml_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = write_yaml(tmp_path, text)
    with pytest.raises(ValueError, match=r"cluster\.yaml") as caught:
        Cluster.parse(path)
    assert message in str(caught.value)


def test_profile_without_links_says_how_to_give_them() -> None:
    device = DeviceProfile.from_datasheet(
        name="bare",
        memory_bytes=10**9,
        peak_flops_per_s={"float32": 1e12},
        memory_bandwidth_bytes_per_s=1e11,
        source="made up",
    )
    with pytest.raises(ValueError, match="profile bare has no links"):
        Cluster.from_device(device, gpus_per_node=2)
    assert Cluster.from_device(device).world_size == 1
