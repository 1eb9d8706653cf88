"""An observer that writes scalars for TensorBoard with tensorboardX, which needs neither TensorBoard nor TensorFlow."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .curves import CurvesObserver
from .hooks import hookimpl

TENSORBOARD_ENV = "WEIGHTLANE_TENSORBOARD"
"""Environment variable with the directory of the event files."""


class TensorBoardObserver(CurvesObserver):
    """Writes curves and texts to an event file in `directory`, which the first event creates.

    Raises `ImportError` if tensorboardX is not installed (extra ``observability``).
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._make: Any = importlib.import_module("tensorboardX").SummaryWriter

    @hookimpl
    def run_ended(self) -> None:
        """Close the file."""
        self.close()

    def _open(self) -> Any:
        return self._make(str(self._directory))

    def _write(self, writer: Any, step: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        for name, text in texts.items():
            writer.add_text(name, text, step)

    def _close(self, writer: Any) -> None:
        writer.close()


def tensorboard_from_environment(directory: str) -> TensorBoardObserver:
    """Make the observer for a value of `TENSORBOARD_ENV`."""
    return TensorBoardObserver(Path(directory))
