"""The engine contract: what a checkpoint engine is, and what the framework promises it.

A checkpoint engine moves opaque byte buckets from one sender to some receivers. It knows nothing of tensors, versions of a
model, checksums, codecs or RL; it starts no threads and retries nothing, because the framework does all of that once for every
engine. It consists of a class (`CheckpointEngine`) and two halves (`WeightSender`, `WeightReceiver`), each of them complete, and
each made for one device that the framework names: no half asks which device is current.

The life of a connection, tagged by the side that runs each step:

    1. [sender, receiver]  ``address()``                       plain data, exchanged by the framework
    2. [sender, receiver]  ``connect(topology, channels, ...)`` all sides at the same time, under one deadline
    3. [sender]            ``post(bucket, receivers)``         } once per bucket, in the same order on both sides, several
       [receiver]          ``post(bucket, sender)``            } before they are done; both sides agree on the size beforehand
       [sender, receiver]  ``flush(deadline, pending)``        waits until all but the last `pending` of them are done
    4. [sender, receiver]  ``close()``                          any time, from any thread, more than once

Before a receiver's `post` the framework has told it, over a connection of its own, which bucket the sender posts next, and has
compared version, index and size: an engine need not. It watches that connection, too: when a peer dies, it closes the half, and
says whose death it was. Who needs connections between the halves gets them (`channels`): each leads to one peer, whose end has
proven that it belongs to the session.

Two things are optional, each with a protocol of its own: storing versions (`weightlane.ckpt_engines.contract.storing`), and
memory of the sender's that receivers look at instead of copying it (`weightlane.ckpt_engines.contract.viewing`). Who writes a
plain transport meets neither.

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
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, field_validator

from ..channels.channel import Address, Channel
from ..channels.meeting import Meeting, TcpMeeting
from ..deadline import Deadline
from ..errors import EngineContractError, ProtocolError
from .field_docs import document_fields

MOST_POSTED = 16
"""The framework never has more buckets posted that are not done."""
API_VERSION = 2
"""Version of this contract. An engine declares the one it was written for; the registry refuses any other."""
WHAT_CHANGED = (
    "Since engine API 2 `make_sender` and `make_receiver` are told the device, `connect` gets connected channels in place of a"
    " mailbox, and `post` and `flush` take the place of `send` and `receive`; what was `toolkit.Door` and `dial_senders` is"
    " `CheckpointEngine.meeting`. See docs/guides/writing-an-engine.md."
)
"""What the author of an engine for an older version has to change."""

_IN_NO_NAME = re.compile("[\0\ud800-\udfff]")


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
    """Buckets outlive the sender process: its sender is a `StoringSender`."""
    elastic: bool = False
    """Receivers may join or leave without a new connection of the others."""
    same_host_only: bool = False
    """Both halves must run on one host. The sender's address says which, and a receiver on another refuses it in words."""
    zero_copy: bool = False
    """Memory from `CheckpointEngine.allocate` is sent without another copy on the sender's side."""
    views: bool = False
    """Receivers can look at a lasting bucket in the sender's memory: its halves are a `ViewableSender` and a
    `ViewingReceiver`."""
    collective: bool = False
    """All halves of a connection take part in one group whose operations must come in one order: the framework makes as few
    connections as it can, with several senders each, and has every half post what it takes part in in that order."""
    channels: bool = True
    """`connect` gets a connection to each peer. An engine that needs none saves its users the sockets."""

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
    """Secret of this session that its members alone know. The framework's channels use it; an engine that opens connections of
    its own has its peers prove that they know it, and never sends it."""


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
    after: Any = None
    """On an accelerator, the event that the transfer has to wait for, and nothing else: what writes the bytes to be sent, or what
    still uses the memory to be filled. None on a CPU, where all of that is over."""
    to_all: bool = True
    """Said on both sides: it goes to every receiver of the connection, so that one broadcast may carry it."""
    lasting: bool = False
    """Said by the sender, to engines that declare `Capabilities.views`: receivers may look at the bytes where they lie, which
    stay as they are until `ViewableSender.reclaim` of the version has returned."""
    part: FilePart | None = None
    """Said on both sides, to engines that declare `Capabilities.persistent`; None for a bucket with a file of its own."""

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


class WeightSender(ABC):
    """The sending half of an engine. Every call comes from one thread, but `close`, which comes from any."""

    @abstractmethod
    def address(self) -> Address:
        """Where receivers find this sender, if they need to know. Must be ready to be contacted when this returns."""

    @abstractmethod
    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        """Connect to every receiver of `topology`; `channels` lead to them, by name.

        Raises `PeerLostError` or `DeadlineExceededError`.
        """

    @abstractmethod
    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Begin to send `bucket` to `receivers`; waits for nobody. Its memory stays as it is until `flush` says that it is done.

        `receivers` is every receiver of the topology unless the engine declares `Delivery.POINT_TO_POINT`.
        Raises `TransportError`, `StorageError` or `ClosedError`.
        """

    @abstractmethod
    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait until all posted buckets but the last `pending` are done: their memory may be overwritten.

        A lasting one is done when all have it. Raises `PeerLostError`, `DeadlineExceededError`, `StorageError` or `ClosedError`.
        """

    @abstractmethod
    def close(self) -> None:
        """Free every resource and make a blocked call of another thread fail soon. Never raises, never blocks for long."""


class WeightReceiver(ABC):
    """The receiving half of an engine. Threads as for `WeightSender`."""

    @abstractmethod
    def address(self) -> Address:
        """Where the sender finds this receiver, if it needs to know. Must be ready to be contacted when this returns."""

    @abstractmethod
    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        """Connect to the senders of `topology`; `channels` lead to them, by name.

        Raises `PeerLostError` or `DeadlineExceededError`.
        """

    @abstractmethod
    def post(self, bucket: Bucket, sender: str) -> None:
        """Begin to fill ``bucket.data`` with the next bucket from `sender`, which has posted it or is about to; waits for nobody.

        Raises `TransportError` or `ClosedError`.
        """

    @abstractmethod
    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait until all posted buckets but the last `pending` have arrived.

        Raises `ProtocolError` when what arrives is not what was posted, `PeerLostError`, `DeadlineExceededError`,
        `StorageError` or `ClosedError`. After an error the contents of what had not arrived are undefined.
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
    registered_as: str = ""
    """Name under which the registry found it; empty where an engine was made without the registry."""
    link_types: ClassVar[Any] = None
    """What the framework puts around the halves in place of its own links: for engines that break things on purpose."""

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

    def meeting(self, name: str) -> Meeting:  # noqa: ARG002
        """Where the participant called `name` and its peers meet: whoever sends listens there, whoever receives knocks.

        On loopback, unless an engine with an option for it says otherwise.
        """
        return TcpMeeting("127.0.0.1")

    @abstractmethod
    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """A new sending half for the participant called `name`, whose buckets live on `device`, an accelerator with its index."""

    @abstractmethod
    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """A new receiving half for the participant called `name`, whose buckets live on `device`, as for `make_sender`."""


def engine_label(engine: CheckpointEngine) -> str:
    """What errors call `engine`: its registered name, or its class's where that is not known."""
    return engine.registered_as or type(engine).__name__.removesuffix("Engine").lower()


def _wrong_declaration(members: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with what an engine's class says of itself, and what to write instead; None when nothing is."""
    if type(version := members.get("api_version", API_VERSION)) is not int:
        return f"api_version is {version!r}", f"api_version = {API_VERSION}"
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
