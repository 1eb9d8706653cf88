"""`SegmentEngine`: the engine class behind ``shm`` and ``cuda_ipc``, which differ in the memory they share."""

from __future__ import annotations

from typing import ClassVar, cast

import torch

from ._local_socket import LocalSocketConfig
from ._segment_arena import SegmentArena
from ._segment_receiver import SegmentReceiver
from ._segment_sender import SegmentSender
from ._segments import SegmentKind
from .contract import CheckpointEngine, EngineConfig, WeightReceiver, WeightSender
from .errors import ProtocolError


class SegmentConfig(LocalSocketConfig):
    """Options that engines with segments have in common; each describes the limit in its own words."""

    max_shared_mib: int | None = None


class SegmentEngine(CheckpointEngine):
    """Owns the memory that its senders share with receivers. Subclasses say what kind it is."""

    label: ClassVar[str]
    """The engine's name for error messages."""
    segment_kind: ClassVar[type[SegmentKind]]

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._options = cast("SegmentConfig", config)
        limit = self._options.max_shared_mib
        self._arena = SegmentArena(self.label, self.segment_kind(), None if limit is None else limit << 20)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory that receivers can map: a bucket that lies in it is not copied by `send`."""
        if device.type not in self.capabilities.devices:
            what = " or ".join(sorted(self.capabilities.devices))
            raise ProtocolError(f"it has {what} memory only, not {device.type}.", part=self.label)
        return self._arena.make(nbytes, device)[1].data[:nbytes]

    def free(self, memory: torch.Tensor) -> None:
        """See `CheckpointEngine.free`."""
        self._arena.free(memory)

    def make_sender(self, name: str) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        part = f"{self.label} sender {name}"
        return SegmentSender(part, self.segment_kind(), self._arena, socket_dir=self._options.socket_dir)

    def make_receiver(self, name: str) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        part = f"{self.label} receiver {name}"
        return SegmentReceiver(name, part, self.segment_kind(), socket_dir=self._options.socket_dir)
