"""`HubClient`: a member's end of its connection to the hub, with its inboxes and pending requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from queue import SimpleQueue

from weightlane.ckpt_engines import ClosedError, Deadline, WeightlaneError
from weightlane.ckpt_engines.channels.connection import Frame

from ..messages import Kind

_CANCEL_S = 2.0
"""Time limit in seconds for the hub's list of present keys, which is requested after a request has timed out."""


class PendingReply:
    """A request to the hub without a reply yet. Any thread may end it with an error (`give_up`)."""

    def __init__(self, client: HubClient, number: int, question: Frame) -> None:
        self._client, self._number, self._question = client, number, question
        self._done = threading.Event()
        self._value = b""
        self._error: WeightlaneError | None = None

    def answer(self, value: bytes) -> None:
        """Let `result` return `value`."""
        self._value = value
        self._done.set()

    def give_up(self, error: WeightlaneError) -> None:
        """Let `result` raise `error`."""
        self._error = error
        self._done.set()

    def result(self, deadline: Deadline) -> bytes | None:
        """Wait for the reply; None if it does not arrive in time. Raises the error passed to `give_up`."""
        done = self._done.wait(deadline.remaining_s)
        if not done or self._error is not None:
            self._client.cancel(self._number, self._question)
        if self._error is not None:
            raise self._error
        return self._value if done else None

    def present(self) -> list[str]:
        """The keys that the request's scope has now; none if the hub does not answer within `_CANCEL_S`."""
        found = self._client.ask(_cancelling(self._number, self._question)).result(Deadline.after(_CANCEL_S))
        return [str(key) for key in json.loads(found)] if found else []


Item = bytes | WeightlaneError


class HubClient:
    """The inboxes and the pending requests of one member.

    `send` is set by the owner of the connection. The connection calls `received` and `ended`; in the hub's process the hub itself
    calls `received`.
    """

    def __init__(self) -> None:
        self.send: Callable[[Frame], None] = lambda _: None
        self._lock = threading.Lock()
        self._asked: dict[int, PendingReply] = {}
        """Pending requests by number."""
        self._last = 0
        self._queues: dict[str, SimpleQueue[Item]] = {}
        self._ended: WeightlaneError | None = None
        self._waits_end: WeightlaneError | None = None
        """The error of every request since `end_waits`."""

    def received(self, frame: Frame) -> None:
        """Handle a frame from the hub."""
        if frame.kind == Kind.MESSAGE:
            if (queue := self._queues.get(frame.name)) is not None:
                queue.put(frame.payload)
            return
        with self._lock:
            asked = self._asked.pop(frame.number, None)
        if asked is None:
            return  # the request was cancelled
        if frame.kind == Kind.OVER:
            asked.give_up(ClosedError(frame.payload.decode(errors="replace"), part="mailbox"))
        else:
            asked.answer(frame.payload)

    def ended(self, error: WeightlaneError) -> None:
        """Note that the connection has ended: all pending requests and all reads of inboxes raise `error`."""
        with self._lock:
            self._ended = self._ended or error
            waiting = list(self._asked.values())
            self._asked.clear()
        for asked in waiting:
            asked.give_up(error)
        for queue in list(self._queues.values()):
            queue.put(error)

    def end_waits(self, error: WeightlaneError) -> None:
        """Let all requests, also later ones, raise `error`. Messages still come and go."""
        with self._lock:
            self._waits_end = error
            waiting = list(self._asked.values())
        for asked in waiting:
            asked.give_up(error)

    def tell(self, frame: Frame) -> None:
        """Send a frame that needs no reply. Raises the error with which the connection has ended."""
        if self._ended is not None:
            raise self._ended
        self.send(frame)

    def ask(self, question: Frame) -> PendingReply:
        """Number a request and send it. Raises the error with which the connection has ended, or that of `end_waits`."""
        with self._lock:
            if (error := self._ended or self._waits_end) is not None:
                raise error
            self._last += 1
            asked = self._asked[self._last] = PendingReply(self, self._last, question)
            numbered = question._replace(number=self._last)
        self.send(numbered)
        return asked

    def cancel(self, number: int, question: Frame) -> None:
        """Cancel a request, so that the hub sends no reply. Never waits."""
        with self._lock:
            waited = self._asked.pop(number, None) is not None
        if waited and question.kind in (Kind.GET, Kind.GATHER):
            self.send(_cancelling(number, question))

    def open_inbox(self, name: str) -> SimpleQueue[Item]:
        """The queue of all messages that are posted to an inbox from now on."""
        queue: SimpleQueue[Item] = SimpleQueue()
        with self._lock:
            self._queues[name] = queue
            if self._ended is not None:
                queue.put(self._ended)
        self.send(Frame(Kind.LISTEN, 0, name, b""))
        return queue


def _cancelling(number: int, question: Frame) -> Frame:
    """The frame that cancels a request, whose reply may already be on the wire. If numbered, the frame gets a reply, too."""
    payload = json.dumps([number, question.payload.decode()]).encode()
    return Frame(Kind.CANCEL, 0, question.name, payload)
