"""`GroupHalf`: the base of the senders and receivers of ``gloo``, ``nccl`` and ``hccl``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from typing import ClassVar, Generic, Literal, TypeVar

import torch.distributed as dist

from ...channels.channel import Address
from ...channels.socket_factory import host_and_port
from ...deadline import Deadline
from ...errors import ProtocolError
from ...runtime.lifecycle import Lifecycle
from .group_engine import TorchDistributedConfig
from .process_group import BackendName
from .tcp_store import host_store, join_store

_P = TypeVar("_P")


class GroupHalf(ABC, Generic[_P]):
    """Keeps the posted buckets in order, and finds the store in which the members of a group meet."""

    _side: ClassVar[Literal["sender", "receiver"]]

    def __init__(self, backend: BackendName, name: str, config: TorchDistributedConfig) -> None:
        self._name = name
        self._host = config.listen_host(name)
        self._life = Lifecycle(f"{backend} {self._side} {name}", self._release)
        self._posted: deque[_P] = deque()
        """Buckets that are not done, in the order in which they were posted."""
        self._served: tuple[dist.TCPStore, int] | None = None

    def address(self) -> Address:
        """Return the address of the store that a sender serves; empty for a receiver."""
        if self._side == "receiver":
            return {}
        with self._life.call():
            return {"host": self._host, "port": self._serve_store()[1]}

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """See `WeightSender.flush` and `WeightReceiver.flush`."""
        with self._life.call():
            self._start_posted(deadline)
            while len(self._posted) > pending:
                self._wait_for(self._posted[0], deadline)
                self._posted.popleft()

    def close(self) -> None:
        """See `WeightSender.close` and `WeightReceiver.close`."""
        self._life.close()

    @abstractmethod
    def _start_posted(self, deadline: Deadline) -> None:
        """Start the transfers of all posted buckets that wait to be started."""

    @abstractmethod
    def _wait_for(self, posted: _P, deadline: Deadline) -> None:
        """Wait for the transfers of one bucket."""

    def _release(self) -> None:
        self._posted.clear()
        self._served = None

    def _serve_store(self) -> tuple[dist.TCPStore, int]:
        """Return the store that this half serves, and its port."""
        if self._served is None:
            self._served = host_store(self._host)
        return self._served

    def _store_of(self, sender: str, address: Address, deadline: Deadline) -> dist.TCPStore:
        host, port = host_and_port(address, self._life.part, sender)
        return join_store(host, port, deadline, sender, self._life)

    def _require_member(self, members: Collection[str]) -> None:
        if self._name not in members:
            message = f"{self._name} is not among the participants of the connection: {', '.join(members)}."
            raise ProtocolError(message, part=self._life.part)
