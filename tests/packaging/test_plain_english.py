"""A docstring begins with its subject or with what a call does, never with a word that stands in for either."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from syntax_trees import nodes_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli", "tests", "benchmarks", "docs", "examples")
STANDS_IN = re.compile(r"(What|That|Those|Of|By|Who|Whoever|Whose|As)\b")
"""Words after which a reader has to search for who does what."""


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring: of modules, classes, functions, and those below attributes and constants."""
    for node in nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    yield statement.lineno, text.strip()


def test_no_docstring_hides_its_subject_behind_its_first_word() -> None:
    found, seen = [], 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "build" in path.parts:  # a package that was installed leaves a copy there
                continue
            for line, text in docstrings(nodes_of(path)):
                seen += 1
                if STANDS_IN.match(text):
                    found.append(f"{path.relative_to(ROOT)}:{line}: {text[:60]}")
    assert seen > 5000
    assert not found


def test_such_a_docstring_is_found() -> None:
    source = 'def f():\n    """What is left."""\n\nLIMIT = 3\n"""Of all."""\n\ndef g():\n    """Whatever is left is sent."""\n'
    assert [line for line, text in docstrings(ast.walk(ast.parse(source))) if STANDS_IN.match(text)] == [5, 2]
