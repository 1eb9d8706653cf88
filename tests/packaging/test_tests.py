"""The tests themselves: none depends on how fast the machine is, none is skipped for good, none passes by a second try."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import budget
import pytest
from syntax_trees import tree_of
from waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
READS_OF_CLOCKS = {
    "tests/support/waiting.py": 2,  # how all tests poll
    "tests/rollout/layout/zoo/zoo.py": 2,
    "tests/sync/torchrun/scripts_that_end.py": 2,  # a program that ends what hangs, and then says so
    "tests/rollout/commit/test_vllm_commit.py": 1,  # a timeout that is over at once
    "tests/rollout/stock/test_stock_server.py": 1,  # a loop for which time passes when the test wants it to
    "tests/ckpt_engines/conformance/broken_data.py": 2,  # one of the defects that are planted there is one of time
    # The CPU time of a wait that does nothing, to which no other process can add.
    "plugins/packages/weightlane-nixl/tests/test_beyond_the_suite.py": 2,
}
"""On how many lines a file may read a clock. No other does: who knows no time cannot compare it."""
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
CLOCKS |= {f"{clock}_ns" for clock in CLOCKS}
CANNOT_FAIL = re.compile(
    r"mark\.(skip|xfail)\b|pytest\.xfail\(|skipif\((True|1|\")|^    pytest\.skip\(|(except|suppress\()[^:\n]*AssertionError",
    re.MULTILINE,
)
"""Marks and calls that keep a test from failing, whatever it finds. pytest refuses markers that `pyproject.toml` does not name,
such as ``flaky``, and ruff finds handlers of every exception."""


def files_of_tests() -> Iterator[tuple[str, ast.Module]]:
    """Path and syntax tree of everything that tests consist of."""
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins/packages").glob("*/tests/**/*.py")]):
        yield str(path.relative_to(ROOT)), tree_of(path)


# -- time ---------------------------------------------------------------------------------------------------------------


def reads_of_clocks(tree: ast.Module) -> list[int]:
    """Lines on which a clock is read, or imported by a name of its own."""
    return sorted({node.lineno for node in ast.walk(tree) if is_clock(node)})  # type: ignore[attr-defined]


def is_clock(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="time"), attr=clock):
            return clock in CLOCKS
        case ast.ImportFrom(module="time", names=names):
            return any(alias.name in CLOCKS for alias in names)
        case ast.Attribute(value=ast.Name(id="timeit")) | ast.ImportFrom(module="timeit"):
            return True
        case ast.Call(func=ast.Attribute(attr="time"), args=[], keywords=[]):  # an event loop's
            return True
    return False


def test_no_test_compares_durations_or_waits_by_a_clock_of_its_own() -> None:
    """`Deadline` takes a `waiting.MovableClock`, polls go through `waiting.wait_until`, and what hangs fails by a timeout."""
    found = {path: reads_of_clocks(tree) for path, tree in files_of_tests()}
    beyond = {path: lines for path, lines in found.items() if len(lines) > READS_OF_CLOCKS.get(path, 0)}
    assert not beyond, f"a busy machine can make what is read on these lines anything: {beyond}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("began = time.monotonic()\nwork()\nassert time.monotonic() - began < 2.0", [1, 3]),
        ("from time import process_time as cpu, sleep\nassert cpu() < 5", [1]),
        ("def f():\n    assert min(timeit.repeat(g)) / 5 < 1e-6", [2]),
        ("def f():\n    now = asyncio.get_running_loop().time()\n    assert now < 3", [2]),
        ("def f():\n    while time.time_ns() < end: time.sleep(1)", [2]),
        ("def f():\n    time.sleep(1)\n    clock.advance(3.0)", []),
    ],
)
def test_reads_of_clocks_are_found(source: str, lines: list[int]) -> None:
    assert reads_of_clocks(ast.parse(source)) == lines


# -- tests that cannot fail -----------------------------------------------------------------------------------------------


def test_no_test_is_skipped_for_good_expected_to_fail_or_passes_by_being_tried_again() -> None:
    """`skipif` and `pytest.skip` under a condition say what a test needs; nothing else keeps one from failing."""
    for source in (
        "@pytest.mark.skip(reason='later')\ndef test(): pass",
        "@pytest.mark.skipif(True, reason='x')\ndef test(): pass",
        "def test():\n    pytest.skip('later')",
        "def test():\n    try:\n        f()\n    except (OSError, AssertionError):\n        pass",
        "def test():\n    with suppress(AssertionError):\n        f()",
    ):
        assert CANNOT_FAIL.search(source), source
    allowed = (
        "@pytest.mark.skipif(not GPU, reason='no GPU')\ndef test():\n    if not CUDA:\n        pytest.skip('no CUDA')"
    )
    assert not CANNOT_FAIL.search(allowed)
    texts = {path: (ROOT / path).read_text() for path, _ in files_of_tests() if ROOT / path != Path(__file__)}
    assert not [path for path, text in texts.items() if CANNOT_FAIL.search(text)], "these tests cannot fail"
    settings = [ROOT / "pyproject.toml", ROOT / "Makefile", *ROOT.glob("constraints*.txt"), *(ROOT / ".ci").iterdir()]
    said = {path.name: path.read_text() for path in settings if path.is_file()}
    assert not [name for name, text in said.items() for word in ("--reruns", "rerunfailures", "flaky") if word in text]


def test_planted_defects_can_be_planted() -> None:
    """`planted_defects/check.py`, which takes hours, shows that each is found."""
    check = runpy.run_path(str(ROOT / "tests/planted_defects/check.py"))
    defects = check["defects"]()
    assert len(defects) > 30
    for defect in defects:
        for path, text in check["planted"](defect).items():
            compile(text, path, "exec")
        files = {ROOT / test.split("::")[0] for test in defect["tests"]}
        assert all(file.exists() for file in files), defect["name"]


def test_a_folder_beyond_its_budget_is_named_with_what_has_grown() -> None:
    allowed = budget.table(everything=False)
    assert {"trainer", "rollout", "plugins/packages"} <= set(allowed)
    assert allowed["trainer"]["cases"] <= budget.table(everything=True)["trainer"]["cases"]
    assert budget.lines()["packaging"] >= len(Path(__file__).read_text().splitlines())
    counts = {folder: {kind: row[kind] for kind in budget.KINDS} for folder, row in allowed.items()}
    assert not budget.exceeded(counts, allowed)
    counts["trainer"]["ray clusters"] += 1
    counts["novel"] = {"lines": 1_001, "cases": 0}
    limit = allowed["trainer"]["ray clusters"]
    assert budget.exceeded(counts, allowed) == [
        f"tests/trainer: {limit + 1} ray clusters, and its budget in tests/README.md is {limit}",
        "tests/novel: 1,001 lines, and its budget in tests/README.md is 0",
    ]


# -- where a reader looks ---------------------------------------------------------------------------------------------------


PROGRAMS = sorted(set(re.findall(r"python (tests/\S+\.py)", (ROOT / "tests/README.md").read_text())))


@pytest.mark.parametrize(
    "program", [pytest.param(each, marks=pytest.mark.exhaustive if "rollout" in each else ()) for each in PROGRAMS]
)
def test_programs_that_the_readme_names_find_their_helpers_when_started_by_themselves(program: str) -> None:
    folder = str(Path(program).parent)  # which is where Python looks first
    load = f"import runpy, sys; sys.path[0] = {folder!r}; runpy.run_path({program!r}, run_name='loaded')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", load], cwd=ROOT, env=environment, capture_output=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_every_test_module_is_in_the_table_of_promises_and_every_module_in_the_table_exists() -> None:
    modules = [path for path in (ROOT / "tests").rglob("*.py") if path.name.startswith("test_")]
    told = set(re.findall(r"`(?:[\w/]+/)?(test_\w+)`", (ROOT / "tests/README.md").read_text()))
    assert {path.stem for path in modules} == told
