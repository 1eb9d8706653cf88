"""`Mailbox`: values by key that the participants of a run share."""

from __future__ import annotations

from typing import Any

from weightlane.ckpt_engines import Deadline
from weightlane.ckpt_engines.channels.connection import Frame

from .hub.client import HubClient, PendingReply
from .hub.frames import Kind
from .hub.plain_bytes import from_bytes, to_bytes


class Mailbox:
    """JSON values by key, in one scope. Every method raises `ClosedError` if the connection to the hub has ended.

    Args:
        client: This process's connection to the hub.
        scope: The scope. A scope that is named after a session ends with it.
        keep_open: The owner of the connection. The reference keeps the connection open.
    """

    def __init__(self, client: HubClient, scope: str, keep_open: object) -> None:
        self._client = client
        self._keep_open = keep_open
        self.scope = scope

    def within(self, part: str) -> Mailbox:
        """The mailbox of a part of this scope."""
        return Mailbox(self._client, f"{self.scope}/{part}", self._keep_open)

    def put(self, key: str, value: Any) -> None:
        """Store the JSON-representable `value` under `key`."""
        self._client.tell(Frame(Kind.PUT, 0, self._name(key), to_bytes(value)))

    def get(self, key: str, deadline: Deadline) -> Any:
        """Wait for the value of `key`. Raises `DeadlineExceededError`, or `ClosedError` when the scope's session is over."""
        what = f"{key!r} in mailbox {self.scope}"
        asked = self._client.ask(Frame(Kind.GET, 0, self._name(key), b""))
        if (value := asked.result(deadline)) is None:
            raise deadline.error(what, part="mailbox")
        return from_bytes(value, what)

    def gather(self, count: int) -> PendingReply:
        """Request all values of this scope once it has `count` keys; parse them with `sync.control.hub.mailboxes.gathered`."""
        return self._client.ask(Frame(Kind.GATHER, 0, self.scope, str(count).encode()))

    def delete(self, key: str) -> None:
        """Delete the value of `key`, if it has one. No participant may be waiting for it."""
        self._client.tell(Frame(Kind.DELETE, 0, self._name(key), b""))

    def _name(self, key: str) -> str:
        return f"{self.scope}\n{key}"
