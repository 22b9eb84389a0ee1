"""The GPUs and the network that a row of published measurements ran on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from autoplan.cluster import Cluster
from autoplan.profiles.catalog import load_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from benchmarks.published_architectures import expert_degrees
from benchmarks.published_engines import Skipped
from benchmarks.published_shapes import amount, family_of, need, number

__all__ = ["MEMORY_ONLY", "PROFILES", "cluster_of", "gpus_of", "stated_network", "worlds_of"]

GIB = 2**30

PROFILES = {
    "A100-SXM4-80": "a100_sxm_80gb",
    "A800-SXM4-80": "a100_sxm_80gb",
    "A100-80": "a100_sxm_80gb",
    "A800-80": "a100_sxm_80gb",
    "A100-SXM4-40": "a100_sxm_40gb",
    "A100-40": "a100_sxm_40gb",
    "A100-PCIe-80": "a100_pcie_80gb",
    "A100-PCIe-40": "a100_pcie_40gb",
    "H100-SXM5-80": "h100_sxm_80gb",
    "H100-SXM": "h100_sxm_80gb",
    "H100-80": "h100_sxm_80gb",
    "H100-PCIe-80": "h100_pcie",
    "H100-SXM-96-HBM2e-500W": "h100_sxm_96gb_500w",
    "H100-SXM-95-HBM2e": "h100_sxm_96gb_500w",
    "H200-SXM-141": "h200_sxm",
    "H200-SXM": "h200_sxm",
    "B200": "b200_sxm",
    "B200-SXM": "b200_sxm",
    "GB200": "gb200",
    "B300": "b300_sxm",
    "B300-SXM": "b300_sxm",
    "V100-SXM2-32": "v100_sxm_32gb",
    "V100-SXM3-32": "v100_sxm_32gb",
    "V100-32": "v100_sxm_32gb",
    "V100-SXM2-16": "v100_sxm_32gb",
    "L40S": "l40s",
    "A10-24": "a10",
    "RTX 4090": "rtx_4090",
    "RTX 4090-24": "rtx_4090",
}

# GPUs without a profile: one of their generation (the same attention kernels and allocator), and
# their nominal memory over its. Bytes and fit or OOM are predicted for them, no time.
MEMORY_ONLY = {
    "A40": ("a10", 48 / 24),
    "RTX A6000": ("a10", 48 / 24),
    "A10G": ("a10", 24 / 24),
    "RTX 3090": ("a10", 24 / 24),
    "L4": ("l40s", 24 / 48),
    "L40": ("l40s", 48 / 48),
    "RTX 4080": ("rtx_4090", 16 / 24),
}

# Of the nominal rate, what messages reach: calculon's constant for A100 clusters, as in profiles.
_NETWORK_SHARE = 0.9
_RATE = r"\b(?:(?P<count>\d+) ?x ?)?(?P<rate>\d+) ?Gb(?:ps|/s|it/s)?\b(?P<what>[^;,]*)"
_OF_WHAT = re.compile(r"node-node|per node|per GPU")


def gpus_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a row may mean, by the names of `PROFILES` or `MEMORY_ONLY`.

    An A100 of no stated memory is either, unless the other could not hold what was measured.

    Raises:
        Skipped: there is no profile.
    """
    gpu = (row.get("gpu") or "").strip()
    named = [name for name in PROFILES if name.lower() == gpu.lower()]
    if named:
        return (named[0],)
    if re.match(r"A100\b", gpu):
        peak = amount(row, "peak_mem_gib") or 0.0
        gib = amount(row, "gpu_mem_gb")
        sizes = [size for size in (40, 80) if peak <= size and gib in (None, size)]
        if sizes:
            return tuple(f"A100-{size}" for size in sizes)
    if "DGX-2" in gpu:
        return ("V100-32",)  # sold with that memory only
    words = re.findall(r"[A-Z]*\d+\w*", gpu.upper())  # "A10-24 (A10G)": the last one that is known
    for word in reversed(words):
        for name in MEMORY_ONLY:
            if word == name.split()[-1].upper():
                return (name,)
    raise Skipped(f"no profile for GPU {gpu or 'that is not given'}")


def cluster_of(row: Mapping[str, str], gpu: str) -> Cluster:
    """Return the cluster of a row with GPUs of that name of `PROFILES` or `MEMORY_ONLY`.

    Raises:
        Skipped: its nodes are not full.
    """
    profile, share = MEMORY_ONLY.get(gpu) or (PROFILES[gpu], 1.0)
    try:
        device = load_profile(profile)
    except ValueError as error:
        raise Skipped(str(error)) from None
    device = _with_bfloat16(device)
    device = replace(device, memory_bytes=int(device.memory_bytes * share))
    gpus = need(row, "gpus")
    per_node = min(number(row, "gpus_per_node") or 8, gpus)
    if "SXM3" in gpu or "DGX-2" in (row.get("gpu") or ""):
        device = _with_switch(device)
    stated = stated_network(row.get("notes") or "", gpu, per_node)
    if stated is not None and device.inter is not None:
        device = replace(device, inter=_network(stated, device.inter))
    if gpus % per_node:
        raise Skipped(f"{gpus} GPUs do not fill nodes of {per_node}")
    cluster = Cluster.from_device(device, num_nodes=gpus // per_node, gpus_per_node=per_node)
    if gpu == "V100-SXM2-16":
        return cluster.with_memory(16 * GIB)
    return cluster


_MOST_WORLDS = 5  # each twice the one before


def worlds_of(row: Mapping[str, str]) -> tuple[int, ...]:
    """Return the numbers of devices that a row may have run on: the one that it gives, if any.

    A run of Megatron-LM that gives every degree but that of data parallelism may have run on the
    fewest whole nodes that hold one replica of everything, or on 2, 4, 8 or 16 times as many, as
    far as its batch divides.

    Raises:
        Skipped: it gives neither.
    """
    keys = ("tp", "pp", "micro_batch", "global_batch", "gpus_per_node")
    found = {key: number(row, key) for key in keys}
    is_stated = row.get("gpus") or row.get("dp")
    if is_stated or family_of(row) != "megatron" or not all(found.values()):
        return (need(row, "gpus"),)
    tp, pp, rows, batch, per_node = (found[key] or 1 for key in keys)
    dense = tp * (number(row, "cp") or 1)
    experts = expert_degrees(row, tp)
    shared = experts.get("expert_parallel", 1) * experts.get("expert_tensor_parallel", 1)
    ranks = math.lcm(math.lcm(dense, shared) * pp, per_node)
    worlds = (ranks << times for times in range(_MOST_WORLDS))
    fitting = tuple(n for n in worlds if batch % (n // (dense * pp) * rows) == 0)
    if not fitting:
        raise Skipped("gpus is not given")
    return fitting


def _with_bfloat16(device: DeviceProfile) -> DeviceProfile:
    """Return a device that runs bfloat16 as fast as float16, where it has only the latter.

    Models are traced in bfloat16; runs in fp16 move as many bytes.
    """
    if "bfloat16" in device.peak_flops_per_s or "float16" not in device.peak_flops_per_s:
        return device
    peaks = {**device.peak_flops_per_s, "bfloat16": device.peak_flops_per_s["float16"]}
    origins, field = device.origin_by_field, "peak_flops_per_s"
    return replace(
        device,
        peak_flops_per_s=peaks,
        origin_by_field={**origins, f"{field}.bfloat16": origins[f"{field}.float16"]},
    )


def _with_switch(device: DeviceProfile) -> DeviceProfile:
    """Return a device in a node whose GPUs are all joined by a switch, as in a DGX-2.

    What few of them reach over the links between pairs, where there is none, does not hold there.
    """
    if device.intra is None:
        return device
    largest = max((curve.degree for curve in device.intra.curves), default=0)
    curves = tuple(curve for curve in device.intra.curves if curve.degree == largest)
    return replace(device, intra=replace(device.intra, curves=curves))


def stated_network(notes: str, gpu: str, gpus_per_node: int) -> float | None:
    """Return the nominal bytes per second of each GPU between nodes that a row's notes give.

    They say what a node has, `inter-node 4x100Gb RoCE`, `100 Gb/s EDR InfiniBand shared per node`,
    `1600 Gbps node-node interconnect`, for each kind of GPU `A100 nodes 400 Gb/s, H100 nodes 800
    Gb/s`, or what a GPU has, `400 Gb/s CX-7 per GPU`. None: they give nothing, or not of what.
    """
    kind = re.split(r"[- ]", gpu)[0]
    for found in re.finditer(_RATE, notes):
        before, what = notes[: found.start()], found["what"]
        of_kind = re.search(r"(\S+) nodes $", before)
        is_other = of_kind is not None and of_kind.group(1) != kind
        if is_other or not (of_kind or before.endswith("inter-node ") or _OF_WHAT.search(what)):
            continue
        gbit = int(found["count"] or 1) * int(found["rate"])
        return gbit * 1e9 / 8 / (1 if "per GPU" in what else gpus_per_node)
    return None


def _network(bytes_per_s: float, inter: LinkProfile) -> LinkProfile:
    """Return a link between nodes of a stated rate, with the latency of the profile's."""
    return LinkProfile.from_numbers(
        name="network of the row",
        level="inter",
        latency_s=inter.latency_s,
        setup_s=inter.setup_s,
        bytes_per_s=_NETWORK_SHARE * bytes_per_s,
        source=f"stated by the row, times {_NETWORK_SHARE}",
    )
