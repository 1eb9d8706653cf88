"""``weightlane engines`` shows the installed engines of all three kinds as tables or as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from rich.table import Column, Table
from rich.text import Text

from weightlane.ckpt_engines import CheckpointEngineRegistry, WeightlaneError, registry
from weightlane.ckpt_engines.registered_class import registered_names
from weightlane.ckpt_engines.runtime.threads import within
from weightlane.plugins.entry_points import entry_points_of

from ..extras import how_to_install, library_of

_Class = TypeVar("_Class")
Listing = dict[str, Any]
"""An engine as JSON-representable data: ``name``, ``distribution``, ``unavailable`` (a reason, or None), for a checkpoint
engine ``capabilities``, and for a rollout engine ``summary``, both None where its class could not be loaded."""


def listings() -> dict[str, list[Listing]]:
    """Return the installed engines by kind: ``checkpoint``, ``training`` and ``rollout``. Imports them."""
    from weightlane.rollout.contract.registry import GROUP as ROLLOUT  # noqa: PLC0415 - loads torch
    from weightlane.rollout.contract.registry import registered_rollout_engine  # noqa: PLC0415
    from weightlane.trainer.engines.registry import GROUP as TRAINING  # noqa: PLC0415
    from weightlane.trainer.engines.registry import training_engine_class  # noqa: PLC0415

    return {
        "checkpoint": [
            asdict(row) | {"capabilities": row.capabilities and row.capabilities.to_plain()}
            for row in CheckpointEngineRegistry().list()
        ],
        "training": [row for row, _ in _registered(TRAINING, training_engine_class)],
        "rollout": [
            row
            | {"summary": None if engine is None else engine.capabilities.summary}
            | ({"unavailable": row["unavailable"] or _why_vllm_is_no_use()} if row["name"] == "vllm" else {})
            for row, engine in _registered(ROLLOUT, registered_rollout_engine)
        ],
    }


def _registered(group: str, load: Callable[[str], _Class]) -> Iterator[tuple[Listing, _Class | None]]:
    """Yield each engine of a group, and what `load` returns for its name: None if it raises or hangs."""
    for name in registered_names(group):
        owners = {f"{each.dist.name} {each.dist.version}" for each in entry_points_of(group, name) if each.dist}
        unavailable, loaded = None, None
        try:
            loaded = within(registry.LISTING_LIMIT_S, partial(load, name))
        except WeightlaneError as error:
            unavailable = f"{error.message} {error.hint}".strip()
        except TimeoutError:
            unavailable = f"the import of its module had not ended after {registry.LISTING_LIMIT_S:g} s"
        except Exception as error:  # noqa: BLE001 - a module may raise anything, which costs its own row only
            unavailable = f"its module raised {type(error).__name__}: {error}"
        yield {"name": name, "distribution": " and ".join(sorted(owners)), "unavailable": unavailable}, loaded


def _why_vllm_is_no_use() -> str | None:
    """The reason in vLLM's version, which is known without importing it; None if there is none."""
    found = library_of("vllm")
    return found.misfit if found.version else f"vllm is not installed. {how_to_install('vllm')}"


def engine_tables(engines: Mapping[str, Sequence[Listing]]) -> Iterator[Table]:
    """Yield a table for each kind of engine, with the reasons why engines cannot be used here."""
    for kind, rows in engines.items():
        facts = {"checkpoint": ("devices", "delivery", "also"), "rollout": ("what it is",)}.get(kind, ())
        available = Column("available", overflow="fold")  # shows a long pip command in full
        table = Table("engine", "distribution", *facts, available, title=f"{kind} engines", title_justify="left")
        for row in rows:
            texts = [row["name"], row["distribution"]]
            texts += _capabilities(row) if kind == "checkpoint" else [row["summary"] or ""] if kind == "rollout" else []
            why = row["unavailable"]
            usable = Text("yes", "green") if why is None else Text.assemble(("no: ", "red"), why)
            table.add_row(*map(Text, texts), usable)
        yield table


def _capabilities(row: Listing) -> tuple[str, str, str]:
    declared = row["capabilities"] or {"devices": [], "delivery": []}
    also = [name.replace("_", " ") for name, value in declared.items() if value is True]
    return ", ".join(declared["devices"]), ", ".join(declared["delivery"]), ", ".join(also)
