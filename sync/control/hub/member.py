"""`Member`: a process that is connected to the hub, as the hub sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .frames import Frame


@dataclass(eq=False)
class Member:
    """A connected process, and the inboxes it reads."""

    send: Callable[[Frame, bytes | None], None]
    """Sends a frame without waiting, with the digest of its payload if that is known."""
    inboxes: set[str] = field(default_factory=set)
