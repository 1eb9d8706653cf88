"""Storing a version's commit: beside the control thread, one after the other, and closed in the end."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from direct_hop import MakeHop, rows
from store_writer import Writer, tensors_of
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import Deadline, StorageError, SyncAbortedError
from weightlane.ckpt_engines.engines.filesystem.sender import FilesystemSender
from weightlane.sync.send.version_storing import VersionStoring


class Store:
    """Keeps what is committed; holds the first commit up until `go_on` is set."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.kept: list[int] = []

    def commit(self, version: int, deadline: Deadline) -> None:
        assert deadline.remaining_s > 0
        self.begun.set()
        assert self.go_on.wait(HANG_S)
        if version < 0:
            raise StorageError("the disk is full.", part="store")
        if version == 0:
            raise RuntimeError("an engine's own bug")
        self.kept.append(version)


def test_the_newest_version_is_stored_next_and_what_it_overtakes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store, storing = Store(), VersionStoring("trainer-0", HANG_S)
    storing.commit(1, store.commit)
    assert store.begun.wait(HANG_S)
    storing.commit(2, store.commit)
    storing.commit(3, store.commit)
    closed: list[list[int]] = []
    storing.afterwards(lambda: closed.append(list(store.kept)))
    assert not closed, "something is still to be stored through it"
    store.go_on.set()
    wait_until(lambda: bool(closed), "end of storing")
    assert store.kept == [1, 3]
    assert closed == [[1, 3]]
    assert "version 2 served but is not stored" in caplog.text
    storing.afterwards(lambda: closed.append([]))
    assert closed == [[1, 3], []], "nothing is stored: at once"
    storing.close()
    storing.close()


def test_what_cannot_be_stored_is_logged_and_the_next_version_is_stored(caplog: pytest.LogCaptureFixture) -> None:
    store, storing = Store(), VersionStoring("trainer-0", HANG_S)
    store.go_on.set()
    for version in (-1, 0, 4):
        storing.commit(version, store.commit)
        wait_until(lambda: not storing._running and not storing._tasks, "end of storing")
    assert store.kept == [4]
    for version in (-1, 0):
        assert f"version {version} serves but could not be committed in the store" in caplog.text
    storing.close()


def test_a_version_is_stored_with_its_checksums_whatever_was_sent_before_it_could_be(tmp_path: Path) -> None:
    """Versions are steps of a training, and need not follow one another."""
    with closing(Writer({"path": str(tmp_path)}, tensors_of(0))) as writer:
        writer.send(10, tensors_of(10))
        commit = writer.pipeline.committing(10)
        for version in (20, 21, 30):
            writer.send(version, tensors_of(version))
        commit(10, Deadline.after(HANG_S))
    assert latest(tmp_path) == [10]
    assert len(list(tmp_path.rglob("checksums.json"))) == 1


def latest(path: Path) -> list[int]:
    try:
        plain = json.loads((path / "latest.json").read_text())
    except FileNotFoundError:
        return []
    return [plain["version"], *(other["version"] for other in plain.get("kept", []))]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The first commit of a store hangs until `go_on` is set."""
    store, commit_version = Store(), FilesystemSender.commit_version

    def hangs(self: FilesystemSender, version: int, documents: Any, deadline: Deadline) -> None:
        if not store.begun.is_set():
            store.begun.set()
            assert store.go_on.wait(HANG_S)
        commit_version(self, version, documents, deadline)

    monkeypatch.setattr(FilesystemSender, "commit_version", hangs)
    return store


def test_control_messages_are_read_while_a_store_hangs_and_the_older_version_never_comes_out_on_top(
    hop: MakeHop, hanging: Store, tmp_path: Path
) -> None:
    run = hop("filesystem", rows, 1, [None])
    (publisher,) = run.publishers
    run.serve(1)
    assert hanging.begun.wait(HANG_S)
    publisher.wait(1, HANG_S)
    run.coordinator._session.abandon()  # the next version needs a Reset, a Connect, and a Go
    run.serve(2)
    publisher.wait(2, HANG_S)
    run.coordinator._abort(7, StorageError("of no interest.", part="test"))
    with pytest.raises(SyncAbortedError, match="of no interest"):
        publisher.wait(7, HANG_S)
    assert latest(tmp_path / "store") == []
    hanging.go_on.set()
    wait_until(lambda: latest(tmp_path / "store")[:1] == [2], "version 2 in the store")


def test_a_commit_that_hangs_until_its_publisher_has_closed_is_never_published(
    hop: MakeHop, hanging: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weightlane.sync.send.version_storing._CLOSE_S", 0.05)
    run = hop("filesystem", rows, 1, [None])
    run.serve(1)
    assert hanging.begun.wait(HANG_S)
    run.publishers[0].close()
    hanging.go_on.set()
    wait_until(lambda: "version 1 serves but could not be committed in the store" in caplog.text, "end of the commit")
    assert latest(tmp_path / "store") == []
