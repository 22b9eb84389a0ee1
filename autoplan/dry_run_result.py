"""What a dry run of a rank found; no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DryRun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a rank would hold.

    Attributes:
        rank: of the plan's processes.
        stage: pipeline stage of the rank.
        measured_bytes: most bytes of tensors alive in a step of the dry run.
        predicted_bytes: the plan's peak of this stage, without its reserve.
    """

    rank: int
    stage: int
    measured_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        """Return predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0
