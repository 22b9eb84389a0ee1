"""The shipped profiles by name, and profiles in files."""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from autoplan import codec
from autoplan.errors import ProfileError
from autoplan.profiles.device import DeviceProfile

__all__ = ["ALIASES", "dump_profile", "list_profiles", "load_profile", "save_profile"]

ALIASES = {
    "a100": "a100_sxm_80gb",
    "a100_40gb": "a100_sxm_40gb",
    "a100_80gb": "a100_sxm_80gb",
    "b200": "b200_sxm",
    "h100": "h100_sxm_80gb",
    "h200": "h200_sxm",
    "v100": "v100_sxm_32gb",
    "4090": "rtx_4090",
}


def list_profiles() -> tuple[str, ...]:
    """Return the names of the shipped profiles, sorted; aliases are in `ALIASES`."""
    files = resources.files("autoplan.profiles").joinpath("data").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """Return a shipped profile by name or alias, or the profile in a file that ends in `.json`.

    Raises:
        ProfileError: if there is no such name or file (says what exists), or if the file is
            malformed (names the file and the key).
    """
    text = str(name_or_path)
    if text.endswith(".json"):
        return _read(Path(text))
    names = list_profiles()
    key = text.lower().replace("-", "_")
    name = ALIASES.get(key, key)
    if name not in names:
        close = difflib.get_close_matches(key, (*names, *ALIASES), n=1, cutoff=0.4)
        hint = f": did you mean {close[0]!r}?" if close else "."
        raise ProfileError(
            f"no profile named {text!r}{hint} There are {', '.join(names)}, the aliases "
            f"{', '.join(ALIASES)}, or give a path that ends in .json"
        )
    return _load_shipped(name)


def save_profile(profile: DeviceProfile, path: str | Path) -> None:
    """Write a profile as JSON; `load_profile(path)` gives it back."""
    Path(path).write_text(dump_profile(profile), encoding="utf-8")


def dump_profile(profile: DeviceProfile) -> str:
    """Return a profile as JSON text with one table row a line."""
    return _format(codec.encode(profile), "") + "\n"


@lru_cache(maxsize=64)
def _load_shipped(name: str) -> DeviceProfile:
    file = resources.files("autoplan.profiles").joinpath("data", f"{name}.json")
    return _parse(file.read_text(encoding="utf-8"), f"{name}.json")


def _read(path: Path) -> DeviceProfile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the profile {path}: {error}") from None
    return _parse(text, str(path))


def _parse(text: str, where: str) -> DeviceProfile:
    try:
        return codec.loads(DeviceProfile, text, where)
    except ValueError as error:
        raise ProfileError(f"malformed profile: {error}") from None


def _format(value: Any, indent: str) -> str:
    deeper = indent + " "
    if isinstance(value, dict) and value:
        items = (f"{deeper}{json.dumps(k)}: {_format(v, deeper)}" for k, v in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
        items = (deeper + _format(item, deeper) for item in value)
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value)
