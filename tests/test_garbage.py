"""What is there before a search is left out of collections of garbage until it ends."""

from __future__ import annotations

import gc
import weakref

import pytest

from autoplan.garbage import spared


class Knot:
    """Something that only a collection of garbage frees."""

    def __init__(self) -> None:
        self.own = self


def test_what_is_there_before_is_looked_through_again_after() -> None:
    knot = weakref.ref(Knot())
    with spared():
        gc.collect()
        assert knot() is not None
        own = weakref.ref(Knot())
        gc.collect()
        assert own() is None
    gc.collect()
    assert knot() is None
    assert gc.get_freeze_count() == 0


def test_an_error_ends_it_and_what_others_froze_stays_frozen() -> None:
    with pytest.raises(ValueError, match="within"), spared():
        raise ValueError("within")
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        with spared():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
