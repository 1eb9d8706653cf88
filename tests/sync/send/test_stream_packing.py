"""The stream: every byte of every tensor gets to its place, whatever the shapes, dtypes, shards and bucket size."""

from __future__ import annotations

import torch
from bits import random_bits, same
from direct_hop import columns, rows
from hypothesis import given
from hypothesis import strategies as st

from weightlane.sync import LocalShard, Manifest, TensorSpec
from weightlane.sync.send.snapshot.progress import Progress
from weightlane.sync.send.snapshot.snapshot import Snapshot
from weightlane.sync.version.manifest import ALIGNMENT_BYTES
from weightlane.sync.version.packing import (
    CopyTable,
    compact_places,
    copy_runs,
    gather_runs,
    scatter_runs,
    stream_places,
)
from weightlane.sync.version.snapshot_slices import snapshot_slices
from weightlane.sync.version.strided_copy import StridedCopy, StridedRows

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn]

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=0, max_size=6)


def taken(shards: list[LocalShard], places: list[int], nbytes: int = 0) -> torch.Tensor:
    """A snapshot of the shards."""
    snapshot, progress = Snapshot.of(shards, places), Progress("a snapshot", "test")
    memory = torch.zeros(nbytes or snapshot.nbytes, dtype=torch.uint8)
    snapshot.take(memory, snapshot.mark(), progress)
    assert progress.done_bytes == snapshot.nbytes
    return memory


@given(tensors, st.integers(1, 3), st.sampled_from([64, 128, 192, 4096]), st.booleans(), st.booleans())
def test_sharded_tensors_arrive_bit_for_bit_through_buckets_of_any_size_and_cut(
    drawn: list[tuple[tuple[int, ...], torch.dtype]],
    world: int,
    bucket_bytes: int,
    whole_tensors: bool,
    by_columns: bool,
) -> None:
    cut = columns if by_columns else rows
    specs = [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(drawn)]
    sources = {spec.name: random_bits(spec.shape, spec.dtype, i) for i, spec in enumerate(specs)}
    layout = Manifest(7, tuple(specs), bucket_bytes, whole_tensors=whole_tensors)
    manifest = Manifest.from_plain(layout.to_plain())
    assert manifest == layout
    by_rank = [
        [
            LocalShard(spec, box.starts, sources[spec.name][box.index])
            for spec in specs
            for box in cut(spec, rank, world)
        ]
        for rank in range(world)
    ]
    places = [compact_places(shards) for shards in by_rank]
    tables = [
        CopyTable.of(snapshot_slices(by_rank[rank], places[rank], manifest.regions), manifest) for rank in range(world)
    ]
    snapshots = [taken(*held) for held in zip(by_rank, places, strict=True)]

    staging = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for index in range(manifest.bucket_count):
        start, stop = manifest.window(index)
        assert stop - start <= manifest.largest_bucket_bytes
        payload = staging[start:stop]
        assert tables[0].snapshot_end(start, stop) <= snapshots[0].numel()
        copy_runs(snapshots[0], tables[0], start, stop, payload)
        for rank in range(1, world):
            table = tables[rank]
            room = torch.empty(table.bytes_within(start, stop), dtype=torch.uint8)
            packed = gather_runs(snapshots[rank], table, start, stop, room)
            assert packed.numel() == room.numel()
            scatter_runs(packed, table, start, stop, payload)
    if world == 1:  # then the snapshot can be the stream itself
        in_stream = stream_places(by_rank[0], manifest)
        assert in_stream is not None
        in_place = taken(by_rank[0], in_stream, manifest.total_bytes)
        assert torch.equal(in_place, staging)

    for entry in manifest.entries:
        assert entry.offset % (entry.spec.dtype.itemsize if whole_tensors else ALIGNMENT_BYTES) == 0
        received = staging[entry.offset : entry.end].view(entry.spec.dtype).view(entry.spec.shape)
        assert same(received, sources[entry.spec.name])


@given(
    st.integers(0, 50), st.integers(1, 8), st.integers(0, 6), st.integers(1, 9), st.integers(0, 90), st.integers(0, 90)
)
def test_a_window_takes_of_columns_what_lies_in_it(
    first: int, nbytes: int, gap: int, count: int, start: int, length: int
) -> None:
    rows = StridedRows(first, nbytes + gap, nbytes, count)
    piece = StridedCopy(rows, StridedRows(1000, nbytes, nbytes, count))
    at = {
        rows.start + row * rows.step + byte: 1000 + row * nbytes + byte
        for row in range(count)
        for byte in range(nbytes)
    }
    found = {}
    for part in piece.within(start, start + length):
        for row in range(part.stream.count):
            for byte in range(part.stream.nbytes):
                to = part.stream.start + row * part.stream.step + byte
                assert to not in found
                found[to] = part.snapshot.start + row * part.snapshot.step + byte
    assert found == {to: come for to, come in at.items() if start <= to < start + length}
