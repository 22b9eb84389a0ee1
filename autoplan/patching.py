"""Replace attributes of torch for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give a module or class other attributes, and put back its own at the end.

    Private names differ between versions of torch: what `owner` does not have is left out.
    """
    known = {name: value for name, value in attributes.items() if hasattr(owner, name)}
    own = {name: vars(owner)[name] for name in known if name in vars(owner)}
    for name, value in known.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in known:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)  # inherited
