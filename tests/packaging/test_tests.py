"""The tests themselves: none depends on how fast the machine is, none is skipped for good, none passes by a second try."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_COMPARE_TIMES = {
    "tests/waiting.py",  # how all tests poll
    "tests/sync/soak.py",  # a program that injects faults for as long as it is told to
    "tests/ckpt_engines/broken_data.py",  # one of the defects that are planted there is one of time
    # The CPU time of a wait that does nothing, to which no other process can add.
    "plugins/packages/weightlane-nixl/tests/test_beyond_the_suite.py",
}
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
CLOCKS |= {f"{clock}_ns" for clock in CLOCKS}
COLLECTS = {"append", "appendleft", "extend", "add", "insert", "put", "put_nowait"}
"""Methods that put their arguments into what they are called on."""
FOR_GOOD = {"skip", "xfail", "flaky", "rerun", "reruns", "repeat"}
"""Markers that keep a test from failing."""


def files_of_tests() -> Iterator[tuple[str, str]]:
    """Path and text of everything that tests consist of."""
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins/packages").glob("*/tests/**/*.py")]):
        yield str(path.relative_to(ROOT)), path.read_text()


# -- time ---------------------------------------------------------------------------------------------------------------


def compared_times(source: str) -> list[int]:
    """Lines on which something is compared that a clock has said, or that was made of it."""
    tree = ast.parse(source)
    functions = list(outermost_functions(tree))
    inside = {id(node) for function in functions for node in ast.walk(function)}
    shared = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in {"time", "timeit"}
        for alias in node.names
    }
    """Names that hold a time wherever they are read."""
    top = [node for node in ast.walk(tree) if id(node) not in inside]
    scopes = [(top, shared), *((list(ast.walk(function)), set[str]()) for function in functions)]
    found = -1
    while found < (found := sum(len(names) for _, names in scopes)):  # until no assignment adds a name
        for nodes, names in scopes:
            for name in (name for node in nodes for name in noted(node, shared | names)):
                # Methods share the attributes of self: what one notes, another compares.
                (shared if name.startswith("self.") else names).add(name)
        for function, (nodes, names) in zip(functions, scopes[1:], strict=True):
            if any(isinstance(node, ast.Return) and is_timed(node, shared | names) for node in nodes):
                shared.add(function.name)
    return sorted(
        {
            node.lineno
            for nodes, names in scopes
            for node in nodes
            if isinstance(node, ast.Compare)
            and not isinstance(node.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn)
            and is_timed(node, shared | names)
        }
    )


def outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from outermost_functions(child)


def noted(node: ast.AST, timed: set[str]) -> set[str]:
    """The names to which `node` assigns a time."""
    match node:
        case ast.Assign(targets=targets, value=value) if is_timed(value, timed):
            return set().union(*map(targeted, targets))
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
            return targeted(target) if is_timed(value, timed) else set()
        case ast.NamedExpr(target=target, value=value) | ast.For(target=target, iter=value):
            return targeted(target) if is_timed(value, timed) else set()
        case ast.Call(func=ast.Attribute(value=owner, attr=method), args=values) if method in COLLECTS:
            return targeted(owner) if any(is_timed(value, timed) for value in values) else set()
    return set()


def targeted(target: ast.expr) -> set[str]:
    match target:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
            return {f"self.{attribute}"}
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return set().union(*map(targeted, elements))
        case ast.Subscript(value=inner) | ast.Attribute(value=inner) | ast.Starred(value=inner):
            return targeted(inner)
    return set()


def is_timed(expression: ast.AST, timed: set[str]) -> bool:
    for node in ast.walk(expression):
        match node:
            case ast.Name(id=name) if name in timed:
                return True
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute) if f"self.{attribute}" in timed:
                return True
            case ast.Attribute(value=ast.Name(id="time"), attr=clock) if clock in CLOCKS:
                return True
            case ast.Attribute(value=ast.Name(id="timeit")):
                return True
            case ast.Call(func=ast.Attribute(attr="time"), args=[], keywords=[]):  # an event loop's
                return True
    return False


def test_no_test_compares_durations_or_waits_by_a_clock_of_its_own() -> None:
    """`Deadline` takes a `waiting.MovableClock`, polls go through `waiting.wait_until`, and what hangs fails by a timeout."""
    found = [
        f"{path}:{line}"
        for path, source in files_of_tests()
        if path not in MAY_COMPARE_TIMES
        for line in compared_times(source)
    ]
    assert not found, "a busy machine can make these comparisons fail:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("began = time.monotonic()\nwork()\nassert time.monotonic() - began < 2.0", [3]),
        ("def f():\n    took = time.perf_counter() - began()\n    assert 1 < took", [3]),
        ("def f():\n    end = time.time() + 5\n    while g() and time.time() < end: pass", [3]),
        ("from time import process_time as cpu\nassert cpu() < 5", [2]),
        ("def f():\n    times = []\n    times.append(time.process_time())\n    assert max(times) < 5", [4]),
        ("def f():\n    took = {'a': time.monotonic()}\n    a, b = took['a'], 3\n    assert b == a", [4]),
        ("def f():\n    return time.monotonic() - 3\ndef g():\n    took = f()\n    assert took < 2", [5]),
        ("def f():\n    assert min(timeit.repeat(g)) / 5 < 1e-6", [2]),
        ("def f():\n    now = asyncio.get_running_loop().time()\n    assert now < 3", [3]),
        (
            "class C:\n    def f(self):\n        self.t = time.monotonic()\n    def g(self):\n        return self.t > 1",
            [5],
        ),
        ("def f():\n    began = time.monotonic()\n    g(lambda: time.monotonic() - began < 0.4)", [3]),
        ("def f():\n    end = time.monotonic()\ndef g(end):\n    assert end < 3", []),
        ("def f():\n    took = time.monotonic() - began\n    print(took)\n    assert took is not None", []),
    ],
)
def test_compared_durations_are_found(source: str, lines: list[int]) -> None:
    assert compared_times(source) == lines


# -- tests that cannot fail -----------------------------------------------------------------------------------------------


def never_fails(source: str) -> list[int]:
    """Lines on which a test is skipped for good, expected to fail, run again, or passes although an assertion failed."""
    return sorted(set(excuses(ast.parse(source), conditional=False)))


def excuses(node: ast.AST, *, conditional: bool) -> Iterator[int]:
    for child in ast.iter_child_nodes(node):
        if is_excuse(child, conditional=conditional):
            yield child.lineno  # type: ignore[attr-defined]
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from excuses(child, conditional=False)
        else:
            yield from excuses(child, conditional=conditional or isinstance(child, ast.If | ast.ExceptHandler))


def is_excuse(node: ast.AST, *, conditional: bool) -> bool:
    match node:
        case ast.Attribute(value=ast.Attribute(attr="mark"), attr=marker):
            return marker in FOR_GOOD
        case ast.Call(func=ast.Attribute(attr="skipif"), args=[ast.Constant(), *_]):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="pytest"), attr="skip" | "xfail" as call)):
            return call == "xfail" or not conditional
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress")):
            return "AssertionError" in ast.unparse(node)
        case ast.Try(body=body, handlers=handlers):
            asserts = any(isinstance(inner, ast.Assert) for each in body for inner in ast.walk(each))
            return any(swallows(handler, asserts=asserts) for handler in handlers)
    return False


def swallows(handler: ast.ExceptHandler, *, asserts: bool) -> bool:
    """Whether a failed assertion ends in this handler."""
    if any(isinstance(inner, ast.Raise) for inner in ast.walk(handler)):
        return False
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    return "AssertionError" in caught or (asserts and caught in {"Exception", "BaseException"})


def test_no_test_is_skipped_for_good_expected_to_fail_or_passes_by_being_tried_again() -> None:
    """`skipif` and `pytest.skip` under a condition say what a test needs; nothing else keeps one from failing."""
    found = [f"{path}:{line}" for path, source in files_of_tests() for line in never_fails(source)]
    assert not found, "these tests cannot fail:\n" + "\n".join(found)
    settings = [ROOT / "pyproject.toml", ROOT / "Makefile", *ROOT.glob("constraints*.txt"), *(ROOT / ".ci").iterdir()]
    said = {path.name: path.read_text() for path in settings if path.is_file()}
    assert not [name for name, text in said.items() for word in ("--reruns", "rerunfailures", "flaky") if word in text]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("@pytest.mark.skip(reason='later')\ndef test(): pass", [1]),
        ("pytestmark = [pytest.mark.xfail]", [1]),
        ("CASES = [pytest.param(1, marks=pytest.mark.flaky(reruns=2))]", [1]),
        ("@pytest.mark.skipif(True, reason='x')\ndef test(): pass", [1]),
        ("def test():\n    pytest.skip('later')", [2]),
        ("def test():\n    pytest.xfail('later')", [2]),
        ("for _ in range(3):\n    try:\n        assert f()\n    except Exception:\n        continue", [2]),
        ("def test():\n    try:\n        f()\n    except (OSError, AssertionError):\n        pass", [2]),
        ("def test():\n    with suppress(AssertionError):\n        f()", [2]),
        ("@pytest.mark.skipif(not GPU, reason='no GPU')\ndef test(): pass", []),
        ("def test():\n    if not GPU:\n        pytest.skip('no GPU')", []),
        ("def test():\n    with pytest.raises(AssertionError):\n        f()", []),
        (
            "def test():\n    try:\n        assert f()\n    except Exception as error:\n        raise Wrong from error",
            [],
        ),
    ],
)
def test_tests_that_cannot_fail_are_found(source: str, lines: list[int]) -> None:
    assert never_fails(source) == lines
