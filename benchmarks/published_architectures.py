"""What a row does not print of a model with experts: published dimensions, and launch scripts.

A row that names a published model and no dimensions gets those of its paper. Where a row's source
is a folder of launch scripts, what these pass stands for the arguments of the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.published_engines import Skipped
from benchmarks.published_experts import Experts, Latent
from benchmarks.published_files import Texts

__all__ = ["arguments", "completed", "expert_degrees", "experts_of", "latent_of"]

_DEEPSEEK = {
    "heads": "128",
    "q-lora-rank": "1536",
    "kv-lora-rank": "512",
    "qk-head-dim": "128",
    "qk-pos-emb-head-dim": "64",
    "v-head-dim": "128",
    "multi-latent-attention": "",
    "untied": "true",
}
# DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), section 3.1.2, and DeepSeek-V3 (arXiv
# 2412.19437), section 4.2; vocabularies of their configurations.
_PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "deepseekv2": _DEEPSEEK
    | {
        "hidden": "5120",
        "ffn": "12288",
        "vocab": "102400",
        "num_experts": "160",
        "moe_topk": "6",
        "moe-ffn-hidden-size": "1536",
        "moe-shared-expert-intermediate-size": "3072",
        "moe-layer-freq": "([0]*1+[1]*59)",
    },
    "deepseekv3": _DEEPSEEK
    | {
        "hidden": "7168",
        "ffn": "18432",
        "vocab": "129280",
        "num_experts": "256",
        "moe_topk": "8",
        "moe-ffn-hidden-size": "2048",
        "moe-shared-expert-intermediate-size": "2048",
        "moe-layer-freq": "([0]*3+[1]*58)",
    },
}
_COLUMNS = ("hidden", "heads", "ffn", "vocab", "num_experts", "moe_topk", "untied")

# SimuMax, `simu_tools/megatron_scripts/scripts/run_pretrain_deepseekv2.sh`.
_SCRIPTS = {
    "simu_tools/megatron_scripts": "moe-token-dispatcher-type=alltoall moe-router-num-groups={ep} "
    "moe-router-group-topk=3 moe-router-load-balancing-type=seq_aux_loss moe-router-pre-softmax "
    "moe-expert-capacity-factor=1 moe-pad-expert-input-to-capacity moe-grouped-gemm "
    "moe-permute-fusion moe-layer-freq=([0]*1+[1]*{rest})",
}

# Arguments of Megatron-LM that change what experts run, and are not built.
_NOT_PRICED = {
    "mtp-num-layers": "multi-token prediction is not priced",
    "pipeline-model-parallel-layout": "stages of a layout of their own are not priced",
    "overlap-moe-expert-parallel-comm": "exchanges beside kernels are not priced",
    "moe-shared-expert-overlap": "exchanges beside kernels are not priced",
    "moe-latent-size": "experts behind a projection are not priced",
    "use-megatron-fsdp": "Megatron FSDP with experts is not priced",
    "use-torch-fsdp2": "FSDP2 with experts is not priced",
}


def completed(row: Mapping[str, str]) -> Mapping[str, str]:
    """Return a row with what it leaves to the model and the scripts that it names.

    Dimensions of a published model where the row has none, and the arguments that a launch script
    passes, if the row prints none, as `args`.
    """
    if row.get("hidden"):
        return row
    model = re.sub(r"[-_ ]", "", (row.get("model") or "").lower())
    dims = next((dims for name, dims in _PUBLISHED.items() if name in model), None)
    if dims is None:
        return row
    filled = {key: dims[key] for key in _COLUMNS if not row.get(key)}
    source, layers = row.get("source") or "", row.get("layers") or ""
    passed = [row["args"]] if row.get("args") else []
    if not passed and layers.isdigit():
        scripts = (text for folder, text in _SCRIPTS.items() if folder in source)
        passed = [text.format(ep=row.get("ep") or 1, rest=int(layers) - 1) for text in scripts]
    widths = [f"{name}={value}" for name, value in dims.items() if name not in _COLUMNS]
    return Texts({**row, **filled, "args": " ".join([*widths, *passed])})


def arguments(row: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments that a row's run was launched with; of equal ones the last."""
    words = (word.partition("=") for word in (row.get("args") or "").split())
    return {name: value for name, _, value in words}


def _whole(found: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = found.get(name, "")
    if not text.isdigit():
        if default is None:
            raise Skipped(f"{name} is not given")
        return default
    return int(text)


def experts_of(row: Mapping[str, str]) -> Experts | None:
    """Return the experts of a row's model, or None where it has none.

    Raises:
        Skipped: it has some and lacks a dimension, or runs them as nothing here does.
    """
    found = arguments(row)
    count = _whole(row, "num_experts", 0)
    if count <= 1:
        is_named = re.search(r"\bmoe\b", row.get("model", "").lower()) is not None
        if is_named or _whole(row, "ep", 1) > 1:
            raise Skipped("num_experts is not given")
        return None
    for name, reason in _NOT_PRICED.items():
        if name in found:
            raise Skipped(reason)
    dispatcher = found.get("moe-token-dispatcher-type", "allgather")
    if dispatcher != "alltoall":
        raise Skipped(f"a token dispatcher {dispatcher} is not priced")
    local = count // _whole(row, "ep", 1)
    if local > 1 and "moe-grouped-gemm" not in found:
        raise Skipped("experts one after the other are not priced")
    if row.get("swiglu") == "false":
        raise Skipped("experts without a gate are not built from a row")
    layers = _whole(row, "layers")
    return Experts(
        count=count,
        chosen=_whole(row, "moe_topk"),
        ffn=_whole(found, "moe-ffn-hidden-size", _whole(row, "ffn")),
        shared_ffn=_whole(found, "moe-shared-expert-intermediate-size", 0),
        dense_layers=_dense_layers(found.get("moe-layer-freq", ""), layers),
        router="float32" if found.get("moe-router-dtype") == "fp32" else "bfloat16",
        groups=_whole(found, "moe-router-num-groups", 0),
        chosen_groups=_whole(found, "moe-router-group-topk", 0),
        chooses_scores="moe-router-pre-softmax" in found,
        is_padded="moe-pad-expert-input-to-capacity" in found,
        has_loss="aux_loss" in found.get("moe-router-load-balancing-type", "aux_loss"),
    )


def _dense_layers(frequency: str, layers: int) -> int:
    """Return how many layers come before those with experts."""
    if not frequency or frequency == "1":
        return 0
    stated = re.fullmatch(r"\(\[0\]\*(\d+)\+\[1\]\*(\d+)\)(\*1)?", frequency)
    if stated is None:
        raise Skipped(f"moe-layer-freq {frequency[:40]!r} is not priced")
    return min(int(stated.group(1)), layers)


def latent_of(row: Mapping[str, str]) -> Latent | None:
    """Return the widths of a row's latent attention, or None where it has another."""
    found = arguments(row)
    if "multi-latent-attention" not in found:
        return None
    return Latent(
        query_rank=_whole(found, "q-lora-rank"),
        key_rank=_whole(found, "kv-lora-rank"),
        key=_whole(found, "qk-head-dim"),
        position=_whole(found, "qk-pos-emb-head-dim"),
        value=_whole(found, "v-head-dim"),
    )


def expert_degrees(row: Mapping[str, str], tp: int) -> dict[str, Any]:
    """Return the options of `estimate` that say how experts lie; none without such parallelism."""
    degree = _whole(row, "ep", 1)
    if degree == 1:
        return {}
    shared = _whole(arguments(row), "expert-tensor-parallel-size", tp)
    return {"expert_parallel": degree, "expert_tensor_parallel": shared}
