"""``weightlane plan`` shows the transfer plan of a run and its predicted duration, as tables or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.sync.config import DEFAULT_BUCKET_MIB, MIB
from weightlane.sync.plan import BYTES_PER_GBIT, Network, plan_report
from weightlane.sync.plan.planned_session import planned_session
from weightlane.sync.plan.prediction.layouts import USUAL, RolloutLayout, TrainerLayout
from weightlane.sync.plan.prediction.shapes import shape_named, weights, wire_named
from weightlane.sync.publisher import publisher_name

_DIRECT = (
    ("busiest network card", "bound_s"),
    ("direct, by this plan", "direct_s"),
    ("gathered, one stream per replica", "one_stream_per_replica_s"),
    ("gathered, relayed by all ranks", "broadcast_tree_s"),
)
_STORED = (
    ("gathered by the first rank", "gather_s"),
    ("written by the first rank", "write_s"),
    ("read by every rollout rank", "read_s"),
    ("all steps, bucket by bucket", "stored_s"),
)
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def network_of(
    gb_per_s: float,
    sender_gbps: float | None,
    receiver_gbps: float | None,
    latency_us: float,
    bucket_mib: float | None,
) -> Network:
    """Make a `Network` from the command's options: GB/s of all cards, or Gbit/s of either side. Raises `ConfigError`."""
    return Network(
        1e9 * gb_per_s if sender_gbps is None else BYTES_PER_GBIT * sender_gbps,
        1e9 * gb_per_s if receiver_gbps is None else BYTES_PER_GBIT * receiver_gbps,
        1e-6 * latency_us,
        int((DEFAULT_BUCKET_MIB if bucket_mib is None else bucket_mib) * MIB),
    )


def plan_of(
    target: str,
    of_run: bool,
    overrides: Sequence[str],
    of_shape: Mapping[str, str],
    network: Network,
    *,
    keep_bucket: bool,
    relay: bool,
    links: int,
) -> dict[str, Any]:
    """Return the report of a run's plan, or of that for a known shape.

    Args:
        target: The configuration of a run, or the name of a shape.
        of_run: Whether it is the former.
        overrides: Overrides of the configuration.
        of_shape: The options for a shape, by name; empty where the user gave none.
        network: Speeds of the network.
        keep_bucket: Whether the size of a bucket is that of `network` for a run, too.
        relay: Whether receivers may relay.
        links: Number of busiest links in the report.

    Raises:
        ConfigError: An option is for the other kind of target, or an error of `run_report` or `shape_report`.
    """
    if of_run:
        if given := next((name for name, value in of_shape.items() if value), None):
            raise ConfigError(
                f"--{given} is for shapes, and {target!r} is the configuration of a run.",
                part="plan",
                hint="Use --set.",
            )
        return run_report(Path(target), overrides, network, keep_bucket=keep_bucket, relay=relay, links=links)
    if overrides:
        raise ConfigError(f"--set is for the configuration of a run, and {target!r} is not a file.", part="plan")
    return shape_report(
        target,
        trainer=of_shape["trainer"],
        rollout=of_shape["rollout"],
        wire=of_shape["wire"] or "bf16",
        network=network,
        cut=of_shape["cut"] or "exact",
        may_relay=relay,
        links=links,
    )


def run_report(
    path: Path, overrides: Sequence[str], network: Network, *, keep_bucket: bool, relay: bool, links: int
) -> dict[str, Any]:
    """Return the `planned_session` of the run configured at `path`. Buckets have the run's size unless `keep_bucket`.

    The report needs no weights in memory and no GPU, and the checkpoint engine need not run here.

    Raises:
        WeightlaneError: An error of ``weightlane train`` before it starts anything, or the training engine cannot tell which
            shards its ranks will hold.
    """
    from weightlane.trainer.dispatch.planned_placements import outlined_placements  # noqa: PLC0415 - for a run only, and needs an extra
    from weightlane.trainer.engines.hf.model_dir import check_model_dir, find_model  # noqa: PLC0415
    from weightlane.trainer.engines.registry import training_engine_class  # noqa: PLC0415

    from ..config.run_config import load_config, wire_dtype  # noqa: PLC0415

    config = load_config(path, overrides, runs_here=False)
    model = check_model_dir(find_model(config.model.path))
    training_engine_class(config.trainer.engine).check(config.trainer, model.path)
    # Loads vLLM: after everything that can be wrong without it.
    from weightlane.rollout.layout.offline.planned_needs import planned_needs  # noqa: PLC0415 - as above

    facts = CheckpointEngineRegistry().engine_class(config.checkpoint_engine.backend).capabilities
    tensor_parallel = config.rollout.tensor_parallel
    ranks: Sequence[Any] = (None,) * tensor_parallel
    why_whole, computes = "", str(config.rollout.dtype)
    if not facts.persistent or (computes == config.sync.wire_dtype == "auto"):
        needs = planned_needs(config.rollout, model.path)
        computes = needs.dtype or computes
        if computes == config.sync.wire_dtype == "auto":
            raise ConfigError(
                f"the dtype that the rollout computes in is unknown: {needs.why_whole}",
                part="plan",
                hint="Set rollout.dtype or sync.wire_dtype.",
            )
        if not facts.persistent:
            ranks, why_whole = needs.ranks, needs.why_whole
    wire = wire_dtype(config, computes)
    placements = outlined_placements(config.trainer, model.path, wire)
    report = planned_session(
        {publisher_name(rank): placement for rank, placement in enumerate(placements)},
        {
            f"rollout-{replica}/{rank}": need
            for replica in range(config.rollout.replicas)
            for rank, need in enumerate(ranks)
        },
        facts,
        config.sync,
        network if keep_bucket else replace(network, bucket_bytes=config.sync.bucket_bytes),
        relay=relay,
        links=links,
    )
    if why_whole:
        report["notes"].append(f"rollout ranks get whole tensors: {why_whole}")
    told = {"run": str(path), "model": model.architecture, "wire": wire, "engine": config.checkpoint_engine.backend}
    return told | {"trainer": config.trainer.engine} | report


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
    """Return the `plan_report` of a known shape. An empty layout means the shape's usual one.

    Raises:
        ConfigError: There is no such shape, wire type or cut, or the layout does not fit the shape.
    """
    if cut not in ("exact", "shares"):
        raise ConfigError(f"there is no cut {cut!r}.", part="plan", hint="Set --cut to exact or shares.")
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
    """Print the result of `shape_report` or `run_report`."""
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
    if "gathered_by" not in report:
        _print_lanes(console, report)
    table = Table("busiest", "rank", "bytes", "of the mean")
    for side in ("sender", "receiver"):
        most = report[f"busiest_{side}"]
        table.add_row(side, escape(most["rank"]), _size(most["bytes"]), f"{most['over_mean']:.3f}")
    if "largest_share_bytes" in report:
        table.add_row(
            "largest share", "", _size(report["largest_share_bytes"]), f"{report['largest_share_over_mean']:.3f}"
        )
    console.print(table)
    if report["links"]:
        table = Table("busiest links", "to", "bytes")
        for link in report["links"]:
            table.add_row(escape(link["from"]), escape(link["to"]), _size(link["bytes"]))
        console.print(table)
    _print_seconds(console, report["predicted"], report["network"])
    for note in report.get("notes", ()):
        console.print(f"note: {escape(note)}")


def _print_lanes(console: Console, report: Mapping[str, Any]) -> None:
    routes = ", ".join(f"{count} {kind}" for kind, count in report["routes"].items())
    console.print(
        f"plan {report['digest']}: {report['cells']} cells in {report['lanes']} lanes ({routes}),"
        f" planned in {report['planning_s']:.2f} s"
    )
    crossing, least = report["crossing_bytes"], report["minimum_bytes"]
    beyond = "" if crossing == least else f", {_size(crossing - least)} more than necessary"
    console.print(
        f"{_size(crossing)} cross the wire{beyond}; {_size(report['replicated_bytes'])} are on several trainer ranks"
    )


def _print_seconds(console: Console, predicted: Mapping[str, Any], network: Mapping[str, Any]) -> None:
    stored = "stored_s" in predicted
    table = Table("step" if stored else "route", "predicted s", "of all" if stored else "of direct")
    whole = predicted["stored_s" if stored else "direct_s"]
    for name, key in _STORED if stored else _DIRECT:
        table.add_row(name, f"{predicted[key]:.3f}", f"{predicted[key] / whole:.2f}" if whole else "")
    console.print(table)
    busiest = "the store is assumed to be fast enough" if stored else f"busiest: {escape(predicted['bound_by'])}"
    console.print(
        f"senders {_size(network['sender_bytes_per_s'])}/s, receivers {_size(network['receiver_bytes_per_s'])}/s,"
        f" {1e6 * network['latency_s']:g} us; {busiest}. Predictions cover links only, without packing and commit."
    )


def _size(nbytes: float) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes:.0f} B"
