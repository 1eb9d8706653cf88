"""Stored versions load in other tools and reach late readers bit for bit. Nobody reads a damaged one, or waits for a store."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import DTYPES, assert_same
from direct_hop import Hop, MakeHop
from hop import weights
from hop_run import MakeRun
from hub_calls import raised_by
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from slices import EVERYTHING, rows, values
from stores import newest
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    CorruptBucketError,
    Deadline,
    ProtocolError,
    StorageError,
    SyncAbortedError,
    UntouchedError,
    WeightlaneError,
)
from weightlane.ckpt_engines.engines.filesystem.sender import FilesystemSender
from weightlane.ckpt_engines.engines.filesystem.versions import StoredVersion
from weightlane.sync import Manifest, TensorSpec, read_version
from weightlane.sync.version.safetensors_files import manifest_of_document, version_files

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    st.lists(st.tuples(st.text(max_size=5), shapes, st.sampled_from(DTYPES)), max_size=6), st.sampled_from([64, 192])
)
def test_every_file_with_its_prefix_is_a_safetensors_file_of_the_tensors_in_it(
    drawn: list[tuple[str, tuple[int, ...], torch.dtype]], bucket_bytes: int
) -> None:
    specs = tuple(TensorSpec(f"{name}.{i}", shape, dtype) for i, (name, shape, dtype) in enumerate(drawn))
    manifest = Manifest(3, specs, bucket_bytes, whole_tensors=True)
    files = version_files(manifest)
    assert manifest_of_document(files.documents["manifest.json"]) == manifest
    weight_map = json.loads(files.documents["model.safetensors.index.json"])["weight_map"]
    assert weight_map.keys() == {spec.name for spec in specs}
    generator = torch.Generator().manual_seed(1)
    stream = torch.randint(0, 2, (manifest.total_bytes,), dtype=torch.uint8, generator=generator)
    on_disk: dict[int, bytes] = defaultdict(bytes)
    assert {index for index, prefix in enumerate(files.prefixes) if prefix} == set(manifest.files)
    for index, prefix in enumerate(files.prefixes):
        start, stop = manifest.window(index)
        part = manifest.part(index)
        on_disk[part.first if part else index] += prefix + stream[start:stop].numpy().tobytes()
    for index, in_it in manifest.files.items():
        assert len(files.prefixes[index]) % 64 == 0
        loaded = load(on_disk[index])
        for name in loaded:
            assert weight_map.pop(name) == f"bucket-{index:05d}.safetensors"
        assert_same(
            loaded, {e.spec.name: stream[e.offset : e.end].view(e.spec.dtype).view(e.spec.shape) for e in in_it}
        )
    assert weight_map == {}


def store(run: Hop, version: int, path: Path) -> None:
    """Commit a version, and wait until it is stored, which happens beside the commit."""
    run.serve(version)
    wait_until(lambda: newest(path) == version, "version in the store")


def test_the_newest_committed_version_of_a_killed_trainer_is_read_bit_for_bit(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("filesystem")
    for version in (1, 2):
        run.serve(version)
        wait_until(lambda version=version: newest(tmp_path / "store") == version, "version in the store")  # type: ignore[misc]
    run.replicas[0].refuses_with = UntouchedError("not now.", part="rollout-0")
    run.fails(3, "not now")
    run.trainers[0].kill()
    manifest, tensors = read_version(str(tmp_path / "store"))
    assert manifest.version == 2
    assert manifest.layout_digest == "7312e393f261e5ef", "versions that are stored already could not be read any more"
    assert_same(tensors, weights(2, torch.float32))


def test_reading_where_nothing_is_committed_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no version has been committed"):
        read_version(str(tmp_path))
    with pytest.raises(ConfigError, match="nosuch"):
        read_version("nosuch://x")


def test_a_version_that_is_replaced_while_it_is_read_gives_way_to_the_newest(
    hop: MakeHop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    run = hop("filesystem", rows, 1, [EVERYTHING])
    store(run, 1, path)
    document = StoredVersion.document

    def overtaken(stored: StoredVersion, *arguments: Any) -> str:
        text = document(stored, *arguments)
        if stored.version == 1:
            assert Path(stored.location).exists()
            for version in (2, 3):  # as many as are kept
                store(run, version, path)
            wait_until(lambda: not Path(stored.location).exists(), "end of the version that is read")
        return text

    monkeypatch.setattr(StoredVersion, "document", overtaken)
    manifest, tensors = read_version(str(path))
    assert manifest.version == 3
    assert_same(tensors, values(3))


def flipped(position: int) -> Callable[[bytes], bytes]:
    """Change one bit of the byte at `position`."""

    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 0x04
        return bytes(changed)

    return flip


@pytest.fixture
def written(hop: MakeHop, tmp_path: Path) -> Path:
    """A store with version 2, which nobody writes to any more."""
    run = hop("filesystem", rows, 1, [EVERYTHING])
    store(run, 2, tmp_path / "store")
    run.publishers[0].close()
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("name", "damage", "error", "says"),
    [
        ("bucket-00000.safetensors", flipped(-1), CorruptBucketError, "changed bytes"),
        ("bucket-00000.safetensors", flipped(0), ProtocolError, "safetensors header"),
        ("checksums.json", flipped(5), CorruptBucketError, "no valid checksum"),
        ("../../../latest.json", flipped(5), ProtocolError, "latest.json"),
        ("bucket-00000.safetensors", lambda content: content[:-1], ProtocolError, "bucket-00000.safetensors"),
        ("manifest.json", lambda content: content[:-2], ProtocolError, "manifest.json"),
        ("bucket-00000.safetensors", None, StorageError, "bucket-00000.safetensors"),
    ],
)
def test_a_damaged_or_missing_file_is_a_typed_error_that_says_what_is_wrong(
    written: Path, name: str, damage: Callable[[bytes], bytes] | None, error: type[WeightlaneError], says: str
) -> None:
    latest = json.loads((written / "latest.json").read_text())
    damaged = written / latest["directory"] / name
    if damage is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damage(damaged.read_bytes()))
    with pytest.raises(error, match=says):
        read_version(str(written))


@pytest.mark.property
def test_whatever_byte_changes_nobody_reads_wrong_weights(written: Path) -> None:
    files = sorted(path for path in written.rglob("*") if path.is_file())

    @given(st.data())
    def change_one(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(files))
        whole = file.read_bytes()
        place, change = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        try:
            _, tensors = read_version(str(written))
        except WeightlaneError:
            return
        finally:
            file.write_bytes(whole)
        assert_same(tensors, values(2))

    change_one()


# -- storing beside the control thread --------------------------------------------------------------------------------------


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
    assert newest(tmp_path / "store") == -1
    waiting, errors = raised_by(lambda: publisher.wait_stored(2, HANG_S))
    run.serve(3)  # it takes the place of version 2
    hanging.go_on.set()
    waiting.join(HANG_S)
    assert (errors, newest(tmp_path / "store")) == ([], 3)
    assert_same(read_version(str(tmp_path / "store"))[1], values(3))


def test_a_commit_that_hangs_until_its_publisher_has_closed_is_never_published(
    hop: MakeHop, hanging: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weightlane.sync.send.version_storing._CLOSE_S", 0.05)
    run = hop("filesystem", rows, 1, [None])
    run.serve(1)
    assert hanging.begun.wait(HANG_S)
    waiting, errors = raised_by(lambda: run.publishers[0].wait_stored(2, NEVER_S))
    run.publishers[0].close()
    waiting.join(HANG_S)
    assert isinstance(errors[0], ClosedError)
    hanging.go_on.set()
    wait_until(lambda: "version 1 serves but could not be committed in the store" in caplog.text, "end of the commit")
    assert newest(tmp_path / "store") == -1
