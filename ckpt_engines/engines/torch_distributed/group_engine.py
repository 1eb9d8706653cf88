"""`GroupEngine`, `TorchDistributedConfig` and `GroupHalf`: the bases and the options of ``gloo``, ``nccl`` and ``hccl``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import torch.distributed as dist
from pydantic import AfterValidator, Field

from ...channels.channel import Address
from ...channels.listener import one_address
from ...channels.socket_factory import SocketFactory, TcpSocketFactory, host_and_port
from ...contract.engine import API_VERSION, CheckpointEngine, EngineConfig
from ...errors import ConfigError, ProtocolError
from ...toolkit.halves import ConnectedHalf
from ...waits import Deadline
from .interfaces import address_of_interface
from .process_group import BackendName, host_store, join_store, reserve_port

_LAST_NUMBER = re.compile(r"\d+$")


class TorchDistributedConfig(EngineConfig):
    """Options of ``gloo``, ``nccl`` and ``hccl``."""

    host: Annotated[str, AfterValidator(one_address)] = Field(
        "127.0.0.1",
        description="Address of this machine on which a process listens; loopback unless there are several machines.",
    )
    interface: str = Field(
        "",
        description=(
            "Network interface whose IPv4 address each process uses in place of `host`, for everything it sends. Of several,"
            " such as 'eth0,eth1', a participant takes the one that the number at the end of its name (its rank) selects, so"
            " each sender of a machine has its own."
        ),
    )

    def listen_host(self, name: str) -> str:
        """Return the address on which the participant called `name` listens.

        Raises `ConfigError` when the participant's interface does not exist or has no IPv4 address.
        """
        interfaces = self.interfaces()
        if not interfaces:
            return self.host
        number = _LAST_NUMBER.search(name)
        return address_of_interface(interfaces[int(number.group()) % len(interfaces) if number else 0])

    def interfaces(self) -> list[str]:
        """Return the names of the network interfaces that participants take in turn; empty if they use `host`."""
        return [interface.strip() for interface in self.interface.split(",") if interface.strip()]

    def communicator_settings(self) -> dict[str, int | str]:
        """Return the fields of ``ncclConfig_t`` that the user set, by name; empty for backends other than NCCL."""
        return {}


class GroupEngine(CheckpointEngine):
    """Base of ``gloo``, ``nccl`` and ``hccl``; a subclass names the backend."""

    api_version = API_VERSION
    config: TorchDistributedConfig
    config_type = TorchDistributedConfig
    backend: ClassVar[BackendName]

    def socket_factory(self, name: str) -> SocketFactory:
        """See `CheckpointEngine.socket_factory`."""
        return TcpSocketFactory(self.config.listen_host(name))

    def check(self, deadline: Deadline) -> None:  # noqa: ARG002 - it takes no time
        """Raise `ConfigError` unless every interface has an address or, without interfaces, `host` is one of this machine's."""
        interfaces = self.config.interfaces()
        for interface in interfaces:
            address_of_interface(interface)
        if interfaces:
            return
        try:
            reserve_port(self.config.host).close()
        except ConfigError as error:
            raise ConfigError(
                f"host is {self.config.host}: {error.message}", part=f"{self.backend} engine", hint=error.hint
            ) from error


_P = TypeVar("_P")


class GroupHalf(ConnectedHalf, ABC, Generic[_P]):
    """Keeps the posted buckets in order, and finds the store in which the members of a group meet."""

    _side: ClassVar[Literal["sender", "receiver"]]

    def __init__(self, backend: BackendName, name: str, config: TorchDistributedConfig) -> None:
        self._name = name
        self._host = config.listen_host(name)
        super().__init__(f"{backend} {self._side} {name}")
        self._posted: deque[_P] = deque()
        """Buckets that are not done, in the order in which they were posted."""
        self._served: tuple[dist.TCPStore, int] | None = None

    def address(self) -> Address:
        """Return the address of the store that a sender serves; empty for a receiver."""
        if self._side == "receiver":
            return super().address()
        with self._life.call():
            return {"host": self._host, "port": self._serve_store()[1]}

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """See `WeightSender.flush` and `WeightReceiver.flush`."""
        with self._life.call():
            self._start_posted(deadline)
            while len(self._posted) > pending:
                self._wait_for(self._posted[0], deadline)
                self._posted.popleft()

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
