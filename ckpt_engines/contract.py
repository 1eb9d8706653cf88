"""The engine contract: what a checkpoint engine is, and what the framework promises it.

A checkpoint engine moves opaque byte buckets from one sender to some receivers. It knows nothing of tensors, versions of a
model, codecs or RL; it starts no threads, keeps no queue and retries nothing, because the framework does all of that once
for every engine. It consists of a class (`CheckpointEngine`) and two halves (`WeightSender`, `WeightReceiver`), each of them
complete.

The life of a connection, tagged by the side that runs each step:

    1. [sender, receiver]  ``address()``                       plain data, exchanged by the framework
    2. [sender, receiver]  ``connect(topology, ...)``           all sides at the same time, under one deadline
    3. [sender]            ``send(bucket, receivers, ...)``     } once per bucket, in the same order on both sides;
       [receiver]          ``receive(bucket, sender, ...)``     } the receiver knows each bucket's size beforehand
    4. [sender, receiver]  ``close()``                          any time, from any thread, more than once

Two things are optional. ``CheckpointEngine.allocate`` gives memory from which `send` is cheapest; it belongs to the engine, so
that it outlives connections. And an engine that declares `Capabilities.views` lets receivers look at buckets where they lie
instead of copying them, if the sender says that the bucket is ``lasting``:

    3. [sender]            ``send(lasting bucket, ...)``       } once per bucket, as above; the receiver may also
       [receiver]          ``view(bucket, sender, ...)``       } ``receive`` it
       [receiver]          ``release(version)``                it looks at none of the version's buckets any more
       [sender]            ``reclaim(version, deadline)``      waits until that is true of every receiver

After any error the framework closes both halves and starts again at step 1 with new ones and a new session name: an engine
never has to resume a broken connection.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import torch
from pydantic import BaseModel, ConfigDict, field_validator

from ._field_docs import document_fields
from .deadline import Deadline
from .errors import EngineContractError, ProtocolError

API_VERSION = 1
"""Version of this contract. An engine declares the one it was written for; the registry refuses any other."""

_IN_NO_NAME = re.compile("[\0\ud800-\udfff]")

Address = Mapping[str, Any]
"""Where a half can be reached: JSON-representable, engine-specific, never pickled."""


class Delivery(StrEnum):
    """How one bucket reaches several receivers."""

    BROADCAST = "broadcast"
    """One send reaches every receiver of the topology."""
    POINT_TO_POINT = "point-to-point"
    """A send may name any subset of the receivers."""
    STORE = "store"
    """A send writes to a place from which receivers read when they like."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, as data. The framework asks these and never an engine's name."""

    devices: frozenset[str]
    """torch device types whose memory a bucket may live in, e.g. ``{"cpu"}``."""
    delivery: frozenset[Delivery]
    """Every way of delivery the engine supports; at least one."""
    persistent: bool = False
    """Buckets outlive the sender process."""
    elastic: bool = False
    """Receivers may join or leave without a new connection of the others."""
    same_host_only: bool = False
    """Both halves must run on one host. The sender's address says which, and a receiver on another refuses it in words."""
    zero_copy: bool = False
    """Memory from `CheckpointEngine.allocate` is sent without another copy on the sender's side."""
    views: bool = False
    """Receivers can look at a lasting bucket in the sender's memory: `WeightReceiver.view`."""

    def __post_init__(self) -> None:
        """Refuse what is no declaration: a text in place of a set would become a set of its letters."""
        for name, example in (("devices", '{"cpu"}'), ("delivery", "{Delivery.BROADCAST}")):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, AbstractSet) or not values:
                raise _wrong_capability(name, values, f"{name}=frozenset({example}): a set, with at least one member")
            object.__setattr__(self, name, frozenset(values))
        if wrong := [device for device in self.devices if not (isinstance(device, str) and device)]:
            raise _wrong_capability("devices", wrong[0], 'torch device types, such as frozenset({"cpu"})')
        try:
            object.__setattr__(self, "delivery", frozenset(map(Delivery, self.delivery)))
        except ValueError as error:
            known = ", ".join(f"Delivery.{item.name}" for item in Delivery)
            raise _wrong_capability("delivery", set(self.delivery), f"a set of {known}") from error
        for field in fields(self)[2:]:
            if not isinstance(getattr(self, field.name), bool):
                raise _wrong_capability(field.name, getattr(self, field.name), f"{field.name}=True, or leave it out")


def _wrong_capability(name: str, value: object, instead: str) -> EngineContractError:
    return EngineContractError(f"{name} is {value!r}.", part="Capabilities", hint=f"Write {instead}.")


class EngineConfig(BaseModel):
    """Base of an engine's typed options; the framework builds it from the user's ``checkpoint_engine.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_a_name_to_the_system(cls, value: Any) -> Any:
        """No path, host or interface has these characters, and the system's calls fail for them in ways of their own."""
        if isinstance(value, str) and _IN_NO_NAME.search(value):
            raise ValueError("holds a character that no name can have")
        return value


@dataclass(frozen=True, slots=True)
class Topology:
    """Who takes part in one connection."""

    session: str
    """Fresh for every connection attempt, ``[a-z0-9-]+``: safe as part of a key or a file name."""
    senders: Mapping[str, Address]
    """Address by name, in sending order."""
    receivers: Mapping[str, Address]
    """Address by name; the order is the same on every side and may serve as rank order."""
    key: bytes = b""
    """Secret of this session that its members alone know, for engines that let peers prove themselves. Never send it."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """Which part of a file a bucket is, where a persistent engine keeps several in one: what they hold is not to be torn."""

    first: int
    """Index of the bucket that the file begins with and is called after; the others follow it without a gap."""
    offset: int
    """Bytes of the file's buckets before this one."""
    total: int
    """Bytes of all of them."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One contiguous run of bytes to send, or to fill.

    `data` is a contiguous one-dimensional uint8 tensor of exactly the bucket's size on one of the engine's devices.
    """

    version: int
    """Weight version the bucket belongs to; with `index` it names the bucket within a session."""
    index: int
    """Position in the version, from 0."""
    data: torch.Tensor
    """The bytes, or where they go: contiguous uint8 of one dimension, on one of the engine's devices."""
    lasting: bool = False
    """Said by the sender: the bytes stay as they are until `WeightSender.reclaim` of the version has returned, so receivers may
    look at them in place. Only if the engine declares `Capabilities.views`."""
    part: FilePart | None = None
    """Said on both sides, to persistent engines only; None for a bucket with a file of its own."""

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8 or self.data.dim() != 1 or not self.data.is_contiguous():
            raise ProtocolError(
                f"bucket {self.index} is {self.data.dtype} of shape {tuple(self.data.shape)},"
                " not contiguous one-dimensional uint8.",
                part="bucket",
            )

    @property
    def nbytes(self) -> int:
        """Size in bytes; may be 0."""
        return self.data.numel()


def bucket_file_name(index: int) -> str:
    """Name of the file that begins with bucket `index`, in a persistent engine; `VersionFiles` documents refer to it."""
    return f"bucket-{index:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """How a persistent engine stores a version so that other tools can read it. The engine need not understand it.

    The file of a bucket is its prefix followed by its bytes, and is then a complete safetensors file called `bucket_file_name`.
    Where several buckets make a file (`Bucket.part`), it is the first one's prefix followed by the bytes of all. They are sent
    one after the other, and readers must not find the file before it is complete.
    """

    version: int
    """Weight version that is stored."""
    prefixes: Sequence[bytes]
    """Bytes ahead of each bucket, by bucket index; none ahead of one that continues a file."""
    documents: Mapping[str, str]
    """Text files of the version by file name (``[a-z0-9._-]+``), e.g. its manifest and the safetensors index."""


class Mailbox(Protocol):
    """A small key-value store shared by all halves of a session, for handshakes. Supplied by the framework."""

    def put(self, key: str, value: Any) -> None:
        """Publish JSON-representable `value` under `key`."""

    def get(self, key: str, deadline: Deadline) -> Any:
        """Wait for `key` and return its value; `DeadlineExceededError` when it does not appear in time."""


class WeightSender(ABC):
    """The sending half of an engine.

    `connect`, `send`, `reclaim` and the calls about versions come from one thread, `close` from any.
    """

    @abstractmethod
    def address(self) -> Address:
        """Where receivers find this sender. Must be ready to be contacted when this returns."""

    @abstractmethod
    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        """Connect to every receiver of `topology`. Raises `PeerLostError` or `DeadlineExceededError`."""

    @abstractmethod
    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        """Send `bucket` to `receivers` and return once its memory may be overwritten, or if it is lasting, once all have it.

        `receivers` is every receiver of the topology unless the engine declares `Delivery.POINT_TO_POINT`.
        Raises `PeerLostError`, `DeadlineExceededError`, `StorageError` or `ClosedError`.
        """

    def reclaim(self, version: int, deadline: Deadline) -> None:  # noqa: ARG002
        """Wait until no receiver looks at a lasting bucket of `version` any more: its memory may be overwritten then.

        Raises `PeerLostError` when a receiver has gone without saying so, which may still look, `DeadlineExceededError`,
        or `ClosedError`. Called only if the engine declares `Capabilities.views`.
        """
        raise ProtocolError(
            f"version {version} was reclaimed from an engine that shows nothing.", part=type(self).__name__
        )

    def open_version(self, files: VersionFiles, deadline: Deadline) -> None:  # noqa: B027 - most engines store nothing
        """Prepare to store a version. Called before its first bucket, and only if the engine declares `persistent`."""

    def commit_version(self, version: int, documents: Mapping[str, str], deadline: Deadline) -> None:  # noqa: B027
        """`version` serves: store `documents` (text by file name) with it, then make it the newest one that readers find.

        Called as `open_version` is.
        """

    @abstractmethod
    def close(self) -> None:
        """Free every resource and make a blocked call of another thread fail soon. Never raises, never blocks for long."""


class WeightReceiver(ABC):
    """The receiving half of an engine. Threads as for `WeightSender`."""

    @abstractmethod
    def address(self) -> Address:
        """Where the sender finds this receiver. Must be ready to be contacted when this returns."""

    @abstractmethod
    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        """Connect to the senders of `topology`. Raises `PeerLostError` or `DeadlineExceededError`."""

    @abstractmethod
    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        """Fill ``bucket.data`` with the next bucket from `sender`.

        Raises `ProtocolError` when what arrives is not the bucket asked for, `PeerLostError`, `DeadlineExceededError`,
        `StorageError` or `ClosedError`. After an error the contents of ``bucket.data`` are undefined.
        """

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:  # noqa: ARG002
        """The next bucket from `sender`, which is lasting, where it lies: contiguous uint8 of `nbytes`, only to be read.

        Buckets that adjoin in the sender's memory adjoin in the tensors' common storage. A tensor stays readable for as long
        as somebody holds it, also after `close`; what it shows may change once `release` was called.

        Raises as `receive`. Called only if the engine declares `Capabilities.views`.
        """
        raise ProtocolError(
            f"bucket {index} of version {version} was to be shown by an engine that shows nothing.",
            part=type(self).__name__,
        )

    def release(self, version: int, deadline: Deadline) -> None:  # noqa: B027 - most engines show nothing
        """Nobody here looks at `version` any more: tell its sender. Does nothing for a version of which nothing was viewed.

        Called from the thread that calls `receive`. Raises `PeerLostError`, `DeadlineExceededError` or `ClosedError`.
        """

    @abstractmethod
    def close(self) -> None:
        """As `WeightSender.close`."""


class CheckpointEngine(ABC):
    """A named transport: static facts, typed options, and a maker of the two halves.

    Subclasses set `api_version`, `capabilities` and `config_type`, and are registered under the entry-point group
    ``weightlane.ckpt_engines``. Importing the module must be cheap and must not need the engine's hardware.
    """

    api_version: ClassVar[int]
    capabilities: ClassVar[Capabilities]
    config_type: ClassVar[type[EngineConfig]] = EngineConfig

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse a wrong declaration where it is made. A missing one may come from a subclass: the registry looks for that."""
        super().__init_subclass__(**more)
        if problem := _wrong_declaration(vars(cls)):
            what, instead = problem
            raise EngineContractError(f"{what}.", part=f"{cls.__module__}.{cls.__qualname__}", hint=f"Write {instead}.")

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why the engine cannot run on this machine (``"no CUDA device"``), or None when it can."""
        return None

    def check(self, deadline: Deadline) -> None:  # noqa: B027 - most engines need nothing of that kind
        """Raise what would keep the engine, as it is configured, from working on this machine: an address, a path, credentials.

        Called before a run starts anything. Talks to no participant, and leaves nothing behind.
        """

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Contiguous uint8 of `nbytes` on `device` from which every sender of this engine sends most cheaply.

        It outlives the senders: it stays until `free`. Raises `StorageError` when there is too little memory.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def free(self, memory: torch.Tensor) -> None:  # noqa: B027 - torch's own memory needs no such call
        """Give back what `allocate` returned; receivers may still look at it. Never raises."""

    @abstractmethod
    def make_sender(self, name: str) -> WeightSender:
        """A new sending half for the participant called `name`."""

    @abstractmethod
    def make_receiver(self, name: str) -> WeightReceiver:
        """A new receiving half for the participant called `name`."""


def _wrong_declaration(members: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with what an engine's class says of itself, and what to write instead; None when nothing is."""
    if type(version := members.get("api_version", API_VERSION)) is not int:
        return f"api_version is {version!r}", "api_version = API_VERSION"
    if "capabilities" in members and not isinstance(members["capabilities"], Capabilities):
        return f"capabilities is {members['capabilities']!r}", "Capabilities(devices=..., delivery=...)"
    config_type = members.get("config_type", EngineConfig)
    if not (isinstance(config_type, type) and issubclass(config_type, EngineConfig)):
        return f"config_type is {config_type!r}", "a class derived from EngineConfig"
    if not isinstance(members.get("unavailable_reason", staticmethod(str)), classmethod | staticmethod):
        return "unavailable_reason is asked of the class, not of an engine", "@classmethod above it"
    if "__init__" in members:
        try:
            inspect.signature(members["__init__"]).bind(object(), EngineConfig())
        except TypeError:
            return "__init__ does not take the config", "def __init__(self, config): super().__init__(config)"
    return None


document_fields(__name__)
