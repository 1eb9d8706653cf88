"""`Store`: the service's state in SQLite, from which a new process resumes after a kill at any moment."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weightlane.ckpt_engines import StorageError

PART = "service store"
DATABASE = "service.sqlite"
"""The database's file name in the service's directory."""
State = Literal["queued", "done", "failed"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, client TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL, ended TEXT, about TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, client TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL,
    used REAL NOT NULL, saved_seq INTEGER NOT NULL DEFAULT -1, saved_dir TEXT, about TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL, client TEXT NOT NULL,
    state TEXT NOT NULL, created REAL NOT NULL, finished REAL, digest TEXT NOT NULL, payload BLOB, answer BLOB,
    media TEXT NOT NULL DEFAULT '', deaths INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS requests_by_owner ON requests (owner, seq);
CREATE INDEX IF NOT EXISTS requests_by_state ON requests (state, finished);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, client TEXT NOT NULL, kind TEXT NOT NULL, directory TEXT NOT NULL,
    created REAL NOT NULL, expires REAL, bytes INTEGER NOT NULL, about TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, client TEXT NOT NULL, model TEXT, checkpoint TEXT, directory TEXT,
    inflight INTEGER NOT NULL, created REAL NOT NULL, clients INTEGER NOT NULL DEFAULT 1
);
"""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """An accepted request."""

    id: str
    kind: str
    owner: str
    """The model, sampler or session that it is for."""
    seq: int
    """Its number among the requests of its owner."""
    client: str
    state: State
    payload: bytes
    answer: bytes
    media: str
    """The answer's media type; ``error`` for a failure, whose answer is JSON."""
    digest: str
    """Of its kind and its payload as the client sent it, also once that is dropped."""


class Store:
    """The service's database, a file in SQLite's WAL mode. Used from one thread.

    Each method is one transaction: all of its changes are stored for the next process, or none.

    The file at `path` is made if there is none. Every method raises `StorageError` if the file can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        hint = "Is another service running on this run.dir? Or move the file away: what it knew is then forgotten."
        with self._typed("opened", hint):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing; a power cut may lose the last moments.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make several changes inside the block atomic."""
        if self._db.in_transaction:
            yield
            return
        with self._typed("written"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite itself may have rolled it back
                    self._db.execute("ROLLBACK")
                raise

    def change(self, statement: str, *values: Any) -> int:
        """Execute a statement that changes rows. Returns their number."""
        with self._typed("written"):
            return self._db.execute(statement, values).rowcount

    def insert(self, table: str, **values: Any) -> bool:
        """Add a row, unless its key exists. Returns whether it was added. Dictionaries are stored as JSON."""
        plain = [json.dumps(value) if isinstance(value, dict) else value for value in values.values()]
        marks = ", ".join("?" * len(plain))
        query = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks}) ON CONFLICT DO NOTHING"  # noqa: S608 - our names
        return self.change(query, *plain) == 1

    def update(self, table: str, key: str, **values: Any) -> None:
        """Change columns of the row whose primary key is `key`."""
        primary = "path" if table == "checkpoints" else "id"
        changes = ", ".join(f"{name} = ?" for name in values)
        self.change(f"UPDATE {table} SET {changes} WHERE {primary} = ?", *values.values(), key)  # noqa: S608 - our names

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """The rows of a SELECT, with ``about`` parsed. A row whose ``about`` is damaged is left out."""
        with self._typed("read"):
            cursor = self._db.execute(query, values)
            every = cursor.fetchall()
        names = [column[0] for column in cursor.description]
        found = []
        for each in every:
            row = dict(zip(names, each, strict=True))
            if "about" in row:
                try:
                    row["about"] = json.loads(row["about"])
                except (ValueError, TypeError):
                    continue
            found.append(row)
        return found

    def row(self, query: str, *values: Any) -> dict[str, Any] | None:
        """The first row of a SELECT; None if there is none."""
        found = self.rows(query, *values)
        return found[0] if found else None

    def request(self, request: str) -> StoredRequest | None:
        """The request of that id, with its answer."""
        found = self._requests("id = ?", request)
        return found[0] if found else None

    def requests_since(self, owner: str, seq: int) -> list[StoredRequest]:
        """Requests of `owner` after `seq`, in their order, whatever their state."""
        return self._requests("owner = ? AND seq > ? ORDER BY seq", owner, seq)

    def queued(self, kind: str) -> list[StoredRequest]:
        """Requests of this kind that have no answer, oldest first."""
        return self._requests("state = 'queued' AND kind = ? ORDER BY created", kind)

    def finish(self, request: str, answer: bytes, media: str, *, keep_payload: bool) -> None:
        """Store the answer of a request, unless it has one. Its payload is dropped, unless it may have to run again."""
        payload = "payload" if keep_payload else "NULL"
        self.change(
            f"UPDATE requests SET state = ?, answer = ?, media = ?, finished = ?, payload = {payload}"  # noqa: S608
            " WHERE id = ? AND state = 'queued'",
            "failed" if media == "error" else "done",
            answer,
            media,
            time.time(),
            request,
        )

    def deaths(self, request: str) -> int:
        """Number of replicas that died while they computed a request."""
        row = self.row("SELECT deaths FROM requests WHERE id = ?", request)
        return 0 if row is None else int(row["deaths"])

    def add_deaths(self, request: str, count: int) -> int:
        """Record that `count` replicas died while they computed a request. Returns the total."""
        self.change("UPDATE requests SET deaths = deaths + ? WHERE id = ?", count, request)
        return self.deaths(request)

    def saved(self, model: str, seq: int, directory: Path) -> None:
        """Record that the effects of a model's requests up to `seq` are in `directory`: none of these requests runs again."""
        with self.transaction():
            self.update("models", model, saved_seq=seq, saved_dir=str(directory))
            self.drop_payloads(model, seq)

    def drop_payloads(self, owner: str, until: int | None = None) -> None:
        """Drop the payloads of `owner`'s answered requests, or those up to number `until`, so that none of them runs again."""
        query = "UPDATE requests SET payload = NULL WHERE owner = ? AND (? IS NULL OR seq <= ?) AND state != 'queued'"
        self.change(query, owner, until, until)

    def _requests(self, condition: str, *values: Any) -> list[StoredRequest]:
        query = "SELECT id, kind, owner, seq, client, state, payload, answer, media, digest FROM requests WHERE "
        return [
            StoredRequest(**{**row, "payload": row["payload"] or b"", "answer": row["answer"] or b""})
            for row in self.rows(query + condition, *values)
        ]

    @contextmanager
    def _typed(self, what: str, hint: str = "Is the disk full? Nothing that was stored is lost.") -> Iterator[None]:
        """Raise `StorageError` for SQLite's errors inside the block, because of which the file cannot be `what`."""
        try:
            yield
        except sqlite3.Error as cause:
            raise StorageError(f"{self._path} cannot be {what}: {cause}.", part=PART, hint=hint) from cause
