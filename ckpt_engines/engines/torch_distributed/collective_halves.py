"""The halves of ``nccl`` and ``hccl``, and the base of both: one communicator for all members of a connection, all in one order.

NCCL runs the operations of a communicator one behind the other, and HCCL does. So two members that take part in the same two
operations must start them in the same order, and no circle of members may wait for each other. The framework posts in one order
everywhere (see `Capabilities.collective`), and the halves start what is posted in that order. What a receiver gets from several
senders in one turn it starts side by side, so that each sender's network card is busy.

A bucket that goes to everybody from the only sender there is is broadcast; every other one goes from rank to rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ...channels.channel import Address, Channel
from ...contract.bucket import Bucket
from ...contract.engine import Topology, WeightReceiver, WeightSender
from ...deadline import Deadline
from ...errors import ProtocolError
from ...runtime.lifecycle import Lifecycle
from ...toolkit.waiting import poll_until
from .device_group import DeviceGroup, DeviceTransfer, Operation, open_device_group
from .group_engine import GroupEngine, GroupStore, TorchDistributedConfig, found_store, require_member
from .process_group import BackendName


class _Half:
    """What a sender and a receiver share: the group, and operations that are under way."""

    def __init__(
        self, side: str, name: str, config: TorchDistributedConfig, backend: BackendName, device: torch.device
    ) -> None:
        self._name = name
        self._config = config
        self._host = config.listen_host(name)
        self._backend = backend
        self._device = device
        self._life = Lifecycle(f"{backend} {side} {name}", self._release)
        self._store = GroupStore(self._host)
        self._ranks: dict[str, int] = {}
        self._senders = 0
        self._group: DeviceGroup | None = None
        self._held_back: list[Operation] = []
        """Posted, and not started yet."""
        self._under_way: deque[tuple[DeviceTransfer | None, list[Operation]]] = deque()
        """What was started, in order; None for what has no bytes, or goes to nobody."""

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Form the group of all senders and receivers, in which they have ranks in that order."""
        with self._life.call():
            names = [*topology.senders, *topology.receivers]
            require_member(self._name, names, self._life.part)
            self._ranks = {name: rank for rank, name in enumerate(names)}
            self._senders = len(topology.senders)
            if not topology.receivers:
                return
            leader = names[0]
            store: dist.Store
            if leader == self._name:
                store = self._store.served()
            else:
                store = found_store(topology.senders[leader], self._life, leader, deadline)
            self._group = open_device_group(
                self._backend,
                self._device,
                dist.PrefixStore("everyone", store),
                rank=self._ranks[self._name],
                names=names,
                host=self._host,
                deadline=deadline,
                life=self._life,
                nccl=self._config.communicator_settings(),
            )

    def _rank(self, name: str) -> int:
        rank = self._ranks.get(name)
        if rank is None:
            raise ProtocolError(f"not connected to {name}.", part=self._life.part)
        return rank

    def _start(self) -> None:
        """Start what was held back, side by side."""
        operations, self._held_back = self._held_back, []
        if not operations:
            return
        moving = [operation for operation in operations if operation.bucket.nbytes]
        assert self._group is not None, "connected"
        self._under_way.append((self._group.start(moving) if moving else None, operations))

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait for the operations of all buckets but the last `pending`."""
        with self._life.call():
            self._start()
            while sum(len(operations) for _, operations in self._under_way) > pending:
                transfer, operations = self._under_way[0]
                if transfer is not None:
                    self._wait_for(transfer, operations[0].bucket, deadline)
                self._under_way.popleft()

    def _wait_for(self, transfer: DeviceTransfer, bucket: Bucket, deadline: Deadline) -> None:
        what = f"bucket {bucket.index} of version {bucket.version}"
        peers = ", ".join(name for name in self._ranks if name != self._name)
        poll_until(transfer.done, self._life, deadline, what, peer=peers)

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _release(self) -> None:
        if self._group is not None:
            self._group.close()
        self._under_way.clear()
        self._held_back.clear()
        self._store.close()


class CollectiveSender(_Half, WeightSender):
    """A rank that sends. The first one serves the store in which all meet."""

    def __init__(self, name: str, config: TorchDistributedConfig, backend: BackendName, device: torch.device) -> None:
        super().__init__("sender", name, config, backend, device)

    def address(self) -> Address:
        """Where the store is."""
        with self._life.call():
            return self._store.address()

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Start to send it: by a broadcast if everybody gets it and nobody else sends."""
        with self._life.call():
            ranks = tuple(self._rank(name) for name in receivers)
            everybody = bucket.to_all and self._senders == 1
            operation = Operation(bucket, self._rank(self._name), None if everybody else ranks)
            if not ranks:  # it moves nothing, and counts among those that are posted
                self._under_way.append((None, [operation]))
                return
            self._held_back.append(operation)
            self._start()


class CollectiveReceiver(_Half, WeightReceiver):
    """A rank that receives."""

    def __init__(self, name: str, config: TorchDistributedConfig, backend: BackendName, device: torch.device) -> None:
        super().__init__("receiver", name, config, backend, device)

    def address(self) -> Address:
        """Empty: the first sender says where all meet."""
        return {}

    def post(self, bucket: Bucket, sender: str) -> None:
        """Take part when it is this bucket's turn: beside those of other senders that come in the same turn."""
        with self._life.call():
            source = self._rank(sender)
            if bucket.to_all and self._senders == 1:
                self._start()
                self._held_back.append(Operation(bucket, source, None))
                self._start()
                return
            if any(operation.source >= source for operation in self._held_back):  # the next turn has begun
                self._start()
            self._held_back.append(Operation(bucket, source, (self._rank(self._name),)))


class CollectiveEngine(GroupEngine):
    """Base of ``nccl`` and ``hccl``."""

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return CollectiveSender(name, self.options, self.backend, device)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return CollectiveReceiver(name, self.options, self.backend, device)
