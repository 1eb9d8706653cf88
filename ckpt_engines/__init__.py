"""Checkpoint engines: the contract, the registry that finds engines by name, and the built-in ones.

>>> from weightlane.ckpt_engines import CheckpointEngineRegistry
>>> registry = CheckpointEngineRegistry()
>>> "shm" in registry.names()
True
>>> engine = registry.create("shm", {})
>>> engine.capabilities.same_host_only
True
"""

from .contract import (
    API_VERSION,
    Address,
    Bucket,
    Capabilities,
    CheckpointEngine,
    Delivery,
    EngineConfig,
    Mailbox,
    Topology,
    VersionFiles,
    WeightReceiver,
    WeightSender,
    bucket_file_name,
)
from .deadline import Deadline
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
    ManifestError,
    PeerLostError,
    ProtocolError,
    QuarantinedError,
    QuorumError,
    RegistryError,
    StagingMemoryError,
    StorageError,
    SupersededError,
    SyncAbortedError,
    TransportError,
    UnknownEngineError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
    error_from_wire,
)
from .registry import CheckpointEngineRegistry, EngineListing

__all__ = [
    "API_VERSION",
    "Address",
    "AddressInUseError",
    "Bucket",
    "Capabilities",
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
    "Mailbox",
    "ManifestError",
    "PeerLostError",
    "ProtocolError",
    "QuarantinedError",
    "QuorumError",
    "RegistryError",
    "StagingMemoryError",
    "StorageError",
    "SupersededError",
    "SyncAbortedError",
    "Topology",
    "TransportError",
    "UnknownEngineError",
    "VersionFiles",
    "WeightReceiver",
    "WeightSender",
    "WeightlaneError",
    "WorkerDiedError",
    "as_weightlane_error",
    "bucket_file_name",
    "error_from_wire",
]
