"""Network interfaces of this machine, by their IPv4 addresses."""

from __future__ import annotations

import fcntl
import socket
import struct

from ...errors import ConfigError

_SIOCGIFADDR = 0x8915
"""From <linux/sockios.h>: asks for an interface's address."""
_ANY_PORT = 9
"""A port number that ``connect`` needs; nothing is sent to it."""


def address_of_interface(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine. Raises `ConfigError` if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            existing = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"interface {interface!r} has no IPv4 address: {error}.",
                part="interface",
                hint=f"Network interfaces of this machine: {existing}.",
            ) from error
    return socket.inet_ntoa(answer[20:24])


def interface_towards(host: str) -> str:
    """Return the interface whose IPv4 address this machine uses in connections to `host`; empty if there is none."""
    if not host:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1" if host == "::1" else host, _ANY_PORT))  # chooses a route, and sends nothing
        except OSError:
            return ""
        ours = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        try:
            if address_of_interface(name) == ours:
                return name
        except ConfigError:
            continue
    return ""
