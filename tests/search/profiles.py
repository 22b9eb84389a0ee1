"""The Hypothesis settings of the search tests: the same examples in every run."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["few", "many"]

settings.register_profile("search", derandomize=True, deadline=None)
few = settings(settings.get_profile("search"), max_examples=20)
many = settings(settings.get_profile("search"), max_examples=60)
