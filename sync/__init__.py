"""Sync of weight versions from trainer ranks to rollout ranks, over any checkpoint engine.

A complete sync inside one process (normally publisher, coordinator and subscriber are in three):

    >>> import asyncio, torch
    >>> from weightlane.ckpt_engines import CheckpointEngineRegistry
    >>> from weightlane.sync import *
    >>> weight = torch.arange(6.0).reshape(2, 3)
    >>> spec = TensorSpec("w", (2, 3), torch.float32)
    >>> rendezvous = Rendezvous.host()
    >>> expectation = Expectation({"w": ExpectedTensor((2, 3), frozenset({torch.float32}))})
    >>> subscriber = Subscriber("rollout-0/0", rendezvous.address, "shm", {}, expectation)
    >>> publisher = Publisher(
    ...     "trainer-0", rendezvous.address, shards=[LocalShard.whole(spec, weight)],
    ...     engine=CheckpointEngineRegistry().create("shm"))
    >>> class Replica:
    ...     name = "rollout-0"
    ...     def subscriber_names(self): return ["rollout-0/0"]
    ...     async def commit(self, version):
    ...         self.weights = {name: tensor.clone() for name, tensor in subscriber.take(version).items()}
    ...         subscriber.release(version)
    ...         return CommitReport(version, blocked_s=0.0)
    ...     async def rollback(self, version): ...  # load the tensors of subscriber.take_previous(version)
    ...     async def quarantine(self, error): ...  # refuse all requests until the next commit
    >>> replica = Replica()
    >>> coordinator = Coordinator(rendezvous, ["trainer-0"], [replica], SyncConfig())
    >>> publisher.publish(1)
    >>> waited_s = publisher.fence()
    >>> report = asyncio.run(coordinator.sync(1))
    >>> report.version, torch.equal(replica.weights["w"], weight)
    (1, True)
    >>> coordinator.close(); publisher.close(); subscriber.close()
"""

from .codecs.delta.staged_delta import IncomingDelta, StagedDelta
from .config import CheckpointEngineConfig, SyncConfig
from .control.coordinator.coordinator import Coordinator
from .control.coordinator.replicas import (
    CommitReport,
    FailedAttempt,
    Outcome,
    Replica,
    ReplicaReport,
    ReplicaState,
    SyncReport,
)
from .control.rendezvous import Rendezvous, RendezvousAddress
from .publisher import Publisher
from .receive.live_stream import LivePart, LiveStream
from .receive.read_version import read_version
from .subscriber import CommitMode, Subscriber
from .tensor_stream import TensorReceiver, TensorSender
from .torchrun.collective_publisher import CollectivePublisher
from .torchrun.rank_exchange import RankExchange
from .version.expectation import Expectation, ExpectedTensor, check_coverage
from .version.manifest import Manifest
from .version.placement import Placement
from .version.sliced_tensors import SlicedTensors
from .version.tensor_spec import LocalShard, TensorSlice, TensorSpec, dtype_name, dtype_of

__all__ = [
    "CheckpointEngineConfig",
    "CollectivePublisher",
    "CommitMode",
    "CommitReport",
    "Coordinator",
    "Expectation",
    "ExpectedTensor",
    "FailedAttempt",
    "IncomingDelta",
    "LivePart",
    "LiveStream",
    "LocalShard",
    "Manifest",
    "Outcome",
    "Placement",
    "Publisher",
    "RankExchange",
    "Rendezvous",
    "RendezvousAddress",
    "Replica",
    "ReplicaReport",
    "ReplicaState",
    "SlicedTensors",
    "StagedDelta",
    "Subscriber",
    "SyncConfig",
    "SyncReport",
    "TensorReceiver",
    "TensorSender",
    "TensorSlice",
    "TensorSpec",
    "check_coverage",
    "dtype_name",
    "dtype_of",
    "read_version",
]
