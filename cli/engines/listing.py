"""``weightlane engines`` shows the installed engines of all three kinds as tables or as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from weightlane.ckpt_engines import CheckpointEngineRegistry, WeightlaneError, registry
from weightlane.ckpt_engines.runtime.daemon_threads import within

from ..extras import how_to_install, library_of

Listing = dict[str, Any]
"""An engine as JSON-representable data: ``name``, ``distribution``, ``unavailable`` (a reason, or None), and for a checkpoint
engine ``capabilities``, None where its class could not be loaded."""


def listings() -> dict[str, list[Listing]]:
    """Return the installed engines by kind: ``checkpoint``, ``training`` and ``rollout``. Imports those of the first two."""
    return {
        "checkpoint": [
            asdict(row) | {"capabilities": row.capabilities and row.capabilities.to_plain()}
            for row in CheckpointEngineRegistry().list()
        ],
        "training": list(_training()),
        "rollout": [_vllm()],
    }


def _training() -> Iterator[Listing]:
    from weightlane.trainer.engines.registry import GROUP, training_engine_class, training_engine_names  # noqa: PLC0415

    for name in training_engine_names():
        owners = {f"{each.dist.name} {each.dist.version}" for each in entry_points(group=GROUP, name=name) if each.dist}
        unavailable = None
        try:
            within(registry.LISTING_LIMIT_S, partial(training_engine_class, name))
        except WeightlaneError as error:
            unavailable = f"{error.message} {error.hint}".strip()
        except TimeoutError:
            unavailable = f"the import of its module had not ended after {registry.LISTING_LIMIT_S:g} s"
        except Exception as error:  # noqa: BLE001 - a module may raise anything, which costs its own row only
            unavailable = f"its module raised {type(error).__name__}: {error}"
        yield {"name": name, "distribution": " and ".join(sorted(owners)), "unavailable": unavailable}


def _vllm() -> Listing:
    """The rollout engine. Whether it can be used depends on its version, which is known without importing vLLM."""
    found = library_of("vllm")
    reason = found.misfit if found.version else f"vllm is not installed. {how_to_install('vllm')}"
    return {"name": "vllm", "distribution": f"{found.distribution} {found.version}".strip(), "unavailable": reason}


def engine_tables(engines: Mapping[str, Sequence[Listing]]) -> Iterator[Table]:
    """Yield a table for each kind of engine, with the reasons why engines cannot be used here."""
    for kind, rows in engines.items():
        facts = ("devices", "delivery", "also") if kind == "checkpoint" else ()
        available = Column("available", overflow="fold")  # shows a long pip command in full
        table = Table("engine", "distribution", *facts, available, title=f"{kind} engines", title_justify="left")
        for row in rows:
            texts = [row["name"], row["distribution"], *(_capabilities(row) if facts else ())]
            why = row["unavailable"]
            usable = Text("yes", "green") if why is None else Text.assemble(("no: ", "red"), why)
            table.add_row(*map(Text, texts), usable)
        yield table


def _capabilities(row: Listing) -> tuple[str, str, str]:
    declared = row["capabilities"] or {"devices": [], "delivery": []}
    also = [name.replace("_", " ") for name, value in declared.items() if value is True]
    return ", ".join(declared["devices"]), ", ".join(declared["delivery"]), ", ".join(also)
