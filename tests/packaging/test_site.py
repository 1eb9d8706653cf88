"""The documentation is consistent: generated pages are current, the menu has every page, README and glossary are short."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_configuration_reference_is_that_of_the_models() -> None:
    made = runpy.run_path(str(DOCS / "site/configuration.py"))["page"]()
    assert (DOCS / "reference/configuration.md").read_text() == made, "run python docs/site/configuration.py"


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_readme_and_the_glossary_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    words = re.findall(r"^\| (?!word|-)", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert 20 < len(words) <= 30


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/**/*.md")]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
