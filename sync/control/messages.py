"""The control messages between the coordinator and the participants, as typed plain data, and the hub's frames that carry them.

    coordinator -> participant   Reset, Connect, Open (subscribers), Go and Full (publishers), Committed, Abort, Stop
    participant -> coordinator   Joined, Hello, Connected, Offer (rank 0's publisher), Accepted, Ready, Sent, Staged, Failed, Left
    a watcher of processes -> coordinator   Lost

All but Joined, Left, Lost and Stop name their session. Messages of an older session are dropped, except Committed and Abort.

Long JSON is compressed. Placements are repetitive: two thousand entries compress to a tenth. The hub of a run sends the same ones
to every rank.
"""

from __future__ import annotations

import json
import zlib
from enum import IntEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from weightlane.ckpt_engines import ProtocolError

COORDINATOR = "coordinator"
"""Name of the coordinator's inbox. Only this inbox keeps messages that arrive before it is read: trainers may start earlier."""

_LONG_BYTES = 4 << 10
"""Length from which text is compressed. Compressing a shorter one takes longer than sending it."""
_LEVEL = 1
_ZLIB_START = b"\x78"
"""The first byte of zlib's format (RFC 1950). JSON never begins with it."""
MOST_BYTES = 4 << 30
"""Limit for the length of decompressed text, which bounds the memory that a member can make another one use."""


class Kind(IntEnum):
    """The meaning of a frame. The frame's name is an inbox, or a scope, to which a line feed and a key may be appended."""

    LISTEN = 1
    """[member] The member reads the inbox from now on."""
    POST = 2
    """[member] Send the payload to the reader of the inbox."""
    PUT = 3
    """[member] Store the payload under the key."""
    DELETE = 4
    """[member] Delete the key."""
    GET = 5
    """[member] Request the value of the key. The reply is `VALUE`, once the key exists."""
    GATHER = 6
    """[member] Request all values of the scope (see `gathered`). The reply is `VALUE`, once as many keys exist as the payload
    says."""
    CANCEL = 7
    """[member] Cancel an earlier request of the same name; the payload is a JSON list of that request's number and payload. The
    reply, under the number of this frame, is `VALUE` with the keys in the scope; there is no reply if that number is 0."""
    MESSAGE = 8
    """[hub] The payload was posted to the inbox."""
    VALUE = 9
    """[hub] The reply to the request of this number."""
    OVER = 10
    """[hub] The request of this number has failed; the payload is the reason."""


def to_bytes(value: Any) -> bytes:
    """Encode the JSON-representable `value`."""
    return shortened(json.dumps(value).encode())


def shortened(text: bytes) -> bytes:
    """Compress JSON text if it is long."""
    return text if len(text) < _LONG_BYTES else zlib.compress(text, _LEVEL)


def full_text(data: bytes, what: str) -> bytes:
    """The inverse of `shortened`. Raises `ProtocolError`, naming `what`, for invalid or too long data."""
    if not data.startswith(_ZLIB_START):
        return data
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"{what} is not compressed JSON: {error}.", part="control plane") from None
    if not decompressor.eof:
        raise ProtocolError(f"{what} is cut off, or too long.", part="control plane")
    return text


def from_bytes(data: bytes, what: str) -> Any:
    """The inverse of `to_bytes`. Raises `ProtocolError`, naming `what`, for invalid data."""
    text = full_text(data, what)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is not JSON: {error}.", part="control plane") from None


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _SessionMessage(_Message):
    session: str


class _VersionMessage(_SessionMessage):
    version: int


class _Reply(_SessionMessage):
    name: str
    """The participant that answers."""


class _VersionReply(_Reply):
    version: int


class EngineTraits(_Message):
    """Capabilities of the engine that the coordinator needs to know."""

    selective: bool
    """A version can be sent to some of the connected receivers without the others."""
    elastic: bool
    """A receiver can connect without a new session for the others."""
    persistent: bool
    """A version that was sent can be read again without the sender."""


class Joined(_Message):
    """A participant has joined and reads the inbox `inbox`. It replaces an older participant of the same name."""

    type: Literal["joined"] = "joined"
    name: str
    inbox: str


class Left(_Message):
    """A participant has closed."""

    type: Literal["left"] = "left"
    name: str
    inbox: str


class Lost(_Message):
    """A process has died; `replica` is its replica's name, empty for a trainer."""

    type: Literal["lost"] = "lost"
    replica: str
    error: dict[str, str]


class Reset(_Message):
    """A new session begins: leave the current one, and answer with `Hello`."""

    type: Literal["reset"] = "reset"
    session: str


class Connect(_SessionMessage):
    """Compute the session's plan, connect your links, and answer with `Connected`."""

    type: Literal["connect"] = "connect"
    publishers: list[str]
    """Every trainer rank, in rank order."""
    needs: dict[str, str]
    """`Hello.need` of each rollout rank that takes part."""
    deadline_s: float


class Open(_VersionMessage):
    """A version is offered: check its manifest, and answer with `Accepted` or `Failed`."""

    type: Literal["open"] = "open"
    manifest: dict[str, Any]
    deadline_s: float
    stall_s: float


class Go(_VersionMessage):
    """Send a version to the receivers that accepted it."""

    type: Literal["go"] = "go"
    receivers: list[str]
    codec: str
    """Codec of the offer that they accepted."""
    times: int = 1
    """`Offer.times` of that offer: every rank sends the same publication."""
    deadline_s: float
    stall_s: float


class Full(_VersionMessage):
    """Offer this version again, in full: a rollout rank lacks the base of its delta."""

    type: Literal["full"] = "full"


class Committed(_VersionMessage):
    """The version serves."""

    type: Literal["committed"] = "committed"


class Abort(_VersionMessage):
    """The version is aborted for the receiving participant; `error` is the reason in wire form."""

    type: Literal["abort"] = "abort"
    error: dict[str, str]
    disconnect: bool
    """Whether to leave the session as well."""


class Stop(_Message):
    """The run is over: end the control thread."""

    type: Literal["stop"] = "stop"


class Hello(_Reply):
    """The answer to `Reset`."""

    type: Literal["hello"] = "hello"
    traits: EngineTraits | None = None
    """Traits of the engine; only rank 0's publisher sends them."""
    need: str = ""
    """Mailbox key of the slices that a rollout rank needs; see `PlanExchange`."""


class Connected(_Reply):
    """A participant's links are connected."""

    type: Literal["connected"] = "connected"
    plan: str
    """Digest of the plan that the participant has computed."""
    relays: bool
    """Whether that plan has relays: a version is then sent to all receivers of the session, or to none."""


class Offer(_VersionReply):
    """A version can be sent. Its snapshot may still be being taken."""

    type: Literal["offer"] = "offer"
    manifest: dict[str, Any]
    reason: str = ""
    """Why the version is sent with that codec."""
    times: int = 1
    """How often rank 0 has published this number: a version that was aborted may be published again, with other weights."""


class Accepted(_VersionReply):
    """The manifest fits the model, and there is memory for the version."""

    type: Literal["accepted"] = "accepted"
    in_place: bool = False
    """Whether the version will be written directly into the live weights; `Ready` then follows."""


class Ready(_VersionReply):
    """The first bucket of an in-place version is verified: the replica's commit may begin, which writes all buckets."""

    type: Literal["ready"] = "ready"


class Sent(_VersionReply):
    """A publisher has sent all its buckets of a version."""

    type: Literal["sent"] = "sent"
    nbytes: int
    seconds: float
    export_s: float = 0.0
    """Seconds in which its shards were copied to the snapshot, partly while that was sent."""
    error: tuple[int, float, float, float] | None = None
    """Quantisation error of a sample of the elements: the fields of `QuantisationReport`."""


class Staged(_VersionReply):
    """A subscriber has received and verified every byte of a version; an in-place version is also written completely."""

    type: Literal["staged"] = "staged"
    nbytes: int
    seconds: float


class Failed(_VersionReply):
    """A participant has failed; `version` is -1 if the failure belongs to no version."""

    type: Literal["failed"] = "failed"
    error: dict[str, str]


Message = Annotated[
    Joined
    | Left
    | Lost
    | Reset
    | Connect
    | Open
    | Go
    | Full
    | Committed
    | Abort
    | Stop
    | Hello
    | Connected
    | Offer
    | Accepted
    | Ready
    | Sent
    | Staged
    | Failed,
    Field(discriminator="type"),
]
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Message)


def encode(message: Message) -> bytes:
    """Encode a message."""
    return shortened(message.model_dump_json().encode())


def decode(data: bytes) -> Message:
    """Parse a message. Raises `ProtocolError` for invalid data."""
    try:
        return _ADAPTER.validate_json(full_text(data, "a control message"))
    except ValidationError as error:
        raise ProtocolError(
            f"not a valid control message: {error.errors()[0]['msg']}.", part="control messages"
        ) from None
