"""What every engine delivers: the right bytes, to the right receivers, in memory that may be reused at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weightlane.ckpt_engines import Capabilities, Delivery

MIB = 1 << 20


@pytest.mark.parametrize("receivers", [1, 3])
def test_every_receiver_gets_every_byte_of_every_version_though_the_buffer_is_overwritten_after_send(
    connected: Callable[[int], Any], receivers: int
) -> None:
    connection = connected(receivers)
    sizes = [3 * MIB + 1, 1, 0, 4095, 0, 2 * MIB]
    for version in (1, 2, 7):
        connection.deliver([[version, index, nbytes, 100 * version + index] for index, nbytes in enumerate(sizes)])


def test_versions_may_follow_each_other_without_a_word_from_the_receivers(
    connected: Callable[[int], Any], capabilities: Capabilities
) -> None:
    connection = connected(2)
    versions = (1,) if Delivery.STORE in capabilities.delivery else (1, 2, 3)  # a store forgets old versions
    connection.deliver([[version, index, 100_001, version + index] for version in versions for index in range(3)])


def test_memory_of_the_callers_own_is_delivered_too_and_may_grow(connected: Callable[[int], Any]) -> None:
    connection = connected(2)
    for version, nbytes in enumerate((1000, 100_000, 5 * MIB + 3), 1):
        connection.deliver([[version, 0, nbytes, version]], allocated=False)


def test_a_bucket_for_some_receivers_reaches_only_those(
    connected: Callable[[int], Any], capabilities: Capabilities
) -> None:
    if Delivery.POINT_TO_POINT not in capabilities.delivery:
        pytest.skip("the engine does not declare point-to-point delivery")
    connection = connected(3)
    first, second, third = connection.receivers
    plan = [([first, third], 11), ([second], 12), ([first, second, third], 13), ([third], 14)]
    for half in connection.receivers:
        mine = [[1, index, 70_001, seed] for index, (targets, seed) in enumerate(plan) if half in targets]
        connection.start_receive(half, mine)
    for index, (targets, seed) in enumerate(plan):
        connection.start_send([[1, index, 70_001, seed]], to=targets)
        connection.sender.result()
    for half in connection.receivers:
        assert all(half.result())


def test_what_was_sent_arrives_though_the_sender_closes_right_after(
    connected: Callable[[int], Any], capabilities: Capabilities
) -> None:
    if Delivery.STORE in capabilities.delivery:
        pytest.skip("a store that is not persistent goes with its sender")
    connection = connected(2)
    bucket = [1, 0, 8 * MIB, 1]
    connection.start_send([bucket])
    connection.sender.start("close")
    for half in connection.receivers:
        connection.start_receive(half, [bucket])
    for half in connection.receivers:
        assert half.result() == [True]
    connection.sender.result()
    connection.sender.result()


def test_several_senders_reach_the_same_receiver(
    halves: Callable[[int], Any], engine_name: str, engine_options: Any
) -> None:
    connection = halves(2)
    first, (second, receiver) = connection.sender, connection.receivers
    second.name = "trainer/1"
    second.call("make", side="sender", engine=engine_name, options=engine_options, name=second.name)
    connection.receivers = [receiver]
    connection.exchange_addresses()
    connection.topology["senders"][second.name] = second.call("address")
    for half in (first, second, receiver):
        connection.start_connect(half)
    for half in (first, second, receiver):
        half.result()
    for sender, seed in ((first, 1), (second, 2)):
        connection.sender = sender
        connection.deliver([[1, 0, 50_000, seed]])
