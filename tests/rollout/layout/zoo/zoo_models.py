"""Architectures of the zoo, which `zoo.toml` lists."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from zoo_kind import Kind

_TABLES = tomllib.loads(Path(__file__).with_name("zoo.toml").read_text())


def _kind(name: str, row: dict[str, Any]) -> Kind:
    sizes: dict[str, Any] = dict.fromkeys(row.pop("none", ()))
    for shared in row.pop("sets", ()):
        sizes = _TABLES["sets"][shared] | sizes
    return Kind(name, sizes=sizes | row.pop("sizes", {}), **row)


ZOO = [_kind(name, row) for name, row in _TABLES["architectures"].items()]
KINDS = {kind.name: kind for kind in ZOO}
