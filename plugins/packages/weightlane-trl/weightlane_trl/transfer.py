"""`WeightlaneTransfer`: the ``weight_transfer`` of TRL's `AsyncGRPOTrainer`.

TRL walks over the model's tensors, each gathered in full, and hands them to trainer rank 0. This object copies them, and
publishes the copies as one version. It implements ``trl.experimental.async_grpo.async_grpo_trainer.WeightTransferProtocol``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weightlane.ckpt_engines import CheckpointEngineRegistry, ManifestError, WeightlaneError
from weightlane.rollout import ServerReplica
from weightlane.sync import CollectivePublisher, LocalShard, RankExchange, SyncConfig, SyncReport, TensorSpec

_PART = "TRL's weight transfer"


class WeightlaneTransfer:
    """Publishes the tensors that TRL hands over. Every rank may make one; TRL uses that of rank 0, from one thread.

    Rank 0 keeps a copy of all tensors: in host memory if the checkpoint engine can send from there, otherwise on the tensors'
    device.

    Args:
        servers: The vLLM servers that get the versions: the address of one, as ``http://127.0.0.1:8000``, or a
            `ServerReplica`, or several of both.
        tensor_parallel: Number of ranks of each server that is given by its address.
        dtype: Dtype in which floating-point tensors are sent: the one that the servers compute in, or that of their
            checkpoint. None sends each tensor as TRL hands it over.
        engine: Name of the checkpoint engine.
        options: Options of that engine.
        config: Deadlines, bucket size, quorum, and the address on which rank 0 hosts the rendezvous.

    Raises:
        ConfigError: A server's address is none.
        UnknownEngineError: There is no such engine; other `RegistryError`s if it cannot be loaded.
    """

    def __init__(
        self,
        servers: str | ServerReplica | Sequence[str | ServerReplica],
        *,
        tensor_parallel: int = 1,
        dtype: torch.dtype | None = None,
        engine: str = "shm",
        options: Mapping[str, Any] | None = None,
        config: SyncConfig | None = None,
    ) -> None:
        given = [servers] if isinstance(servers, (str, ServerReplica)) else servers
        self._servers = [
            ServerReplica(each, tensor_parallel=tensor_parallel) if isinstance(each, str) else each for each in given
        ]
        self._dtype = dtype
        self._engine, self._options, self._config = engine, options, config
        self._from_host = "cpu" in CheckpointEngineRegistry().engine_class(engine).capabilities.devices
        self._copies: dict[str, torch.Tensor] = {}
        self._weights: CollectivePublisher | None = None
        self.version = 0
        """The version that was published last; 0 before the first one. TRL counts the same versions as its ``model_version``."""
        self.report: SyncReport | None = None
        """The report of the last version that serves: latency, the servers' pauses, bytes."""

    def init_weight_transfer(self) -> None:
        """Do nothing: `send_weights`, which TRL calls next, learns the tensors, and connects."""

    def pause(self) -> None:
        """Do nothing: the server generates while a version is transferred and staged.

        The commit itself pauses the server, between two decode steps, and resumes it. No request is aborted, and no caller has to
        do anything about it.
        """

    def resume(self) -> None:
        """Do nothing: the server was never paused from here, see `pause`."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the named tensors as the next version, and wait until it serves. The first call connects the servers.

        `iterator` is always exhausted before anything can fail on the network, since other ranks take part in its collectives.

        Raises:
            WorkerDiedError: A server does not answer, when connecting.
            ConfigError: A server runs without weightlane or its endpoints for weights, or cannot take versions of the model.
            ReplicaTakenError: A server follows another publisher.
            ManifestError: The tensors are not those of the call before.
            SyncAbortedError: Too few servers have committed the version; they serve the one before. The reason is in its text.
            WeightlaneError: Another reason, with the part that failed.
        """
        try:
            if self._weights is not None:
                self._weights.fence()  # a version that failed may still be read
        except WeightlaneError:
            for _ in iterator:
                pass
            raise
        self._copy(iterator)
        if self._weights is None:
            self._weights = CollectivePublisher(
                [
                    LocalShard.whole(TensorSpec(name, tuple(copy.shape), copy.dtype), copy)
                    for name, copy in self._copies.items()
                ],
                self._servers,
                backend=self._engine,
                options=self._options,
                config=self._config,
                ranks=RankExchange(torch.device("cpu"), alone=True),
            )
        self.version += 1
        self._weights.publish(self.version)
        self.report = self._weights.wait()

    def destroy(self) -> None:
        """Disconnect, and free the copies. The servers keep the weights they have. Idempotent; `send_weights` connects again."""
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()
        self._copies.clear()

    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy `tensors` into the memory that is published. Raises `ManifestError` after the last one if they are others."""
        fresh = self._weights is None
        if fresh:
            self._copies.clear()
        left, wrong = set(self._copies), []
        for name, tensor in tensors:
            if fresh:
                self._copies[name] = self._memory_for(tensor)
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape:  # copy_ would broadcast
                wrong.append(name)
                continue
            copy.copy_(tensor.detach())
            left.discard(name)
        if wrong or left:
            raise ManifestError(
                f"tensors differ from those of the version before: {', '.join(sorted({*wrong, *left})[:6])}.",
                part=_PART,
                hint="A version has all tensors of the model. Call destroy() before another model is sent.",
            )

    def _memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        if self._from_host:
            return torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
