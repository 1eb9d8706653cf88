"""Puts the folders of the tests' helper modules on `sys.path`, so that tests and programs import helpers by their names.

Processes that tests start inherit `sys.path`. A program that people start by itself adds this folder and imports this module.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
_INTERPRETER = {"sitecustomize"}
"""Modules that Python itself imports; `budget` decides which processes find them."""


def helpers() -> list[Path]:
    """Every module of `tests/` that is neither a test nor a conftest. One that belongs to a package counts as the package."""
    found = {path for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "conftest"))}
    packages = {path.parent for path in found if path.name == "__init__.py"}
    modules = {path for path in found if path.parent not in packages and path.stem not in _INTERPRETER}
    return sorted(modules | packages)


def add() -> None:
    """Add each folder once, in front of what is there."""
    for folder in sorted({str(path.parent) for path in helpers()} - set(sys.path)):
        sys.path.insert(0, folder)


add()
