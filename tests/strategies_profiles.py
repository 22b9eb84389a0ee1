"""Hypothesis strategies for device profiles, link profiles and clusters."""

from __future__ import annotations

from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.profiles import (
    AttentionTable,
    CollectiveTable,
    DeviceProfile,
    GemmTable,
    LinkProfile,
    MemoryTable,
    Origin,
)
from autoplan.profiles.tables import ATTENTION_DIRECTIONS, COLLECTIVES, GEMM_DIRECTIONS

__all__ = ["clusters", "device_profiles", "link_profiles"]

SIZES = st.integers(1, 2**17)
RATES = st.floats(1e9, 1e15)
SCALAR_FIELDS = (
    "memory_bytes",
    "reserve_bytes",
    "memory_bandwidth_bytes_per_s",
    "launch_overhead_s",
    "host_link_bytes_per_s",
)
ORIGIN = {"drawn": Origin(kind="assumed", text="drawn by Hypothesis")}


@st.composite
def link_profiles(draw: st.DrawFn, level: str = "intra") -> LinkProfile:
    """Return links with and without curves."""
    curves = []
    keys = st.tuples(st.sampled_from(COLLECTIVES), st.sampled_from((2, 4, 8)))
    for collective, degree in draw(st.lists(keys, max_size=3, unique=True)):
        rows = st.lists(
            st.tuples(st.integers(1, 2**32), st.floats(1e-6, 10.0)),
            min_size=1,
            max_size=5,
            unique_by=lambda row: row[0],
        )
        curves.append(
            CollectiveTable(
                collective=collective, degree=degree, origin="drawn", rows=tuple(draw(rows))
            )
        )
    return LinkProfile(
        name="drawn",
        level="intra" if level == "intra" else "inter",
        latency_s=draw(st.floats(0.0, 1e-3)),
        bytes_per_s=draw(st.floats(1e6, 1e12)),
        setup_s=draw(st.floats(0.0, 1e-4)),
        curves=tuple(curves),
        origins=ORIGIN,
        origin_by_field=dict.fromkeys(("latency_s", "bytes_per_s", "setup_s"), "drawn"),
    )


@st.composite
def device_profiles(draw: st.DrawFn) -> DeviceProfile:
    """Return profiles of up to three dtypes, with and without tables."""
    names = st.sampled_from(("float32", "bfloat16", "float16"))
    dtypes = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    rows = st.lists(
        st.tuples(SIZES, SIZES, SIZES, RATES), min_size=1, max_size=6, unique_by=lambda r: r[:3]
    ).map(tuple)
    with_table = draw(st.sampled_from(dtypes))
    gemm = tuple(
        GemmTable(dtype=with_table, direction=direction, origin="drawn", rows=draw(rows))
        for direction in draw(st.lists(st.sampled_from(GEMM_DIRECTIONS), unique=True))
    )
    attention = tuple(
        AttentionTable(
            dtype=with_table,
            direction=direction,
            causal=draw(st.booleans()),
            origin="drawn",
            rows=draw(rows),
        )
        for direction in draw(st.lists(st.sampled_from(ATTENTION_DIRECTIONS), unique=True))
    )
    memory_rows = st.lists(
        st.tuples(st.integers(1, 2**32), RATES), min_size=1, max_size=5, unique_by=lambda r: r[0]
    ).map(tuple)
    memory = [MemoryTable(origin="drawn", rows=draw(memory_rows))] if draw(st.booleans()) else []
    memory_bytes = draw(st.integers(2**20, 2**40))
    peaks = {dtype: draw(RATES) for dtype in dtypes}
    fields = [*SCALAR_FIELDS, *(f"peak_flops_per_s.{dtype}" for dtype in peaks)]
    return DeviceProfile(
        name="drawn",
        memory_bytes=memory_bytes,
        reserve_bytes=draw(st.integers(0, memory_bytes - 1)),
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=draw(RATES),
        launch_overhead_s=draw(st.floats(1e-7, 1e-3)),
        host_link_bytes_per_s=draw(RATES),
        gemm=gemm,
        attention=attention,
        memory_bound=tuple(memory),
        intra=draw(st.none() | link_profiles("intra")),
        inter=draw(st.none() | link_profiles("inter")),
        origins=ORIGIN,
        origin_by_field=dict.fromkeys(fields, "drawn"),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Return clusters of up to 8 nodes of up to 16 devices."""
    return Cluster(
        num_nodes=draw(st.integers(1, 8)),
        gpus_per_node=draw(st.integers(1, 16)),
        device=draw(device_profiles()),
        intra=draw(link_profiles("intra")),
        inter=draw(link_profiles("inter")),
    )
