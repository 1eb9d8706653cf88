"""``weightlane layout`` shows where each tensor of a model goes on each rollout rank, as a table or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_COMMITS = {
    "traced": "[green]every version is committed by copies[/green]",
    "mixed": "[yellow]versions are committed by copies, but some layers by vLLM's own loading[/yellow]",
    "reload": "[red]versions are committed by vLLM's own loading[/red]",
}
_SHOWN = 20
"""Most tensors that are listed in one place; JSON has all of them."""


def print_layout(console: Console, report: Mapping[str, Any]) -> None:
    """Print the result of `weightlane.rollout.layout.offline.layout_report.layout_report`."""
    for line in _verdict(report):
        console.print(line)
    table = Table("rank", "tensors", "copies", "MB copied", "parameters", "padding", "learned in", "commit")
    for rank in report["ranks"]:
        table.add_row(
            str(rank["rank"]),
            str(rank["tensors"]),
            str(rank["copies"]),
            f"{rank['bytes'] / 1e6:.1f}",
            str(rank["parameters"]),
            f"{rank['constant_elements']} elements",
            f"{1e3 * rank['learned_s']:.0f} ms",
            rank["method"],
        )
    console.print(table)
    for rank in report["ranks"]:
        if rank["experts"]:
            whole = "" if report["expert_parallel"] or report["tensor_parallel"] == 1 else "a slice of "
            console.print(f"rank {rank['rank']} holds {whole}experts {_experts(rank['experts'])}")
    union = report["union"]
    used = "all used" if not union["unused"] else f"[red]{len(union['unused'])} tensors not used completely[/red]"
    console.print(f"over all ranks: {union['tensors']} tensors, {union['elements']} elements, {used}")
    if report["tied"]:
        console.print(f"second names, which a version does not have: {escape(', '.join(report['tied']))}")
    if report["unread"]:
        console.print(f"not read by any rank, so that a version may lack it: {escape(_some(report['unread']))}")
    for rank in report["ranks"]:
        for line in _beside_copies(rank):
            console.print(f"rank {rank['rank']} {line}")


def _verdict(report: Mapping[str, Any]) -> Iterator[str]:
    divided = ", experts divided between them" if report["expert_parallel"] else ""
    ranks = f"{report['tensor_parallel']} rank(s){divided}"
    quantised = f" ({escape(report['quantization'])})" if report["quantization"] else ""
    commit = "[red]versions are refused[/red]" if report["refusal"] else _COMMITS[report["method"]]
    yield f"{escape(report['architecture'])} in {report['dtype']}{quantised} on {ranks}: {commit}"
    if report["refusal"]:
        yield f"[red]committed versions would be wrong: {escape(report['refusal'])}[/red]"
    if why := report["not_rehearsed"]:
        yield f"[yellow]a worker also compares versions with ordinary loads, which was not done here: {escape(why)}[/yellow]"


def _beside_copies(rank: Mapping[str, Any]) -> Iterator[str]:
    if rank["method"] == "reload":
        yield f"needs {rank['needed_elements']} of these elements for its loading"
    for layer in rank["reloaded"]:
        yield f"reloads {escape(layer)}"
    for refusal in rank["refused"][:_SHOWN]:
        yield f"does not copy {escape(refusal['tensor'])}: {escape(refusal['why'])}"
    if len(rank["refused"]) > _SHOWN:
        yield f"does not copy {len(rank['refused']) - _SHOWN} more; see --json"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more; see --json" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _experts(found: Sequence[Mapping[str, Any]]) -> str:
    """Format the experts that a rank holds, such as ``0-3 of 8``."""
    return "; ".join(f"{_runs(entry['held'])} of {entry['of']}" for entry in found)


def _runs(numbers: Sequence[int]) -> str:
    """Format ascending numbers, successive ones as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
