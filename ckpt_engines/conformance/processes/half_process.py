"""One half of a checkpoint engine in a process of its own: the operations that checks ask of it.

A request is ``{"op": name, ...arguments}``, its answer ``{"ok": result, "s": seconds}`` or ``{"error": ..., "s": seconds}``.
Buckets are named by `Parcel`; both sides make the same bytes from its seed. Processes come from the `nursery`; run as a
program, this module serves on its standard input, which must be a socket.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...contract.engine import Bucket, CheckpointEngine, Delivery, Topology
from ...contract.storing import VersionFiles
from ...deadline import Deadline
from ...links.link import ReceiverLink, SenderLink, receiver_link, sender_link
from ...runtime.devices import runtime_of
from . import leftovers
from .json_line import Line
from .payload import OVERWRITTEN, UNTOUCHED, Parcel, complaint, payload
from .resolve import create_engine
from .wire import error_to_line

_COMMIT_DOCUMENT = "checksums.json"


class HalfProcess:
    """The operations. At most one half lives at a time."""

    def __init__(self) -> None:
        self._engines: dict[str, CheckpointEngine] = {}
        self._engine: CheckpointEngine | None = None
        self._link: SenderLink | ReceiverLink | None = None
        self._persistent = False
        self._meets = True
        """Whether senders and receivers of the engine are connected, so that a checksum comes ahead of each bucket."""
        self._opened: set[int] = set()
        self._buffers: dict[tuple[bool, int], torch.Tensor] = {}
        """Memory to send from, by whether the engine allocated it and its number."""
        self._shown: dict[int, torch.Tensor] = {}
        """Memory of the engine's that receivers may look at, by a number that the check gives it."""
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """What this half looks at, by version and index."""
        self._device = torch.device("cpu")
        self._unpickled = 0
        _watch_pickle(self._count_unpickled)

    def _count_unpickled(self) -> None:
        self._unpickled += 1

    @property
    def engine(self) -> CheckpointEngine:
        """The engine of the half that was made last; it stays when its halves close."""
        assert self._engine is not None, "no engine"
        return self._engine

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
        self, side: str, engine: str, options: dict[str, Any], name: str, device: str = "cpu", place: int = 0
    ) -> None:
        """A new half; `place` chooses among the devices of this machine, none of which is made the current one."""
        key = json.dumps([engine, options])
        if key not in self._engines:
            self._engines[key] = create_engine(engine, options)
        self._free_buffers()
        made = self._engine = self._engines[key]
        self._device = torch.device(device)
        if device != "cpu":
            self._device = torch.device(device, place % torch.get_device_module(device).device_count())
        self._persistent = made.capabilities.persistent
        self._meets = Delivery.STORE not in made.capabilities.delivery
        self._opened.clear()
        self._link = (sender_link if side == "sender" else receiver_link)(made, name, self._device)

    def address(self) -> dict[str, Any]:
        """The half's address, which must survive JSON unchanged."""
        assert self._link is not None
        address = dict(self._link.address())
        try:
            unchanged = json.loads(json.dumps(address, allow_nan=False)) == address
        except (TypeError, ValueError):
            unchanged = False
        assert unchanged, f"expected an address of plain JSON data, it is {address!r}"
        return address

    def connect(self, topology: dict[str, Any], deadline_s: float) -> None:
        """Connect; `topology` has its key in hexadecimal."""
        assert self._link is not None
        plain = Topology(
            topology["session"], topology["senders"], topology["receivers"], key=bytes.fromhex(topology["key"])
        )
        self._link.connect(plain, Deadline.after(deadline_s))

    def allocate(self, sizes: list[int]) -> list[dict[str, Any]]:
        """What buffers of these sizes look like, and whether they are memory of their own."""
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
        parcels: list[list[int]],
        receivers: list[str],
        deadline_s: float,
        allocated: bool = True,
        plan: list[list[int]] | None = None,
        commit: bool = True,
        at_once: int = 1,
    ) -> None:
        """Send `parcels`, at most so many of them `at_once`, overwriting the memory of each as soon as it is done.

        An engine that is persistent is told of each version before, with `plan` as what the version consists of, and
        after. The deadline, which is that of all, has its time start when the first payload is made, so that all of it is the
        engine's.
        """
        everything = [Parcel(*parcel) for parcel in plan or parcels]
        mine = [Parcel(*parcel) for parcel in parcels]
        largest = max(parcel.nbytes for parcel in mine)
        buffers = [self._buffer(number, largest, allocated=allocated) for number in range(at_once)]
        buffers[0][: mine[0].nbytes].copy_(payload(mine[0].nbytes, mine[0].seed))
        deadline = Deadline.after(deadline_s)
        under_way: deque[torch.Tensor] = deque()

        def leave(pending: int) -> None:
            self.sender.flush(deadline, pending)
            while len(under_way) > pending:
                under_way.popleft().fill_(OVERWRITTEN)

        for place, parcel in enumerate(mine):
            self._open(parcel.version, everything, deadline)
            leave(at_once - 1)
            data = buffers[place % at_once][: parcel.nbytes]
            if place:
                data.copy_(payload(parcel.nbytes, parcel.seed))
            self.sender.post(self._bucket(parcel, data), receivers, deadline, str(parcel.seed))
            under_way.append(data)
            last = place + 1 == len(mine) or mine[place + 1].version != parcel.version
            if last or at_once == 1:
                leave(0)
            if self._persistent and last and commit:
                self.sender.commit_version(parcel.version, {_COMMIT_DOCUMENT: str(parcel.version)}, deadline)

    def _bucket(self, parcel: Parcel, data: torch.Tensor, *, lasting: bool = False) -> Bucket:
        """`parcel` in `data`, whose memory was used last by what this thread has started."""
        after = runtime_of(self._device).recorded()
        return Bucket(parcel.version, parcel.number, data, after, lasting=lasting, part=parcel.part)

    def _open(self, version: int, plan: Sequence[Parcel], deadline: Deadline) -> None:
        if self._persistent and version not in self._opened:
            self._opened.add(version)
            self.sender.open_version(_files(version, plan), deadline)

    def show(
        self,
        parcels: list[list[int]],
        receivers: list[str],
        deadline_s: float,
        slot: int = 0,
        fill: bool = True,
        own: bool = False,
    ) -> None:
        """Send `parcels` as lasting buckets that lie side by side in the engine's memory, and leave them there.

        Another `slot` is other memory. Without `fill` the memory is sent as it is; with `own` every bucket lies in memory of the
        caller's own.
        """
        deadline = Deadline.after(deadline_s)
        plan = [Parcel(*parcel) for parcel in parcels]
        total = sum(parcel.nbytes for parcel in plan)
        if slot not in self._shown or self._shown[slot].numel() < total:
            self.free_shown(slot)
            self._shown[slot] = self.engine.allocate(total, self._device)
        place = 0
        for parcel in plan:
            data = self._shown[slot][place : place + parcel.nbytes]
            place += parcel.nbytes
            if own:
                data = payload(parcel.nbytes, parcel.seed, self._device)
            elif fill:
                data.copy_(payload(parcel.nbytes, parcel.seed))
            self._open(parcel.version, plan, deadline)
            bucket = self._bucket(parcel._replace(file=-1), data, lasting=True)
            self.sender.post(bucket, receivers, deadline, str(parcel.seed))
            self.sender.flush(deadline)

    def reclaim(self, version: int, deadline_s: float) -> None:
        """Wait until nobody looks at `version` any more."""
        self.sender.reclaim(version, Deadline.after(deadline_s))

    def free_shown(self, slot: int = 0) -> None:
        """Give memory that `show` took back to the engine."""
        if slot in self._shown:
            self.engine.free(self._shown.pop(slot))

    def send_while_overwriting(
        self, parcel: list[int], receivers: list[str], deadline_s: float, after_s: float, seed: int, done: str
    ) -> str:
        """Send from an allocated buffer and write other bytes into it `after_s` seconds later, under the send's hands.

        Makes the file `done` then. Returns ``"blocked"`` when the send was still going on then, else ``"over"``.
        """
        what = Parcel(*parcel)
        data = self._buffer(0, what.nbytes, allocated=True)[: what.nbytes]
        data.copy_(payload(what.nbytes, what.seed))
        other = payload(what.nbytes, seed).to(data.device)
        over = threading.Event()
        seen: list[str] = []

        def overwrite() -> None:
            seen.append("over" if over.wait(after_s) else "blocked")
            data.copy_(other)
            Path(done).touch()

        thread = threading.Thread(target=overwrite)
        thread.start()
        deadline = Deadline.after(deadline_s)
        try:
            self.sender.post(self._bucket(what, data), receivers, deadline, str(what.seed))
            self.sender.flush(deadline)
        finally:
            over.set()
            thread.join()
        return seen[0]

    def receive(
        self,
        parcels: list[list[int]],
        sender: str,
        deadline_s: float,
        pause_s: float = 0.0,
        seeds: Sequence[int] = (),
        at_once: int = 1,
    ) -> list[str]:
        """Receive `parcels`, at most so many `at_once`, by one deadline; for each a `complaint`, empty when it is right.

        Pauses for `pause_s` seconds ahead of each. With `seeds`, the answer is instead which of these seeds the last byte
        comes from.
        """
        deadline = Deadline.after(deadline_s)
        plan = [Parcel(*parcel) for parcel in parcels]
        answers: list[str] = []
        under_way: deque[tuple[Parcel, torch.Tensor]] = deque()

        def leave(pending: int) -> None:
            self.receiver.flush(deadline, pending)
            while len(under_way) > pending:
                parcel, data = under_way.popleft()
                if seeds:
                    last = int(data[-1])
                    right = [str(seed) for seed in seeds if int(payload(parcel.nbytes, seed)[-1]) == last]
                    answers.append(",".join(right))
                else:
                    answers.append(complaint(data, parcel, plan))

        for parcel in plan:
            time.sleep(pause_s)
            leave(at_once - 1)
            data = torch.full((parcel.nbytes,), UNTOUCHED, dtype=torch.uint8, device=self._device)
            said = self.receiver.post(self._bucket(parcel, data), sender, deadline)
            wanted = str(parcel.seed) if self._meets else ""
            assert said == wanted, f"expected the checksum {wanted!r} with bucket {parcel.number}, it was {said!r}"
            under_way.append((parcel, data))
            if at_once == 1:
                leave(0)
        leave(0)
        return answers

    def view(self, parcels: list[list[int]], sender: str, deadline_s: float) -> list[str]:
        """View `parcels` one after the other by one deadline; for each a `complaint`, empty when it is right."""
        deadline = Deadline.after(deadline_s)
        for parcel in (Parcel(*parcel) for parcel in parcels):
            view, _ = self.receiver.view(parcel.version, parcel.number, parcel.nbytes, sender, deadline)
            self._views[parcel.version, parcel.number] = view
        return self.look(parcels)

    def look(self, parcels: list[list[int]]) -> list[str]:
        """What is wrong now with what was viewed, for each of `parcels`."""
        plan = [Parcel(*parcel) for parcel in parcels]
        return [complaint(self._views[parcel.version, parcel.number], parcel, plan) for parcel in plan]

    def join(self, parcels: list[list[int]]) -> str:
        """What is wrong with the views of `parcels`, which adjoin, as one tensor; empty when it is right."""
        plan = [Parcel(*parcel) for parcel in parcels]
        views = [self._views[parcel.version, parcel.number] for parcel in plan]
        storage, start = views[0].untyped_storage(), views[0].storage_offset()
        place = start
        for view in views:
            if view.untyped_storage().data_ptr() != storage.data_ptr() or view.storage_offset() != place:
                return "two views of buckets that adjoin do not adjoin in one storage"
            place += view.numel()
        joined = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, start, (place - start,), (1,))
        expected = torch.cat([payload(parcel.nbytes, parcel.seed, self._device) for parcel in plan])
        return "" if torch.equal(joined, expected) else "what the joined views show is wrong"

    def release(self, version: int, deadline_s: float) -> None:
        """Look at no bucket of `version` any more, and say so."""
        for key in [key for key in self._views if key[0] == version]:
            del self._views[key]
        self.receiver.release(version, Deadline.after(deadline_s))

    def close_after(self, seconds: float) -> None:
        """Close from another thread, some time later."""
        assert self._link is not None
        threading.Timer(seconds, self._link.close).start()

    def close(self, keep: bool = False) -> None:
        """Close twice: the second time must not matter. Memory goes back to the engine, which stays.

        With `keep`, what was shown and what is viewed is left.
        """
        self._free_buffers()
        for slot in [] if keep else list(self._shown):
            self.free_shown(slot)
        if not keep:
            self._views.clear()
        if self._link is not None:
            self._link.close()
            self._link.close()

    def resources(self) -> dict[str, int]:
        """What could leak from this process."""
        return leftovers.of_this_process()

    def links(self) -> int:
        """How many open descriptors could reach another host."""
        return leftovers.network_descriptors()

    def unpickled(self) -> int:
        """How often anything was unpickled in this process."""
        return self._unpickled

    def make_and_close(self, engine: str, options: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Resources before making an engine and two halves, while they are there, and after they were closed."""
        create_engine(engine, options)  # whatever the first one loads
        before = leftovers.of_this_process()
        made = create_engine(engine, options)
        links = sender_link(made, "trainer/0", self._device), receiver_link(made, "rollout/0", self._device)
        during = leftovers.of_this_process()
        for link in links:
            link.close()
        return {"before": before, "during": during, "after": leftovers.of_this_process()}

    def _buffer(self, number: int, nbytes: int, *, allocated: bool) -> torch.Tensor:
        have = self._buffers.get((allocated, number))
        if have is None or have.numel() < nbytes:
            if have is not None and allocated:
                self.engine.free(have)
            own = torch.empty(0 if allocated else nbytes, dtype=torch.uint8, device=self._device)
            have = self.engine.allocate(nbytes, self._device) if allocated else own
            self._buffers[allocated, number] = have
        return have

    def _free_buffers(self) -> None:
        for (allocated, _), buffer in self._buffers.items():
            if allocated:
                self.engine.free(buffer)
        self._buffers.clear()


def _files(version: int, plan: Iterable[Parcel]) -> VersionFiles:
    """A version whose every file is a safetensors file of one tensor."""
    parcels = [parcel for parcel in plan if parcel.version == version]
    sizes = {parcel.number: parcel.total if parcel.part else parcel.nbytes for parcel in parcels}
    continuing = {parcel.number for parcel in parcels if parcel.offset}
    prefixes: list[bytes] = []
    for index in range(max(sizes) + 1):
        if index in continuing:
            prefixes.append(b"")
            continue
        nbytes = sizes.get(index, 0)
        entry = {f"bytes.{index}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
        header = json.dumps(entry).encode()
        header += b" " * (-len(header) % 8)
        prefixes.append(struct.pack("<Q", len(header)) + header)
    return VersionFiles(version, prefixes, {"manifest.json": json.dumps({"version": version})})


def _watch_pickle(seen: Callable[[], None]) -> None:
    """Call `seen` whenever Python code of this process unpickles something."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            seen()
            return function(*arguments, **options)

        return wrapper

    pickle.load, pickle.loads = watched(pickle.load), watched(pickle.loads)

    class Watched(pickle.Unpickler):
        def load(self) -> Any:
            seen()
            return super().load()

    pickle.Unpickler = Watched  # type: ignore[misc]


def serve(sock: socket.socket) -> None:
    """Answer requests until the other end closes, then end the process."""
    line = Line(sock)
    half = HalfProcess()
    while (request := line.receive()) is not None:
        started = time.monotonic()
        answer: dict[str, Any]
        try:
            answer = {"ok": getattr(half, request.pop("op"))(**request)}
        except Exception as error:  # noqa: BLE001 - crosses to the check
            answer = {"error": error_to_line(error)}
        line.send({**answer, "s": time.monotonic() - started})
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=sys.stdin.fileno()))
