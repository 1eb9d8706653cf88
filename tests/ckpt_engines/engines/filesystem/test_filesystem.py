"""The filesystem engine: what lies in the directory, when it goes, and what a full disk does."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import soon
from stores import (
    Place,
    connect,
    connect_sender,
    content,
    place_of,
    prefix,
    publish,
    receive,
    received,
    send,
    version_files,
)
from waiting import HANG_S, MovableClock

from weightlane.ckpt_engines import (
    Bucket,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    StorageError,
    StoringSender,
    VersionFiles,
)
from weightlane.ckpt_engines.conformance import ConformanceBase, ConnectionMaker, Parcel
from weightlane.ckpt_engines.engines.filesystem.guard import Guard
from weightlane.ckpt_engines.engines.filesystem.store_directory import StoreDirectory


def test_a_version_is_files_that_safetensors_reads_and_receivers_get_every_byte(place: Place) -> None:
    sender, receiver = connect(place.options)
    sizes = [100_001, 0, 9_000]
    publish(sender, 7, *sizes)
    for index, nbytes in enumerate(sizes):
        sent = content(7, index, nbytes)
        assert torch.equal(received(receiver, 7, index, nbytes), sent)
        payload = sent.numpy().tobytes()
        assert place.read(f"session-1/sender-0/v7/bucket-{index:05d}.safetensors") == prefix(len(payload)) + payload
    directory = "session-1/sender-0/v7"
    assert place.files() == sorted(["latest.json", "session-1/sender-0/sender.json", *version_files(directory, 3)])
    assert place.latest() == [(7, directory)]
    assert place.read(f"{directory}/about.json") == b"[7]"
    assert place.read(f"{directory}/checksums.json") == b"7"


def test_without_version_files_buckets_are_plain_files(place: Place) -> None:
    sender, receiver = connect(place.options)
    for index, nbytes in enumerate([100_001, 0, 7]):
        sent = send(sender, 1, index, nbytes)
        assert torch.equal(received(receiver, 1, index, nbytes), sent)
    assert place.read("session-1/sender-0/v1/bucket-00000.safetensors") == content(1, 0, 100_001).numpy().tobytes()
    sender.close()
    receiver.close()
    assert place.files() == []


@pytest.mark.parametrize(("keep", "kept"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_committed_versions_stay_when_the_session_ends_and_nothing_else_of_it(
    place: Place, keep: int, kept: list[int]
) -> None:
    sender, _ = connect_sender({**place.options, "keep_versions": keep})
    for version in (1, 2, 3, 4):
        publish(sender, version, 100, 50)
    publish(sender, 5, 100, commit=False)
    directories = {version: f"session-1/sender-0/v{version}" for version in kept}
    stays = ["latest.json", *(path for directory in directories.values() for path in version_files(directory, 2))]
    unfinished = ["session-1/sender-0/sender.json", *version_files("session-1/sender-0/v5", 1, committed=False)]
    assert place.files() == sorted([*stays, *unfinished])
    sender.close()
    assert place.files() == sorted(stays)
    assert place.latest() == [(version, directories[version]) for version in reversed(kept)]


def test_versions_are_kept_over_sessions_and_older_sessions_vanish(place: Place) -> None:
    options = {**place.options, "keep_versions": 2}
    for session, versions in (("session-1", (1, 2)), ("session-2", (3,)), ("session-3", (2, 3))):
        sender, _ = connect_sender(options, session)
        for version in versions:
            publish(sender, version, 100)
        sender.close()
        if session == "session-2":
            assert place.latest() == [(3, "session-2/sender-0/v3"), (2, "session-1/sender-0/v2")]
    # A run that was resumed from an older state counts by when it committed, not by its numbers.
    assert place.latest() == [(3, "session-3/sender-0/v3"), (2, "session-3/sender-0/v2")]
    assert {path.partition("/")[0] for path in place.files()} == {"latest.json", "session-3"}
    if place.fs.protocol != "memory":
        assert len(place.fs.ls(place.root)) == 2, "a directory was left"


def test_a_receiver_may_take_its_time_while_the_next_version_is_sent(tmp_path: Path) -> None:
    sender, receiver = connect({"path": str(tmp_path), "keep_versions": 1})
    publish(sender, 1, 100, 100)
    assert torch.equal(received(receiver, 1, 0, 100), content(1, 0, 100))
    publish(sender, 2, 100, 100, commit=False)
    publish(sender, 3, 100, 100, commit=False)
    for version, index in ((1, 1), (2, 0), (2, 1), (3, 0), (3, 1)):
        assert torch.equal(received(receiver, version, index, 100), content(version, index, 100))
    sender.commit_version(3, {"checksums.json": "3"}, soon())
    assert place_of(tmp_path).files() == sorted(
        ["latest.json", "session-1/sender-0/sender.json", *version_files("session-1/sender-0/v3", 2)]
    )


def test_a_receiver_that_comes_too_late_for_a_version_is_told_so(tmp_path: Path) -> None:
    sender, receiver = connect({"path": str(tmp_path), "keep_versions": 1})
    publish(sender, 1, 100)
    publish(sender, 2, 100)
    with pytest.raises(StorageError, match="keep_versions"):
        received(receiver, 1, 0, 100)
    sender.close()
    with pytest.raises(PeerLostError, match="closed"):
        received(receiver, 3, 0, 100)


def test_nobody_needs_a_directory_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreDirectory, "names", lambda *arguments: [])
    monkeypatch.setattr(StoreDirectory, "look_again", lambda *arguments: None)
    for session in ("session-1", "session-2"):
        sender, receiver = connect({"path": str(tmp_path), "keep_versions": 1}, session)
        for version in (1, 2):
            publish(sender, version, 100)
            if version == 2:
                assert torch.equal(received(receiver, 2, 0, 100), content(2, 0, 100))
        publish(sender, 3, 100, commit=False)
        sender.close()
        receiver.close()
    assert place_of(tmp_path).files() == sorted(["latest.json", *version_files("session-2/sender-0/v2", 1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "session-2"]


def test_a_file_that_another_host_has_replaced_under_our_hands_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = connect({"path": str(tmp_path)})
    publish(sender, 1, 1000)
    stale, fstat = [2], os.fstat

    def sometimes_stale(descriptor: int) -> os.stat_result:
        if stale[0]:
            stale[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return fstat(descriptor)

    monkeypatch.setattr("weightlane.ckpt_engines.engines.filesystem.payload_file.os.fstat", sometimes_stale)
    assert torch.equal(received(receiver, 1, 0, 1000), content(1, 0, 1000))
    assert stale == [0]


def test_a_version_with_a_missing_bucket_cannot_be_committed(tmp_path: Path) -> None:
    sender, _ = connect({"path": str(tmp_path)})
    sender.open_version(VersionFiles(1, [prefix(10), prefix(10)], {}), soon())
    send(sender, 1, 0, 10)
    with pytest.raises(ProtocolError, match="bucket 1 of it is missing"):
        sender.commit_version(1, {"checksums.json": "1"}, soon())
    with pytest.raises(ProtocolError, match="cannot be committed"):
        sender.commit_version(2, {"checksums.json": "2"}, soon())
    with pytest.raises(ProtocolError, match="not announced"):
        send(sender, 1, 2, 10)
    assert not (tmp_path / "latest.json").exists()


def test_a_file_of_the_wrong_size_is_a_protocol_error(place: Place) -> None:
    changes: list[tuple[Callable[[bytes], bytes], str]] = [
        (lambda file: file[:-1], "neither"),
        (lambda file: file + b"x", "neither"),
        (lambda file: file[1:], "neither"),
        (lambda file: file[:20], "has 20 bytes"),
        (lambda file: b"", "has 0 bytes"),
        (lambda file: bytes([file[0] ^ 1]) + file[1:], "neither"),
    ]
    sender, receiver = connect(place.options)
    for version, (change, says) in enumerate(changes, 1):
        publish(sender, version, 500)
        path = f"session-1/sender-0/v{version}/bucket-00000.safetensors"
        place.write(path, change(place.read(path)))
        with pytest.raises(ProtocolError, match=says) as caught:
            received(receiver, version, 0, 500)
        assert path in str(caught.value)


def test_a_live_sender_keeps_its_versions_whatever_another_one_commits(tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "keep_versions": 1}
    first, _ = connect_sender(options, "session-1")
    publish(first, 1, 100)
    second, _ = connect_sender(options, "session-2")
    publish(second, 9, 100)
    assert place_of(tmp_path).latest() == [(9, "session-2/sender-0/v9"), (1, "session-1/sender-0/v1")]
    assert (tmp_path / "session-1/sender-0/v1/COMMITTED").exists()
    first.close()
    publish(second, 10, 100)
    assert not (tmp_path / "session-1").exists()


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


class HeldUp:
    """Writes of ``latest.json`` by `sender`, which are held up until `go_on` is set."""

    def __init__(self, sender: Any, patch: pytest.MonkeyPatch) -> None:
        self.go_on, self.ended = threading.Event(), threading.Semaphore(0)
        write = sender._store._fs.pipe_file

        def held_up(path: str, data: bytes, *arguments: Any) -> None:
            if not path.endswith("latest.json"):
                write(path, data, *arguments)
                return
            assert self.go_on.wait(HANG_S)
            write(path, data, *arguments)
            self.ended.release()

        patch.setattr(sender._store._fs, "pipe_file", held_up)


@pytest.fixture
def held_up(
    s3_url: str, s3_options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Place, StoringSender, HeldUp]:
    """An object store with version 1, and its sender, whose next ``latest.json`` is held up."""
    place = Place(s3_url, s3_options)
    sender, _ = connect_sender(place.options)
    publish(sender, 1, 100)
    return place, sender, HeldUp(sender, monkeypatch)


def test_a_write_that_was_given_up_never_replaces_a_later_one(held_up: tuple[Place, StoringSender, HeldUp]) -> None:
    place, sender, held = held_up
    for version, waits_for in ((2, "latest.json to be written"), (3, "an earlier write of .*latest.json")):
        publish(sender, version, 100, commit=False)
        with pytest.raises(DeadlineExceededError, match=waits_for):
            sender.commit_version(version, {}, Deadline.after(1.0))
    # A connection that is made anew has a sender of its own.
    successor, _ = connect_sender(place.options)
    publish(successor, 4, 100, commit=False)
    with pytest.raises(DeadlineExceededError, match=r"an earlier write of .*latest\.json"):
        successor.commit_version(4, {}, Deadline.after(1.0))
    held.go_on.set()
    publish(successor, 4, 100)
    assert place.latest()[0][0] == 4
    assert held.ended.acquire(timeout=HANG_S)
    assert place.latest()[0][0] == 4


def test_a_local_write_that_is_stuck_in_the_kernel_never_replaces_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, stuck, go_on = place_of(tmp_path), threading.Event(), threading.Event()
    sender, _ = connect_sender(place.options)
    publish(sender, 1, 100)
    replace = os.replace

    def held_up(source: str, target: str) -> None:
        if str(target).endswith("latest.json") and not stuck.is_set():
            stuck.set()
            assert go_on.wait(HANG_S)
        replace(source, target)

    monkeypatch.setattr("weightlane.ckpt_engines.engines.filesystem.partial_file.os.replace", held_up)
    publish(sender, 2, 100, commit=False)
    late = threading.Thread(target=sender.commit_version, args=(2, {}, soon()))
    late.start()
    assert stuck.wait(HANG_S)
    successor, _ = connect_sender(place.options)
    publish(successor, 3, 100, commit=False)
    with pytest.raises(DeadlineExceededError, match=r"an earlier write of .*latest\.json"):
        successor.commit_version(3, {}, Deadline.after(0.5))
    assert place.latest()[0][0] == 1
    newer = threading.Thread(target=successor.commit_version, args=(3, {}, soon()))
    newer.start()
    go_on.set()
    for thread in (late, newer):
        thread.join(HANG_S)
    assert place.latest()[0][0] == 3


def test_a_version_whose_listing_is_in_doubt_stays_when_its_sender_closes(
    held_up: tuple[Place, StoringSender, HeldUp],
) -> None:
    place, sender, held = held_up
    publish(sender, 2, 100, commit=False)
    with pytest.raises(DeadlineExceededError):
        sender.commit_version(2, {"checksums.json": "2"}, Deadline.after(1.0))
    sender.close()
    held.go_on.set()
    assert held.ended.acquire(timeout=HANG_S)
    assert place.latest()[0] == (2, "session-1/sender-0/v2")
    missing = set(version_files("session-1/sender-0/v2", 1)) - set(place.files())
    assert missing == {"session-1/sender-0/v2/COMMITTED"}, "what readers find is there, but for the mark behind it"


@pytest.mark.parametrize("damage", ["", "{", '{"version": 1, "directory": "../../etc", "committed": []}', "[1]"])
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
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"path": "s3://weights/x", "storage_options": {**s3_options, "endpoint_url": endpoint}}
        with pytest.raises(DeadlineExceededError, match="filesystem sender trainer"):
            connect_sender(options, deadline=Deadline.after(0.3))


def test_a_bucket_that_does_not_exist_is_a_storage_error_with_what_to_check(s3_options: dict[str, str]) -> None:
    options = {"path": "s3://no-such-place/x", "storage_options": s3_options}
    with pytest.raises(StorageError, match=r"no-such-place(?s:.*)credentials"):
        connect_sender(options)


@pytest.mark.parametrize(
    ("remote", "looks_after_s"),
    [(False, [0, 0.005, 0.01, 0.02, 0.04, 0.05, 0.05]), (True, [0, 0.1, 0.2, 0.4, 0.8, 1.0])],
)
def test_a_store_is_not_asked_more_than_a_few_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool, looks_after_s: list[float]
) -> None:
    clock, pauses, looks = MovableClock(), [0.0], []
    read_payload = StoreDirectory.read_payload

    def looked(*arguments: Any) -> bool:
        looks.append(pauses[-1])
        return read_payload(*arguments)

    def pause(_: Guard, seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(seconds)

    _, receiver = connect({"path": f"memory://{tmp_path}" if remote else str(tmp_path)})
    monkeypatch.setattr(StoreDirectory, "read_payload", looked)
    monkeypatch.setattr(Guard, "sleep", pause)
    bucket = Bucket(1, 0, torch.empty(10, dtype=torch.uint8))
    with pytest.raises(DeadlineExceededError, match="peer trainer"):
        receive(receiver, bucket, Deadline.after(sum(looks_after_s) + 0.001, clock))
    assert looks == looks_after_s


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_url_and_fsync_deliver_the_same_bytes(tmp_path: Path, fsync: bool) -> None:
    sender, receiver = connect({"path": f"file://{tmp_path}/x", "fsync": fsync})
    sent = send(sender, 1, 0, 12_345)
    assert torch.equal(received(receiver, 1, 0, 12_345), sent)


def test_a_place_where_nothing_can_be_kept_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error in (("nosuch://bucket/x", ConfigError), (f"{tmp_path}/file/store", StorageError)):
        with pytest.raises(error, match=path.partition("://")[0]):
            connect_sender({"path": path})


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; where none can be mounted, a limit of 1 MiB on the size of a file."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        yield disk
        subprocess.run(["umount", str(disk)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield disk
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_a_storage_error_that_says_so_and_costs_only_what_was_not_complete(tiny_disk: Path) -> None:
    sender, receiver = connect({"path": str(tiny_disk / "store"), "keep_versions": 1})
    publish(sender, 1, 100_000)
    sent = send(sender, 2, 0, 100_000)
    with pytest.raises(StorageError, match=r"(?i)(no space left|file too large)(?s:.*)\.path") as failure:
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


class TestKilledSender(ConformanceBase):
    deadline_s = grace_s = HANG_S

    @pytest.fixture
    def engine_name(self) -> str:
        return "filesystem"

    @pytest.fixture
    def engine_options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "store")}

    def test_what_it_leaves_is_removed_by_the_next_and_what_lives_or_was_committed_stays(
        self, connected: ConnectionMaker, tmp_path: Path
    ) -> None:
        store = tmp_path / "store"
        first = connected(1)
        session = first.topology["session"]
        first.deliver([Parcel(1, 0, 1000, 1)])
        first.deliver([Parcel(2, 0, 1000, 1)], commit=False)
        first.sender.kill()
        described = json.loads((store / session / "sender-0" / "sender.json").read_text())
        (store / session / "sender-0" / "sender.json.0123abcd.part").write_text("")
        foreign = store / "from-another-host" / "sender-0"
        foreign.mkdir(parents=True)
        elsewhere = {**described["process"], "host": "elsewhere"}
        (foreign / "sender.json").write_text(json.dumps({**described, "process": elsewhere}))

        second = connected(1)
        third = connected(1)
        assert sorted(path.name for path in store.iterdir()) == sorted(
            ["from-another-host", "latest.json", session, second.topology["session"], third.topology["session"]]
        )
        kept = ["COMMITTED", "bucket-00000.safetensors", "checksums.json", "manifest.json"]
        assert place_of(store / session).files() == [f"sender-0/v1/{name}" for name in kept]
        second.deliver([Parcel(1, 0, 1000, 2)])
        third.deliver([Parcel(1, 0, 1000, 3)])

    def test_what_it_sent_can_still_be_received(self, halves: ConnectionMaker) -> None:
        connection = halves(1)
        connection.exchange_addresses()
        connection.start_connect(connection.sender)
        connection.sender.result()
        connection.start_send([Parcel(1, 0, 1000, 1)], commit=False)
        connection.sender.result()
        connection.sender.kill()
        (late,) = connection.receivers
        connection.start_connect(late)
        late.result()
        connection.start_receive(late, [Parcel(1, 0, 1000, 1)])
        connection.check_received([late])
