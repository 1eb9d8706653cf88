"""The pretended devices themselves, used by several threads at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checked_device.streams import Event
from checked_device.world import World
from waiting import HANG_S

THREADS = 4


@pytest.fixture
def world() -> Iterator[World]:
    made = World(0, devices=THREADS)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield made
    finally:
        sys.setswitchinterval(before)
        made.close()


def test_threads_that_use_devices_at_once_break_nothing(world: World) -> None:
    def use(device: int) -> None:
        for _ in range(100):
            stream = world.stream(device)
            world.forbid(world.stream(device))
            block = world.allocate(device, 8)
            event = Event(world)
            event.record(stream)
            event.synchronize()
            assert world.host.get(stream.number) == stream.count, "the host saw the event and not what was before it"
            assert world.find(block.address) == (block, 0)
            world.free(block)

    with ThreadPoolExecutor(THREADS) as threads:
        for each in [threads.submit(use, device) for device in range(THREADS)]:
            each.result(HANG_S)
    assert not world.violations
