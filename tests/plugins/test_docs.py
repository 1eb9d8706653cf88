"""`docs/guides/hooks.md` is true: its example runs, its table is the specification, its series exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from installed import install

from weightlane.plugins import HOOK_NAMES, RunHooks, make_hooks
from weightlane.plugins.loading import OBSERVERS
from weightlane.plugins.prometheus import PrometheusObserver

PAGE = (Path(__file__).parents[2] / "docs/guides/hooks.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table that has this cell in its head."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    (table,) = (table for table in tables if heading in table.splitlines()[0])
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_the_example_observes_once_it_is_installed_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 16
    (entry_point,) = re.findall(r'^slow-syncs = "(.*)"', blocks("toml")[0], re.MULTILINE)
    install(tmp_path / "site", "slow_syncs", source, f"slow-syncs = {entry_point}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    hooks = make_hooks()
    hooks.version_committed(version=3, facts={"latency_s": 0.2})
    hooks.version_committed(version=4, facts={"latency_s": 2.0})
    hooks.version_aborted(version=5, facts={"error": "a reason"})
    assert hooks.reports == ()
    assert (tmp_path / "slow_syncs.txt").read_text() == "version 4: 2.0 s\nversion 5: a reason\n"


def test_the_table_of_hooks_names_every_hook_and_the_process_that_its_specification_says() -> None:
    named = [(name, process) for process, hooks in rows("called in") for name in re.findall(r"`([a-z_]+)`", hooks)]
    assert [name for name, _ in named] == list(HOOK_NAMES)
    for name, process in named:
        text = " ".join((getattr(RunHooks, name).__doc__ or "").split())
        assert re.search(rf"Called by (the|every) {process.partition(':')[0]}", text), f"{name}: {text}"


def test_every_variable_and_every_series_is_named() -> None:
    for variable in OBSERVERS:
        assert f"`{variable}`" in PAGE
    registry = PrometheusObserver()._metrics.registry
    for family in registry.collect():
        name = family.name.removeprefix("weightlane_") + ("_total" if family.type == "counter" else "")
        assert re.search(rf"`{name}(\{{replica\}})?`", PAGE), name
