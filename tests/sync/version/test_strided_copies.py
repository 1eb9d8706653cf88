"""Equal runs at equal distances are copied by one call, and every run gets to its place whatever their distances are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlane.sync import LocalShard, Manifest, TensorSpec
from weightlane.sync.version.packing import CopyTable, compact_places, gather_runs
from weightlane.sync.version.snapshot_slices import snapshot_slices
from weightlane.sync.version.strided_copy import StridedCopy, StridedRows


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
