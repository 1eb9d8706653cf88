"""Every typed error is explained to whoever meets it."""

from __future__ import annotations

from pathlib import Path

from weightlane.ckpt_engines import errors

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"


def test_every_error_stands_in_the_page_about_failures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    ours = [
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, errors.WeightlaneError)
    ]
    assert len(ours) > 20
    assert not [name for name in ours if f"`{name}`" not in text]
    assert not [word for word in text.split("`") if word.endswith("Error") and word.isidentifier() and word not in ours]
