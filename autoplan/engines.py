"""Engines: the software that trains, as far as memory and time of a step depend on it.

autoplan emits modules for its own engine. The others exist so that runs of other software can be
priced: what their gradients are kept in, and which of their communication runs beside kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "AUTOPLAN",
    "ENGINES",
    "MEGATRON",
    "ContextExchange",
    "Engine",
    "LossKind",
    "engine_named",
]

LossKind = Literal["torch", "in_place", "fused", "cloned", "dtensor", "compiled"]
ContextExchange = Literal["ring", "all_gather", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How the software that trains keeps gradients and communicates.

    Attributes:
        name: for messages and reports.
        has_gradient_buffer: gradients of the whole model lie in one buffer from the first step on
            and every backward adds to it; the parameters lie whole in the dtype of the computation
            and float32 copies belong to the optimizer. Otherwise as FSDP2 holds them.
        is_gradient_wide: gradients are kept and reduced in the dtype of stored parameters (float32)
            where the computation is in another one; otherwise in that of the computation, and the
            optimizer steps on a copy in the stored dtype (Megatron-LM,
            `_copy_model_grads_to_main_grads`).
        overlaps_reduction: reductions of gradients run beside the backward.
        regathers_sequence: a column-parallel product under sequence parallelism keeps the slice of
            its input and gathers it again in backward (Korthikanti et al. 2022, section 4.2.2).
        is_foreach: the optimizer's step holds a temporary as large as the parameters it updates.
        copies_gathered: gathered parameters are copied out of the buffer of the collective (FSDP2,
            `foreach_all_gather_copy_out`).
        copies_reduced: gradients are copied, in the dtype of the reduction, into its buffer (FSDP2,
            `foreach_reduce`; FSDP1, `_cast_grad_to_reduce_dtype`).
        divides_reduced: gradients are divided by a kernel of its own (FSDP1, `_div_if_needed`).
        sends_slices: a pipeline boundary sends a slice per tensor-parallel rank and gathers it on
            the other side (Narayanan et al. 2021, section 4.1).
        fuses_gradients: products of blocks add their weight gradients to the buffer themselves;
            otherwise each is a tensor until it has been added.
        keeps_stand_ins: where they do, autograd still wants a gradient, and gets one tensor for all
            weights of a shape, which stays (Transformer Engine, `get_dummy_wgrad`).
        loss: implementation of the cross entropy, see `autoplan.losses`.
        is_flat: parameters and a rank's share of copies and states each lie in one tensor, but
            gradients do not (DeepSpeed; copies around collectives: `autoplan.flat_partitions`).
        output_buffers: logits of so many micro-batches stay on the last stage (DeepSpeed's
            `PipelineEngine`, `num_pipe_buffers`, at least 2).
        keeps_last_gathered: parameters of the last block stay gathered from forward to backward
            under ZeRO-3 (torchtitan, `apply_fsdp`).
        compiles_glue: where a model is compiled, so are embedding, head and loss; torchtitan
            compiles each block alone, and later the loss.
        steps_in_backward: every parameter is updated as soon as it has its gradient, which then
            goes (torch, `register_post_accumulate_grad_hook`; torchtune, `optimizer_in_bwd`).
        bucket_elements: gradients are reduced through a buffer of so many elements (DeepSpeed,
            `reduce_bucket_size`).
        live_elements: parameters of so many elements stay gathered under ZeRO-3 (DeepSpeed,
            `stage3_max_live_parameters` and `stage3_max_reuse_distance`).
        owns_whole_tensors: under ZeRO-1 a rank steps on whole parameters and broadcasts each one
            to the ranks that it shares the states with, and gradients are all-reduced over all
            data-parallel ranks (InternEvo, `HybridZeroOptimizer.broadcast_params`, and
            `_reduce_and_copy` where gradients are not partitioned).
        decomposes: gathers and reduce-scatters of sequence parallelism run in pieces beside the
            products that they feed or follow (`autoplan.decomposed`).
        reenters: checkpointing is reentrant: a region runs again in whole inside the backward, and
            its outputs and their gradients stay until its own backward ends (Megatron-LM and
            DeepSpeed, `CheckpointFunction.backward`).
        holds_attention: what attention computes stays until the product after it has run, see
            `autoplan.frames`.
        accumulates_whole: gradients stay whole between micro-batches, and those of frozen weights
            are there too: FSDP1 under `no_sync`, which does not reduce, with flat parameters that
            mix frozen and trained ones (torch, notes of `FullyShardedDataParallel` on freezing).
        context_exchange: how attention reaches keys of other ranks under context parallelism, see
            `autoplan.context_parallel`.
        repeats_keys: there are as many heads of keys and values as of queries when they are
            exchanged (torchtitan's Llama, `repeat_kv`).
    """

    name: str
    has_gradient_buffer: bool = False
    is_gradient_wide: bool = True
    overlaps_reduction: bool = True
    regathers_sequence: bool = False
    is_foreach: bool | None = None
    copies_gathered: bool = True
    copies_reduced: bool = True
    divides_reduced: bool = False
    sends_slices: bool = False
    fuses_gradients: bool = True
    keeps_stand_ins: bool = False
    loss: LossKind = "torch"
    is_flat: bool = False
    output_buffers: int = 0
    keeps_last_gathered: bool = False
    compiles_glue: bool = True
    steps_in_backward: bool = False
    bucket_elements: int = 0
    live_elements: int = 0
    owns_whole_tensors: bool = False
    decomposes: bool = False
    accumulates_whole: bool = False
    reenters: bool = False
    holds_attention: bool = False
    context_exchange: ContextExchange = "all_gather"
    repeats_keys: bool = False


AUTOPLAN = Engine(name="autoplan")

# Megatron-LM's DistributedDataParallel with gradient accumulation fusion and a fused Adam: float32
# gradients in contiguous buffers; `--overlap-grad-reduce` is off unless asked for.
MEGATRON = Engine(
    name="megatron",
    has_gradient_buffer=True,
    overlaps_reduction=False,
    regathers_sequence=True,
    is_foreach=False,
    copies_gathered=False,
    copies_reduced=False,
    sends_slices=True,
    loss="in_place",
    reenters=True,
    context_exchange="ring",
)

_FSDP1 = replace(AUTOPLAN, name="fsdp1", copies_gathered=False, divides_reduced=True)

_TORCHTITAN = replace(
    AUTOPLAN,
    name="torchtitan",
    loss="dtensor",
    keeps_last_gathered=True,
    compiles_glue=False,
    repeats_keys=True,
)
_MEGATRON_TE = replace(MEGATRON, name="megatron-te", keeps_stand_ins=True)
_MEGATRON_FP16 = replace(
    MEGATRON,
    name="megatron-fp16",
    is_gradient_wide=False,
    fuses_gradients=False,
    holds_attention=True,
)

ENGINES = {
    "autoplan": AUTOPLAN,
    "fsdp1": _FSDP1,
    "fsdp1-bf16": replace(_FSDP1, name="fsdp1-bf16", is_gradient_wide=False),
    # LitGPT on several devices: Fabric's FSDPStrategy wraps blocks, adapters and all, and
    # `no_backward_sync` lets it accumulate.
    "litgpt": replace(_FSDP1, name="litgpt", is_foreach=False, accumulates_whole=True),
    "torchtitan": _TORCHTITAN,
    "torchtitan-compiled-loss": replace(
        _TORCHTITAN, name="torchtitan-compiled-loss", loss="compiled", compiles_glue=True
    ),
    "megatron": MEGATRON,
    "megatron-overlap": replace(MEGATRON, name="megatron-overlap", overlaps_reduction=True),
    # Transformer Engine's modules, and with `--no-gradient-accumulation-fusion`.
    "megatron-te": _MEGATRON_TE,
    "megatron-te-overlap": replace(
        _MEGATRON_TE, name="megatron-te-overlap", overlaps_reduction=True
    ),
    "megatron-unfused-overlap": replace(
        MEGATRON, name="megatron-unfused-overlap", overlaps_reduction=True, fuses_gradients=False
    ),
    # fp16 training before gradient buffers in float32.
    "megatron-fp16": _MEGATRON_FP16,
    # DeepSpeed's pipeline engine and ZeRO-1 around Megatron-LM's layers.
    "megatron-deepspeed": replace(
        _MEGATRON_FP16, name="megatron-deepspeed", is_flat=True, loss="cloned", output_buffers=2
    ),
    # DeepSpeed's ZeRO around a torch model: 16-bit gradients and their partition, fused Adam, and
    # the buckets of its default configuration.
    "deepspeed": replace(
        AUTOPLAN,
        name="deepspeed",
        is_gradient_wide=False,
        is_foreach=False,
        copies_gathered=False,
        bucket_elements=500_000_000,
        live_elements=1_000_000_000,
    ),
    # InternEvo's HybridZeroOptimizer: parameters, gradients and their reduction in 16 bits.
    "internevo": replace(
        _MEGATRON_FP16,
        name="internevo",
        overlaps_reduction=True,
        regathers_sequence=False,
        copies_reduced=True,
        owns_whole_tensors=True,
        sends_slices=False,
        loss="torch",
        holds_attention=False,
    ),
}


def engine_named(engine: str | Engine) -> Engine:
    """Return an engine or the one of that name.

    Raises:
        ValueError: says which there are.
    """
    if isinstance(engine, Engine):
        return engine
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}; allowed are {', '.join(ENGINES)} or an Engine")
    return ENGINES[engine]
