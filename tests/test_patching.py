"""Attributes of others are replaced for a while, and all are what they were afterwards."""

from __future__ import annotations

import pytest

from autoplan.patching import replaced


class Parent:
    def name(self) -> str:
        return "parent"


class Child(Parent):
    size = 1


def use_and_fail() -> None:
    with replaced(Child, size=2, name=lambda self: "other", missing=3):
        assert (Child.size, Child().name()) == (2, "other")
        assert not hasattr(Child, "missing")
        raise KeyError


def test_replaced_attributes_come_back_also_inherited_ones_and_after_an_error() -> None:
    with pytest.raises(KeyError):
        use_and_fail()
    assert (Child.size, Child().name()) == (1, "parent")
    assert "name" not in vars(Child)
