"""Field docstrings for ``help()``: copies the texts under a class's fields into the class's own docstring."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator


def document_fields(module: str) -> None:
    """Add an ``Attributes`` section, made of the texts under the fields, to the docstring of every class of `module`.

    To be called at the module's end. Editors show the texts under the fields, but Python does not keep them. Nothing changes
    when the source cannot be read, or docstrings are switched off.
    """
    loaded = sys.modules[module]
    try:
        tree = ast.parse(inspect.getsource(loaded))
    except OSError:
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (doc := getattr(loaded, node.name).__doc__):
            fields = [textwrap.indent(f"{name}: {text}", "    ") for name, text in _texts(node)]
            if fields:
                getattr(loaded, node.name).__doc__ = "\n".join([inspect.cleandoc(doc), "", "Attributes:", *fields])


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield every field of a class that a text follows, and the text."""
    for field, follower in zip(node.body, node.body[1:], strict=False):
        target = field.targets[0] if isinstance(field, ast.Assign) else getattr(field, "target", None)
        if isinstance(target, ast.Name) and isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
            yield target.id, " ".join(str(follower.value.value).split())
