"""The Hypothesis strategies: one per core type, small enough for exhaustive references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.graph import Trace
from autoplan.leanest import least_memory
from autoplan.plan import Plan, SearchRecord
from autoplan.planner import Planner
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
from autoplan.search.problem import (
    BlockOption,
    ChoiceOption,
    ChoiceProblem,
    Consumer,
    Link,
    PipelineProblem,
    Run,
)
from autoplan.settings import Setting, Workload, settings_of
from tests.small_traces import BodySpec, ChainSpec, planner_of, small_trace, workload_of

__all__ = [
    "PlanningProblem",
    "block_options",
    "chains",
    "choice_problems",
    "clusters",
    "device_profiles",
    "link_profiles",
    "pipeline_problems",
    "planning_problems",
    "plans",
    "settings_values",
    "small_clusters",
    "traces",
    "workloads",
]

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
    crossings = st.lists(st.integers(0, 9), min_size=num_blocks - 1, max_size=num_blocks - 1)
    group = st.lists(st.integers(0, num_blocks - 1), max_size=2).map(tuple)
    anchored = draw(st.lists(st.booleans(), min_size=len(runs), max_size=len(runs)))
    anchors = tuple(x for run, x in zip(runs, anchored, strict=True) for _ in range(run.count))
    return PipelineProblem(
        runs=tuple(runs),
        num_microbatches=num_microbatches,
        live=tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages)),
        capacity=per_stage(25, 160),
        fixed=per_stage(0, 6),
        boundary=per_stage(0, 5),
        crossing=draw(st.one_of(st.just(()), crossings.map(tuple))),
        constant=draw(st.integers(0, 20)),
        cut_allowed=draw(st.one_of(st.just(()), cuts.map(tuple))),
        together=draw(st.one_of(st.just(()), st.tuples(group))),
        min_blocks=draw(st.sampled_from((1, 1, 2))),
        grain=draw(st.sampled_from((1, 1, 4))),
        once_grain=draw(st.sampled_from((1, 1, 3))),
        anchors=draw(st.sampled_from(((), anchors))),
    )


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


@st.composite
def small_clusters(draw: st.DrawFn, *, max_devices: int = 4) -> Cluster:
    """Draw clusters of up to `max_devices` devices of plain rates, on which blocks take time.

    Times of arithmetic, memory and links are of the same order, so that each can decide.
    """
    num_nodes, gpus_per_node = draw(
        st.sampled_from([(1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (1, 1)]).filter(
            lambda pair: pair[0] * pair[1] <= max_devices
        )
    )
    rates = st.sampled_from((1e8, 1e9, 1e10))
    links = {
        level: LinkProfile.from_numbers(
            name="drawn",
            level=level,
            latency_s=draw(st.sampled_from((1e-7, 1e-6, 1e-5))),
            bytes_per_s=draw(rates),
            source="drawn by Hypothesis",
        )
        for level in ("intra", "inter")
    }
    peaks = {"float32": 10 * draw(rates)}
    device = DeviceProfile(
        name=draw(st.sampled_from(("cpu-drawn", "drawn"))),
        memory_bytes=2**30,
        reserve_bytes=0,
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=10 * draw(rates),
        launch_overhead_s=1e-7,
        host_link_bytes_per_s=1e9,
        origins=ORIGIN,
        origin_by_field=dict.fromkeys((*SCALAR_FIELDS, "peak_flops_per_s.float32"), "drawn"),
    )
    return Cluster(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        device=device,
        intra=links["intra"],
        inter=links["inter"],
    )


@st.composite
def chains(draw: st.DrawFn, *, max_classes: int = 3, max_count: int = 2) -> ChainSpec:
    """Draw an embedding, one to `max_classes` block classes, and a head."""
    body = st.builds(
        BodySpec,
        count=st.integers(1, max_count),
        hidden=st.sampled_from((6, 8, 16, 32, 64)),
        has_norm=st.booleans(),
        has_view=st.booleans(),
        has_residual=st.booleans(),
        is_up_trained=st.sampled_from((True, True, True, False)),
    )
    return ChainSpec(
        width=draw(st.sampled_from((8, 12, 32))),
        vocabulary=draw(st.sampled_from((4, 16, 64))),
        bodies=tuple(draw(st.lists(body, min_size=1, max_size=max_classes))),
        is_tied=draw(st.booleans()),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a trace of a chain for micro-batches of one to four rows."""
    return small_trace(draw(chains()), draw(st.integers(1, 4)))


@st.composite
def workloads(draw: st.DrawFn, *, world_size: int = 1) -> Workload:
    """Draw a batch of one to four rows, or of one a device, an optimizer and a precision."""
    return workload_of(
        draw(st.sampled_from(sorted({world_size, 2 * world_size if world_size < 3 else 4}))),
        draw(st.sampled_from(("AdamW", "SGD"))),
        draw(st.sampled_from(("none", "none", "bfloat16"))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """What a planner is asked: a chain, a cluster with its memory, a workload."""

    chain: ChainSpec
    cluster: Cluster
    workload: Workload

    def planner(self, **pins: Any) -> Planner:
        """Return a fresh planner under the pins."""
        return planner_of(self.chain, self.cluster, self.workload, pins)


@st.composite
def planning_problems(draw: st.DrawFn, *, max_devices: int = 4) -> PlanningProblem:
    """Draw a problem whose memory is about what its leanest plan needs; most have a plan."""
    chain = draw(chains(max_classes=1, max_count=3))
    cluster = draw(small_clusters(max_devices=max_devices))
    workload = draw(workloads(world_size=cluster.world_size))
    roomy = cluster.with_memory("1GiB", reserve_bytes=0)
    need = least_memory(planner_of(chain, roomy, workload)).need_bytes
    share = draw(st.sampled_from((0.95, 1.0, 1.02, 1.1, 1.25, 1.5, 2.0)))
    return PlanningProblem(
        chain=chain, cluster=cluster.with_memory(int(need * share)), workload=workload
    )


@st.composite
def settings_values(draw: st.DrawFn) -> Setting:
    """Draw a setting that obeys every rule of divisibility."""
    cluster = draw(small_clusters())
    rows = cluster.world_size * draw(st.integers(1, 8))
    return draw(st.sampled_from(list(settings_of(cluster, workload_of(rows), 8, {}))))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw the plan of a random decision for every block, priced, whether or not it fits."""
    problem = draw(planning_problems())
    planner = problem.planner()
    setting = draw(st.sampled_from(planner.settings()))
    pricer = planner.pricer(setting.microbatch_size)
    decisions = [
        draw(st.sampled_from(pricer.decisions(call.block, setting.tp)))
        for call in pricer.trace.calls
    ]
    last = len(decisions)
    cuts = st.lists(
        st.integers(1, last - 1), min_size=setting.pp - 1, max_size=setting.pp - 1, unique=True
    )
    ends = (*sorted(draw(cuts)), last)
    record = SearchRecord(status="priced", objective_s=0.0, bound_s=0.0, gap=0.0, wall_time_s=0.0)
    return planner.write(setting, ends, decisions, record)
