"""The ``gloo`` engine: CPU memory over TCP, by torch.distributed.

A sender and its receivers form one process group, in which the sender is rank 0 and the receivers follow in topology order; with
several senders there are as many groups. A bucket for every receiver is broadcast in that group. A bucket for some receivers
is broadcast in a group of two with each of them, opened when it is first needed. gloo's send and recv are not used: they can only
be waited for by blocking in C++. Several transfers run at a time, each on one of gloo's threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...channels.channel import Channel
from ...contract.bucket import Bucket
from ...contract.capabilities import Capabilities, Delivery
from ...contract.engine import Topology, WeightReceiver, WeightSender
from ...errors import ProtocolError
from ...waits import Deadline, Lifecycle
from .group_engine import GroupEngine, GroupHalf, TorchDistributedConfig
from .process_group import (
    Group,
    abandon_gloo,
    call_bounded,
    keep_for_ever,
    open_process_group,
    start_broadcast,
    translated,
)

_PARALLEL_TRANSFERS = 8
"""Transfers of a group that gloo runs at a time. A receiver requests each before its bytes arrive, half a round trip early."""
_CLOSE_S = 1.0
"""Longest time, in seconds, that running transfers may take to fail once the half is closed."""


class _Transfer:
    """A broadcast that wakes the half's thread when it is done."""

    def __init__(self, work: dist.Work, life: Lifecycle) -> None:
        self._work: dist.Work | None = work
        self._life = life
        self._ended = threading.Event()
        work.get_future().add_done_callback(self._on_end)

    def _on_end(self, _: object) -> None:
        self._ended.set()  # Work.is_completed turns true only a moment after its future
        self._life.ring()

    def done(self, within_s: float = 0.0) -> bool:
        """Tell whether the broadcast has ended, or ends within `within_s` seconds."""
        return self._ended.wait(within_s)

    def result(self) -> None:
        """Raise the RuntimeError that the broadcast failed with, if any."""
        work, self._work = self._work, None  # it keeps the bucket's memory alive
        if work is not None:
            work.wait()


@dataclass(slots=True)
class _Posted:
    """A bucket, and the transfers that carry it once they are started."""

    bucket: Bucket
    peers: tuple[str, ...]
    groups: tuple[str, ...]
    """Keys of the groups in which the bucket is broadcast."""
    transfers: list[_Transfer] = field(default_factory=list)
    started: bool = False


class _GlooHalf(GroupHalf[_Posted]):
    """Base of the sender and the receiver: opens groups and broadcasts in them."""

    def __init__(self, name: str, config: TorchDistributedConfig) -> None:
        super().__init__("gloo", name, config)
        self._members: dict[str, tuple[dist.Store, int, Sequence[str]]] = {}
        """The store, this half's rank, and all names by rank, of each group that may be opened, by key."""
        self._groups: dict[str, Group] = {}
        """The open groups, by key."""

    def _open(self, key: str, deadline: Deadline) -> None:
        store, rank, names = self._members[key]
        peers = ", ".join(name for name in names if name != self._name)

        def open_group() -> Group:
            return open_process_group(
                "gloo", store, rank, len(names), deadline, host=self._host, threads=_PARALLEL_TRANSFERS, names=names
            )

        # gloo cannot be interrupted while it connects, and does not always keep its timeout.
        waiting_for = f"all {len(names)} members of the group"
        self._groups[key] = call_bounded(open_group, self._life, deadline, waiting_for, peers)

    def _post(self, bucket: Bucket, peers: tuple[str, ...], groups: tuple[str, ...]) -> None:
        """Start the bucket's transfers at once, unless a bucket before it waits or a group must be opened first."""
        posted = _Posted(bucket, peers, groups)
        in_turn = all(before.started for before in self._posted)
        self._posted.append(posted)
        if in_turn and all(key in self._groups for key in groups):
            self._start(posted, Deadline.after(math.inf))

    def _start(self, posted: _Posted, deadline: Deadline) -> None:
        for key in posted.groups if posted.bucket.nbytes else ():
            if key not in self._groups:
                self._open(key, deadline)
            # The deadline is that of `flush`; gloo's own timeout would close all connections of the group.
            work = start_broadcast(self._groups[key], posted.bucket.data, 0, Deadline.after(math.inf))
            posted.transfers.append(_Transfer(work, self._life))
        posted.started = True

    def _start_posted(self, deadline: Deadline) -> None:
        for posted in self._posted:
            if not posted.started:
                self._start(posted, deadline)

    def _wait_for(self, posted: _Posted, deadline: Deadline) -> None:
        label, peers = str(posted.bucket), ", ".join(posted.peers)
        while not all(transfer.done() for transfer in posted.transfers):
            self._life.wait({}, deadline.remaining_s)
            deadline.check(label, part=self._life.part, peer=peers)
        with translated(self._life.part, deadline, label, peers):
            for transfer in posted.transfers:
                transfer.result()

    def _release(self) -> None:
        """Make running transfers fail, since gloo has no abort and a group's destructor waits for them."""
        running = [
            (key, transfer)
            for posted in self._posted
            for key, transfer in zip(posted.groups, posted.transfers, strict=False)
            if not transfer.done()
        ]
        for key in dict(running):
            abandon_gloo(self._groups[key])
        deadline = Deadline.after(_CLOSE_S)
        for key in {key for key, transfer in running if not transfer.done(deadline.remaining_s)}:
            keep_for_ever(self._groups[key])
        self._posted.clear()
        self._groups.clear()
        self._members.clear()
        super()._release()


class GlooSender(_GlooHalf, WeightSender):
    """Rank 0 of its groups. Serves the store in which their members meet."""

    _side = "sender"

    def __init__(self, name: str, config: TorchDistributedConfig) -> None:
        super().__init__(name, config)
        self._ranks: dict[str, int] = {}
        """Rank of each receiver in the group of all."""

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Form the group of this sender and all receivers."""
        with self._life.call():
            self._ranks = {name: rank for rank, name in enumerate(topology.receivers, 1)}
            if not self._ranks:
                return
            store, _ = self._serve_store()
            for name, rank in self._ranks.items():
                self._members[f"pair-{rank}"] = dist.PrefixStore(f"pair-{rank}", store), 0, (self._name, name)
            self._members["everyone"] = dist.PrefixStore("everyone", store), 0, (self._name, *self._ranks)
            self._open("everyone", deadline)

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Broadcast the bucket to all receivers together, or to each in its group of two."""
        with self._life.call():
            if unknown := set(receivers) - set(self._ranks):
                raise ProtocolError(f"not connected to {', '.join(sorted(unknown))}.", part=self._life.part)
            pairs = tuple(f"pair-{self._ranks[name]}" for name in receivers)
            self._post(bucket, tuple(receivers), ("everyone",) if bucket.to_all and receivers else pairs)


class GlooReceiver(_GlooHalf, WeightReceiver):
    """A member, with a rank above 0, of the groups of each sender."""

    _side = "receiver"

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Join the group of every sender."""
        with self._life.call():
            self._require_member(topology.receivers)
            rank = list(topology.receivers).index(self._name) + 1
            for sender, address in topology.senders.items():
                store = self._store_of(sender, address, deadline)
                self._members[f"{sender}/pair"] = dist.PrefixStore(f"pair-{rank}", store), 1, (sender, self._name)
                names = (sender, *topology.receivers)
                self._members[f"{sender}/everyone"] = dist.PrefixStore("everyone", store), rank, names
                self._open(f"{sender}/everyone", deadline)

    def post(self, bucket: Bucket, sender: str) -> None:
        """Join the sender's broadcast of the bucket."""
        with self._life.call():
            key = f"{sender}/everyone" if bucket.to_all else f"{sender}/pair"
            if key not in self._members:
                raise ProtocolError(f"not connected to {sender}.", part=self._life.part)
            self._post(bucket, (sender,), (key,))


class GlooEngine(GroupEngine):
    """CPU memory over TCP."""

    backend = "gloo"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}), delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}), channels=False
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if dist.is_gloo_available() else "this torch was built without gloo"

    def make_sender(self, name: str, device: torch.device) -> WeightSender:  # noqa: ARG002
        """See `CheckpointEngine.make_sender`."""
        return GlooSender(name, self.config)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:  # noqa: ARG002
        """See `CheckpointEngine.make_receiver`."""
        return GlooReceiver(name, self.config)
