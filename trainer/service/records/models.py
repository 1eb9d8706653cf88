"""`Model`: an adapter, or all weights, that a client trains, and its requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import LoraConfig
from .store import StoredRequest


@dataclass(slots=True)
class Model:
    """An adapter, or all weights, that a client trains."""

    id: str
    session: str
    client: str
    config: LoraConfig | None
    """The adapter's settings; None for all weights."""
    about: dict[str, Any]
    """Remarks of the client."""
    next_seq: int = 0
    """The number of the request that is next."""
    steps: int = 0
    """Optimizer steps taken."""
    open: bool = False
    """Whether gradients have been added up for a step that has not been taken."""
    spoiled: str = ""
    """Why a part of the mini-batch has no gradient; empty if every part has."""
    publishing: int = 0
    """Requests that have run, and are answered when a version is in service."""
    loaded: bool = False
    """Whether it is on the trainer ranks; otherwise it is in `saved_dir`."""
    saved_seq: int = -1
    """Requests up to this number are part of what is in `saved_dir`, and never run again."""
    saved_dir: Path | None = None
    saved_steps: int = 0
    waiting: dict[int, StoredRequest] = field(default_factory=dict)
    """Requests that have not run, or not since the process started, by their numbers."""
    progress: float = field(default_factory=time.monotonic)
    """When a request was last carried out or arrived in its turn."""

    @property
    def file_name(self) -> str:
        """Its id, as files and adapters may be called."""
        return self.id.replace(":", ".")

    @property
    def adapter(self) -> str | None:
        """The adapter that it is on the trainer ranks; None for all weights."""
        return None if self.config is None else self.file_name

    @property
    def stored_config(self) -> dict[str, Any] | None:
        """`config` as JSON."""
        return None if self.config is None else self.config.model_dump(mode="json")

    @property
    def settled(self) -> bool:
        """Whether its whole state can be saved: no gradient is on the ranks only, and no request that ran lacks its answer."""
        return not self.open and not self.publishing

    @property
    def repeats(self) -> list[int]:
        """Numbers of the waiting requests that have an answer: they ran before a crash, or were given up."""
        return [seq for seq, request in self.waiting.items() if request.state != "queued"]
