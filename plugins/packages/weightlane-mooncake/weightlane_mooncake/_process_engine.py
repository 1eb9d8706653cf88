"""The part of Mooncake that the engine uses: one transfer engine per process, memory registered with it, and reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from weightlane.ckpt_engines import ConfigError, TransportError, toolkit

_POLL_PAUSE_S = 0.001
_ABANDONED_POLL_PAUSE_S = 0.1
"""Pause between two polls of a read whose result is no longer needed."""
_DONE = 1
_FORCE_TCP = "MC_FORCE_TCP"
"""The variable by which Mooncake chooses: it ignores `protocol`, and takes RDMA if there is a device and this is not set."""
_RDMA_DEVICES = Path("/sys/class/infiniband")


def import_mooncake() -> Any:
    """Import and return ``mooncake.engine``. Raises the errors of the import, for example when libibverbs is missing."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_DISABLE_METACACHE", "1")  # else a new peer on the port of a dead one is mistaken for it
    from mooncake import engine  # noqa: PLC0415 - not there on every machine

    return engine


def check_devices(protocol: str, devices: str) -> None:
    """Raise `ConfigError` when Mooncake would take TCP although `protocol` is ``rdma``."""
    found = sorted(each.name for each in _RDMA_DEVICES.glob("*"))
    reason = ""
    if _FORCE_TCP in os.environ:
        reason = f"{_FORCE_TCP} is set"
    elif not found or not set(filter(None, devices.split(","))) <= set(found):
        reason = f"the RDMA devices here are: {', '.join(found) or 'none'}"
    if protocol == "rdma" and reason:
        hint = "Look at the engine's options protocol and devices."
        raise ConfigError(f"Mooncake cannot use RDMA: {reason}.", part="mooncake", hint=hint)


class Memory:
    """Registered memory of a process engine. It is unregistered once it is released and no read uses it.

    Args:
        data: The memory, one-dimensional uint8.
        unregister: Called once with the memory's address.
    """

    def __init__(self, data: torch.Tensor, unregister: Callable[[int], object]) -> None:
        self.data = data
        self.start = data.data_ptr()
        self._unregister = unregister
        self._lock = threading.Lock()
        self._reads = 0
        self.released = False

    def __enter__(self) -> None:
        with self._lock:
            self._reads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._reads -= 1
            last = self.released and not self._reads
        if last:
            self._unregister(self.start)

    def release(self) -> None:
        """Unregister the memory now, or when the reads that use it have ended. To be called once."""
        with self._lock:
            self.released = True
            last = not self._reads
        if last:
            self._unregister(self.start)


class ProcessEngine:
    """A `TransferEngine` of Mooncake, kept until the process ends.

    Ending a `TransferEngine` holds Python's global lock for up to a second, so connections share one. Its threads let peers read
    the memory that is registered at the time, and no other memory.
    """

    _made: ClassVar[dict[tuple[int, str, str, str], ProcessEngine]] = {}
    _making = threading.Lock()

    def __init__(self, host: str, protocol: str, devices: str) -> None:
        check_devices(protocol, devices)
        self._engine = import_mooncake().TransferEngine()
        with toolkit.environment({_FORCE_TCP: "1"} if protocol == "tcp" else {}):
            status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if status:
            raise TransportError(
                f"Mooncake cannot start with {protocol} on {host}: status {status}.",
                part="mooncake",
                hint="Look at the engine's options host, protocol and devices.",
            )
        self.segment = f"{host}:{self._engine.get_rpc_port()}"
        """Host and port at which peers reach this process."""

    @classmethod
    def of_this_process(cls, host: str, protocol: str, devices: str) -> ProcessEngine:
        """Return the process's engine with these settings, made on first use; a forked process makes its own."""
        key = os.getpid(), host, protocol, devices
        with cls._making:
            if key not in cls._made:
                cls._made[key] = cls(host, protocol, devices)
            return cls._made[key]

    def allocate(self, nbytes: int) -> Memory:
        """Return `nbytes` of registered memory, at least one byte."""
        data = torch.empty(max(1, nbytes), dtype=torch.uint8)
        if status := self._engine.register_memory(data.data_ptr(), data.numel()):
            raise TransportError(f"Mooncake cannot register {nbytes} bytes: status {status}.", part="mooncake")
        return Memory(data, self._engine.unregister_memory)

    def read(self, segment: str, start: int, nbytes: int, into: Memory) -> None:
        """Read `nbytes` at address `start` of the peer at `segment`. There is no time limit: Mooncake may block for ever.

        Raises `TransportError`.
        """
        with into:
            # The first read from a peer connects to it in this call, and waits up to a minute for a frozen peer.
            batch = self._engine.batch_transfer_async_read(segment, [into.start], [start], [nbytes])
            if not batch:
                raise TransportError(f"Mooncake cannot reach {segment}.", part="mooncake")
            while not (status := self._engine.transfer_check_status(batch)):
                time.sleep(_ABANDONED_POLL_PAUSE_S if into.released else _POLL_PAUSE_S)
        if status != _DONE:
            raise TransportError(f"Mooncake could not read from {segment}: status {status}.", part="mooncake")
