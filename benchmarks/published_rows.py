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
from benchmarks.published_architectures import completed, expert_degrees, experts_of
from benchmarks.published_clusters import MEMORY_ONLY, cluster_of, gpus_of, worlds_of
from benchmarks.published_engines import COMPILED, Skipped, engine_of, rung_of
from benchmarks.published_files import Texts
from benchmarks.published_models import Shape
from benchmarks.published_shapes import amount, family_of, need, number, padded, shape_of

__all__ = [
    "Configuration",
    "Skipped",
    "configurations",
    "measured_bytes",
    "measured_time_s",
]

GIB = 2**30

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
        is_timed: the GPU has a profile; bytes alone can be compared otherwise.
    """

    shape: Shape
    cluster: Cluster
    global_batch: int
    options: Mapping[str, Any]
    assumed: Mapping[str, Any]
    allocator: Literal["segments"] | None = "segments"
    is_timed: bool = True


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
    row = completed(row)
    _check_priced(row)
    worlds = worlds_of(row)
    return [
        replace(own, assumed={**own.assumed, "gpus": world}) if len(worlds) > 1 else own
        for world in worlds
        for own in _configurations_on(Texts({**row, "gpus": str(world)}))
    ]


def _configurations_on(row: Mapping[str, str]) -> list[Configuration]:
    """Return the ways to read a row whose number of devices is known."""
    shape = shape_of(row)
    gpus = gpus_of(row)
    degrees = _degrees(row, need(row, "gpus"))
    is_other = "oneflow" in (row.get("framework") or "").lower()
    found = []
    for choice in _choices(row, degrees, gpus):
        cluster = cluster_of(row, choice.get("gpu", gpus[0]))
        options = _options(row, degrees, choice)
        microbatch = choice.get("micro_batch") or need(row, "micro_batch")
        batch = number(row, "global_batch")
        if batch is None:
            accumulated = number(row, "grad_accum") or max(1, degrees["pp"])
            batch = microbatch * degrees["dp"] * accumulated
        options["microbatch_size"] = microbatch
        if options["zero_stage"] > 0:
            options["dp_replicate"] = _replicas(row, _sharing(degrees), cluster.gpus_per_node)
        fitted = replace(shape, vocab=padded(shape.vocab, row, degrees["tp"]))
        found.append(
            Configuration(
                shape=fitted,
                cluster=cluster,
                global_batch=batch,
                options=options,
                assumed=choice,
                allocator=None if is_other else "segments",
                is_timed=not MEMORY_ONLY.keys() & set(gpus),
            )
        )
    return found


def _check_priced(row: Mapping[str, str]) -> None:
    if experts_of(row) is not None and family_of(row) != "megatron":
        raise Skipped(f"experts of {row.get('framework')} are not built from a row")
    text = " ".join(
        (row.get(k) or "").lower() for k in ("model", "framework", "sharding", "notes", "args")
    )
    reasons = {
        r"\b(adapter|galore|dora)\b": "adapters other than LoRA are not built from a row",
        r"\bqlora\b|\bnf4\b|\bint8\b|8-bit base": "quantized weights are not priced",
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


def _degrees(row: Mapping[str, str], world: int) -> dict[str, int]:
    tp, pp = number(row, "tp"), number(row, "pp")
    if (tp is None or pp is None) and family_of(row) == "megatron":
        raise Skipped("tp or pp is not given")
    tp, pp = tp or 1, pp or 1
    cp = number(row, "cp") or 1
    dp = number(row, "dp") or world // (tp * pp * cp)
    if dp * tp * pp * cp != world:
        context = f" * cp {cp}" if cp > 1 else ""
        raise Skipped(f"dp {dp} * tp {tp} * pp {pp}{context} is not {world} GPUs")
    return {"dp": dp, "tp": tp, "pp": pp, "context_parallel": cp}


def _sharing(degrees: Mapping[str, int]) -> int:
    """Return the ranks that ZeRO shards over: those that have different tokens."""
    return degrees["dp"] * degrees["context_parallel"]


def _replicas(row: Mapping[str, str], dp: int, gpus_per_node: int) -> int:
    """Return how many replicas there are of what ZeRO shards, where the row says that.

    `HSDP` shards over the GPUs of a node (torch, `ShardingStrategy.HYBRID_SHARD`).
    """
    text = row.get("sharding") or ""
    stated = re.search(r"sharded over (\d+) gpus", text)
    shards = int(stated.group(1)) if stated else gpus_per_node if "HSDP" in text else dp
    return dp // shards if 0 < shards < dp and dp % shards == 0 else 1


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
    if not row.get("zero_stage") and _sharing(degrees) > 1:
        text = " ".join((row.get(key) or "").lower() for key in ("sharding", "framework"))
        sharded = any(word in text for word in ("fsdp", "torchtune", "litgpt"))
        open_fields["zero_stage"] = (3,) if sharded else (0, 1)
    if not row.get("sequence_parallel") and degrees["tp"] > 1:
        open_fields["sequence_parallel"] = (False, True)
    open_fields |= _open_pipeline(row, degrees)
    for values in product(*open_fields.values()):
        yield dict(zip(open_fields, values, strict=True))


def _is_torchtitan(row: Mapping[str, str]) -> bool:
    return "torchtitan" in (row.get("framework") or "").lower()


def _open_pipeline(
    row: Mapping[str, str], degrees: Mapping[str, int]
) -> dict[str, tuple[Any, ...]]:
    """Return what torchtitan's pipelines leave open: rows of a micro-batch, stages of a rank.

    Any micro-batch that gives every stage one at a time is plausible. Two stages a rank are what it
    cuts for a schedule of several (`pipeline_llama.py`, `generate_split_points`).
    """
    batch = number(row, "global_batch")
    if degrees["pp"] == 1 or not batch or not _is_torchtitan(row):
        return {}
    found: dict[str, tuple[Any, ...]] = {}
    rows, pp = batch // degrees["dp"], degrees["pp"]
    if not row.get("micro_batch"):
        sizes = [size for size in range(1, rows // pp + 1) if rows % size == 0]
        found["micro_batch"] = tuple(size for size in sizes if rows // size % pp == 0)
    if not row.get("vpp") and "interleaved" in row["framework"].lower():
        found["vpp"] = (2,)
    return {key: values for key, values in found.items() if values}


def _options(
    row: Mapping[str, str], degrees: Mapping[str, int], choice: Mapping[str, Any]
) -> dict[str, Any]:
    family = family_of(row)
    options: dict[str, Any] = {**degrees, "stage_ends": "blocks", "tensor_layout": "megatron"}
    stated = number(row, "zero_stage")
    stage = choice.get("zero_stage", stated if stated is not None else 0)
    if stage == 3 and degrees["pp"] > 1 and _is_torchtitan(row):
        # Its pipelines keep parameters gathered (`apply_fsdp`, reshard_after_forward) and gradients
        # whole until the last micro-batch (torch, `_PipelineStageBase.backward_maybe_with_nosync`):
        # what ZeRO-1 on FSDP does.
        stage = 1
    options["zero_stage"] = stage
    sequence = choice.get("sequence_parallel", row.get("sequence_parallel") == "true")
    options["sequence_parallel"] = bool(sequence) and degrees["tp"] > 1
    options["recompute"] = choice.get("recompute") or _recompute(row["recompute"])
    options |= expert_degrees(row, degrees["tp"])
    options["engine"] = engine_of(
        row,
        family,
        options["zero_stage"],
        steps_in_backward=choice.get("steps_in_backward", False),
    )
    options["offload"] = _offload(row)
    if options["offload"] != "none" and options["zero_stage"] != 3:
        raise Skipped("offload without ZeRO-3 is not priced")
    parts = choice.get("vpp") or number(row, "vpp") or 1
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
