"""Shows supervised fine-tuning to its user: a bar on a terminal, lines elsewhere, and a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from weightlane.plugins import hookimpl
from weightlane.trainer.runner.sft_loop import SftSummary

from .display import ProgressDisplay, counted


class SftDisplay(ProgressDisplay):
    """Shows a run of ``weightlane sft``."""

    _newest = ""

    @hookimpl
    def training_step(self, step: int, facts: Mapping[str, Any]) -> None:
        """Refresh the figures, or print a line."""
        self._move(step)
        self._newest = (
            f"loss {facts['loss']:.4f}  grad norm {facts['grad_norm']:.3g}  {facts['tokens_per_s']:.0f} tok/s"
        )
        self._say_step(f"{self._newest}  epoch {facts['epoch']:.2f}")

    @hookimpl
    def evaluated(self, step: int, facts: Mapping[str, Any]) -> None:
        """Print the mean log-probability."""
        self.say(
            f"held-out log-probability at step {step}: {facts['mean_logprob']:.4f} a token ({facts['tasks']} examples)"
        )

    @hookimpl
    def item_failed(self, facts: Mapping[str, Any]) -> None:
        """Print the failure."""
        self._warn("an optimizer step failed", facts["error"])

    def _figures(self) -> RenderableType:
        return self._newest


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
        table.add_row("failed", escape(counted(summary.failures)))
    table.add_row("wall time", f"{summary.wall_s:.1f} s")
    table.add_row("files", escape(directory))
    console.print(table)
