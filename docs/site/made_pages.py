"""Adds the pages that `make docs` makes from the code to the site: the architecture, and a reference of each public package.

mkdocs calls `on_files`; nothing is written into the folder of the sources.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TEST_LINK = re.compile(r'\[([^\]]+)\]\((?:\.\./)+tests/[^ )]+ "([^"]+)"\)')
"""A link from a page to a file of the tests, which are not part of the site, and its title."""
KEYS = "[Configuration keys](../configuration.md)"
PACKAGES = {
    "sync": (
        f"`CheckpointEngineConfig` and `SyncConfig` are the sections `[checkpoint_engine]` and `[sync]`: {KEYS}.",
        ["sync"],
    ),
    "ckpt_engines": ("", ["ckpt_engines"]),
    "toolkit": ("", ["ckpt_engines.toolkit"]),
    "trainer": (
        f"Its classes of configuration are sections of a run, `[trainer]` and `[data]` among them: {KEYS}.",
        ["trainer", "trainer.user_program"],
    ),
    "rollout": (f"`RolloutConfig` is the section `[rollout]` of a run: {KEYS}.", ["rollout"]),
    "plugins": ("", ["plugins"]),
}
"""Pages of the reference: name, words above, and the packages whose public names it shows."""


def pages() -> dict[str, str]:
    """The Markdown of each made page, by its path in the site."""
    made = {"architecture.md": runpy.run_path(str(HERE / "architecture.py"))["page"]()}
    for name, (words, packages) in PACKAGES.items():
        parts = [f"# `weightlane.{packages[0]}`", words, *(f"::: weightlane.{package}" for package in packages)]
        made[f"reference/api/{name}.md"] = "\n\n".join(filter(None, parts)) + "\n"
    return made


def on_files(files: Any, config: Any) -> Any:
    """Add the made pages to the site's files. Called by mkdocs."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only there while mkdocs runs

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Keep the text and the title of links to the tests. Called by mkdocs."""
    return TEST_LINK.sub(r'<span title="\2">\1</span>', markdown)
