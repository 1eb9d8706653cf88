"""An observer that records with torch.profiler, for some steps of trainer ranks and some versions of rollout ranks.

Each rank that is recorded writes one Chrome trace, which ui.perfetto.dev opens next to the trace of a run.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .hooks import Facts, hookimpl

PROFILE_ENV = "WEIGHTLANE_PROFILE"
"""Environment variable with `ProfileSettings` as JSON."""


class ProfileSettings(BaseModel):
    """Steps and ranks that torch.profiler records. A rank's first step, or version, is over when it begins to count."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(
        0,
        ge=0,
        description="Optimizer steps of a trainer rank, and versions of a rollout rank, that torch.profiler records; 0 for none.",
    )
    wait: int = Field(0, ge=0, description="Steps, or versions, after the first one before it warms up.")
    warmup: int = Field(
        1, ge=0, description="Steps, or versions, that it records and drops, since its own start takes time."
    )
    ranks: tuple[int, ...] = Field(
        (0,), description="Ranks that are recorded, of the trainer and of each rollout replica."
    )
    dir: Path = Field(
        Path("profile"), description="Directory of the traces, one file for each rank; relative to run.dir."
    )

    @property
    def all_steps(self) -> int:
        """Steps that a rank takes until its trace is written."""
        return 1 + self.wait + self.warmup + self.steps if self.steps else 0


class ProfilerObserver:
    """Records this process, if it is one of the ranks. All threads are recorded; the trace is written when it is complete."""

    def __init__(self, settings: ProfileSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._profiler: Any = None
        self._counted: int | None = None
        """The last step or version that was counted; roles of one rank report the same steps."""

    @hookimpl
    def rank_stepped(self, rank: int, step: int, facts: Facts) -> None:
        """Count an optimizer step."""
        self._advance(str(facts["participant"]), rank, step)

    @hookimpl
    def version_staged(self, version: int, facts: Facts) -> None:
        """Count a version, which a rollout rank has received."""
        participant = str(facts["participant"])
        number = re.search(r"\d+$", participant)
        self._advance(participant.replace("/", "-"), int(number[0]) if number else 0, version)

    def _advance(self, name: str, rank: int, number: int) -> None:
        if rank not in self._settings.ranks or not self._settings.steps:
            return
        with self._lock:
            if number == self._counted:
                return
            first, self._counted = self._counted is None, number
            if first:
                self._profiler = self._started(self._settings.dir / f"{name}.json.gz")
            elif self._profiler is not None:
                self._profiler.step()
                if self._profiler.step_num >= self._settings.all_steps - 1:
                    self._profiler.stop()
                    self._profiler = None

    def _started(self, path: Path) -> Any:
        import torch  # noqa: PLC0415 - slow, and this process may record nothing
        from torch.profiler import ProfilerActivity, profile, schedule  # noqa: PLC0415

        def write(found: Any) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(path))

        settings = self._settings
        profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=schedule(wait=settings.wait, warmup=settings.warmup, active=settings.steps, repeat=1),
            on_trace_ready=write,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        profiler.start()
        return profiler


def profiler_from_environment(value: str) -> ProfilerObserver:
    """Return the observer for a value of `PROFILE_ENV`. Raises `ValueError` for settings that are wrong."""
    return ProfilerObserver(ProfileSettings.model_validate_json(value))
