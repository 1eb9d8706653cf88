"""The filesystem engine: files that several buckets make, because no tensor is in two."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sessions import soon
from stores import Place, connect, content, place_of, prefix, publish, receive, send, send_bucket, version_files
from waiting import HANG_S

from weightlane.ckpt_engines import (
    Bucket,
    Deadline,
    DeadlineExceededError,
    FilePart,
    ProtocolError,
    StoringSender,
    VersionFiles,
)
from weightlane.ckpt_engines.engines.filesystem.partial_file import PartialFile
from weightlane.ckpt_engines.engines.filesystem.store_directory import StoreDirectory

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


def test_nothing_remains_of_a_file_of_which_not_every_bucket_was_sent(place: Place) -> None:
    sender, _ = connect(place.options)
    begin_parts(sender)
    send_bucket(sender, part(1))
    with pytest.raises(ProtocolError, match="bucket 1 of it is missing"):
        sender.commit_version(1, {}, soon())
    publish(sender, 2, 100)
    begin_parts(sender)
    send_bucket(sender, part(1))
    sender.close()
    assert place.files() == sorted(["latest.json", *version_files("session-1/sender-0/v2", 1)])


def test_closing_has_one_deadline_for_all_that_it_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = connect({"path": str(tmp_path)})
    begin_parts(sender)
    send_bucket(sender, part(1))
    deadlines: list[Deadline] = []
    monkeypatch.setattr(StoreDirectory, "discard", lambda _, file, part, deadline: deadlines.append(deadline))
    monkeypatch.setattr(StoreDirectory, "remove_tree", lambda _, path, guard: deadlines.append(guard.deadline))
    sender.close()
    assert len(deadlines) > 1
    assert len(set(deadlines)) == 1


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


def test_giving_up_a_file_takes_no_longer_than_the_deadline_where_the_store_does_not_answer() -> None:
    answers, gone = threading.Event(), threading.Event()

    class Stuck(PartialFile):
        write = finish = None  # type: ignore[assignment]

        def discard(self) -> None:
            answers.wait(HANG_S)
            gone.set()

    StoreDirectory("memory://stuck").discard(Stuck("x"), "sender", Deadline.after(0.1))
    assert not gone.is_set()
    answers.set()
    assert gone.wait(HANG_S)


def uploads(place: Place) -> list[str]:
    """List the keys of unfinished multipart uploads to the S3 bucket of `place`."""
    name, _, prefix = place.root.partition("/")
    found = place.fs.call_s3("list_multipart_uploads", Bucket=name, Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads", [])]
