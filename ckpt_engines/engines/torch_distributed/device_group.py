"""A process group on an accelerator, and its transfers as something that can be asked whether it is done."""

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
from ...deadline import Deadline
from ...errors import TransportError
from ...runtime.devices import DeviceRuntime, runtime_of
from ...runtime.lifecycle import Lifecycle
from .process_group import (
    BackendName,
    Group,
    abort_accelerator_group,
    open_process_group,
    start_broadcast,
    start_pairs,
)

_PART = "device group"
_WARM_UP_POLL_S = 0.002
_ABORT_WAIT_S = 1.0
_BEHIND_S = 1.0
"""How long after its work is completed a transfer's event may pass: the device only has to go from one stream to the other."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Operation:
    """What one rank has to do for one bucket.

    Attributes:
        bucket: The bucket.
        source: Rank of its sender.
        targets: Ranks of its receivers; None for everybody, by one broadcast.
    """

    bucket: Bucket
    source: int
    targets: tuple[int, ...] | None


class DeviceTransfer:
    """Operations on a device's stream. Nothing tells when they are done, so it is asked.

    ``Work.wait`` of these backends only orders streams, and blocks on no failure of a peer; the event behind it on the group's
    own stream is what tells that the memory is free. The work is completed when it failed, too, and then the event never comes.
    Whether it failed cannot be asked: ``Work.is_success`` of NCCL raises, because it was given up.
    """

    def __init__(self, work: dist.Work, event: Any, part: str = _PART, peers: str = "") -> None:
        self._work = work
        self._event = event
        self._part = part
        self._peers = peers
        self._completed: float | None = None
        """When the work was first seen to be completed."""

    def done(self) -> bool:
        """Whether the operations are over. Raises `TransportError` if they failed."""
        if self._event.query():
            return True
        if self._completed is None:
            self._completed = time.monotonic() if self._work.is_completed() else None
        elif time.monotonic() - self._completed > _BEHIND_S and not self._event.query():
            raise TransportError(
                "the transfer failed on the device.",
                part=self._part,
                peer=self._peers,
                hint="The backend's own log has the reason.",
            )
        return False


class DeviceGroup:
    """An open group on one device. Its operations run one behind the other on a stream of its own.

    They wait for what each bucket says it has to wait for, and for no other work: neither for the training that goes on in the
    same process, nor the training for them. All members start what they take part in in one order, so no two wait for each other.

    Args:
        backend: The group itself.
        runtime: Of the device on which buckets live.
        part: Name of the half for error messages.
        peers: Names of the other members for error messages.
    """

    def __init__(self, backend: Group, runtime: DeviceRuntime, part: str = _PART, peers: str = "") -> None:
        self._backend = backend
        self._runtime = runtime
        self._part = part
        self._peers = peers
        self._aborter: threading.Thread | None = None
        self._stream = runtime.new_stream()

    def start(self, operations: Sequence[Operation]) -> DeviceTransfer:
        """Start operations side by side, of which none is a broadcast unless it is alone. Waits for nobody."""
        device = self._runtime.device
        for operation in operations:
            if operation.bucket.data.device != device:
                message = f"a bucket is on {operation.bucket.data.device}, the engine works on {device}."
                raise TransportError(message, part=self._part)
        with self._runtime.on(self._stream):
            for operation in operations:
                self._runtime.wait_for(self._stream, operation.bucket.after)
            work = self._issue(operations)
            work.wait()  # which has the stream wait for the backend's own
            event = self._runtime.recorded(self._stream)
        for operation in operations:
            self._runtime.keep_until_done(operation.bucket.data, self._stream)
        return DeviceTransfer(work, event, self._part, self._peers)

    def _issue(self, operations: Sequence[Operation]) -> dist.Work:
        if operations[0].targets is None:
            (alone,) = operations
            return start_broadcast(self._backend, alone.bucket.data, alone.source, None)
        rank = self._backend.rank()
        pairs = []
        for operation in operations:
            for target in operation.targets or ():
                if operation.source == rank:
                    pairs.append(("isend", operation.bucket.data, target))
                elif target == rank:
                    pairs.append(("irecv", operation.bucket.data, operation.source))
        return start_pairs(self._backend, pairs)

    def warm_up(self, deadline: Deadline) -> None:
        """Broadcast one byte: NCCL and HCCL finish connecting with their first collective."""
        try:
            with self._runtime.on(self._stream):
                data = torch.zeros(1, dtype=torch.uint8, device=self._runtime.device)
            transfer = self.start([Operation(Bucket(0, 0, data, self._runtime.recorded(self._stream)), 0, None)])
            while not transfer.done():
                deadline.check("the first collective of the group", part=self._part, peer=self._peers)
                time.sleep(_WARM_UP_POLL_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what is under way and leave the group, within a second.

        The kernels of a transfer whose peer is gone would keep their part of the device busy for ever. An abort that takes longer
        goes on in its thread, which keeps the communicator alive until it is over.
        """
        if self._aborter is None:
            aborter = threading.Thread(target=self._abort, name="weightlane-group-abort", daemon=True)
            # From Python 3.12 on, a program that ends starts no threads, and its groups end with it.
            with suppress(RuntimeError):
                aborter.start()
                self._aborter = aborter
        if self._aborter is None:
            return
        self._aborter.join(_ABORT_WAIT_S)
        if self._aborter.is_alive():
            _log.warning("the abort of a communicator on %s goes on in the background", self._runtime.device)

    def _abort(self) -> None:
        try:
            with self._runtime.current():
                abort_accelerator_group(self._backend)
        except RuntimeError as error:
            _log.warning("a communicator could not be aborted: %s", error)


def open_device_group(
    backend: BackendName,
    device: torch.device,
    store: dist.Store,
    *,
    rank: int,
    names: Sequence[str],
    host: str,
    deadline: Deadline,
    life: Lifecycle,
    nccl: Mapping[str, int | str] | None = None,
) -> DeviceGroup:
    """`open_process_group` of the members `names` on `device`, bounded by `deadline` and interruptible through `life`.

    The C++ code that connects a group can be neither interrupted nor, for NCCL, bounded: it looks for an end every 2 ms,
    for up to ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` (half an hour), and holds the lock that an abort would need. It runs on a
    thread of its own, which is left behind if it does not return in time and then throws away what it made. All members
    have shown up before this is called, so that only a host that vanishes while NCCL connects, without a word, costs one.
    """
    world, peers = len(names), ", ".join(name for other, name in enumerate(names) if other != rank)
    opened: list[DeviceGroup | BaseException] = []
    left_behind = threading.Event()
    handover = threading.Lock()

    def open_group() -> None:
        result: DeviceGroup | BaseException
        try:
            runtime = runtime_of(device)
            with runtime.current():  # of this thread, where it is number 0 otherwise
                group = open_process_group(
                    backend, store, rank, world, deadline, host=host, device=device, names=names, nccl=nccl
                )
                result = DeviceGroup(group, runtime, life.part, peers)
                result.warm_up(deadline)
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            result = error
        with handover:
            opened.append(result)
            if left_behind.is_set() and isinstance(result, DeviceGroup):
                result.close()
        life.ring()

    threading.Thread(target=open_group, name=f"weightlane-{backend}-open", daemon=True).start()
    try:
        while not opened:
            life.wait({}, deadline.remaining_s)
            if not opened:
                deadline.check(f"all {world} members of the group", part=life.part, peer=peers)
    except BaseException:
        with handover:
            left_behind.set()
            abandoned = opened[0] if opened else None
        if isinstance(abandoned, DeviceGroup):  # it was opened after all, and nobody will use it
            abandoned.close()
        raise
    (result,) = opened
    if isinstance(result, BaseException):
        raise result
    return result
