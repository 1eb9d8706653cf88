"""The public helpers for engine authors: bounded waits, handshakes, and an engine that is made of two functions."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from sessions import KEYS, Session, soon
from waiting import NEVER_S

from weightlane.ckpt_engines import (
    Bucket,
    Channel,
    CheckpointEngineRegistry,
    ClosedError,
    Deadline,
    DeadlineExceededError,
    EngineConfig,
    ProtocolError,
    toolkit,
)
from weightlane.ckpt_engines.links import SenderLink
from weightlane.ckpt_engines.runtime.devices import HOST


class Pair:
    """The two ends of one connection."""

    def __init__(self) -> None:
        ends = socket.socketpair()
        self.sender_life = toolkit.Lifecycle("test sender", lambda: None)
        self.receiver_life = toolkit.Lifecycle("test receiver", lambda: None)
        self.to_receiver = toolkit.Channel(ends[0], KEYS, self.sender_life, "rollout")
        self.to_sender = toolkit.Channel(ends[1], KEYS, self.receiver_life, "trainer")
        self.never = threading.Event()

    @property
    def receivers(self) -> dict[str, toolkit.Channel]:
        return {"rollout": self.to_receiver}


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.never.set()  # the threads that were left behind end too
    for closable in (made.to_receiver, made.to_sender, made.sender_life, made.receiver_life):
        closable.close()


def bucket(version: int = 1, index: int = 0, nbytes: int = 4) -> Bucket:
    return Bucket(version, index, torch.arange(nbytes, dtype=torch.uint8))


def test_announcement_answer_and_refusal_reach_the_other_side_with_their_details(pair: Pair) -> None:
    toolkit.announce(pair.receivers, bucket(), soon(), place=4096)
    assert toolkit.expect(pair.to_sender, bucket(), soon())["place"] == 4096
    toolkit.acknowledge(pair.to_sender, bucket(), soon(), seen=True)
    assert toolkit.await_acknowledgements(pair.receivers, bucket(), soon())["rollout"]["seen"] is True
    toolkit.refuse(pair.to_sender, "it has no room", soon())
    with pytest.raises(ProtocolError, match="was not taken: it has no room"):
        toolkit.await_acknowledgements(pair.receivers, bucket(), soon())


def test_a_refusal_ends_a_payload_that_does_not_fit_the_socket(pair: Pair) -> None:
    large = Bucket(1, 0, torch.zeros(32 << 20, dtype=torch.uint8))
    toolkit.announce(pair.receivers, large, soon())
    with pytest.raises(ProtocolError):
        toolkit.expect(pair.to_sender, bucket(), soon())
    with pytest.raises(ProtocolError, match="was not taken"):
        toolkit.send_payload(pair.receivers, large, soon())


def test_progress_is_made_while_an_announcement_or_an_answer_is_awaited(pair: Pair) -> None:
    def at_the_fourth_call(act: Callable[[], None]) -> Callable[[], None]:
        calls = itertools.count(1)
        return lambda: act() if next(calls) == 4 else None

    announce = at_the_fourth_call(lambda: toolkit.announce(pair.receivers, bucket(), soon()))
    toolkit.expect(pair.to_sender, bucket(), soon(), progress=announce)
    acknowledge = at_the_fourth_call(lambda: toolkit.acknowledge(pair.to_sender, bucket(), soon()))
    assert list(toolkit.await_acknowledgements(pair.receivers, bucket(), soon(), progress=acknowledge)) == ["rollout"]


def blocked(pair: Pair, deadline: Deadline, *, polled: bool) -> None:
    """Wait for something that never comes, in one of the two ways."""
    if polled:
        toolkit.poll_until(lambda: False, pair.receiver_life, deadline, "godot", peer="trainer")
    else:
        toolkit.run_bounded(pair.never.wait, pair.receiver_life, deadline, "godot", peer="trainer")


@pytest.mark.parametrize("polled", [True, False], ids=["polled", "bounded"])
def test_a_wait_ends_by_the_deadline_and_names_who_was_waited_for_or_when_the_half_is_closed(
    pair: Pair, polled: bool
) -> None:
    with pytest.raises(DeadlineExceededError, match=r"peer trainer.*godot"):
        blocked(pair, Deadline.after(0.05), polled=polled)
    threading.Timer(0.05, pair.receiver_life.close).start()
    with pytest.raises(ClosedError), pair.receiver_life.call():
        blocked(pair, Deadline.after(NEVER_S), polled=polled)


def test_the_memory_of_an_engine_is_found_by_every_part_of_it_until_it_is_discarded() -> None:
    memory: toolkit.EngineMemory[str] = toolkit.EngineMemory()
    first, second = (torch.empty(100, dtype=torch.uint8) for _ in range(2))
    assert memory.add(first, "first") is first
    memory.add(second, "second")
    assert [memory.find(data) for data in (first, first[99:], second[3:50])] == ["first", "first", "second"]
    larger = torch.empty(200, dtype=torch.uint8)
    memory.add(larger[50:100], "part")
    assert memory.find(larger[50:100]) == "part"
    assert [memory.find(data) for data in (larger, larger[40:60], larger[99:101])] == [None] * 3
    assert memory.discard(first[5:6]) == "first"
    assert memory.discard(first) is None
    assert memory.find(first) is None
    assert sorted(memory.drain()) == ["part", "second"]
    assert memory.find(second) is None


class LaneConfig(EngineConfig):
    lanes: int = 2


class Lanes(toolkit.PairedEngine[LaneConfig]):
    """Has options."""


class MoreLanes(Lanes):
    """Inherits these options."""


class Plain(toolkit.PairedEngine[EngineConfig]):
    """Has none."""


def test_the_type_of_the_options_stands_in_the_brackets_and_errors_call_an_engine_by_its_registered_name() -> None:
    assert [engine.config_type for engine in (Lanes, MoreLanes, Plain)] == [LaneConfig, LaneConfig, EngineConfig]
    registered = CheckpointEngineRegistry().create("template")
    for engine, called in ((registered, "template"), (MoreLanes(LaneConfig(lanes=3)), "morelanes")):
        link = SenderLink.of(engine, "s", HOST)
        assert link.part == link.half._life.part == f"{called} sender s"  # type: ignore[attr-defined]
        link.close()


class Greeting(Plain):
    """Both sides say hello, and note what is asked of them."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.did: list[str] = []

    def connected(self, channel: Channel, deadline: Deadline) -> None:
        channel.send_json({"hello": channel.peer}, deadline)
        self.did.append(f"{channel.receive_json(deadline, 'a greeting')['hello']} connected")

    def send(self, channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
        self.did.append(f"send {bucket.index} to {', '.join(channels)}")
        super().send(channels, bucket, deadline)

    def receive(self, channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
        self.did.append(f"receive {bucket.index}")
        super().receive(channel, bucket, deadline)


def test_both_sides_are_connected_and_buckets_are_moved_in_order_when_they_are_waited_for() -> None:
    sending, receiving = Greeting(EngineConfig()), Greeting(EngineConfig())
    session = Session(sending, "a", "b", of_receivers=receiving)
    assert sending.did == ["s connected"] * 2
    assert sorted(receiving.did) == ["a connected", "b connected"]
    sent = [torch.full((100,), number, dtype=torch.uint8) for number in range(3)]
    for index, data in enumerate(sent):
        session.sender.post(Bucket(1, index, data), ["a"], soon())
    assert len(sending.did) == 2
    session.sender.flush(soon(), 1)
    assert sending.did[2:] == ["send 0 to a", "send 1 to a"]
    session.sender.flush(soon())
    assert sending.did[4:] == ["send 2 to a"]
    received = [torch.zeros(100, dtype=torch.uint8) for _ in sent]
    for index, data in enumerate(received):
        session.receiver.post(Bucket(1, index, data), "s", soon())
    session.receiver.flush(soon())
    assert all(map(torch.equal, sent, received))
    assert receiving.did[2:] == ["receive 0", "receive 1", "receive 2"]
    with pytest.raises(ProtocolError, match="not connected to nobody"):
        session.sender.half.post(Bucket(1, 3, sent[0]), ["nobody"])
    session.close()
