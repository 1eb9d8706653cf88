"""Configuration files: validation of TOML by pydantic models, with readable errors, and printing with descriptions."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from weightlane.ckpt_engines import ConfigError

from .toml_file import apply_setting, read_toml

_PART = "configuration"
FILLED_IN = ("rollout.adapter", "rollout.sleeps", "rollout.routed_experts", "trainer.frozen", "trainer.router_replay")
"""Fields of sections that a command fills in. They are not keys of a file."""
_Model = TypeVar("_Model", bound=BaseModel)


def read_config(path: Path, overrides: Sequence[str], model: type[_Model]) -> _Model:
    """Read a TOML file, apply ``a.b=c`` overrides, and validate them by `model`.

    Raises `ConfigError`, which names the file and line of a syntax error, or a wrong key and the nearest valid one.
    """
    raw = read_toml(path)
    for override in overrides:
        apply_setting(raw, override)
    part = f"{_PART} {path}"
    for section, name in (key.split(".") for key in FILLED_IN):
        if isinstance(given := raw.get(section), dict) and name in given:
            raise ConfigError(_no_such_key([section, name], model), part=part)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        problems = [_describe(item, model) for item in error.errors()]
        raise ConfigError(" ".join(problems), part=part) from None


def _describe(item: Mapping[str, Any], root: type[BaseModel]) -> str:
    path = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        return _no_such_key(item["loc"], root)
    if item["type"] == "missing":
        return f"{path} is missing."
    if item["type"] == "model_type":
        _, known = _known_keys(item["loc"], root)
        return f"{path} must be a section with the keys {', '.join(known)} (got {item['input']!r})."
    return f"{path}: {item['msg']} (got {item['input']!r})."


def _no_such_key(location: Sequence[Any], root: type[BaseModel]) -> str:
    section, known = _known_keys(location[:-1], root)
    nearest = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.4)
    guess = f" Did you mean {'.'.join([*section, nearest[0]])}?" if nearest else ""
    where = f"[{'.'.join(section)}]" if section else "The file"
    return f"there is no key {'.'.join(map(str, location))}.{guess} {where} has the keys {', '.join(known)}."


def _known_keys(location: Sequence[Any], model: type[BaseModel]) -> tuple[list[str], list[str]]:
    section = []
    for name in location:
        field = model.model_fields.get(str(name))
        inner = _model_of(field.annotation) if field else None
        if inner is None:
            break
        section.append(str(name))
        model = inner
    return section, [name for name in model.model_fields if ".".join([*section, name]) not in FILLED_IN]


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((model for arg in get_args(annotation) if (model := _model_of(arg))), None)
    return None


def explain(config: BaseModel) -> str:
    """Return `config` as TOML with the meaning and the default above every key."""
    lines: list[str] = []
    for name in type(config).model_fields:
        if (section := getattr(config, name)) is not None:
            lines += _explain_section(name, section)
    return "\n".join(lines)


def _explain_section(path: str, section: BaseModel) -> Iterator[str]:
    yield f"# {(type(section).__doc__ or '').strip().splitlines()[0]}"
    yield f"[{path}]"
    inner: list[tuple[str, BaseModel]] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if f"{path}.{name}" in FILLED_IN:
            continue
        if isinstance(value, BaseModel):  # in TOML a table ends the keys of its parent
            inner.append((f"{path}.{name}", value))
            continue
        note = "required"
        if not field.is_required():
            note = f"default: {_toml(field.get_default(call_default_factory=True)) or 'none'}"
        yield f"# {field.description} ({note})"
        text = _toml(value)
        yield f"{name} = {text}" if text else f"# {name} is not set"
    yield ""
    for inner_path, inner_section in inner:
        yield from _explain_section(inner_path, inner_section)


def _toml(value: Any) -> str:
    """Return `value` as a TOML literal; empty for None, which TOML cannot express."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML string, except for surrogate pairs and a bare DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
