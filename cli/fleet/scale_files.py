"""The two files through which ``weightlane scale`` reaches a run, also from another machine that shares the run's directory.

- ``state/scale.json``: a `ScaleRequest`, the newest one
- ``state/fleet.json``: the run's `FleetRecord`, while it trains

Each is replaced as a whole, so that nobody reads half of one. Whoever may write in the run's directory may scale the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

REQUEST, RECORD = Path("state/scale.json"), Path("state/fleet.json")
_MOST_BYTES = 1 << 20
"""Limit for the length of a file that is read: far more than the names of all replicas take."""


class ScaleRequest(BaseModel):
    """How many replicas a run is to have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str = Field(min_length=1, max_length=64)
    """Name of the request, which no other one has."""
    replicas: int = Field(ge=1)


class FleetRecord(BaseModel):
    """The replicas of a run by name, and what became of the newest request."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    host: str
    pid: int
    beat: int = 0
    """Grows every few seconds while the run lives."""
    request: str = ""
    """Key of the newest request that the run has read."""
    refused: str = ""
    """Why it was refused; empty if it was not."""
    wanted: int = 0
    """Number of replicas when everything that has begun has ended."""
    serving: tuple[str, ...] = ()
    joining: tuple[str, ...] = ()
    """Replicas that have started, and get no requests yet."""
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    failed: str = ""
    """Why a replica could not start since the newest request; empty if none failed."""


_Model = TypeVar("_Model", bound=BaseModel)


def read_file(model: type[_Model], path: Path) -> _Model | None:
    """Read a file of this kind. None if it is missing, or cannot be read, or holds anything else."""
    try:
        with path.open("rb") as file:
            return model.model_validate_json(file.read(_MOST_BYTES))
    except (OSError, ValidationError):
        return None
