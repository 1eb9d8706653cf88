"""Bringing every rank's pieces of a bucket to the sending rank, over a process group that the training never uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from weightlane.ckpt_engines import ClosedError, ConfigError, Deadline, ManifestError
from weightlane.ckpt_engines.process_group import BackendName, Group, open_process_group, translated

from .manifest import Manifest
from .packing import RunTable, check_complete, copy_runs, gather_runs, scatter_runs
from .rendezvous import Rendezvous

_PART = "shard gather"

GROUP_BACKENDS: dict[str, BackendName] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""torch.distributed backend that moves bytes between the memories of a device type."""


class ShardGather:
    """Rank 0 fills buckets (`fill`), the other ranks give their pieces (`give`), bucket by bucket in lockstep.

    A rank sends only the bytes it holds, and only one bucket's worth of them is in memory beside its snapshot.
    """

    def __init__(
        self,
        group: Group | None,
        names: Sequence[str],
        rank: int,
        tables: Mapping[str, RunTable],
        layout: Manifest,
        device: torch.device,
    ) -> None:
        self._group = group
        self._names = list(names)
        self._rank = rank
        self._tables = tables
        self._layout = layout
        self._packed = torch.empty(0, dtype=torch.uint8, device=device)

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous,
        session: str,
        names: Sequence[str],
        rank: int,
        table: RunTable,
        layout: Manifest,
        device: torch.device,
        deadline: Deadline,
    ) -> ShardGather:
        """Join the other ranks, learn what they hold, and prove that together they hold everything once.

        Raises `ManifestError` (on rank 0) when they do not.
        """
        mailbox = rendezvous.mailbox(f"gather/{session}")
        mailbox.put(names[rank], [layout.layout_digest, table.to_plain()])
        tables = {names[rank]: table}
        if rank == 0:
            tables = {name: cls._table_of(mailbox.get(name, deadline), name, layout) for name in names}
            check_complete(layout, tables)
        group = None
        if len(names) > 1:
            store = rendezvous.store(f"gather-group/{session}")
            backend = GROUP_BACKENDS.get(device.type)
            if backend is None:
                raise ConfigError(
                    f"trainer ranks cannot hand each other {device.type} memory.",
                    part=_PART,
                    hint=f"Choose a checkpoint engine for one of: {', '.join(GROUP_BACKENDS)}.",
                )
            group = open_process_group(
                backend, store, rank, len(names), deadline, host=rendezvous.local_host, device=device
            )
        return cls(group, names, rank, tables, layout, device)

    @staticmethod
    def _table_of(plain: object, name: str, layout: Manifest) -> RunTable:
        if not isinstance(plain, list) or len(plain) != 2 or plain[0] != layout.layout_digest:  # noqa: PLR2004
            raise ManifestError(
                f"{name} publishes other tensors than rank 0.",
                part=_PART,
                peer=name,
                hint="Every trainer rank must be given the same list of tensor specs.",
            )
        return RunTable.from_plain(plain[1])

    def fill(
        self,
        snapshot: torch.Tensor,
        index: int,
        payload: torch.Tensor,
        ready: Callable[[int], None],
        deadline: Deadline,
    ) -> None:
        """Fill bucket `index` from this rank's snapshot and the other ranks' pieces (rank 0).

        ``ready(n)`` returns once the snapshot's first `n` bytes are there.
        """
        start, stop = self._layout.window(index)
        ready(self._tables[self._names[0]].snapshot_end(start, stop))
        copy_runs(snapshot, self._tables[self._names[0]], start, stop, payload)
        for rank, name in enumerate(self._names):
            if rank == 0:
                continue
            table = self._tables[name]
            nbytes = table.bytes_within(start, stop)
            if nbytes:
                piece = self._room(nbytes)
                self._run("recv", piece, rank, deadline)
                scatter_runs(piece, table, start, stop, payload)

    def give(self, snapshot: torch.Tensor, ready: Callable[[int], None], deadline: Deadline) -> int:
        """Send this rank's pieces of every bucket to rank 0; returns the bytes sent (every other rank). `ready` as for `fill`."""
        table, total = self._tables[self._names[self._rank]], 0
        for index in range(self._layout.bucket_count):
            start, stop = self._layout.window(index)
            nbytes = table.bytes_within(start, stop)
            if nbytes:
                ready(table.snapshot_end(start, stop))
                self._run("send", gather_runs(snapshot, table, start, stop, self._room(nbytes)), 0, deadline)
                total += nbytes
        return total

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._group = None

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._packed.numel() < nbytes:
            self._packed = torch.empty(nbytes, dtype=torch.uint8, device=self._packed.device)
        return self._packed[:nbytes]

    def _run(self, kind: str, data: torch.Tensor, rank: int, deadline: Deadline) -> None:
        group = self._group
        if group is None:
            raise ClosedError("the gather was closed.", part=_PART)
        peer = self._names[rank]
        with translated(_PART, deadline, f"{peer}'s pieces of a bucket", peer):
            operation = group.send if kind == "send" else group.recv
            work = operation([data], rank, 0)
            work.wait(deadline.timedelta())
