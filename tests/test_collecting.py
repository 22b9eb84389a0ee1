"""Cycles are looked for as before once a trace or a search is over."""

from __future__ import annotations

import gc
import weakref

import pytest

from autoplan.collecting import without_collections, without_what_stays


class Node:
    def __init__(self) -> None:
        self.own = self


def fails(*, frozen: bool) -> None:
    with without_what_stays() if frozen else without_collections():
        raise KeyError


def test_collections_are_on_again_also_after_an_error_and_inside_another() -> None:
    with without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError):
        fails(frozen=False)
    assert gc.isenabled()


def test_who_switched_collections_off_finds_them_off() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_only_new_cycles_are_found_meanwhile_and_all_of_them_afterwards() -> None:
    before = weakref.ref(Node())
    with without_what_stays():
        meanwhile = weakref.ref(Node())
        gc.collect()
        assert meanwhile() is None
        assert before() is not None
    gc.collect()
    assert before() is None
    with pytest.raises(KeyError):
        fails(frozen=True)
    assert gc.get_freeze_count() == 0


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with without_what_stays():
            pass
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()
