"""Stored versions load in other tools and reach late readers bit for bit; nobody reads a damaged version."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import DTYPES, same
from hop_run import Participant
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from store_writer import Writer, tensors_of, write

from weightlane.ckpt_engines import ConfigError, CorruptBucketError, ProtocolError, StorageError, WeightlaneError
from weightlane.ckpt_engines.engines.filesystem.stored_version import StoredVersion
from weightlane.sync import Manifest, TensorSpec, read_version
from weightlane.sync.version.safetensors_files import manifest_of_document, version_files

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not same(found[name], tensor)] == []


def newest_directory(path: Path) -> Path:
    return path / json.loads((path / "latest.json").read_text())["directory"]


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


def test_the_newest_committed_version_of_a_killed_trainer_is_read_bit_for_bit(tmp_path: Path) -> None:
    trainer = Participant(write, path=str(tmp_path))
    trainer.is_ready()
    trainer.kill()
    manifest, tensors = read_version(str(tmp_path))
    assert manifest.version == 2
    assert_same(tensors, tensors_of(2))


def test_reading_where_nothing_is_committed_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no version has been committed"):
        read_version(str(tmp_path))
    writer = Writer({"path": str(tmp_path)}, tensors_of(0))
    writer.send(1, tensors_of(1))
    with pytest.raises(StorageError, match="no version has been committed"):
        read_version(str(tmp_path))
    writer.close()
    with pytest.raises(ConfigError, match="nosuch"):
        read_version("nosuch://x")


def test_a_version_that_is_replaced_while_it_is_read_gives_way_to_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer({"path": str(tmp_path), "keep_versions": 1}, tensors_of(0))
    writer.publish(1)
    document = StoredVersion.document

    def overtaken(stored: StoredVersion, *arguments: Any) -> str:
        text = document(stored, *arguments)
        if stored.version == 1:
            writer.publish(2)
        return text

    monkeypatch.setattr(StoredVersion, "document", overtaken)
    manifest, tensors = read_version(str(tmp_path))
    assert manifest.version == 2
    assert_same(tensors, tensors_of(2))
    writer.close()


def flipped(position: int) -> Callable[[bytes], bytes]:
    """Change one bit of the byte at `position`."""

    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 0x04
        return bytes(changed)

    return flip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written")
    writer = Writer({"path": str(path)}, tensors_of(0))
    writer.publish(2)
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "damage", "error", "says"),
    [
        ("bucket-00000.safetensors", flipped(-1), CorruptBucketError, "changed bytes"),
        ("bucket-00000.safetensors", flipped(0), ProtocolError, "safetensors header"),
        ("checksums.json", flipped(5), CorruptBucketError, "no valid checksum"),
        ("../../../latest.json", flipped(5), ProtocolError, "latest.json"),
        ("bucket-00001.safetensors", lambda content: content[:-1], ProtocolError, "bucket-00001.safetensors"),
        ("manifest.json", lambda content: content[:-2], ProtocolError, "manifest.json"),
        ("bucket-00001.safetensors", None, StorageError, "bucket-00001.safetensors"),
    ],
)
def test_a_damaged_or_missing_file_is_a_typed_error_that_says_what_is_wrong(
    written: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[bytes], bytes] | None,
    error: type[WeightlaneError],
    says: str,
) -> None:
    path = tmp_path / "store"
    shutil.copytree(written, path)
    damaged = newest_directory(path) / name
    if damage is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damage(damaged.read_bytes()))
    with pytest.raises(error, match=says):
        read_version(str(path))


@given(st.data())
def test_whatever_byte_changes_nobody_reads_wrong_weights(written: Path, data: st.DataObject) -> None:
    files = sorted(path for path in written.rglob("*") if path.is_file())
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
    assert_same(tensors, tensors_of(2))
