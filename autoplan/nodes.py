"""Kinds of nodes that people rent or buy: devices, how many, and the network of each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NODES", "NodeKind"]

GBIT_BYTES = 1e9 / 8

# What a network gives of its rate to NCCL: calculon's fit of Korthikanti et al. 2022, Table 5.
NETWORK_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """A node.

    Attributes:
        device: profile.
        gpus: devices.
        network_bytes_per_s: of one device to another node, one direction; None: the profile's.
        source: where that number is from.
    """

    device: str
    gpus: int
    network_bytes_per_s: float | None = None
    source: str = ""


def _shared(gbit_per_node: float, gpus: int, source: str) -> tuple[float, str]:
    """Return bytes per second of one device of a node, and the text of its origin."""
    rate = gbit_per_node * GBIT_BYTES / gpus * NETWORK_SHARE
    return rate, f"{gbit_per_node:g} Gb/s a node over {gpus} GPUs, times {NETWORK_SHARE}; {source}"


def _cloud(device: str, gbit_per_node: float, source: str) -> NodeKind:
    rate, text = _shared(gbit_per_node, 8, source)
    return NodeKind(device=device, gpus=8, network_bytes_per_s=rate, source=text)


NODES: Mapping[str, NodeKind] = {
    "dgx_a100": NodeKind(device="a100_sxm_80gb", gpus=8),
    "dgx_h100": NodeKind(device="h100_sxm_80gb", gpus=8),
    "p4d": _cloud("a100_sxm_40gb", 400, "AWS EC2 P4d, EFA (ml-engineering, network/README.md)"),
    "p5": _cloud("h100_sxm_80gb", 3200, "AWS EC2 P5, EFA v2 (ml-engineering, network/README.md)"),
    "pcie_box": NodeKind(device="a100_pcie_80gb", gpus=8),
    "single": NodeKind(device="a100_sxm_80gb", gpus=1),
}
