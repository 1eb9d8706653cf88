"""The snapshot holds what the shards held, in the wire dtype, and says how far it has come."""

from __future__ import annotations

import threading

import pytest
import torch
from waiting import HANG_S, NEVER_S

from weightlane.ckpt_engines import Deadline, DeadlineExceededError, StorageError
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


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_single_element_is_taken_whatever_its_strides_are(shape: tuple[int, ...]) -> None:
    live = torch.randn(8, 8, dtype=torch.bfloat16)[3:4, ::2][:, :1].as_strided(shape, (2,) * len(shape))
    snapshot = Snapshot.of([LocalShard(TensorSpec("t", shape, torch.bfloat16), (0,) * len(shape), live)], [0])
    memory = torch.zeros(snapshot.nbytes, dtype=torch.uint8)
    snapshot.take(memory, None, Progress("a snapshot", "test"))
    assert torch.equal(memory.view(torch.bfloat16).view(shape), live)


def test_progress_grows_over_a_large_tensor_and_ends_know_each_tensors_end() -> None:
    data = torch.arange(20 << 10, dtype=torch.float32)
    shards = [
        LocalShard(TensorSpec("large", (20 << 10,), torch.float32), (0,), data),
        LocalShard(TensorSpec("split", (8,), torch.float32), (0,), data[:4]),
        LocalShard(TensorSpec("split", (8,), torch.float32), (4,), data[4:8]),
    ]
    places = [0, 80 << 10, (80 << 10) + 16]
    snapshot = Snapshot.of(shards, places)
    assert snapshot.ends == {"large": 80 << 10, "split": (80 << 10) + 32}
    progress, seen = Progress("a snapshot", "test"), []
    progress.advance = lambda done, _: seen.append(done)  # type: ignore[method-assign]
    snapshot.take(torch.zeros(snapshot.nbytes, dtype=torch.uint8), None, progress)
    assert seen == sorted(seen)
    assert seen[0] == 64 << 10
    assert seen[-1] == snapshot.nbytes


def test_progress_over_many_tensors_is_true_and_reported_once_for_several() -> None:
    data = [torch.randint(256, ((2 << 10) + 64 * i,), dtype=torch.uint8) for i in range(20)]
    shards = [LocalShard.whole(TensorSpec(f"t{i}", x.shape, x.dtype), x) for i, x in enumerate(data)]
    snapshot, progress = Snapshot.of(shards, compact_places(shards)), Progress("a snapshot", "test")
    memory, seen = torch.zeros(snapshot.nbytes, dtype=torch.uint8), [0]
    wanted = torch.cat(data)
    assert wanted.numel() == snapshot.nbytes

    def advance(done_bytes: int, _: int) -> None:
        assert torch.equal(memory[seen[-1] : done_bytes], wanted[seen[-1] : done_bytes])
        seen.append(done_bytes)

    progress.advance = advance  # type: ignore[method-assign,assignment]
    snapshot.take(memory, None, progress)
    assert seen[-1] == snapshot.nbytes
    assert len(set(seen)) == (4 if torch.get_num_threads() == 1 else 21)
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


def test_waiting_for_a_part_ends_when_it_is_there_or_with_the_error_that_ended_the_snapshot() -> None:
    progress = Progress("the snapshot of version 3", "trainer-0")
    waiting = threading.Thread(target=progress.wait, args=(10, Deadline.after(NEVER_S)))
    waiting.start()
    progress.advance(9, 9)
    with pytest.raises(DeadlineExceededError, match="the snapshot of version 3"):
        progress.wait(10, Deadline.after(0.01))
    progress.advance(10, 10)
    waiting.join(HANG_S)
    assert not waiting.is_alive()
    progress.fail(StorageError("no room.", part="p"))
    progress.wait(10, Deadline.after(HANG_S))
    with pytest.raises(StorageError, match="no room"):
        progress.wait(11, Deadline.after(HANG_S))
