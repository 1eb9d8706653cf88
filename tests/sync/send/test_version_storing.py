"""Storing a version's commit: beside the control thread, one after the other, and closed in the end."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from direct_hop import MakeHop, rows
from store_writer import Writer, tensors_of
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import Deadline, StorageError, SyncAbortedError
from weightlane.ckpt_engines.engines.filesystem.sender import FilesystemSender


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


@dataclass
class Hanging:
    """A store whose first commit hangs until `go_on` is set."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Hanging:
    store, commit_version = Hanging(), FilesystemSender.commit_version

    def hangs(self: FilesystemSender, version: int, documents: Any, deadline: Deadline) -> None:
        if not store.begun.is_set():
            store.begun.set()
            assert store.go_on.wait(HANG_S)
        commit_version(self, version, documents, deadline)

    monkeypatch.setattr(FilesystemSender, "commit_version", hangs)
    return store


def test_control_messages_are_read_while_a_store_hangs_and_the_older_version_never_comes_out_on_top(
    hop: MakeHop, hanging: Hanging, tmp_path: Path
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
    hop: MakeHop, hanging: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weightlane.sync.send.version_storing._CLOSE_S", 0.05)
    run = hop("filesystem", rows, 1, [None])
    run.serve(1)
    assert hanging.begun.wait(HANG_S)
    run.publishers[0].close()
    hanging.go_on.set()
    wait_until(lambda: "version 1 serves but could not be committed in the store" in caplog.text, "end of the commit")
    assert latest(tmp_path / "store") == []
