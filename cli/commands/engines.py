"""``weightlane engines`` shows the installed checkpoint engines as a table or as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from weightlane.ckpt_engines import EngineListing


def engine_table(rows: Sequence[EngineListing]) -> Table:
    """Return a table of engines, with the reason why some of them cannot run here."""
    table = Table("engine", "distribution", "devices", "delivery", "also", "available")
    for row in rows:
        facts = plain_listing(row)["capabilities"] or {"devices": [], "delivery": []}
        also = [name.replace("_", " ") for name, value in facts.items() if value is True]
        texts = (row.name, row.distribution, ", ".join(facts["devices"]), ", ".join(facts["delivery"]), ", ".join(also))
        usable = Text("yes", "green") if row.unavailable is None else Text.assemble(("no: ", "red"), row.unavailable)
        table.add_row(*map(Text, texts), usable)
    return table


def plain_listing(row: EngineListing) -> dict[str, Any]:
    """Return `row` as JSON-representable data."""
    facts = asdict(row)
    if row.capabilities is not None:
        facts["capabilities"] |= {
            "devices": sorted(row.capabilities.devices),
            "delivery": sorted(row.capabilities.delivery),
        }
    return facts
