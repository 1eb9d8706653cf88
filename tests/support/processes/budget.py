"""Cost of a test run: seconds by folder, and each folder's expensive starts, which must not exceed its budget.

The budget is the table of `tests/README.md`. It counts starts, not seconds, so that it holds on any machine.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import helper_paths
import pytest
from cpu_time import CpuTime

STARTS = Path(__file__).with_name("process_starts")
KINDS = ("vllm imports", "vllm engines", "ray clusters", "torch groups")
_LOG_ENV = "WEIGHTLANE_TEST_STARTS"
_SELECTION = "not exhaustive"
"""Marker expression of `make test`; every other selection is held against the budget of `make test-all`."""


_current_test = ""
_cpu_time: CpuTime | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin to count CPU seconds, in the process that starts all others."""
    global _cpu_time  # noqa: PLW0603 - a process has one
    if not hasattr(session.config, "workerinput"):
        _cpu_time = CpuTime(lambda: _current_test)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Remember which test runs."""
    global _current_test  # noqa: PLW0603 - a process has one
    _current_test = nodeid


def watch() -> None:
    """Let this process and all that it starts note what they start. Call it before torch or vLLM are imported."""
    if _LOG_ENV not in os.environ:
        log, os.environ[_LOG_ENV] = tempfile.mkstemp(prefix="weightlane-starts-")
        os.close(log)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(STARTS) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTS), *paths]))
        sys.modules.pop("sitecustomize", None)
    if str(STARTS) not in sys.path:  # pytest-xdist gives its workers the path that its own process had at first
        sys.path.insert(0, str(STARTS))
    importlib.import_module("sitecustomize")


def folder_of(path: str) -> str:
    """``tests/sync/codecs/delta/test_delta.py`` belongs to ``sync``, and an engine package's tests to ``plugins/packages``."""
    parts = Path(path).parts
    return parts[1] if parts[:1] == ("tests",) else "/".join(parts[:2])


def started() -> dict[str, Counter[str]]:
    """How many of each kind each folder has started."""
    found: dict[str, Counter[str]] = {}
    for line in Path(os.environ[_LOG_ENV]).read_text().splitlines():
        kind, _, path = line.partition("\t")
        if path:
            found.setdefault(folder_of(path), Counter())[kind] += 1
    return found


def budgets(*, exhaustive: bool) -> dict[str, dict[str, int]]:
    """The table: a cell is a number, or two with a stroke between, for `make test` and `make test-all`."""
    rows: dict[str, dict[str, int]] = {}
    for line in helper_paths.TESTS.joinpath("README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 1 + len(KINDS) and all(re.fullmatch(r"\d+( / \d+)?", cell) for cell in cells[1:]):
            numbers = [[int(part) for part in cell.split(" / ")] for cell in cells[1:]]
            rows[cells[0].strip("`/")] = {
                kind: each[-1] if exhaustive else each[0] for kind, each in zip(KINDS, numbers, strict=True)
            }
    return rows


def exceeded(config: pytest.Config) -> list[str]:
    """A line for whatever a folder has started too many of."""
    allowed = budgets(exhaustive=config.option.markexpr != _SELECTION)
    return [
        f"tests/{folder} started {count} {kind}, and its budget in tests/README.md is {allowed.get(folder, {}).get(kind, 0)}"
        for folder, counts in started().items()
        for kind, count in counts.items()
        if count > allowed.get(folder, {}).get(kind, 0)
    ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that has started too much."""
    if (
        not hasattr(session.config, "workerinput")
        and exceeded(session.config)
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Seconds and starts by folder."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = folder_of(report.nodeid.partition("::")[0])
                seconds[folder] += report.duration
                tests[folder] += report.when == "call"
    starts = started()
    cpu_s: Counter[str] = Counter()
    if _cpu_time is not None:
        _cpu_time.stop()
        for file, spent in _cpu_time.by_file.items():
            cpu_s[folder_of(file)] += spent
        terminalreporter.section("CPU seconds by file")
        for file, spent in _cpu_time.by_file.most_common(None if config.option.verbose > 0 else 15):
            terminalreporter.write_line(f"{spent:>9.1f}  {file}")
        terminalreporter.write_line(f"{_cpu_time.total_s:>9.1f}  in all, by the kernel's count")
    terminalreporter.section("cost by folder")
    kinds = "".join(f"{kind:>14}" for kind in KINDS)
    terminalreporter.write_line(f"{'folder':<18}{'tests':>7}{'seconds':>9}{'CPU s':>9}{kinds}")
    for folder in sorted(seconds.keys() | cpu_s.keys(), key=lambda each: -cpu_s[each]):
        counts = "".join(f"{starts.get(folder, Counter())[kind]:>14}" for kind in KINDS)
        terminalreporter.write_line(
            f"{folder:<18}{tests[folder]:>7}{seconds[folder]:>9.1f}{cpu_s[folder]:>9.1f}{counts}"
        )
    for line in exceeded(config):
        terminalreporter.write_line(f"error: {line}", red=True)
    if not hasattr(config, "workerinput"):
        Path(os.environ[_LOG_ENV]).unlink()
