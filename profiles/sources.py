"""Where the numbers of each shipped profile are found, and whose are borrowed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SOURCES", "DeviceSource"]


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
        curve: source_id in collectives.csv of the 8-GPU all_reduce sweep; empty: none.
    """

    name: str
    description: str
    family: tuple[str, ...]
    gemm_donor: str
    attention: str
    attention_donor: str
    memory_fraction: str
    curve: str = ""


SOURCES = (
    DeviceSource(
        name="a100_sxm_80gb",
        description="NVIDIA A100 SXM 80 GB, NVLink 3",
        family=("A100-SXM-80", "A100-SXM"),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="A100-PCIe-80",
        curve="mleng_a100_nccltests",
    ),
    DeviceSource(
        name="a100_sxm_40gb",
        description="NVIDIA A100 SXM 40 GB, NVLink 3",
        family=("A100-SXM-40", "A100-SXM"),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="A100-PCIe-80",
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
        memory_fraction="B200-SXM",
        curve="mleng_b200",
    ),
    DeviceSource(
        name="v100_sxm_32gb",
        description="NVIDIA V100 SXM2 32 GB, NVLink 2",
        family=("V100-SXM-32", "V100-SXM", "V100"),
        gemm_donor="A100-PCIe-80",
        attention="standard",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
    ),
    DeviceSource(
        name="l40s",
        description="NVIDIA L40S 48 GB, PCIe 4",
        family=("L40S",),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
    ),
    DeviceSource(
        name="rtx_4090",
        description="NVIDIA GeForce RTX 4090 24 GB, PCIe 4",
        family=("RTX-4090",),
        gemm_donor="A100-PCIe-80",
        attention="flash",
        attention_donor="A100-SXM4-80",
        memory_fraction="H100-SXM",
    ),
)
