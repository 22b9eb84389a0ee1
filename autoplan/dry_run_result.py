"""What checks of a plan found; no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DryRun", "LayoutNumerics", "TwinRun"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutNumerics:
    """How a layout of a block class compares with the whole block.

    Attributes:
        block: name of the class.
        layout: name of the layout in the plan.
        degree: tensor-parallel ranks.
        form: what was run: the block `as captured`, `smaller` (all of it, on smaller tensors), its
            sharded ops `op by op`, on smaller tensors too, or `not run`.
        error: largest difference over the largest entry, of outputs and gradients; None: not run.
        reason: why it or some ops were not run, or which tensor differs; empty where it is right.
        is_wrong: it was run, and differs.
        blamed: the ops, with their axes, that a wrong layout should not slice so.
    """

    block: str
    layout: str
    degree: int
    form: str = "as captured"
    error: float | None
    reason: str
    is_wrong: bool
    blamed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRun:
    """How a step of a small twin under the plan's decisions compares with a single device's.

    Attributes:
        mesh: degrees of the twin's processes.
        loss_error: relative.
        gradient_error: of the worst gradient, relative to its largest entry.
        worst: its parameter.
        tolerance: of both; larger where the model casts to a smaller dtype inside.
    """

    mesh: str
    loss_error: float
    gradient_error: float
    worst: str
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Return whether the twin computes what the single device does."""
        return self.loss_error <= self.tolerance and self.gradient_error <= self.tolerance
