"""`Futures`: accepted requests and their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from contextlib import suppress
from typing import NoReturn

from weightlane.ckpt_engines import ConfigError, ProtocolError, StorageError, WeightlaneError

from .store import Store, StoredRequest

JSON, PROTOBUF = "application/json", "application/x-protobuf"
ERROR = "error"
"""The media type of an answer that is a failure."""
_PART = "service"
_CLIENT_ERRORS = (ConfigError, ProtocolError)
"""Errors that the client caused."""
_DEATH_NOTICE_S = 5.0
"""Seconds within which the death of a process is reported."""


class Futures:
    """Accepts requests, each once, and lets clients wait for their answers. Everything is stored before a client hears of it.

    A client that repeats a request, because it has lost the answer, gets the same future.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answered: dict[str, asyncio.Event] = {}
        self._ending = asyncio.Event()
        self._unstored: asyncio.Queue[StorageError] = asyncio.Queue()

    def accept(self, kind: str, owner: str, seq: int, client: str, payload: bytes) -> tuple[StoredRequest, bool]:
        """Store request number `seq` of `owner`, a model or sampler, unless it is there. Returns it, and whether it is new.

        Raises `ProtocolError` if a request of that owner with this number has different content.
        """
        digest = hashlib.sha256(kind.encode() + b"\0" + payload).hexdigest()
        name = f"{owner}:{seq}"
        new = self._store.insert(
            "requests",
            id=name,
            kind=kind,
            owner=owner,
            seq=seq,
            client=client,
            state="queued",
            created=time.time(),
            digest=digest,
            payload=payload,
        )
        request = self._store.request(name)
        assert request is not None
        if request.digest != digest:
            raise ProtocolError(
                f"request {seq} of {owner} was sent before, and said something else.",
                part=_PART,
                hint="Each request of a client has a number of its own; two processes may be using one client.",
            )
        return request, new

    def finish(self, request: str, body: bytes, media: str = JSON, *, keep_payload: bool = False) -> None:
        """Answer a request. With `keep_payload`, it may have to run again after a crash.

        An answer that cannot be stored ends the service, by `watch`. The request then runs again after the next start.
        """
        try:
            self._store.finish(request, body, media, keep_payload=keep_payload)
        except StorageError as error:
            self._unstored.put_nowait(error)
            return
        if (event := self._answered.pop(request, None)) is not None:
            event.set()

    def fail(self, request: str, error: BaseException, *, keep_payload: bool = False) -> None:
        """Answer a request by an error: the client's for a `ConfigError` or `ProtocolError`, otherwise the server's."""
        ours = not isinstance(error, _CLIENT_ERRORS)
        text = str(error) if isinstance(error, WeightlaneError) else f"{type(error).__name__}: {error}"
        body = json.dumps({"error": text, "category": "server" if ours else "user"}).encode()
        self.finish(request, body, ERROR, keep_payload=keep_payload)

    async def watch(self) -> NoReturn:
        """Raise `StorageError` once an answer could not be stored."""
        raise await self._unstored.get()

    async def service_is_ending(self, error: BaseException) -> bool:
        """Whether a request that failed with `error` should run again after the next start, because the service is ending.

        The death of a process makes requests fail, often before the death is reported. So this waits for some seconds, unless
        the error is the client's or the disk's.
        """
        if isinstance(error, (*_CLIENT_ERRORS, StorageError)):
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEATH_NOTICE_S):
                await self._ending.wait()
        return self._ending.is_set()

    async def wait(self, request: str, client: str, timeout_s: float) -> StoredRequest | None:
        """The request, answered or, after `timeout_s` seconds, not; None if `client` has no such request."""
        found = self._of(request, client)
        if found is None or found.state != "queued" or self._ending.is_set():
            return found
        event = self._answered.setdefault(request, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return found
        return self._of(request, client)

    def close(self) -> None:
        """End all waits. Clients ask again after the next start."""
        self._ending.set()
        for event in self._answered.values():
            event.set()

    def forget(self, older_than_s: float) -> None:
        """Drop answers that were given more than `older_than_s` seconds ago."""
        # One with a payload may have to run again.
        self._store.change("DELETE FROM requests WHERE finished < ? AND payload IS NULL", time.time() - older_than_s)

    def _of(self, request: str, client: str) -> StoredRequest | None:
        found = self._store.request(request)
        return found if found is not None and found.client == client else None
