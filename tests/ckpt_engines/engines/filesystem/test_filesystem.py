"""The filesystem engine: what lies in the directory, also where several buckets make a file, who reads it, and when it goes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
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
    send_bucket,
    version_files,
)
from waiting import HANG_S

from weightlane.ckpt_engines import (
    Bucket,
    Deadline,
    DeadlineExceededError,
    FilePart,
    PeerLostError,
    ProtocolError,
    StorageError,
    StoringSender,
    VersionFiles,
)
from weightlane.ckpt_engines.conformance import ConformanceBase, ConnectionMaker, Parcel
from weightlane.ckpt_engines.engines.filesystem.bucket_files import LocalPartialFile, RemotePartialFile
from weightlane.ckpt_engines.engines.filesystem.file_names import sender_text
from weightlane.ckpt_engines.engines.filesystem.process_identity import process_identity
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


def test_the_newest_committed_versions_stay_over_sessions_and_nothing_else_does(place: Place) -> None:
    options = {**place.options, "keep_versions": 2}
    for session, versions in (("session-1", (0, 1, 2)), ("session-2", (3,)), ("session-3", (2, 3))):
        sender, _ = connect_sender(options, session)
        for version in versions:
            publish(sender, version, 100, 50)
        publish(sender, 9, 100, commit=False)
        sender.close()
        if session == "session-1":
            kept = [path for version in (1, 2) for path in version_files(f"session-1/sender-0/v{version}", 2)]
            assert place.files() == sorted(["latest.json", *kept])
        if session == "session-2":
            assert place.latest() == [(3, "session-2/sender-0/v3"), (2, "session-1/sender-0/v2")]
    # A run that was resumed from an older state counts by when it committed, not by its numbers.
    assert place.latest() == [(3, "session-3/sender-0/v3"), (2, "session-3/sender-0/v2")]
    assert {path.partition("/")[0] for path in place.files()} == {"latest.json", "session-3"}
    if place.fs.protocol != "memory":
        assert len(place.fs.ls(place.root)) == 2, "a directory was left"


def test_a_receiver_may_take_its_time_until_the_next_version_is_committed(tmp_path: Path) -> None:
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
    with pytest.raises(StorageError, match="keep_versions"):
        received(receiver, 1, 0, 100)
    sender.close()
    with pytest.raises(PeerLostError, match="closed"):
        received(receiver, 4, 0, 100)


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


def test_a_directory_that_the_check_of_another_process_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, makedirs, file = [], os.makedirs, tmp_path / "store" / "file"

    def vanishing(path: str, *, exist_ok: bool) -> None:
        makedirs(path, exist_ok=exist_ok)
        if not removed:
            removed.append(os.rmdir(path))  # noqa: PTH106

    monkeypatch.setattr(os, "makedirs", vanishing)
    LocalPartialFile(str(file), fsync=False).finish()
    assert file.is_file()


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

    monkeypatch.setattr("weightlane.ckpt_engines.engines.filesystem.bucket_files.os.fstat", sometimes_stale)
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


def test_a_file_of_the_wrong_size_is_a_protocol_error(tmp_path: Path) -> None:
    changes: list[tuple[Callable[[bytes], bytes], str]] = [
        (lambda file: file[:-1], "neither"),
        (lambda file: file[:20], "has 20 bytes"),
        (lambda file: bytes([file[0] ^ 1]) + file[1:], "neither"),
    ]
    sender, receiver = connect({"path": str(tmp_path)})
    for version, (change, says) in enumerate(changes, 1):
        publish(sender, version, 500)
        path = f"session-1/sender-0/v{version}/bucket-00000.safetensors"
        (tmp_path / path).write_bytes(change((tmp_path / path).read_bytes()))
        with pytest.raises(ProtocolError, match=says) as caught:
            received(receiver, version, 0, 500)
        assert path in str(caught.value)


def test_a_live_sender_keeps_its_versions_whatever_another_one_commits(tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "keep_versions": 1}
    first, _ = connect_sender(options, "session-1")
    publish(first, 1, 100)
    (earlier, beside), elsewhere = ("session-0/sender-0", "session-2/sender-1"), {**process_identity(), "host": "other"}
    for directory in (earlier, beside):
        for name in ("v5", "@eaDir"):  # the second one is of a NAS
            (tmp_path / directory / name).mkdir(parents=True)
        (tmp_path / directory / "sender.json").write_text(sender_text(elsewhere, 0))
    second, _ = connect_sender(options, "session-2")
    assert [each.name for each in (tmp_path / earlier).iterdir()] == ["@eaDir"]
    assert len(list((tmp_path / beside).iterdir())) == 3
    publish(second, 9, 100)
    assert place_of(tmp_path).latest() == [(9, "session-2/sender-0/v9"), (1, "session-1/sender-0/v1")]
    assert (tmp_path / "session-1/sender-0/v1/COMMITTED").exists()
    first.close()
    publish(second, 10, 100)
    assert not (tmp_path / "session-1").exists()


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
        (store / session / "sender-0" / "sender.json.0123abcd.part").write_text("")

        second = connected(1)
        third = connected(1)
        assert sorted(path.name for path in store.iterdir()) == sorted(
            ["latest.json", session, second.topology["session"], third.topology["session"]]
        )
        kept = ["COMMITTED", "bucket-00000.safetensors", "checksums.json", "manifest.json"]
        assert place_of(store / session).files() == [f"sender-0/v1/{name}" for name in kept]
        second.deliver([Parcel(1, 0, 1000, 2)])
        third.deliver([Parcel(1, 0, 1000, 3)])


SIZES = [60_000, 60_000, 7]
WHOLE = FilePart(first=1, offset=0, total=sum(SIZES))


def part(index: int) -> Bucket:
    """Bucket `index` (1 to 3) of a version whose second file has three, as it is sent."""
    data = content(1, index, SIZES[index - 1])
    return Bucket(1, index, data, part=replace(WHOLE, offset=sum(SIZES[: index - 1])))


def begin_parts(sender: StoringSender) -> None:
    prefixes = [prefix(10), prefix(WHOLE.total), b"", b""]
    sender.open_version(VersionFiles(1, prefixes, {"about.json": "[1]"}), soon())
    send(sender, 1, 0, 10)


def test_buckets_of_one_file_are_there_when_it_is_complete(place: Place) -> None:
    sender, receiver = connect(place.options)
    begin_parts(sender)
    sent = [part(index) for index in (1, 2, 3)]
    for bucket in sent:
        empty = replace(sent[0], data=torch.zeros_like(sent[0].data))
        with pytest.raises(DeadlineExceededError, match="bucket-00001"):
            receive(receiver, empty, Deadline.after(0.05))
        send_bucket(sender, bucket)
    sender.commit_version(1, {}, soon())
    for bucket in reversed(sent):
        taken = replace(bucket, data=torch.full_like(bucket.data, 0x55))
        receive(receiver, taken)
        assert torch.equal(taken.data, bucket.data)
    stored = place.read("session-1/sender-0/v1/bucket-00001.safetensors")
    assert stored == prefix(WHOLE.total) + b"".join(bucket.data.numpy().tobytes() for bucket in sent)
    beside = [path for path in place.files() if "bucket" in path]
    assert beside == [f"session-1/sender-0/v1/bucket-0000{index}.safetensors" for index in (0, 1)]
    wrong = replace(sent[1], data=torch.zeros_like(sent[1].data), part=replace(WHOLE, offset=60_000, total=120_008))
    with pytest.raises(ProtocolError, match="neither 120008 nor"):
        receive(receiver, wrong)


def test_a_large_file_goes_to_an_object_store_in_parts_which_are_dropped_with_it(
    s3_url: str, s3_options: dict[str, str]
) -> None:
    options = {**s3_options, "default_block_size": 5 << 20}
    place = Place(s3_url, options)
    sender, receiver = connect(place.options)
    bucket, count = 4 << 20, 3
    whole = FilePart(0, 0, count * bucket)
    sent = [
        Bucket(version, index, content(version, index, bucket), part=replace(whole, offset=index * bucket))
        for version in (1, 2)
        for index in range(count)
    ]
    for each in sent[:-1]:
        send_bucket(sender, each)
    assert uploads(place), "the second version's file was to be on its way"
    for each in sent[:count]:
        taken = replace(each, data=torch.zeros_like(each.data))
        receive(receiver, taken)
        assert torch.equal(taken.data, each.data)
    sender.close()
    assert place.files() == []
    assert uploads(place) == []


@pytest.mark.parametrize("wrong", [(2,), (1, 2, 2), (1, 2, 3, 3)])
def test_a_bucket_that_does_not_continue_its_file_is_refused(tmp_path: Path, wrong: tuple[int, ...]) -> None:
    sender, _ = connect({"path": str(tmp_path)})
    begin_parts(sender)
    for index in wrong[:-1]:
        send_bucket(sender, part(index))
    with pytest.raises(ProtocolError, match=f"bucket {wrong[-1]} of version 1 continues a file"):
        send_bucket(sender, part(wrong[-1]))
    sender.close()
    assert place_of(tmp_path).files() == []


def uploads(place: Place) -> list[str]:
    """List the keys of unfinished multipart uploads to the S3 bucket of `place`."""
    name, _, prefix = place.root.partition("/")
    found = place.fs.call_s3("list_multipart_uploads", Bucket=name, Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads", [])]


def test_nothing_remains_of_a_file_of_which_not_every_bucket_was_sent(tmp_path: Path) -> None:
    sender, _ = connect({"path": str(tmp_path)})
    begin_parts(sender)
    send_bucket(sender, part(1))
    with pytest.raises(ProtocolError, match="bucket 1 of it is missing"):
        sender.commit_version(1, {}, soon())
    publish(sender, 2, 100)
    begin_parts(sender)
    send_bucket(sender, part(1))
    sender.close()
    assert place_of(tmp_path).files() == sorted(["latest.json", *version_files("session-1/sender-0/v2", 1)])


def test_giving_up_a_file_takes_no_longer_than_the_deadline_where_the_store_does_not_answer() -> None:
    answers, gone = threading.Event(), threading.Event()

    class Stuck(RemotePartialFile):
        def __init__(self) -> None:
            self.final = "x"

        def discard(self) -> None:
            answers.wait(HANG_S)
            gone.set()

    StoreDirectory("memory://stuck").discard(Stuck(), "sender", Deadline.after(0.1))
    assert not gone.is_set()
    answers.set()
    assert gone.wait(HANG_S)
