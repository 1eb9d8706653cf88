"""`Inbox`: a queue of control messages for one participant."""

from __future__ import annotations

from queue import Empty

from weightlane.ckpt_engines import Deadline, WeightlaneError
from weightlane.ckpt_engines.channels.connection import Frame

from .hub.client import HubClient, Item, Mark
from .hub.frames import Kind
from .messages import Message, Stop, decode, encode


class Inbox:
    """A queue of control messages with one reader.

    Args:
        client: This process's connection to the hub.
        name: The inbox's name; it gets the messages that are posted to that name from now on.
        keep_open: The owner of the connection. The reference keeps the connection open.
    """

    def __init__(self, client: HubClient, name: str, keep_open: object) -> None:
        self.name = name
        self._client = client
        self._keep_open = keep_open
        self._queue = client.open_inbox(name)

    def get(self, deadline: Deadline | None = None) -> Message:
        """Wait for the next message.

        Raises `DeadlineExceededError`, `ClosedError` if the connection to the hub has ended, or `ProtocolError` for a malformed
        message.
        """
        while (message := self._next(deadline)) is None:
            if deadline is not None and deadline.expired:
                raise deadline.error("a control message", part=self.name)
        return message

    def get_nowait(self) -> Message | None:
        """The next message if there is one. Raises the same errors as `get`."""
        return self._next(Deadline.after(0.0))

    def stop(self) -> None:
        """Append a `Stop` message for this inbox's reader."""
        self._queue.put(encode(Stop()))

    def _acknowledge(self, mark: Mark) -> None:
        self._client.send(Frame(Kind.READ, mark.number, self.name, b""))

    def _next(self, deadline: Deadline | None) -> Message | None:
        while True:
            item: Item
            try:
                item = self._queue.get(timeout=deadline.remaining_s if deadline else None)
            except Empty:
                return None
            if isinstance(item, WeightlaneError):
                self._queue.put(item)  # the next call raises it, too
                raise item
            if not isinstance(item, Mark):
                return decode(item)
            self._acknowledge(item)
