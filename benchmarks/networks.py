"""Network namespaces joined by limited links, for benchmarks whose participants shall not be on one machine's loopback.

Linux only; it takes root and the programs ip and tc (Debian's iproute2). The namespaces have no names: they go with the last
process in them, however a benchmark ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError
from weightlane.cli.bench.processes.network_namespace import enter_network, new_network

INTERFACE = "wl0"
"""Name of the interface that every participant has in its namespace."""
_PART = "limited link"
_SUBNET = "10.83.71"
_BURST_BYTES = 256 << 10
"""Burst of the token bucket: the most bytes that a link passes at once, above its rate.

It is four of the largest segments the kernel hands down, about 0.2 % of what a link of 1 Gbit/s carries in a second.
"""
_QUEUE_MS = 50
_COMMAND_S = 20.0
_PIECE_BYTES = 1 << 20
_TUN = "/dev/net/tun"
_TUNNEL_MTU = 65_000
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
"""``TUNSETIFF``, and ``IFF_TUN | IFF_NO_PI``."""
_LONGEST_WINDOW_BYTES = 64 << 20
_LOOK_S = 0.2
RAW_S = 0.5
"""Seconds of a raw transfer: long enough that the burst, which passes unhindered, hardly counts."""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one interface."""

    namespace: str
    """Path by which a process enters the namespace."""
    address: str


@dataclass(frozen=True, slots=True)
class Link:
    """Two namespaces that see each other only."""

    sender: Host
    receiver: Host
    rate_mbit: float


def missing() -> str:
    """Why no limited link can be made here; empty when it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's."
    if absent := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        return f"{' and '.join(absent)} not found: install iproute2."
    if os.geteuid() != 0:
        return "it takes root to make network namespaces and to limit a link."
    return ""


def inside(namespace: str, work: Callable[[], Any]) -> Future[Any]:
    """Do `work` on a thread of its own in `namespace`."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            enter_network(namespace)
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            done.set_exception(error)

    threading.Thread(target=run, name="weightlane-limited-link", daemon=True).start()
    return done


@contextlib.contextmanager
def on(host: Host) -> Iterator[None]:
    """Put this thread, and all that it starts meanwhile, into the host's namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter_network(host.namespace)
        yield
    finally:
        enter_network(f"/proc/self/fd/{before}")
        os.close(before)


@contextlib.contextmanager
def limited_link(rate_mbit: float) -> Iterator[Link]:
    """Two fresh namespaces joined by a link of that rate in each direction.

    Raises `ConfigError` where the system does not allow it, or ip or tc fail.
    """
    with _namespaces(2) as (sender, receiver):
        peer = f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {receiver}"
        _each(sender, [peer])
        hosts = [Host(path, f"{_SUBNET}.{number}") for number, path in enumerate((sender, receiver), 1)]
        for host in hosts:
            _each(host.namespace, [*_up(host, 30), _limit(INTERFACE, rate_mbit)])
        yield Link(*hosts, rate_mbit)


@contextlib.contextmanager
def delayed_link(rate_mbit: float, delay_ms: float) -> Iterator[Link]:
    """Join two fresh namespaces by a link of that rate that delivers every packet `delay_ms` late, in each direction.

    Not every kernel can delay packets itself, so the link is two TUN devices, and threads of this process carry the packets
    between them. Raises `ConfigError` where `limited_link` does, and where there are no TUN devices.
    """
    with _namespaces(2) as paths, contextlib.ExitStack() as opened:
        hosts = [Host(path, f"{_SUBNET}.{number}") for number, path in enumerate(paths, 1)]
        tunnels = []
        for host in hosts:
            tunnels.append(inside(host.namespace, _open_tunnel).result(_COMMAND_S))
            opened.callback(os.close, tunnels[-1])
        for host in hosts:
            _each(host.namespace, [f"ip link set {INTERFACE} mtu {_TUNNEL_MTU}", *_up(host, 30)])
            inside(host.namespace, _allow_long_windows).result(_COMMAND_S)
        over = threading.Event()
        for source, sink in (tunnels, tunnels[::-1]):
            opened.callback(_Carrier(source, sink, rate_mbit, delay_ms / 1e3, over).join)
        opened.callback(over.set)
        yield Link(*hosts, rate_mbit)


def _open_tunnel() -> int:
    try:
        tunnel = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{_TUN} cannot be opened: {error.strerror}.",
            part=_PART,
            hint="Load the kernel's module tun; a container needs the device, too.",
        ) from error
    try:
        fcntl.ioctl(tunnel, _SET_INTERFACE, struct.pack("16sH", INTERFACE.encode(), _TUN_WITHOUT_HEADER))
    except OSError as error:
        os.close(tunnel)
        raise ConfigError(f"no TUN device can be made: {error.strerror}.", part=_PART) from error
    return tunnel


def _allow_long_windows() -> None:
    """Let TCP windows of this namespace hold all bytes that are on their way during a round trip."""
    for name in ("tcp_rmem", "tcp_wmem"):
        Path(f"/proc/sys/net/ipv4/{name}").write_text(f"4096 131072 {_LONGEST_WINDOW_BYTES}")


class _Carrier:
    """Carries packets from one TUN device to another, at a rate and with a delay; what would wait for too long is dropped.

    Args:
        source: Where packets are read.
        sink: Where they are written.
        rate_mbit: How fast they leave.
        delay_s: How much later they arrive.
        over: Set when the devices are about to be closed, which they may be after `join`.
    """

    def __init__(self, source: int, sink: int, rate_mbit: float, delay_s: float, over: threading.Event) -> None:
        self._source, self._sink, self._over = source, sink, over
        self._bytes_per_s, self._delay_s = rate_mbit * 1e6 / 8, delay_s
        self._on_their_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name="weightlane-delayed-link", daemon=True)
            for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until no thread uses the devices any more."""
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        left_at = 0.0
        while not self._over.is_set():
            if not select.select([self._source], [], [], _LOOK_S)[0]:
                continue
            packet, now = os.read(self._source, _TUNNEL_MTU), time.monotonic()
            leaves = max(now, left_at) + len(packet) / self._bytes_per_s
            if leaves - now <= _QUEUE_MS / 1e3:
                left_at = leaves
                self._on_their_way.put((leaves + self._delay_s, packet))

    def _write(self) -> None:
        while not self._over.is_set():
            try:
                arrives, packet = self._on_their_way.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            time.sleep(max(0.0, arrives - time.monotonic()))
            with contextlib.suppress(OSError):  # nobody is there any more
                os.write(self._sink, packet)


@contextlib.contextmanager
def limited_hosts(count: int, rate_mbit: float) -> Iterator[tuple[Host, ...]]:
    """`count` fresh namespaces joined by a bridge in one more, each with a link of that rate in each direction.

    Raises `ConfigError` where the system does not allow it, or ip or tc fail.
    """
    with _namespaces(count + 1) as (bridge, *paths):
        _each(bridge, ["ip link add wlbridge type bridge", "ip link set wlbridge up"])
        hosts = tuple(Host(path, f"{_SUBNET}.{number}") for number, path in enumerate(paths, 1))
        for number, host in enumerate(hosts):
            port = f"wlport{number}"
            _each(host.namespace, [f"ip link add {INTERFACE} type veth peer name {port} netns {bridge}"])
            # What a host gets is limited where it leaves the bridge.
            joined = [f"ip link set {port} master wlbridge", f"ip link set {port} up"]
            _each(bridge, [*joined, _limit(port, rate_mbit)])
            _each(host.namespace, [*_up(host, 24), _limit(INTERFACE, rate_mbit)])
        yield hosts


def sent_bytes(host: Host) -> int:
    """Bytes that the host's interface has sent so far, headers and acknowledgements included."""
    counters = inside(host.namespace, Path("/proc/thread-self/net/dev").read_text).result(_COMMAND_S)
    line = next(line for line in counters.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    return int(line.split(":")[1].split()[8])  # eight columns of what it has received come first


def raw_mbit(sender: Host, receivers: Sequence[Host], rate_mbit: float, seconds: float = RAW_S) -> float:
    """Payload that TCP carries from `sender` to all `receivers` at once, one connection to each, in Mbit/s."""
    nbytes = max(_PIECE_BYTES, round(rate_mbit * 1e6 / 8 * seconds))
    listening: list[Future[int]] = [Future() for _ in receivers]

    def receive(host: Host, at: Future[int]) -> float:
        with socket.create_server((host.address, 0)) as server:
            server.settimeout(_COMMAND_S)
            at.set_result(server.getsockname()[1])
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_COMMAND_S)
                buffer, left = bytearray(_PIECE_BYTES), nbytes
                while left:
                    if not (got := connection.recv_into(buffer, min(left, len(buffer)))):
                        raise ConfigError("the connection ended early.", part=_PART)
                    left -= got
                return time.monotonic()

    def send(host: Host, at: Future[int]) -> float:
        with socket.create_connection((host.address, at.result(_COMMAND_S)), _COMMAND_S) as connection:
            started, piece, left = time.monotonic(), memoryview(bytes(_PIECE_BYTES)), nbytes
            while left:
                connection.sendall(piece[: min(left, len(piece))])
                left -= min(left, len(piece))
            return started

    total = nbytes * len(receivers)
    wait_s = 2 * _COMMAND_S + 8e-6 * total / rate_mbit
    ends = list(zip(receivers, listening, strict=True))
    received = [inside(host.namespace, lambda host=host, at=at: receive(host, at)) for host, at in ends]  # type: ignore[misc]
    sent = [inside(sender.namespace, lambda host=host, at=at: send(host, at)) for host, at in ends]  # type: ignore[misc]
    started = min(float(each.result(wait_s)) for each in sent)
    return 8e-6 * total / (max(float(each.result(wait_s)) for each in received) - started)


@contextlib.contextmanager
def _namespaces(count: int) -> Iterator[list[str]]:
    """Make `count` network namespaces, and yield their paths; they end with the last process in them."""
    if reason := missing():
        raise ConfigError(reason, part=_PART)
    with contextlib.ExitStack() as opened:
        paths = []
        for _ in range(count):
            made: Future[int] = Future()
            threading.Thread(target=_make_network, args=(made,), daemon=True).start()
            descriptor = made.result(_COMMAND_S)
            opened.callback(os.close, descriptor)
            paths.append(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield paths


def _make_network(made: Future[int]) -> None:
    try:
        made.set_result(new_network())
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits
        made.set_exception(error)


def _up(host: Host, prefix: int) -> list[str]:
    return [
        "ip link set lo up",
        f"ip address add {host.address}/{prefix} dev {INTERFACE}",
        f"ip link set {INTERFACE} up",
    ]


def _limit(interface: str, rate_mbit: float) -> str:
    limit = f"rate {round(rate_mbit * 1000)}kbit burst {_BURST_BYTES} latency {_QUEUE_MS}ms"
    return f"tc qdisc add dev {interface} root tbf {limit}"


def _each(namespace: str, lines: Sequence[str]) -> None:
    """Run command lines in `namespace`, one after the other. Raises `ConfigError` for one that fails."""
    inside(namespace, lambda: [_command(line) for line in lines]).result((1 + len(lines)) * _COMMAND_S)


def _command(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, timeout=_COMMAND_S, check=False)  # noqa: S603 - ours
    if done.returncode:
        raise ConfigError(f"`{line}` failed: {done.stderr.strip()}", part=_PART)
