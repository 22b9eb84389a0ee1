"""Clusters in YAML files.

num_nodes: 4                 # default 1
node: dgx_h100               # a preset of `autoplan.nodes.NODES`, or these two:
gpus_per_node: 8
device: h100_sxm_80gb        # name of a profile, or a path ending in .json
device_memory: 70GiB         # optional, as are all below: bytes, or text
reserve: 2GiB
slower:                      # more nodes, of other devices, none faster; their ranks come last
  - {num_nodes: 2, device: a100_sxm_80gb}
intra: {latency_s: 2e-6, bytes_per_s: 360e9, setup_s: 1e-5, interference: 1.1}
inter:
  latency_s: 5e-6
  bytes_per_s: 45e9
  curves:                    # measured times, which win over the equations
    - {collective: all_reduce, degree: 32, ranks_per_node: 8, rows: [[32768, 1e-4], ...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoplan.cluster import Cluster, NodeGroup
from autoplan.errors import ProfileError
from autoplan.nodes import NODES
from autoplan.profiles.catalog import load_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from autoplan.profiles.tables import COLLECTIVES, CollectiveTable
from autoplan.units import parse_bytes

__all__ = ["read_cluster"]

_YAML_KEYS = (
    "num_nodes",
    "node",
    "gpus_per_node",
    "device",
    "device_memory",
    "reserve",
    "slower",
    "intra",
    "inter",
)
_LINK_KEYS = ("latency_s", "bytes_per_s", "setup_s", "interference", "curves")
_CURVE_KEYS = ("collective", "degree", "ranks_per_node", "rows")


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a YAML file describes.

    Raises:
        ValueError: names the file and the key that is missing, unknown or wrong.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the cluster file {path}: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: must be a mapping with the keys {', '.join(_YAML_KEYS)}")
    needed = ("node",) if "node" in document else ("gpus_per_node", "device")
    _check_keys(str(path), document, _YAML_KEYS, needed)
    num_nodes = _count(document, "num_nodes", 1, f"{path}: ")
    links = {level: _link(path, document, level) for level in ("intra", "inter")}
    try:
        gpus, device = _node_of(document)
        device = replace(
            device, intra=links["intra"] or device.intra, inter=links["inter"] or device.inter
        )
        cluster = Cluster.from_device(device, num_nodes=num_nodes, gpus_per_node=gpus)
        given = {level: link for level, link in links.items() if link is not None}
        return replace(
            cluster.with_slower(_slower(document, given)),
            device_memory_bytes=_size(document, "device_memory"),
            reserve_bytes=_size(document, "reserve"),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def _slower(document: Mapping[str, Any], links: Mapping[str, Any]) -> tuple[NodeGroup, ...]:
    """Return the slower nodes; links that the file gives are theirs too."""
    listed = document.get("slower", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ValueError("slower: must be a list of mappings with num_nodes and device")
    found = []
    for number, item in enumerate(listed):
        _check_keys(f"slower[{number}]", item, ("num_nodes", "device"), ("num_nodes", "device"))
        count = _whole(f"slower[{number}].num_nodes", item["num_nodes"])
        device = replace(load_profile(str(item["device"])), **links)
        found.append(NodeGroup(num_nodes=count, device=device))
    return tuple(found)


def _node_of(document: Mapping[str, Any]) -> tuple[int, DeviceProfile]:
    """Return devices per node and their profile, from `node` or from the two keys themselves."""
    if "node" in document:
        name = document["node"]
        if name not in NODES:
            raise ValueError(f"node: must be one of {', '.join(NODES)}, got {name!r}")
        if "device" in document:
            raise ValueError(f"device: the node {name} has one already, leave it out")
        preset = Cluster.of_nodes(name, 1)
        return _count(document, "gpus_per_node", preset.gpus_per_node), replace(
            preset.device, intra=preset.intra, inter=preset.inter
        )
    if not isinstance(document["device"], str):
        raise ValueError("device: must be the name of a profile")
    return _count(document, "gpus_per_node", 1), load_profile(document["device"])


def _check_keys(
    where: str, mapping: Mapping[Any, Any], allowed: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    for key in mapping:
        if key not in allowed:
            raise ValueError(f"{where}: {key}: unknown key; allowed are {', '.join(allowed)}")
    for key in needed:
        if key not in mapping:
            raise ValueError(f"{where}: {key}: missing key")


def _count(document: Mapping[str, Any], key: str, default: int, where: str = "") -> int:
    return _whole(f"{where}{key}", document.get(key, default))


def _size(document: Mapping[str, Any], key: str) -> int | None:
    value = document.get(key)
    if value is None or value == 0:
        return None if value is None else 0
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{key}: must be bytes or text such as 40GiB, got {value!r}")
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _link(path: Path, document: Mapping[str, Any], level: str) -> LinkProfile | None:
    if level not in document:
        return None
    mapping = document[level]
    if not isinstance(mapping, dict):
        raise ValueError(f"{path}: {level}: must be a mapping with {', '.join(_LINK_KEYS)}")
    _check_keys(f"{path}: {level}", mapping, _LINK_KEYS, ("latency_s", "bytes_per_s"))
    given = {key: value for key, value in mapping.items() if key != "curves"}
    numbers = {k: _number(f"{path}: {level}.{k}", value) for k, value in given.items()}
    interference = numbers.pop("interference", None)
    try:
        link = LinkProfile.from_numbers(
            name=f"{level}-node link of {path.name}",
            level="intra" if level == "intra" else "inter",
            source=f"given in {path.name}",
            **numbers,
        )
        sources = {**link.origin_by_field}
        if interference is not None:
            sources["interference"] = sources["latency_s"]
        return replace(
            link,
            interference=interference,
            curves=_curves(f"{path}: {level}.curves", mapping, sources["latency_s"]),
            origin_by_field=sources,
        )
    except ValueError as error:
        text = str(error)
        raise ValueError(
            text if text.startswith(str(path)) else f"{path}: {level}.{text}"
        ) from None


def _number(where: str, value: Any) -> float:
    try:
        return float(value)  # YAML 1.1 reads 25e9 as text
    except (TypeError, ValueError):
        raise ValueError(f"{where}: must be a number, got {value!r}") from None


def _curves(where: str, mapping: Mapping[str, Any], origin: str) -> tuple[CollectiveTable, ...]:
    listed = mapping.get("curves", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ValueError(f"{where}: must be a list of mappings with {', '.join(_CURVE_KEYS)}")
    found = []
    for number, item in enumerate(listed):
        here = f"{where}[{number}]"
        _check_keys(here, item, _CURVE_KEYS, ("collective", "degree", "rows"))
        if item["collective"] not in COLLECTIVES:
            raise ValueError(
                f"{here}.collective: must be one of {', '.join(COLLECTIVES)}, got "
                f"{item['collective']!r}"
            )
        rows = item["rows"]
        is_pairs = isinstance(rows, list) and all(
            isinstance(row, list) and len(row) == 2 for row in rows
        )
        if not is_pairs:
            raise ValueError(f"{here}.rows: must be a list of [bytes, seconds], got {rows!r}")
        try:
            table = CollectiveTable(
                collective=item["collective"],
                degree=_whole(f"{here}.degree", item["degree"]),
                origin=origin,
                rows=tuple(
                    (int(_number(f"{here}.rows", nbytes)), _number(f"{here}.rows", time_s))
                    for nbytes, time_s in rows
                ),
                ranks_per_node=_whole(f"{here}.ranks_per_node", item.get("ranks_per_node", 1)),
            )
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(where) else f"{here}.{text}") from None
        found.append(table)
    return tuple(found)


def _whole(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: must be a whole number of at least 1, got {value!r}")
    return value
