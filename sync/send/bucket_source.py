"""Bucket sources give a sending rank the bytes of its buckets: `SnapshotBuckets` from its own, `GatheredBuckets` from all ranks.

`ShardGather` brings the other ranks' bytes to rank 0, over a process group that training never uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    ManifestError,
    ProtocolError,
    TransportError,
)
from weightlane.ckpt_engines.engines.torch_distributed.process_group import (
    BackendName,
    Group,
    abandon_gloo,
    abort_accelerator_group,
    open_process_group,
    translated,
)
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.ckpt_engines.runtime.threads import start_call, start_thread
from weightlane.ckpt_engines.waits import result_of

from ..control.rendezvous import Rendezvous
from ..version.manifest import Manifest
from ..version.packing import CopyTable, copy_runs, gather_runs, scatter_runs
from .snapshot.send_memory import PACKING_BUFFERS, PackingBuffers
from .snapshot.snapshot import SourceBytes


class SnapshotBuckets:
    """Buckets that this rank has all bytes of: a view of its memory if the bytes lie there as in the stream, else packed.

    Args:
        source: The rank's bytes.
        table: Copies from these bytes to the stream.
        manifest: The version, with the windows of its buckets.
        buffers: Memory to pack into; allocated when a bucket is packed.
    """

    def __init__(self, source: SourceBytes, table: CopyTable, manifest: Manifest, buffers: PackingBuffers) -> None:
        self._source = source
        self._table = table
        self._manifest = manifest
        self._buffers = buffers
        self._packed = 0
        self.packing_buffers: int | None = None
        """Number of buffers that buckets are packed into in turn: the bytes of older buckets are overwritten. None until a bucket
        has to be packed."""

    def bucket(self, index: int) -> torch.Tensor:
        """Wait for the bytes of bucket `index` and return them (1-D uint8); the device may still be writing them."""
        start, stop = self._manifest.window(index)
        memory = self._source.memory
        if start == stop:
            return memory[:0]
        window = self._table.window(start, stop)
        self._source.wait(window.snapshot_end)
        if window.shift is not None and start + window.shift >= 0 and stop + window.shift <= memory.numel():
            return memory[start + window.shift : stop + window.shift]
        if self._manifest.lasting:
            raise ProtocolError(
                f"receivers shall read bucket {index} in place, and it does not lie in the snapshot.", part="send"
            )
        self.packing_buffers = PACKING_BUFFERS
        buffers = self._buffers.of(self._manifest.largest_bucket_bytes)
        data = buffers[self._packed % len(buffers)][: stop - start]
        self._packed += 1
        copy_runs(memory, self._table, start, stop, data)
        return data


_PART = "shard gather"
_MESSAGE_BYTES = 1 << 20
"""Bytes of a bucket that one message covers, a multiple of any alignment. It limits the memory needed besides snapshots and
buckets."""

_HINT = "Check that every trainer rank and the coordinator are alive and can reach each other."

_BACKENDS: dict[str, BackendName] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""torch.distributed backend for each device type."""


class ShardGather:
    """Sends the bytes of all other trainer ranks to rank 0, bucket by bucket in lockstep."""

    def __init__(self, group: Group | None, names: Sequence[str], rank: int, device: torch.device) -> None:
        self._group = group
        self._names = list(names)
        self._rank = rank
        self._packed = torch.empty(0, dtype=torch.uint8, device=device)
        self._moving = False
        """Whether a thread is in a call that waits for another rank."""

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous,
        session: str,
        names: Sequence[str],
        rank: int,
        layout: Manifest,
        device: torch.device,
        deadline: Deadline,
    ) -> ShardGather:
        """Open the process group with the other ranks. Raises `ManifestError` if one of them has another layout."""
        group = None
        if len(names) > 1:
            mailbox = rendezvous.mailbox(f"gather/{session}")
            mailbox.put(names[rank], layout.layout_digest)
            for name in names:
                if mailbox.get(name, deadline) != layout.layout_digest:
                    raise ManifestError(
                        f"{name} publishes other tensors than {names[rank]}.",
                        part=_PART,
                        peer=name,
                        hint="Every trainer rank must be given the same placements.",
                    )
            store = rendezvous.store(f"gather-group/{session}", leads=rank == 0, deadline=deadline)
            backend = _BACKENDS.get(device.type)
            if backend is None:
                raise ConfigError(
                    f"trainer ranks cannot hand each other {device.type} memory.",
                    part=_PART,
                    hint=f"Choose a checkpoint engine for one of: {', '.join(_BACKENDS)}.",
                )
            host = rendezvous.local_host

            def open_group() -> Group:
                with runtime_of(device).current():
                    return open_process_group(
                        backend, store, rank, len(names), deadline, host=host, device=device, names=names
                    )

            # Requests to the store have no timeout, so this rank would wait forever for a frozen rank 0.
            group = result_of(start_call(open_group), deadline, "the group of all trainer ranks", _PART, _HINT)
        return cls(group, names, rank, device)

    def receive(self, rank: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        """[rank 0] Receive the next `nbytes` of another rank; they stay valid until the next call."""
        packed = self._room(nbytes)
        self._run("recv", packed, rank, deadline)
        return packed

    def give(self, manifest: Manifest, table: CopyTable, source: SourceBytes) -> int:
        """[other ranks] Send this rank's bytes to rank 0; `table` has their places in the stream. Returns their number."""
        total = 0
        for index in range(manifest.bucket_count):
            for low, high in _messages(*manifest.window(index)):
                if nbytes := table.bytes_within(low, high):
                    source.wait(table.snapshot_end(low, high))
                    packed = gather_runs(source.memory, table, low, high, self._room(nbytes))
                    self._run("send", packed, 0, source.deadline)
                    total += nbytes
        return total

    def close(self) -> None:
        """Leave the group; a thread that waits in `receive` or `give` raises `ClosedError`. Idempotent."""
        group, self._group = self._group, None
        if group is None or not self._moving:
            return
        if self._packed.is_cpu:
            abandon_gloo(group)
        else:
            # From Python 3.12 on, an exiting program cannot start threads; its groups end with it.
            with suppress(RuntimeError):
                start_thread("weightlane-abort", abort_accelerator_group, group)

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._packed.numel() < nbytes:
            self._packed = torch.empty(nbytes, dtype=torch.uint8, device=self._packed.device)
        return self._packed[:nbytes]

    def _run(self, kind: str, data: torch.Tensor, rank: int, deadline: Deadline) -> None:
        peer = self._names[rank]
        self._moving = True  # set before `_group` is read: `close` clears `_group` first, and then checks `_moving`
        try:
            group = self._group
            if group is None:
                raise ClosedError("the gather was closed.", part=_PART)
            with translated(_PART, deadline, f"{peer}'s bytes of a bucket", peer):
                operation = group.send if kind == "send" else group.recv
                work = operation([data], rank, 0)
                work.wait(deadline.timedelta())
        except (TransportError, DeadlineExceededError) as error:
            if self._group is None:
                raise ClosedError(f"the gather was closed while it waited for {peer}.", part=_PART) from error
            raise
        finally:
            self._moving = False


class GatheredBuckets:
    """[rank 0] Buckets filled from the bytes of all ranks, in two buffers in turn.

    Args:
        gather: Receives the other ranks' bytes.
        source: This rank's bytes.
        tables: By rank, the copies from its bytes to the stream.
        manifest: The version, with the windows of its buckets.
        buffers: Memory to fill.
    """

    def __init__(
        self,
        gather: ShardGather,
        source: SourceBytes,
        tables: Sequence[CopyTable],
        manifest: Manifest,
        buffers: PackingBuffers,
    ) -> None:
        self._gather, self._source, self._tables, self._manifest = gather, source, tables, manifest
        self._buffers = buffers.of(manifest.largest_bucket_bytes)
        self.packing_buffers = PACKING_BUFFERS

    def bucket(self, index: int) -> torch.Tensor:
        """Wait for the bytes of bucket `index` of all ranks and return them; see `SnapshotBuckets.bucket`."""
        start, stop = self._manifest.window(index)
        data = self._buffers[index % len(self._buffers)][: stop - start]
        source, (own, *others) = self._source, self._tables
        source.wait(own.snapshot_end(start, stop))
        copy_runs(source.memory, own, start, stop, data)
        for rank, table in enumerate(others, 1):
            for low, high in _messages(start, stop):
                if nbytes := table.bytes_within(low, high):
                    packed = self._gather.receive(rank, nbytes, source.deadline)
                    scatter_runs(packed, table, low, high, data[low - start : high - start])
        return data


def _messages(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Divide the window from `start` to `stop` into one window for each message."""
    for low in range(start, stop, _MESSAGE_BYTES):
        yield low, min(low + _MESSAGE_BYTES, stop)


BucketSource = SnapshotBuckets | GatheredBuckets
"""The buckets of one version, taken in order."""
