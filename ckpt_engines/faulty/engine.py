"""``faulty:NAME``: the engine NAME with faults injected into its links on purpose, to test and soak the code that uses engines.

The wrapper has the wrapped engine's capabilities and keeps the contract: it raises typed errors, its delays end by the deadline,
and ``close`` from another thread ends an injected hang. Whether a bucket has a fault, and which, depends only on the seed, the
half's name, the session, the version and the bucket's index. A half injects at most one fault per session and version, so that
faults can be counted, and appends each to a log before it happens.
"""

from __future__ import annotations

import functools
import itertools
from typing import ClassVar

import torch
from pydantic import Field, create_model

from ..channels.socket_factory import SocketFactory
from ..contract.engine import CheckpointEngine, EngineConfig, WeightReceiver, WeightSender
from ..deadline import Deadline
from ..errors import StorageError
from .fault_config import FaultKind, FaultyConfig
from .faults import HINT, Faults
from .faulty_links import FaultyReceiverLink, FaultySenderLink

PREFIX = "faulty:"
"""Prefix of the wrapped engine's name."""


class FaultyEngine(CheckpointEngine):
    """Base of the engines that `faulty` makes. A subclass names the class of the engine that it wraps."""

    config: FaultyConfig
    inner_class: ClassVar[type[CheckpointEngine]]
    link_types = FaultySenderLink, FaultyReceiverLink

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._inner = self.inner_class(self.config.inner)
        self._faults = Faults("faulty engine", "engine", self.config, (FaultKind.EXHAUST,))
        self._allocations = itertools.count()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return cls.inner_class.unavailable_reason()

    def check(self, deadline: Deadline) -> None:
        """See `CheckpointEngine.check`."""
        self._inner.check(deadline)

    def socket_factory(self, name: str) -> SocketFactory:
        """See `CheckpointEngine.socket_factory`."""
        return self._inner.socket_factory(name)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """See `CheckpointEngine.allocate`; raises `StorageError` for an injected fault."""
        if self._faults.on_allocation(next(self._allocations)):
            raise StorageError(f"no memory for {nbytes} bytes (injected fault).", part=self._faults.part, hint=HINT)
        return self._inner.allocate(nbytes, device)

    def free(self, memory: torch.Tensor) -> None:
        """See `CheckpointEngine.free`."""
        self._inner.free(memory)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return self._inner.make_sender(name, device)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return self._inner.make_receiver(name, device)


@functools.cache
def faulty(inner: type[CheckpointEngine]) -> type[FaultyEngine]:
    """Return the engine class that wraps `inner`: it has the same capabilities, and its options contain those of `inner`."""
    options = (inner.config_type, Field(description=f"Options of {inner.__name__}."))
    return type(
        f"Faulty{inner.__name__}",
        (FaultyEngine,),
        {
            "__doc__": f"{inner.__name__} with injected faults.",
            "inner_class": inner,
            "api_version": inner.api_version,
            "capabilities": inner.capabilities,
            "config_type": create_model(f"Faulty{inner.config_type.__name__}", __base__=FaultyConfig, inner=options),
        },
    )
