"""The engine reference in Markdown, generated from the capabilities and options that each engine declares."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from weightlane.ckpt_engines.contract.capabilities import Capabilities
from weightlane.ckpt_engines.contract.engine import CheckpointEngine
from weightlane.ckpt_engines.registry import CheckpointEngineRegistry, EngineListing

from .evidence import EVIDENCE

_TITLE = """\
# Engine reference

<!-- Made by `weightlane engines --markdown --of weightlane`; a test holds it up to date. Edit the engines instead. -->

An engine is chosen by `checkpoint_engine.backend` and set up by `checkpoint_engine.options`. `weightlane engines` lists what is
installed, with the reason where an engine cannot run on this machine; `weightlane engines --markdown` prints this page for
every installed engine, those of other distributions included. How to write one:
[Writing an engine](../guides/writing-an-engine.md).
"""
_MEANINGS = {
    "persistent": "buckets outlive the sender's process",
    "elastic": "receivers may join and leave without a new connection of the others",
    "same_host_only": "both sides on one host",
    "collective": "all members of a connection form one communicator",
    "views": "receivers can look at weights in the sender's memory instead of copying them first",
}


def engine_reference(distribution: str = "") -> str:
    """Return the page with every installed engine, or with those that one `distribution` registers."""
    registry = CheckpointEngineRegistry()
    rows = [row for row in registry.list() if not distribution or row.distribution.split()[0] == distribution]
    sections = [_TITLE, _overview(rows)]
    for row in rows:
        if row.capabilities is None:  # importing it again might hang
            sections.append(f"## {row.name}\n\nOf {row.distribution}; cannot be loaded: {row.unavailable}\n")
        else:
            sections.append(_section(row, registry.engine_class(row.name)))
    return "\n".join(sections)


def _overview(rows: Iterable[EngineListing]) -> str:
    lines = []
    for row in rows:
        if row.capabilities is not None:
            facts = (_names(row.capabilities.devices), _names(row.capabilities.delivery), _flags(row.capabilities))
            lines.append((f"[{row.name}](#{row.name})", *facts))
    return _table(("engine", "memory", "delivery", "also"), lines)


def _section(row: EngineListing, engine: type[CheckpointEngine]) -> str:
    parts = [f"## {row.name}\n"]
    if row.distribution.split()[0] != "weightlane":
        parts.append(f"Of {row.distribution.split()[0]}.\n")
    parts.append(f"{inspect.getdoc(engine) or ''}\n")
    declared = [
        f"`{item.name}`: {_MEANINGS[item.name]}"
        for item in fields(Capabilities)
        if item.name in _MEANINGS and getattr(engine.capabilities, item.name)
    ]
    if declared:
        parts.append(f"Declares {'; '.join(declared)}.\n")
    options = [
        (f"`{name}`", _type(field.annotation), _default(field), field.description or "")
        for name, field in engine.config_type.model_fields.items()
    ]
    parts.append(_table(("option", "type", "default", "meaning"), options) if options else "No options.\n")
    if evidence := EVIDENCE.get(row.name, ()) if row.distribution.split()[0] == "weightlane" else ():
        lines = [(item.what, f"**{item.result}**", item.date, item.device) for item in evidence]
        parts.append(_table(("what", "result", "date", "device"), lines))
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, values)))


def _flags(capabilities: Capabilities) -> str:
    flags = (item.name for item in fields(capabilities) if getattr(capabilities, item.name) is True)
    return ", ".join(name.replace("_", " ") for name in flags if name != "channels")  # channels concern no user


def _type(annotation: Any) -> str:
    """Return an annotation as text: ``int``, ``float or none``, ``'a' or 'b'``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(f"`{argument!r}`" for argument in arguments)
    if origin is not None:
        return f"{origin.__name__} of {', '.join(_type(argument) for argument in arguments)}"
    if annotation is type(None):
        return "none"
    return "any" if annotation is Any else str(getattr(annotation, "__name__", annotation))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return f"`{json.dumps(value, default=str)}`"
