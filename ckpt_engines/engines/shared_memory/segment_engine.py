"""`SegmentEngine`: the base class of ``shm`` and ``cuda_ipc``, which differ in the memory they share."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, field_validator

from ...channels.socket_factory import LocalSocketFactory, SocketFactory, check_socket_directory
from ...contract.engine import API_VERSION, CheckpointEngine, EngineConfig, WeightReceiver, WeightSender
from ...errors import ProtocolError
from .receiver import SegmentReceiver
from .segments import SegmentArena
from .sender import SegmentSender


class SegmentConfig(EngineConfig):
    """Options of ``shm`` and ``cuda_ipc``."""

    socket_dir: str = Field(
        "/dev/shm",  # noqa: S108 - mode 0600, a random name, and gone after connect
        description=(
            "Directory for the sender's socket while it waits for receivers. Containers must share it and run as the"
            " same user of the host."
        ),
    )
    max_shared_mib: int | None = Field(
        None,
        ge=1,
        description="Most memory (MiB) that one trainer process shares with receivers; more is refused with an error."
        " Without it, as much as the machine, the container or the device has.",
    )

    @field_validator("socket_dir")
    @classmethod
    def _is_short(cls, socket_dir: str) -> str:
        return check_socket_directory(socket_dir)


class SegmentEngine(CheckpointEngine):
    """Owns the memory that its senders share with receivers. A subclass chooses the kind of memory."""

    api_version = API_VERSION
    config: SegmentConfig
    config_type = SegmentConfig
    label: ClassVar[str]
    """The engine's name for error messages."""
    arena_type: ClassVar[type[SegmentArena]]

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        limit = self.config.max_shared_mib
        self._arena = self.arena_type(self.label, None if limit is None else limit << 20)

    def socket_factory(self, name: str) -> SocketFactory:  # noqa: ARG002
        """See `CheckpointEngine.socket_factory`."""
        return LocalSocketFactory(self.config.socket_dir)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory that receivers can map: a bucket in it is sent without a copy on the sender's side."""
        if device.type not in self.capabilities.devices:
            types = " or ".join(sorted(self.capabilities.devices))
            raise ProtocolError(f"it has {types} memory only, not {device.type}.", part=self.label)
        return self._arena.make(nbytes, device).data[:nbytes]

    def free(self, memory: torch.Tensor) -> None:
        """See `CheckpointEngine.free`."""
        self._arena.free(memory)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return SegmentSender(f"{self.label} sender {name}", self._arena, device)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return SegmentReceiver(f"{self.label} receiver {name}", self._arena, device)
