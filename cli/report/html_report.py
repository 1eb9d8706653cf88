"""`page_of`: a record as one HTML file, which needs no other file and no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import StorageError
from weightlane.plugins.trace.part import finite

_FILES = Path(__file__).parent / "page_files"


def page_of(record: Mapping[str, Any]) -> str:
    """The page that shows `record`. If its ``live`` is true, the page asks for ``record.json`` again and again."""
    # Keeps text in the record from ending the script element.
    record_text = json_of(record).replace("<", "\\u003c")
    page = _file("page.html")
    for place, text in (
        ("STYLE", _file("page.css")),
        ("CHARTS", _file("chart.min.js")),
        ("PAGE", _file("page.js")),
        ("RECORD", record_text),  # the last, since it may hold the name of another place
    ):
        page = page.replace(f"/*{place}*/", text, 1)
    return page


def json_of(record: Mapping[str, Any]) -> str:
    """The record as JSON."""
    return json.dumps(finite(record), allow_nan=False, separators=(",", ":"))


def write_page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page completely or not at all. Raises `StorageError` when the file can't be written."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(page_of(record), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise StorageError(
            f"cannot write {path}: {error.strerror}.", part="report", hint="Choose another --out."
        ) from error


def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")
