"""The benchmark's publishers, subscribers and coordinators, used as a training loop and a rollout use them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, get_args

import torch

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime
from weightlane.ckpt_engines.runtime.tensor_bytes import copy_bytes, narrow_offsets, put_elements
from weightlane.plugins import RunHooks, hookimpl
from weightlane.sync.codecs.delta.staged_delta import IncomingDelta
from weightlane.sync.config import CodecPolicy, Integrity, Quantise, SyncConfig
from weightlane.sync.control.coordinator.coordinator import Coordinator
from weightlane.sync.control.coordinator.replicas import Replica
from weightlane.sync.control.rendezvous import Rendezvous
from weightlane.sync.publisher import Publisher
from weightlane.sync.subscriber import Subscriber
from weightlane.sync.version.box import positions_in
from weightlane.sync.version.expectation import Expectation, ExpectedTensor
from weightlane.sync.version.tensor_spec import LocalShard, TensorSpec

SENDER = "trainer-0"
_KEPT_VERSIONS = 4
"""Nobody reads older versions; two may be in progress."""
LOSSY = tuple(scheme for scheme in get_args(Quantise) if scheme != "none")
"""Values of the setting ``quantise``. The benchmark measures them as codecs: dense versions of quantised weights."""
_OFFERED = {"integrity": get_args(Integrity), "codec": (*get_args(CodecPolicy), *LOSSY)}


def check_offered(setting: str, values: Sequence[str]) -> None:
    """Raise a `ConfigError` unless all `values` are possible for `setting`, which is ``integrity`` or ``codec``."""
    choices = _OFFERED[setting]
    for value in values:
        if value not in choices:
            raise ConfigError(
                f"there is no {setting} {value!r}.", part="benchmark", hint=f"There are {' and '.join(choices)}."
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


class Moments:
    """An observer that records when events of each version happened in its process, on the clock that all processes share."""

    def __init__(self) -> None:
        self._recorded: dict[int, dict[str, float]] = {}

    def of(self, version: int) -> dict[str, float]:
        """Return the moments of `version`: ``snapshot_ended``, ``snapshot_s``, ``send_started``, ``send_ended``, ``staged``."""
        return dict(self._recorded.get(version, {}))

    @hookimpl
    def snapshot_taken(self, version: int, facts: Mapping[str, Any]) -> None:
        """Record that the sender's parameters may change."""
        self._record(version, snapshot_ended=time.monotonic(), snapshot_s=facts["seconds"])

    @hookimpl
    def bucket_sent(self, version: int, facts: Mapping[str, Any]) -> None:
        """Record when the engine sent a bucket, which took ``facts["seconds"]``."""
        now = time.monotonic()
        before = self._recorded.get(version, {})
        self._record(version, send_started=before.get("send_started", now - facts["seconds"]), send_ended=now)

    @hookimpl
    def version_staged(self, version: int) -> None:
        """Record that the version is complete in this receiver."""
        self._record(version, staged=time.monotonic())

    def _record(self, version: int, **moments: float) -> None:
        self._recorded.setdefault(version, {}).update(moments)
        for old in sorted(self._recorded)[:-_KEPT_VERSIONS]:
            self._recorded.pop(old, None)  # another thread may have done so


class SendingSide:
    """A row's publisher, in the sender's process. `tensors` are the live parameters by name."""

    def __init__(
        self,
        rendezvous: Mapping[str, Any],
        engine: str,
        options: Mapping[str, Any],
        settings: SyncConfig,
        specs: Sequence[TensorSpec],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        hooks, self.moments = RunHooks(), Moments()
        hooks.register(self.moments)
        self._publisher = Publisher(
            SENDER,
            rendezvous,
            shards=[LocalShard.whole(spec, tensors[spec.name]) for spec in specs],
            engine=CheckpointEngineRegistry().create(engine, options),
            config=settings,
            hooks=hooks,
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
    """A row's subscriber, in a receiver's process. `runtime` is that of the parameters' device."""

    def __init__(
        self,
        name: str,
        rendezvous: Mapping[str, Any],
        engine: str,
        options: Mapping[str, Any],
        settings: SyncConfig,
        specs: Sequence[TensorSpec],
        runtime: DeviceRuntime,
    ) -> None:
        hooks, self.moments = RunHooks(), Moments()
        hooks.register(self.moments)
        self._runtime = runtime
        expected = {spec.name: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for spec in specs}
        self._subscriber = Subscriber(
            name, rendezvous, engine, options, Expectation(expected), device=runtime.device, hooks=hooks
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
            moved = patch.to(self._runtime.device)
            within, flips = moved.positions.long(), moved.flips
            target = self._live[part.spec.name].view(-1).view(flips.dtype)
            positions = positions_in(part.spec.shape, part.box, within)
            old = target.index_select(0, positions)
            offsets = narrow_offsets(positions, target.numel()) if target.is_cpu else positions
            prepared.append((target, offsets, old ^ flips, old))
        return prepared

    def close(self) -> None:
        """Close the subscriber."""
        self._subscriber.close()


def start_coordinator(config: SyncConfig, replicas: Sequence[Replica]) -> tuple[Coordinator, dict[str, Any]]:
    """Start a row's coordinator in this process. Returns it, and the address of its rendezvous as plain data."""
    rendezvous = Rendezvous.host(config.host, config.port)
    return Coordinator(rendezvous, [SENDER], replicas, config, RunHooks()), rendezvous.address.to_plain()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
