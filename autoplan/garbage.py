"""What is there before a search is not looked through for garbage during it.

The imports of torch and transformers alone make some 600,000 objects that stay. A search makes so
many of its own that Python goes through all objects several times, for a tenth of its time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["spared"]


@contextmanager
def spared() -> Iterator[None]:
    """Leave what is there already out of collections of garbage for a while.

    Nothing is done where the caller, or one around it, does so already (`gc.freeze`).
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
