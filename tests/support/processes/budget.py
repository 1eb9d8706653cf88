"""Budget of the tests: lines and cases of each folder, and expensive processes that it starts. A run that exceeds it fails.

The budget is the table of `tests/README.md`. It counts and never measures time, so that it holds on any machine. A run prints its
CPU seconds by folder beside those of the run that the table tells of; nothing is judged by them.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import helper_paths
import pytest
from cpu_time import CpuTime
from fork_server import end_server

STARTS_HOOK = Path(__file__).with_name("process_starts")
STARTS = ("vllm imports", "vllm engines", "ray clusters", "torch groups")
KINDS = ("lines", "cases", *STARTS)
CPU_S = "CPU s"
"""Column of the seconds that the run of the table took: shown, and no limit."""
_LOG_ENV = "WEIGHTLANE_TEST_STARTS"
_SELECTIONS = ("not exhaustive", "")
"""Marker expressions of `make test` and `make test-all`: the columns of the table with two numbers, in this order."""

Counts = Mapping[str, Mapping[str, float]]
"""Folder to kind to number."""

_cpu_time: CpuTime | None = None
_cases: set[str] = set()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin to count CPU seconds, in the process that starts all others."""
    global _cpu_time  # noqa: PLW0603 - a process has one
    if not hasattr(session.config, "workerinput"):
        _cpu_time = CpuTime()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember the cases, where this process runs them itself.

    Python's collector need not look at what is there by now, vLLM's modules and the tests: many tests collect garbage.
    """
    _cases.update(item.nodeid for item in session.items)
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: Collection[str]) -> None:
    """Remember the cases that a worker of pytest-xdist has collected; all of them collect the same."""
    _cases.update(ids)


def watch() -> None:
    """Let this process and all that it starts note what they start. Call it before torch or vLLM are imported."""
    if _LOG_ENV not in os.environ:
        log, os.environ[_LOG_ENV] = tempfile.mkstemp(prefix="weightlane-starts-")
        os.close(log)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(STARTS_HOOK) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTS_HOOK), *paths]))
        sys.modules.pop("sitecustomize", None)
    if str(STARTS_HOOK) not in sys.path:  # pytest-xdist gives its workers the path that its own process had at first
        sys.path.insert(0, str(STARTS_HOOK))
    importlib.import_module("sitecustomize")


def folder_of(path: str) -> str:
    """Folder of a test file: ``sync`` for ``tests/sync/codecs/test_x.py``, ``.`` for ``tests/conftest.py``."""
    parts = Path(path).parts
    if parts[:1] == ("tests",):
        return parts[1] if len(parts) > 2 else "."
    return "/".join(parts[:2])


def lines() -> Counter[str]:
    """Lines of the tests' Python code, by folder."""
    root = helper_paths.TESTS.parent
    found: Counter[str] = Counter()
    for path in [*root.glob("tests/**/*.py"), *root.glob("plugins/packages/*/tests/**/*.py")]:
        found[folder_of(str(path.relative_to(root)))] += len(path.read_text().splitlines())
    return found


def used() -> dict[str, Counter[str]]:
    """How many of each kind each folder has used."""
    found: dict[str, Counter[str]] = {folder: Counter(lines=count) for folder, count in lines().items()}
    for case in _cases:
        found.setdefault(folder_of(case.partition("::")[0]), Counter())["cases"] += 1
    for line in Path(os.environ[_LOG_ENV]).read_text().splitlines():
        kind, _, path = line.partition("\t")
        if path:
            found.setdefault(folder_of(path), Counter())[kind] += 1
    return found


def table(*, everything: bool) -> dict[str, dict[str, int]]:
    """The table of `tests/README.md`. A cell is one number, or two: for `make test` and for `make test-all`."""
    columns = (*KINDS, CPU_S)
    rows: dict[str, dict[str, int]] = {}
    for line in helper_paths.TESTS.joinpath("README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 1 + len(columns) and all(re.fullmatch(r"[\d,]+( / [\d,]+)?", cell) for cell in cells[1:]):
            numbers = [[int(part.replace(",", "")) for part in cell.split(" / ")] for cell in cells[1:]]
            rows[cells[0].strip("`/")] = {
                kind: each[-1] if everything else each[0] for kind, each in zip(columns, numbers, strict=True)
            }
    return rows


def exceeded(counts: Counts, allowed: Counts) -> list[str]:
    """A line for everything of which a folder has more than it may."""
    return [
        f"tests/{folder}: {count:,} {kind}, and its budget in tests/README.md is {allowed.get(folder, {}).get(kind, 0):,}"
        for folder, each in counts.items()
        for kind, count in each.items()
        if count > allowed.get(folder, {}).get(kind, 0)
    ]


def _over(config: pytest.Config) -> list[str]:
    return exceeded(used(), table(everything=config.option.markexpr != _SELECTIONS[0]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that is beyond its budget."""
    if (
        not hasattr(session.config, "workerinput")
        and _over(session.config)
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what each folder has used, and what is beyond its budget."""
    if hasattr(config, "workerinput"):
        return
    counts, known = used(), table(everything=config.option.markexpr != _SELECTIONS[0])
    _write_cost(terminalreporter, counts, known, verbose=config.option.verbose > 0)
    grown = exceeded(counts, known)
    for line in grown:
        terminalreporter.write_line(f"error: {line}", red=True)
    if grown:
        terminalreporter.write_line(
            "Tests are expensive: replace or merge some. tests/README.md says how a budget is raised."
        )
    Path(os.environ[_LOG_ENV]).unlink()


def _write_cost(reporter: Any, counts: Counts, known: Counts, *, verbose: bool) -> None:
    assert _cpu_time is not None
    _cpu_time.stop()
    end_server()
    reporter.section("CPU seconds by file")
    for file, spent in _cpu_time.by_file.most_common(None if verbose else 15):
        reporter.write_line(f"{spent:>9.1f}  {file}")
    seconds: Counter[str] = Counter()
    for file, spent in _cpu_time.by_file.items():
        seconds[folder_of(file) if Path(file).suffix else "."] += spent
    reporter.section("cost by folder")
    kinds = "".join(f"{kind:>14}" for kind in STARTS)
    reporter.write_line(f"{'folder':<18}{'cases':>7}{'CPU s':>9}{'committed':>11}{kinds}")
    for folder, spent in seconds.most_common():
        starts = "".join(f"{counts.get(folder, {}).get(kind, 0):>14}" for kind in STARTS)
        committed = known.get(folder, {}).get(CPU_S, 0)
        reporter.write_line(
            f"{folder:<18}{counts.get(folder, {}).get('cases', 0):>7}{spent:>9.1f}{committed:>11}{starts}"
        )
    committed = sum(row[CPU_S] for row in known.values())
    reporter.write_line(
        f"{'all':<18}{len(_cases):>7}{_cpu_time.total_s:>9.1f}{committed:>11}   (CPU s as the kernel counts them)"
    )
