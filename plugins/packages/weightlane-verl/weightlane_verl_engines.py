"""The checkpoint engine `verl`: carries weightlane's buckets over any engine of verl's own `CheckpointEngineRegistry`.

Each sender and its receivers are a process group of verl's: the sender is trainer rank 0, the receivers are the rollout workers.
A bucket is one update of verl's, of a single tensor of bytes. What verl's manager sends by Ray, and the messages about buckets,
go over weightlane's channels.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import importlib.util
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from pydantic import Field

from weightlane.ckpt_engines import (
    Bucket,
    Capabilities,
    CheckpointEngine,
    ConfigError,
    Deadline,
    Delivery,
    EngineConfig,
    ProtocolError,
    Topology,
    TransportError,
    WeightlaneError,
    WeightReceiver,
    WeightSender,
    toolkit,
)

__all__ = ["VerlConfig", "VerlEngine"]


class VerlConfig(EngineConfig):
    """Options of ``verl``."""

    backend: str = Field(description="Name of the engine in verl's registry, nixl for example.")
    custom_backend_module: str = Field("", description="Module whose import registers that engine, as in verl.")
    bucket_mib: int = Field(64, ge=1, description="Size in MiB of a buffer of verl's engine, which has two or more.")
    engine_kwargs: dict[str, Any] = Field({}, description="Further arguments of verl's engine.")
    host: str = Field("127.0.0.1", description="Address of this machine on which a sender listens for receivers.")


class _Member:
    """One engine of verl's, as a member of one process group. Makes one call at a time, in the event loop of that engine.

    Calls end by their deadline and when `life` is closed. A wait of verl's own that cannot be cancelled continues in its thread.
    """

    def __init__(
        self,
        config: VerlConfig,
        device: torch.device,
        life: toolkit.Lifecycle,
        deadline: Deadline,
        peer: str,
        *,
        is_master: bool,
    ) -> None:
        self._life, self._name, self._runtime = life, config.backend, toolkit.runtime_of(device)
        self._stream = self._runtime.stream_for(self)
        self._busy = threading.Lock()
        self._task: asyncio.Task[Any] | None = None

        def make() -> Any:
            role = {"is_master": True} if is_master else {}
            try:
                made = _verl_class(config)(bucket_size=config.bucket_mib << 20, **role, **config.engine_kwargs)
            except TypeError as error:
                hint = "Look at the engine's option engine_kwargs."
                raise ConfigError(f"verl's {config.backend}: {error}.", part=life.part, hint=hint) from error
            if life.closed or deadline.expired:  # nobody waits for it any more
                _close_sockets(made)
            return made

        self.engine = self.call(make, deadline, "verl's engine to be made", peer)
        self._loop = asyncio.new_event_loop()

    def prepare(self, deadline: Deadline, peer: str) -> Any:
        """Return what the engine has prepared for its peers. Raises as `call`."""
        return self.call(self.engine.prepare, deadline, "verl's engine to prepare", peer)

    def enter(self, arguments: Mapping[str, Any], deadline: Deadline, peer: str) -> None:
        """Enter the process group that `arguments` describe. Raises as `call`."""
        self.call(partial(self.engine.init_process_group, **arguments), deadline, "verl's process group", peer)

    def call(self, function: Callable[[], Any], deadline: Deadline, what: str, peer: str) -> Any:
        """Return the result of `function`, a blocking call of the engine's.

        Raises `TransportError` for whatever verl raises, `DeadlineExceededError` or `ClosedError`.
        """

        def make_call() -> Any:
            try:
                with self._busy, self._runtime.on(self._stream):
                    return function()
            except WeightlaneError:
                raise
            except (Exception, SystemExit) as error:  # verl ends the process when a transfer fails
                text = f"verl's {self._name} failed: {type(error).__name__}: {error}."
                raise TransportError(text, part=self._life.part, peer=peer) from error

        return toolkit.run_bounded(make_call, self._life, deadline, what, peer=peer)

    def run(self, coroutine: Coroutine[Any, Any, Any], deadline: Deadline, what: str, peer: str) -> Any:
        """Return the result of `coroutine`, once the device has done what that has started. Raises as `call`."""

        def complete() -> Any:
            self._task = self._loop.create_task(coroutine)
            result = self._loop.run_until_complete(self._task)
            self._runtime.synchronize(self._stream)
            return result

        try:
            return self.call(complete, deadline, what, peer)
        except BaseException:
            self._cancel()
            raise

    def wait_for(self, event: Any, deadline: Deadline, peer: str) -> None:
        """Wait until `event`, a bucket's ``after``, has passed. verl knows of no events, and has streams of its own."""
        if event is not None:
            toolkit.poll_until(event.query, self._life, deadline, "earlier work on the bucket", peer=peer)

    def fill(self, bucket: Bucket, data: torch.Tensor, deadline: Deadline, peer: str) -> None:
        """Copy `data` to `bucket`."""
        self.wait_for(bucket.after, deadline, peer)
        with self._runtime.on(self._stream):
            bucket.data.copy_(data)
            self._runtime.synchronize(self._stream)

    def _cancel(self) -> None:
        if (task := self._task) is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def release(self) -> None:
        """Cancel a running call. When it has ended, free what the engine has, without being waited for."""

        def finalize() -> None:
            with self._busy, contextlib.suppress(Exception), self._runtime.on(self._stream):
                self.engine.finalize()
            _close_sockets(self.engine)
            self.engine = self._task = None  # some of it is freed only now
            self._loop.close()

        self._cancel()
        threading.Thread(target=finalize, name="weightlane-verl-finalize", daemon=True).start()


def _close_sockets(engine: Any) -> None:
    """Close the ZeroMQ sockets of an engine.

    verl leaves some open. Python's garbage collector may then find their context before them, and wait for them for ever, in
    whichever thread it happens to run.
    """
    for each in _sockets(engine):
        each.close(linger=0)


def _sockets(owner: Any, depth: int = 2) -> Iterator[Any]:
    """ZeroMQ sockets that `owner`, or an object in it, has."""
    for value in list(vars(owner).values()):
        for each in value.values() if isinstance(value, dict) else [value]:
            if (zmq := sys.modules.get("zmq")) and isinstance(each, zmq.Socket):
                yield each
            elif depth and hasattr(each, "__dict__") and not isinstance(each, type | ModuleType):
                yield from _sockets(each, depth - 1)


class VerlSender(toolkit.PairedSender):
    """The sending half: trainer rank 0 of its group."""

    def __init__(self, part: str, config: VerlConfig, device: torch.device) -> None:
        super().__init__(part)
        self._config, self._device = config, device
        self._member: _Member | None = None

    def connect(self, topology: Topology, channels: Mapping[str, toolkit.Channel], deadline: Deadline) -> None:
        """Collect what the engines have prepared, and send each receiver its part of the topology that verl makes of that."""
        with self._life.call():
            super().connect(topology, channels, deadline)
            if not self._channels:
                return
            peers = ", ".join(self._channels)
            member = _Member(self._config, self._device, self._life, deadline, peers, is_master=True)
            self._member = member
            prepared = [member.prepare(deadline, peers)]
            for channel in self._channels.values():
                said = channel.receive_json(deadline, "its receiver to prepare verl's engine")
                prepared.append(_from_plain(said["prepared"], member.engine))
            own, others = type(member.engine).build_topology(1, len(channels), prepared)
            (arguments,) = self._of_each(own, 1)
            for channel, theirs in zip(self._channels.values(), self._of_each(others, len(channels)), strict=True):
                channel.send_json({"topology": _to_plain(theirs)}, deadline)
            member.enter(arguments, deadline, peers)

    def send(self, channels: Mapping[str, toolkit.Channel], bucket: Bucket, deadline: Deadline) -> None:
        """Announce `bucket`, send it as an update of verl's, and wait until every receiver has copied it."""
        if channels.keys() != self._channels.keys():
            raise ProtocolError("it sends every bucket to all of its receivers.", part=self._life.part)
        toolkit.announce(channels, bucket, deadline)
        toolkit.await_acknowledgements(channels, bucket, deadline)
        if bucket.nbytes and (member := self._member) is not None:
            peers, weights = ", ".join(channels), iter([("bucket", bucket.data)])
            member.wait_for(bucket.after, deadline, peers)
            sent = member.engine.send_weights(weights, global_steps=bucket.version)
            member.run(sent, deadline, f"verl to send {bucket}", peers)
            toolkit.await_acknowledgements(channels, bucket, deadline)

    def _of_each(self, arguments: Mapping[str, Sequence[Any]], workers: int) -> list[dict[str, Any]]:
        """Arguments of `init_process_group` by worker, without the name of the method, which verl's manager sets itself."""
        if wrong := [key for key, values in arguments.items() if len(values) != workers]:
            text = (
                f"verl's {self._config.backend} has not one {wrong[0]} for each of {workers} workers in its topology."
            )
            raise ProtocolError(
                text, part=self._life.part, hint="verl's own manager would fail, too: see build_topology."
            )
        return [{key: arguments[key][place] for key in arguments if key != "method"} for place in range(workers)]

    def _release(self) -> None:
        if self._member is not None:
            self._member.release()


class VerlReceiver(toolkit.PairedReceiver):
    """The receiving half: a rollout worker in the group of each of its senders."""

    def __init__(self, part: str, config: VerlConfig, device: torch.device) -> None:
        super().__init__(part)
        self._config, self._device = config, device
        self._members: dict[str, _Member] = {}

    def connect(self, topology: Topology, channels: Mapping[str, toolkit.Channel], deadline: Deadline) -> None:
        """Prepare an engine for each sender, and enter its group; all receivers do that in the same order."""
        with self._life.call():
            super().connect(topology, channels, deadline)
            for sender, channel in self._channels.items():
                member = _Member(self._config, self._device, self._life, deadline, sender, is_master=False)
                self._members[sender] = member
                channel.send_json({"prepared": _to_plain(member.prepare(deadline, sender))}, deadline)
            for sender, member in self._members.items():
                said = self._channels[sender].receive_json(deadline, "verl's topology from its sender")
                member.enter(_from_plain(said["topology"], member.engine), deadline, sender)

    def receive(self, channel: toolkit.Channel, bucket: Bucket, deadline: Deadline) -> None:
        """Fill `bucket` with the tensor of the update that its sender has announced."""
        toolkit.expect(channel, bucket, deadline)
        toolkit.acknowledge(channel, bucket, deadline)
        if not bucket.nbytes:
            return
        member = self._members[channel.peer]
        received = member.run(_tensors(member.engine, bucket.version), deadline, str(bucket), channel.peer)
        if [(tensor.dtype, tensor.numel()) for tensor in received] != [(torch.uint8, bucket.nbytes)]:
            found = ", ".join(f"{tensor.numel()} elements of {tensor.dtype}" for tensor in received)
            text = f"verl's {self._config.backend} made {bucket} of {bucket.nbytes} bytes to {found or 'nothing'}."
            raise ProtocolError(text, part=self._life.part, peer=channel.peer)
        member.fill(bucket, received[0], deadline, channel.peer)
        toolkit.acknowledge(channel, bucket, deadline)

    def _release(self) -> None:
        for member in self._members.values():
            member.release()


async def _tensors(engine: Any, version: int) -> list[torch.Tensor]:
    """Copies of the tensors of one update: verl's are valid until the next one is requested."""
    return [tensor.clone() async for _, tensor in engine.receive_weights(global_steps=version)]


def _to_plain(value: Any) -> Any:
    """Return JSON data for an object of verl's: dataclasses of the engine's module, lists, mappings, bytes and plain values."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    if isinstance(value, dict):
        return {"mapping": {name: _to_plain(each) for name, each in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"dataclass": type(value).__name__, "values": values}
    raise ProtocolError(f"verl's engine has prepared a {type(value).__name__}, which cannot be sent.", part="verl")


def _from_plain(plain: Any, engine: Any) -> Any:
    """Return the object of `engine`'s module that `_to_plain` has described. No code is named, and nothing is unpickled."""
    if isinstance(plain, list):
        return [_from_plain(each, engine) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if "bytes" in plain:
        return base64.b64decode(plain["bytes"])
    if "mapping" in plain:
        return {name: _from_plain(each, engine) for name, each in plain["mapping"].items()}
    named = (getattr(sys.modules[cls.__module__], plain["dataclass"], None) for cls in type(engine).__mro__)
    found = next((each for each in named if isinstance(each, type) and dataclasses.is_dataclass(each)), None)
    if found is None:
        raise ProtocolError(
            f"verl's engine has no {plain['dataclass']} here.", part="verl", hint="Use one verl everywhere."
        )
    return found(**{name: _from_plain(each, engine) for name, each in plain["values"].items()})


def _verl_class(config: VerlConfig) -> Any:
    """Return the class of verl's engine. Raises `ConfigError` when verl has none of that name."""
    from verl.checkpoint_engine import CheckpointEngineRegistry  # noqa: PLC0415 - takes seconds
    from verl.utils.import_utils import import_external_libs  # noqa: PLC0415

    try:
        import_external_libs(config.custom_backend_module or None)
        return CheckpointEngineRegistry.get(config.backend)
    except (ImportError, ValueError) as error:
        hint = "Look at the engine's options backend and custom_backend_module."
        raise ConfigError(f"verl has no engine {config.backend}: {error}.", part="verl", hint=hint) from error


class VerlEngine(CheckpointEngine):
    """Engine over one of verl's. It runs on the devices on which verl's engine does."""

    api_version = 2
    config: VerlConfig
    config_type = VerlConfig
    capabilities = Capabilities(devices=frozenset({"cpu", "cuda"}), delivery=frozenset({Delivery.BROADCAST}))

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if importlib.util.find_spec("verl") else "verl is not installed"

    def check(self, deadline: Deadline) -> None:  # noqa: ARG002 - an import cannot be ended
        """Raise `ConfigError` when verl has no such engine."""
        _verl_class(self.config)

    def socket_factory(self, name: str) -> toolkit.SocketFactory:  # noqa: ARG002
        """See `CheckpointEngine.socket_factory`."""
        return toolkit.TcpSocketFactory(self.config.host)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return VerlSender(f"verl sender {name}", self.config, device)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return VerlReceiver(f"verl receiver {name}", self.config, device)
