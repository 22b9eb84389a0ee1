"""A small decoder with experts, and how Megatron-LM would train it, for tests of prices."""

from __future__ import annotations

from typing import Any

from benchmarks.published_experts import Experts
from benchmarks.published_models import Shape

COUNT, CHOSEN = 8, 2
SHAPE = Shape(
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=4,
    ffn=256,
    vocab=512,
    seq=128,
    norm="rms",
    position="rotary",
    activation="swiglu",
    is_tied=False,
    has_bias=False,
    kernels="megatron",
    experts=Experts(count=COUNT, chosen=CHOSEN, ffn=128, shared_ffn=32, dense_layers=2),
)
MEGATRON: dict[str, Any] = {
    "engine": "megatron-te",
    "zero_stage": 1,
    "mixed_precision": "bfloat16",
    "tensor_layout": "megatron",
    "stage_ends": "blocks",
    "global_batch_size": 32,
}
