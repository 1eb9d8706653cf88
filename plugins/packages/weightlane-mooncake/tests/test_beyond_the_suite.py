"""Tests of the Mooncake engine beyond the conformance suite: when it registers and unregisters memory."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from weightlane_mooncake import MooncakeConfig, MooncakeEngine
from weightlane_mooncake._process_engine import Memory, ProcessEngine

from weightlane.ckpt_engines import ConfigError, Deadline, ProtocolError


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


def test_tcp_is_forced_and_rdma_needs_the_devices_that_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def initialize(*_: str) -> int:
        forced.append("MC_FORCE_TCP" in os.environ)
        return 0

    forced: list[bool] = []
    library = SimpleNamespace(TransferEngine=lambda: SimpleNamespace(initialize=initialize, get_rpc_port=lambda: 1))
    for name, instead in (("import_mooncake", lambda: library), ("_RDMA_DEVICES", tmp_path)):
        monkeypatch.setitem(ProcessEngine.__init__.__globals__, name, instead)
    for devices in ("mlx5_0", ""):
        with pytest.raises(ConfigError, match="devices here are: none"):
            MooncakeEngine(MooncakeConfig(protocol="rdma", devices=devices)).check(Deadline.after(1))
    (tmp_path / "mlx5_0").mkdir()
    ProcessEngine("127.0.0.1", "tcp", "")
    ProcessEngine("127.0.0.1", "rdma", "mlx5_0")
    assert forced == [True, False]
    for host in ("::1", "0.0.0.0"):
        with pytest.raises(ValueError, match=r"IPv6|wildcard"):
            MooncakeConfig(host=host)
