"""Seconds that the host takes to run a step's Python and dispatch, apart from its kernels.

They are single measured numbers of a `DeviceProfile` (`measurements`, names `host.*.seconds`). A
profile without them says nothing about the host, and then nothing is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

__all__ = ["HostSeconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSeconds:
    """What the host takes; every number in seconds, 0 where it was not measured.

    Attributes:
        op_forward: dispatch of one op with gradients, a kernel of no size included.
        op_backward: of its backward, likewise.
        region: a recomputed region, forward and backward, beyond its ops.
        marked_op: an op in a region that keeps some results, in one run, beyond `op_forward`.
        optimizer_tensor: the optimizer's step of one parameter of no size.
        sharded_block: hooks of FSDP around a block, forward and backward, beyond collectives.
        gather, reduce: one all-gather or one reduction of FSDP beyond the collective itself.
        pipeline_action: a forward or a backward of a pipeline stage, beyond ops and transfers.
    """

    op_forward: float = 0.0
    op_backward: float = 0.0
    region: float = 0.0
    marked_op: float = 0.0
    optimizer_tensor: float = 0.0
    sharded_block: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    pipeline_action: float = 0.0

    @classmethod
    def of(cls, measurements: Mapping[str, float]) -> HostSeconds:
        """Return the numbers that a profile's measurements have."""
        names = {field.name: f"host.{field.name}.seconds" for field in fields(cls)}
        return cls(
            **{key: measurements[name] for key, name in names.items() if name in measurements}
        )
