"""A process group bound to a device, and its transfers as something that can be polled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ._lifecycle import Lifecycle
from .deadline import Deadline
from .errors import TransportError
from .process_group import (
    BackendName,
    Group,
    abandon_gloo,
    abort_accelerator_group,
    open_process_group,
    start_broadcast,
)

_FAST_POLL_S = 0.0002
_FAST_POLLS_FOR_S = 0.02
_SLOW_POLL_S = 0.002
_EVENT_LAG_S = 1.0
_ABORT_WAIT_S = 1.0
_log = logging.getLogger(__name__)


class Transfer(Protocol):
    """One broadcast under way."""

    def done(self) -> bool:
        """Whether it succeeded or failed."""

    def result(self) -> None:
        """Raise the RuntimeError it failed with, if any. Only after `done`."""

    def pause_s(self, elapsed_s: float) -> float:
        """How long to wait before asking `done` again, `elapsed_s` seconds after the start."""


class HostTransfer:
    """A gloo broadcast; rings when it is done."""

    def __init__(self, work: dist.Work, ring: Callable[[], None]) -> None:
        self._work: dist.Work | None = work
        self._ring = ring
        self._done = False
        work.get_future().add_done_callback(self._finished)

    def _finished(self, _: object) -> None:
        self._done = True  # the work itself says so only a moment after its future
        self._ring()

    def done(self) -> bool:
        """See `Transfer.done`."""
        return self._done

    def result(self) -> None:
        """See `Transfer.result`."""
        work, self._work = self._work, None  # it keeps the bucket's memory alive
        if work is not None:
            work.wait()

    def pause_s(self, elapsed_s: float) -> float:  # noqa: ARG002 - of the protocol
        """Until it rings."""
        return float("inf")


class StreamTransfer:
    """A broadcast on an accelerator's stream. Nothing tells when it is done, so it is polled, closely at first.

    ``Work.wait`` of these backends only orders streams, and blocks on no failure of a peer; the event behind it on the
    side stream is what tells that the memory is free.
    """

    def __init__(self, work: dist.Work, event: Any) -> None:
        self._work = work
        self._event = event
        self._without_event_since: float | None = None
        self._failed = False

    def done(self) -> bool:
        """See `Transfer.done`."""
        if self._event.query():
            return True
        # The work is also completed when it failed, and then the event never comes.
        if self._work.is_completed():
            self._without_event_since = self._without_event_since or time.monotonic()
            self._failed = time.monotonic() - self._without_event_since > _EVENT_LAG_S
        return self._failed

    def result(self) -> None:
        """See `Transfer.result`."""
        if self._failed:
            raise RuntimeError("the collective failed on the device; the backend's own log has the reason")

    def pause_s(self, elapsed_s: float) -> float:
        """See `Transfer.pause_s`."""
        return _FAST_POLL_S if elapsed_s < _FAST_POLLS_FOR_S else _SLOW_POLL_S


class DeviceGroup:
    """An open group; on an accelerator with a side stream, so that training streams never wait for a peer.

    Args:
        backend: The group itself.
        device: Where buckets live.
        ring: Called from any thread when a transfer on the host is done.
        streams: Whether transfers are ordered by streams and events of `device`; by default on everything but a CPU.
    """

    def __init__(
        self, backend: Group, device: torch.device, ring: Callable[[], None], *, streams: bool | None = None
    ) -> None:
        self._backend = backend
        self._device = device
        self._ring = ring
        self._unfinished: Transfer | None = None
        self._aborter: threading.Thread | None = None
        by_streams = device.type != "cpu" if streams is None else streams
        self._accelerator = torch.get_device_module(device) if by_streams else None
        self._stream = self._accelerator.Stream(device) if self._accelerator else None

    def start(self, data: torch.Tensor, deadline: Deadline) -> Transfer:
        """Start to broadcast `data` from rank 0."""
        if data.device != self._device:
            raise TransportError(
                f"a bucket is on {data.device}, the engine works on {self._device}.", part="device group"
            )
        self._unfinished = self._start(data, deadline)
        return self._unfinished

    def _start(self, data: torch.Tensor, deadline: Deadline) -> Transfer:
        if self._accelerator is None:
            return HostTransfer(start_broadcast(self._backend, data, 0, deadline), self._ring)
        assert self._stream is not None
        self._stream.wait_stream(self._accelerator.current_stream(self._device))  # whatever wrote the bucket
        with self._accelerator.stream(self._stream):
            work = start_broadcast(self._backend, data, 0, deadline)
            work.wait()
            event = self._accelerator.Event()
            event.record(self._stream)
        if data.is_cuda or data.device.type == "npu":
            data.record_stream(self._stream)  # the caller may drop the bucket after an error
        return StreamTransfer(work, event)

    def warm_up(self, deadline: Deadline, part: str) -> None:
        """Broadcast one byte: NCCL and HCCL finish connecting with their first collective."""
        assert self._accelerator is not None
        try:
            with self._accelerator.device(self._device):
                transfer = self.start(torch.zeros(1, dtype=torch.uint8, device=self._device), deadline)
                while not transfer.done():
                    deadline.check("the first collective of the group", part=part)
                    time.sleep(_SLOW_POLL_S)
                transfer.result()
        except BaseException:
            self.close()
            raise

    def break_off(self) -> None:
        """Abort what is under way on an accelerator, without waiting for it. The group cannot be used any more.

        The kernels of a transfer whose peer is gone would keep their part of the device busy for ever. On a CPU nothing
        runs on, and `close` does what there is to do.
        """
        if self._accelerator is not None and self._aborter is None:
            aborter = threading.Thread(target=self._abort, name="weightlane-group-abort", daemon=True)
            # From Python 3.12 on, a program that ends starts no threads, and its groups end with it.
            with suppress(RuntimeError):
                aborter.start()
                self._aborter = aborter

    def _abort(self) -> None:
        try:
            abort_accelerator_group(self._backend)
        except RuntimeError as error:
            _log.warning("a communicator could not be aborted: %s", error)

    def close(self) -> None:
        """Break off what is under way and leave the group, within a second.

        An abort that takes longer goes on in its thread, which keeps the communicator alive until it is over.
        """
        if self._accelerator is not None:
            self.break_off()
            if self._aborter is None:
                return
            self._aborter.join(_ABORT_WAIT_S)
            if self._aborter.is_alive():
                _log.warning("the abort of a communicator on %s takes long and goes on in the background", self._device)
        elif self._unfinished is not None and not self._unfinished.done():
            abandon_gloo(self._backend)


def open_device_group(
    backend: BackendName,
    device_type: str,
    store: dist.Store,
    *,
    rank: int,
    world: int,
    host: str,
    deadline: Deadline,
    life: Lifecycle,
    nccl: Mapping[str, int | str] | None = None,
) -> DeviceGroup:
    """`open_process_group` on the current device, bounded by `deadline` and interruptible through `life`.

    The C++ code that connects a group can be neither interrupted nor, for NCCL, bounded: it looks for an end every 2 ms,
    for up to ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` (half an hour), and holds the lock that an abort would need. It runs on a
    thread of its own, which is left behind if it does not return in time and then throws away what it made. All members
    have shown up before this is called, so that only a host that vanishes while NCCL connects, without a word, costs one.
    """
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, torch.get_device_module(device).current_device())
    opened: list[DeviceGroup | BaseException] = []
    left_behind = threading.Event()
    handover = threading.Lock()

    def open_group() -> None:
        result: DeviceGroup | BaseException
        try:
            group = open_process_group(backend, store, rank, world, deadline, host=host, device=device, nccl=nccl)
            result = DeviceGroup(group, device, life.ring)
            if device_type != "cpu":
                result.warm_up(deadline, life.part)
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            result = error
        with handover:
            opened.append(result)
            if left_behind.is_set() and isinstance(result, DeviceGroup):
                result.close()
        life.ring()

    threading.Thread(target=open_group, name=f"weightlane-{backend}-open", daemon=True).start()
    what = f"all {world} members of the group"
    try:
        while not opened:
            life.wait({}, deadline.remaining_s + 0.05)  # gloo's own error at the deadline says more
            if not opened:
                deadline.check(what, part=life.part)
    finally:
        with handover:
            left_behind.set()
            abandoned = opened[0] if opened else None
        # An interrupted wait may find the group opened after all: nobody will use it.
        if life.closed and isinstance(abandoned, DeviceGroup):
            abandoned.close()
    (result,) = opened
    if isinstance(result, BaseException):
        raise result
    return result
