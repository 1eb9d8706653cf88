"""``weightlane plan`` and ``weightlane plan-shape`` report transfer plans: of a run, and of a known model without a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightlane.ckpt_engines import Capabilities, CheckpointEngineRegistry, ConfigError, Delivery
from weightlane.sync.config import Relay, SyncConfig
from weightlane.sync.plan.links import check_relay
from weightlane.sync.publisher import publisher_name

from ..output import console
from ..plan.known_shapes import USUAL, RolloutLayout, TrainerLayout, shape_named, weights
from ..plan.plan_report import Shown, plan_report

_SIDES = (("sender", "sends"), ("receiver", "receives"), ("relay", "relays"))
_DIRECT = Capabilities(frozenset({"cpu"}), frozenset({Delivery.POINT_TO_POINT}))
"""Capabilities of an engine that sends to each receiver."""
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def run_report(path: Path, overrides: Sequence[str], **shown: Unpack[Shown]) -> dict[str, Any]:
    """Return the `plan_report` of the run configured at `path`, with `shown` as in `traffic_report`.

    The report needs no weights in memory and no GPU, and the checkpoint engine need not run here. Raises the errors that
    ``weightlane train`` raises before it starts anything, or a `WeightlaneError` when the training engine cannot tell which
    shards its ranks will hold.
    """
    from weightlane.rollout.contract.registry import rollout_engine_class  # noqa: PLC0415 - for a run only
    from weightlane.trainer.algorithms.composition import check_roles  # noqa: PLC0415 - for a run only
    from weightlane.trainer.dispatch.planned_placements import outlined_placements  # noqa: PLC0415 - for a run only, and needs an extra
    from weightlane.trainer.engines.hf.model_dir import check_model_dir, find_model  # noqa: PLC0415
    from weightlane.trainer.engines.registry import check_trainer  # noqa: PLC0415

    from ..config.run_config import load_config, wire_dtype  # noqa: PLC0415

    config = load_config(path, overrides, runs_here=False)
    check_roles(config.algorithm, config.trainer, config.critic, config.reference)
    model = check_model_dir(find_model(config.model.path))
    check_trainer(config.trainer, model.path, here=False)
    facts = CheckpointEngineRegistry().engine_class(config.checkpoint_engine.backend).capabilities
    sizes = config.rollout.by_size
    of_size: dict[int, Sequence[Any]] = {size: (None,) * size for size in sizes}
    why_whole, computes = "", str(config.rollout.dtype)
    if not facts.persistent or (computes == config.sync.wire_dtype == "auto"):
        # May load vLLM, so it comes after all checks that don't need it.
        planned = {
            size: rollout_engine_class(config.rollout).planned_needs(one, model.path) for size, one in sizes.items()
        }
        needs = next(iter(planned.values()))
        computes = needs.dtype or computes
        if computes == config.sync.wire_dtype == "auto":
            raise ConfigError(
                f"the dtype that the rollout computes in is unknown: {needs.why_whole}",
                part="plan",
                hint="Set rollout.dtype or sync.wire_dtype.",
            )
        if not facts.persistent:
            of_size, why_whole = {size: one.ranks for size, one in planned.items()}, needs.why_whole
    wire = wire_dtype(config, computes)
    placements = outlined_placements(config.trainer, model.path, wire)
    report = plan_report(
        {publisher_name(rank): placement for rank, placement in enumerate(placements)},
        {
            f"rollout-{replica}/{rank}": need
            for replica, one in enumerate(config.rollout.each)
            for rank, need in enumerate(of_size[one.tensor_parallel])
        },
        facts,
        config.sync,
        **shown,
    )
    if why_whole:
        report["notes"].append(f"rollout ranks get whole tensors: {why_whole}")
    told = {"run": str(path), "model": model.architecture, "wire": wire, "engine": config.checkpoint_engine.backend}
    return told | {"trainer": config.trainer.engine} | report


def shape_report(
    name: str,
    trainer: str,
    rollout: str,
    wire: Literal["bf16", "fp8"],
    relay: Relay,
    engine: str,
    **shown: Unpack[Shown],
) -> dict[str, Any]:
    """Return the `plan_report` of a known shape. An empty layout means the shape's usual one.

    Raises `UnknownEngineError`, or `ConfigError` when there is no such shape, the layout does not fit the shape, or the engine
    does not send lanes or cannot relay.
    """
    shape = shape_named(name)
    usual = USUAL[name.lower()]
    holding, needing = TrainerLayout.parse(trainer or usual[0]), RolloutLayout.parse(rollout or usual[1])
    tensors = list(weights(shape))
    facts = _DIRECT
    if engine:
        facts = CheckpointEngineRegistry().engine_class(engine).capabilities
        check_relay(relay, engine, facts)
        if facts.persistent or facts.views:
            raise ConfigError(
                f"{engine} does not send lanes to rollout ranks.",
                part="plan",
                hint="Leave out --engine, or name an engine between hosts, such as nccl.",
            )
    sync = SyncConfig(relay=relay, quantise="fp8" if wire == "fp8" else "none")
    held, needed = holding.placements(shape, tensors), needing.placements(shape, tensors)
    report = plan_report(held, needed, facts, sync, **shown)
    told = {"shape": shape.name, "trainer": trainer or usual[0], "rollout": rollout or usual[1], "wire": wire}
    return told | report


def print_plan(report: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of `shape_report` or `run_report`, as JSON or as tables."""
    if as_json:
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    else:
        _print_tables(console(), report)


def _print_tables(console: Console, report: Mapping[str, Any]) -> None:
    if "run" in report:
        console.print(
            f"{escape(report['run'])}: {escape(report['model'])} in {report['wire']}, trained by"
            f" {escape(report['trainer'])}, sent by {escape(report['engine'])}"
        )
    else:
        console.print(
            f"{escape(report['shape'])} in {report['wire']}, trainer {escape(report['trainer'])},"
            f" rollout {escape(report['rollout'])}"
        )
    console.print(
        f"{report['tensors']} tensors, {_size(report['payload_bytes'])}; {report['trainer_ranks']} trainer ranks to"
        f" {report['rollout_ranks']} rollout ranks in {len(report['replicas'])} replicas"
    )
    crossing = report["crossing_bytes"]
    beyond = crossing - report.get("minimum_bytes", crossing)
    console.print(f"{_size(crossing)} are sent{f', {_size(beyond)} more than necessary' if beyond else ''}")
    if "digest" in report:
        console.print(
            f"plan {report['digest']}: {report['cells']} slices in {report['lanes']} lanes,"
            f" {report['relayed_lanes']} of them relayed, {report['broadcast_lanes']} broadcast"
        )
    table = Table("busiest", "rank", "bytes", "of the mean", "seconds at the stated speed")
    for side, does in _SIDES:
        if (most := report[f"busiest_{side}"]) is not None:
            seconds = "" if most["seconds"] is None else f"{most['seconds']:.3f}"
            table.add_row(does, escape(most["rank"]), _size(most["bytes"]), f"{most['over_mean']:.3f}", seconds)
    console.print(table)
    if report["links"]:
        table = Table("busiest links", "to", "bytes")
        for link in report["links"]:
            table.add_row(escape(link["from"]), escape(link["to"]), _size(link["bytes"]))
        console.print(table)
    for note in report.get("notes", ()):
        console.print(f"note: {escape(note)}")


def _size(nbytes: float) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes:.0f} B"
