"""DeviceProfile: what one device can hold and how fast it computes, with the source of each number.

A look-up answers with a time and how it was found (`autoplan.profiles.lookups`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autoplan.profiles.host import HostSeconds
from autoplan.profiles.link import LinkProfile
from autoplan.profiles.lookups import (
    ITEM_BYTES,
    attention_time_s,
    check_sizes,
    class_points,
    gemm_time_s,
    grouped_time_s,
    memory_time_s,
)
from autoplan.profiles.origin import (
    SCHEMA_VERSION,
    Origin,
    check_origins,
    check_positive,
    check_schema_version,
)
from autoplan.profiles.tables import (
    AttentionDirection,
    AttentionTable,
    GemmDirection,
    GemmTable,
    Lookup,
    MemoryTable,
    OpClassTable,
)

__all__ = ["DeviceProfile"]

# One number each; tables carry their origin themselves.
_SCALAR_FIELDS = (
    "memory_bytes",
    "reserve_bytes",
    "memory_bandwidth_bytes_per_s",
    "launch_overhead_s",
    "host_link_bytes_per_s",
    "optimizer_bytes_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One kind of device.

    Attributes:
        name: as in the catalog, for example `a100_sxm_80gb`.
        description: one line for reports.
        memory_bytes: what the device has.
        reserve_bytes: what a plan may not use: context, communicator buffers, allocator margin.
        peak_flops_per_s: FLOP/s by dtype, dense. `tf32` is float32 with tensor cores.
        memory_bandwidth_bytes_per_s: peak of the device memory.
        launch_overhead_s: seconds below which no eager kernel gets.
        host_link_bytes_per_s: device to host, one direction.
        optimizer_bytes_per_s: bytes read and written per second of an optimizer step; None: as
            other memory-bound kernels.
        gemm, attention, memory_bound, op_classes: the measured tables.
        grouped: speeds of products of a group of experts, by the shape of one of them.
        measurements: single measured numbers by name, with their unit in it.
        intra, inter: the links that such devices usually have inside a node and between nodes.
        origins: the sources by id.
        origin_by_field: for every number outside the tables, the id of its origin;
            `peak_flops_per_s.bfloat16` for a peak.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    description: str = ""
    memory_bytes: int
    reserve_bytes: int
    peak_flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    launch_overhead_s: float
    host_link_bytes_per_s: float
    optimizer_bytes_per_s: float | None = None
    gemm: tuple[GemmTable, ...] = ()
    attention: tuple[AttentionTable, ...] = ()
    memory_bound: tuple[MemoryTable, ...] = ()
    op_classes: tuple[OpClassTable, ...] = ()
    grouped: tuple[GemmTable, ...] = ()
    measurements: Mapping[str, float] = field(default_factory=dict)
    intra: LinkProfile | None = None
    inter: LinkProfile | None = None
    origins: Mapping[str, Origin]
    origin_by_field: Mapping[str, str]

    def __post_init__(self) -> None:
        check_schema_version(self.schema_version)
        numbers = self._numbers()
        for name, value in numbers.items():
            if name != "reserve_bytes":
                check_positive(name, value)
        if not 0 <= self.reserve_bytes < self.memory_bytes:
            raise ValueError(
                f"reserve_bytes: must be at least 0 and below memory_bytes {self.memory_bytes}, "
                f"got {self.reserve_bytes}"
            )
        if not self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s: needs at least one dtype")
        self._check_dtypes()
        table_origins = [
            *(table.origin for table in self.gemm),
            *(table.origin for table in self.attention),
            *(table.origin for table in self.memory_bound),
            *(table.origin for table in self.op_classes),
            *(table.origin for table in self.grouped),
        ]
        check_origins(self.origins, self.origin_by_field, numbers, table_origins)
        for level in ("intra", "inter"):
            link = getattr(self, level)
            if link is not None and link.level != level:
                raise ValueError(f"{level}.level: must be {level!r}, got {link.level!r}")

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.memory_bandwidth_bytes_per_s))

    @classmethod
    def from_datasheet(
        cls,
        *,
        name: str,
        memory_bytes: int,
        peak_flops_per_s: Mapping[str, float],
        memory_bandwidth_bytes_per_s: float,
        source: str,
        reserve_bytes: int = 0,
        launch_overhead_s: float = 1e-5,
        host_link_bytes_per_s: float = 25e9,
        intra: LinkProfile | None = None,
        inter: LinkProfile | None = None,
    ) -> DeviceProfile:
        """Return a profile without tables, all of whose numbers come from one source."""
        fields = [f for f in _SCALAR_FIELDS if f != "optimizer_bytes_per_s"]
        fields += [f"peak_flops_per_s.{dtype}" for dtype in peak_flops_per_s]
        return cls(
            name=name,
            memory_bytes=memory_bytes,
            reserve_bytes=reserve_bytes,
            peak_flops_per_s=peak_flops_per_s,
            memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
            launch_overhead_s=launch_overhead_s,
            host_link_bytes_per_s=host_link_bytes_per_s,
            intra=intra,
            inter=inter,
            origins={"datasheet": Origin(kind="datasheet", text=source)},
            origin_by_field=dict.fromkeys(fields, "datasheet"),
        )

    def gemm_time_s(
        self,
        m: int,
        n: int,
        k: int,
        *,
        dtype: str,
        batch: int = 1,
        direction: GemmDirection = "forward",
    ) -> Lookup:
        """Return the time of `batch` products `(m, k) @ (k, n)`.

        The sizes are those of the product that runs. A linear layer of i inputs and o outputs on t
        rows is (t, o, i) forward, (t, i, o) dgrad and (o, i, t) wgrad. A batch fills the device
        like more rows do, so its rate is read at (batch * m, n, k).

        Raises:
            ProfileError: if the profile has no such dtype or direction; names what exists.
            ValueError: if a size is below 0.
        """
        return gemm_time_s(self, m, n, k, batch, dtype, direction)

    def grouped_time_s(
        self,
        m: int,
        n: int,
        k: int,
        *,
        dtype: str,
        groups: int,
        direction: GemmDirection = "forward",
    ) -> Lookup:
        """Return the time of `groups` products `(m, k) @ (k, n)`, each with a matrix of its own.

        Sizes are those of `gemm_time_s`, m the rows of one expert. Without a table it is that of a
        batch.

        Raises:
            ProfileError, ValueError: as `gemm_time_s`.
        """
        return grouped_time_s(self, m, n, k, groups, dtype, direction)

    def attention_time_s(
        self,
        *,
        batch: int,
        heads: int,
        seq_q: int,
        seq_k: int,
        head_dim: int,
        causal: bool,
        dtype: str,
        direction: AttentionDirection = "forward",
        flops: float | None = None,
        kernel: str = "",
    ) -> Lookup:
        """Return the time of fused scaled-dot-product attention.

        Args:
            batch, heads, seq_q, seq_k, head_dim: of the query and key tensors.
            causal: halves the work.
            dtype: of the tensors.
            direction: `backward` is 2.5 times the FLOPs of `forward`.
            flops: FLOPs of the whole, not halved, matrix in this direction, for callers that
                counted them; None: 4 * batch * heads * seq_q * seq_k * head_dim (* 2.5).
            kernel: implementation, as the tables name it; one without tables, or none: that of the
                first table.

        Raises:
            ProfileError: if the profile has no such dtype or direction; names what exists.
            ValueError: if a size is below 0.
        """
        return attention_time_s(
            self, batch, heads, seq_q, seq_k, head_dim, causal, dtype, direction, flops, kernel
        )

    def memory_time_s(self, nbytes: float, kernel: str = "") -> Lookup:
        """Return the time of a memory-bound kernel that reads and writes `nbytes` in all.

        Args:
            nbytes: at least 0.
            kernel: operator, as the tables name it; one without a table counts as elementwise.

        Raises:
            ValueError: if `nbytes` < 0.
        """
        return memory_time_s(self, nbytes, kernel)

    def op_class_time_s(
        self, op_class: str, rows: int, width: int, *, dtype: str, direction: AttentionDirection
    ) -> Lookup | None:
        """Return the time of an op of a measured class, or None where no table has it.

        Args:
            op_class: one of `OP_CLASSES`.
            rows, width: of its input; of an embedding's result.
            dtype: of its input.
            direction: forward or backward.
        """
        points = class_points(self, op_class, dtype, direction)
        if points is None or rows * width == 0:
            return None
        rate, how = points.rate(rows, width, 1)
        return Lookup(time_s=max(self.launch_overhead_s, rows * width / rate), how=how)

    def optimizer_time_s(self, nbytes: float) -> Lookup:
        """Return the time of an optimizer step that reads and writes `nbytes` in all."""
        if self.optimizer_bytes_per_s is None:
            return memory_time_s(self, nbytes, "")
        check_sizes(nbytes=nbytes)
        if nbytes == 0:
            return Lookup(time_s=0.0, how="measured")
        time_s = max(self.launch_overhead_s, nbytes / self.optimizer_bytes_per_s)
        return Lookup(time_s=time_s, how="interpolated")

    def with_measurements(
        self, numbers: Mapping[str, float], origin: str, source: Origin | None = None
    ) -> DeviceProfile:
        """Return the profile with more single numbers, of one of its origins or a new one."""
        return replace(
            self,
            origins=self.origins if source is None else {**self.origins, origin: source},
            measurements={**self.measurements, **numbers},
            origin_by_field={
                **self.origin_by_field,
                **{f"measurements.{name}": origin for name in numbers},
            },
        )

    @property
    def host(self) -> HostSeconds:
        """Return what the host takes, as far as it was measured."""
        return _host_of(self)

    def scaled(self, *, flops: float = 1.0, bandwidth: float = 1.0) -> DeviceProfile:
        """Return the same device with faster or slower arithmetic and memory (what-if and laws)."""
        check_positive("flops", flops)
        check_positive("bandwidth", bandwidth)
        optimizer = self.optimizer_bytes_per_s
        return replace(
            self,
            description=f"{self.description} (scaled: flops x{flops:g}, bandwidth x{bandwidth:g})",
            peak_flops_per_s={d: f * flops for d, f in self.peak_flops_per_s.items()},
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s * bandwidth,
            host_link_bytes_per_s=self.host_link_bytes_per_s * bandwidth,
            optimizer_bytes_per_s=None if optimizer is None else optimizer * bandwidth,
            gemm=tuple(
                replace(t, rows=tuple((*r[:3], r[3] * flops) for r in t.rows)) for t in self.gemm
            ),
            grouped=tuple(
                replace(t, rows=tuple((*r[:3], r[3] * flops) for r in t.rows)) for t in self.grouped
            ),
            attention=tuple(
                replace(t, rows=tuple((*r[:3], r[3] * flops) for r in t.rows))
                for t in self.attention
            ),
            op_classes=tuple(
                replace(t, rows=tuple((*r[:2], r[2] * bandwidth) for r in t.rows))
                for t in self.op_classes
            ),
            memory_bound=tuple(
                replace(t, rows=tuple((b, r * bandwidth) for b, r in t.rows))
                for t in self.memory_bound
            ),
        )

    def _numbers(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in _SCALAR_FIELDS}
        numbers = {name: value for name, value in values.items() if value is not None}
        peaks = {f"peak_flops_per_s.{d}": f for d, f in self.peak_flops_per_s.items()}
        measured = {f"measurements.{name}": value for name, value in self.measurements.items()}
        return {**numbers, **peaks, **measured}

    def _check_dtypes(self) -> None:
        for dtype in self.peak_flops_per_s:
            if dtype not in ITEM_BYTES:
                raise ValueError(
                    f"peak_flops_per_s.{dtype}: unknown dtype; allowed are {', '.join(ITEM_BYTES)}"
                )
        used = {table.dtype for table in (*self.gemm, *self.grouped)}
        used |= {table.dtype for table in self.attention}
        for dtype in sorted(used - set(self.peak_flops_per_s)):
            raise ValueError(f"dtype: a table has {dtype!r}, peak_flops_per_s has not")


@lru_cache(maxsize=64)
def _host_of(device: DeviceProfile) -> HostSeconds:
    return HostSeconds.of(device.measurements)
