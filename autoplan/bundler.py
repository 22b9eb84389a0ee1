"""Copy functions and classes of this package, with all that they need of it, into one text.

What is copied is the source as it stands, without imports of the package, so that a script made of
it runs where the package is not installed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

from autoplan.errors import EmitError

__all__ = ["Bundle", "bundle"]

_PACKAGE = "autoplan."


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Copied source.

    Attributes:
        imports: import statements of other packages that it needs.
        definitions: source of each function, class or constant, in an order in which they run.
        names: the names that it defines.
        typed: names that stand in annotations only, and are not copied.
    """

    imports: tuple[str, ...]
    definitions: tuple[str, ...]
    names: frozenset[str]
    typed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """A module of the package by the names at its top level."""

    module: ModuleType
    text: str
    definitions: Mapping[str, ast.stmt]
    own: Mapping[str, tuple[str, str]]
    modules: Mapping[str, str]
    foreign: Mapping[str, str]


def bundle(roots: Iterable[object], *, without: Iterable[str] = ()) -> Bundle:
    """Return the source of functions and classes with all that they need of this package.

    Args:
        roots: functions and classes of the package.
        without: names of methods that are left out, with what only they need.

    Raises:
        EmitError: two things of one name are needed.
    """
    collector = _Collector(frozenset(without))
    for root in roots:
        collector.add(root.__module__, root.__name__)  # type: ignore[attr-defined]
    return Bundle(
        imports=tuple(sorted(collector.imports)),
        definitions=tuple(collector.texts),
        names=frozenset(collector.origin),
        typed=tuple(sorted(collector.typed - set(collector.origin))),
    )


@dataclass(slots=True)
class _Collector:
    without: frozenset[str]
    imports: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)
    typed: set[str] = field(default_factory=set)

    def add(self, module: str, name: str) -> None:
        """Add a definition after what it needs."""
        if name in self.origin:
            if self.origin[name] != module:
                raise EmitError(
                    f"a script would need two things named {name}: of {module} and of "
                    f"{self.origin[name]}"
                )
            return
        source = _source(module)
        if name in source.own:
            self.add(*source.own[name])
            return
        if name not in source.definitions:
            raise EmitError(f"{module} defines no {name}, which a script needs")
        self.origin[name] = module
        node = source.definitions[name]
        dropped = [
            part
            for part in getattr(node, "body", ())
            if isinstance(node, ast.ClassDef) and getattr(part, "name", "") in self.without
        ]
        text = _text(source, node, dropped)
        for used in _names_used(node, dropped):
            text = self._need(source, used, text)
        self._note_types(source, node, dropped)
        self.texts.append(text)

    def _note_types(self, source: _Source, node: ast.stmt, dropped: list[ast.stmt]) -> None:
        """Note what annotations name: other packages are imported, the rest is told checkers."""
        for used in _names_used(node, dropped, with_types=True):
            head = used.partition(".")[0]
            if head in source.foreign:
                self.imports.add(source.foreign[head])
            elif head in source.own or head in source.definitions:
                self.typed.add(head)

    def _need(self, source: _Source, used: str, text: str) -> str:
        """Add what a name stands for; returns the text with names of modules cut off."""
        head, _, attribute = used.partition(".")
        if head in source.modules and attribute:
            self.add(source.modules[head], attribute)
            return re.sub(rf"\b{head}\.{attribute}\b", attribute, text)
        if head in source.own:
            self.add(*source.own[head])
        elif head in source.definitions:
            self.add(source.module.__name__, head)
        elif head in source.foreign:
            self.imports.add(source.foreign[head])
        return text


@cache
def _source(name: str) -> _Source:
    module = importlib.import_module(name)
    text = inspect.getsource(module)
    definitions: dict[str, ast.stmt] = {}
    own: dict[str, tuple[str, str]] = {}
    modules: dict[str, str] = {}
    foreign: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    definitions[target.id] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                shown = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                foreign[alias.asname or alias.name.partition(".")[0]] = shown
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                shown = alias.name + (f" as {alias.asname}" if alias.asname else "")
                bound = alias.asname or alias.name
                if node.module == "autoplan":
                    modules[bound] = _PACKAGE + alias.name
                elif (node.module or "").startswith(_PACKAGE):
                    own[bound] = (str(node.module), alias.name)
                else:
                    foreign[bound] = f"from {node.module} import {shown}"
    return _Source(module, text, definitions, own, modules, foreign)


def _text(source: _Source, node: ast.stmt, dropped: Iterable[ast.stmt]) -> str:
    """Return the source of a definition with its decorators, less some methods."""
    lines = source.text.splitlines()
    gone = {line for part in dropped for line in range(_first(part), (part.end_lineno or 0) + 1)}
    kept = [lines[i - 1] for i in range(_first(node), (node.end_lineno or 0) + 1) if i not in gone]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept))


def _first(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min(node.lineno, *(d.lineno for d in decorators)) if decorators else node.lineno


def _names_used(
    node: ast.AST, dropped: Iterable[ast.stmt], *, with_types: bool = False
) -> list[str]:
    """Return the names that run, `module.attribute` as such; annotations do not run."""
    found: dict[str, None] = {}
    skipped = set(map(id, dropped))

    def visit(here: ast.AST) -> None:
        if id(here) in skipped:
            return
        if isinstance(here, ast.Attribute) and isinstance(here.value, ast.Name):
            found[f"{here.value.id}.{here.attr}"] = None
        elif isinstance(here, ast.Name):
            found[here.id] = None
        for child in ast.iter_child_nodes(here) if with_types else _running(here):
            visit(child)

    visit(node)
    return list(found)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
