"""What the conformance suite cannot ask of every engine."""

from __future__ import annotations

import threading

import torch
from weightlane_mooncake._process_engine import Memory


def test_memory_is_unregistered_only_when_the_read_that_uses_it_has_ended() -> None:
    unregistered: list[int] = []
    memory = Memory(torch.empty(10, dtype=torch.uint8), unregistered.append)
    reading, may_end = threading.Event(), threading.Event()

    def read() -> None:
        with memory:
            reading.set()
            may_end.wait(10)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(10)
    memory.release()
    assert unregistered == []
    may_end.set()
    thread.join(10)
    assert unregistered == [memory.start]


def test_memory_that_nobody_reads_into_is_unregistered_at_once() -> None:
    unregistered: list[int] = []
    memory = Memory(torch.empty(10, dtype=torch.uint8), unregistered.append)
    with memory:
        pass
    assert unregistered == []
    memory.release()
    assert unregistered == [memory.start]
