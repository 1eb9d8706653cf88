"""The shortest way to an engine: what `PairedEngine` makes of two functions, and the order in which posted calls are done."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from sessions import Session, soon

from weightlane.ckpt_engines import (
    Bucket,
    Channel,
    CheckpointEngineRegistry,
    Deadline,
    EngineConfig,
    ProtocolError,
    toolkit,
)
from weightlane.ckpt_engines.links.sender_link import make_sender_link
from weightlane.ckpt_engines.runtime.devices import HOST


class LaneConfig(EngineConfig):
    lanes: int = 2


class Lanes(toolkit.PairedEngine[LaneConfig]):
    """Has options."""


class MoreLanes(Lanes):
    """Inherits these options."""


class Plain(toolkit.PairedEngine[EngineConfig]):
    """Has none."""


def test_the_type_of_the_options_is_what_stands_in_the_brackets() -> None:
    assert [engine.config_type for engine in (Lanes, MoreLanes, Plain)] == [LaneConfig, LaneConfig, EngineConfig]
    assert Lanes(LaneConfig(lanes=3)).config.lanes == 3


def test_errors_call_an_engine_by_its_registered_name_or_by_its_class_where_nobody_registered_it() -> None:
    registry = CheckpointEngineRegistry()
    for engine, called in (
        (registry.create("faulty:shm"), "faulty:shm"),
        (registry.create("template"), "template"),
        (MoreLanes(LaneConfig()), "morelanes"),
    ):
        link = make_sender_link(engine, "s", HOST)
        assert link.part == f"{called} sender s"
        if isinstance(engine, toolkit.PairedEngine):
            assert link.half._life.part == link.part  # type: ignore[attr-defined]
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


def test_posted_calls_are_done_in_order_with_the_deadline_of_who_waits_and_the_last_ones_are_left() -> None:
    posted, done = toolkit.PostedCalls(), []
    deadlines = [soon(), soon()]
    for number in range(4):
        posted.post(lambda deadline, number=number: done.append((number, deadline)))  # type: ignore[misc]
    posted.flush(deadlines[0], 3)
    assert done == [(0, deadlines[0])]
    posted.flush(deadlines[0], 3)
    posted.flush(deadlines[1], 0)
    assert done == [(0, deadlines[0]), *((number, deadlines[1]) for number in (1, 2, 3))]
    posted.post(lambda _: 1 // 0)  # type: ignore[arg-type, return-value]
    posted.post(lambda _: done.append("after the failure"))  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        posted.flush(deadlines[1], 0)
    assert len(done) == 4
