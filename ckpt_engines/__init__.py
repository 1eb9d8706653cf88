"""Checkpoint engines: the contract, the registry that finds engines by name, and the built-in ones.

The registry makes an engine of its name:

    >>> from weightlane.ckpt_engines import CheckpointEngineRegistry
    >>> registry = CheckpointEngineRegistry()
    >>> "shm" in registry.names()
    True
    >>> engine = registry.create("shm", {})
    >>> engine.capabilities.same_host_only
    True

Importing this package imports neither torch nor an engine: names other than errors are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    AddressInUseError,
    ClosedError,
    CommitError,
    ConfigError,
    CorruptBucketError,
    DeadlineExceededError,
    DeltaBaseError,
    DuplicateEngineError,
    EngineContractError,
    EngineImportError,
    EngineUnavailableError,
    EpisodeError,
    ForwardMemoryError,
    GradientError,
    ManifestError,
    PeerLostError,
    ProtocolError,
    QuarantinedError,
    QuorumError,
    RegistryError,
    ReplicaTakenError,
    RewardError,
    StagingMemoryError,
    StorageError,
    SupersededError,
    SyncAbortedError,
    TooManyFailuresError,
    TransportError,
    UnknownEngineError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
    error_from_wire,
)

if TYPE_CHECKING:
    from .channels.channel import Address, Channel
    from .contract.bucket import Bucket, FilePart
    from .contract.capabilities import Capabilities, Delivery
    from .contract.engine import API_VERSION, CheckpointEngine, EngineConfig, Topology, WeightReceiver, WeightSender
    from .contract.storing import StoringSender, VersionFiles, bucket_file_name
    from .contract.viewing import ViewableSender, ViewingReceiver
    from .links import ReceiverLink, SenderLink
    from .registry import CheckpointEngineRegistry, EngineListing
    from .waits import Deadline

_LAZY = {
    ".channels.channel": ("Address", "Channel"),
    ".contract.bucket": ("Bucket", "FilePart"),
    ".contract.capabilities": ("Capabilities", "Delivery"),
    ".contract.engine": (
        "API_VERSION",
        "CheckpointEngine",
        "EngineConfig",
        "Topology",
        "WeightReceiver",
        "WeightSender",
    ),
    ".contract.storing": ("StoringSender", "VersionFiles", "bucket_file_name"),
    ".contract.viewing": ("ViewableSender", "ViewingReceiver"),
    ".waits": ("Deadline",),
    ".links": ("ReceiverLink", "SenderLink"),
    ".registry": ("CheckpointEngineRegistry", "EngineListing"),
}
"""Modules that need torch, and the public names of each."""

_HOME = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "API_VERSION",
    "Address",
    "AddressInUseError",
    "Bucket",
    "Capabilities",
    "Channel",
    "CheckpointEngine",
    "CheckpointEngineRegistry",
    "ClosedError",
    "CommitError",
    "ConfigError",
    "CorruptBucketError",
    "Deadline",
    "DeadlineExceededError",
    "Delivery",
    "DeltaBaseError",
    "DuplicateEngineError",
    "EngineConfig",
    "EngineContractError",
    "EngineImportError",
    "EngineListing",
    "EngineUnavailableError",
    "EpisodeError",
    "FilePart",
    "ForwardMemoryError",
    "GradientError",
    "ManifestError",
    "PeerLostError",
    "ProtocolError",
    "QuarantinedError",
    "QuorumError",
    "ReceiverLink",
    "RegistryError",
    "ReplicaTakenError",
    "RewardError",
    "SenderLink",
    "StagingMemoryError",
    "StorageError",
    "StoringSender",
    "SupersededError",
    "SyncAbortedError",
    "TooManyFailuresError",
    "Topology",
    "TransportError",
    "UnknownEngineError",
    "UntouchedError",
    "VersionFiles",
    "ViewableSender",
    "ViewingReceiver",
    "WeightReceiver",
    "WeightSender",
    "WeightlaneError",
    "WorkerDiedError",
    "as_weightlane_error",
    "bucket_file_name",
    "error_from_wire",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
