"""Build the shipped profiles from a folder of published measurements.

`python -m autoplan.profiles.build MEASUREMENTS_FOLDER [OUT_FOLDER]`

Only `devices.csv`, `gemm_efficiency.csv`, `attention_kernels.csv`, `collectives.csv` and
`liger_ops.csv` are read: everything else in such a folder is for validation. Where a device has no
rows of its own, those of a relative are transferred as fractions of a peak, and the origin says so.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from autoplan.profiles.build_grouped import grouped_tables
from autoplan.profiles.build_tables import (
    attention_flash,
    attention_full_matrix,
    gemm_tables,
    memory_table,
)
from autoplan.profiles.catalog import save_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from autoplan.profiles.measurements import Fact, Measurements
from autoplan.profiles.origin import Origin
from autoplan.profiles.sources import SOURCES, DeviceSource
from autoplan.profiles.tables import AttentionTable, CollectiveTable
from autoplan.units import GIB

__all__ = ["build_profile", "main"]

TFLOP, GB, GBIT, US = 1e12, 1e9, 1e9 / 8, 1e-6

# devices.csv calls float8 `fp8`, and so on.
PEAK_NAMES = {
    "float32": "peak_fp32",
    "tf32": "peak_tf32",
    "float16": "peak_fp16",
    "bfloat16": "peak_bf16",
    "float8": "peak_fp8",
}


class _Collector:
    """Gathers facts into numbers, origins and the map between them."""

    def __init__(self) -> None:
        self.origins: dict[str, Origin] = {}
        self.origin_by_field: dict[str, str] = {}

    def take(self, field: str, value: float, origin_id: str, origin: Origin) -> float:
        known = self.origins.setdefault(origin_id, origin)
        if known != origin:
            raise ValueError(f"{field}: origin {origin_id!r} has two texts")
        self.origin_by_field[field] = origin_id
        return value


def build_profile(source: DeviceSource, measurements: Measurements) -> DeviceProfile:
    """Return the profile of one device.

    Raises:
        ProfileError: if the measurements lack a number that the device needs.
    """
    collect = _Collector()
    peaks = _peaks(source, measurements, collect)
    memory = measurements.need(source.family, "memory")
    bandwidth = measurements.need(source.family, "hbm_bandwidth")
    launch = measurements.need((None,), "torch_matmul_4x4_avg_time")
    memory_bytes = _memory_bytes(source, memory)
    tensor_dtype = "bfloat16" if "bfloat16" in peaks else "float16"
    gemm, gemm_origins = gemm_tables(source, measurements, tensor_dtype, peaks[tensor_dtype])
    grouped, grouped_origins = grouped_tables(source, measurements, tensor_dtype)
    attention, attention_origins = _attention(
        source, measurements, tensor_dtype, peaks[tensor_dtype]
    )
    streams, stream_origins = memory_table(source, measurements, bandwidth.value * GB)
    collect.origins.update(gemm_origins | grouped_origins | attention_origins | stream_origins)
    return DeviceProfile(
        name=source.name,
        description=source.description,
        memory_bytes=int(
            collect.take("memory_bytes", memory_bytes, "memory", _memory_origin(source, memory))
        ),
        reserve_bytes=_reserve_bytes(source, measurements, collect),
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=collect.take(
            "memory_bandwidth_bytes_per_s", bandwidth.value * GB, "bandwidth", bandwidth.origin()
        ),
        launch_overhead_s=collect.take(
            "launch_overhead_s",
            launch.value * US,
            "launch",
            launch.origin("the same host cost is assumed for every GPU"),
        ),
        host_link_bytes_per_s=_host_link(source, measurements, collect),
        gemm=gemm,
        grouped=grouped,
        attention=attention,
        memory_bound=streams,
        intra=_intra_link(source, measurements),
        inter=_inter_link(source, measurements),
        origins=collect.origins,
        origin_by_field=collect.origin_by_field,
    )


# A GPU sold with 96 GB is logged with 95.0 GiB (torchtitan): labels are GiB less what error
# correction and the driver keep.
_USABLE_SHARE = 95.0 / 96.0


def _memory_bytes(source: DeviceSource, memory: Fact) -> int:
    gib = memory.value * _USABLE_SHARE if source.memory_gib is None else source.memory_gib
    return int(gib * GIB)


def _memory_origin(source: DeviceSource, memory: Fact) -> Origin:
    if source.memory_gib is not None:
        return Origin(
            kind="assumed",
            text=f"{source.memory_gib:.2f} GiB: of the memory it is sold with, the share that an "
            "L4 (GDDR6, error correction) is logged with (22.488 GiB of 24)",
        )
    return memory.origin(
        f"{memory.value:g} GB as sold, times 95.0 GiB / 96 GB, as an H100 is logged (torchtitan)"
    )


def _peaks(
    source: DeviceSource, measurements: Measurements, collect: _Collector
) -> dict[str, float]:
    peaks = {}
    for dtype, quantity in PEAK_NAMES.items():
        fact, note = measurements.find(source.family, quantity), ""
        if fact is None and dtype == "float16":
            fact, note = measurements.find(source.family, "peak_bf16"), "assumed equal to bfloat16"
        if fact is not None:
            field = f"peak_flops_per_s.{dtype}"
            peaks[dtype] = collect.take(
                field, fact.value * TFLOP, f"peak_{dtype}", fact.origin(note)
            )
    return peaks


def _attention(
    source: DeviceSource, measurements: Measurements, dtype: str, peak: float
) -> tuple[tuple[AttentionTable, ...], dict[str, Origin]]:
    if source.attention == "full_matrix":
        return attention_full_matrix(source, measurements, dtype)
    return attention_flash(source, measurements, dtype, peak)


def _reserve_bytes(source: DeviceSource, measurements: Measurements, collect: _Collector) -> int:
    context = measurements.find(source.family, "cuda_context", "lazy load")
    context = context or measurements.find(source.family, "cuda_context")
    note = ""
    if context is None:
        context = measurements.need(("A100-SXM",), "cuda_context", "lazy load")
        note = "transferred from A100; "
    distributed = measurements.need((None,), "torch_distributed_init_extra")
    value = int((context.value + distributed.value) * GIB)
    origin = context.origin(
        f"{note}{context.value:.2f} GiB CUDA context plus {distributed.value} GiB for "
        f"torch.distributed and its communicators ({distributed.notes})"
    )
    return int(collect.take("reserve_bytes", value, "reserve", origin))


def _host_link(source: DeviceSource, measurements: Measurements, collect: _Collector) -> float:
    fact = measurements.find(source.family, "pcie_d2h")
    fact = fact or measurements.find(source.family, "pcie_unidirectional")
    if fact is not None:
        origin = fact.origin()
    else:
        fact = measurements.need(("A100-SXM",), "pcie_unidirectional")
        value = fact.value / 2 if source.name.startswith("v100") else fact.value
        generation = "PCIe 3 x16, half of PCIe 4" if value < fact.value else "PCIe 4 x16"
        origin = Origin(kind="assumed", text=f"{generation}, from the A100 entry of {fact.source}")
        fact = Fact(value=value, kind="assumed", notes="", source=fact.source, device="")
    return collect.take("host_link_bytes_per_s", fact.value * GB, "host_link", origin)


def _intra_link(source: DeviceSource, measurements: Measurements) -> LinkProfile:
    collect = _Collector()
    setup = measurements.need(("A100-SXM-80",), "intra_node_min_message_latency")
    setup_s = setup.value * US
    setup_note = "a constant of that tool for every GPU, taken as the fixed cost of a call"
    curves: tuple[CollectiveTable, ...] = ()
    if source.curve:
        curves = tuple(
            measurements.sweep(source.curve, "all_reduce", degree)
            for degree in source.curve_degrees
        )
        collect.origins["nccl"] = measurements.sweep_origin(source.curve, source.curve_degrees)
        largest = curves[-1]
        floor_s = min(time_s for _, time_s in largest.rows)
        steps = 2 * (largest.degree - 1)
        latency_s = (floor_s - setup_s) / steps
        latency_origin = Origin(
            kind="published",
            text=f"({floor_s * 1e6:.2f} us smallest all_reduce on {largest.degree} GPUs - "
            f"{setup.value:g} us) / {steps} ring steps; {collect.origins['nccl'].text}",
        )
    else:
        latency_s = 5 * US
        latency_origin = Origin(kind="assumed", text="5 us per hop, between A100 and PCIe fits")
    fact, note = _bus_bandwidth(source, measurements)
    return LinkProfile(
        name=f"{source.name} intra-node",
        level="intra",
        latency_s=collect.take("latency_s", latency_s, "latency", latency_origin),
        setup_s=collect.take("setup_s", setup_s, "setup", setup.origin(setup_note)),
        bytes_per_s=collect.take("bytes_per_s", fact.value * GB, "bus", fact.origin(note)),
        curves=curves,
        origins=collect.origins,
        origin_by_field=collect.origin_by_field,
    )


def _bus_bandwidth(source: DeviceSource, measurements: Measurements) -> tuple[Fact, str]:
    ring = measurements.find(source.family, "allgather_busbw_8gpu")
    if ring is not None:
        return ring, "nccl-tests bus bandwidth of a ring on 8 GPUs"
    if source.name.startswith("h100_sxm"):
        fact = measurements.need(("H200-SXM",), "allgather_busbw_8gpu")
        return fact, "ring on 8 H200, transferred: the same NVLink 4"
    for quantity in ("allreduce_busbw_8gpu_ring", "allreduce_busbw_8gpu"):
        fact_or_none = measurements.find(source.family, quantity)
        if fact_or_none is not None:
            return fact_or_none, "nccl-tests bus bandwidth on 8 GPUs"
    if source.curve == "mleng_b200":
        fact = measurements.need(("B200-SXM",), "allreduce_busbw_8gpu_ring")
        return fact, "ring on 8 B200, transferred: the same NVLink 5"
    if source.name.startswith("v100"):
        return measurements.bus("bs_v100_1n", "V100-SXM2-32"), "all_reduce on 4 GPUs of one node"
    fact = measurements.need(("A100-PCIe-80",), "intra_node_pcie_8x:all_reduce_efficiency")
    value = fact.value * 30
    note = "of 30 GB/s PCIe 4 on 8 A100-PCIe, transferred"
    return Fact(
        value=value, kind=fact.kind, notes=fact.notes, source=fact.source, device=fact.device
    ), note


def _inter_link(source: DeviceSource, measurements: Measurements) -> LinkProfile:
    collect = _Collector()
    setup = measurements.need(("A100-SXM-80",), "intra_node_min_message_latency")
    sweep = measurements.sweep("mleng_4node", "all_reduce", 32)
    floor_s = sweep.rows[0][1]
    latency_s = (floor_s - setup.value * US) / 4
    latency_origin = Origin(
        kind="published",
        text=f"({floor_s * 1e6:.2f} us all_reduce of {sweep.rows[0][0]} bytes on 4 nodes of 8 - "
        f"{setup.value:g} us) / (2 log2 4) tree steps; GPU and network not stated; "
        f"{measurements.sweep_origin('mleng_4node', (32,)).text}",
    )
    bytes_per_s, origin = _network(source, measurements)
    curves = _inter_curves(source, measurements, collect)
    rings = [measurements.node_ring(name) for name in source.node_rings]
    if rings:
        text = "; ".join(found.text for _, found in rings)
        collect.origins["rings"] = Origin(kind="published", text=text, device=rings[0][1].device)
        collect.origin_by_field["node_rings"] = "rings"
    return LinkProfile(
        name=f"{source.name} inter-node",
        level="inter",
        latency_s=collect.take("latency_s", latency_s, "latency", latency_origin),
        setup_s=collect.take("setup_s", setup.value * US, "setup", setup.origin()),
        bytes_per_s=collect.take("bytes_per_s", bytes_per_s, "network", origin),
        node_rings=tuple(row for row, _ in rings),
        curves=curves,
        origins=collect.origins,
        origin_by_field=collect.origin_by_field,
    )


def _inter_curves(
    source: DeviceSource, measurements: Measurements, collect: _Collector
) -> tuple[CollectiveTable, ...]:
    """Return what was measured by size between nodes of this GPU; mostly nothing was."""
    if source.curve == "mleng_b200":
        collect.origins["nccl"] = measurements.sweep_origin("mleng_b200", (32,))
        sweep = measurements.sweep("mleng_b200", "all_reduce", 32)
        return (replace(sweep, ranks_per_node=8),)
    if source.name.startswith("v100"):
        sends, found = measurements.sends("aceso_p2p", "V100-32", "p2p_inter_node")
        collect.origins["nccl"] = found
        return (sends,)
    return ()


def _network(source: DeviceSource, measurements: Measurements) -> tuple[float, Origin]:
    """Return the network bytes per second of one GPU, one direction."""
    efficiency = measurements.need(("A100-SXM-80",), "inter_node_efficiency")
    if source.name.startswith("a100"):
        fact = measurements.need(("A100-SXM-80",), "inter_node_bandwidth")
        note = f"200 Gb/s InfiniBand per GPU as in DGX A100, times {efficiency.value} as there"
        return fact.value * efficiency.value * GB, fact.origin(note)
    if source.name.startswith(("h100", "h200")):
        fact = measurements.need(("Meta Grand Teton (8x H100)",), "rate_per_gpu")
        note = (
            f"400 Gb/s per GPU as in DGX H100, times {efficiency.value}, the network efficiency "
            f"that calculon fits on A100"
        )
        text = f"{note}; {fact.source}; {efficiency.source}"
        return fact.value * efficiency.value * GBIT, Origin(kind="assumed", text=text)
    if source.curve == "mleng_b200":
        last = measurements.sweep("mleng_b200", "all_reduce", 32).rows[-1]
        bus = 2 * 31 / 32 * last[0] / last[1] / 8
        found = measurements.sweep_origin("mleng_b200", (32,))
        text = f"1/8 of the bus bandwidth at {last[0]} bytes on 4 nodes of 8 B200; {found.text}"
        return bus, Origin(kind="published", text=text, device=found.device)
    if source.name.startswith("v100"):
        fact = measurements.bus("aceso_p2p", "V100-32", op="p2p_inter_node")
        return fact.value * GB, fact.origin("point to point between nodes of 8 V100")
    text = "200 Gb/s per node shared by 8 GPUs, at full rate; nobody measured it"
    return 200 * GBIT / 8, Origin(kind="assumed", text=text)


def main(arguments: list[str] | None = None) -> None:
    """Write every profile of `SOURCES` into the output folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("measurements", type=Path, help="folder with the CSV files")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent / "data")
    options = parser.parse_args(arguments)
    measurements = Measurements(options.measurements)
    options.out.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        path = options.out / f"{source.name}.json"
        save_profile(build_profile(source, measurements), path)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
