"""The ``gloo`` engine: CPU memory over TCP, by torch.distributed.

A sender and its receivers form one process group, in which the sender is rank 0 and the receivers follow in topology order; with
several senders there are as many groups. A bucket for every receiver is broadcast in that group. A bucket for some goes through a
group of two for each of them, opened when it is first needed. So every transfer is a broadcast: gloo's send and recv can only be
waited for by blocking in C++. Several are under way at a time, each on a thread of gloo's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...channels.channel import Address, Channel
from ...contract.bucket import Bucket
from ...contract.capabilities import Capabilities, Delivery
from ...contract.engine import Topology, WeightReceiver, WeightSender
from ...deadline import Deadline
from ...errors import ProtocolError
from ...runtime.lifecycle import Lifecycle
from ...toolkit.waiting import run_bounded
from .group_engine import GroupEngine, GroupStore, TorchDistributedConfig, found_store, require_member
from .process_group import Group, abandon_gloo, keep_for_ever, open_process_group, start_broadcast, translated

_AT_A_TIME = 8
"""Transfers of a group that gloo works on at a time; a receiver asks for each before its bytes come, half a round trip early."""
_GRACE_S = 0.05
"""How much longer than the code that connects, which knows better who is missing, whoever waits for it does."""
_END_S = 1.0
"""How long transfers that are under way may take to fail once the half is closed."""
_NEVER_S = 10 * 365 * 86400.0


class _Transfer:
    """A broadcast; rings when it is done."""

    def __init__(self, work: dist.Work, life: Lifecycle) -> None:
        self._work: dist.Work | None = work
        self._life = life
        self._ended = threading.Event()
        work.get_future().add_done_callback(self._finished)

    def _finished(self, _: object) -> None:
        self._ended.set()  # the work itself says so only a moment after its future
        self._life.ring()

    def done(self, within_s: float = 0.0) -> bool:
        """Whether it has ended, or does so within so many seconds."""
        return self._ended.wait(within_s)

    def result(self) -> None:
        """Raise the RuntimeError it failed with, if any."""
        work, self._work = self._work, None  # it keeps the bucket's memory alive
        if work is not None:
            work.wait()


@dataclass(slots=True)
class _Posted:
    """A bucket, and the transfers that carry it once they have begun."""

    bucket: Bucket
    peers: tuple[str, ...]
    groups: tuple[str, ...]
    """In which groups it is broadcast."""
    transfers: list[_Transfer] = field(default_factory=list)
    begun: bool = False

    @property
    def what(self) -> str:
        return f"bucket {self.bucket.index} of version {self.bucket.version}"


class _Half:
    """What a sender and a receiver share: groups, and buckets that are under way."""

    def __init__(self, side: str, name: str, config: TorchDistributedConfig) -> None:
        self._name = name
        self._host = config.listen_host(name)
        self._life = Lifecycle(f"gloo {side} {name}", self._release)
        self._places: dict[str, tuple[dist.Store, int, Sequence[str]]] = {}
        """Of each group that there may be: where its members meet, this one's rank, and their names by rank."""
        self._groups: dict[str, Group] = {}
        self._posted: deque[_Posted] = deque()

    def _open(self, key: str, deadline: Deadline) -> None:
        """Open a group. gloo can be neither interrupted nor trusted with a deadline while it connects."""
        store, rank, names = self._places[key]
        world = len(names)
        self._groups[key] = run_bounded(
            lambda: open_process_group(
                "gloo", store, rank, world, deadline, host=self._host, threads=_AT_A_TIME, names=names
            ),
            self._life,
            Deadline.after(deadline.remaining_s + _GRACE_S),
            f"all {world} members of the group",
            peer=", ".join(name for name in names if name != self._name),
        )

    def _post(self, posted: _Posted) -> None:
        self._posted.append(posted)
        if all(each.begun for each in self._posted if each is not posted) and all(
            key in self._groups for key in posted.groups
        ):
            self._begin(posted, Deadline.after(_NEVER_S))

    def _begin(self, posted: _Posted, deadline: Deadline) -> None:
        for key in posted.groups if posted.bucket.nbytes else ():
            if key not in self._groups:
                self._open(key, deadline)
            work = start_broadcast(self._groups[key], posted.bucket.data, 0, Deadline.after(_NEVER_S))
            posted.transfers.append(_Transfer(work, self._life))
        posted.begun = True

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait for the transfers of all buckets but the last `pending`."""
        with self._life.call():
            for posted in self._posted:
                if not posted.begun:  # in the order in which they were posted
                    self._begin(posted, deadline)
            while len(self._posted) > pending:
                self._wait_for(self._posted[0], deadline)
                self._posted.popleft()

    def _wait_for(self, posted: _Posted, deadline: Deadline) -> None:
        peers = ", ".join(posted.peers)
        while not all(transfer.done() for transfer in posted.transfers):
            self._life.wait({}, deadline.remaining_s)
            deadline.check(posted.what, part=self._life.part, peer=peers)
        with translated(self._life.part, deadline, posted.what, peers):
            for transfer in posted.transfers:
                transfer.result()

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _release(self) -> None:
        """Gloo has no abort, and waits for what is under way when it is destroyed: have that fail first."""
        unfinished = [
            (key, transfer)
            for posted in self._posted
            for key, transfer in zip(posted.groups, posted.transfers, strict=False)
            if not transfer.done()
        ]
        for key in dict(unfinished):
            abandon_gloo(self._groups[key])
        deadline = Deadline.after(_END_S)
        for key in {key for key, transfer in unfinished if not transfer.done(deadline.remaining_s)}:
            keep_for_ever(self._groups[key])
        self._posted.clear()
        self._groups.clear()
        self._places.clear()


class GlooSender(_Half, WeightSender):
    """Rank 0 of its groups; serves the store in which they meet."""

    def __init__(self, name: str, config: TorchDistributedConfig) -> None:
        super().__init__("sender", name, config)
        self._store = GroupStore(self._host)
        self._ranks: dict[str, int] = {}

    def address(self) -> Address:
        """Where the store is."""
        with self._life.call():
            return self._store.address()

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Form the group of everybody."""
        with self._life.call():
            self._ranks = {name: rank for rank, name in enumerate(topology.receivers, 1)}
            if not self._ranks:
                return
            store = self._store.served()
            for name, rank in self._ranks.items():
                self._places[f"pair-{rank}"] = dist.PrefixStore(f"pair-{rank}", store), 0, (self._name, name)
            self._places["everyone"] = dist.PrefixStore("everyone", store), 0, (self._name, *self._ranks)
            self._open("everyone", deadline)

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Start to broadcast it, to everybody at once or to each in a group of two."""
        with self._life.call():
            if unknown := set(receivers) - set(self._ranks):
                raise ProtocolError(f"not connected to {', '.join(sorted(unknown))}.", part=self._life.part)
            pairs = tuple(f"pair-{self._ranks[name]}" for name in receivers)
            groups = ("everyone",) if bucket.to_all and receivers else pairs
            self._post(_Posted(bucket, tuple(receivers), groups))

    def _release(self) -> None:
        super()._release()
        self._store.close()


class GlooReceiver(_Half, WeightReceiver):
    """A later rank in each sender's groups."""

    def __init__(self, name: str, config: TorchDistributedConfig) -> None:
        super().__init__("receiver", name, config)
        self._senders: dict[str, int] = {}

    def address(self) -> Address:
        """Empty: receivers go where senders say."""
        return {}

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Join the group of every sender."""
        with self._life.call():
            require_member(self._name, topology.receivers, self._life.part)
            rank = list(topology.receivers).index(self._name) + 1
            for sender, address in topology.senders.items():
                store = found_store(address, self._life, sender, deadline)
                self._senders[sender] = rank
                self._places[f"{sender}/pair"] = dist.PrefixStore(f"pair-{rank}", store), 1, (sender, self._name)
                members = (sender, *topology.receivers)
                self._places[f"{sender}/everyone"] = dist.PrefixStore("everyone", store), rank, members
                self._open(f"{sender}/everyone", deadline)

    def post(self, bucket: Bucket, sender: str) -> None:
        """Join the broadcast that the sender starts."""
        with self._life.call():
            if sender not in self._senders:
                raise ProtocolError(f"not connected to {sender}.", part=self._life.part)
            self._post(_Posted(bucket, (sender,), (f"{sender}/everyone" if bucket.to_all else f"{sender}/pair",)))


class GlooEngine(GroupEngine):
    """CPU memory over TCP."""

    backend = "gloo"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        channels=False,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if dist.is_gloo_available() else "this torch was built without gloo"

    def make_sender(self, name: str, device: torch.device) -> WeightSender:  # noqa: ARG002
        """See `CheckpointEngine.make_sender`."""
        return GlooSender(name, self.options)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:  # noqa: ARG002
        """See `CheckpointEngine.make_receiver`."""
        return GlooReceiver(name, self.options)
