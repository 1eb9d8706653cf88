"""`GroupEngine` and `TorchDistributedConfig`: the base and the options of ``gloo``, ``nccl`` and ``hccl``."""

from __future__ import annotations

import ipaddress
import re
from typing import ClassVar

from pydantic import Field, field_validator

from ...channels.socket_factory import SocketFactory, TcpSocketFactory
from ...contract.engine import API_VERSION, CheckpointEngine, EngineConfig
from ...deadline import Deadline
from ...errors import ConfigError
from .interfaces import address_of_interface
from .process_group import BackendName
from .tcp_store import reserve_port

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
            "Network interface whose IPv4 address each process uses in place of `host`, for everything it sends. Of several,"
            " such as 'eth0,eth1', a participant takes the one that the number at the end of its name (its rank) selects, so"
            " each sender of a machine has its own."
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
