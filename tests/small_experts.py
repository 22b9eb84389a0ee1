"""Small decoders with experts, and how Megatron-LM would train one, for tests of prices."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

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


def mixtral() -> tuple[MixtralForCausalLM, dict[str, torch.Tensor]]:
    """Return a model of transformers of the same width, and a batch of one row."""
    config = MixtralConfig(
        hidden_size=SHAPE.hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=COUNT,
        vocab_size=SHAPE.vocab,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(1, SHAPE.seq, dtype=torch.int64, device="meta")
    return model, {"input_ids": ids, "labels": ids}
