"""A process group on an accelerator, whose transfers are polled for completion."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...contract.bucket import Bucket
from ...errors import TransportError
from ...runtime.devices import DeviceRuntime, runtime_of
from ...waits import Deadline, Lifecycle, run_bounded
from .process_group import (
    BackendName,
    Group,
    abort_accelerator_group,
    open_process_group,
    start_broadcast,
    start_pairs,
    translated,
)

_WARM_UP_POLL_S = 0.002
_ABORT_WAIT_S = 1.0
"""How long `close` waits for an abort: closing a half must not take long."""
_BEHIND_S = 1.0
"""Longest time, in seconds, from the completion of a transfer's work until its event passes: only a switch of streams is left."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Operation:
    """The share of one rank in the transfer of one bucket."""

    bucket: Bucket
    source: int
    targets: tuple[int, ...] | None

    @property
    def moves(self) -> bool:
        """Whether the rank sends or receives a byte."""
        return self.bucket.nbytes > 0 and self.targets != ()


class DeviceTransfer:
    """Operations on a device's stream, which must be polled for completion.

    ``Work.wait`` of these backends only orders streams, and does not block when a peer fails. The event recorded after it on the
    group's own stream shows that the memory is free. Failed work is also reported as completed, but then the event never passes.
    ``Work.is_success``, which would report a failure, is deprecated and raises in NCCL.
    """

    def __init__(self, work: dist.Work, event: Any, part: str, peers: str) -> None:
        self._work = work
        self._event = event
        self._part = part
        self.peers = peers
        """Names of the other members of the group, for errors."""
        self._completed: float | None = None
        """When the work was first seen to be completed."""

    def done(self) -> bool:
        """Whether the operations are over. Raises `TransportError` if they failed."""
        if self._event.query():
            return True
        if self._completed is None:
            self._completed = time.monotonic() if self._work.is_completed() else None
        elif time.monotonic() - self._completed > _BEHIND_S and not self._event.query():
            hint = "The backend's own log has the reason."
            raise TransportError("the transfer failed on the device.", part=self._part, peer=self.peers, hint=hint)
        return False


class DeviceGroup:
    """An open group on one device. Its operations run one after the other on a stream of its own.

    Operations wait for the event of each bucket and for no other work. They do not wait for the training in the same process, and
    the training does not wait for them. All members start their operations in one order, so no two members wait for each other.
    With `beside`, another group of the same half and device, both use one stream, so the operations of both run one after the
    other.
    """

    def __init__(
        self, backend: Group, runtime: DeviceRuntime, part: str, peers: str, *, beside: DeviceGroup | None = None
    ) -> None:
        self._backend = backend
        self._runtime = runtime
        self._part = part
        self._peers = peers
        self._aborter: threading.Thread | None = None
        self._beside = beside
        self._stream: Any = runtime.stream_for(self) if beside is None else beside._stream

    def start(self, operations: Sequence[Operation]) -> DeviceTransfer:
        """Start operations together. A broadcast must be the only one. Waits for no peer."""
        device = self._runtime.device
        for operation in operations:
            if operation.bucket.data.device != device:
                message = f"a bucket is on {operation.bucket.data.device}, the engine works on {device}."
                raise TransportError(message, part=self._part)
        with self._runtime.on(self._stream):
            for operation in operations:
                self._runtime.wait_for(self._stream, operation.bucket.after)
            work = self._issue(operations)
            work.wait()  # has this stream wait for the backend's own
            event = self._runtime.record_event(self._stream)
        for operation in operations:
            self._runtime.record_stream(operation.bucket.data, self._stream)
        return DeviceTransfer(work, event, self._part, self._peers)

    def _issue(self, operations: Sequence[Operation]) -> dist.Work:
        if operations[0].targets is None:
            (alone,) = operations
            return start_broadcast(self._backend, alone.bucket.data, alone.source, None)
        rank = self._backend.rank()
        pairs = [
            ("isend", operation.bucket.data, target)
            if operation.source == rank
            else ("irecv", operation.bucket.data, operation.source)
            for operation in operations
            for target in operation.targets or ()
            if rank in (operation.source, target)
        ]
        return start_pairs(self._backend, pairs)

    def warm_up(self, senders: int, deadline: Deadline) -> None:
        """Broadcast one byte, and send one from each of the first `senders` ranks to each of the other ranks.

        NCCL and HCCL connect two ranks in the call that starts their first transfer. That call blocks the host thread until the
        other rank makes the same call, without a limit. An abort from another thread does not end it: torch then polls a
        communicator that is gone, for half an hour. Seen with NCCL 2.28 and torch 2.11 on an H200. So all pairs connect here,
        where such a wait is bounded, and no later call of a half waits for a peer. One byte is enough for later broadcasts: NCCL
        has one algorithm for them, the ring (``ncclTopoTuneModel``). All-gathers would connect anew at another size.
        """
        try:
            self._finish([self._byte(0, None)], "the first collective of the group", deadline)
            if senders == 0:
                return
            rank, receivers = self._backend.rank(), tuple(range(senders, self._backend.size()))
            if rank < senders:
                pairs = [self._byte(rank, receivers)]
            else:
                pairs = [self._byte(sender, (rank,)) for sender in range(senders)]
            self._finish(pairs, "the connections of all senders and receivers", deadline)
        except BaseException:
            self.close()
            raise

    def _byte(self, source: int, targets: tuple[int, ...] | None) -> Operation:
        with self._runtime.on(self._stream):
            data = torch.zeros(1, dtype=torch.uint8, device=self._runtime.device)
        return Operation(Bucket(0, 0, data, self._runtime.record_event(self._stream)), source, targets)

    def _finish(self, operations: Sequence[Operation], waiting_for: str, deadline: Deadline) -> None:
        transfer = self.start(operations)
        while not transfer.done():
            deadline.check(waiting_for, part=self._part, peer=self._peers)
            time.sleep(_WARM_UP_POLL_S)

    def close(self) -> None:
        """Abort the running operations and leave the group, within a second. See `close_groups`."""
        close_groups([self])

    def start_abort(self) -> threading.Thread | None:
        """Begin to abort the running operations, and return the thread that does; None if the program ends."""
        if self._aborter is None:
            aborter = threading.Thread(target=self._abort, name="weightlane-group-abort", daemon=True)
            # From Python 3.12 on, a program that ends starts no threads, and its groups end with it.
            with suppress(RuntimeError):
                aborter.start()
                self._aborter = aborter
        return self._aborter

    def _abort(self) -> None:
        try:
            with self._runtime.current():
                abort_accelerator_group(self._backend)
        except RuntimeError as error:
            _log.warning("a communicator on %s could not be aborted: %s", self._runtime.device, error)


def close_groups(groups: Sequence[DeviceGroup]) -> None:
    """Abort the running operations of `groups` side by side and leave them, within a second for all of them.

    Without the abort, the kernels of a transfer whose peer is gone would occupy a part of the device for ever. An abort that
    takes longer continues in its thread, which keeps the communicator alive until the abort is over.
    """
    aborters = [aborter for group in groups if (aborter := group.start_abort()) is not None]
    deadline = Deadline.after(_ABORT_WAIT_S)
    for aborter in aborters:
        aborter.join(deadline.remaining_s)
    if late := sum(aborter.is_alive() for aborter in aborters):
        _log.warning("the aborts of %d communicators continue in the background", late)


def open_device_group(
    backend: BackendName,
    device: torch.device,
    store: dist.Store,
    *,
    rank: int,
    names: Sequence[str],
    senders: int,
    host: str,
    deadline: Deadline,
    life: Lifecycle,
    nccl: Mapping[str, int | str] | None = None,
    beside: DeviceGroup | None = None,
) -> DeviceGroup:
    """Open a process group of the members `names` on `device`, within `deadline` and interruptible through `life`.

    The first `senders` of the members send to single others; with 0, members only broadcast. See `DeviceGroup` for `beside`.

    The C++ code that connects a group can be neither interrupted nor, for NCCL, bounded: it polls for completion every 2 ms, for
    up to ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` (half an hour), and holds the lock that an abort would need. It runs on a thread of
    its own. A thread that does not return in time is abandoned, and closes the group if it opens one later. All members have met
    in the store before, so only a host that vanishes silently while NCCL connects costs such a thread.
    """
    peers = ", ".join(name for other, name in enumerate(names) if other != rank)
    opened: list[DeviceGroup] = []
    abandoned = False
    lock = threading.Lock()

    def open_group() -> DeviceGroup:
        runtime = runtime_of(device)
        with runtime.current():  # a new thread's current device is number 0
            backend_group = open_process_group(
                backend, store, rank, len(names), deadline, host=host, device=device, names=names, nccl=nccl
            )
            group = DeviceGroup(backend_group, runtime, life.part, peers, beside=beside)
            with translated(life.part, deadline, f"all {len(names)} members of the group", peers):
                group.warm_up(senders, deadline)
        with lock:
            opened.append(group)
            if abandoned:
                group.close()
        return group

    try:
        return run_bounded(open_group, life, deadline, f"all {len(names)} members of the group", peer=peers)
    except BaseException:
        with lock:
            abandoned = True
            for group in opened:
                group.close()
        raise
