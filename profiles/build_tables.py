"""Turn published rows into the tables of a profile, transferred where a device has none."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from autoplan.errors import ProfileError
from autoplan.profiles.measurements import Measurements, Row
from autoplan.profiles.origin import Origin, OriginKind
from autoplan.profiles.sources import DeviceSource
from autoplan.profiles.tables import AttentionTable, GemmDirection, GemmTable, MemoryTable

__all__ = [
    "DONOR_DEVICES",
    "Origins",
    "attention_flash",
    "attention_full_matrix",
    "gemm_tables",
    "memory_table",
    "rounded",
]

Rows3 = tuple[tuple[int, int, int, float], ...]
Origins = dict[str, Origin]

DIRECTION_BY_ROLE: dict[str, GemmDirection] = {
    "fwd": "forward",
    "dgrad": "dgrad",
    "wgrad": "wgrad",
}

# Device of devices.csv that the donor GPUs of gemm_efficiency.csv are.
DONOR_DEVICES = {"A100-PCIe-80": ("A100-PCIe-80", "A100-PCIe"), "B200": ("B200-SXM",)}
# The donors of attention_kernels.csv, by name there.
ATTENTION_FAMILIES = {"A100-SXM4-80": ("A100-SXM",), "H100-SXM5-80": ("H100-SXM",)}
OWN_ATTENTION = {"a100_sxm_80gb": "A100-SXM4-80", "h100_sxm_80gb": "H100-SXM5-80"}

LIGER_H100 = "NVIDIA H100 80GB HBM3"


# Sustained large products over the best one ever seen (MAMF) on the same GPU, by dense TFLOP/s per
# watt: what a power limit leaves. Large: m * n * k of 2.5e11 and more. The A100-SXM is the MLP of
# liger_ops.csv (geglu, 65,536 tokens: 256 TFLOP/s of 271.2), the others are of gemm_efficiency.csv.
_SXM_SUSTAINED = 256.0 / 271.2
_LARGE = 2.5e11


def sustained_share(measurements: Measurements, tflops_per_watt: float) -> float:
    """Return which share of its best matmul a GPU sustains, between three that were measured."""
    points = [(_density(measurements, ("A100-SXM",), None), _SXM_SUSTAINED)]
    for donor, family in DONOR_DEVICES.items():
        best = measurements.need(family, "mamf_bf16").value
        large = sorted(
            float(row["tflops"])
            for row in measurements.gemm
            if row["gpu"] == donor
            and row["op"] == "matmul"
            and row["role"] == "fwd"
            and int(row["m"]) * int(row["n"]) * int(row["k"]) >= _LARGE
        )
        points.append((_density(measurements, family, None), large[len(large) // 2] / best))
    xs, ys = zip(*sorted(points), strict=True)
    return float(np.interp(tflops_per_watt, xs, ys))


def _density(
    measurements: Measurements, family: Sequence[str | None], watts: float | None
) -> float:
    peak = measurements.find(family, "peak_bf16") or measurements.need(family, "peak_fp16")
    return peak.value / (watts or measurements.need(family, "tdp").value)


def _sustained_shares(
    source: DeviceSource, donor: Sequence[str | None], measurements: Measurements
) -> tuple[float, float]:
    """Return what the power limits of a device and of its donor leave of their best rates."""
    ours, theirs = (
        sustained_share(measurements, _density(measurements, family, watts))
        for family, watts in ((source.family, source.watts), (donor, None))
    )
    return ours, theirs


def gemm_tables(
    source: DeviceSource, measurements: Measurements, dtype: str, peak: float
) -> tuple[tuple[GemmTable, ...], Origins]:
    """Return GEMM speeds: the donor's efficiency by shape, at this device's best matmul.

    A device with its own rows gets them as they are. Another gets rate = donor's rate times the
    ratio of what each sustains: the highest measured matmul rate (MAMF; without one, peak) times
    the share that the power limit leaves.
    """
    donor_device = DONOR_DEVICES[source.gemm_donor]
    ours = measurements.find(source.family, "mamf_bf16")
    theirs = measurements.need(donor_device, "mamf_bf16")
    donor_peak = measurements.need(donor_device, "peak_bf16").value * 1e12
    rows = [
        row
        for row in measurements.gemm
        if row["op"] == "matmul" and row["gpu"] == source.gemm_donor
    ]
    text = f"efficiency by shape measured on {source.gemm_donor}; {rows[0]['source']}"
    kind: OriginKind = "published"
    is_own = source.name.startswith(("b200", "a100_pcie"))
    is_relative = source.gemm_donor == "B200"  # of one generation: the same share is sustained
    shares = (1.0, 1.0) if is_relative else _sustained_shares(source, donor_device, measurements)
    if is_own:
        factor = 1.0
    elif is_relative and ours is not None:
        factor = ours.value / theirs.value
        text = (
            f"transferred: {text}; times {ours.value:g} / {theirs.value:g}, the highest matmul "
            f"TFLOP/s measured on each ({ours.source}); the same share of it is assumed sustained"
        )
    elif ours is not None:
        factor = ours.value / theirs.value * shares[0] / shares[1]
        text = (
            f"transferred: {text}; times {ours.value:g} / {theirs.value:g}, the highest matmul "
            f"TFLOP/s measured on each ({ours.source}), times {shares[0]:.3f} / {shares[1]:.3f}, "
            "the share of it that the power limit leaves, interpolated by TFLOP/s per watt"
        )
    else:
        factor = peak / donor_peak * shares[0] / shares[1]
        text = (
            f"transferred: {text}; the same fraction of peak is assumed here, times "
            f"{shares[0]:.3f} / {shares[1]:.3f} for the power limit"
        )
        kind = "assumed"
    tables = []
    for role, direction in DIRECTION_BY_ROLE.items():
        chosen = [row for row in rows if row["role"] == role and _is_usual_output(row)]
        table_rows = {
            (int(row["m"]), int(row["n"]), int(row["k"])): float(row["efficiency"])
            * donor_peak
            * factor
            for row in chosen
        }
        tables.append(
            GemmTable(
                dtype=dtype,
                direction=direction,
                origin="gemm",
                rows=tuple((*shape, rounded(rate)) for shape, rate in sorted(table_rows.items())),
            )
        )
    return tuple(tables), {
        "gemm": Origin(kind=kind, text=text, device=source.gemm_donor),
    }


def _is_usual_output(row: Row) -> bool:
    # Weight gradients accumulate into float32 in the source; its bfloat16 variant is left out.
    return row["role"] != "wgrad" or row["out_dtype"] == "fp32"


def attention_flash(
    source: DeviceSource, measurements: Measurements, dtype: str, peak: float
) -> tuple[tuple[AttentionTable, ...], Origins]:
    """Return attention speeds from published bars, forward and backward told apart.

    The bars of FlashAttention 2 are one rate for forward and backward together. On H100 forward
    alone is known too, which gives the backward; its ratio is carried over to A100. Older
    implementations get tables of their own, with one rate for both directions.
    """
    name, impl = (
        ("standard", "PyTorch standard") if source.attention == "standard" else ("flash2", "FA2")
    )
    tables, origins = _flash(source, measurements, dtype, peak, name, impl)
    for older, older_impl in source.older_attention:
        more, origin = _flash(source, measurements, dtype, peak, older, older_impl)
        tables, origins = tables + more, origins | origin
    return tables, origins


def _flash(
    source: DeviceSource,
    measurements: Measurements,
    dtype: str,
    peak: float,
    kernel: str,
    impl: str,
) -> tuple[tuple[AttentionTable, ...], Origins]:
    both = _bars(measurements, source.attention_donor, impl, "fwd+bwd")
    h100_both = _bars(measurements, "H100-SXM5-80", "FA2", "fwd+bwd")
    h100_forward = _bars(measurements, "H100-SXM5-80", "FA2", "fwd")
    donor = ATTENTION_FAMILIES[source.attention_donor]
    donor_peak = measurements.need(donor, "peak_bf16").value * 1e12
    is_own = OWN_ATTENTION.get(source.name) == source.attention_donor or source.name.startswith(
        ("a100", "h200")
    )
    ours, theirs = _sustained_shares(source, donor, measurements)
    power_share = ours / theirs
    factor = 1.0 if is_own else peak / donor_peak * power_share
    rates: dict[tuple[str, bool], list[tuple[int, int, int, float]]] = {}
    for (is_causal, head_dim, seq), (combined, groups, _) in both.items():
        key = (is_causal, head_dim, seq)
        ratio = h100_forward[key][0] / h100_both[key][0]
        if impl != "FA2":
            ratio = 1.0
        forward = combined * ratio
        # 3.5 F at the combined rate = F at the forward rate + 2.5 F at the backward rate.
        backward = 2.5 / (3.5 / combined - 1.0 / forward)
        for direction, rate in (("forward", forward), ("backward", backward)):
            row = (seq, head_dim, groups, rounded(rate * 1e12 * factor))
            rates.setdefault((direction, is_causal), []).append(row)
    citation = next(iter(both.values()))[2]
    origin = "attention" if kernel in ("flash2", "standard") else f"attention_{kernel}"
    return _attention_tables(rates, dtype, kernel, origin), {
        origin: Origin(
            kind="published" if is_own else "assumed",
            text=_attention_text(source, impl, is_own, citation, power_share),
            device=source.attention_donor,
        )
    }


def _attention_text(
    source: DeviceSource, impl: str, is_own: bool, citation: str, power_share: float
) -> str:
    split = "forward and backward at one rate"
    if impl == "FA2" and source.attention_donor.startswith("H100"):
        split = "backward from the combined and the forward bars"
    elif impl == "FA2":
        split = "forward and backward told apart by the ratio of the H100 bars"
    note = f"{impl} bars on {source.attention_donor}, {split}; {citation}"
    if not is_own:
        note += (
            "; transferred: the same fraction of peak is assumed here, times "
            f"{power_share:.3f} for the power limit"
        )
    elif source.name not in OWN_ATTENTION:
        note += "; transferred: the same chip with other memory"
    return note


def _attention_tables(
    rates: dict[tuple[str, bool], list[tuple[int, int, int, float]]],
    dtype: str,
    kernel: str,
    origin: str = "attention",
) -> tuple[AttentionTable, ...]:
    return tuple(
        AttentionTable(
            dtype=dtype,
            direction="forward" if direction == "forward" else "backward",
            causal=is_causal,
            origin=origin,
            kernel=kernel,
            rows=tuple(sorted(rows)),
        )
        for (direction, is_causal), rows in sorted(rates.items())
    )


def _bars(
    measurements: Measurements, gpu: str, impl: str, pass_: str
) -> dict[tuple[bool, int, int], tuple[float, int, str]]:
    """Return (TFLOP/s, batch * heads, source) by (causal, head_dim, seq)."""
    return {
        (row["causal"] == "True", int(row["head_dim"]), int(row["seq"])): (
            float(row["tflops"]),
            int(row["batch"]) * int(row["heads"]),
            row["source"],
        )
        for row in measurements.attention
        if row["gpu"] == gpu and row["impl"] == impl and row["pass_"] == pass_ and row["tflops"]
    }


def attention_full_matrix(
    source: DeviceSource, measurements: Measurements, dtype: str
) -> tuple[tuple[AttentionTable, ...], Origins]:
    """Return attention speeds from rows whose FLOPs count the whole matrix of a causal kernel.

    Our FLOPs are halved for causal, so rates are halved. Query and value widths may differ there;
    their mean is the head_dim of the same FLOPs. The kernel without a mask has no rows: the same
    rate per computed FLOP is assumed.
    """
    rates: dict[tuple[str, bool], list[tuple[int, int, int, float]]] = {}
    seen: dict[tuple[str, int, int, int], float] = {}
    citation = ""
    for row in measurements.gemm:
        if row["gpu"] != source.attention_donor or not row["op"].startswith("sdp_"):
            continue
        shape = dict(part.split("=") for part in row["shape"].split(", "))
        width = (int(shape["qk_head_dim"]) + int(shape["v_head_dim"])) // 2
        groups = int(shape["batch"]) * int(shape["head_num"])
        direction = "forward" if row["op"] == "sdp_fwd" else "backward"
        citation = row["source"]
        rate = float(row["tflops"]) * 1e12 / 2
        key = (direction, int(shape["seq_len"]), width, groups)
        seen[key] = min(rate, seen.get(key, rate))
    for (direction, seq, width, groups), rate in seen.items():
        for is_causal in (False, True):
            rates.setdefault((direction, is_causal), []).append((seq, width, groups, rounded(rate)))
    if not rates:
        raise ProfileError(f"gemm_efficiency.csv has no attention rows of {source.attention_donor}")
    text = (
        "causal kernel, whole-matrix FLOPs halved, backward counted as 2.5 times forward; the same "
        f"rate per computed FLOP is assumed without a mask; {citation}"
    )
    if not source.name.startswith("b200"):
        text += "; transferred: the same rate is assumed here"
    return _attention_tables(rates, dtype, "flash2"), {
        "attention": Origin(kind="published", text=text, device=source.attention_donor)
    }


def memory_table(
    source: DeviceSource, measurements: Measurements, peak_bytes_per_s: float
) -> tuple[tuple[MemoryTable, ...], Origins]:
    """Return memory-bound speeds: the H100's share of peak by size, levelled to this device.

    Rows are the elementwise kernels of a gated MLP as a model runs them, on slices of one tensor:
    silu reads one and writes one, the product reads two and writes one. Where a fit of large
    kernels in training exists for the device itself, it sets the level.
    """
    rows = [
        row
        for row in measurements.liger
        if (row["gpu"], row["op"], row["impl"], row["mode"], row["metric"])
        == (LIGER_H100, "megatron_swiglu", "torch", "forward", "speed")
    ]
    h100_peak = measurements.need(("H100-SXM",), "hbm_bandwidth").value * 1e9
    shares: dict[int, float] = {}
    for row in rows:
        config = json.loads(row["config"])
        nbytes = config["S"] * config["B"] * int(float(row["x_value"])) * 2  # bfloat16
        each_s = float(row["p50"]) * 1e-3 / 5
        shares[round(2.5 * nbytes)] = nbytes / each_s / h100_peak
    level = shares[max(shares)]
    text = f"elementwise kernels of a gated MLP in eager torch on H100; {rows[0]['source']}"
    kind: OriginKind = "published"
    fit = measurements.find((source.memory_fraction,), "memory_bound_op_bandwidth:default")
    if fit is not None:
        family = DONOR_DEVICES.get(source.memory_fraction, (source.memory_fraction,))
        fit_peak = measurements.need(family, "hbm_bandwidth").value
        text = (
            f"transferred: {text}; levelled to {fit.value:g} of {fit_peak:g} GB/s, the fit of "
            f"large memory-bound ops on {fit.device} ({fit.source})"
        )
        factor = fit.value / fit_peak / level
    else:
        factor = 1.0
        if not source.name.startswith("h100"):
            kind = "assumed"
            text = f"transferred: {text}; the same share of peak bandwidth is assumed here"
    tables, origins = _reductions(measurements, peak_bytes_per_s, is_a100="a100" in source.name)
    table = MemoryTable(
        origin="memory_bound",
        rows=tuple(
            (nbytes, rounded(share * factor * peak_bytes_per_s))
            for nbytes, share in sorted(shares.items())
        ),
    )
    origins |= {"memory_bound": Origin(kind=kind, text=text, device="H100")}
    return (table, *tables), origins


# Reductions of liger_ops.csv: op, implementation, config key of the rows, bytes of an element, and
# how often forward and backward move the input (as a trace counts them).
_REDUCTIONS = (
    ("layer_norm", "layer_norm", ("M",), 4, 2, 3),
    ("rms_norm", "megatron_rms_norm", ("S", "B"), 2, 2, 3),
    ("cross_entropy_loss", "cross_entropy", ("B", "T"), 4, 3, 5),
)
_LIGER_GPUS = {"NVIDIA A100-SXM4-80GB": ("A100-SXM",), LIGER_H100: ("H100-SXM",)}


def _reductions(
    measurements: Measurements, peak_bytes_per_s: float, *, is_a100: bool
) -> tuple[tuple[MemoryTable, ...], Origins]:
    """Return speeds of norms and losses: shares of the peak bandwidth of the GPU measured.

    A100 devices take the rows of the A100 where there are some, the others those of the H100.
    """
    tables: list[MemoryTable] = []
    origins: Origins = {}
    gpus = sorted(_LIGER_GPUS, key=lambda gpu: ("A100" in gpu) != is_a100)
    for name, op, keys, item, forward, backward in _REDUCTIONS:
        rows = _liger_rows(measurements, gpus, op)
        if not rows:
            continue
        peak = measurements.need(_LIGER_GPUS[rows[0]["gpu"]], "hbm_bandwidth").value * 1e9
        times: dict[tuple[int, str], float] = {}
        for row in rows:
            config = json.loads(row["config"])
            elements = int(float(row["x_value"]))
            for key in keys:
                elements *= config[key]
            times[elements, row["mode"]] = float(row["p50"]) * 1e-3
        for suffix, passes in (("", forward), ("_backward", backward)):
            shares = _shares(times, suffix, passes * item)
            tables.append(
                MemoryTable(
                    origin=name,
                    kernel=name + suffix,
                    rows=tuple((n, rounded(s / peak * peak_bytes_per_s)) for n, s in shares),
                )
            )
        origins[name] = Origin(
            kind="published",
            text=f"eager {op} as a share of the peak bandwidth of {rows[0]['gpu']}; "
            f"{rows[0]['source']}",
            device=rows[0]["gpu"],
        )
    return tuple(tables), origins


def _liger_rows(measurements: Measurements, gpus: Sequence[str], op: str) -> list[Row]:
    """Return the eager rows of an op on the first GPU that has some."""
    for gpu in gpus:
        rows = [
            row
            for row in measurements.liger
            if row["gpu"] == gpu
            and row["op"] == op
            and row["impl"] in ("huggingface", "torch")
            and row["metric"] == "speed"
            and row["mode"] in ("forward", "full")
        ]
        if rows:
            return rows
    return []


def _shares(
    times: dict[tuple[int, str], float], suffix: str, bytes_per_element: int
) -> list[tuple[int, float]]:
    """Return (bytes, bytes per second) of forward, or of what full takes beyond it."""
    found = []
    for elements, mode in sorted(times):
        if mode != "forward" or (elements, "full") not in times:
            continue
        seconds = times[elements, "forward"]
        if suffix:
            seconds = times[elements, "full"] - seconds
        found.append((elements * bytes_per_element, elements * bytes_per_element / seconds))
    return found


def rounded(rate: float) -> float:
    """Return a rate with the five digits that its source has."""
    return float(f"{rate:.5g}")
