"""`entry_points_of`: what installed distributions register in a group of entry points, read once."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path


def entry_points_of(group: str, name: str | None = None) -> list[EntryPoint]:
    """Return the entry points of a group, or those of one name. Imports nothing that they point to.

    The metadata of all distributions, slow to read, is read again only if `sys.path` or one of its folders has changed.
    """
    found = _entry_points(tuple((path, _changed_ns(path)) for path in sys.path))
    return [each for each in found if each.group == group and name in {None, each.name}]


@functools.lru_cache(maxsize=1)
def _entry_points(_: tuple[tuple[str, int], ...]) -> Sequence[EntryPoint]:
    found = importlib.metadata.entry_points()  # of another type from Python 3.12 on
    return [each for group in found.groups for each in found.select(group=group)]


def _changed_ns(folder: str) -> int:
    """Return when something was last added to a folder or removed from it; 0 if it does not exist."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0
