"""JSON for frozen dataclasses: one encoder and one decoder, driven by the type hints.

The decoder is strict: an unknown or missing key, or a value of the wrong type, raises `ValueError`
with the path of the key, so that a hand-written file is told where it is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union, cast

__all__ = ["decode", "dumps", "encode", "loads"]

T = TypeVar("T")


def encode(value: object) -> Any:
    """Return `value` as plain JSON types; dataclasses become objects, tuples become arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in _json_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a {type(value).__name__} has no JSON form")


def decode(kind: type[T], value: Any, path: str = "") -> T:
    """Return `value` (plain JSON types) as an instance of `kind`.

    Args:
        kind: a frozen dataclass, or a type built from those, tuple, dict, unions, scalars.
        value: what `json.loads` gave.
        path: where `value` stands in its document; used in messages.

    Raises:
        ValueError: names the key that is unknown, missing or of the wrong type.
    """
    return cast(T, _decode(kind, value, path))


def dumps(value: object) -> str:
    """Return readable JSON text of a dataclass value."""
    return json.dumps(encode(value), indent=2)


def loads(kind: type[T], text: str, path: str = "") -> T:
    """Return an instance of `kind` from JSON text; errors name the key."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path or 'input'}: not JSON: {error}") from None
    return decode(kind, document, path)


def _json_fields(value: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass, less those marked `metadata={"json": False}`."""
    return [f for f in dataclasses.fields(value) if f.metadata.get("json", True)]


def _fail(path: str, expected: str, value: Any) -> typing.NoReturn:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    raise ValueError(f"{path or 'document'}: expected {expected}, got {shown}")


def _decode(kind: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            _fail(path, "one of " + ", ".join(map(repr, typing.get_args(kind))), value)
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(kind), value, path)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, path)
    if origin in (dict, Mapping):
        return _decode_mapping(typing.get_args(kind), value, path)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, path)
    return _decode_scalar(kind, value, path)


def _decode_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is type(None) and value is None:
        return None
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    return _fail(path, getattr(kind, "__name__", str(kind)), value)


def _decode_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors = []
    for option in (o for o in options if o is not type(None)):
        try:
            return _decode(option, value, path)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(errors[0] if len(errors) == 1 else " or ".join(errors))


def _decode_tuple(items: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        _fail(path, "an array", value)
    if len(items) == 2 and items[1] is ...:
        return tuple(_decode(items[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(items) != len(value):
        _fail(path, f"an array of {len(items)}", value)
    return tuple(
        _decode(kind, item, f"{path}[{i}]")
        for i, (kind, item) in enumerate(zip(items, value, strict=True))
    )


def _decode_mapping(items: tuple[Any, ...], value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail(path, "an object", value)
    return {key: _decode(items[1], item, f"{path}.{key}") for key, item in value.items()}


def _decode_dataclass(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        _fail(path, f"an object ({kind.__name__})", value)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in _json_fields(kind)}
    where = f"{path}." if path else ""
    for key in value:
        if key not in fields:
            raise ValueError(f"{where}{key}: unknown key; allowed are {', '.join(fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _decode(hints[name], value[name], where + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}{name}: missing key")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{path or kind.__name__}: {error}") from None
