"""Models of timm, where it is installed; what it loads images with need not be.

timm imports torchvision and PIL for its data loading, and one class that its layers are compared
with. While timm is imported, names of those that are not there are empty classes; nothing is left
of them for other libraries.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

__all__ = ["TIMM", "timm_model"]

TIMM: Mapping[str, Mapping[str, Any]] = {
    "resnet50": {"layers": (1, 2, 1, 1), "channels": (8, 8, 16, 16), "stem_width": 8},
    "mixer_b16_224": {"img_size": 64},
    "convnext_tiny": {"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)},
    "deit_base_patch16_224": {"embed_dim": 32, "depth": 3, "num_heads": 4, "img_size": 64},
    "efficientnet_b0": {},
    "swin_tiny_patch4_window7_224": {
        "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "img_size": 64,
    },
    "mobilenetv3_large_100": {},
    "regnety_016": {},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2)},
}  # fmt: skip
"""Names in timm, and what makes each smaller; images are smaller too."""

_LOADERS = ("torchvision", "PIL")


class _Nothing(type):
    """A class with any attribute, each again such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports any part of some packages as a module of empty classes."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Nothing(name, (), {})

        vars(module).update(__getattr__=attribute, __version__="0.0")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    absent = [name for name in _LOADERS if importlib.util.find_spec(name) is None]
    finder = _Absent(absent)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in absent]:
            del sys.modules[name]


def timm_model(name: str, *, is_small: bool) -> nn.Module:
    """Return a model of timm by its name there, in its default or a small configuration."""
    with _stand_ins():
        timm: Any = importlib.import_module("timm")

    options = {**TIMM[name], "num_classes": 10} if is_small else {}
    model: nn.Module = timm.create_model(name, pretrained=False, **options)
    return model
