"""TOML files and ``--set`` arguments as plain tables, before anything validates them. Imports nothing slow."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError

_PART = "configuration"


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises `ConfigError`, which names the file and line of a syntax error."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}.", part=_PART) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", part=_PART) from None
    except (ValueError, RecursionError) as error:  # also for numbers too long and brackets too deep
        raise ConfigError(f"{path} is not valid TOML: {error}.", part=_PART) from None


def apply_setting(table: dict[str, Any], setting: str) -> None:
    """Put the value of ``key=value`` or ``a.b=value``, an argument of --set, into `table`. Raises `ConfigError`."""
    key, equals, text = setting.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not all([*sections, name]):
        raise ConfigError(f"--set {setting!r} does not have the form key=value or a.b=value.", part=_PART)
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {setting!r}: {section} is a value, not a section.", part=_PART)
    table[name] = toml_value(text.strip())


def toml_value(text: str) -> Any:
    """Parse `text` as a TOML value (``3``, ``true``, ``[1, 2]``). Other text is a string, and needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def command_of(sections: dict[str, Any]) -> str:
    """Return the command that a configuration with these `sections` is for: ``sft``, ``tinker``, ``worker`` or ``train``."""
    commands = {"sft": "sft", "service": "tinker", "worker": "worker"}
    return next((command for section, command in commands.items() if section in sections), "train")


def starts_vllm(path: Path, overrides: Sequence[str], *, anywhere: bool = False) -> bool:
    """Whether a run starts vLLM on this machine, or `anywhere`: a running Ray cluster has libraries of its own."""
    sections = read_toml(path)
    for override in overrides:
        apply_setting(sections, override)
    ray, rollout = (section if isinstance(section := sections.get(name), dict) else {} for name in ("ray", "rollout"))
    return (anywhere or not ray.get("address")) and rollout.get("engine", "vllm") == "vllm"
