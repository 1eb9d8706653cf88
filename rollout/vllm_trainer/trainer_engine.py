"""`WeightlaneTrainerWeightTransferEngine`: vLLM's trainer-side weight-transfer engine ``weightlane``, one on each trainer rank.

It lists the shards of vLLM's ``WeightSource``, and publishes them with a `weightlane.sync.CollectivePublisher` to each vLLM
behind vLLM's clients.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.sync import CollectivePublisher, SyncConfig, dtype_of
from weightlane.sync.torchrun.rank_exchange import RankExchange

from ..commit.transfer_calls import validated
from ..vllm_surface import BACKEND
from .client_replica import ClientReplica, replicas_behind
from .source_shards import SourceShards, source_shards

_log = logging.getLogger(__name__)
_PART = "weight-transfer trainer"


@dataclass
class WeightlaneTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is untyped to us
    """The settings of a trainer rank. The first four fields are those of vLLM's ``NCCLTrainerInitInfo``, in its order.

    Attributes:
        master_address: Address of rank 0's machine that the vLLMs can reach. Rank 0 listens there.
        master_port: Port for that; 0 takes a free one.
        world_size: Rank 0 of the trainer and all ranks of all vLLMs, as the program has counted them. The number must be that of
            the ranks that connect; None checks nothing.
        packed: Accepted as it is for ``nccl``. Tensors are packed into buckets in any case.
        engine: Name of the checkpoint engine, which sends the weights; ``weightlane engines`` lists them.
        options: Options of that engine.
        sync: Settings of `weightlane.sync.SyncConfig`. Unless it says otherwise, every vLLM must commit a version (``quorum`` 1).
    """

    backend: ClassVar[str] = BACKEND

    master_address: str = "127.0.0.1"
    master_port: int = 0
    world_size: int | None = None
    packed: bool = True
    engine: str = "shm"
    options: Mapping[str, Any] = field(default_factory=dict)
    sync: Mapping[str, Any] = field(default_factory=dict)


class WeightlaneTrainerWeightTransferEngine(
    TrainerWeightTransferEngine[WeightlaneTrainerInitInfo]  # type: ignore[misc]  # vLLM is untyped to us
):
    """The engine of one trainer rank. Every rank makes the same calls; `trainer_init` makes it.

    A parameter may change while a version is sent only after `send_weights` has returned, or `fence` where that did not wait.
    """

    init_info_cls = WeightlaneTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        is_sender: bool,
        ranks: RankExchange,
        shards: SourceShards,
        publisher: CollectivePublisher,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.rank = ranks.rank
        self._ranks, self._shards, self._publisher = ranks, shards, publisher
        self._version = 0

    @classmethod
    def trainer_init(
        cls, init_info: WeightlaneTrainerInitInfo, *, client: Any, source: WeightSource | None = None
    ) -> Self:
        """Connect the trainer ranks and the vLLMs. Collective.

        Args:
            init_info: The settings, with this rank's number.
            client: A client, or a list of them for several vLLMs. Only rank 0's are used.
            source: The weights.

        Raises:
            WeightlaneError: The error that kept any rank or vLLM from connecting, on every rank.
        """
        ranks = RankExchange(_group_device())
        made: list[tuple[WeightSource, SyncConfig, SourceShards]] = []
        replicas: list[ClientReplica] = []

        def prepare() -> None:
            if source is None:
                raise ConfigError(
                    "there is no source of weights.", part=_PART, hint="Give trainer_init a WeightSource."
                )
            if init_info.rank != ranks.rank:
                raise ConfigError(
                    f"this is rank {init_info.rank} by its init info, and {ranks.rank} of {ranks.world} in torch.distributed.",
                    part=_PART,
                    hint="Every trainer rank is a member of torch.distributed's default process group, by that number.",
                )
            host = {"host": init_info.master_address, "port": init_info.master_port}
            settings = {"quorum": 1.0, **host, **init_info.sync}
            hint = "The settings are those of [sync] in a run's configuration."
            config = validated(SyncConfig, settings, part=_PART, hint=hint)
            wire_dtype = None if config.wire_dtype == "auto" else dtype_of(config.wire_dtype)
            made.append((source, config, source_shards(source, init_info.rank, wire_dtype)))
            if init_info.is_sender:
                replicas.extend(replicas_behind(client))

        ranks.gather(prepare)
        ((given, config, shards),) = made
        publisher = CollectivePublisher(
            shards.shards,
            replicas,
            backend=init_info.engine,
            options=init_info.options,
            config=config,
            max_failed=1,  # an error that nobody has waited for is raised by the next call
            ranks=ranks,
        )
        try:
            ranks.gather(lambda: _check_world(init_info, replicas))
        except WeightlaneError:
            publisher.close()
            raise
        return cls(
            client=client,
            source=given,
            is_sender=init_info.is_sender,
            ranks=ranks,
            shards=shards,
            publisher=publisher,
        )

    def send_weights(self, *, wait: bool = True) -> None:
        """Publish the source's weights as the next version. Collective.

        Args:
            wait: Whether to return only when every vLLM serves the version, and to raise its error. Without it, the transfer and
                the commit overlap with what follows; see `fence`. The next call waits for them, and raises that error instead of
                sending.

        Raises:
            SyncAbortedError: A vLLM has not taken the version. All that still answer serve the version before.
            ManifestError: The source does not yield what it has declared. Nothing was sent.
            WeightlaneError: The error that the source has raised, on every rank. Nothing was sent.
        """
        self._publisher.fence()  # the copies of the version before must not change yet
        self._ranks.gather(self._shards.refresh)
        self._version += 1
        self._publisher.publish(self._version)
        if wait:
            self._publisher.wait()

    def fence(self) -> float:
        """Wait until the newest version is copied, so that parameters may change. Returns the seconds waited.

        Raises:
            DeadlineExceededError: The copy takes longer than ``deadline_s`` of the settings.
        """
        return self._publisher.fence()

    def wait(self) -> None:
        """Wait until the newest version serves. Raises its error, as `send_weights`."""
        self._publisher.wait()

    def shutdown(self) -> None:
        """Wait for the newest version, and leave. The vLLMs serve the weights that they have. Idempotent, never raises."""
        try:
            self._publisher.wait()
        except WeightlaneError as error:
            _log.warning("version %d was not committed: %s", self._version, error)
        self._publisher.close()


def _group_device() -> torch.device:
    """A device on which torch.distributed's default group, if there is one, can gather tensors."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not dist.is_initialized() or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _check_world(init_info: WeightlaneTrainerInitInfo, replicas: list[ClientReplica]) -> None:
    """Raise `ConfigError` on rank 0 unless as many vLLM ranks have connected as the program has counted."""
    connected = sum(replica.ranks for replica in replicas)
    if init_info.is_sender and init_info.world_size not in (None, 1 + connected):
        raise ConfigError(
            f"world_size is {init_info.world_size}, and {connected} ranks of vLLM have connected, besides rank 0 of the trainer.",
            part=_PART,
            hint="A client drives one vLLM: give a list of clients for several.",
        )
