"""The engine reference: made from the engines, complete, and committed as it is made."""

from __future__ import annotations

from pathlib import Path

from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.cli.engine_reference.engine_reference import engine_reference
from weightlane.cli.engine_reference.evidence import EVIDENCE

PAGE = Path(__file__).parents[2] / "docs/reference/engines.md"


def built_in() -> list[str]:
    rows = CheckpointEngineRegistry().list()
    return [row.name for row in rows if row.distribution.split()[0] == "weightlane"]


def test_the_committed_page_is_what_the_engines_declare() -> None:
    assert PAGE.read_text(encoding="utf-8") == engine_reference("weightlane"), (
        "run: weightlane engines --markdown --of weightlane > docs/reference/engines.md"
    )


def test_every_built_in_engine_says_what_was_run_of_it_and_what_was_not() -> None:
    assert sorted(EVIDENCE) == built_in()
    assert {item.result for items in EVIDENCE.values() for item in items} == {"run", "not run"}
