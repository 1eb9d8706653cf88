"""One half of a checkpoint engine in a process of its own, and the operations that checks request from it.

A request is ``{"op": name, ...arguments}``. Its answer is ``{"ok": result, "s": seconds}`` or ``{"error": ..., "s": seconds}``.
A `Parcel` describes a bucket: both sides generate the same bytes from its seed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ...contract.bucket import Bucket
from ...contract.capabilities import Delivery
from ...contract.engine import CheckpointEngine, Topology
from ...links import ReceiverLink, SenderLink
from ...runtime.devices import device_count, numbered_device, runtime_of
from ...runtime.json_socket import JsonSocket
from ...waits import Deadline
from . import leftovers
from .errors_as_json import error_to_json
from .leftovers import UnpicklingCounter
from .payload import OVERWRITTEN, UNTOUCHED, Parcel, complaint, payload, version_files
from .resolve import create_engine

_COMMIT_DOCUMENT = "checksums.json"


class HalfProcess:
    """The operations of the process. At most one half is open at a time."""

    def __init__(self) -> None:
        self._engines: dict[str, CheckpointEngine] = {}
        self._engine: CheckpointEngine | None = None
        """The engine of the half that was made last. It stays when the half closes."""
        self._link: SenderLink | ReceiverLink | None = None
        self._opened: set[int] = set()
        """Versions that were opened in a persistent engine."""
        self._buffers: dict[tuple[bool, int], torch.Tensor] = {}
        """Memory that the half sends from, by whether the engine allocated it, and number."""
        self._lasting: dict[int, torch.Tensor] = {}
        """Engine memory whose buckets receivers may view, by the slot number that the check chose."""
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """Buckets that this half views, by version and index."""
        self._device = torch.device("cpu")
        self._unpickling = UnpicklingCounter()

    @property
    def engine(self) -> CheckpointEngine:
        """The engine of the half that was made last."""
        assert self._engine is not None, "no engine"
        return self._engine

    @property
    def link(self) -> SenderLink | ReceiverLink:
        """The half's link."""
        assert self._link is not None, "no half"
        return self._link

    @property
    def sender(self) -> SenderLink:
        """The half's link, which must be a sender's."""
        assert isinstance(self._link, SenderLink), "no sender"
        return self._link

    @property
    def receiver(self) -> ReceiverLink:
        """The half's link, which must be a receiver's."""
        assert isinstance(self._link, ReceiverLink), "no receiver"
        return self._link

    def make(
        self, side: str, engine: str, options: dict[str, Any], name: str, device: str = "cpu", index: int = 0
    ) -> None:
        """Make a new half. `index` chooses among this machine's devices, none of which becomes the current one."""
        key = json.dumps([engine, options])
        if key not in self._engines:
            self._engines[key] = create_engine(engine, options)
        self._free_buffers()
        self._engine = self._engines[key]
        self._device = numbered_device(device, index % device_count(device))
        self._opened.clear()
        self._link = (SenderLink if side == "sender" else ReceiverLink).of(self._engine, name, self._device)

    def address(self) -> dict[str, Any]:
        """Return the half's address, which must survive JSON unchanged."""
        address = dict(self.link.address())
        try:
            unchanged = json.loads(json.dumps(address, allow_nan=False)) == address
        except (TypeError, ValueError):
            unchanged = False
        assert unchanged, f"expected an address of plain JSON data, it is {address!r}"
        return address

    def connect(self, topology: dict[str, Any], deadline_s: float) -> None:
        """Connect the half, on another thread than the one that moves its data. `topology` has its key in hexadecimal.

        All receivers of a collective engine are one set of receivers.
        """
        facts = self.engine.capabilities
        key = bytes.fromhex(topology["key"])
        receivers = {} if Delivery.STORE in facts.delivery else topology["receivers"]
        sets = (tuple(receivers),) if facts.collective and len(receivers) > 1 else ()
        given = Topology(topology["session"], topology["senders"], receivers, key, sets)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self.link.connect, given, Deadline.after(deadline_s)).result()

    def allocate(self, sizes: list[int]) -> list[dict[str, Any]]:
        """Allocate buffers of these sizes, all at once, and describe them. ``intact``: no other buffer overwrote this one."""
        buffers = [self.engine.allocate(nbytes, self._device) for nbytes in sizes]
        for number, buffer in enumerate(buffers):
            buffer.fill_(number + 1)
        seen = [
            {
                "dtype": str(buffer.dtype),
                "shape": list(buffer.shape),
                "contiguous": buffer.is_contiguous(),
                "device": buffer.device.type,
                "intact": bool((buffer == number + 1).all()),
            }
            for number, buffer in enumerate(buffers)
        ]
        for buffer in buffers:
            self.engine.free(buffer)
        return seen

    def send(
        self,
        parcels: list[Parcel],
        receivers: list[str],
        deadline_s: float,
        allocated: bool = True,
        plan: list[Parcel] | None = None,
        commit: bool = True,
        at_once: int = 1,
    ) -> None:
        """Send `parcels`, at most `at_once` at a time, and overwrite the memory of each as soon as it is sent.

        A persistent engine opens each version first, with `plan` as the version's buckets, and commits it afterwards if `commit`
        is true. One deadline holds for everything. Its time starts when the first payload is ready, so that the engine can use
        all of it.
        """
        largest = max(parcel.nbytes for parcel in parcels)
        buffers = [self._buffer(number, largest, allocated=allocated) for number in range(at_once)]
        buffers[0][: parcels[0].nbytes].copy_(payload(parcels[0].nbytes, parcels[0].seed))
        deadline = Deadline.after(deadline_s)
        posted: deque[torch.Tensor] = deque()

        def flush(pending: int) -> None:
            self.sender.flush(deadline, pending)
            while len(posted) > pending:
                posted.popleft().fill_(OVERWRITTEN)

        for number, parcel in enumerate(parcels):
            self._open(parcel.version, plan or parcels, deadline)
            flush(at_once - 1)
            data = buffers[number % at_once][: parcel.nbytes]
            if number:
                data.copy_(payload(parcel.nbytes, parcel.seed))
            self.sender.post(self._bucket(parcel, data), receivers, deadline, str(parcel.seed))
            posted.append(data)
            last = number + 1 == len(parcels) or parcels[number + 1].version != parcel.version
            if last or at_once == 1:
                flush(0)
            if self.engine.capabilities.persistent and last and commit:
                self.sender.commit_version(parcel.version, {_COMMIT_DOCUMENT: str(parcel.version)}, deadline)

    def _buffer(self, number: int, nbytes: int, *, allocated: bool) -> torch.Tensor:
        """Return buffer `number`, uint8 of at least `nbytes` elements, `allocated` by the engine or not; it grows if it must."""
        buffer = self._buffers.get((allocated, number))
        if buffer is None or buffer.numel() < nbytes:
            if buffer is not None and allocated:
                self.engine.free(buffer)
            if allocated:
                buffer = self.engine.allocate(nbytes, self._device)
            else:
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._buffers[allocated, number] = buffer
        return buffer

    def _free_buffers(self) -> None:
        for (allocated, _), buffer in self._buffers.items():
            if allocated:
                self.engine.free(buffer)
        self._buffers.clear()

    def _bucket(self, parcel: Parcel, data: torch.Tensor, *, lasting: bool = False) -> Bucket:
        """Return `parcel` in `data`. Work on the memory that this thread has started precedes the bucket."""
        after = runtime_of(self._device).record_event()
        return Bucket(parcel.version, parcel.number, data, after, lasting=lasting, part=parcel.part)

    def _open(self, version: int, plan: Sequence[Parcel], deadline: Deadline) -> None:
        if self.engine.capabilities.persistent and version not in self._opened:
            self._opened.add(version)
            self.sender.open_version(version_files(version, plan), deadline)

    def show(
        self,
        parcels: list[Parcel],
        receivers: list[str],
        deadline_s: float,
        slot: int = 0,
        fill: bool = True,
        own: bool = False,
    ) -> None:
        """Send `parcels` as lasting buckets that adjoin in the engine's memory, and leave them there.

        Each `slot` is separate memory. Without `fill` the memory is sent unchanged. With `own` every bucket lies in memory that
        the engine did not allocate.
        """
        deadline = Deadline.after(deadline_s)
        total = sum(parcel.nbytes for parcel in parcels)
        if slot not in self._lasting or self._lasting[slot].numel() < total:
            self.free_shown(slot)
            self._lasting[slot] = self.engine.allocate(total, self._device)
        offset = 0
        for parcel in parcels:
            data = self._lasting[slot][offset : offset + parcel.nbytes]
            offset += parcel.nbytes
            if own:
                data = payload(parcel.nbytes, parcel.seed, self._device)
            elif fill:
                data.copy_(payload(parcel.nbytes, parcel.seed))
            self._open(parcel.version, parcels, deadline)
            bucket = self._bucket(parcel._replace(file=-1), data, lasting=True)
            self.sender.post(bucket, receivers, deadline, str(parcel.seed))
            self.sender.flush(deadline)

    def reclaim(self, version: int, deadline_s: float) -> None:
        """Wait until every receiver has released `version`."""
        self.sender.reclaim(version, Deadline.after(deadline_s))

    def free_shown(self, slot: int = 0) -> None:
        """Return the memory that `show` took to the engine."""
        if slot in self._lasting:
            self.engine.free(self._lasting.pop(slot))

    def receive(
        self, parcels: list[Parcel], sender: str, deadline_s: float, pause_s: float = 0.0, at_once: int = 1
    ) -> list[str]:
        """Receive `parcels`, at most `at_once` at a time, by one deadline, and return a `complaint` for each; empty if right.

        Pauses for `pause_s` seconds before each.
        """
        deadline = Deadline.after(deadline_s)
        # A store has no connection on which a checksum could precede the bucket.
        checksummed = Delivery.STORE not in self.engine.capabilities.delivery
        answers: list[str] = []
        posted: deque[tuple[Parcel, torch.Tensor]] = deque()

        def flush(pending: int) -> None:
            self.receiver.flush(deadline, pending)
            while len(posted) > pending:
                parcel, data = posted.popleft()
                answers.append(complaint(data, parcel, parcels))

        for parcel in parcels:
            time.sleep(pause_s)
            flush(at_once - 1)
            data = torch.full((parcel.nbytes,), UNTOUCHED, dtype=torch.uint8, device=self._device)
            checksum = self.receiver.post(self._bucket(parcel, data), sender, deadline)
            wanted = str(parcel.seed) if checksummed else ""
            assert checksum == wanted, (
                f"expected the checksum {wanted!r} with bucket {parcel.number}, it was {checksum!r}"
            )
            posted.append((parcel, data))
            if at_once == 1:
                flush(0)
        flush(0)
        return answers

    def view(self, parcels: list[Parcel], sender: str, deadline_s: float) -> list[str]:
        """View `parcels` one after the other, within one deadline, and return a `complaint` for each; empty if right."""
        deadline = Deadline.after(deadline_s)
        for parcel in parcels:
            view, _ = self.receiver.view(parcel.version, parcel.number, parcel.nbytes, sender, deadline)
            self._views[parcel.version, parcel.number] = view
        return self.look(parcels)

    def look(self, parcels: list[Parcel]) -> list[str]:
        """Compare the present views of `parcels` with their payloads, and return a `complaint` for each; empty if right."""
        return [complaint(self._views[parcel.version, parcel.number], parcel, parcels) for parcel in parcels]

    def join(self, parcels: list[Parcel]) -> str:
        """Compare the adjoining views of `parcels`, as one tensor, with the payloads. Returns the problem; empty if right."""
        views = [self._views[parcel.version, parcel.number] for parcel in parcels]
        storage, start = views[0].untyped_storage(), views[0].storage_offset()
        end = start
        for view in views:
            if view.untyped_storage().data_ptr() != storage.data_ptr() or view.storage_offset() != end:
                return "two views of buckets that adjoin do not adjoin in one storage"
            end += view.numel()
        joined = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, start, (end - start,), (1,))
        expected = torch.cat([payload(parcel.nbytes, parcel.seed, self._device) for parcel in parcels])
        return "" if torch.equal(joined, expected) else "the joined views hold wrong bytes"

    def release(self, version: int, deadline_s: float) -> None:
        """Drop the views of `version` and release it."""
        for key in [key for key in self._views if key[0] == version]:
            del self._views[key]
        self.receiver.release(version, Deadline.after(deadline_s))

    def close_after(self, seconds: float) -> None:
        """Close the link from another thread after `seconds`."""
        threading.Timer(seconds, self.link.close).start()

    def close(self, keep: bool = False) -> None:
        """Close the link twice, since the second close must change nothing, and return its memory to the engine.

        With `keep`, lasting buckets and views stay.
        """
        self._free_buffers()
        if not keep:
            for slot in list(self._lasting):
                self.free_shown(slot)
            self._views.clear()
        if self._link is not None:
            self._link.close()
            self._link.close()

    def resources(self) -> dict[str, int]:
        """Return counts of everything that could leak from this process."""
        return leftovers.of_this_process()

    def links(self) -> int:
        """Return how many open descriptors could reach another host."""
        return leftovers.network_descriptors()

    def unpickled(self) -> int:
        """Return how often anything was unpickled in this process."""
        return self._unpickling.count

    def make_and_close(self, engine: str, options: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Return `resources` before an engine and two halves are made, while they exist, and after the halves are closed."""
        create_engine(engine, options)  # the first one loads libraries
        before = leftovers.of_this_process()
        made = create_engine(engine, options)
        links = SenderLink.of(made, "trainer/0", self._device), ReceiverLink.of(made, "rollout/0", self._device)
        during = leftovers.of_this_process()
        for link in links:
            link.close()
        return {"before": before, "during": during, "after": leftovers.of_this_process()}


def serve(requests: JsonSocket) -> None:
    """Answer requests until the other end of the socket closes."""
    half = HalfProcess()
    while (request := requests.receive()) is not None:
        started = time.monotonic()
        answer: dict[str, Any]
        try:
            for key in ("parcels", "plan"):
                if request.get(key) is not None:
                    request[key] = [Parcel(*parcel) for parcel in request[key]]
            answer = {"ok": getattr(half, request.pop("op"))(**request)}
        except Exception as error:  # noqa: BLE001 - the check raises it
            answer = {"error": error_to_json(error)}
        requests.send({**answer, "s": time.monotonic() - started})


if __name__ == "__main__":
    serve(JsonSocket(socket.socket(fileno=sys.stdin.fileno())))
    os._exit(0)  # threads that an engine left behind must not keep the process
