"""The torch.distributed engine on three devices: ``gloo`` (CPU), ``nccl`` (CUDA) and ``hccl`` (Ascend NPU).

A sender and its receivers form one process group of their own, in which the sender is rank 0 and the receivers follow
in topology order; with several senders there are as many groups. A bucket for every receiver is broadcast in that
group. A bucket for some goes through a group of two for each of them, opened when it is first needed. So every transfer is
a broadcast, on all three devices: gloo's send and recv can only be waited for by blocking in C++, and NCCL's would either
run one after the other in the big communicator or open communicators of two by themselves, unbounded by any deadline.
Transfers to several receivers run side by side, each in its own communicator and stream.

Ahead of each payload a header goes over a control connection, because the backends abort the process or corrupt memory
when two sides disagree about a size. The control connection also tells at once of a peer's death, which NCCL does not.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import ipaddress
import re
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from pydantic import Field, field_validator

from ._channel import Channel, accept_receivers, dial, listen_tcp
from ._device_group import DeviceGroup, Transfer, open_device_group
from ._lifecycle import Lifecycle
from .contract import (
    API_VERSION,
    Address,
    Bucket,
    Capabilities,
    CheckpointEngine,
    Delivery,
    EngineConfig,
    Mailbox,
    Topology,
    WeightReceiver,
    WeightSender,
)
from .deadline import Deadline
from .errors import ConfigError, ProtocolError, TransportError
from .process_group import BackendName, host_store, join_store, reserve_port, translate

_EVERYONE, _PAIR, _REFUSED = 1, 2, 3
_FRAME = struct.Struct("<Bqqq")
"""Kind, version, index, size in bytes."""
_DEATH_GRACE_S = 1.0
"""How long a transfer may go on after its peer hung up: what is under way may still arrive."""
_CULPRIT_WAIT_S = 0.05
_POLL_RESOLUTION_S = 0.001
_HANG_UP = getattr(select, "POLLRDHUP", 0)
"""Linux's event for a peer that hung up behind unread data; without it a receiver learns that from the backend."""
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
        interfaces = [interface.strip() for interface in self.interface.split(",") if interface.strip()]
        if not interfaces:
            return self.host
        number = _LAST_NUMBER.search(name)
        interface = interfaces[int(number.group()) % len(interfaces) if number else 0]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError as error:
                raise ConfigError(f"interface {interface!r} has no IPv4 address: {error}.", part="interface") from error
        return socket.inet_ntoa(answer[20:24])

    def communicator_settings(self) -> dict[str, int | str]:
        """Fields of ``ncclConfig_t`` that the user chose; only NCCL has any."""
        return {}


class NcclConfig(TorchDistributedConfig):
    """Options of ``nccl``."""

    interface: str = Field(
        "",
        description=(
            "Network interface whose IPv4 address each process uses in place of `host` for what goes beside NCCL: control"
            " connections and the store in which members meet. Several, such as 'eth0,eth1', are dealt out by the number at"
            " the end of a participant's name. The data path is NCCL's: it takes the network card nearest to each GPU, so"
            " senders on several GPUs use several cards. To choose others, start each process with its own NCCL_IB_HCA (or"
            " NCCL_SOCKET_IFNAME, also for NCCL's bootstrap): NCCL reads these once per process, for the training's groups"
            " too, so weightlane leaves them alone."
        ),
    )
    net_name: str = Field(
        "",
        description=(
            "Network module of these communicators alone, such as 'IB', 'Socket' or a plugin's name (ncclConfig_t.netName);"
            " empty: NCCL's choice."
        ),
    )
    max_ctas: int = Field(
        0,
        ge=0,
        description=(
            "Most thread blocks that a transfer occupies on the GPU (ncclConfig_t.maxCTAs): fewer leave more of it to"
            " training and generation, and take less memory per communicator; 0: NCCL's choice."
        ),
    )
    traffic_class: int = Field(
        -1,
        ge=-1,
        description=(
            "Network traffic class of these communicators (ncclConfig_t.trafficClass, NCCL 2.26 and later), so that switches"
            " can tell weights from gradients; -1: NCCL's choice."
        ),
    )

    def communicator_settings(self) -> dict[str, int | str]:
        """See `TorchDistributedConfig.communicator_settings`."""
        chosen: dict[str, int | str] = {}
        if self.net_name:
            chosen["net_name"] = self.net_name
        if self.max_ctas:
            chosen["max_ctas"] = self.max_ctas
        if self.traffic_class >= 0:
            chosen["traffic_class"] = self.traffic_class
        return chosen


class _Half:
    """What a sender and a receiver share: the lifecycle, and waiting for transfers."""

    def __init__(self, side: str, name: str, config: TorchDistributedConfig, backend: BackendName, device: str) -> None:
        self._name = name
        self._config = config
        self._backend = backend
        self._device_type = device
        self._life = Lifecycle(f"{backend} {side} {name}", self._release)
        self._channels: dict[str, Channel] = {}
        self._groups: dict[str, DeviceGroup] = {}
        self._stores: dict[str, dist.TCPStore] = {}

    def _release(self) -> None:
        for channel in self._channels.values():
            channel.close()
        for group in self._groups.values():
            group.close()
        self._channels.clear()
        self._groups.clear()
        self._stores.clear()

    def _group(self, sender: str, key: str, rank: int, world: int, deadline: Deadline) -> DeviceGroup:
        """The group `key` of `sender`, opened on first use."""
        full_key = f"{sender}/{key}"
        if full_key not in self._groups:
            store = dist.PrefixStore(key, self._stores[sender])
            self._groups[full_key] = open_device_group(
                self._backend,
                self._device_type,
                store,
                rank=rank,
                world=world,
                host=self._config.listen_host(self._name),
                deadline=deadline,
                life=self._life,
                nccl=self._config.communicator_settings(),
            )
        return self._groups[full_key]

    def _finish(self, transfers: Sequence[Transfer], watch: _PeerWatch, deadline: Deadline, what: str) -> None:
        """Wait for `transfers` while watching the control connections of the peers they go to or come from."""
        try:
            self._wait_for(transfers, watch, deadline, what)
        except BaseException:
            for group in self._groups.values():  # after any error this half is done with
                group.break_off()
            raise

    def _wait_for(self, transfers: Sequence[Transfer], watch: _PeerWatch, deadline: Deadline, what: str) -> None:
        started = time.monotonic()
        while not all(transfer.done() for transfer in transfers):
            elapsed_s = time.monotonic() - started
            watch.look(min(deadline.remaining_s, *(transfer.pause_s(elapsed_s) for transfer in transfers)), deadline)
            deadline.check(what, part=self._life.part, peer=watch.names)
        try:
            for transfer in transfers:
                transfer.result()
        except RuntimeError as error:
            failure = translate(error, self._life.part, deadline, what, watch.names)
            if isinstance(failure, TransportError):  # whoever hung up knows better
                watch.look(_CULPRIT_WAIT_S, deadline)
                failure = watch.lost or failure
            raise failure from error


class _PeerWatch:
    """Looks at control connections for a peer that hangs up or complains during a transfer.

    Args:
        life: Lifecycle of the half.
        peers: The connections to watch.
        speaking: Whether a peer may say something now, which can only be a refusal. A receiver's peer may not: its next
            header may be there already.
    """

    def __init__(self, life: Lifecycle, peers: Mapping[str, Channel], *, speaking: bool) -> None:
        self._life = life
        self._events = select.POLLIN if speaking else _HANG_UP
        self._watched = {channel.fileno(): channel for channel in peers.values()}
        self._give_up_at = 0.0
        self.names = ", ".join(peers)
        self.lost: TransportError | None = None
        """The first peer that hung up."""

    def look(self, timeout_s: float, deadline: Deadline) -> None:
        """Wait for up to `timeout_s` seconds, or until something rings.

        Raises the refusal of a peer at once, and the loss of one some time after: what is under way may still arrive.
        """
        if self.lost is not None:
            if time.monotonic() >= self._give_up_at:
                raise self.lost
            timeout_s = min(timeout_s, _CULPRIT_WAIT_S)
        if timeout_s < _POLL_RESOLUTION_S:  # which poll would round up
            time.sleep(timeout_s)
            timeout_s = 0.0
        for descriptor in self._life.wait(dict.fromkeys(self._watched, self._events), timeout_s):
            channel = self._watched.pop(descriptor)
            if self._events == select.POLLIN:
                try:
                    raise self._refusal(channel, deadline)
                except TransportError as error:
                    loss = error
            else:
                loss = channel.lost()
            if self.lost is None:
                self.lost = loss
                self._give_up_at = time.monotonic() + _DEATH_GRACE_S

    def _refusal(self, channel: Channel, deadline: Deadline) -> ProtocolError:
        kind, version, index, nbytes = _FRAME.unpack(channel.receive(_FRAME.size, deadline, "a complete frame"))
        if kind != _REFUSED:
            return ProtocolError(f"unexpected frame of kind {kind}.", part=self._life.part, peer=channel.peer)
        return ProtocolError(
            f"the receiver waits for bucket {index} of version {version} with {nbytes} bytes instead.",
            part=self._life.part,
            peer=channel.peer,
        )


class TorchDistributedSender(_Half, WeightSender):
    """Rank 0 of its groups; serves the store in which they meet."""

    def __init__(self, name: str, config: TorchDistributedConfig, backend: BackendName, device: str) -> None:
        super().__init__("sender", name, config, backend, device)
        self._listener: socket.socket | None = None

    def address(self) -> Address:
        """Host and port of the control connection."""
        with self._life.call():
            if self._listener is None:
                self._listener = listen_tcp(self._config.listen_host(self._name))
            host, port, *_ = self._listener.getsockname()
            return {"host": host, "port": port}

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Let every receiver in and form the group."""
        self.address()
        with self._life.call():
            listener = cast("socket.socket", self._listener)
            self._channels = accept_receivers(
                listener, self._life, topology.session, topology.receivers, deadline, key=topology.key
            )
            listener.close()
            if not self._channels:
                return
            self._stores[self._name], port = host_store(self._config.listen_host(self._name))
            for rank, channel in enumerate(self._channels.values(), 1):
                channel.send_json({"rank": rank, "world": len(self._channels) + 1, "store_port": port}, deadline)
            self._group(self._name, "everyone", 0, len(self._channels) + 1, deadline)

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        """Send the header to each, then the payload at once to all of them."""
        with self._life.call():
            if unknown := set(receivers) - set(self._channels):
                raise ProtocolError(f"not connected to {', '.join(sorted(unknown))}.", part=self._life.part)
            peers = {name: channel for name, channel in self._channels.items() if name in receivers}
            to_all = len(peers) == len(self._channels)
            header = _FRAME.pack(_EVERYONE if to_all else _PAIR, bucket.version, bucket.index, bucket.nbytes)
            for channel in peers.values():
                channel.send(header, deadline)
            if not bucket.nbytes or not peers:
                return
            transfers = [group.start(bucket.data, deadline) for group in self._groups_for(peers, to_all, deadline)]
            what = f"{', '.join(peers)} to take bucket {bucket.index} of version {bucket.version}"
            self._finish(transfers, _PeerWatch(self._life, peers, speaking=True), deadline, what)

    def _groups_for(self, peers: Iterable[str], to_all: bool, deadline: Deadline) -> list[DeviceGroup]:
        if to_all:
            return [self._group(self._name, "everyone", 0, len(self._channels) + 1, deadline)]
        ranks = {name: rank for rank, name in enumerate(self._channels, 1)}
        return [self._group(self._name, f"pair-{ranks[name]}", 0, 2, deadline) for name in peers]

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _release(self) -> None:
        if self._listener is not None:
            self._listener.close()
        super()._release()


class TorchDistributedReceiver(_Half, WeightReceiver):
    """A later rank in each sender's groups."""

    def __init__(self, name: str, config: TorchDistributedConfig, backend: BackendName, device: str) -> None:
        super().__init__("receiver", name, config, backend, device)
        self._ranks: dict[str, tuple[int, int]] = {}

    def address(self) -> Address:
        """Empty: receivers dial."""
        return {}

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Dial every sender in turn and join its group."""
        with self._life.call():
            for sender, address in topology.senders.items():
                host, port = _host_and_port(address, self._life.part, sender)
                channel, welcome = dial(
                    (host, port),
                    self._life,
                    deadline,
                    session=topology.session,
                    name=self._name,
                    peer=sender,
                    key=topology.key,
                )
                self._channels[sender] = channel
                try:
                    rank, world, store_port = (int(welcome[key]) for key in ("rank", "world", "store_port"))
                except (KeyError, TypeError, ValueError) as error:
                    raise ProtocolError(f"bad welcome: {welcome}.", part=self._life.part, peer=sender) from error
                self._ranks[sender] = rank, world
                self._stores[sender] = join_store(host, store_port, deadline, sender)
                self._group(sender, "everyone", rank, world, deadline)

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        """Check the header, then join the broadcast it announces."""
        with self._life.call():
            if sender not in self._channels:
                raise ProtocolError(f"not connected to {sender}.", part=self._life.part)
            channel = self._channels[sender]
            what = f"bucket {bucket.index} of version {bucket.version}"
            kind, *described = _FRAME.unpack(channel.receive(_FRAME.size, deadline, what))
            expected = [bucket.version, bucket.index, bucket.nbytes]
            if kind not in (_EVERYONE, _PAIR) or described != expected:
                channel.send(_FRAME.pack(_REFUSED, *expected), deadline)
                raise ProtocolError(
                    "expected version {}, bucket {} of {} bytes, but the sender offers {}, {} of {}.".format(
                        *expected, *described
                    ),
                    part=self._life.part,
                    peer=sender,
                )
            if not bucket.nbytes:
                return
            rank, world = self._ranks[sender]
            if kind == _EVERYONE:
                group = self._group(sender, "everyone", rank, world, deadline)
            else:
                group = self._group(sender, f"pair-{rank}", 1, 2, deadline)
            watch = _PeerWatch(self._life, {sender: channel}, speaking=False)
            self._finish([group.start(bucket.data, deadline)], watch, deadline, what)

    def close(self) -> None:
        """See `WeightReceiver.close`."""
        self._life.close()


class TorchDistributedEngine(CheckpointEngine):
    """Base of the three engines; a subclass names the backend and the device."""

    api_version = API_VERSION
    config_type = TorchDistributedConfig
    backend: ClassVar[BackendName]
    device: ClassVar[str]

    def check(self, deadline: Deadline) -> None:  # noqa: ARG002 - it takes no time
        """See `CheckpointEngine.check`: the address is one of this machine."""
        config = cast("TorchDistributedConfig", self.config)
        host = config.listen_host("")
        try:
            reserve_port(host).close()
        except ConfigError as error:
            key = "interface" if config.interface else "host"
            raise ConfigError(
                f"{key} is {host}: {error.message}", part=f"{self.backend} engine", hint=error.hint
            ) from error

    def make_sender(self, name: str) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return TorchDistributedSender(name, cast("TorchDistributedConfig", self.config), self.backend, self.device)

    def make_receiver(self, name: str) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return TorchDistributedReceiver(name, cast("TorchDistributedConfig", self.config), self.backend, self.device)


_both_ways = functools.partial(Capabilities, delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}))


class GlooEngine(TorchDistributedEngine):
    """CPU memory over TCP."""

    backend = "gloo"
    device = "cpu"
    capabilities = _both_ways(devices=frozenset({"cpu"}))

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if dist.is_gloo_available() else "this torch was built without gloo"


class NcclEngine(TorchDistributedEngine):
    """CUDA memory over NVLink, InfiniBand or TCP. Uses the device that is current where it connects."""

    config_type = NcclConfig
    backend = "nccl"
    device = "cuda"
    capabilities = _both_ways(devices=frozenset({"cuda"}))

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        if not torch.cuda.is_available():
            return "no CUDA device"
        return None if dist.is_nccl_available() else "this torch was built without NCCL"


class HcclEngine(TorchDistributedEngine):
    """Ascend NPU memory over HCCS or RoCE. Uses the device that is current where it connects."""

    backend = "hccl"
    device = "npu"
    capabilities = _both_ways(devices=frozenset({"npu"}))

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        try:
            importlib.import_module("torch_npu")
            return None if torch.get_device_module("npu").is_available() else "no NPU"
        except (ImportError, OSError, RuntimeError) as error:
            return f"torch_npu cannot be used: {error}"


def _host_and_port(address: Address, part: str, peer: str) -> tuple[str, int]:
    host, port = address.get("host"), address.get("port")
    if not (isinstance(host, str) and isinstance(port, int) and 0 < port < 2**16):
        raise ProtocolError(f"{dict(address)} is not an address with host and port.", part=part, peer=peer)
    return host, port
