"""`WeightlaneCheckpointEngine`: NeMo-RL's checkpoint engine interface on top of weightlane's links."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ClosedError,
    ConfigError,
    Deadline,
    Topology,
)
from weightlane.sync import TensorReceiver, TensorSender


class WeightlaneCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # NeMo-RL is untyped to us
    """Sends weights from policy worker 0 to every worker of vLLM over an engine of weightlane's registry.

    The other policy workers only iterate over their weights, which NeMo-RL's generators gather from all of them. Buckets are in
    host memory. Each has a checksum, and each wait ends after `timeout_s`. The workers stay connected from one update to the
    next, until `finalize` or an error.

    Args:
        bucket_size: NeMo-RL's limit for the memory of a bucket in bytes, from ``update_weights_bucket_memory_ratio``.
        engine: Name of the engine, as ``weightlane engines`` lists it.
        options: Options of that engine. The same on every worker: addresses are given as `interface`, not as `host`.
        bucket_mib: Size of a bucket in MiB. The sender has two; `bucket_size` is the upper limit.
        timeout_s: Longest time in seconds to connect, and for one bucket, including the time in which the policy gathers its
            tensors and vLLM loads them.
        release_after_refit: Whether NeMo-RL calls `finalize` after every update, and connects again for the next one.

    Raises:
        ConfigError: A value is not possible, or the engine carries no host memory.
        RegistryError: There is no such engine, or it cannot be loaded.
        EngineUnavailableError: The engine cannot run on this machine.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        engine: str = "shm",
        options: Mapping[str, Any] | None = None,
        bucket_mib: float = 32,
        timeout_s: float = 120,
        release_after_refit: bool = False,
    ) -> None:
        self._name = f"{socket.gethostname()}-{os.getpid()}.{secrets.token_hex(2)}"
        self._timeout_s = timeout_s
        self._bucket_bytes = int(min(bucket_size, bucket_mib * (1 << 20))) // 64 * 64
        if self._bucket_bytes <= 0 or not timeout_s > 0:
            raise self._wrong(f"bucket_mib is {bucket_mib}, and timeout_s is {timeout_s}: both must be positive")
        self._engine = CheckpointEngineRegistry().create(engine, options)
        if "cpu" not in self._engine.capabilities.devices:
            raise self._wrong(f"{engine} does not carry host memory, as shm, gloo and filesystem do")
        if self._engine.capabilities.persistent and not release_after_refit:
            raise self._wrong(
                f"{engine} keeps the files of every update while it is connected: it needs release_after_refit: true"
            )
        self._ends: tuple[TensorSender, TensorReceiver] | None = None
        """Both ends, since `prepare` does not know this worker's; one is closed when the worker connects."""
        self._only_gathers = False
        """Whether this is a policy worker that sends nothing."""
        self._version = 0
        """Number of updates since the workers connected, which both sides count."""

    def prepare(self) -> dict[str, Any]:
        """Return this worker's addresses, and the session that it would open as policy worker 0, as JSON data.

        An earlier connection is closed.
        """
        self.finalize()
        sender = TensorSender(f"policy-{self._name}", self._engine, self._bucket_bytes, self._timeout_s)
        receiver = TensorReceiver(f"rollout-{self._name}", self._engine, self._timeout_s)
        self._ends = sender, receiver
        return {
            "name": self._name,
            "sender": sender.address(),
            "receiver": receiver.address(),
            "session": secrets.token_hex(8),
            "key": secrets.token_hex(32),
        }

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> None:
        """Connect policy worker 0 to all workers of vLLM, which call `init_rollout_process_group` at the same time.

        `metadata` has the results of `prepare`: first of the policy workers by rank, then of the workers of vLLM. Raises
        `PeerLostError`, `ProtocolError`, `DeadlineExceededError`, or the engine's errors.
        """
        if worker_rank == 0:
            self._engine.check(Deadline.after(self._timeout_s))
            sender, receiver = self._prepared()
            receiver.close()
            sender.connect(_topology(train_world_size, rollout_world_size, metadata))
        else:
            self.finalize()
            self._only_gathers = True

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,  # noqa: ARG002 - every worker receives the same
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],
    ) -> None:
        """Connect this worker of vLLM to policy worker 0. See `init_policy_process_group`."""
        sender, receiver = self._prepared()
        sender.close()
        receiver.connect(_topology(train_world_size, rollout_world_size, metadata))

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send `weights`, pairs of name and tensor, as the next version. Policy workers other than 0 only iterate over them.

        If the transfer fails, the rest of `weights` is still iterated over, since the other workers gather tensors with this one.
        Raises `PeerLostError`, `DeadlineExceededError`, `ClosedError` if it is not connected, or the engine's errors.
        """
        if self._only_gathers:
            for _ in weights:
                pass
            return
        sender, _ = self._prepared()
        self._version += 1
        await sender.send(_each(weights), self._version)

    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield names and tensors of the next version as they arrive. A list has a bucket of tensors, or one that is larger.

        A tensor is in host memory, and may be kept. Raises `CorruptBucketError` if bytes changed on their way, `PeerLostError`,
        `DeadlineExceededError`, `ProtocolError`, or `ClosedError` if it is not connected.
        """
        _, receiver = self._prepared()
        self._version += 1
        return receiver.blocks(self._version)

    def finalize(self) -> None:
        """Close the connection and free its memory."""
        ends, self._ends = self._ends or (), None
        self._only_gathers, self._version = False, 0
        for end in ends:
            end.close()

    def _prepared(self) -> tuple[TensorSender, TensorReceiver]:
        if self._ends is None:
            hint = "NeMo-RL prepares and connects all workers before it sends or receives weights, and again after an error."
            raise ClosedError("it is not connected.", part=self._name, hint=hint)
        return self._ends

    def _wrong(self, problem: str) -> ConfigError:
        hint = "Change policy.generation.refit_cfg, in the section of weightlane."
        return ConfigError(f"{problem}.", part=self._name, hint=hint)


def _topology(policies: int, rollouts: int, metadata: list[dict[str, Any]]) -> Topology:
    """The session of policy worker 0, the same on every worker."""
    first, receivers = metadata[0], metadata[policies : policies + rollouts]
    return Topology(
        first["session"],
        {f"policy-{first['name']}": first["sender"]},
        {f"rollout-{each['name']}": each["receiver"] for each in receivers},
        key=bytes.fromhex(first["key"]),
    )


async def _each(weights: Iterator[tuple[str, torch.Tensor]]) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor
