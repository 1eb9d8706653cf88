"""What ``gloo``, ``nccl`` and ``hccl`` have in common: their options, and the store in which the members of a group meet."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Collection
from typing import ClassVar, cast

import torch.distributed as dist
from pydantic import Field, field_validator

from ...channels.channel import Address
from ...channels.meeting import Meeting, TcpMeeting, host_and_port
from ...contract.engine import API_VERSION, CheckpointEngine, EngineConfig
from ...deadline import Deadline
from ...errors import ConfigError, ProtocolError
from ...runtime.lifecycle import Lifecycle
from .process_group import BackendName, host_store, join_store, reserve_port

_SIOCGIFADDR = 0x8915
_LAST_NUMBER = re.compile(r"\d+$")


class TorchDistributedConfig(EngineConfig):
    """Options of ``gloo``, ``nccl`` and ``hccl``."""

    host: str = Field(
        "127.0.0.1",
        description="Address of this machine on which a process listens; loopback unless there are several machines.",
    )
    interface: str = Field(
        "",
        description=(
            "Network interface whose IPv4 address each process uses in place of `host`, for everything it sends. Several,"
            " such as 'eth0,eth1', are dealt out by the number at the end of a participant's name, its rank: so each sender"
            " of a machine has its own."
        ),
    )

    @field_validator("host")
    @classmethod
    def _is_concrete(cls, host: str) -> str:
        try:
            unspecified = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            unspecified = False
        if unspecified:
            raise ValueError("is a wildcard, on which no peer can connect; name one address, or an interface")
        return host

    def listen_host(self, name: str) -> str:
        """The address on which the participant called `name` listens.

        `ConfigError` when its interface does not exist or has no IPv4 address.
        """
        interfaces = self.interfaces()
        if not interfaces:
            return self.host
        number = _LAST_NUMBER.search(name)
        return _address_of(interfaces[int(number.group()) % len(interfaces) if number else 0])

    def interfaces(self) -> list[str]:
        """Names of the network interfaces that participants take in turn; none for `host`."""
        return [interface.strip() for interface in self.interface.split(",") if interface.strip()]

    def communicator_settings(self) -> dict[str, int | str]:
        """Fields of ``ncclConfig_t`` that the user chose; only NCCL has any."""
        return {}


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this machine, or `ConfigError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"interface {interface!r} has no IPv4 address: {error}.",
                part="interface",
                hint=f"Network interfaces of this machine: {there}.",
            ) from error
    return socket.inet_ntoa(answer[20:24])


class GroupStore:
    """The store in which the members of a group meet; its sender serves it.

    Args:
        host: Address of this machine on which it is served.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._served: tuple[dist.TCPStore, int] | None = None

    def address(self) -> Address:
        """Where others find it; serves it from now on."""
        if self._served is None:
            self._served = host_store(self._host)
        return {"host": self._host, "port": self._served[1]}

    def served(self) -> dist.TCPStore:
        """This process's own."""
        self.address()
        assert self._served is not None
        return self._served[0]

    def close(self) -> None:
        """Serve it no longer."""
        self._served = None


def require_member(name: str, members: Collection[str], part: str) -> None:
    """Raise `ProtocolError` when the participant called `name` is none of the `members` of a connection."""
    if name not in members:
        raise ProtocolError(f"{name} is not among the participants of the connection: {', '.join(members)}.", part=part)


def found_store(address: Address, life: Lifecycle, sender: str, deadline: Deadline) -> dist.TCPStore:
    """The store that `sender` serves. Raises `PeerLostError`, `ProtocolError`, `DeadlineExceededError` or `ClosedError`."""
    host, port = host_and_port(address, life.part, sender)
    return join_store(host, port, deadline, sender, life)


class GroupEngine(CheckpointEngine):
    """Base of the three engines; a subclass names the backend."""

    api_version = API_VERSION
    config_type = TorchDistributedConfig
    backend: ClassVar[BackendName]

    @property
    def options(self) -> TorchDistributedConfig:
        """Its options."""
        return cast("TorchDistributedConfig", self.config)

    def meeting(self, name: str) -> Meeting:
        """See `CheckpointEngine.meeting`."""
        return TcpMeeting(self.options.listen_host(name))

    def check(self, deadline: Deadline) -> None:  # noqa: ARG002 - it takes no time
        """See `CheckpointEngine.check`: every interface has an address, or `host` is one of this machine."""
        interfaces = self.options.interfaces()
        for interface in interfaces:
            _address_of(interface)
        if interfaces:
            return
        try:
            reserve_port(self.options.host).close()
        except ConfigError as error:
            raise ConfigError(
                f"host is {self.options.host}: {error.message}", part=f"{self.backend} engine", hint=error.hint
            ) from error
