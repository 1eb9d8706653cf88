"""The senders and receivers of ``nccl`` and ``hccl``: one communicator and one order of operations for each connection.

NCCL and HCCL run the operations of a communicator one after the other. So two members that take part in the same two operations
must start them in the same order, and no cycle of members may wait for each other. The framework posts in one order everywhere
(see `Capabilities.collective`), and the halves start operations in the order of their posts. Senders take turns; a receiver
starts all buckets of one turn, at most one per sender, together, so that each sender's network card is busy.

A bucket for all receivers is broadcast if the connection has one sender; every other bucket is sent from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...channels.channel import Channel
from ...contract.bucket import Bucket
from ...contract.engine import Topology, WeightReceiver, WeightSender
from ...deadline import Deadline
from ...errors import ProtocolError
from ...toolkit.waiting import poll_until
from .device_group import DeviceGroup, DeviceTransfer, Operation, open_device_group
from .group_engine import GroupEngine, TorchDistributedConfig
from .group_half import GroupHalf, bucket_label
from .process_group import BackendName


@dataclass(frozen=True, slots=True)
class _Started:
    """A bucket whose operation was started."""

    bucket: Bucket
    transfer: DeviceTransfer | None
    """Shared by all operations that were started together; None for a bucket that has no bytes or no receiver."""


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
            self._group = open_device_group(
                self._backend,
                self._device,
                dist.PrefixStore("everyone", store),
                rank=self._ranks[self._name],
                names=names,
                senders=self._senders,
                host=self._host,
                deadline=deadline,
                life=self._life,
                nccl=self._settings,
            )

    def _rank(self, name: str) -> int:
        rank = self._ranks.get(name)
        if rank is None:
            raise ProtocolError(f"not connected to {name}.", part=self._life.part)
        return rank

    def _is_broadcast(self, bucket: Bucket) -> bool:
        return bucket.to_all and self._senders == 1

    def _start(self) -> None:
        operations, self._unstarted = self._unstarted, []
        moving = [operation for operation in operations if operation.bucket.nbytes and operation.targets != ()]
        transfer = None
        if moving:
            assert self._group is not None, "connected"
            transfer = self._group.start(moving)
        self._posted += [_Started(operation.bucket, transfer) for operation in operations]

    def _start_posted(self, deadline: Deadline) -> None:  # noqa: ARG002 - starting waits for no peer
        self._start()

    def _wait_for(self, posted: _Started, deadline: Deadline) -> None:
        if posted.transfer is not None:
            peers = ", ".join(name for name in self._ranks if name != self._name)
            poll_until(posted.transfer.done, self._life, deadline, bucket_label(posted.bucket), peer=peers)

    def _release(self) -> None:
        # Dropped here: a half and its lifecycle refer to each other, and the group has the store, its port and its thread.
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._unstarted.clear()
        super()._release()


class CollectiveSender(_CollectiveHalf, WeightSender):
    """A sending rank. All members meet in the store of the first sender."""

    _side = "sender"

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Start to send the bucket: by a broadcast if all receivers get it and there is one sender."""
        with self._life.call():
            ranks = tuple(self._rank(name) for name in receivers)
            broadcast = bool(ranks) and self._is_broadcast(bucket)
            self._unstarted.append(Operation(bucket, self._rank(self._name), None if broadcast else ranks))
            self._start()


class CollectiveReceiver(_CollectiveHalf, WeightReceiver):
    """A receiving rank."""

    _side = "receiver"

    def post(self, bucket: Bucket, sender: str) -> None:
        """Receive the bucket in its turn, together with the buckets of other senders in the same turn."""
        with self._life.call():
            source = self._rank(sender)
            broadcast = self._is_broadcast(bucket)
            # In a turn senders are in rank order, so a sender whose rank is not above all unstarted ones begins the next turn.
            if broadcast or any(operation.source >= source for operation in self._unstarted):
                self._start()
            self._unstarted.append(Operation(bucket, source, None if broadcast else (self._rank(self._name),)))
            if broadcast:
                self._start()


class CollectiveEngine(GroupEngine):
    """Base of ``nccl`` and ``hccl``."""

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return CollectiveSender(name, self.config, self.backend, device)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return CollectiveReceiver(name, self.config, self.backend, device)
