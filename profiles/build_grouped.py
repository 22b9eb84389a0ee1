"""Turn published rows of grouped products into the tables of a profile."""

from __future__ import annotations

from autoplan.profiles.build_tables import DONOR_DEVICES, Origins, rounded
from autoplan.profiles.measurements import Measurements
from autoplan.profiles.origin import Origin
from autoplan.profiles.sources import DeviceSource
from autoplan.profiles.tables import GemmDirection, GemmTable

__all__ = ["grouped_tables"]

_STAGES: dict[str, GemmDirection] = {
    "fwd": "forward",
    "bwd_grad_act": "dgrad",
    "bwd_grad_w": "wgrad",
}


def grouped_tables(
    source: DeviceSource, measurements: Measurements, dtype: str
) -> tuple[tuple[GemmTable, ...], Origins]:
    """Return speeds of products of a group of experts, where this generation was measured.

    Rows are of one expert; the rate is of all together (grouped linear layers of Transformer
    Engine). Weight gradients accumulate in float32. A relative of the GPU measured gets them times
    the ratio of the best matmul rates, as other products.
    """
    is_own = source.name.startswith(("b200", "a100_pcie"))
    if not is_own and source.gemm_donor != "B200":
        return (), {}
    rates: dict[GemmDirection, dict[tuple[int, int, int], float]] = {}
    theirs = measurements.need(DONOR_DEVICES[source.gemm_donor], "mamf_bf16")
    ours = measurements.find(source.family, "mamf_bf16") or theirs
    factor = 1.0 if is_own else ours.value / theirs.value
    citation = ""
    for row in measurements.gemm:
        if row["gpu"] != source.gemm_donor or row["op"] != "group_matmul":
            continue
        shape = dict(part.split("=") for part in row["shape"].split(", "))
        if shape["stage"] == "bwd_grad_w" and shape["main_grad_dtype"] != "fp32":
            continue
        m, n, k = (int(shape[name]) for name in "MNK")
        direction = _STAGES[shape["stage"]]
        size = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[direction]
        own = rates.setdefault(direction, {})
        rate = float(row["tflops"]) * 1e12
        own[size] = min(rate, own.get(size, rate))
        citation = row["source"]
    if not rates:
        return (), {}
    text = f"grouped products by shape of one, measured on {source.gemm_donor}; {citation}"
    if not is_own:
        text = f"transferred: {text}; times {ours.value:g} / {theirs.value:g}, as other products"
    tables = tuple(
        GemmTable(
            dtype=dtype,
            direction=direction,
            origin="grouped",
            rows=tuple((*size, rounded(rate * factor)) for size, rate in sorted(own.items())),
        )
        for direction, own in rates.items()
    )
    return tables, {"grouped": Origin(kind="published", text=text, device=source.gemm_donor)}
