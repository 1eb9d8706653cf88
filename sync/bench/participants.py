"""The one place where the benchmark makes publishers, subscribers and coordinators: what they are asked to do, and when.

Everything here is the public interface of `weightlane.sync`, used as a training loop and a rollout use it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, Literal, get_args, get_origin

import torch

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.plugins import RunHooks

from ..codecs.delta import Patch
from ..config import SyncConfig
from ..coordinator import Coordinator
from ..coverage import Expectation, ExpectedTensor
from ..publisher import Publisher
from ..rendezvous import Rendezvous
from ..report import SyncReport
from ..roster import Replica
from ..staged_delta import IncomingDelta
from ..subscriber import Subscriber
from ..tensor_spec import LocalShard, TensorSpec
from .moments import Moments

SENDER = "trainer-0"
_BEFORE_THE_FIELD = {"integrity": "full", "codec": "dense"}
LOSSY = ("fp8", "int8")
"""Values of the setting ``quantise`` that are measured as codecs: dense versions of quantised weights."""
"""What a build does that does not let one choose."""


def offered(setting: str) -> tuple[str, ...]:
    """Values of the sync setting ``integrity`` or ``codec`` that this build offers."""
    field = SyncConfig.model_fields.get(setting)
    if field is None:
        return (_BEFORE_THE_FIELD[setting],)
    kind = field.annotation
    choices = get_args(kind) if get_origin(kind) is Literal else getattr(kind, "__members__", {}).values()
    return (*map(str, choices), *(LOSSY if setting == "codec" else ()))


def check_offered(setting: str, values: Sequence[str]) -> None:
    """Raise a `ConfigError` that says what this build offers unless it offers all `values`."""
    choices = offered(setting)
    for value in values:
        if value not in choices:
            raise ConfigError(
                f"this build offers no {setting} {value!r}.",
                part="benchmark",
                hint=f"It offers {' and '.join(choices)}.",
            )


def sync_config(*, codec: str, integrity: str, bucket_mib: float | None, deadline_s: float) -> SyncConfig:
    """Settings under which a row is measured: whatever fails ends the run instead of being tried again."""
    chosen: dict[str, Any] = {"deadline_s": deadline_s, "connect_timeout_s": deadline_s, "stall_s": deadline_s}
    chosen |= {"retries": 0, "quorum": 1.0}
    if bucket_mib is not None:
        chosen["bucket_mib"] = bucket_mib
    if codec in LOSSY:
        chosen["quantise"], codec = codec, "dense"
    fields = SyncConfig.model_fields
    chosen |= {key: value for key, value in (("codec", codec), ("integrity", integrity)) if key in fields}
    return SyncConfig(**chosen)


class SendingSide:
    """A row's publisher, in the sender's process.

    Args:
        rendezvous: Where the row's participants meet, as plain data.
        engine: Name of the checkpoint engine.
        options: Its options.
        config: The row's `SyncConfig`, as plain data.
        specs: What is carried.
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
            rank=0,
            world=1,
            specs=specs,
            shards=[LocalShard(spec, 0, tensors[spec.name].view(-1)) for spec in specs],
            engine=CheckpointEngineRegistry().create(engine, options),
            bucket_bytes=settings.bucket_bytes,
            deadline_s=settings.deadline_s,
            hooks=hooks,
            **_taken_by(Publisher, settings),
        )

    def publish(self, version: int, step_s: float) -> dict[str, float]:
        """Publish, let a step of `step_s` seconds pass, and pass the fence: when it began, and how long each call blocked."""
        started = time.monotonic()
        self._publisher.publish(version)
        publish_s = time.monotonic() - started
        time.sleep(step_s)
        before = time.monotonic()
        self._publisher.fence()
        return {"started": started, "publish_s": publish_s, "fence_s": time.monotonic() - before}

    def close(self) -> None:
        """Leave."""
        self._publisher.close()


class ReceivingSide:
    """A row's subscriber, in a receiver's process. Arguments as for `SendingSide`, and the receiver's `name`."""

    def __init__(
        self,
        name: str,
        rendezvous: Mapping[str, Any],
        engine: str,
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        specs: Sequence[TensorSpec],
    ) -> None:
        settings = SyncConfig.model_validate(config)
        hooks = RunHooks()
        self.moments = Moments()
        hooks.register(self.moments)
        expected = {spec.name: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for spec in specs}
        self._subscriber = Subscriber(
            name,
            rendezvous,
            engine,
            options,
            Expectation(expected),
            hooks=hooks,
            **_taken_by(Subscriber, settings),
        )
        self._live: dict[str, torch.Tensor] = {}
        self._quantised = settings.quantise != "none"

    def commit(self, version: int, live: Mapping[str, torch.Tensor], pause: Lock) -> tuple[float, float]:
        """Copy the staged version over the `live` parameters, holding `pause` from the first byte to the last.

        Where the staged tensors are is found out before: nothing needs to stand still for that. Of a delta, only what has changed
        is written; what came quantised is restored tensor by tensor. Returns `time.monotonic` when the pause began and
        when it ended.
        """
        if not self._live:
            self._live = dict(live)
            if not self._quantised:
                self._subscriber.prepare_delta = self._prepared
        if (delta := self._subscriber.take_delta(version)) is not None:
            with pause:
                started = time.monotonic()
                for patch, target, _ in delta:
                    patch.apply_(target)
                return started, time.monotonic()
        staged = self._subscriber.take(version)
        if self._quantised:
            with pause:
                started = time.monotonic()
                for name, tensor in live.items():
                    tensor.copy_(staged[name])
                ended = time.monotonic()
            self._subscriber.release(version)
            return started, ended
        into, source = list(live.values()), [staged[name] for name in live]
        with pause:
            started = time.monotonic()
            torch._foreach_copy_(into, source)
            ended = time.monotonic()
        self._subscriber.release(version)
        return started, ended

    def _prepared(self, delta: IncomingDelta) -> list[tuple[Patch, torch.Tensor, torch.Tensor]]:
        """Patches, what each is applied to, and the values that are there now, as a replica needs them to take it back."""
        prepared = []
        for segment, patch in delta.patches:
            flat = self._live[delta.manifest.specs[segment.tensor].name].view(-1)
            target = flat[segment.start : segment.start + segment.numel]
            prepared.append((patch, target, target.index_select(0, patch.positions_and_values()[0])))
        return prepared

    def close(self) -> None:
        """Leave."""
        self._subscriber.close()


class Meeting:
    """A row's rendezvous and coordinator, in the benchmark's own process.

    Args:
        config: The row's settings.
        replicas: Who commits.
    """

    def __init__(self, config: SyncConfig, replicas: Sequence[Replica]) -> None:
        self._rendezvous = Rendezvous.host(config.host, config.port)
        self.address = self._rendezvous.address.to_plain()
        self.coordinator = Coordinator(self._rendezvous, [SENDER], replicas, config, RunHooks())

    async def sync(self, version: int) -> SyncReport:
        """Carry `version` into service everywhere, or raise why not."""
        return await self.coordinator.sync(version)

    def close(self) -> None:
        """Let everybody go."""
        self.coordinator.close()


def _taken_by(kind: type, settings: SyncConfig) -> dict[str, Any]:
    """Those of the row's choices that are arguments of `kind`'s constructor."""
    arguments = inspect.signature(kind).parameters
    plain = settings.model_dump()
    return {key: plain[key] for key in ("codec", "integrity", "quantise") if key in arguments and key in plain}
