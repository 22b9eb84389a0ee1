"""The errors a caller may see. Each message says what was got, what is allowed, and what to do."""

from __future__ import annotations

__all__ = [
    "AutoplanError",
    "EmitError",
    "InfeasibleError",
    "PlanError",
    "ProfileError",
    "SearchLimitError",
    "TraceError",
]


class AutoplanError(Exception):
    """Base of every error that autoplan raises on purpose."""


class TraceError(AutoplanError):
    """The model could not be captured; names the module, the line and the reason."""


class ProfileError(AutoplanError):
    """A device or link profile is missing, malformed, or was measured on something else."""


class InfeasibleError(AutoplanError):
    """No plan fits; states the need, the capacity, the category that dominates and remedies.

    Attributes:
        need_bytes: least memory of a device that a plan was found for.
        capacity_bytes: memory of a device.
        category: the largest part of the need.
        remedies: changes that were each planned for and fit, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        need_bytes: int = 0,
        capacity_bytes: int = 0,
        category: str = "",
        remedies: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.capacity_bytes = capacity_bytes
        self.category = category
        self.remedies = remedies


class SearchLimitError(AutoplanError):
    """The search ended by its limit before it found any plan."""


class PlanError(AutoplanError):
    """A plan is malformed, breaks a numbered rule, or belongs to another model or world size."""


class EmitError(AutoplanError):
    """A plan could not be turned into a running module."""
