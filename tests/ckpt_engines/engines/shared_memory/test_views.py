"""Tests of `shm` beyond the conformance suite: who owns its memory, when the memory is freed, and who may write to it."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from sessions import Session, descriptors, soon, wait_until_closed
from waiting import wait_until

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngine,
    CheckpointEngineRegistry,
    Deadline,
    DeadlineExceededError,
    ProtocolError,
    StorageError,
)
from weightlane.ckpt_engines.engines.shared_memory.segment_engine import SegmentEngine

pytestmark = pytest.mark.usefixtures("small_heap")
MIB = 1 << 20
Mappings = Callable[[], list[tuple[str, int]]]
CPU = torch.device("cpu")
NAMES = ("a", "b")
READ, WRITE = ("r--s", MIB), ("rw-s", MIB)


@pytest.fixture
def engine(socket_dir: Path) -> SegmentEngine:
    options = {"socket_dir": str(socket_dir), "max_shared_mib": 4}
    return cast("SegmentEngine", CheckpointEngineRegistry().create("shm", options))


@pytest.fixture
def session(engine: SegmentEngine) -> Iterator[Session]:
    made = Session(engine, *NAMES)
    yield made
    made.close()


def filled(engine: CheckpointEngine, nbytes: int, value: int) -> torch.Tensor:
    return engine.allocate(nbytes, CPU).fill_(value)


def test_a_view_is_the_senders_memory_mapped_to_be_read_and_nothing_is_copied(
    mappings: Mappings, engine: SegmentEngine, session: Session
) -> None:
    data = filled(engine, MIB, 1)
    views = session.show(1, data)
    assert mappings() == [READ, READ, WRITE]
    data[5] = 9  # which nobody may do before the version is reclaimed
    assert [int(view[5]) for view in views] == [9, 9]


def test_nobody_but_the_sender_can_map_the_memory_to_write_to_it(engine: SegmentEngine) -> None:
    memory = filled(engine, MIB, 1)
    found = engine._arena.find(memory)
    assert found is not None
    _, (descriptor,) = found[0].describe()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, MIB)
    memory.fill_(2)


def test_memory_and_descriptors_go_with_the_last_who_looks_and_with_the_engine(
    mappings: Mappings, socket_dir: Path
) -> None:
    before = descriptors()
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir)})
    session = Session(engine, *NAMES)
    data = filled(engine, MIB, 7)
    views = session.show(1, data)
    session.close()
    engine.free(data)
    del data
    assert mappings() == [READ, READ]
    part = views[0][10:20]
    del views
    assert mappings() == [READ]
    assert part.tolist() == [7] * 10
    del part
    assert mappings() == []
    engine.allocate(MIB, CPU)
    assert mappings() == [WRITE]
    del engine, session
    wait_until(lambda: mappings() == [], "end of the last thread that served the session")
    wait_until_closed(before)


def test_a_freed_segment_is_unmapped_by_receivers_with_the_next_bucket_and_held_by_the_sender_until_then(
    mappings: Mappings, engine: SegmentEngine, session: Session
) -> None:
    first, second = filled(engine, MIB, 1), filled(engine, MIB, 2)
    session.show(1, first)
    session.release(1)
    found = engine._arena.find(first)
    assert found is not None
    segment = weakref.ref(found[0])
    del found
    engine.free(first)
    del first
    assert segment() is not None  # device memory must not be freed while a receiver maps it
    assert len(mappings()) == 3
    session.show(2, second)
    assert segment() is None
    assert mappings() == [READ, READ, WRITE]


def test_a_bucket_that_a_receiver_may_still_come_to_look_at_counts_as_looked_at(
    engine: SegmentEngine, session: Session
) -> None:
    data = filled(engine, 100, 1)
    prompt = session.view("a", 1, 100)
    session.sender.post(Bucket(1, 0, data, lasting=True), NAMES, soon())
    prompt.result()
    session.receivers["a"].release(1, soon())
    with pytest.raises(DeadlineExceededError, match="b"):  # it may come to look
        session.sender.reclaim(1, Deadline.after(0.05))
    session.view("b", 1, 100).result()
    with pytest.raises(DeadlineExceededError, match="b"):  # and now it does
        session.sender.reclaim(1, Deadline.after(0.05))
    session.receivers["b"].release(1, soon())
    session.sender.reclaim(1, soon())


def test_what_a_receiver_should_not_say_fails_the_reclaim_and_what_it_says_without_end_does_not_put_off_the_deadline(
    engine: SegmentEngine, session: Session
) -> None:
    session.show(1, filled(engine, 100, 1))
    channel = session.receivers["a"].half._channels["s"]  # type: ignore[attr-defined]
    for nonsense in ({"released": "1"}, {"version": 1, "taken": 5}, {"version": 1, "taken": 0}, {}):
        channel.send_json(nonsense, soon())
        with pytest.raises(ProtocolError, match="was not taken"):
            session.sender.reclaim(1, soon())
    for _ in range(100):
        channel.send_json({"released": 12345}, soon())
    with pytest.raises(DeadlineExceededError):
        session.sender.reclaim(1, Deadline.after(0))


def test_copies_of_lasting_buckets_go_when_they_are_reclaimed_or_their_sender_closes(
    engine: SegmentEngine, session: Session
) -> None:
    session.show(1, torch.ones(3 * MIB, dtype=torch.uint8))
    with pytest.raises(StorageError):
        engine.allocate(2 * MIB, CPU)
    session.release(1)
    session.show(2, torch.ones(3 * MIB, dtype=torch.uint8))
    session.close()
    engine.free(engine.allocate(4 * MIB, CPU))


def test_a_version_that_was_never_shown_and_one_of_empty_buckets_are_reclaimed_at_once(session: Session) -> None:
    session.sender.reclaim(7, Deadline.after(0))
    (view, _) = session.show(1, torch.empty(0, dtype=torch.uint8))
    assert view.numel() == 0
    session.sender.reclaim(1, Deadline.after(0))
