"""Syntax trees of the files of the project, parsed once: a dozen tests look at them, and parsing takes seconds."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree. Whoever asks must not change it."""
    gc.disable()  # the collector would look at all trees again and again, which takes three times as long as to make them
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree, in the order of `ast.walk`."""
    return tuple(ast.walk(tree_of(path)))
