"""The engine contract: the duties of a checkpoint engine, and those of the framework.

A checkpoint engine moves opaque byte buckets from senders to receivers. It knows nothing of tensors, checksums, codecs or RL. It
starts no threads that outlive a call and retries nothing, because the framework does both once for every engine. An engine
consists of a class (`CheckpointEngine`) and of two halves that it makes (`WeightSender`, `WeightReceiver`). Each half is made for
one device that the framework names, and never asks which device is current.

The life of a connection, tagged by the side that runs each step:

    1. [sender, receiver]  ``address()``                        JSON data, which the framework gives to the peers
    2. [sender, receiver]  ``connect(topology, channels, ...)`` on all sides at the same time, under one deadline
    3. [sender]            ``post(bucket, receivers)``          } once per bucket, in the same order on both sides, several
       [receiver]          ``post(bucket, sender)``             } before the first is done
       [sender, receiver]  ``flush(deadline, pending)``         waits until all buckets except the last `pending` are done
    4. [sender, receiver]  ``close()``                          at any time, from any thread, more than once

The framework has a control connection of its own, separate from the engine's. On it the sender's side states which bucket it
posts. Before the framework calls a receiver's `post`, it has compared version, index and size of that bucket with the bucket that
the receiver waits for. It also watches the control connection: when a peer dies, the framework closes the half, and raises
`PeerLostError` with the peer's name. An engine that needs connections between its halves gets them as `channels`, one to each
peer, and each peer has proven that it belongs to the session.

After any error the framework closes both halves and starts again at step 1 with new halves and a new session name. An engine
therefore never has to resume a broken connection.

Two abilities are optional and have protocols of their own: storing versions (`weightlane.ckpt_engines.contract.storing`), and
letting receivers read the sender's memory instead of copying it (`weightlane.ckpt_engines.contract.viewing`).
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, field_validator

from ..channels.channel import Address, Channel
from ..channels.socket_factory import SocketFactory, TcpSocketFactory
from ..errors import EngineContractError
from ..waits import Deadline
from .bucket import Bucket
from .capabilities import Capabilities
from .field_docs import document_fields

MOST_POSTED = 16
"""Most buckets that the framework posts to a half before the first of them is done."""
API_VERSION = 2
"""Version of this contract. An engine declares the one it was written for; the registry refuses any other."""

_IN_NO_NAME = re.compile("[\0\ud800-\udfff]")
"""Characters that no path, host or interface can have; the system's calls fail for them with errors of many types."""


class EngineConfig(BaseModel):
    """Base of an engine's typed options, which the framework makes from the user's ``checkpoint_engine.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _can_be_a_name(cls, value: Any) -> Any:
        if isinstance(value, str) and _IN_NO_NAME.search(value):
            raise ValueError("contains a character that no path, host or interface can have")
        return value


@dataclass(frozen=True, slots=True)
class Topology:
    """The participants of one connection."""

    session: str
    """Name of the session, ``[a-z0-9-]+``, new for every attempt to connect; safe as part of a key or a file name."""
    senders: Mapping[str, Address]
    """Addresses of the senders by name, in sending order."""
    receivers: Mapping[str, Address]
    """Addresses of the receivers by name. Their order is the same on every side and may serve as rank order. Empty for engines
    with `Delivery.STORE`, which receivers may read at any time."""
    key: bytes = b""
    """Secret that only members of the session know. The framework's channels authenticate with it. An engine that opens
    connections of its own must have its peers prove that they know the key, and never sends it."""
    receiver_sets: tuple[tuple[str, ...], ...] = ()
    """Sets of two or more receivers that get most of their bytes in common, the same on every side. A collective engine may form
    a group of each set, whose members pass on what one of them receives. Empty for engines that are not collective."""


class WeightSender(ABC):
    """The sending half of an engine.

    Calls are made one at a time, from any thread; the thread that connects is not the one that posts. `close` may be called at
    any time. Every call after `close` raises `ClosedError`.
    """

    @abstractmethod
    def address(self) -> Address:
        """Return JSON data by which receivers find this sender, ``{}`` if they need none.

        Receivers may contact the sender as soon as this returns.
        """

    @abstractmethod
    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        """Connect to every receiver of `topology`. `channels` are connections to the receivers, by name.

        Raises `PeerLostError` or `DeadlineExceededError`.
        """

    @abstractmethod
    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Begin to send `bucket` to `receivers`, without waiting for them.

        ``bucket.data`` stays unchanged until `flush` reports that the bucket is done. `receivers` names every receiver of the
        topology unless the engine declares `Delivery.POINT_TO_POINT`.

        Raises `TransportError`, `StorageError` or `ClosedError`.
        """

    @abstractmethod
    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait until all posted buckets except the last `pending` are done: their memory may be overwritten.

        A lasting bucket is done when all its receivers have received or viewed it.

        Raises `PeerLostError`, `DeadlineExceededError`, `StorageError` or `ClosedError`.
        """

    @abstractmethod
    def close(self) -> None:
        """Free every resource, and make a call that is blocked in another thread raise `ClosedError` soon.

        Never raises, and waits for no peer and no thread.
        """


class WeightReceiver(ABC):
    """The receiving half of an engine. It is called under the same rules as a `WeightSender`."""

    @abstractmethod
    def address(self) -> Address:
        """Return JSON data by which the sender finds this receiver, ``{}`` if it needs none.

        The sender may contact the receiver as soon as this returns.
        """

    @abstractmethod
    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        """Connect to the senders of `topology`. `channels` are connections to the senders, by name.

        Raises `PeerLostError` or `DeadlineExceededError`.
        """

    @abstractmethod
    def post(self, bucket: Bucket, sender: str) -> None:
        """Begin to receive the next bucket from `sender` into ``bucket.data``, without waiting for it.

        The sender has posted the same bucket, or is about to.

        Raises `TransportError` or `ClosedError`.
        """

    @abstractmethod
    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait until all posted buckets except the last `pending` have arrived.

        Raises `ProtocolError` when the arriving bytes are not those of the posted buckets, `PeerLostError`,
        `DeadlineExceededError`, `StorageError` or `ClosedError`. After an error, the contents of the buckets that had not arrived
        are undefined.
        """

    @abstractmethod
    def close(self) -> None:
        """See `WeightSender.close`."""


class CheckpointEngine(ABC):
    """A named transport: it declares facts, has typed options, and makes the two halves.

    Subclasses set `api_version`, `capabilities` and `config_type`, and are registered under the entry-point group
    ``weightlane.ckpt_engines``. Importing the module must be cheap and must not need the engine's hardware. `allocate` and
    `free` may be called from any thread.
    """

    api_version: ClassVar[int]
    capabilities: ClassVar[Capabilities]
    config_type: ClassVar[type[EngineConfig]] = EngineConfig
    registered_as: str = ""
    """Name under which the registry found the engine; empty when it was made without the registry."""
    link_types: ClassVar[Mapping[type, type[Any]]] = {}
    """Subclasses that the framework uses instead of `SenderLink` and `ReceiverLink`, by these, for engines that inject faults."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Raise `EngineContractError` for an invalid declaration. The registry finds missing ones, which a class may inherit."""
        super().__init_subclass__(**more)
        if problem := _wrong_declaration(vars(cls)):
            what, instead = problem
            raise EngineContractError(f"{what}.", part=f"{cls.__module__}.{cls.__qualname__}", hint=f"Write {instead}.")

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why the engine cannot run on this machine, e.g. ``"no CUDA device"``, or None when it can."""
        return None

    def check(self, deadline: Deadline) -> None:  # noqa: B027 - most engines need nothing of that kind
        """Raise an error when an option does not work on this machine, for example an address, a path or credentials.

        The framework calls this before a run starts anything. It contacts no participant and leaves nothing behind.
        """

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return contiguous uint8 of `nbytes` on `device` from which the senders of this engine send at the least cost.

        The memory outlives the senders: it stays until `free`. Raises `StorageError` when there is too little memory.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def free(self, memory: torch.Tensor) -> None:  # noqa: B027 - torch's own memory needs no such call
        """Free memory that `allocate` returned. Receivers may still read it. Never raises."""

    def socket_factory(self, name: str) -> SocketFactory:  # noqa: ARG002
        """Return the sockets over which the framework connects the participant `name` with its peers.

        The sockets are on loopback unless an option of the engine says otherwise.
        """
        return TcpSocketFactory("127.0.0.1")

    @abstractmethod
    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        """Make a sending half for the participant `name`, whose buckets are on `device`; an accelerator has its index.

        Opens no port and no file: `WeightSender.address` and `WeightSender.connect` do.
        """

    @abstractmethod
    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:
        """Make a receiving half, under the same rules as `make_sender`."""


def engine_label(engine: CheckpointEngine) -> str:
    """Return the name of `engine` for error messages: the registered one, or one made from its class's name."""
    return engine.registered_as or type(engine).__name__.removesuffix("Engine").lower()


def _wrong_declaration(members: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the problem with the declarations among a class's `members` and what to write instead; None if there is none."""
    if type(version := members.get("api_version", API_VERSION)) is not int:
        return f"api_version is {version!r}", f"api_version = {API_VERSION}"
    if "capabilities" in members and not isinstance(members["capabilities"], Capabilities):
        return f"capabilities is {members['capabilities']!r}", "Capabilities(devices=..., delivery=...)"
    config_type = members.get("config_type", EngineConfig)
    if not (isinstance(config_type, type) and issubclass(config_type, EngineConfig)):
        return f"config_type is {config_type!r}", "a class derived from EngineConfig"
    if not isinstance(members.get("unavailable_reason", staticmethod(str)), classmethod | staticmethod):
        return "unavailable_reason is not a class method, but is asked of the class", "@classmethod above it"
    if "__init__" in members:
        try:
            inspect.signature(members["__init__"]).bind(object(), EngineConfig())
        except TypeError:
            return "__init__ does not take the config", "def __init__(self, config): super().__init__(config)"
    return None


document_fields(__name__)
