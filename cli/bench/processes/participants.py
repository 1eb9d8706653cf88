"""The benchmark's publishers, subscribers and coordinators, used as a training loop and a rollout use them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, get_args

import torch

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime
from weightlane.ckpt_engines.runtime.host_copies import copy_bytes, narrow_offsets, put_elements
from weightlane.plugins import RunHooks
from weightlane.sync.codecs.delta.staged_delta import IncomingDelta
from weightlane.sync.config import CodecPolicy, Integrity, Quantise, SyncConfig
from weightlane.sync.control.coordinator.coordinator import Coordinator
from weightlane.sync.control.coordinator.replica import Replica
from weightlane.sync.control.coordinator.report import SyncReport
from weightlane.sync.control.rendezvous import Rendezvous
from weightlane.sync.publisher import Publisher
from weightlane.sync.subscriber import Subscriber
from weightlane.sync.version.box import positions_in
from weightlane.sync.version.expectation import Expectation, ExpectedTensor
from weightlane.sync.version.tensor_spec import LocalShard, TensorSpec

from .moments import Moments

SENDER = "trainer-0"
LOSSY = tuple(scheme for scheme in get_args(Quantise) if scheme != "none")
"""Values of the setting ``quantise``. The benchmark measures them as codecs: dense versions of quantised weights."""
_OFFERED = {"integrity": get_args(Integrity), "codec": (*get_args(CodecPolicy), *LOSSY)}


def check_offered(setting: str, values: Sequence[str]) -> None:
    """Raise a `ConfigError` unless all `values` are possible for `setting`, which is ``integrity`` or ``codec``."""
    choices = _OFFERED[setting]
    for value in values:
        if value not in choices:
            raise ConfigError(
                f"there is no {setting} {value!r}.",
                part="benchmark",
                hint=f"There are {' and '.join(choices)}.",
            )


def sync_config(*, codec: str, integrity: str, bucket_mib: float | None, deadline_s: float) -> SyncConfig:
    """Return the settings of a row. Nothing is retried: any failure ends the run."""
    chosen: dict[str, Any] = {"deadline_s": deadline_s, "connect_timeout_s": deadline_s, "stall_s": deadline_s}
    chosen |= {"retries": 0, "quorum": 1.0}
    if bucket_mib is not None:
        chosen["bucket_mib"] = bucket_mib
    if codec in LOSSY:
        chosen["quantise"], codec = codec, "dense"
    return SyncConfig(**chosen, codec=codec, integrity=integrity)


class SendingSide:
    """A row's publisher, in the sender's process.

    Args:
        rendezvous: Address of the row's rendezvous, as plain data.
        engine: Name of the checkpoint engine.
        options: The engine's options.
        config: The row's `SyncConfig`, as plain data.
        specs: The tensors.
        tensors: The live parameters by name.
    """

    def __init__(
        self,
        rendezvous: Mapping[str, Any],
        engine: str,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        specs: Sequence[TensorSpec],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        settings = SyncConfig.model_validate(config)
        hooks = RunHooks()
        self.moments = Moments()
        hooks.register(self.moments)
        self._publisher = Publisher(
            SENDER,
            rendezvous,
            shards=[LocalShard.whole(spec, tensors[spec.name]) for spec in specs],
            engine=CheckpointEngineRegistry().create(engine, options),
            bucket_bytes=settings.bucket_bytes,
            deadline_s=settings.deadline_s,
            hooks=hooks,
            codec=settings.codec,
            integrity=settings.integrity,
            quantise=settings.quantise,
        )

    def publish(self, version: int, step_s: float) -> dict[str, float]:
        """Publish, sleep for a step of `step_s` seconds, and pass the fence. Returns the start and how long each call blocked."""
        started = time.monotonic()
        self._publisher.publish(version)
        publish_s = time.monotonic() - started
        time.sleep(step_s)
        before = time.monotonic()
        self._publisher.fence()
        return {"started": started, "publish_s": publish_s, "fence_s": time.monotonic() - before}

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()


class ReceivingSide:
    """A row's subscriber, in a receiver's process.

    Args are those of `SendingSide`, with the subscriber's `name` and the `runtime` of the parameters' device.
    """

    def __init__(
        self,
        name: str,
        rendezvous: Mapping[str, Any],
        engine: str,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        specs: Sequence[TensorSpec],
        runtime: DeviceRuntime,
    ) -> None:
        settings = SyncConfig.model_validate(config)
        hooks = RunHooks()
        self.moments = Moments()
        hooks.register(self.moments)
        self._runtime = runtime
        expected = {spec.name: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for spec in specs}
        self._subscriber = Subscriber(
            name,
            rendezvous,
            engine,
            options,
            Expectation(expected),
            device=runtime.device,
            hooks=hooks,
        )
        self._live: dict[str, torch.Tensor] = {}
        self._quantised = settings.quantise != "none"

    def commit(self, version: int, live: Mapping[str, torch.Tensor], pause: Lock) -> tuple[float, float]:
        """Copy the staged version over the `live` parameters, holding `pause` from the first byte to the last.

        The staged tensors are located before that, since decoding need not stop for it. Of a delta only the changed elements are
        written. Quantised tensors are restored one by one. Returns `time.monotonic` at the start and at the end of the pause.
        """
        if not self._live:
            self._live = dict(live)
            if not self._quantised:
                self._subscriber.prepare_delta = self._prepare
        if (delta := self._subscriber.take_delta(version)) is not None:
            with pause:
                started = time.monotonic()
                for target, offsets, new, _ in delta:
                    if target.is_cpu:
                        put_elements(target, offsets, new)
                    else:
                        target.index_copy_(0, offsets, new)
                self._runtime.synchronize()
                return started, time.monotonic()
        staged = self._subscriber.take(version)
        copies = [] if self._quantised else [(_flat_bytes(live[name]), _flat_bytes(staged[name])) for name in live]
        with pause:
            started = time.monotonic()
            for target, source in copies:
                copy_bytes(target, source)
            for name in live if self._quantised else ():
                live[name].copy_(staged[name])
            self._runtime.synchronize()
            ended = time.monotonic()
        self._subscriber.release(version)
        return started, ended

    def _prepare(self, delta: IncomingDelta) -> list[tuple[torch.Tensor, ...]]:
        """Return target, offsets, new values and old values of each segment. A replica keeps the old ones to roll back."""
        prepared: list[tuple[torch.Tensor, ...]] = []
        for segment, patch in delta.patches:
            part = delta.where(segment)
            within, flips = (part.to(self._runtime.device) for part in patch.positions_and_flips())
            target = self._live[part.spec.name].view(-1).view(flips.dtype)
            positions = positions_in(part.spec.shape, part.box, within)
            old = target.index_select(0, positions)
            offsets = narrow_offsets(positions, target.numel()) if target.is_cpu else positions
            prepared.append((target, offsets, old ^ flips, old))
        return prepared

    def close(self) -> None:
        """Close the subscriber."""
        self._subscriber.close()


class CoordinatingSide:
    """A row's rendezvous and coordinator, in the benchmark's own process.

    Args:
        config: The row's settings.
        replicas: The replicas that commit.
    """

    def __init__(self, config: SyncConfig, replicas: Sequence[Replica]) -> None:
        self._rendezvous = Rendezvous.host(config.host, config.port)
        self.address = self._rendezvous.address.to_plain()
        self.coordinator = Coordinator(self._rendezvous, [SENDER], replicas, config, RunHooks())

    async def sync(self, version: int) -> SyncReport:
        """Sync `version` to all replicas. Raises the coordinator's errors."""
        return await self.coordinator.sync(version)

    def close(self) -> None:
        """Close the coordinator, which dismisses all participants."""
        self.coordinator.close()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
