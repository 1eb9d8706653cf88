"""`Sessions`: the sessions of clients, which end by request or without heartbeats."""

from __future__ import annotations

import secrets
import time
from typing import Any

from weightlane.ckpt_engines import ClosedError

from ..errors import UnknownError
from .store import Store

_PART = "service sessions"


class Sessions:
    """Sessions of clients, which end when their client finishes them, or sends no heartbeat for `timeout_s` seconds."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s

    def create(self, client: str, about: dict[str, Any]) -> str:
        """Begin a session. Returns its id."""
        session, now = f"s-{secrets.token_hex(8)}", time.time()
        self._store.insert("sessions", id=session, client=client, created=now, seen=now, about=about)
        return session

    def seen(self, session: str, client: str) -> None:
        """Record a heartbeat. Raises the errors of `require`."""
        self.require(session, client)
        self._store.update("sessions", session, seen=time.time())

    def require(self, session: str, client: str) -> None:
        """Raise `UnknownError` unless `client` has this session, and `ClosedError` if it has ended."""
        if ended := self._ended(session, client):
            raise ClosedError(f"the session {session} has ended: {ended}.", part=_PART, hint="Make a new client.")

    def end(self, session: str, client: str, reason: str) -> None:
        """End a session, unless it has ended. Raises `UnknownError` if `client` has none of that id."""
        if not self._ended(session, client):
            self._store.update("sessions", session, ended=reason)

    def give_time(self) -> None:
        """Set the last heartbeat of every open session to now, because clients could send none while no service ran."""
        self._store.change("UPDATE sessions SET seen = ? WHERE ended IS NULL", time.time())

    def end_silent(self) -> None:
        """End the sessions without a heartbeat for too long."""
        reason, since = f"no heartbeat for {self._timeout_s:.0f} s", time.time() - self._timeout_s
        self._store.change("UPDATE sessions SET ended = ? WHERE ended IS NULL AND seen < ?", reason, since)

    def _ended(self, session: str, client: str) -> str | None:
        """Why a session has ended; None if it has not. Raises `UnknownError` if `client` has none of that id."""
        row = self._store.row("SELECT ended FROM sessions WHERE id = ? AND client = ?", session, client)
        if row is None:
            raise UnknownError(f"there is no session {session}.", part=_PART, hint="Make a new ServiceClient.")
        return None if row["ended"] is None else str(row["ended"])
