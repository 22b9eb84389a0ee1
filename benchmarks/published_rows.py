"""What a row of published measurements says, as configurations that can be priced.

A row becomes one configuration, or several where it leaves something open, or none: then the reason
is said. Columns: see the README of the measurements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from autoplan.cluster import Cluster
from autoplan.graph import BlockTrace
from autoplan.plan import Recompute
from autoplan.profiles.catalog import load_profile
from autoplan.profiles.device import DeviceProfile
from benchmarks.published_engines import COMPILED, Skipped, engine_of, rung_of
from benchmarks.published_models import Shape
from benchmarks.published_shapes import amount, family_of, need, number, padded, shape_of

__all__ = [
    "Configuration",
    "Skipped",
    "configurations",
    "gpus_of",
    "measured_bytes",
    "measured_time_s",
]

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
    "V100-SXM2-32": "v100_sxm_32gb",
    "V100-SXM3-32": "v100_sxm_32gb",
    "V100-32": "v100_sxm_32gb",
    "V100-SXM2-16": "v100_sxm_32gb",
    "L40S": "l40s",
    "A10-24": "a10",
    "RTX 4090": "rtx_4090",
    "RTX 4090-24": "rtx_4090",
}

_BILLION = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to read a row.

    Attributes:
        shape: of the model.
        cluster: the devices.
        global_batch: rows of a step; None: the row gives none, one micro-batch per rank is taken
            and no time can be compared.
        options: further arguments of `estimate`.
        assumed: what the row left open, and the value taken here.
        allocator: of the software that ran, where it is torch's.
    """

    shape: Shape
    cluster: Cluster
    global_batch: int
    options: Mapping[str, Any]
    assumed: Mapping[str, Any]
    allocator: Literal["segments"] | None = "segments"


def measured_time_s(row: Mapping[str, str]) -> float | None:
    """Return seconds of an iteration: printed, or from tokens per second.

    None where it is not one of the batch and length that the row gives.
    """
    notes = (row.get("notes") or "").lower()
    if "per micro-batch" in notes or "longest" in notes:
        return None
    seconds = amount(row, "iter_time_s")
    if seconds is None:
        keys = ("tokens_per_s_per_gpu", "gpus", "global_batch", "seq")
        values = [amount(row, key) for key in keys]
        if not all(values):
            return None
        rate, gpus, batch, seq = (value or 0.0 for value in values)
        seconds = batch * seq / (rate * gpus)
    if seconds == 0:
        raise Skipped("iter_time_s is 0")
    return seconds


def measured_bytes(row: Mapping[str, str]) -> tuple[float, str] | None:
    """Return peak bytes and what they count: `allocated`, `reserved` or `device`.

    The printed number is in GiB unless its kind says GB (decimal). `nvidia-smi` prints MiB, so what
    its readers call a GB is a thousand of them: 16 GB nearly fill a card of 16,160 MiB.
    """
    value = amount(row, "peak_mem_gib")
    if not value:
        return None
    kind = (row.get("mem_kind") or "").lower()
    unit = _BILLION if re.search(r"\bgb\b", kind) else GIB
    if "nvidia-smi" in kind:
        return value * (1000 * 2**20 if unit == _BILLION else unit), "device"
    if "reserved" in kind:
        return value * unit, "reserved"
    if "alloc" in kind or "active" in kind:
        return value * unit, "allocated"
    return None


def configurations(row: Mapping[str, str]) -> list[Configuration]:
    """Return the ways to read a row, at least one.

    Raises:
        Skipped: the row lacks what cannot be left open, or holds what `estimate` does not price.
    """
    _check_priced(row)
    shape = shape_of(row)
    gpus = gpus_of(row)
    degrees = _degrees(row, need(row, "gpus"))
    is_other = "oneflow" in (row.get("framework") or "").lower()
    found = []
    for choice in _choices(row, degrees, gpus):
        cluster = _cluster(row, choice.get("gpu", gpus[0]))
        options = _options(row, degrees, choice)
        microbatch = need(row, "micro_batch")
        batch = number(row, "global_batch")
        if batch is None:
            accumulated = number(row, "grad_accum") or max(1, degrees["pp"])
            batch = microbatch * degrees["dp"] * accumulated
        options["microbatch_size"] = microbatch
        fitted = replace(shape, vocab=padded(shape.vocab, row, degrees["tp"]))
        found.append(
            Configuration(
                shape=fitted,
                cluster=cluster,
                global_batch=batch,
                options=options,
                assumed=choice,
                allocator=None if is_other else "segments",
            )
        )
    return found


def _check_priced(row: Mapping[str, str]) -> None:
    for key, word in (("cp", "context parallelism"), ("ep", "expert parallelism")):
        if (number(row, key) or 1) > 1:
            raise Skipped(f"{word} is not priced")
    if (number(row, "num_experts") or 0) > 1 or "moe" in row.get("model", "").lower():
        raise Skipped("experts are not built from a row")
    text = " ".join(
        (row.get(k) or "").lower() for k in ("model", "framework", "sharding", "notes", "args")
    )
    reasons = {
        r"\b(adapter|galore|dora)\b": "adapters other than LoRA are not built from a row",
        r"\bqlora\b|\bnf4\b|\bint8\b|8-bit base": "quantized weights are not priced",
        r"async_tp": "asynchronous tensor parallelism is not priced",
        r"tp-comm-overlap": "tensor-parallel communication beside kernels is not priced",
        r"\bbert|\bt5\b|llava|clip": "only decoders are built from a row",
        r"rowwise": "float8 scaled by rows has no measured speed",
        r"mamba|hybrid-": "only attention blocks are built from a row",
    }
    optimizer = (row.get("optimizer") or "").lower()
    for pattern, reason in reasons.items():
        if re.search(pattern, text) or re.search(pattern, optimizer):
            raise Skipped(reason)
    if "muon" in optimizer:
        raise Skipped("optimizer muon is not priced")


def gpus_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a row may mean, by the names of `PROFILES`.

    An A100 of no stated memory is either, unless the other could not hold what was measured.

    Raises:
        Skipped: there is no profile.
    """
    gpu = (row.get("gpu") or "").strip()
    if gpu in PROFILES:
        return (gpu,)
    if re.match(r"A100\b", gpu):
        peak = amount(row, "peak_mem_gib") or 0.0
        gib = number(row, "gpu_mem_gb")
        sizes = [size for size in (40, 80) if peak <= size and gib in (None, size)]
        if sizes:
            return tuple(f"A100-{size}" for size in sizes)
    if "DGX-2" in gpu:
        return ("V100-32",)  # sold with that memory only
    raise Skipped(f"no profile for GPU {gpu or 'that is not given'}")


def _cluster(row: Mapping[str, str], gpu: str) -> Cluster:
    try:
        device = load_profile(PROFILES[gpu])
    except ValueError as error:
        raise Skipped(str(error)) from None
    device = _with_bfloat16(device)
    gpus = need(row, "gpus")
    per_node = min(number(row, "gpus_per_node") or 8, gpus)
    if gpus % per_node:
        raise Skipped(f"{gpus} GPUs do not fill nodes of {per_node}")
    cluster = Cluster.from_device(device, num_nodes=gpus // per_node, gpus_per_node=per_node)
    if gpu == "V100-SXM2-16":
        return cluster.with_memory(16 * GIB)
    return cluster


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


def _degrees(row: Mapping[str, str], world: int) -> dict[str, int]:
    tp, pp = number(row, "tp"), number(row, "pp")
    if (tp is None or pp is None) and family_of(row) == "megatron":
        raise Skipped("tp or pp is not given")
    tp, pp = tp or 1, pp or 1
    dp = number(row, "dp") or world // (tp * pp)
    if dp * tp * pp != world:
        raise Skipped(f"dp {dp} * tp {tp} * pp {pp} is not {world} GPUs")
    return {"dp": dp, "tp": tp, "pp": pp}


def _choices(
    row: Mapping[str, str], degrees: Mapping[str, int], gpus: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield values of what the row leaves open."""
    open_fields: dict[str, tuple[Any, ...]] = {}
    if len(gpus) > 1:
        open_fields["gpu"] = gpus
    is_full = shape_of(row).adapter is None
    if "torchtune" in (row.get("framework") or "").lower() and rung_of(row) is None and is_full:
        # Its recipes of one device step in the backward, with any of these.
        if not row.get("optimizer"):
            open_fields["optimizer"] = ("AdamW", "PagedAdamW8bit")
        if degrees["dp"] == 1:
            open_fields["steps_in_backward"] = (False, True)
    # Outside of Megatron-LM "selective" is a share of the blocks (`apply_fsdp_checkpointing`, IBM).
    is_share = row.get("recompute") == "selective" and family_of(row) == "torch"
    # LitGPT checkpoints every block as soon as there are several devices (`finetune/lora.py` and
    # the others, `activation_checkpointing_policy={Block}`).
    is_litgpt = "litgpt" in (row.get("framework") or "").lower() and degrees["dp"] > 1
    if not row.get("recompute") or is_share:
        open_fields["recompute"] = ("full",) if is_litgpt else ("none", "full")
    if not row.get("zero_stage") and degrees["dp"] > 1:
        text = " ".join((row.get(key) or "").lower() for key in ("sharding", "framework"))
        sharded = any(word in text for word in ("fsdp", "torchtune", "litgpt"))
        open_fields["zero_stage"] = (3,) if sharded else (0, 1)
    if not row.get("sequence_parallel") and degrees["tp"] > 1:
        open_fields["sequence_parallel"] = (False, True)
    for values in product(*open_fields.values()):
        yield dict(zip(open_fields, values, strict=True))


def _options(
    row: Mapping[str, str], degrees: Mapping[str, int], choice: Mapping[str, Any]
) -> dict[str, Any]:
    family = family_of(row)
    options: dict[str, Any] = {**degrees, "stage_ends": "blocks", "tensor_layout": "megatron"}
    stated = number(row, "zero_stage")
    options["zero_stage"] = choice.get("zero_stage", stated if stated is not None else 0)
    sequence = choice.get("sequence_parallel", row.get("sequence_parallel") == "true")
    options["sequence_parallel"] = bool(sequence) and degrees["tp"] > 1
    options["recompute"] = choice.get("recompute") or _recompute(row["recompute"])
    options["engine"] = engine_of(
        row,
        family,
        options["zero_stage"],
        steps_in_backward=choice.get("steps_in_backward", False),
    )
    options["offload"] = _offload(row)
    if options["offload"] != "none" and options["zero_stage"] != 3:
        raise Skipped("offload without ZeRO-3 is not priced")
    parts = number(row, "vpp") or 1
    options["virtual_stages"] = parts if degrees["pp"] > 1 else 1
    options["optimizer"] = choice.get("optimizer") or _optimizer(row)
    options["mixed_precision"] = _precision(row)
    if "fp8" in (row.get("dtype") or "").lower():
        options["product_dtype"] = "float8"
    if "compile" in row.get("framework", "").lower() or (rung_of(row) or 0) >= COMPILED:
        options["is_compiled"] = True
    return options


def _optimizer(row: Mapping[str, str]) -> str:
    """Return the optimizer by the name that `estimate` knows; one of 8 bits is told apart."""
    text = (row.get("optimizer") or "Adam").lower()
    is_narrow = re.search(r"8[-_ ]?bit", text) is not None
    if "adam" not in text and not is_narrow:
        raise Skipped(f"optimizer {text} is not priced")
    return ("Paged" if "paged" in text else "") + "AdamW" + ("8bit" if is_narrow else "")


def _offload(row: Mapping[str, str]) -> str:
    """Return what lies in host memory: `optimizer` is shards of parameters and gradients too."""
    keys = ("framework", "sharding", "notes", "recompute")
    text = " ".join((row.get(key) or "").lower() for key in keys)
    text = text.replace("optimizer offload n, param offload n", "")
    if "offload" not in text:
        return "none"
    whole = r"full (cpu )?offload|cpuoffload_all|optimizer offload y, param offload y"
    if re.search(whole, text) and "pa_cpu y" not in text:
        return "optimizer"
    raise Skipped("offload of a part is not priced")


def _precision(row: Mapping[str, str]) -> str:
    dtype = (row.get("dtype") or "").lower()
    if any(word in dtype for word in ("int8", "nf4")):
        raise Skipped(f"dtype {dtype} is not priced")
    if dtype == "fp32":
        raise Skipped("dtype fp32 is not built from a row")
    # These frameworks keep parameters in the dtype that they compute in.
    if any(word in (row.get("framework") or "").lower() for word in ("torchtune", "litgpt")):
        return "none"
    if "bf16-true" in dtype or "states bf16" in dtype or "pure bf16" in dtype:
        return "none"
    return "bfloat16"


def _recompute(text: str) -> Any:
    if text == "none":
        return "none"
    if text in ("full", "full_block", "full:uniform:1"):
        return "full"
    if text == "selective":
        return "attention"
    every = re.fullmatch(r"selective_layer\(every (\d+)\w\w layer\)", text)
    if every:
        return ("full", *["none"] * (int(every.group(1)) - 1))
    if text == "selective_op":
        return selective_op
    raise Skipped(f"recompute {text!r} is not priced")


def selective_op(block: BlockTrace) -> Recompute:
    """Return what torchtitan's op policy keeps: attention, and every second product, the first too.

    Source: torchtitan `models/llama/parallelize_llama.py`, `_apply_ac_to_transformer_block`.
    """
    products = [op.name for op in block.ops if op.kind == "gemm"]
    kept = set(products[::2]) | {op.name for op in block.ops if op.kind == "attention"}
    return Recompute(mode="selective", keep=tuple(op.name for op in block.ops if op.name in kept))
