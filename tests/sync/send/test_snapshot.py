"""The snapshot holds what the shards held, in the wire dtype, and says how far it has come."""

from __future__ import annotations

import pytest
import torch

from weightlane.sync import LocalShard, TensorSpec
from weightlane.sync.send.snapshot.progress import Progress
from weightlane.sync.send.snapshot.snapshot import Snapshot
from weightlane.sync.version.packing import compact_places


@pytest.fixture(autouse=True, params=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run beside each other where torch has one thread, and there are two cores."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 if request.param == "one thread" else 1)
    monkeypatch.setattr("weightlane.sync.send.snapshot.snapshot.usable_cpus", lambda: 2)
    monkeypatch.setattr("weightlane.sync.send.snapshot.snapshot._BATCH_BYTES", 16 << 10)
    monkeypatch.setattr("weightlane.sync.send.snapshot.steps._CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr("weightlane.sync.send.snapshot.steps._SMALL_BYTES", 1 << 10)


def test_a_transposed_parameter_is_read_when_the_snapshot_is_taken_and_not_when_it_is_set_up() -> None:
    live = torch.zeros(30, 20)
    snapshot = Snapshot.of([LocalShard(TensorSpec("t", (20, 30), torch.float32), (0, 0), live.t())], [0])
    live.copy_(torch.randn(30, 20))
    memory = torch.zeros(snapshot.nbytes, dtype=torch.uint8)
    snapshot.take(memory, None, Progress("a snapshot", "test"))
    assert torch.equal(memory.view(torch.float32).view(20, 30), live.t())


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
