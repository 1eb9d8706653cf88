"""A member's end of the control plane: what it asks the hub, and what comes for its inboxes."""

from __future__ import annotations

import json
import threading
from queue import Empty, SimpleQueue

from weightlane.ckpt_engines import ClosedError, Deadline, WeightlaneError

from .frames import Frame
from .hub import Kind, Send

_CANCEL_S = 2.0
"""How long a wait that was in vain lets the hub say what is missing."""
_PART = "mailbox"


class PendingReply:
    """A question to the hub that is not answered yet. It may be given up, with an error, from any thread."""

    def __init__(self, ends: HubClient, number: int, question: Frame) -> None:
        self._ends, self._number, self._question = ends, number, question
        self._done = threading.Event()
        self._value = b""
        self._error: WeightlaneError | None = None

    def answer(self, value: bytes) -> None:
        """The answer has come."""
        self._value = value
        self._done.set()

    def give_up(self, error: WeightlaneError) -> None:
        """Whoever waits raises `error`."""
        self._error = error
        self._done.set()

    def result(self, deadline: Deadline) -> bytes | None:
        """Wait for the answer; None when it has not come in time. Raises what it was given up with."""
        done = self._done.wait(deadline.remaining_s)
        if not done or self._error is not None:
            self._ends.call_off(self._number, self._question)
        if self._error is not None:
            raise self._error
        return self._value if done else None

    def present(self) -> list[str]:
        """The keys of the scope that was asked about, as far as the hub says so at once."""
        found = self._ends.ask(_cancelling(self._number, self._question)).result(Deadline.after(_CANCEL_S))
        return [str(key) for key in json.loads(found)] if found else []


class Mark:
    """In an inbox: to be acknowledged when everything before it was read."""

    def __init__(self, number: int) -> None:
        self.number = number


Item = bytes | Mark | WeightlaneError


class HubClient:
    """The inboxes and the open questions of one connection to the hub.

    `send` is set by whoever connects it. `received` and `ended` are called by the connection, `received` by the hub itself where
    it is in the same process.
    """

    def __init__(self) -> None:
        self.send: Send = lambda *_: None
        self._lock = threading.Lock()
        self._asked: dict[int, PendingReply] = {}
        self._last = 0
        self._queues: dict[str, SimpleQueue[Item]] = {}
        self._over: WeightlaneError | None = None

    def received(self, frame: Frame, digest: bytes | None = None) -> None:
        """The hub says something."""
        del digest
        if frame.kind in (Kind.MESSAGE, Kind.MARK):
            if (queue := self._queues.get(frame.name)) is not None:
                queue.put(frame.payload if frame.kind == Kind.MESSAGE else Mark(frame.number))
            return
        with self._lock:
            asked = self._asked.pop(frame.number, None)
        if asked is None:
            return  # nobody waits for it any more
        if frame.kind == Kind.OVER:
            asked.give_up(ClosedError(frame.payload.decode(errors="replace"), part=_PART))
        else:
            asked.answer(frame.payload)

    def ended(self, error: WeightlaneError) -> None:
        """The hub says nothing any more."""
        with self._lock:
            self._over = self._over or error
            waiting = list(self._asked.values())
            self._asked.clear()
        for asked in waiting:
            asked.give_up(error)
        for queue in list(self._queues.values()):
            queue.put(error)

    def tell(self, frame: Frame) -> None:
        """Send what needs no answer. Raises what the connection has ended with."""
        if self._over is not None:
            raise self._over
        self.send(frame)

    def ask(self, question: Frame) -> PendingReply:
        """Ask the hub something."""
        with self._lock:
            if self._over is not None:
                raise self._over
            self._last += 1
            asked = self._asked[self._last] = PendingReply(self, self._last, question)
            numbered = question._replace(number=self._last)
        self.send(numbered)
        return asked

    def call_off(self, number: int, question: Frame) -> None:
        """Nobody waits for the answer to that question any more: the hub need not keep it. Waits for nobody."""
        with self._lock:
            waited = self._asked.pop(number, None) is not None
        if waited and question.kind in (Kind.GET, Kind.GATHER):
            self.send(_cancelling(number, question))

    def open_inbox(self, name: str) -> SimpleQueue[Item]:
        """What comes for an inbox from now on."""
        queue: SimpleQueue[Item] = SimpleQueue()
        with self._lock:
            self._queues[name] = queue
            if self._over is not None:
                queue.put(self._over)
        self.send(Frame(Kind.LISTEN, 0, name, b""))
        return queue


def _cancelling(number: int, question: Frame) -> Frame:
    """Calls `question`, asked by that number, off. Numbered itself it is answered: the question's answer may be on its way."""
    payload = json.dumps([number, question.payload.decode()]).encode()
    return Frame(Kind.CANCEL, 0, question.name, payload)


def next_of(queue: SimpleQueue[Item], timeout_s: float | None) -> Item | None:
    """The next item, or None after so many seconds."""
    try:
        return queue.get(timeout=timeout_s)
    except Empty:
        return None
