"""`PublicationQueue`: decides which `Publication` (a call of `publish`) is copied, offered or sent next, in which session."""

from __future__ import annotations

import logging
import threading
import time

from weightlane.ckpt_engines import ClosedError, Deadline, WeightlaneError

from ..control.messages import Go
from .publication import Publication, SendSession
from .sending_rank import DeltaBase, SendingRank, SnapshotSlot

_log = logging.getLogger(__name__)
_PATIENCE_S = 4.0
_PATIENCE_SNAPSHOTS = 10.0
"""A snapshot that needs memory which receivers still read waits for `_PATIENCE_S` seconds plus `_PATIENCE_SNAPSHOTS` times the
duration of the last snapshot, and then allocates other memory. A receiver loads and copies a version in about the time of a
snapshot, and needs several times that at first, when its own memory is new. Allocating other memory costs as much."""


def key_of(go: Go) -> tuple[int, int]:
    """The `Publication.key` of the publication that is to be sent."""
    return go.version, go.times


class PublicationQueue:
    """The publications of one publisher, and the session they are sent in. Thread-safe.

    One publication is current: it is offered in the session, and sent when the coordinator's `Go` arrives. The newest publication
    replaces the current one as soon as that is not being sent; until then it waits. A newer one supersedes a waiting one.

    Args:
        rank: The trainer rank. If versions may be deltas, a snapshot waits until the version before is committed or aborted.
        closed: Set when the publisher closes; `wake` must follow.
    """

    def __init__(self, rank: SendingRank, closed: threading.Event) -> None:
        self._rank = rank
        self._uses_deltas = rank.chooser is not None
        self._closed = closed
        self._changed = threading.Condition()
        self._waiting: Publication | None = None
        self._current: Publication | None = None
        self._unsent = -1
        self._session: SendSession | None = None
        self._ready_session = ""
        """Name of the session whose connection is up."""
        self._offered = False
        """Whether the current publication was offered in the session."""
        self._go: Go | None = None
        self._sending = False
        self._undecided = -1
        """The sent version that is neither committed nor aborted yet; -1 if there is none."""
        self._decided_by = 0.0
        """Time on the monotonic clock until which a snapshot may wait for the outcome of `_undecided`."""
        self._snapshot_s = 0.0
        """Seconds that the last snapshot took."""
        self._proven = False
        """Whether the newest version with a known outcome was committed."""

    @property
    def closed(self) -> bool:
        """Whether the publisher is closed."""
        return self._closed.is_set()

    @property
    def busy(self) -> bool:
        """Whether the newest published version is neither sent nor aborted yet."""
        return self._unsent >= 0

    @property
    def session(self) -> SendSession | None:
        """The open session, if any; it may not be connected yet."""
        return self._session

    def wake(self) -> None:
        """Make every waiting thread check again whether it has work, or the publisher is closed."""
        with self._changed:
            self._changed.notify_all()

    # -- the training's thread ------------------------------------------------------------------------------------------

    def put(self, publication: Publication) -> Publication | None:
        """Add the newest publication. Returns the waiting one that it supersedes, whose snapshot has not begun."""
        with self._changed:
            superseded, self._waiting = self._waiting, publication
            self._unsent = publication.version
            if self._current is not None and self._current.progress.error is not None:
                # Its failure does not matter any more, and the new one may have the same version number.
                self._current = None
            self._changed.notify_all()
        return superseded

    # -- control thread -------------------------------------------------------------------------------------------------

    def open_session(self, session: SendSession) -> None:
        """Begin a session, which will be connected later."""
        with self._changed:
            self._session = session

    def session_ready(self, name: str) -> None:
        """Have the current publication offered in the session `name`, which is now connected."""
        with self._changed:
            if name != self._ready_session:
                self._ready_session, self._offered = name, False
            self._changed.notify_all()

    def end_session(self) -> SendSession | None:
        """Forget the session, which is over, and return it."""
        with self._changed:
            session, self._session, self._go = self._session, None, None
            return session

    def go(self, message: Go) -> None:
        """Have a version sent, as requested by the coordinator's `message`."""
        with self._changed:
            self._go = message
            self._changed.notify_all()

    def offer_in_full(self, version: int) -> None:
        """Have `version` offered again, in full: a receiver lacks the base of the delta."""
        with self._changed:
            if self._current is not None and self._current.version == version:
                self._current.send_in_full("a receiver lacks the version that a delta would apply to")
                self._offered = False
                self._changed.notify_all()

    def committed(self, version: int) -> Publication | None:
        """Make `version`, which serves, the base of deltas. Returns its publication if that is still current."""
        with self._changed:
            current = self._current
            if current is not None and current.version != version:
                current = None
            if current is not None and current.slot is not None and self._uses_deltas:
                self._rank.base = DeltaBase(current.key, current.identity, current.slot)
            self._decided(version, proven=True)
            return current

    def aborted(self, version: int) -> None:
        """Note that `version` will not serve."""
        with self._changed:
            self._decided(version, proven=False)

    def _decided(self, version: int, *, proven: bool) -> None:
        self._proven = proven
        if self._unsent == version:
            self._unsent = -1
        if self._undecided == version:
            self._undecided = -1
            self._changed.notify_all()

    # -- snapshot thread ------------------------------------------------------------------------------------------------

    def next_to_snapshot(self) -> Publication | None:
        """Wait for the next publication whose snapshot can be taken, and supersede the current one. None once closed."""
        with self._changed:
            while not self.closed and not self._may_snapshot():
                undecided = self._waiting is not None and not self._sending and self._undecided >= 0
                self._changed.wait(max(0.0, self._decided_by - time.monotonic()) if undecided else None)
            if self.closed:
                return None
            publication, self._waiting = self._waiting, None
            replaced, self._current, self._offered = self._current, None, False
        if replaced is not None:
            self._supersede(replaced)
        return publication

    def _supersede(self, publication: Publication) -> None:
        publication.is_superseded = True
        session = self._session
        if session is not None and session.agreement is not None:
            session.agreement.give_up_over()

    def _may_snapshot(self) -> bool:
        if self._waiting is None or self._sending:
            return False
        # The outcome of the version before decides to which version a delta can apply.
        return not self._uses_deltas or self._undecided < 0 or time.monotonic() >= self._decided_by

    def take_snapshot(self, publication: Publication) -> None:
        """Take the snapshot of `publication`, which can be offered and sent meanwhile. Raises the error."""
        with self._rank.writing:
            pass  # wait for a thread that writes to the memory; later ones find that their version is superseded
        slot = self._rank.free_slot()
        self._wait_for_receivers(slot)
        publication.begin_snapshot(slot, everything=not self._proven)
        with self._changed:
            self._current = publication
            self._changed.notify_all()
        publication.take_snapshot()
        self._snapshot_s = publication.progress.seconds

    def _wait_for_receivers(self, slot: SnapshotSlot) -> None:
        """Wait until no receiver reads the slot's memory any more, or replace the memory if that fails."""
        rank = self._rank
        try:
            for name, version in slot.exposed:
                session = self._session
                if session is None or session.name != name or session.pipeline is None:
                    raise ClosedError(f"session {name} is over.", part=rank.name)
                patience_s = _PATIENCE_S + _PATIENCE_SNAPSHOTS * self._snapshot_s
                session.pipeline.reclaim(version, Deadline.after(min(patience_s, rank.deadline_s)))
        except WeightlaneError as error:
            if self.closed:
                raise
            _log.info("%s allocates other memory, since receivers may still read the old: %s", rank.name, error)
            slot.memory.renew()
        slot.exposed.clear()

    def fail(self, publication: Publication, error: WeightlaneError) -> None:
        """Fail a publication because its snapshot has failed: the fence raises `error`.

        It becomes the current one, so that later sessions get its error, unless a newer one waits.
        """
        publication.progress.fail(error)
        self._supersede(publication)
        with self._changed:
            if self._waiting is None:
                self._current = publication
                self._changed.notify_all()

    # -- send thread ----------------------------------------------------------------------------------------------------

    def next_to_send(self) -> tuple[Publication, SendSession, Go | None] | None:
        """Wait until the current publication can be sent or offered. Returns it, its session, and the `Go` to send it, if any.

        Without a `Go` it is to be offered. A `Go` for an older publication means that another rank has not published the newer
        one yet. Returns None once the publisher is closed. The caller must call `sending_ended` afterwards.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._may_send() or self._may_offer())
            current, session = self._current, self._session
            if self.closed or current is None or session is None:
                return None
            if not self._may_send():
                self._offered = True
                return current, session, None
            go, self._go = self._go, None
            if go is not None and key_of(go) == current.key:
                self._sending, self._undecided = True, go.version
                self._decided_by = time.monotonic() + go.deadline_s
            return current, session, go

    def _may_send(self) -> bool:
        # The coordinator may send `Go` for what other ranks have published before this rank does.
        go, current = self._go, self._current
        return go is not None and current is not None and self._session is not None and key_of(go) <= current.key

    def _may_offer(self) -> bool:
        if self._current is None or self._session is None or self._offered:
            return False
        return self._session.name == self._ready_session

    def sent(self, version: int) -> None:
        """Note that `version` was sent."""
        with self._changed:
            if self._unsent == version:
                self._unsent = -1

    def sending_ended(self) -> None:
        """Let the next snapshot begin: the send thread reads no memory any more."""
        with self._changed:
            self._sending = False
            self._changed.notify_all()
