"""`Ledger`: one object of a store that says which worker has the turn, and what the workers have done.

The object is replaced as a whole, and only over the content that its writer knows. So what a worker does counts from the moment
at which its write of the ledger succeeds, and a worker that has lost its turn, even without noticing, can write it no more.

Clocks of two machines are never compared. The worker that has the turn renews it, which changes the object. Another worker takes
the turn when it has not seen a change for ``lease_s`` seconds of its own clock. The first one stops before that: `_SHARE` of
``lease_s`` after the beginning of its last renewal that succeeded, by its own clock. A directory has a lock in addition: whoever
gets it takes the turn at once, because the worker before has ended.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from weightlane.ckpt_engines import DeadlineExceededError, StorageError, WeightlaneError
from weightlane.ckpt_engines.runtime.threads import start_thread

from .directory_store import DirectoryStore
from .object_store import ObjectStore, decode_json, encode_json

KEY = "worker.json"
_PART = "job store"
_SHARE = 0.7
"""Share of the lease after which a worker that could not renew it stops: the rest is for clocks of different speeds."""
_RENEWALS = 6
"""Renewals in the time of a lease: some may fail."""
_RETRY_S = 0.5
_JOIN_S = 5.0

LEASE_S = 30.0
"""Time after which another worker takes over from one that does not answer: longer than a store's usual hiccups."""


class Ledger:
    """The ledger in `store`. A worker that takes the turn announces `lease_s`, and the others wait that long."""

    def __init__(
        self, store: ObjectStore | DirectoryStore, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._lease_s, self._clock = store, lease_s, clock
        self._lock = threading.RLock()
        """Held while the ledger is written."""
        self._me = ""
        """Identity of this turn; empty without the turn."""
        self._facts: dict[str, Any] = {}
        self._etag: str | None = None
        self._renewed = 0.0
        """When the last write that succeeded began."""
        self._seen: tuple[str, float] = "", 0.0
        """The ledger's last known ETag, and when it was seen for the first time."""
        self._lost: WeightlaneError | None = None
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    @property
    def owner(self) -> str:
        """Identity of this process's turn, like no other."""
        return self._me

    @property
    def facts(self) -> Mapping[str, Any]:
        """The content, as this process has written it. Only with the turn."""
        return self._facts

    def read(self) -> dict[str, Any]:
        """The content at present, for programs without the turn; empty before the first turn."""
        found = self._store.read(KEY)
        return {} if found is None else decode_json(found, f"{self._store.url}/{KEY}")

    def take_turn(self) -> bool:
        """Take the turn if no worker has it, or if the one that had it has ended, or not renewed it. Call it repeatedly."""
        started, locked = self._clock(), self._store.lock()
        found = self._store.read_tagged(KEY)
        content, etag = ({}, None) if found is None else (decode_json(found[0], f"{self._store.url}/{KEY}"), found[1])
        if locked is False:  # a worker that has no owner's name yet, or no more, has the turn all the same
            return False
        if content.get("owner") and not locked:
            assert etag is not None
            if etag != self._seen[0]:
                self._seen = etag, self._clock()
                return False
            if self._clock() - self._seen[1] < float(content.get("lease_s", self._lease_s)):
                return False
            started = self._clock()
        me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        after = {**content, "owner": me, "lease_s": self._lease_s, "turn": content.get("turn", 0) + 1, "write": 0}
        data = encode_json(after)
        new = self._store.swap(KEY, data, etag)
        if new is None:  # another worker was faster, unless the client has repeated this request
            again = self._store.read_tagged(KEY)
            if again is None or again[0] != data:
                return False
            new = again[1]
        self._me, self._facts, self._etag, self._renewed, self._lost = me, after, new, started, None
        self._ended.clear()
        self._renewing = start_thread("weightlane-job-lease", self._renew)
        return True

    def change(self, **facts: Any) -> None:
        """Replace `facts` of the content. Once it returns, they count; if it raises, they may count or not.

        Raises:
            StorageError: The turn was lost.
        """
        with self._lock:
            self.check()
            after = {**self._facts, **facts, "write": self._facts["write"] + 1}
            data, trouble = encode_json(after), None
            while True:
                self._expire(trouble)
                started = self._clock()
                try:
                    etag = self._swapped(data)
                except (StorageError, DeadlineExceededError) as error:
                    if self._store.permanent_errors:
                        raise
                    self.check()
                    trouble = error
                    time.sleep(min(_RETRY_S, self._lease_s / _RENEWALS))
                    continue
                if etag is not None:
                    break
            self._facts, self._etag, self._renewed = after, etag, started

    def _swapped(self, data: bytes) -> str | None:
        """Write `data`. Returns the new ETag; None to try again. Raises the loss of the turn."""
        limit = self._lease_s / _RENEWALS
        etag = self._store.swap(KEY, data, self._etag, limit)
        if etag is not None:
            return etag
        found = self._store.read_tagged(KEY, limit)
        if found is not None and found[0] == data:  # the client has repeated a request that had succeeded
            return found[1]
        owner = decode_json(found[0], KEY).get("owner", "") if found is not None else ""
        if found is not None and owner == self._me:  # a write of this turn that was given up has succeeded late
            self._etag = found[1]
            return None
        raise self._lose(f"the turn has gone to {owner}" if owner else "the turn was ended from outside")

    def check(self) -> None:
        """Raise `StorageError` if the turn was lost, or may have been."""
        if self._lost is not None:
            raise self._lost
        self._expire(None)

    def end_turn(self) -> None:
        """Give the turn back, so that another worker need not wait. Never raises."""
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join(_JOIN_S)
        with suppress(WeightlaneError):  # the others wait until the lease is over
            self.change(owner="")
        self._store.unlock()
        self._lost = self._lost or StorageError("this worker has ended its turn.", part=_PART)

    def _expire(self, trouble: WeightlaneError | None) -> None:
        if self._clock() - self._renewed > _SHARE * self._lease_s:
            why = f"the turn could not be renewed for {_SHARE * self._lease_s:.0f} s"
            raise self._lose(f"{why}: {trouble}" if trouble else why)

    def _lose(self, why: str) -> WeightlaneError:
        self._lost = StorageError(
            f"this worker has lost the jobs in {self._store.url}: {why}.",
            part=_PART,
            hint="Another worker goes on with them. Raise worker.lease_s if the store is slow or processes are stopped for long.",
        )
        return self._lost

    def _renew(self) -> None:
        while not self._ended.wait(self._lease_s / _RENEWALS):
            try:
                self.change()
            except WeightlaneError:
                return  # `check` has it
