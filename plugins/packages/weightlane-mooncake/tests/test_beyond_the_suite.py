"""Tests of the Mooncake engine beyond the conformance suite: when it registers and unregisters memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from weightlane_mooncake import MooncakeConfig, MooncakeEngine
from weightlane_mooncake._process_engine import Memory, ProcessEngine

from weightlane.ckpt_engines import ProtocolError


def test_memory_is_unregistered_only_when_the_read_that_uses_it_has_ended() -> None:
    unregistered: list[int] = []
    memory = Memory(torch.empty(10, dtype=torch.uint8), unregistered.append)
    reading, may_end = threading.Event(), threading.Event()

    def read() -> None:
        with memory:
            reading.set()
            may_end.wait()

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(240)
    memory.release()
    assert unregistered == []
    may_end.set()
    thread.join()
    assert unregistered == [memory.start]


class Registry:
    """Stands for Mooncake's engine, which would stay in this process, and listen, until it ends."""

    def __init__(self) -> None:
        self.unregistered: list[int] = []

    def allocate(self, nbytes: int) -> Memory:
        return Memory(torch.empty(max(1, nbytes), dtype=torch.uint8), self.unregistered.append)


def test_memory_is_registered_until_it_is_freed_or_its_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    monkeypatch.setattr(ProcessEngine, "of_this_process", lambda *_: registry)
    engine = MooncakeEngine(MooncakeConfig())
    first, second = (engine.allocate(nbytes, torch.device("cpu")) for nbytes in (1000, 0))
    assert (first.numel(), second.numel()) == (1000, 0)
    engine.free(first[10:20])
    assert registry.unregistered == [first.data_ptr()]
    engine.free(first)
    assert len(registry.unregistered) == 1
    with pytest.raises(ProtocolError, match="cpu memory only"):
        engine.allocate(10, torch.device("meta"))
    del engine
    gc.collect()
    assert len(registry.unregistered) == 2
