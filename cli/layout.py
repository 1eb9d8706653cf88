"""``weightlane layout``: where a model's tensors go on each rollout rank, as a table or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WAYS = {
    "traced": "[green]every version is committed by copies[/green]",
    "mixed": "[yellow]versions are committed by copies, some layers through vLLM's own loading[/yellow]",
    "reload": "[red]versions go through vLLM's own loading[/red]",
}
_SHOWN = 20


def print_layout(console: Console, report: Mapping[str, Any]) -> None:
    """Print what `weightlane.rollout.layout.report.layout_report` returned."""
    console.print(
        f"{escape(report['architecture'])} in {report['dtype']} on {report['tensor_parallel']} rank(s): {_WAYS[report['way']]}"
    )
    table = Table("rank", "tensors", "copies", "MB copied", "parameters", "padding", "learned in", "way")
    for rank in report["ranks"]:
        table.add_row(
            str(rank["rank"]),
            str(rank["tensors"]),
            str(rank["slices"]),
            f"{rank['bytes'] / 1e6:.1f}",
            str(rank["parameters"]),
            f"{rank['constant_elements']} elements",
            f"{1e3 * rank['learned_s']:.0f} ms",
            rank["way"],
        )
    console.print(table)
    union = report["union"]
    used = "all used" if not union["unused"] else f"[red]{len(union['unused'])} tensors not used whole[/red]"
    console.print(f"over all ranks: {union['tensors']} tensors, {union['elements']} elements, {used}")
    if report["tied"]:
        console.print(f"may be left out, or sent and ignored: {escape(', '.join(report['tied']))}")
    for rank in report["ranks"]:
        for layer in rank["reloaded"]:
            console.print(f"rank {rank['rank']} reloads {escape(layer)}")
        for refusal in rank["refused"][:_SHOWN]:
            console.print(f"rank {rank['rank']} does not copy {escape(refusal['tensor'])}: {escape(refusal['why'])}")
        if len(rank["refused"]) > _SHOWN:
            console.print(f"rank {rank['rank']}: {len(rank['refused']) - _SHOWN} more; see --json")
