"""The house: rooms that a reader takes in at a glance, modules that fit on a few screens, no imports in a circle."""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path
from typing import Any

import pytest
from syntax_trees import tree_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def drawing() -> dict[str, Any]:
    found = runpy.run_path(str(ROOT / "docs/site/architecture.py"))
    found["page"].__globals__["tree"] = tree_of  # parsed once for all tests
    return found


def test_no_folder_has_more_entries_than_a_reader_takes_in(drawing: dict[str, Any]) -> None:
    entries = drawing["folders"](drawing["modules"]())
    assert len(entries) > 30
    assert not {folder: len(each) for folder, each in entries.items() if len(each) > drawing["MOST_ENTRIES"]}


def test_no_module_is_long_and_half_of_them_are_short(drawing: dict[str, Any]) -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in drawing["modules"]().items()}
    assert not {name: count for name, count in lines.items() if count > drawing["MOST_LINES"]}
    assert statistics.median(lines.values()) < drawing["MEDIAN_LINES"]


def test_the_tests_have_rooms_too(drawing: dict[str, Any]) -> None:
    """A README and a conftest are of their folder, as an ``__init__`` is."""
    modules = [
        path
        for folder in ("tests", "benchmarks", "plugins/packages")
        for path in (ROOT / folder).rglob("*.py")
        if "build" not in path.parts
    ]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    assert not {name: count for name, count in lines.items() if count > drawing["MOST_LINES"]}
    entries: dict[Path, set[str]] = {}
    for path in modules:
        while (path := path.parent) != ROOT and "tests" in path.parts:
            entries[path] = {each.name for each in path.iterdir()} - {"__pycache__", "README.md", "conftest.py"}
    assert not {str(folder): len(each) for folder, each in entries.items() if len(each) > drawing["MOST_ENTRIES"]}


def test_no_imports_go_in_a_circle_not_even_for_types(drawing: dict[str, Any]) -> None:
    known = drawing["modules"]()
    found = {
        folder: drawing["circles"](drawing["graph_of"](folder, entries, known))
        for folder, entries in drawing["folders"](known).items()
    }
    assert not {folder: each for folder, each in found.items() if each}
    assert drawing["circles"]({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_every_folder_says_what_it_holds(drawing: dict[str, Any]) -> None:
    assert not [name for name, path in drawing["modules"]().items() if not drawing["purpose"](path)]


def test_the_page_draws_the_arrows_that_do_not_follow_from_others(drawing: dict[str, Any]) -> None:
    page = drawing["page"]()
    assert "rollout_ --> sync_" in page
    assert "cli_ --> sync_" not in page, "it follows from others"
