"""`WeightlaneCheckpointEngine`: verl's checkpoint engine interface on top of weightlane's links."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, TypeVar

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
from verl.workers.rollout.utils import ensure_async_iterator

from weightlane.ckpt_engines import CheckpointEngineRegistry as WeightlaneEngines
from weightlane.ckpt_engines import ClosedError, ConfigError, Deadline, Topology
from weightlane.sync import TensorReceiver, TensorSender

_End = TypeVar("_End", TensorSender, TensorReceiver)


@CheckpointEngineRegistry.register("weightlane")
class WeightlaneCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]  # verl is untyped to us
    """Sends weights from trainer rank 0 to every rollout worker over an engine of weightlane's registry.

    The other trainer ranks only iterate over their weights, which verl's generators gather from all ranks. Buckets are in host
    memory. Each has a checksum, and each wait ends after `timeout_s`. verl connects for every update, so replicas can come and
    go between two updates. Workers that are left over after a failed update close their connections, and can take part in the
    next one.

    Args:
        bucket_size: verl's limit for the memory of a bucket in bytes, ``update_weights_bucket_megabytes``.
        is_master: Whether this is trainer rank 0. verl says so.
        engine: Name of the engine, as ``weightlane engines`` lists it.
        options: Options of that engine.
        bucket_mib: Size of a bucket in MiB. The sender has two; `bucket_size` is the upper limit.
        timeout_s: Longest time in seconds to connect, and for one bucket, including the time in which the trainer gathers its
            tensors and the rollouts load them.
        cache: Whether rollout workers receive a version in full before they yield its first tensor, and keep it in host memory
            for `get_weights`. A worker's weights are then never a mix of two versions because of a transfer that failed.
        **unknown: Keys that do not exist. They are refused here, since verl passes on what its configuration has.

    Raises:
        ConfigError: A key does not exist, a value is not possible, or the engine carries no host memory.
        RegistryError: There is no such engine, or it cannot be loaded.
        EngineUnavailableError: The engine cannot run on this machine.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        engine: str = "shm",
        options: Mapping[str, Any] | None = None,
        bucket_mib: float = 32,
        timeout_s: float = 120,
        cache: bool = False,
        **unknown: object,
    ) -> None:
        role = "trainer" if is_master else "rollout"
        self._part = f"{role}-{socket.gethostname()}-{os.getpid()}.{secrets.token_hex(2)}"
        if unknown:
            arguments = inspect.signature(WeightlaneCheckpointEngine).parameters.values()
            keys = ", ".join(each.name for each in arguments if each.kind is each.KEYWORD_ONLY)
            raise ConfigError(
                f"engine_kwargs.weightlane has no key {', '.join(unknown)}.",
                part=self._part,
                hint=f"Its keys are {keys}.",
            )
        self._is_master, self._timeout_s, self._cache = is_master, timeout_s, cache
        self._bucket_bytes = int(min(bucket_size, bucket_mib * (1 << 20))) // 64 * 64
        if self._bucket_bytes <= 0 or not timeout_s > 0:
            raise ConfigError(
                f"bucket_mib is {bucket_mib}, timeout_s is {timeout_s}, and update_weights_bucket_megabytes is"
                f" {bucket_size / (1 << 20):g}; all must be positive.",
                part=self._part,
                hint="Change them in checkpoint_engine, and its engine_kwargs.weightlane.",
            )
        self._engine = WeightlaneEngines().create(engine, options)
        if "cpu" not in self._engine.capabilities.devices:
            raise ConfigError(
                f"{engine} does not carry host memory.",
                part=self._part,
                hint="Set engine_kwargs.weightlane.engine to shm, gloo or filesystem, or take verl's own nccl.",
            )
        if is_master:  # one process checks, as in weightlane's own runs
            self._engine.check(Deadline.after(timeout_s))
        self._stream: TensorSender | TensorReceiver | None = None
        """This worker's end of the connection of one update."""
        self._cached: list[tuple[str, torch.Tensor]] | None = None
        self._caching = False
        """Whether the version of the present connection is still to be received into the cache."""

    def prepare(self) -> dict[str, Any]:
        """Return this worker's name and address for `build_topology`. Closes the connection of an update that failed."""
        self.finalize()
        if self._is_master:
            self._stream = TensorSender(self._part, self._engine, self._bucket_bytes, self._timeout_s)
        else:
            self._stream = TensorReceiver(self._part, self._engine, self._timeout_s)
        return {"name": self._part, "address": self._stream.address(), "sends": self._is_master}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` of each trainer rank and each rollout worker: a topology, or None.

        Args:
            actor_wg_world_size: Number of trainer ranks.
            rollout_world_size: Number of rollout workers of all replicas.
            metadata: The results of `prepare`, of the trainer ranks first.

        Raises:
            ConfigError: The sender is not trainer rank 0 alone.
        """
        senders = [place for place, each in enumerate(metadata) if each["sends"]]
        if senders != [0]:
            raise ConfigError(
                f"the workers {senders} have is_master; trainer rank 0 must have it, and no other.",
                part="weightlane in verl's checkpoint engine manager",
                hint="verl's own trainer workers pass it to CheckpointEngineRegistry.new.",
            )
        receivers = metadata[actor_wg_world_size:]
        topology = Topology(
            secrets.token_hex(8),
            {metadata[0]["name"]: metadata[0]["address"]},
            {each["name"]: each["address"] for each in receivers},
            key=secrets.token_bytes(32),
        )
        idle: list[Topology | None] = [None] * (actor_wg_world_size - 1)
        return {"topology": [topology, *idle]}, {"topology": [topology] * rollout_world_size}

    def init_process_group(self, topology: Topology | None) -> None:
        """Connect sender and receivers; all of them call this at the same time. None is for a trainer rank that sends nothing.

        Raises `PeerLostError`, `ProtocolError`, `DeadlineExceededError`, or the engine's errors.
        """
        if topology is None or self._stream is None:
            self.finalize()
            return
        self._stream.connect(topology)
        self._caching = self._cache

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send `weights`, pairs of name and tensor, as version `global_steps`. Trainer ranks other than 0 only iterate over them.

        If the transfer fails, the rest of `weights` is still iterated over, since the other ranks gather tensors with this one.

        Returns:
            Metrics for verl's trainer: the bytes that each rollout worker got.

        Raises the errors of `TensorSender.send`.
        """
        each = ensure_async_iterator(weights)
        if self._is_master:
            sent_bytes = await self._end(TensorSender).send(each, global_steps or 0)
            return {"checkpoint_engine/sent_bytes": float(sent_bytes)}
        async for _ in each:
            pass
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of every weight of version `global_steps`, as they arrive; with `cache`, when all have.

        A tensor is in host memory, may be kept, and shares memory with at most a bucket of others.

        Raises:
            CorruptBucketError: Bytes changed on their way; the tensors that were yielded are right.
            PeerLostError: The trainer died, or failed and hung up.
            DeadlineExceededError: A bucket did not arrive within `timeout_s`.
            ProtocolError: The trainer sends another version, or the engine broke the contract.
            ClosedError: It is not connected, and nothing is cached.
        """
        if self._cache:
            if self._caching:
                await asyncio.to_thread(self.fill_cache, global_steps)
            async for name, tensor in self.get_weights():
                yield name, tensor
            return
        async with contextlib.aclosing(self._end(TensorReceiver).blocks(global_steps or 0)) as blocks:
            async for block in blocks:
                for name, tensor in block:
                    yield name, tensor

    def fill_cache(self, global_steps: int | None = None) -> None:
        """Receive version `global_steps` in full and make it the one that `get_weights` yields; until then that is the former.

        A manager calls this on rollout workers by ``execute_checkpoint_engine``, while requests go on, instead of
        ``update_weights``, which puts the version into service. Raises as `receive_weights`.
        """
        if not self._cache:
            raise ConfigError("cache is off.", part=self._part, hint="Set engine_kwargs.weightlane.cache to true.")
        receiver, received = self._end(TensorReceiver), list[tuple[str, torch.Tensor]]()
        try:
            while (block := receiver.next_block(global_steps or 0)) is not None:
                received += block
        except BaseException:
            receiver.close()  # and not the connection of the next update, which may have begun
            raise
        self._cached, self._caching = received, False

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of every weight of the newest version that was received in full, as often as it is called.

        Raises `ClosedError` when there is none: `cache` is off, or nothing was received yet.
        """
        if self._cached is None:
            hint = "Set engine_kwargs.weightlane.cache to true, and receive a version first."
            raise ClosedError("no version is cached.", part=self._part, hint=hint)
        for name, tensor in self._cached:
            yield name, tensor

    def finalize(self) -> None:
        """Close the connection and free its memory; a cached version stays."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _end(self, kind: type[_End]) -> _End:
        """Return this worker's end of the connection."""
        if not isinstance(self._stream, kind):
            hint = "verl calls prepare and init_process_group on all workers before it sends or receives weights."
            raise ClosedError("it is not connected.", part=self._part, hint=hint)
        return self._stream
