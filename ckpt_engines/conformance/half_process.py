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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..contract import Bucket, CheckpointEngine, Topology, VersionFiles, WeightReceiver, WeightSender
from ..deadline import Deadline
from ..json_line import Line
from . import leftovers
from .payload import OVERWRITTEN, UNTOUCHED, Parcel, complaint, payload
from .resolve import create_engine
from .wire import error_to_line

_FILE_WAIT_S = 0.003
_COMMIT_DOCUMENT = "checksums.json"


class DirectoryMailbox:
    """A `Mailbox` of JSON files in a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def put(self, key: str, value: Any) -> None:
        """See `Mailbox.put`."""
        unfinished = self._path(key).with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(value))
        unfinished.rename(self._path(key))

    def get(self, key: str, deadline: Deadline) -> Any:
        """See `Mailbox.get`."""
        while not self._path(key).exists():
            deadline.check(f"{key!r}, which the other side has to put there", part="mailbox")
            time.sleep(_FILE_WAIT_S)
        return json.loads(self._path(key).read_text())

    def _path(self, key: str) -> Path:
        return self._directory / f"{key.encode().hex()}.json"


class HalfProcess:
    """The operations. At most one half lives at a time."""

    def __init__(self) -> None:
        self._engines: dict[str, CheckpointEngine] = {}
        self._engine: CheckpointEngine | None = None
        self._half: WeightSender | WeightReceiver | None = None
        self._persistent = False
        self._opened: set[int] = set()
        self._buffers: dict[bool, torch.Tensor] = {}
        self._shown: dict[int, torch.Tensor] = {}
        """Memory of the engine's that receivers may look at, by a number that the check gives it."""
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """What this half looks at, by version and index."""
        self._device = "cpu"
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
    def sender(self) -> WeightSender:
        """The half, which must be a sender."""
        assert isinstance(self._half, WeightSender), "no WeightSender"
        return self._half

    @property
    def receiver(self) -> WeightReceiver:
        """The half, which must be a receiver."""
        assert isinstance(self._half, WeightReceiver), "no WeightReceiver"
        return self._half

    def make(
        self, side: str, engine: str, options: dict[str, Any], name: str, device: str = "cpu", place: int = 0
    ) -> None:
        """A new half; `place` chooses among the devices of this machine."""
        key = json.dumps([engine, options])
        if key not in self._engines:
            self._engines[key] = create_engine(engine, options)
        self._free_buffers()
        made = self._engine = self._engines[key]
        self._device = device
        if device != "cpu":
            module = torch.get_device_module(device)
            module.set_device(place % module.device_count())
        self._persistent = made.capabilities.persistent
        self._opened.clear()
        self._half = made.make_sender(name) if side == "sender" else made.make_receiver(name)

    def address(self) -> dict[str, Any]:
        """The half's address, which must survive JSON unchanged."""
        assert self._half is not None
        address = dict(self._half.address())
        try:
            unchanged = json.loads(json.dumps(address, allow_nan=False)) == address
        except (TypeError, ValueError):
            unchanged = False
        assert unchanged, f"expected an address of plain JSON data, it is {address!r}"
        return address

    def connect(self, topology: dict[str, Any], mailbox: str, deadline_s: float) -> None:
        """Connect; `topology` has its key in hexadecimal."""
        assert self._half is not None
        plain = Topology(
            topology["session"], topology["senders"], topology["receivers"], key=bytes.fromhex(topology["key"])
        )
        self._half.connect(plain, DirectoryMailbox(mailbox), Deadline.after(deadline_s))

    def allocate(self, sizes: list[int]) -> list[dict[str, Any]]:
        """What buffers of these sizes look like, and whether they are memory of their own."""
        buffers = [self.engine.allocate(nbytes, torch.device(self._device)) for nbytes in sizes]
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
    ) -> None:
        """Send `parcels` one after the other, overwriting the memory after each, all by one deadline.

        An engine that is persistent is told of each version before, with `plan` as what the version consists of, and
        after. The deadline's time starts when the first payload is made, so that all of it is the engine's.
        """
        everything = [Parcel(*parcel) for parcel in plan or parcels]
        mine = [Parcel(*parcel) for parcel in parcels]
        buffer = self._buffer(max(parcel.nbytes for parcel in mine), allocated=allocated)
        buffer[: mine[0].nbytes].copy_(payload(mine[0].nbytes, mine[0].seed))
        deadline = Deadline.after(deadline_s)
        for place, parcel in enumerate(mine):
            self._open(parcel.version, everything, deadline)
            data = buffer[: parcel.nbytes]
            if place:
                data.copy_(payload(parcel.nbytes, parcel.seed))
            self.sender.send(_bucket(parcel, data), receivers, deadline)
            data.fill_(OVERWRITTEN)
            last = place + 1 == len(mine) or mine[place + 1].version != parcel.version
            if self._persistent and last and commit:
                self.sender.commit_version(parcel.version, {_COMMIT_DOCUMENT: str(parcel.version)}, deadline)

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
            self._shown[slot] = self.engine.allocate(total, torch.device(self._device))
        place = 0
        for parcel in plan:
            data = self._shown[slot][place : place + parcel.nbytes]
            place += parcel.nbytes
            if own:
                data = payload(parcel.nbytes, parcel.seed, self._device)
            elif fill:
                data.copy_(payload(parcel.nbytes, parcel.seed))
            self._open(parcel.version, plan, deadline)
            self.sender.send(Bucket(parcel.version, parcel.number, data, lasting=True), receivers, deadline)

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
        data = self._buffer(what.nbytes, allocated=True)[: what.nbytes]
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
        try:
            self.sender.send(_bucket(what, data), receivers, Deadline.after(deadline_s))
        finally:
            over.set()
            thread.join()
        return seen[0]

    def receive(
        self, parcels: list[list[int]], sender: str, deadline_s: float, pause_s: float = 0.0, seeds: Sequence[int] = ()
    ) -> list[str]:
        """Receive `parcels` one after the other by one deadline; for each a `complaint`, empty when it is right.

        Pauses for `pause_s` seconds ahead of each. With `seeds`, the answer is instead which of these seeds the last byte
        comes from.
        """
        deadline = Deadline.after(deadline_s)
        plan = [Parcel(*parcel) for parcel in parcels]
        answers = []
        for parcel in plan:
            time.sleep(pause_s)
            data = torch.full((parcel.nbytes,), UNTOUCHED, dtype=torch.uint8, device=self._device)
            self.receiver.receive(_bucket(parcel, data), sender, deadline)
            if seeds:
                last = int(data[-1])
                answers.append(",".join(str(seed) for seed in seeds if int(payload(parcel.nbytes, seed)[-1]) == last))
            else:
                answers.append(complaint(data, parcel, plan))
        return answers

    def view(self, parcels: list[list[int]], sender: str, deadline_s: float) -> list[str]:
        """View `parcels` one after the other by one deadline; for each a `complaint`, empty when it is right."""
        deadline = Deadline.after(deadline_s)
        for parcel in (Parcel(*parcel) for parcel in parcels):
            view = self.receiver.view(parcel.version, parcel.number, parcel.nbytes, sender, deadline)
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
        assert self._half is not None
        threading.Timer(seconds, self._half.close).start()

    def close(self, keep: bool = False) -> None:
        """Close twice: the second time must not matter. Memory goes back to the engine, which stays.

        With `keep`, what was shown and what is viewed is left.
        """
        self._free_buffers()
        for slot in [] if keep else list(self._shown):
            self.free_shown(slot)
        if not keep:
            self._views.clear()
        if self._half is not None:
            self._half.close()
            self._half.close()

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
        halves = made.make_sender("trainer/0"), made.make_receiver("rollout/0")
        during = leftovers.of_this_process()
        for half in halves:
            half.close()
        return {"before": before, "during": during, "after": leftovers.of_this_process()}

    def _buffer(self, nbytes: int, *, allocated: bool) -> torch.Tensor:
        have = self._buffers.get(allocated)
        if have is None or have.numel() < nbytes:
            device = torch.device(self._device)
            if have is not None and allocated:
                self.engine.free(have)
            own = torch.empty(0 if allocated else nbytes, dtype=torch.uint8, device=device)
            have = self.engine.allocate(nbytes, device) if allocated else own
            self._buffers[allocated] = have
        return have

    def _free_buffers(self) -> None:
        if (buffer := self._buffers.get(True)) is not None:
            self.engine.free(buffer)
        self._buffers.clear()


def _bucket(parcel: Parcel, data: torch.Tensor) -> Bucket:
    return Bucket(parcel.version, parcel.number, data, part=parcel.part)


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
