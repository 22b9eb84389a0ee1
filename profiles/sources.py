"""Where the numbers of each shipped profile are found, and whose are borrowed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ECC_SHARE", "SOURCES", "DeviceSource"]

# Of the memory that a card with GDDR6 and error correction is sold with: an L4 of 24 GB is logged
# with 22.488 GiB usable.
ECC_SHARE = 22.488 / 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSource:
    """Where the numbers of one device are found, and whose are borrowed.

    Attributes:
        name: of the profile.
        description: one line for reports.
        family: device names in devices.csv, the first that has a quantity wins.
        gemm_donor: gpu in gemm_efficiency.csv.
        attention: `flash` (attention_kernels.csv), `standard` (its unfused bars), or `full_matrix`
            (the sdp rows of gemm_efficiency.csv).
        attention_donor: gpu in that file.
        memory_fraction: device whose large memory-bound kernels give the fraction of peak.
        curve: source_id in collectives.csv of the all_reduce sweeps in a node; empty: none.
        curve_degrees: over how many GPUs.
        node_rings: source_ids in collectives.csv of all_reduces over all GPUs of several nodes.
        watts: power limit; None: the tdp of the family.
        memory_gib: of memory that is free of context; None: from the label of the family.
        older_attention: other implementations in attention_kernels.csv, by the name they get.
    """

    name: str
    description: str
    family: tuple[str, ...]
    gemm_donor: str
    attention: str
    attention_donor: str
    memory_fraction: str
    curve: str = ""
    curve_degrees: tuple[int, ...] = (8,)
    node_rings: tuple[str, ...] = ()
    watts: float | None = None
    memory_gib: float | None = None
    older_attention: tuple[tuple[str, str], ...] = (("flash1", "FA1"),)


SOURCES = (
    DeviceSource(
        name="a100_sxm_80gb",
        description="NVIDIA A100 SXM 80 GB, NVLink 3",
        family=("A100-SXM-80", "A100-SXM"),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
        curve="mleng_a100_nccltests",
    ),
    DeviceSource(
        name="a100_sxm_40gb",
        description="NVIDIA A100 SXM 40 GB, NVLink 3",
        family=("A100-SXM-40", "A100-SXM"),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
        curve="mleng_a100_nccltests",
    ),
    DeviceSource(
        name="h100_sxm_80gb",
        description="NVIDIA H100 SXM 80 GB, NVLink 4",
        family=("H100-SXM",),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="H100-SXM5-80",
        memory_fraction="H100-SXM",
        curve="dgxc_nccl_h100",
    ),
    DeviceSource(
        name="h200_sxm",
        description="NVIDIA H200 SXM 141 GB, NVLink 4",
        family=("H200-SXM",),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="H100-SXM5-80",
        memory_fraction="H100-SXM",
        curve="mleng_h200",
    ),
    DeviceSource(
        name="b200_sxm",
        description="NVIDIA B200 SXM 180 GB, NVLink 5",
        family=("B200-SXM",),
        gemm_donor="B200",
        attention="full_matrix",
        attention_donor="B200",
        older_attention=(),
        memory_fraction="B200-SXM",
        curve="mleng_b200",
    ),
    DeviceSource(
        name="v100_sxm_32gb",
        older_attention=(),
        description="NVIDIA V100 SXM2 32 GB, NVLink 2",
        watts=300.0,
        family=("V100-SXM-32", "V100-SXM", "V100"),
        gemm_donor="A100-PCIe-80",
        attention="standard",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
        curve="aceso_prim",
        curve_degrees=(2, 4, 8),
        node_rings=("bs_v100_4n", "bs_v100_16n"),
    ),
    DeviceSource(
        name="a100_pcie_80gb",
        description="NVIDIA A100 PCIe 80 GB, PCIe 4",
        family=("A100-PCIe-80", "A100-PCIe"),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="A100-PCIe-80",
    ),
    DeviceSource(
        name="a100_pcie_40gb",
        description="NVIDIA A100 PCIe 40 GB, PCIe 4",
        family=("A100-PCIe-40", "A100-PCIe"),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="A100-PCIe-80",
    ),
    DeviceSource(
        name="h100_pcie",
        description="NVIDIA H100 PCIe 80 GB, PCIe 5",
        family=("H100-PCIe",),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="H100-SXM5-80",
        memory_fraction="H100-SXM",
        watts=350.0,
    ),
    DeviceSource(
        name="h100_sxm_96gb_500w",
        description="NVIDIA H100 SXM 96 GB HBM2e limited to 500 W, NVLink 4",
        family=("H100-SXM-96-HBM2e-500W", "H100-SXM"),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="H100-SXM5-80",
        memory_fraction="H100-SXM",
        curve="dgxc_nccl_h100",
        watts=500.0,
    ),
    DeviceSource(
        name="a10",
        description="NVIDIA A10 24 GB, PCIe 4",
        family=("A10",),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
        watts=150.0,
        memory_gib=24.0 * ECC_SHARE,
    ),
    DeviceSource(
        name="l40s",
        description="NVIDIA L40S 48 GB, PCIe 4",
        family=("L40S",),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
        memory_gib=48.0 * ECC_SHARE,
    ),
    DeviceSource(
        name="rtx_4090",
        description="NVIDIA GeForce RTX 4090 24 GB, PCIe 4",
        watts=450.0,
        family=("RTX-4090",),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
    ),
    DeviceSource(
        name="gb200",
        description="NVIDIA GB200 186 GB, one of its GPUs, NVLink 5",
        family=("GB200",),
        gemm_donor="B200",
        attention="full_matrix",
        attention_donor="B200",
        older_attention=(),
        memory_fraction="B200-SXM",
        curve="mleng_b200",
    ),
    DeviceSource(
        name="b300_sxm",
        description="NVIDIA B300 SXM 288 GB, NVLink 5",
        family=("B300-SXM",),
        gemm_donor="B200",
        attention="full_matrix",
        attention_donor="B200",
        older_attention=(),
        memory_fraction="B200-SXM",
        curve="mleng_b200",
    ),
)
