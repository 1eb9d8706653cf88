"""``weightlane plan``: who would send what to whom, and how long it should take, as a table or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.transfer_plan import Network, plan_report
from weightlane.sync.transfer_plan.layouts import USUAL, RolloutLayout, TrainerLayout
from weightlane.sync.transfer_plan.shapes import shape_named, weights, wire_named

BYTES_PER_GBIT = 1e9 / 8
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def shape_report(
    name: str,
    *,
    trainer: str,
    rollout: str,
    wire: str,
    network: Network,
    cut: str,
    may_relay: bool,
    links: int,
) -> dict[str, Any]:
    """What `plan_report` says of a known shape; empty layouts are the usual ones.

    Raises:
        ConfigError: There is no such shape, type or cut, or the shape cannot be laid out so.
    """
    if cut not in ("exact", "shares"):
        raise ConfigError(f"{cut!r} is no way to cut.", part="plan", hint="--cut is exact or shares.")
    shape = shape_named(name)
    usual = USUAL[name.lower()]
    holding, needing = TrainerLayout.parse(trainer or usual[0]), RolloutLayout.parse(rollout or usual[1])
    tensors = weights(shape, wire_named(wire))
    report = plan_report(
        holding.placements(shape, tensors),
        needing.placements(shape, tensors),
        network,
        cut="exact" if cut == "exact" else "shares",
        may_relay=may_relay,
        links=links,
    )
    told = {"shape": shape.name, "trainer": trainer or usual[0], "rollout": rollout or usual[1], "wire": wire}
    return told | report


def print_plan(console: Console, report: Mapping[str, Any]) -> None:
    """Print what `plan_report` returned, or `shape_report`."""
    if "shape" in report:
        console.print(
            f"{escape(report['shape'])} in {report['wire']}, trainer {escape(report['trainer'])},"
            f" rollout {escape(report['rollout'])}"
        )
    routes = ", ".join(f"{count} {kind}" for kind, count in report["routes"].items())
    console.print(
        f"{report['tensors']} tensors, {_size(report['payload_bytes'])}; {report['trainer_ranks']} trainer ranks to"
        f" {report['rollout_ranks']} rollout ranks in {len(report['replicas'])} replicas"
    )
    console.print(
        f"plan {report['digest']}: {report['cells']} cells in {report['lanes']} lanes ({routes}),"
        f" made in {report['planning_s']:.2f} s"
    )
    crossing, least = report["crossing_bytes"], report["minimum_bytes"]
    beyond = "" if crossing == least else f", {_size(crossing - least)} more than is needed"
    console.print(
        f"{_size(crossing)} cross the wire{beyond}; {_size(report['replicated_bytes'])} are held more than once"
    )
    table = Table("busiest", "rank", "bytes", "of the mean")
    for what in ("sender", "receiver"):
        most = report[f"busiest_{what}"]
        table.add_row(what, escape(most["rank"]), _size(most["bytes"]), f"{most['over_mean']:.3f}")
    table.add_row("share", "", _size(report["largest_share_bytes"]), f"{report['largest_share_over_mean']:.3f}")
    console.print(table)
    if report["links"]:
        table = Table("busiest links", "to", "bytes")
        for link in report["links"]:
            table.add_row(escape(link["from"]), escape(link["to"]), _size(link["bytes"]))
        console.print(table)
    _print_seconds(console, report["predicted"], report["network"])


def _print_seconds(console: Console, predicted: Mapping[str, Any], network: Mapping[str, Any]) -> None:
    table = Table("way", "predicted s", "of direct")
    direct = predicted["direct_s"]
    for way, key in (
        ("busiest network card", "bound_s"),
        ("direct, by this plan", "direct_s"),
        ("gathered, one stream per replica", "one_stream_per_replica_s"),
        ("gathered, handed on by all ranks", "broadcast_tree_s"),
    ):
        table.add_row(way, f"{predicted[key]:.3f}", f"{predicted[key] / direct:.2f}" if direct else "")
    console.print(table)
    console.print(
        f"senders {_size(network['sender_bytes_per_s'])}/s, receivers {_size(network['receiver_bytes_per_s'])}/s,"
        f" {1e6 * network['latency_s']:g} us; busiest: {escape(predicted['bound_by'])}. Links alone: no packing, no commit."
    )


def _size(nbytes: float) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes:.0f} B"
