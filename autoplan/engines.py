"""Engines: the software that trains, as far as memory and time of a step depend on it.

autoplan emits modules for its own engine. The others exist so that runs of other software can be
priced: what their gradients are kept in, and which of their communication runs beside kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["AUTOPLAN", "ENGINES", "MEGATRON", "Engine", "LossKind", "engine_named"]

LossKind = Literal["torch", "in_place", "dtensor", "compiled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How the software that trains keeps gradients and communicates.

    Attributes:
        name: for messages and reports.
        has_gradient_buffer: gradients of the whole model lie in one buffer from the first step on
            and every backward adds to it; the parameters lie whole in the dtype of the computation
            and float32 copies belong to the optimizer. Otherwise as FSDP2 holds them.
        is_gradient_wide: gradients are kept and reduced in the dtype of stored parameters (float32)
            where the computation is in another one; otherwise in that of the computation.
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
)

_FSDP1 = replace(AUTOPLAN, name="fsdp1", copies_gathered=False, divides_reduced=True)

_MEGATRON_TE = replace(MEGATRON, name="megatron-te", keeps_stand_ins=True)

ENGINES = {
    "autoplan": AUTOPLAN,
    # torch's own FSDP2 and tensor parallelism, loss and model compiled apart or together.
    "fsdp2": replace(AUTOPLAN, name="fsdp2", loss="dtensor"),
    "fsdp2-compiled-loss": replace(AUTOPLAN, name="fsdp2-compiled-loss", loss="compiled"),
    "fsdp1": _FSDP1,
    "fsdp1-bf16": replace(_FSDP1, name="fsdp1-bf16", is_gradient_wide=False),
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
    # fp16 training before gradient buffers in float32, and DeepSpeed's ZeRO-1 in fp16.
    "megatron-fp16": replace(MEGATRON, name="megatron-fp16", is_gradient_wide=False),
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
