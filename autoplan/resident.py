"""Bytes of parameters, gradients and optimizer state that are there all the time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoplan.engines import AUTOPLAN, Engine
from autoplan.optimizers import Optimizer
from autoplan.settings import Setting
from autoplan.stage_costs import GroupBytes

__all__ = [
    "REDUCED_TOGETHER_BYTES",
    "StaticBytes",
    "live_bytes",
    "reduced_bytes",
    "shards_of",
    "static_bytes",
    "uses_fsdp",
]

# `sharders.GradientReducer` reduces gradients below this size together, in a buffer.
REDUCED_TOGETHER_BYTES = 4 << 20

_COMPUTED_BYTES = 2  # an element of the 16-bit dtypes that DeepSpeed computes in


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBytes:
    """What a group of parameters holds all the time, by category."""

    parameters: int
    gradients: int
    optimizer: int


def uses_fsdp(setting: Setting, is_mixed: bool) -> bool:
    """Return whether parameters are gathered: ZeRO 1 to 3, another stored dtype, or from the host.

    ZeRO 0 holds whole parameters only once and reduces gradients in place.
    """
    is_sharded = setting.dp > 1 and setting.zero_stage >= 1
    return is_sharded or is_mixed or setting.offload != "none"


def live_bytes(engine: Engine, setting: Setting, gathered: Iterable[int]) -> int:
    """Return the bytes of parameters that DeepSpeed's ZeRO-3 keeps gathered, running ones included.

    Those of `stage3_max_live_parameters`, of which a prefetch must not go beyond
    (`runtime/zero/partitioned_param_coordinator.py`); 0 elsewhere.

    Args:
        engine: the software that trains.
        setting: its ZeRO stage.
        gathered: bytes of every group of parameters.
    """
    if setting.zero_stage != 3:
        return 0
    return min(engine.live_elements * _COMPUTED_BYTES, sum(gathered))


def reduced_bytes(group: GroupBytes, engine: Engine, *, is_mixed: bool) -> int:
    """Return the bytes of what a group's gradients are copied into to be reduced together.

    DeepSpeed has a bucket for that, which stands (`stage_bytes.standing_bytes`).
    """
    if engine.bucket_elements:
        return 0
    return group.trained if is_mixed and engine.is_gradient_wide else group.gathered_grads


def shards_of(group: GroupBytes, setting: Setting) -> int:
    """Return into how many parts the optimizer states of a group are divided."""
    return group.copies if group.copies and setting.zero_stage >= 1 else setting.shards


def static_bytes(
    group: GroupBytes, setting: Setting, optimizer: Optimizer, engine: Engine = AUTOPLAN
) -> StaticBytes:
    """Return the resident bytes of a group under a ZeRO stage; shares round up.

    Shards on the host take nothing of the device.

    With a gradient buffer, parameters lie whole in the dtype of the computation and gradients whole
    beside them; a copy in the stored dtype, where that is another, belongs to the optimizer:
    2 + 4 bytes per bfloat16 parameter and 12 / dp of ZeRO-1 (Megatron-LM, distributed optimizer).
    """
    if setting.offload != "none":
        return StaticBytes(parameters=0, gradients=0, optimizer=0)
    if group.experts is not None:
        rest, experts = (static_bytes(part, setting, optimizer, engine) for part in group.parts)
        return StaticBytes(
            parameters=rest.parameters + experts.parameters,
            gradients=rest.gradients + experts.gradients,
            optimizer=rest.optimizer + experts.optimizer,
        )
    shards = shards_of(group, setting)
    states = int(group.trained * optimizer.state_bytes_per_byte)
    if engine.has_gradient_buffer:
        copy = group.trained if group.stored > group.gathered else 0
        return StaticBytes(
            parameters=min(group.stored, group.gathered + group.stored - group.trained),
            gradients=group.trained if engine.is_gradient_wide else group.gathered_grads,
            optimizer=-(-(states + copy) // shards),
        )
    return StaticBytes(
        parameters=-(-group.stored // shards),
        gradients=-(-group.trained // shards),
        optimizer=-(-states // shards),
    )
