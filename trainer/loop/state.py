"""`LoopState`: the position of a run between two optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weightlane.ckpt_engines import ConfigError


@dataclass(frozen=True, slots=True)
class LoopState:
    """The loop's part of a saved state; the trainer saves its own."""

    step: int
    """Optimizer steps taken; also the weight version."""
    stream: Mapping[str, Any]
    """Position in the stream of tasks."""
    outstanding: Sequence[Mapping[str, Any]]
    """Tasks drawn from the stream and not trained on yet."""

    def to_plain(self) -> dict[str, Any]:
        """This state as JSON-representable data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LoopState:
        """Parse a saved state; `ConfigError` for anything else."""
        try:
            return cls(int(plain["step"]), dict(plain["stream"]), [dict(task) for task in plain["outstanding"]])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the saved loop state is damaged: {error!r}.", part="resume") from None
