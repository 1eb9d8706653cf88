"""`Sessions`: clients that are there, and what ends with them."""

from __future__ import annotations

import secrets
import time
from typing import Any

from weightlane.ckpt_engines import ClosedError

from ..errors import UnknownError
from .store import Store

_PART = "service sessions"


class Sessions:
    """Sessions of clients. One whose client sends no heartbeat any more, or says that it is done, ends.

    Args:
        store: Knows them.
        timeout_s: Seconds without a heartbeat after which a session ends.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s

    def create(self, client: str, about: dict[str, Any]) -> str:
        """Begin a session; its id."""
        session, now = f"s-{secrets.token_hex(8)}", time.time()
        self._store.insert("sessions", id=session, client=client, created=now, seen=now, about=about)
        return session

    def seen(self, session: str, client: str) -> None:
        """Note a sign of life. Raises as `require`."""
        self.require(session, client)
        self._store.update("sessions", session, seen=time.time())

    def require(self, session: str, client: str) -> None:
        """Raise `ConfigError` unless `client` has this session, and `ClosedError` if it has ended."""
        row = self._store.row("SELECT ended FROM sessions WHERE id = ? AND client = ?", session, client)
        if row is None:
            raise UnknownError(f"there is no session {session}.", part=_PART, hint="Make a new ServiceClient.")
        if row["ended"]:
            raise ClosedError(
                f"the session {session} has ended: {row['ended']}.", part=_PART, hint="Make a new client."
            )

    def end(self, session: str, client: str, reason: str) -> None:
        """End a session. Does nothing if it has ended."""
        row = self._store.row("SELECT ended FROM sessions WHERE id = ? AND client = ?", session, client)
        if row is None:
            raise UnknownError(f"there is no session {session}.", part=_PART)
        if not row["ended"]:
            self._store.update("sessions", session, ended=reason)

    def give_time(self) -> None:
        """Let every session that had not ended be seen now: nobody could send a heartbeat while no service ran."""
        for row in self._store.rows("SELECT id FROM sessions WHERE ended IS NULL"):
            self._store.update("sessions", row["id"], seen=time.time())

    def end_silent(self) -> list[str]:
        """End the sessions that were silent for too long; their ids."""
        silent = self._store.rows(
            "SELECT id FROM sessions WHERE ended IS NULL AND seen < ?", time.time() - self._timeout_s
        )
        for row in silent:
            self._store.update("sessions", row["id"], ended=f"no heartbeat for {self._timeout_s:.0f} s")
        return [row["id"] for row in silent]
