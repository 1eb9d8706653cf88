"""Stores that refuse, hang, fill up or lose a list: typed errors, and no version is lost or shown half."""

from __future__ import annotations

import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from sessions import soon
from stores import Place, connect, connect_sender, place_of, publish, received, send, version_files
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    StorageError,
    StoringSender,
)
from weightlane.ckpt_engines.engines.filesystem.store_directory import Guard, StoreDirectory


def test_what_could_not_be_removed_is_removed_after_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"path": str(tmp_path), "keep_versions": 1}
    first, _ = connect_sender(options, "session-1")
    publish(first, 1, 100)
    first.close()
    second, _ = connect_sender(options, "session-2")
    publish(second, 2, 100, commit=False)
    with monkeypatch.context() as patched:
        patched.setattr(StoreDirectory, "remove_tree", refuse)
        publish(second, 3, 100)
    assert "not removed" in caplog.text
    assert place_of(tmp_path).latest() == [(3, "session-2/sender-0/v3")]
    assert len(list(tmp_path.glob("*/sender-0/v*"))) == 3
    publish(second, 4, 100)
    assert [path.name for path in tmp_path.glob("*/sender-0/v*")] == ["v4"]


def refuse(*arguments: Any) -> None:
    raise StorageError("cannot.", part="test")


@pytest.mark.parametrize("fails", ["ahead of the list", "behind the list", "at the mark"])
def test_a_version_whose_commit_failed_stays_if_and_only_if_readers_may_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    sender, _ = connect_sender({"path": str(tmp_path)})
    publish(sender, 1, 100, commit=False)
    write_text = StoreDirectory.write_text

    def failing(store: StoreDirectory, path: str, *arguments: Any) -> None:
        fails_here = path.endswith("COMMITTED" if fails == "at the mark" else "latest.json")
        if not fails_here or fails == "behind the list":
            write_text(store, path, *arguments)
        if fails_here:
            raise StorageError("cannot.", part="test")

    with monkeypatch.context() as patched:
        patched.setattr(StoreDirectory, "write_text", failing)
        with pytest.raises(StorageError):
            sender.commit_version(1, {"checksums.json": "7"}, soon())
    sender.close()
    there = [name for name in version_files("session-1/sender-0/v1", 1) if not name.endswith("COMMITTED")]
    stays = ["latest.json", *there]  # and so all of it is there as soon as the list names it
    assert place_of(tmp_path).files() == (stays if fails != "ahead of the list" else [])


@pytest.mark.parametrize("place", ["local", "s3"], indirect=True)
def test_a_write_that_is_stuck_never_replaces_a_later_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local one is stuck in the kernel with its caller; a remote one goes on when its caller has given it up."""
    stuck, go_on = threading.Event(), threading.Event()
    in_turn, run = StoreDirectory._in_turn, Guard.run

    def held_up(store: StoreDirectory, final: str, operation: Callable[[], None], guard: Guard) -> None:
        def late() -> None:
            if final.endswith("latest.json") and not stuck.is_set():
                stuck.set()
                assert go_on.wait(HANG_S)
            operation()

        in_turn(store, final, late, guard)

    def impatient(guard: Guard, operation: Callable[[], Any], waiting_for: str) -> Any:
        """Writes of ``latest.json`` are soon too late, and everything else has its time, however busy the machine is."""
        is_a_write = "to be written" in waiting_for or "an earlier write" in waiting_for
        given_up = is_a_write and "latest.json" in waiting_for
        return run(replace(guard, deadline=Deadline.after(0.1)) if given_up else guard, operation, waiting_for)

    def commit(sender: StoringSender, version: int) -> None:
        with suppress(DeadlineExceededError):
            sender.commit_version(version, {}, soon())

    sender, _ = connect_sender(place.options)
    publish(sender, 1, 100)
    publish(sender, 2, 100, commit=False)
    successor, _ = connect_sender(place.options)  # as when a connection is made anew
    publish(successor, 3, 100, commit=False)
    monkeypatch.setattr(StoreDirectory, "_in_turn", held_up)
    late = threading.Thread(target=commit, args=(sender, 2))
    with monkeypatch.context() as patched:
        patched.setattr(Guard, "run", impatient)
        late.start()
        wait_until(lambda: stuck.is_set() or not late.is_alive(), "write")
        with pytest.raises(DeadlineExceededError, match=r"an earlier write of .*latest\.json"):
            successor.commit_version(3, {}, soon())
    assert place.latest()[0][0] == 1
    newer = threading.Thread(target=commit, args=(successor, 3))
    newer.start()
    go_on.set()
    for thread in (late, newer):
        thread.join(HANG_S)
    assert place.latest()[0][0] == 3


@pytest.mark.parametrize("damage", ["{", '{"version": 1, "directory": "../../etc", "committed": []}'])
def test_a_damaged_list_of_versions_removes_nothing_and_the_next_commit_makes_a_new_one(
    tmp_path: Path, damage: str
) -> None:
    options = {"path": str(tmp_path), "keep_versions": 1}
    first, _ = connect_sender(options, "session-1")
    publish(first, 1, 100)
    first.close()
    (tmp_path / "latest.json").write_text(damage)
    second, _ = connect_sender(options, "session-2")
    publish(second, 2, 100)
    second.close()
    assert place_of(tmp_path).latest() == [(2, "session-2/sender-0/v2")]
    assert (tmp_path / "session-1/sender-0/v1/COMMITTED").exists()


def test_a_store_that_does_not_answer_costs_no_more_than_the_deadline(s3_options: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for url, options in (
            ("s3://weights/x", {**s3_options, "endpoint_url": f"http://{address}"}),
            (f"ftp://{address}/x", {}),
        ):
            with pytest.raises(DeadlineExceededError, match="filesystem sender trainer"):
                connect_sender({"path": url, "storage_options": options}, deadline=Deadline.after(0.3))


def test_a_place_where_nothing_can_be_kept_is_named(
    tmp_path: Path, s3_options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mv = MemoryFileSystem.mv
    monkeypatch.setattr(MemoryFileSystem, "mv", lambda fs, old, new: fs.exists(new) or mv(fs, old, new))
    (tmp_path / "file").write_text("")
    for path, error, says in (
        ("nosuch://bucket/x", ConfigError, "nosuch"),
        (f"{tmp_path}/file/store", StorageError, f"{tmp_path}/file/store"),
        ("s3://no-such-place/x", StorageError, r"no-such-place(?s:.*)credentials"),
        ("ftp://127.0.0.1:1/x", StorageError, r"127\.0\.0\.1:1(?s:.*)refused"),
        ("memory://kept", StorageError, "a rename did not replace .*/kept/probe"),
    ):
        options = {"path": path, "storage_options": s3_options if path.startswith("s3") else {}}
        with pytest.raises(error, match=says):
            CheckpointEngineRegistry().create("filesystem", options).check(soon())
    assert not MemoryFileSystem().exists("/kept")


def test_a_check_leaves_the_directories_that_were_there_and_no_others(tmp_path: Path) -> None:
    for path in (tmp_path / "not" / "there", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        CheckpointEngineRegistry().create("filesystem", {"path": str(path)}).check(soon())
        assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in which no file grows beyond 1 MiB, as on a disk that is full then."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_a_storage_error_that_says_so_and_costs_only_what_was_not_complete(tiny_disk: Path) -> None:
    sender, receiver = connect({"path": str(tiny_disk / "store"), "keep_versions": 1})
    publish(sender, 1, 100_000)
    sent = send(sender, 2, 0, 100_000)
    with pytest.raises(StorageError, match=r"(?i)file too large(?s:.*)\.path") as failure:
        send(sender, 2, 1, 4 << 20)
    assert str(tiny_disk) in str(failure.value)
    version_1, version_2 = (f"session-1/sender-0/v{version}" for version in (1, 2))
    committed = ["latest.json", *version_files(version_1, 1)]
    store = place_of(tiny_disk / "store")
    unfinished = ["session-1/sender-0/sender.json", f"{version_2}/bucket-00000.safetensors"]
    assert store.files() == sorted([*committed, *unfinished])
    assert torch.equal(received(receiver, 2, 0, sent.numel()), sent)  # what was complete before is still good
    sender.close()
    receiver.close()
    assert store.files() == sorted(committed)
    assert store.latest() == [(1, version_1)]
