"""The senders and receivers of ``nccl`` and ``hccl``: one communicator of all, and one of each set of receivers.

A bucket goes one of three ways:

- A bucket for all receivers of a connection with one sender is broadcast in the communicator of all.
- A bucket for one of the connection's sets of receivers (`Topology.receiver_sets`) is sent to one receiver of the set, which
  broadcasts it in the communicator of that set. So each byte leaves its sender once, however many receivers there are. A
  communicator for each sender with all its receivers would do the same, but every receiver would be in as many as there are
  senders, each of which takes time to connect and memory on its device.
- Any other bucket is sent to each of its receivers.

NCCL and HCCL run the operations of a communicator one after the other, and a running operation may keep those of another
communicator from the device. So no members may wait for each other in a circle, through whatever communicators. None do:

- A half starts all its operations on one stream, so those of all its communicators run one after the other.
- All halves follow the order in which the framework posts buckets (see `Capabilities.collective`). So an operation waits only for
  operations of earlier buckets, and the broadcast in a set also for the arrival of its bucket.
- There is one exception. So that each sender's network card is busy, a receiver starts the arrivals of a turn together, before
  the turn's broadcasts in sets. A broadcast may therefore wait for the arrival of a later bucket of the same turn. But that
  arrival has only one receiver, and its sender sends one bucket in a turn: on the sender it waits for earlier turns, and on the
  receiver for what was started before the broadcast. So this, too, leads to ever earlier operations. A bucket that is sent to
  several receivers never starts before a broadcast that was posted earlier: another receiver may have started that broadcast
  first, and the sender may serve receivers one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...channels.channel import Channel
from ...contract.bucket import Bucket
from ...contract.engine import Topology, WeightReceiver, WeightSender
from ...errors import ProtocolError
from ...waits import Deadline, poll_until
from .device_group import DeviceGroup, DeviceTransfer, Operation, close_groups, open_device_group
from .group_engine import GroupEngine, GroupHalf, TorchDistributedConfig
from .process_group import BackendName


@dataclass(frozen=True, slots=True)
class _Started:
    """A bucket whose operation was started."""

    bucket: Bucket
    transfers: tuple[DeviceTransfer, ...]
    """Several operations that were started together share one. Empty for a bucket that has no bytes or no receiver."""


@dataclass(frozen=True, slots=True)
class ReceiverSet:
    """A set of receivers that this half is in, or sends to."""

    members: tuple[str, ...]
    group: DeviceGroup | None
    """Their communicator, in which they have ranks in that order; None on a sender."""

    def first_of(self, sender: int, senders: int) -> str:
        """The member that gets the buckets of sender number `sender` of `senders`; different ones for different senders."""
        return self.members[sender * len(self.members) // senders]


class _CollectiveHalf(GroupHalf[_Started]):
    """Base of the sender and the receiver: joins the communicator and starts operations in it."""

    def __init__(self, name: str, config: TorchDistributedConfig, backend: BackendName, device: torch.device) -> None:
        super().__init__(backend, name, config)
        self._settings = config.communicator_settings()
        self._backend = backend
        self._device = device
        self._ranks: dict[str, int] = {}
        self._senders = 0
        """Number of senders in the group; their ranks precede those of the receivers."""
        self._group: DeviceGroup | None = None
        """The communicator of all."""
        self._sets: tuple[ReceiverSet, ...] = ()
        self._unstarted: list[Operation] = []
        """Posted operations that will be started together."""

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Form the group of all senders and receivers, which have ranks in that order."""
        with self._life.call():
            names = [*topology.senders, *topology.receivers]
            self._require_member(names)
            self._ranks = {name: rank for rank, name in enumerate(names)}
            self._senders = len(topology.senders)
            if not topology.receivers:
                return
            leader = names[0]
            store: dist.Store
            if leader == self._name:
                store, _ = self._serve_store()
            else:
                store = self._store_of(leader, topology.senders[leader], deadline)
            self._group = self._open(dist.PrefixStore("everyone", store), names, self._senders, deadline)
            # One after the other in one order, so that no two members wait for each other in different communicators.
            for number, members in enumerate(topology.receiver_sets):
                group = None
                if self._name in members:
                    group = self._open(dist.PrefixStore(f"set-{number}", store), members, 0, deadline)
                self._sets += (ReceiverSet(members, group),)

    def _open(self, store: dist.Store, names: Sequence[str], senders: int, deadline: Deadline) -> DeviceGroup:
        """Open a communicator of `names`, of which the first `senders` send to single others. All groups use one stream."""
        return open_device_group(
            self._backend,
            self._device,
            store,
            rank=names.index(self._name),
            names=names,
            senders=senders,
            host=self._host,
            deadline=deadline,
            life=self._life,
            nccl=self._settings,
            beside=self._group,
        )

    def _rank(self, name: str) -> int:
        rank = self._ranks.get(name)
        if rank is None:
            raise ProtocolError(f"not connected to {name}.", part=self._life.part)
        return rank

    def _is_broadcast(self, bucket: Bucket) -> bool:
        return bucket.to_all and self._senders == 1

    def _set_of(self, bucket: Bucket) -> ReceiverSet | None:
        """Return the set that broadcasts a bucket among its members; None if the bucket comes from its sender alone."""
        if bucket.receiver_set is None or not self._sets or self._is_broadcast(bucket):
            return None
        return self._sets[bucket.receiver_set]

    def _start(self) -> None:
        """Start the operations that were posted: first all that move bytes from senders, then the broadcasts of sets."""
        operations, self._unstarted = self._unstarted, []
        moving = [operation for operation in operations if operation.moves]
        together: tuple[DeviceTransfer, ...] = ()
        if moving:
            assert self._group is not None, "connected"
            together = (self._group.start(moving),)
        for operation in operations:
            transfers = together if operation.moves else ()
            self._posted.append(_Started(operation.bucket, transfers + self._pass_on(operation)))

    def _pass_on(self, operation: Operation) -> tuple[DeviceTransfer, ...]:
        """Start the broadcast of a bucket in the set that gets it; nothing to do on a sender, or for another bucket."""
        found = self._set_of(operation.bucket)
        if found is None or found.group is None or not operation.bucket.nbytes:
            return ()
        first = found.members.index(found.first_of(operation.source, self._senders))
        return (found.group.start([Operation(operation.bucket, first, None)]),)

    def _start_posted(self, deadline: Deadline) -> None:  # noqa: ARG002 - starting waits for no peer
        self._start()

    def _wait_for(self, posted: _Started, deadline: Deadline) -> None:
        for transfer in posted.transfers:
            poll_until(transfer.done, self._life, deadline, str(posted.bucket), peer=transfer.peers)

    def _release(self) -> None:
        # Dropped here: a half and its lifecycle refer to each other, and the groups have the store, its port and its thread.
        groups = [group for group in (self._group, *(each.group for each in self._sets)) if group is not None]
        self._group, self._sets = None, ()
        close_groups(groups)
        self._unstarted.clear()
        super()._release()


class CollectiveSender(_CollectiveHalf, WeightSender):
    """A sending rank. All members meet in the store of the first sender."""

    _side = "sender"

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Start to send the bucket: by a broadcast, to one receiver of a set, or to each receiver."""
        with self._life.call():
            source = self._rank(self._name)
            targets: tuple[int, ...] | None = tuple(self._rank(name) for name in receivers)
            if targets and self._is_broadcast(bucket):
                targets = None
            elif targets and (found := self._set_of(bucket)) is not None:
                targets = (self._rank(found.first_of(source, self._senders)),)
            self._unstarted.append(Operation(bucket, source, targets))
            self._start()


class CollectiveReceiver(_CollectiveHalf, WeightReceiver):
    """A receiving rank."""

    _side = "receiver"

    def post(self, bucket: Bucket, sender: str) -> None:
        """Receive the bucket in its turn, together with the buckets of other senders in the same turn."""
        with self._life.call():
            source, own = self._rank(sender), self._rank(self._name)
            broadcast, found = self._is_broadcast(bucket), self._set_of(bucket)
            if broadcast or not all(self._starts_with(operation, bucket, source) for operation in self._unstarted):
                self._start()
            targets: tuple[int, ...] | None = None if broadcast else (own,)
            if found is not None and found.first_of(source, self._senders) != self._name:
                targets = ()
            self._unstarted.append(Operation(bucket, source, targets))
            if broadcast:
                self._start()

    def _starts_with(self, unstarted: Operation, bucket: Bucket, source: int) -> bool:
        """Whether the bucket from rank `source` may be started together with an operation posted before it."""
        by_set = self._set_of(bucket) is not None, self._set_of(unstarted.bucket) is not None
        if any(by_set):  # see above: what a set broadcasts may overtake, but nothing of another turn, and nothing else
            return all(by_set) and bucket.turn is not None and bucket.turn == unstarted.bucket.turn
        # In a turn senders are in rank order, so a sender whose rank is not above all unstarted ones begins the next turn.
        return unstarted.source < source


class CollectiveEngine(GroupEngine):
    """Base of ``nccl`` and ``hccl``."""

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return CollectiveSender(name, self.config, self.backend, device)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return CollectiveReceiver(name, self.config, self.backend, device)
