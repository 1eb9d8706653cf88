"""`Model`: an adapter, or all weights, that a client trains, and its requests, whose kinds are named here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import LoraConfig
from .store import StoredRequest

CREATE, LOAD, BACKWARD, STEP = "create_model", "load_weights", "forward_backward", "optim_step"
SAVE, SAVE_FOR_SAMPLER, UNLOAD = "save_weights", "save_weights_for_sampler", "unload_model"
SAVE_EXTERNAL = "save_weights_external"
REFUSED = "refused"
"""The kind of requests that are not offered. They have their turn, because later requests wait for it, and do nothing."""


@dataclass(slots=True)
class Model:
    """An adapter, or all weights, that a client trains."""

    id: str
    session: str
    client: str
    config: LoraConfig | None
    """The adapter's settings; None for all weights."""
    about: dict[str, Any]
    """The base model's name, the layers that are trained, and the client's remarks."""
    next_seq: int = 0
    """The number of the next request to run."""
    steps: int = 0
    """Optimizer steps taken."""
    open: bool = False
    """Whether a mini-batch is unfinished: gradients are accumulated, and their step has not been taken."""
    spoiled: str = ""
    """Why a part of the mini-batch has no gradient; empty if every part has."""
    publishing: int = 0
    """Number of requests that have run, and are answered when their version is in service."""
    loaded: bool = False
    """Whether it is on the trainer ranks; otherwise it is in `saved_dir`."""
    saved_seq: int = -1
    """Number of the last request whose effect is in `saved_dir`. Requests up to it never run again."""
    saved_dir: Path | None = None
    saved_steps: int = 0
    waiting: dict[int, StoredRequest] = field(default_factory=dict)
    """Requests that have not run, or not since the process started, by number."""
    progress: float = field(default_factory=time.monotonic)
    """Monotonic time at which a request was last carried out, or the next one arrived."""

    @property
    def file_name(self) -> str:
        """Its id in a form that files and adapters may have as a name."""
        return self.id.replace(":", ".")

    @property
    def adapter(self) -> str | None:
        """The name of its adapter on the trainer ranks; None for all weights."""
        return None if self.config is None else self.file_name

    @property
    def stored_config(self) -> dict[str, Any] | None:
        """`config` as JSON."""
        return None if self.config is None else self.config.model_dump(mode="json")

    @property
    def settled(self) -> bool:
        """Whether its complete state can be saved: no mini-batch is unfinished, and no request that ran lacks its answer."""
        return not self.open and not self.publishing

    @property
    def repeats(self) -> list[int]:
        """Numbers of the waiting requests that have an answer: they ran before a crash, or failed before their turn."""
        return [seq for seq, request in self.waiting.items() if request.state != "queued"]
