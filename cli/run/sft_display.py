"""Shows supervised fine-tuning to its user: a progress bar on a terminal, lines elsewhere, and a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from weightlane.plugins import hookimpl
from weightlane.trainer.runner.sft_loop import SftSummary


class SftDisplay:
    """An observer that shows the progress of a run of `steps` optimizer steps.

    If `live`, a progress bar is redrawn in place, instead of a line per optimizer step.
    """

    def __init__(self, console: Console, steps: int, *, live: bool) -> None:
        self._console, self._steps = console, steps
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console) if live else None
        self._task = self._bar.add_task("training", total=steps, figures="") if self._bar else None

    def say(self, text: str) -> None:
        """Print one line about the run."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def stop(self) -> None:
        """Stop redrawing the bar."""
        if self._bar is not None:
            self._bar.stop()

    @hookimpl
    def run_started(self, facts: Mapping[str, Any]) -> None:
        """Start the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=facts["step"])
            self._bar.start()

    @hookimpl
    def training_step(self, step: int, facts: Mapping[str, Any]) -> None:
        """Move the bar, or print a line."""
        figures = f"loss {facts['loss']:.4f}  grad norm {facts['grad_norm']:.3g}  {facts['tokens_per_s']:.0f} tok/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, figures=figures)
        else:
            self.say(f"step {step}/{self._steps}  {figures}  epoch {facts['epoch']:.2f}")

    @hookimpl
    def evaluated(self, step: int, facts: Mapping[str, Any]) -> None:
        """Print the mean log-probability."""
        self.say(
            f"held-out log-probability at step {step}: {facts['mean_logprob']:.4f} a token ({facts['tasks']} examples)"
        )

    @hookimpl
    def item_failed(self, facts: Mapping[str, Any]) -> None:
        """Print the failure."""
        self._console.print(f"[yellow]an optimizer step failed:[/yellow] {escape(str(facts['error']))}", soft_wrap=True)

    @hookimpl
    def run_ended(self) -> None:
        """Stop the bar."""
        self.stop()


def print_sft_summary(console: Console, summary: SftSummary, directory: str) -> None:
    """Print the summary of a run whose files are in `directory`."""
    table = Table(title="summary", show_header=False, title_justify="left")
    before, after = summary.heldout_logprob_before, summary.heldout_logprob_after
    if before is not None and after is not None:
        table.add_row("held-out log-probability", f"{before:.4f} -> {after:.4f} a token ({after - before:+.4f})")
    table.add_row("optimizer steps", f"{summary.steps}, {summary.epochs:.2f} epochs")
    table.add_row("tokens trained on", f"{summary.trained_tokens}")
    if summary.skipped_examples:
        table.add_row("examples left out as too long", f"{summary.skipped_examples}")
    if summary.failures:
        failed = ", ".join(f"{count} {kind}" for kind, count in summary.failures.items())
        table.add_row("failed", escape(failed))
    table.add_row("wall time", f"{summary.wall_s:.1f} s")
    table.add_row("files", escape(directory))
    console.print(table)
