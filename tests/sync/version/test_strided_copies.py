"""Equal runs at equal distances are copied by one call, and every run gets to its place whatever their distances are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlane.sync import LocalShard, Manifest, TensorSpec
from weightlane.sync.version.packing import CopyTable, compact_places, copy_runs, gather_runs, scatter_runs
from weightlane.sync.version.snapshot_slices import snapshot_slices
from weightlane.sync.version.strided_copy import BucketCopies, StridedCopy, StridedRows

runs = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([4, 4, 4, 8, 64])), min_size=0, max_size=30)


@given(runs, st.randoms(use_true_random=False), st.booleans(), st.integers(0, 200), st.integers(1, 400))
def test_runs_of_any_length_and_order_get_to_their_places(
    drawn: list[tuple[int, int]], random: object, shuffled: bool, start: int, length: int
) -> None:
    stream, snapshot, placed = 0, 0, []
    for gap, nbytes in drawn:
        stream += 4 * gap
        placed.append((stream, nbytes))
        stream += nbytes
    order = list(range(len(placed)))
    if shuffled:
        random.shuffle(order)  # type: ignore[attr-defined]
    found: dict[int, StridedCopy] = {}
    for index in order:
        found[index] = StridedCopy.run(placed[index][0], snapshot, placed[index][1])
        snapshot += placed[index][1]
    table = CopyTable(found.values())
    held = torch.randint(256, (snapshot,), dtype=torch.uint8)
    stop = min(start + length, stream)
    start = min(start, stop)

    expected = torch.full((stop - start,), 7, dtype=torch.uint8)
    for piece in table.within(start, stop):
        to, come = piece.stream, piece.snapshot
        expected[to.start - start : to.end - start] = held[come.start : come.end]
    straight, by_way_of_peer = (torch.full_like(expected, 7) for _ in range(2))
    copy_runs(held, table, start, stop, straight)
    assert torch.equal(straight, expected)
    packed = gather_runs(held, table, start, stop, torch.empty(table.bytes_within(start, stop), dtype=torch.uint8))
    assert packed.numel() == table.bytes_within(start, stop) == sum(piece.nbytes for piece in table.within(start, stop))
    scatter_runs(packed.clone(), table, start, stop, by_way_of_peer)
    assert torch.equal(by_way_of_peer, expected)


def test_ten_thousand_halves_are_one_strip_and_are_sent_from_where_they_lie() -> None:
    specs = [TensorSpec(f"t{index}", (64,), torch.bfloat16) for index in range(10_000)]
    data = torch.zeros(32, dtype=torch.bfloat16)
    shards = [LocalShard(spec, (32,), data) for spec in specs]
    manifest = Manifest(1, tuple(specs), 1 << 20)
    table = CopyTable.of(snapshot_slices(shards, compact_places(shards), manifest.regions), manifest)
    start, stop = manifest.window(0)
    window = table.window(start, stop)
    assert len(window.copies) == 1
    assert window.copies[0].stream.count == (stop - start) // 128
    snapshot, room = torch.arange(640_000).to(torch.uint8), torch.empty(0, dtype=torch.uint8)
    packed = gather_runs(snapshot, table, start, stop, room)
    assert packed.data_ptr() == snapshot.data_ptr()
    assert table.window(start, stop) is window, "it is worked out for every version"


def test_runs_that_go_backwards_or_lie_over_each_other_are_no_rows() -> None:
    backwards = [StridedCopy.run(0, 8, 4), StridedCopy.run(8, 4, 4), StridedCopy.run(16, 0, 4)]
    assert len(BucketCopies.of(backwards).copies) == 3
    overlapping = [StridedCopy.run(0, 0, 8), StridedCopy.run(16, 4, 8), StridedCopy.run(32, 8, 8)]
    assert len(BucketCopies.of(overlapping).copies) == 3
    assert BucketCopies.of([]).nbytes == 0


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
