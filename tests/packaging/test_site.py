"""The documentation is consistent: generated pages are current, the menu has every page, errors are explained, README short."""

from __future__ import annotations

import ast
import itertools
import re
import runpy
from pathlib import Path

import pytest
from syntax_trees import tree_of

from weightlane.ckpt_engines import errors
from weightlane.rollout import vllm_surface

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEMPLATE = "plugins/packages/weightlane-engine-template"
TORCHRUN = "examples/torchrun"
PACKAGES = runpy.run_path(str(DOCS / "site/made_pages.py"))["PACKAGES"]
MADE = ["architecture.md", *(f"reference/api/{name}.md" for name in PACKAGES)]
"""Pages that are in the built site only."""


def test_pages_that_programs_write_are_current_and_name_tests_that_make_test_runs() -> None:
    for program in ("configuration", "weight_failures"):
        made = runpy.run_path(str(DOCS / f"site/{program}.py"))
        assert made["PAGE"].read_text() == made["page"](), f"run python docs/site/{program}.py"
    for way in itertools.chain(*made["failures"]().values()):
        assert way["outcome"] in made["OUTCOMES"], way["name"]
        assert ("error" in way) == (way["outcome"] == "refused"), way["name"]
        assert hasattr(errors, way.get("error", "ConfigError")), way["name"]
        assert bool(way["tests"]) == (way["outcome"] != "not covered"), way["name"]
        for file, _, name in (test.partition("::") for test in way["tests"]):
            body = tree_of(ROOT / file).body
            (found,) = (each for each in body if isinstance(each, ast.FunctionDef) and each.name == name)
            assert "pytest.mark.exhaustive" not in map(ast.unparse, found.decorator_list), name


def test_the_releases_of_vllm_that_were_tried_are_those_of_the_page_the_extra_and_the_warning() -> None:
    made = runpy.run_path(str(ROOT / ".ci/check-vllm"))
    assert made["PAGE"].read_text() == made["page"](), "run python .ci/check-vllm"
    minors = sorted({made["_numbers"](release)[:2] for release in [*made["results"](), made["OWN"]]})
    first, after = vllm_surface.TRIED
    assert minors == [(0, minor) for minor in range(first[1], after[1])]
    assert f'"vllm>=0.{first[1]},<0.{after[1]}"' in (ROOT / "pyproject.toml").read_text()


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted([*(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")), *MADE])


def test_the_readme_and_the_glossary_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    words = re.findall(r"^\| (?!word|-)", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert 20 < len(words) <= 30


def _lines(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def _rows(page: str) -> int:
    """Rows of the tables that a command has written into a page."""
    made = (ROOT / page).read_text().partition("<!-- made by")[2]
    return len(re.findall(r"^\| (?!---|architecture |[^|]*, from a hub)", made, re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "figure", "counted"),
    [
        ("README.md", r"(\d+) architectures are compared", _rows("docs/reference/models.md")),
        ("docs/design.md", r"The template has (\d+) lines", _lines(f"{TEMPLATE}/weightlane_engine_template.py")),
        ("docs/guides/your-own-loop.md", r"script in (\d+) lines", _lines(f"{TORCHRUN}/train_and_publish.py")),
        ("docs/guides/your-own-training-program.md", r"once, in (\d+) lines", _lines(f"{TORCHRUN}/train_adapters.py")),
    ],
)
def test_what_a_page_states_is_what_one_counts(page: str, figure: str, counted: int) -> None:
    """A figure that no command can count has its command, machine and date beside it; others are here or not stated."""
    stated = re.findall(figure, (ROOT / page).read_text())
    assert stated == [str(counted)]


def test_every_typed_error_and_no_other_is_explained_on_the_page_about_failures() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    classes = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    ours = {each.__name__ for each in classes if issubclass(each, errors.WeightlaneError)}
    assert len(ours) > 20
    assert {word for word in text.split("`") if word.endswith("Error") and word.isidentifier()} == ours


def test_links_and_paths_lead_somewhere() -> None:
    ours = r"`((?:ckpt_engines|sync|trainer|rollout|plugins|cli|tests|benchmarks|examples)/[a-z\d_./-]+\.\w+)`"
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/**/*.md")]
    broken = []
    for page in pages:
        there = {DOCS / path for path in MADE if DOCS in page.parents}
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            leads_to = (page.parent / target).resolve()
            if "://" not in target and leads_to not in there and not leads_to.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
        broken += [f"{page.name}: {path}" for path in re.findall(ours, page.read_text()) if not (ROOT / path).is_file()]
    assert not broken
