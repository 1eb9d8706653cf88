"""Shows a run to its user: a live table on a terminal, lines elsewhere, and a summary at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from weightlane.plugins import hookimpl
from weightlane.plugins.curves import is_measure, measure_name
from weightlane.trainer.loop.sampling.tally import described_samples
from weightlane.trainer.loop.summary import RunSummary


class ProgressDisplay(ABC):
    """An observer that shows the progress of a run of `steps` optimizer steps.

    If `live`, a bar and the newest figures are redrawn in place, instead of a line per optimizer step.
    """

    def __init__(self, console: Console, steps: int, *, live: bool) -> None:
        self._console, self._steps, self._step = console, steps, 0
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("training", total=steps)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4) if live else None

    @abstractmethod
    def _figures(self) -> RenderableType:
        """Return the newest figures, which are shown below the bar."""

    def say(self, text: str) -> None:
        """Print one line about the run."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def stop(self) -> None:
        """Stop redrawing."""
        if self._live is not None and self._live.is_started:
            self._live.stop()

    @hookimpl
    def run_started(self, facts: Mapping[str, Any]) -> None:
        """Start to redraw."""
        self._move(facts["step"])
        if self._live is not None:
            self._live.start()

    @hookimpl
    def run_ended(self) -> None:
        """Stop redrawing."""
        self.stop()

    def _move(self, step: int) -> None:
        self._step = step
        self._progress.update(self._task, completed=step)

    def _say_step(self, figures: str) -> None:
        """Print a line about the step that was taken, unless figures are redrawn in place."""
        if self._live is None:
            self.say(f"step {self._step}/{self._steps}  {figures}")

    def _warn(self, event: str, details: object) -> None:
        text = f"[yellow]{escape(event)}:[/yellow] {escape(str(details))}"
        self._console.print(text, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        return Group(self._progress, self._figures())


class RunDisplay(ProgressDisplay):
    """Shows a run of ``weightlane train``."""

    def __init__(self, console: Console, steps: int, *, live: bool) -> None:
        super().__init__(console, steps, live=live)
        self._last: Mapping[str, Any] = {}
        self._sync: Mapping[str, Any] = {}
        self._blocked_s = 0.0
        self._version = 0
        self._failed: Counter[str] = Counter()

    @hookimpl
    def evaluated(self, step: int, facts: Mapping[str, Any]) -> None:
        """Print the accuracy, and whatever else was measured."""
        others = {measure_name(key): value for key, value in facts.items() if is_measure(key) and key != "accuracy"}
        told = "".join(f", {name} {value:.3f}" for name, value in others.items())
        self.say(f"held-out accuracy at step {step}: {facts['accuracy']:.3f} (greedy, {facts['tasks']} tasks){told}")

    @hookimpl
    def training_step(self, step: int, facts: Mapping[str, Any]) -> None:
        """Refresh the figures, or print a line."""
        self._move(step)
        self._last = facts
        if "published_version" in facts:
            self._blocked_s = facts["trainer_blocked_s"]
        published = f" for v{facts['published_version']}" if "published_version" in facts else ""
        self._say_step(
            f"reward {facts['reward']:.3f}  serving v{self._version}"
            f"  staleness {facts['staleness_mean']:.2f} (max {facts['staleness_max']})"
            f"  {facts['tokens_per_s']:.0f} tok/s  trainer blocked {1e3 * self._blocked_s:.1f} ms{published}"
            f"  rollout blocked {1e3 * self._sync.get('rollout_blocked_s', 0.0):.0f} ms{self._failures()}"
        )

    @hookimpl
    def version_committed(self, version: int, facts: Mapping[str, Any]) -> None:
        """Keep the figures of the version for the next line."""
        self._version, self._sync = version, facts

    @hookimpl
    def version_aborted(self, version: int, facts: Mapping[str, Any]) -> None:
        """Print the error."""
        self._warn(f"version {version} aborted", facts["error"])

    @hookimpl
    def replica_quarantined(self, replica: str, facts: Mapping[str, Any]) -> None:
        """Print the error."""
        self._warn(f"{replica} is out of service", facts["error"])

    @hookimpl
    def replica_lost(self, replica: str, facts: Mapping[str, Any]) -> None:
        """Print the error, and whether another replica replaces the lost one."""
        successor = f"; {facts['successor']} starts to replace it" if facts["successor"] else ""
        self._warn(
            f"{replica} is lost", f"{facts['error']} ({facts['left']} left, {facts['needed']} needed{successor})"
        )

    @hookimpl
    def replica_joined(self, replica: str, facts: Mapping[str, Any]) -> None:
        """Print that the replica serves, and the one that it replaces."""
        seconds, dead = f"{facts['seconds']:.0f} s", facts["instead_of"]
        begun = f"replaces {dead} {seconds} after its death" if dead else f"has started within {seconds}"
        self.say(f"{replica} {begun}, and serves version {facts['version']}")

    @hookimpl
    def replica_left(self, replica: str, facts: Mapping[str, Any]) -> None:
        """Print that the replica has left, and what it has left to others."""
        others = f"; others generate {facts['handed_over']} of its groups again" if facts["handed_over"] else ""
        died = f", and died meanwhile: {facts['error']}" if facts["error"] else ""
        self.say(f"{replica} has left after {facts['seconds']:.0f} s; {facts['replicas']} remain{others}{died}")

    @hookimpl
    def item_failed(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Print the first failure of each kind, and count the others."""
        self._failed[kind] += facts["count"]
        if self._failed[kind] == facts["count"]:
            item = "an optimizer step" if kind == "step" else f"a sample ({kind})"
            self._warn(f"{item} failed", f"{facts['error']} (later ones are only counted here; see failures.jsonl)")

    def _failures(self) -> str:
        return f"  failed: {counted(self._failed)}" if self._failed else ""

    def _figures(self) -> RenderableType:
        last, sync = self._last, self._sync
        table = Table.grid(padding=(0, 3))
        table.add_row(
            f"reward {last.get('reward', 0.0):.3f}",
            f"version {self._step} trained, {self._version} serving",
            f"staleness {last.get('staleness_mean', 0.0):.2f} (max {last.get('staleness_max', 0)})",
            f"{last.get('tokens_per_s', 0.0):.0f} tokens/s{escape(self._failures())}",
        )
        table.add_row(
            f"overlap {last.get('overlap_share', 0.0):.0%}",
            f"trainer blocked {1e3 * self._blocked_s:.1f} ms",
            f"rollout blocked {1e3 * sync.get('rollout_blocked_s', 0.0):.0f} ms",
            f"sync latency {1e3 * sync.get('latency_s', 0.0):.0f} ms",
        )
        return table


def counted(failures: Mapping[str, int]) -> str:
    """Return the number of failures of each kind in words."""
    return ", ".join(f"{count} {kind}" for kind, count in failures.items())


def print_summary(console: Console, summary: RunSummary, directory: str) -> None:
    """Print the summary of a run whose files are in `directory`."""
    table = Table(title="summary", show_header=False, title_justify="left")
    before, after = summary.measured_before or {}, summary.measured_after or {}
    for name in filter(is_measure, before):
        if name in after:
            rise = f"{before[name]:.3f} -> {after[name]:.3f} ({after[name] - before[name]:+.3f})"
            table.add_row(f"held-out {measure_name(name)}", rise)
    aborted = f", {summary.versions_aborted} aborted" if summary.versions_aborted else ""
    table.add_row("versions committed", f"{summary.versions_committed}{aborted}")
    table.add_row("training and generation overlap", f"{summary.overlap_share:.0%} of wall time")
    table.add_row("largest token gap over a commit", f"{1e3 * summary.max_token_gap_s:.0f} ms")
    table.add_row(
        "tokens prefilled again after commits",
        f"{summary.recomputed_tokens}, {summary.recomputed_tokens / max(1, summary.generated_tokens):.2f} per generated token",
    )
    labels = {
        "trainer_blocked_s": "trainer blocked per version",
        "export_s": "export: weights into the snapshot",
        "transfer_s": "transfer: received and verified",
        "install_s": "install: commit of a replica",
        "rollout_blocked_s": "rollout blocked per version",
        "latency_s": "sync latency",
    }
    for name, (p50, p95, longest) in summary.sync_quantiles().items():
        table.add_row(labels[name], f"p50 {1e3 * p50:.1f} ms, p95 {1e3 * p95:.1f} ms, max {1e3 * longest:.1f} ms")
    lost = summary.trainer_lost_per_step_s, summary.rollout_lost_per_step_s
    table.add_row("lost to syncs per step", f"trainer {1e3 * lost[0]:.1f} ms, rollout {1e3 * lost[1]:.1f} ms")
    if summary.synchronous_update_s:
        trainer, rollout = (side / summary.synchronous_update_s for side in lost)
        table.add_row(
            "the same with blocking syncs",
            f"{1e3 * summary.synchronous_update_s:.1f} ms each, of which the above is {trainer:.1%} and {rollout:.1%}",
        )
    for subject, said in described_samples(summary.samples()).items():
        table.add_row(subject, said)
    if summary.dropped_groups:
        table.add_row("groups dropped as too stale", f"{summary.dropped_groups}")
    if summary.failures:
        table.add_row("failed", escape(counted(summary.failures)))
    if summary.replicas_lost:
        table.add_row("rollout replicas lost", f"{summary.replicas_lost}, {summary.replicas_replaced} replaced")
    if summary.replicas_added or summary.replicas_left:
        table.add_row("rollout replicas scaled", f"{summary.replicas_added} added, {summary.replicas_left} left")
    table.add_row("wall time", f"{summary.wall_s:.1f} s")
    table.add_row("files", escape(directory))
    console.print(table)
