"""The engine reference in Markdown, generated from the capabilities and options that each engine declares."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from weightlane.ckpt_engines.contract.capabilities import Capabilities
from weightlane.ckpt_engines.contract.engine import CheckpointEngine
from weightlane.ckpt_engines.registry import CheckpointEngineRegistry, EngineListing

_TITLE = """\
# Engine reference

<!-- Made by `weightlane engines --markdown --of weightlane`; a test holds it up to date. Edit the engines instead. -->

An engine is chosen by `checkpoint_engine.backend` and set up by `checkpoint_engine.options`. `weightlane engines` lists what is
installed, with the reason where an engine cannot run on this machine; `weightlane engines --markdown` prints this page for
every installed engine, those of other distributions included. How to write one:
[Writing an engine](../guides/writing-an-engine.md).
"""
_PRETENDED = (
    "on pretended devices, streams, events, memory and the order of operations, where a missing wait, a wrong device and memory"
    " that is reused too early are found"
)
_CPU = "on two cores of an x86-64 machine without a GPU (torch 2.13.0+cpu, 2026-11-25)"
_GPU = "on one H200 (torch 2.11.0+cu130, NCCL 2.28.9, 2026-11-28)"
EVIDENCE = {
    "gloo": (
        f"**Run** {_CPU}: the conformance suite; several senders; beside a default process group."
        " **Not run**: several machines, several network cards."
    ),
    "nccl": (
        f"**Run** {_CPU}: control connections, options and aborts that hang, without NCCL; {_PRETENDED}; {_GPU}: three"
        " quarters of the conformance suite, between processes that share a GPU over NCCL's sockets"
        " (`python -m benchmarks.gpu.one_gpu nccl`)."
        " **Not run**: a GPU for each rank, over NVLink or InfiniBand (`make gpu PARTS=multi`)."
    ),
    "hccl": (
        f"**Run** {_CPU}: as for `nccl`. **Not run**: HCCL itself, and torch_npu (`pytest -m npu`, two NPUs or more)."
    ),
    "shm": (
        f"**Run** {_CPU}: the conformance suite; kill -9 of either side in every phase; sender and receiver in user, mount, pid,"
        " network and IPC namespaces of their own."
    ),
    "cuda_ipc": (
        f"**Run** {_CPU}: the protocol, which is that of `shm`, over CPU memory; arguments of the driver's functions, once, by"
        f" hand, against a stand-in library that prints them; {_PRETENDED}; {_GPU}: the conformance suite, memory after a kill,"
        " and torch's stream sanitizer, between processes that share a GPU. **Not run**: two GPUs over NVLink or PCIe."
    ),
    "filesystem": (
        f"**Run** {_CPU}: the conformance suite on a local directory; `s3://` against an S3 API served by moto on loopback."
        " **Not run**: NFS; S3 of a cloud provider."
    ),
}
"""What was run of each built-in engine, where and when, and what was not. Update it together with the run."""
_WORDS = {
    "str": "text",
    "Path": "path",
    "bool": "true or false",
    "int": "integer",
    "float": "number",
    "Any": "any value",
}
"""Words of TOML for types of Python."""
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
    return markdown_table(("engine", "memory", "delivery", "also"), lines)


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
    options = [option_row(name, field) for name, field in engine.config_type.model_fields.items()]
    parts.append(markdown_table(("option", "type", "default", "meaning"), options) if options else "No options.\n")
    if row.distribution.split()[0] == "weightlane":
        parts.append(f"{EVIDENCE[row.name]}\n")
    return "\n".join(parts)


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, values)))


def _flags(capabilities: Capabilities) -> str:
    flags = (item.name for item in fields(capabilities) if getattr(capabilities, item.name) is True)
    return ", ".join(name.replace("_", " ") for name in flags if name != "channels")  # channels concern no user


def option_row(name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    """Return name, type, default and meaning of a key of a configuration, as Markdown."""
    default = field.get_default(call_default_factory=True)
    shown = "not set" if default is None else f"`{json.dumps(default, default=str)}`"
    return (
        f"`{name}`",
        _type_name(field.annotation),
        "required" if field.is_required() else shown,
        (field.description or "").replace("\n", " "),
    )


def _type_name(annotation: Any) -> str:
    """Return an annotation in the words of TOML: ``integer``, ``path or text``, ``list of number``. None is not said."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(each) for each in arguments if each is not type(None))
    if origin is not None:
        inside = ", ".join(_type_name(each) for each in arguments if each is not Ellipsis)
        kind = "list" if origin is tuple else origin.__name__
        return f"{kind} of {inside}" if inside else kind
    name = getattr(annotation, "__name__", str(annotation))
    return _WORDS.get(name, name)
