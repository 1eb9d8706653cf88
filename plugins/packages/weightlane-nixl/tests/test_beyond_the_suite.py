"""Tests of the NIXL engine beyond the conformance suite: idle waits, listening addresses, and use of memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    Deadline,
    DeadlineExceededError,
    ReceiverLink,
    SenderLink,
    Topology,
)

REASON = next(row.unavailable for row in CheckpointEngineRegistry().list() if row.name == "nixl")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"nixl cannot run here: {REASON}")


CPU = torch.device("cpu")
HANG_S = 240.0
"""Nothing that works takes so long, however busy the machine is."""
Pair = tuple[SenderLink, ReceiverLink]


@pytest.fixture
def engine() -> Any:
    return CheckpointEngineRegistry().create("nixl")


@pytest.fixture
def pair(engine: Any) -> Iterator[Pair]:
    """The connected links of a sender and a receiver of this process."""
    sender, receiver = SenderLink(engine, "trainer", CPU), ReceiverLink(engine, "rollout", CPU)
    topology = Topology("session-1", {"trainer": sender.address()}, {"rollout": receiver.address()}, b"secret")
    thread = threading.Thread(target=sender.connect, args=(topology, Deadline.after(HANG_S)))
    thread.start()
    receiver.connect(topology, Deadline.after(HANG_S))
    thread.join()
    yield sender, receiver
    sender.close()
    receiver.close()


def test_waiting_for_a_bucket_keeps_no_core_busy(pair: Pair) -> None:
    _, receiver = pair
    receiver.half.post(Bucket(1, 0, torch.empty(10, dtype=torch.uint8)), "trainer")
    gc.collect()  # not meanwhile
    before = time.process_time()
    with pytest.raises(DeadlineExceededError):
        receiver.half.flush(Deadline.after(2.0))
    assert time.process_time() - before < 1.0


def test_connecting_ends_by_its_deadline_when_ucx_does_not_start(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, half = threading.Event(), engine.make_receiver("rollout", CPU)
    monkeypatch.setattr("weightlane_nixl.Agent", lambda *_: starts.wait(HANG_S))
    with pytest.raises(DeadlineExceededError, match="UCX to start"):
        half.connect(Topology("session-1", {}, {}), {}, Deadline.after(0.05))
    starts.set()
    half.close()


def listening() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return {(item.laddr.ip, item.laddr.port) for item in connections if item.status == psutil.CONN_LISTEN}


@pytest.fixture
def others() -> set[tuple[str, int]]:
    """Where libraries listen that earlier tests have used in this process; Mooncake's do until it ends."""
    return listening()


def test_nothing_listens_beyond_loopback_unless_told(others: set[tuple[str, int]], pair: Pair) -> None:
    hosts = {host for host, _ in listening() - others}
    assert hosts
    assert hosts <= {"127.0.0.1", "::1"}


def test_addresses_of_memory_that_a_peer_may_still_write_to_are_not_used_again(pair: Pair) -> None:
    from weightlane_nixl._agent import Memory

    nbytes = 1 << 20
    exposed = Memory(nbytes)
    start = exposed.start
    exposed.abandon()
    del exposed
    later = [Memory(nbytes) for _ in range(8)]
    assert all(memory.start + nbytes <= start or start + nbytes <= memory.start for memory in later)


def deliver(pair: Pair, version: int, data: torch.Tensor) -> None:
    sender, receiver = pair
    received, deadline = torch.zeros_like(data), Deadline.after(HANG_S)
    sender.post(Bucket(version, 0, data), ["rollout"], deadline)
    thread = threading.Thread(target=sender.flush, args=(deadline,))
    thread.start()
    receiver.post(Bucket(version, 0, received), "trainer", deadline)
    receiver.flush(deadline)
    thread.join()
    assert torch.equal(received, data)


def test_memory_of_the_engine_is_registered_once_for_a_connection_and_other_memory_is_copied(
    engine: Any, pair: Pair
) -> None:
    sender: Any = pair[0].half
    memory = engine.allocate(1 << 20, torch.device("cpu")).fill_(7)
    for version, (start, stop) in enumerate([(0, 1 << 20), (5, 70_000), (70_000, 70_001)]):
        deliver(pair, version, memory[start:stop])
    assert [region.nbytes for region in sender._agent._borrowed] == [1 << 20]
    assert sender._scratch.numel() == 0
    engine.free(memory)
    deliver(pair, 9, memory[:100])  # which is nobody's now
    assert sender._scratch.numel() >= 100
