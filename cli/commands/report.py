"""``weightlane report`` shows a run or a service: as one file, or live in a browser."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..report.html_report import write_page
from ..report.live_report import PageServer
from ..report.run_record import read_record


def write_report(run: Path, out: Path | None, console: Console) -> None:
    """Write the page about the run in `run` to `out`, by default ``report.html`` in it."""
    path = run / "report.html" if out is None else out
    write_page(read_record(run), path)
    console.print(f"the report is {path}", highlight=False, soft_wrap=True, markup=False)


def serve_report(run: Path, port: int, console: Console) -> None:
    """Serve the page about the run in `run` until the command is interrupted."""
    read_record(run)  # raises errors here rather than in the browser
    with PageServer(run, port) as server:
        console.print(f"{server.url} follows {run}; Ctrl-C ends this", highlight=False, soft_wrap=True, markup=False)
        server.serve_forever()
