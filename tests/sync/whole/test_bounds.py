"""An engine, a rank or a replica that does not keep its deadline holds nobody up for longer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from direct_hop import MakeHop
from slices import rows
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import ClosedError, Deadline, DeadlineExceededError, SenderLink, SyncAbortedError
from weightlane.ckpt_engines.engines.shared_memory.segment_engine import SegmentEngine
from weightlane.ckpt_engines.engines.shared_memory.sender import SegmentSender
from weightlane.ckpt_engines.runtime.devices import HOST, runtime_of
from weightlane.plugins import RunHooks
from weightlane.sync import Manifest, Rendezvous, TensorSender
from weightlane.sync.receive.staging import Staging
from weightlane.sync.receive.version_receiver import VersionReceiver
from weightlane.sync.send.pipeline import Destination, SendPipeline
from weightlane.sync.send.shard_gather import ShardGather
from weightlane.sync.version.tensor_spec import TensorSpec


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ckpt_engines.waits", "sync.receive.version_receiver", "sync.send.pipeline"):
        monkeypatch.setattr(f"weightlane.{module}.GRACE_S", 0.05)
    monkeypatch.setattr("weightlane.sync.control.engine_links._QUICK_S", 0.05)


class Link(SimpleNamespace):
    """Stands for a link."""

    def __init__(self, calls: Mapping[str, Callable[..., None]]) -> None:
        super().__init__(**calls)

    __hash__ = object.__hash__


@pytest.fixture
def stuck() -> Any:
    """An engine's link none of whose calls returns before the test is over."""
    over = threading.Event()

    def call(*_: object) -> None:
        assert over.wait(HANG_S)

    names = ("address", "connect", "open_version", "flush", "commit_version", "reclaim", "close")
    yield Link({**dict.fromkeys(names, call), "post": lambda *_: None})
    over.set()


def pipeline(sender: Any) -> SendPipeline:
    return SendPipeline([cast("SenderLink", sender)], runtime_of(HOST), None, lambda *_: None)


def test_a_send_that_is_cancelled_gives_its_memory_back_once_it_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hung_up, sent, waits, freed = threading.Event(), threading.Event(), asyncio.Event(), list[bool]()
    link = Link({"post": lambda *_: hung_up.wait(HANG_S), "flush": lambda _: sent.set(), "close": hung_up.set})
    engine = Mock(allocate=lambda nbytes, _: torch.empty(nbytes, dtype=torch.uint8))
    engine.configure_mock(free=lambda _: freed.append(sent.is_set()), **{"capabilities.persistent": False})
    monkeypatch.setattr(SenderLink, "of", lambda *_: link)
    sender = TensorSender("s", engine, 64, HANG_S)
    link.connect = lambda *_: None
    sender.connect(Mock(receivers=["r"]))

    async def weights() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            if number == 2:
                waits.set()  # the second block waits for the first
            yield f"w{number}", torch.ones(16)

    async def cancel() -> None:
        sending = asyncio.create_task(sender.send(weights(), 1))
        await waits.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(cancel())
    assert freed == [True, True]


SOON = 0.1


@pytest.mark.parametrize(
    ("call", "waits_for"),
    [
        (lambda sending, sender: send(sending, sender, 1, within_s=2.0), "the engine to send version 7"),
        (lambda sending, sender: send(sending, sender, 5), "the engine to send a bucket"),
        (lambda sending, _: sending.committing(7)(7, Deadline.after(SOON)), "version 7 to be committed"),
        (lambda sending, _: sending.reclaim(7, Deadline.after(SOON)), "version 7 to be given back"),
    ],
)
def test_a_call_of_a_sender_that_never_returns_ends_with_the_deadline_and_says_whose_fault_it_is(
    stuck: Any, call: Callable[[SendPipeline, Any], None], waits_for: str
) -> None:
    sending = pipeline(stuck)
    with closing(sending), pytest.raises(DeadlineExceededError, match=waits_for) as caught:
        call(sending, stuck)
    assert "weightlane conformance" in caught.value.hint


def send(sending: SendPipeline, sender: Any, buckets: int, *, within_s: float = SOON) -> None:
    manifest = Manifest(7, (TensorSpec("t", (64 * buckets,), torch.uint8),), 64, checksummed=False)
    source: Any = SimpleNamespace(bucket=lambda _: torch.zeros(64, dtype=torch.uint8), packing_buffers=2)
    to = dict.fromkeys(range(buckets), Destination(sender, ["rollout-0/0"]))
    sending.send_version(manifest, source, to, Deadline.after(within_s), NEVER_S)


def test_a_receiver_whose_calls_never_return_is_named_and_waited_for_before_its_memory_is_used_again(
    stuck: Any,
) -> None:
    receiving = VersionReceiver("rollout-0/0", HOST, runtime_of(HOST), Staging("rollout-0/0", 0, HOST), RunHooks())
    tasks = [([f"trainer-{number}"], stuck.flush) for number in range(2)]
    with pytest.raises(DeadlineExceededError, match="trainer-0"):
        receiving._run(tasks, Deadline.after(SOON))
    with pytest.raises(DeadlineExceededError, match="to be given up"):
        receiving._wait_until_idle(Deadline.after(SOON))


def test_a_gather_that_is_closed_lets_go_of_who_waits_for_another_rank(rendezvous: Rendezvous) -> None:
    def join(rank: int) -> ShardGather:
        return ShardGather.connect(rendezvous, "s", ["t-0", "t-1"], rank, HOST, Deadline.after(HANG_S))

    def receive() -> None:
        first.receive(1, 64, Deadline.after(NEVER_S))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(join, (0, 1))
        waiting = threads.submit(receive)
        wait_until(lambda: first._moving, "rank 0 that waits for rank 1")
        first.close()
        with pytest.raises(ClosedError, match="the gather was closed"):
            waiting.result(HANG_S)
        with pytest.raises(ClosedError, match="the gather was closed"):
            receive()
        second.close()


def test_memory_that_an_engine_still_reads_is_given_back_when_it_has_ended(
    hop: MakeHop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightlane.sync.publisher.JOIN_THREAD_S", 0.05)
    reads, over = threading.Event(), threading.Event()
    freed: list[int] = []
    free = SegmentEngine.free

    def flush(self: SegmentSender, deadline: Deadline, pending: int = 0) -> None:
        del self, deadline, pending
        reads.set()
        assert over.wait(HANG_S)
        raise ClosedError("it was closed.", part="a test")

    def freeing(self: SegmentEngine, memory: torch.Tensor) -> None:
        freed.append(memory.numel())
        free(self, memory)

    run = hop("shm", rows, 1, [None])
    monkeypatch.setattr(SegmentSender, "flush", flush)
    monkeypatch.setattr(SegmentEngine, "free", freeing)
    (publisher,) = run.publishers
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(run.serve, 1)
        assert reads.wait(HANG_S)
        publisher.close()
        assert not freed, "the engine's call has not ended"
        over.set()
        wait_until(lambda: bool(freed), "memory that is given back")
        run.coordinator.close()  # which waits for the publisher to come back
        with pytest.raises(SyncAbortedError):
            serving.result(HANG_S)
