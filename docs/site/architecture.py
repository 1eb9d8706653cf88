"""Draws every folder of the product from its imports: `make docs` puts the page into the site, and no file holds it.

An arrow means "imports", at run time, inside functions or for types alone. Arrows that follow from others are not drawn.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("plugins", "ckpt_engines", "sync", "trainer", "rollout", "cli")
MOST_ENTRIES = 12
"""Largest number of entries of a folder, beside its ``__init__.py``: as many as a reader takes in at a glance."""
MOST_LINES = 400
"""Largest number of lines of a module."""
MEDIAN_LINES = 150
"""Half of all modules are shorter."""
MOST_IN_A_ROW = 4
"""Entries side by side in a drawing: as many as the page's width shows at their full size."""

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the product by its name below ``weightlane``, as ``sync.send.pipeline``; a package by its folder's."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "packages" not in parts:
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(path.read_text())


@functools.cache
def _imported(path: Path) -> tuple[tuple[str, str], ...]:
    """Pairs of a module below ``weightlane`` and a name in it that a module imports, wherever in its text."""
    package = list(path.relative_to(ROOT).parent.parts)
    found: list[tuple[str, str]] = []
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        elif node.module and node.module.startswith("weightlane."):
            base = node.module.split(".")[1:]
        else:
            continue
        found += [(".".join(base), alias.name) for alias in node.names]
    return tuple(found)


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Names of the product's modules that a module imports, wherever in its text."""
    for base, name in _imported(path):
        yield whole if (whole := f"{base}.{name}") in known else base


def folders(known: dict[str, Path]) -> dict[str, list[str]]:
    """The entries of every folder: its modules and folders, without its ``__init__.py``."""
    entries: dict[str, set[str]] = {"": set(FOLDERS)}
    for name in known:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            entries.setdefault(".".join(parts[:depth]), set()).add(parts[depth])
    return {folder: sorted(each) for folder, each in sorted(entries.items())}


def graph_of(folder: str, entries: list[str], known: dict[str, Path]) -> Graph:
    """Return, for each entry of `folder`, the other entries of `folder` that it imports."""
    inside = f"{folder}." if folder else ""
    graph: Graph = {entry: set() for entry in entries}
    for name, path in known.items():
        entry = name.removeprefix(inside).split(".")[0]
        if not name.startswith(inside) or entry not in graph:
            continue
        for target in imports(path, known):
            other = target.removeprefix(inside).split(".")[0]
            if target.startswith(inside) and other in graph and other != entry:
                graph[entry].add(other)
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Entries that import one another, directly or through others."""
    reach = {entry: _reachable(graph, entry) for entry in graph}
    groups = {frozenset(o for o in graph if o in reach[entry] and entry in reach[o]) for entry in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    pending = list(graph[start])
    while pending:
        if (entry := pending.pop()) not in seen:
            seen.add(entry)
            pending += graph[entry]
    return seen


def _drawn(graph: Graph) -> Iterator[tuple[str, str]]:
    """The arrows that do not follow from others."""
    for entry, others in sorted(graph.items()):
        further = {target for other in others for target in _reachable(graph, other)}
        yield from ((entry, other) for other in sorted(others - further))


def _direction(entries: list[str], arrows: list[tuple[str, str]]) -> str:
    """``TD`` (downwards), or ``LR`` (to the right) where the rows of the drawing would be too wide to read."""
    row = dict.fromkeys(entries, 0)
    for _ in entries:  # no circles: no row is changed more often
        for entry, other in arrows:
            row[other] = max(row[other], row[entry] + 1)
    widest = max(Counter(row.values()).values())
    return "LR" if widest > max(MOST_IN_A_ROW, max(row.values()) + 1) else "TD"


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = (ast.get_docstring(tree(path)) or "").split("\n\n")[0].replace("\n", " ")
    return text.replace("|", "\\|")


def section(folder: str, entries: list[str], known: dict[str, Path]) -> list[str]:
    """A folder as a heading, a drawing and a table."""
    graph = graph_of(folder, entries, known)
    title = f"{folder.replace('.', '/')}/" if folder else "Top folders"
    lines = [f"{'##' if folder.count('.') == 0 else '###'} {title}", ""]
    if folder:
        lines += [purpose(known[folder]), ""]
    arrows = list(_drawn(graph))
    if arrows:
        lines += ["```mermaid", f"flowchart {_direction(entries, arrows)}"]
        for entry in entries:
            name = f"{folder}.{entry}" if folder else entry
            is_folder = known[name].name == "__init__.py"
            lines.append(f'    {entry}_["{entry}/"]' if is_folder else f'    {entry}_("{entry}.py")')
        lines += [f"    {entry}_ --> {other}_" for entry, other in arrows]
        lines += ["```", ""]
    lines += ["| entry | what it holds | lines (rounded) |", "|---|---|---|"]
    for entry in entries:
        name = f"{folder}.{entry}" if folder else entry
        is_folder = known[name].name == "__init__.py"
        shown, size = (f"`{entry}/`", f"{lines_of(name, known):,}") if is_folder else (f"`{entry}.py`", "")
        lines.append(f"| {shown} | {purpose(known[name])} | {size} |")
    return [*lines, ""]


def lines_of(name: str, known: dict[str, Path]) -> int:
    """Lines of all modules of a folder, to the nearest hundred: a page that names each line would change with each commit."""
    paths = [path for other, path in known.items() if f"{other}.".startswith(f"{name}.")]
    return round(sum(len(path.read_text().splitlines()) for path in paths), -2)


def page() -> str:
    """The page's Markdown."""
    known = modules()
    lines = [
        "# Architecture",
        "",
        "Every folder of the product, drawn from its imports by `make docs`. An arrow means",
        "“imports”; arrows that follow from others are left out. No arrows form a circle, a folder has at most",
        f"{MOST_ENTRIES} entries, and no module has more than {MOST_LINES} lines: `tests/packaging/test_architecture.py`",
        "holds that. Why things are so: [Design](design.md).",
        "",
    ]
    for folder, entries in folders(known).items():
        lines += section(folder, entries, known)
    return "\n".join(lines).rstrip() + "\n"
