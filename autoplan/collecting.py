"""When Python looks for cycles of objects that nobody has any more.

With torch and transformers loaded there are half a million objects that stay. Looking at all of
them takes a tenth of a second each time, which imports and traces, that make many more, ask for
again and again; and a forked process that looks at them copies the memory that they lie in.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collections", "without_what_stays"]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Look for no cycles meanwhile: for what makes many objects that stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def without_what_stays() -> Iterator[None]:
    """Look for cycles only among the objects that are made meanwhile, also in forked processes.

    Where the caller froze objects already, nothing is changed.
    """
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
