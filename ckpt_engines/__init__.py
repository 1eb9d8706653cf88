"""Checkpoint engines: the contract, the registry that finds engines by name, and the built-in ones.

The registry makes an engine of its name:

    >>> from weightlane.ckpt_engines import CheckpointEngineRegistry
    >>> registry = CheckpointEngineRegistry()
    >>> "shm" in registry.names()
    True
    >>> engine = registry.create("shm", {})
    >>> engine.capabilities.same_host_only
    True
"""

from .channels.channel import Address, Channel
from .contract.bucket import Bucket, FilePart
from .contract.capabilities import Capabilities, Delivery
from .contract.engine import API_VERSION, CheckpointEngine, EngineConfig, Topology, WeightReceiver, WeightSender
from .contract.storing import StoringSender, VersionFiles, bucket_file_name
from .contract.viewing import ViewableSender, ViewingReceiver
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
    ForwardMemoryError,
    GradientError,
    ManifestError,
    PeerLostError,
    ProtocolError,
    QuarantinedError,
    QuorumError,
    RegistryError,
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
from .links.receiver_link import ReceiverLink
from .links.sender_link import SenderLink
from .registry import CheckpointEngineRegistry, EngineListing

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
