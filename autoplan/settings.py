"""A setting: the degrees and sizes that are fixed before blocks are placed and decided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from autoplan.cluster import Cluster
from autoplan.engines import AUTOPLAN, Engine
from autoplan.expert_parallel import UNDIVIDED, ExpertParallel
from autoplan.graph import Trace
from autoplan.limits import LIMITED_KEYS, Limits
from autoplan.meshes import AXIS_ORDERS, AxisOrder
from autoplan.optimizers import Optimizer
from autoplan.schedules import (
    MULTI_STAGE,
    enough_rounds,
    in_flight,
    in_flight_by_stage,
    unrunnable_split,
)

__all__ = [
    "NO_LIMITS",
    "OFFLOADS",
    "PIN_KEYS",
    "Setting",
    "Workload",
    "check_pins",
    "settings_of",
]

PIN_KEYS = (*LIMITED_KEYS, "axis_order", "recompute", "schedule")
NO_LIMITS = Limits()
OFFLOADS = ("optimizer", "activations")
Schedule = Literal["none", "1f1b", "gpipe", "interleaved", "zero_bubble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What does not depend on the plan: the batch, the optimizer, the precision.

    Attributes:
        global_batch_size: rows of one step over all devices.
        optimizer: its memory law.
        mixed_precision: `bfloat16`: the trace is in it, over parameters of `parameter_dtype_bytes`.
        autocast: the trace is under `torch.autocast` to this dtype.
        parameter_bytes_per_traced_byte: bytes of a stored parameter per byte in the trace: 2 for
            float32 parameters computed with in bfloat16, else 1.
        engine: the software that trains.
        product_dtype: in which linear layers of blocks multiply, where it is not the trace's:
            `float8`.
        attention_kernel: implementation of fused attention, as the profile names it; empty: its own
            default.
        is_compiled: memory-bound ops that hand their results on run as one kernel.
        offload: what a plan may keep in host memory: names of `OFFLOADS`.
        context_parallel: ranks over which every sequence lies; the trace is of one's part, and they
            count as data-parallel ranks of a `Setting` (`autoplan.context_parallel`).
        experts: how experts lie over ranks.
    """

    global_batch_size: int
    optimizer: Optimizer
    mixed_precision: Literal["none", "bfloat16"] = "none"
    autocast: Literal["none", "bfloat16"] = "none"
    parameter_bytes_per_traced_byte: int = 1
    engine: Engine = AUTOPLAN
    product_dtype: str | None = None
    is_compiled: bool = False
    attention_kernel: str = ""
    offload: tuple[str, ...] = ()
    context_parallel: int = 1
    experts: ExpertParallel = UNDIVIDED


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One point of the outer search.

    Attributes:
        dp, tp, pp: degrees.
        zero_stage: 0 to 3.
        microbatch_size: rows.
        num_microbatches: per replica and step.
        schedule: of the pipeline.
        virtual_stages: stages of each rank; above 1 under `interleaved` and `zero_bubble` only
            (Narayanan et al. 2021, section 2.2).
        offload: `optimizer`: shards of parameters, gradients and optimizer state lie in host
            memory and the optimizer steps there; with ZeRO 3 only, on one device too.
        dp_replicate: replicas of what ZeRO shards; see `autoplan.plan.Mesh`.
        axis_order: of the axes over ranks, innermost first.
    """

    dp: int
    tp: int
    pp: int
    zero_stage: int
    microbatch_size: int
    num_microbatches: int
    schedule: Schedule
    virtual_stages: int = 1
    offload: Literal["none", "optimizer"] = "none"
    dp_replicate: int = 1
    axis_order: AxisOrder = "tp-dp-pp"

    def __str__(self) -> str:
        text = (
            f"dp={self.dp} tp={self.tp} pp={self.pp} zero={self.zero_stage} "
            f"mbs={self.microbatch_size} m={self.num_microbatches}"
            + (f" v={self.virtual_stages}" if self.virtual_stages > 1 else "")
            + ("" if self.schedule in _USUAL_SCHEDULES else f" {self.schedule}")
            + (" offload" if self.offload != "none" else "")
        )
        if self.dp_replicate > 1:
            text += f" dp_replicate={self.dp_replicate}"
        return text if self.axis_order == AXIS_ORDERS[0] else f"{text} {self.axis_order}"

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Return the order in which ties are broken: fewer ways of being parallel first."""
        is_offloaded = int(self.offload != "none")
        degrees = (self.pp, self.tp, self.zero_stage, self.num_microbatches, self.dp)
        placed = (self.dp_replicate, AXIS_ORDERS.index(self.axis_order))
        scheduled = (self.virtual_stages, _SCHEDULES.index(self.schedule))
        return (is_offloaded, *degrees, *placed, *scheduled)

    @property
    def world_size(self) -> int:
        """Return dp * tp * pp."""
        return self.dp * self.tp * self.pp

    @property
    def dp_shard(self) -> int:
        """Return over how many ranks ZeRO shards what it shards."""
        return self.dp // self.dp_replicate

    @property
    def shards(self) -> int:
        """Return into how many parts ZeRO divides optimizer states: 1 for stage 0."""
        return self.dp_shard if self.zero_stage >= 1 else 1

    def alive(self) -> tuple[float, ...]:
        """Return per rank of the pipeline the micro-batches that are alive at once.

        Of a rank with several stages the mean over them where they hold most together.
        """
        m = self.num_microbatches
        if self.schedule == "1f1b":
            return tuple(min(m, self.pp - s) for s in range(self.pp))
        if self.schedule in MULTI_STAGE:
            enough, v = enough_rounds(m, self.pp), self.virtual_stages
            return tuple(count / v for count in in_flight(self.schedule, self.pp, enough, v))
        return (m,) * self.pp if self.schedule == "gpipe" else (1,)

    def alive_by_stage(self) -> tuple[tuple[float, ...], ...]:
        """Return per rank the micro-batches of each of its stages that are alive when most are."""
        m, v = self.num_microbatches, self.virtual_stages
        enough = enough_rounds(m, self.pp)
        counts = in_flight_by_stage(self.schedule, self.pp, enough, v)
        return tuple(tuple(map(float, own)) for own in counts)

    def live(self) -> tuple[int, ...]:
        """Return `alive`, rounded up."""
        return tuple(math.ceil(count) for count in self.alive())


_CHUNKS = (2, 4, 8)  # stages a rank that are tried beside those that divide the alike blocks
_SCHEDULES = ("none", "1f1b", "gpipe", "interleaved", "zero_bubble")
_USUAL_SCHEDULES = ("none", "1f1b", "interleaved")  # these need no word beside pp and v
_WORDS = {
    "recompute": ("none", "full", "selective"),
    "axis_order": AXIS_ORDERS,
    "schedule": _SCHEDULES[1:],
}
_ARGUMENTS = ("batch", "batch_dim", "global_batch_size", "loss_fn", "optimizer", "within", "forbid")


def check_pins(pins: Mapping[str, Any]) -> None:
    """Check the names and values of pinned settings.

    Raises:
        ValueError: says what was got and what is allowed.
    """
    for key, value in pins.items():
        if key not in PIN_KEYS:
            near = get_close_matches(key, [*PIN_KEYS, *_ARGUMENTS], n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"cannot pin {key!r}{hint}; allowed are {', '.join(PIN_KEYS)}")
        if key in _WORDS:
            if value not in _WORDS[key]:
                raise ValueError(f"{key}={value!r}; allowed are {', '.join(_WORDS[key])}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < (key != "zero_stage"):
            least = int(key != "zero_stage")
            raise ValueError(f"{key}={value!r}: must be a whole number of at least {least}")
    if pins.get("zero_stage", 0) > 3:
        raise ValueError(f"zero_stage={pins['zero_stage']}; allowed are 0, 1, 2, 3")


def settings_of(
    cluster: Cluster,
    workload: Workload,
    num_blocks: int,
    pins: Mapping[str, Any],
    *,
    limits: Limits = NO_LIMITS,
    devices: int | None = None,
    num_alike: int = 0,
    can_split: bool = False,
) -> Iterator[Setting]:
    """Yield every setting of the space that obeys the rules, the pins and the limits.

    Rules: dp * tp * pp is the number of devices; tp stays inside a node; there are at least as many
    blocks with parameters (`num_blocks`) as stages; the batch divides into dp * num_microbatches *
    microbatch_size; 1F1B has at least as many micro-batches as stages, fewer pass by GPipe;
    interleaved stages need a multiple of the ranks, and one of `num_alike` alike blocks each, and
    are not beside devices of several types, which even stages do not suit; where the backward of
    every stage can be split (`can_split`), so it is beside what else torch can run then
    (`schedules.unrunnable_split`); without data parallelism there is nothing to shard, unless the
    shards may lie on the host.
    """
    world = devices or cluster.world_size
    space = _unlimited(cluster, workload, num_blocks, pins, world, num_alike, can_split)
    for setting in space:
        if limits.allows_setting(setting):
            yield setting


def _unlimited(
    cluster: Cluster,
    workload: Workload,
    num_blocks: int,
    pins: Mapping[str, Any],
    world: int,
    num_alike: int,
    can_split: bool,
) -> Iterator[Setting]:
    is_of_one_type = not cluster.slower
    for pp in _divisors(world):
        if pp > num_blocks or pins.get("pp", pp) != pp:
            continue
        for tp in _divisors(world // pp):
            dp = world // pp // tp
            is_pinned_off = pins.get("tp", tp) != tp or pins.get("dp", dp) != dp
            if is_pinned_off or (tp > cluster.gpus_per_node and "tp" not in pins):
                continue
            for placed in _placements(cluster, dp, tp, pp, pins):
                alike = num_alike if is_of_one_type else 0
                is_split = can_split and is_of_one_type
                yield from _batch_settings(dp, tp, pp, workload, pins, *placed, alike, is_split)


def _batch_settings(
    dp: int,
    tp: int,
    pp: int,
    workload: Workload,
    pins: Mapping[str, Any],
    dp_replicate: int,
    axis_order: AxisOrder,
    num_alike: int,
    can_split: bool,
) -> Iterator[Setting]:
    if workload.global_batch_size % dp:
        return
    rows = workload.global_batch_size // dp
    for size in _divisors(rows):
        m = rows // size
        if pins.get("microbatch_size", size) != size or pins.get("num_microbatches", m) != m:
            continue
        is_pinned = "microbatch_size" in pins or "num_microbatches" in pins
        # Smaller micro-batches wait less, where they are fewer than stages.
        if m < pp and size > 1 and not is_pinned and "schedule" not in pins:
            continue
        for zero, offload in _sharding(dp, workload):
            if pins.get("zero_stage", zero) != zero or (zero == 0 and dp_replicate > 1):
                continue
            is_split = can_split and zero == 0 and _runs_split(workload, pins)
            for schedule, chunks in _schedules(pp, m, num_alike, pins, is_split):
                yield Setting(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    zero_stage=zero,
                    microbatch_size=size,
                    num_microbatches=m,
                    schedule=schedule,
                    virtual_stages=chunks,
                    offload=offload,
                    dp_replicate=dp_replicate,
                    axis_order=axis_order,
                )


def _runs_split(workload: Workload, pins: Mapping[str, Any]) -> bool:
    """Return whether a plan without ZeRO can split backwards."""
    is_mixed = workload.mixed_precision != "none"
    recomputes = pins.get("recompute", "none") != "none"
    return unrunnable_split("zero_bubble", 0, is_mixed=is_mixed, recomputes=recomputes) is None


def _schedules(
    pp: int, m: int, num_alike: int, pins: Mapping[str, Any], can_split: bool
) -> Iterator[tuple[Schedule, int]]:
    """Yield the schedules of m micro-batches over pp ranks, with the stages of each rank.

    GPipe is as fast as 1F1B and needs more memory, so it is for fewer micro-batches than ranks, or
    for who wants it.
    """
    if pp == 1:
        if "schedule" not in pins and pins.get("virtual_stages", 1) == 1:
            yield "none", 1
        return
    wanted = pins.get("schedule")
    usual: Schedule = "1f1b" if m >= pp else "gpipe"
    flat: list[Schedule] = ["gpipe" if wanted == "gpipe" else usual]
    if can_split and m >= pp and m % (m // pp) == 0:
        flat.append("zero_bubble")
    if pins.get("virtual_stages", 1) == 1:
        for schedule in flat:
            if wanted in (None, schedule):
                yield schedule, 1
    if m % pp == 0:
        several: list[Schedule] = ["interleaved", *flat[1:]]
        pinned = pins.get("virtual_stages")
        for chunks in _chunks(num_alike, pp) if pinned is None else (pinned,):
            for schedule in several:
                if 1 < chunks <= num_alike // pp and wanted in (None, schedule):
                    yield schedule, chunks


@lru_cache(maxsize=256)
def _chunks(num_alike: int, pp: int) -> tuple[int, ...]:
    """Return the numbers of stages a rank that are tried.

    Each stage has an alike block, and beside a few powers of two all have equally many.
    """
    most = num_alike // pp
    return tuple(
        chunks
        for chunks in range(2, most + 1)
        if chunks in _CHUNKS or num_alike % (pp * chunks) == 0
    )


def _placements(
    cluster: Cluster, dp: int, tp: int, pp: int, pins: Mapping[str, Any]
) -> Iterator[tuple[int, AxisOrder]]:
    """Yield (dp_replicate, axis_order) worth trying, or pinned.

    Pipelines inside nodes are worth it only where they fit into one, and would cross nodes
    otherwise. Replicas are worth it only of shards that lie in one node and are as many as do:
    fewer shards make no collective faster, and need more memory.
    """
    gpus = cluster.gpus_per_node
    for order in AXIS_ORDERS:
        inside = 1 if order == "tp-dp-pp" else pp
        fits = dp > 1 and pp > 1 and gpus % (tp * pp) == 0 and gpus < dp * tp * pp
        if pins.get("axis_order", order) != order:
            continue
        if order != AXIS_ORDERS[0] and "axis_order" not in pins and not fits:
            continue
        near = gpus // (tp * inside)
        shard = max((d for d in _divisors(dp) if d <= near and near % d == 0), default=1)
        hybrid = [dp // shard] if 1 < shard < dp else []
        for replicas in dict.fromkeys((1, *hybrid, *_pinned_replicas(dp, pins))):
            if pins.get("dp_replicate", replicas) == replicas:
                yield replicas, order


def _pinned_replicas(dp: int, pins: Mapping[str, Any]) -> tuple[int, ...]:
    wanted = pins.get("dp_replicate", 1)
    return (wanted,) if dp % wanted == 0 and wanted < dp else ()


def _sharding(dp: int, workload: Workload) -> Iterator[tuple[int, Literal["none", "optimizer"]]]:
    """Yield the ZeRO stages and what they offload."""
    for zero in (0, 1, 2, 3) if dp > 1 else (0,):
        yield zero, "none"
    if "optimizer" in workload.offload:
        yield 3, "optimizer"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def shared_states(trace: Trace) -> dict[int, frozenset[str]]:
    """Return per block class the state names that name a parameter of several calls."""
    canonical = trace.first_names()
    uses: dict[str, int] = {}
    for call in trace.calls:
        for fqn in {canonical.get(f, f) for f in call.states}:
            uses[fqn] = uses.get(fqn, 0) + 1
    found: dict[int, set[str]] = {}
    for call in trace.calls:
        states = trace.blocks[call.block].states
        for state, fqn in zip(states, call.states, strict=True):
            if uses[canonical.get(fqn, fqn)] > 1:
                found.setdefault(call.block, set()).add(state.name)
    return {block: frozenset(names) for block, names in found.items()}
