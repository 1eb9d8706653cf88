"""The snapshot: a private copy of a rank's shards in the wire dtype, taken while the next step already computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .packing import snapshot_bytes, snapshot_offsets
from .tensor_spec import LocalShard


class Snapshot:
    """One flat buffer and a typed view of it for every shard.

    Args:
        shards: This rank's live shards; their storage must stay where it is.
        device: Device the transport sends from. On CPU with CUDA shards the buffer is pinned.
    """

    def __init__(self, shards: Sequence[LocalShard], device: torch.device) -> None:
        self._shards = list(shards)
        source = next((shard.data.device for shard in self._shards if shard.numel), torch.device("cpu"))
        self._stream = torch.cuda.Stream(source) if source.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.data = torch.zeros(
            snapshot_bytes(shards),
            dtype=torch.uint8,
            device=device,
            pin_memory=self._stream is not None and device.type == "cpu",
        )
        """1-D uint8; each shard's wire bytes at its place of `snapshot_offsets`."""
        self._views = [
            self.data[place : place + shard.nbytes].view(shard.spec.dtype)
            for shard, place in zip(self._shards, snapshot_offsets(shards), strict=True)
        ]

    def mark(self) -> torch.cuda.Event | None:
        """Remember the work queued so far on the trainer's stream; the copy will wait for it. None without CUDA."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    @torch.no_grad()
    def take(self, after: torch.cuda.Event | None) -> None:
        """Copy every shard, cast in the same pass. Blocks until the copy is done; runs on the caller's thread."""
        if self._stream is None:
            self._copy()
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._copy()
        self._stream.synchronize()

    def _copy(self) -> None:
        for shard, view in zip(self._shards, self._views, strict=True):
            view.copy_(shard.data.detach().reshape(-1), non_blocking=True)
