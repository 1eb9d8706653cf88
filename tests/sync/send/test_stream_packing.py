"""Every byte of every tensor gets to its place in the snapshot, which says how far it has come, and in the stream."""

from __future__ import annotations

import pytest
import torch
from bits import random_bits, same
from hypothesis import given
from hypothesis import strategies as st
from slices import columns, rows

from weightlane.sync import LocalShard, Manifest, TensorSpec
from weightlane.sync.send.snapshot.places import compact_places, stream_places
from weightlane.sync.send.snapshot.snapshot import Progress, Snapshot
from weightlane.sync.version.box import cut as cut_box
from weightlane.sync.version.manifest import ALIGNMENT_BYTES
from weightlane.sync.version.packing import CopyTable, snapshot_slices
from weightlane.sync.version.tensor_spec import TensorSlice

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
    shares = [[TensorSlice(spec, box) for spec in specs for box in cut(spec, rank, world)] for rank in range(world)]
    by_rank = [  # in smaller parts than rank 0 knows of, where it can merge them
        [
            LocalShard(share.spec, box.starts, sources[share.spec.name][box.index])
            for share in held
            for box in (cut_box(share.box, 3) if share.box.numel else [share.box])
        ]
        for held in shares
    ]
    places = [compact_places(shards) for shards in by_rank]
    tables, known_tables = (
        [CopyTable.of(snapshot_slices(*each, manifest.regions), manifest) for each in zip(held, at, strict=True)]
        for held, at in ((by_rank, places), (shares, map(compact_places, shares)))
    )
    snapshots = [taken(*held) for held in zip(by_rank, places, strict=True)]

    staging = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for index in range(manifest.bucket_count):
        start, stop = manifest.window(index)
        assert stop - start <= manifest.largest_bucket_bytes
        payload = staging[start:stop]
        assert tables[0].window(start, stop).snapshot_end <= snapshots[0].numel()
        tables[0].pack(snapshots[0], start, stop, payload)
        for rank in range(1, world):
            table = tables[rank]
            packed = torch.empty(table.window(start, stop).packed_bytes, dtype=torch.uint8)
            table.gather(snapshots[rank], start, stop, packed)
            assert known_tables[rank].window(start, stop).packed_bytes == packed.numel()
            known_tables[rank].scatter(packed, start, stop, payload)
    if world == 1:  # then the snapshot can be the stream itself
        in_stream = stream_places(by_rank[0], manifest)
        assert in_stream is not None
        in_place = taken(by_rank[0], in_stream, manifest.total_bytes)
        assert torch.equal(in_place, staging)

    for entry in manifest.entries:
        assert entry.offset % (entry.spec.dtype.itemsize if whole_tensors else ALIGNMENT_BYTES) == 0
        received = staging[entry.offset : entry.end].view(entry.spec.dtype).view(entry.spec.shape)
        assert same(received, sources[entry.spec.name])


# -- snapshots ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run beside each other where torch has one thread, and there are two cores."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 if request.param == "one thread" else 1)
    monkeypatch.setattr("weightlane.sync.send.snapshot.snapshot.usable_cpus", lambda: 2)
    monkeypatch.setattr("weightlane.sync.send.snapshot.snapshot._BATCH_BYTES", 16 << 10)
    monkeypatch.setattr("weightlane.sync.send.snapshot.snapshot._CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr("weightlane.sync.send.snapshot.snapshot._SMALL_BYTES", 1 << 10)


@pytest.mark.usefixtures("threads")
def test_a_transposed_parameter_is_read_when_the_snapshot_is_taken_and_not_when_it_is_set_up() -> None:
    live = torch.zeros(30, 20)
    snapshot = Snapshot.of([LocalShard(TensorSpec("t", (20, 30), torch.float32), (0, 0), live.t())], [0])
    live.copy_(torch.randn(30, 20))
    memory = torch.zeros(snapshot.nbytes, dtype=torch.uint8)
    snapshot.take(memory, None, Progress("a snapshot", "test"))
    assert torch.equal(memory.view(torch.float32).view(20, 30), live.t())


@pytest.mark.usefixtures("threads")
def test_progress_is_true_grows_within_a_large_tensor_and_is_reported_once_for_several_small_ones() -> None:
    sizes = [80 << 10, *((2 << 10) + 64 * number for number in range(20))]
    data = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    shards = [LocalShard.whole(TensorSpec(f"t{i}", x.shape, x.dtype), x) for i, x in enumerate(data)]
    snapshot, progress = Snapshot.of(shards, compact_places(shards)), Progress("a snapshot", "test")
    memory, seen = torch.zeros(snapshot.nbytes, dtype=torch.uint8), [0]
    wanted = torch.cat(data)
    assert wanted.numel() == snapshot.nbytes
    assert (snapshot.ends["t0"], snapshot.ends["t20"]) == (80 << 10, snapshot.nbytes)

    def advance(done_bytes: int, _: int) -> None:
        assert torch.equal(memory[seen[-1] : done_bytes], wanted[seen[-1] : done_bytes])
        seen.append(done_bytes)

    progress.advance = advance  # type: ignore[method-assign,assignment]
    snapshot.take(memory, None, progress)
    assert seen[1] == 64 << 10
    assert len(set(seen)) == (6 if torch.get_num_threads() == 1 else 23), "of small tensors several go together"
    assert seen[-1] == snapshot.nbytes
    snapshot.close()


class Tripping(torch.Tensor):
    """Cannot be copied."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in (torch.Tensor.numpy, torch.Tensor.copy_):
            raise RuntimeError("the device is gone")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.usefixtures("threads")
def test_nothing_is_read_any_more_when_a_copy_has_failed() -> None:
    data = [torch.ones(9 << 10), torch.ones(9 << 10).as_subclass(Tripping), *(torch.ones(9 << 10) for _ in range(4))]
    shards = [LocalShard.whole(TensorSpec(f"t{i}", (9 << 10,), torch.float32), x) for i, x in enumerate(data)]
    places = compact_places(shards)
    snapshot, progress = Snapshot.of(shards, places), Progress("a snapshot", "test")
    memory = torch.zeros(snapshot.nbytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="the device is gone"):
        snapshot.take(memory, None, progress)
    before = memory.clone()
    for shard in shards:
        shard.data.fill_(2)
    assert torch.equal(memory, before)
    assert progress.done_bytes <= 36 << 10
    snapshot.close()
