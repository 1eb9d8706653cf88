"""The control messages of a sync, as typed plain data.

    coordinator -> participant   Reset, Connect, Open (subscribers), Go (publishers), Committed, Abort, Stop
    participant -> coordinator   Hello, Connected, Offer (sending publisher), Accepted, Sent, Staged, Failed

A message names its session; whoever gets one of an older session drops it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from weightlane.ckpt_engines import ProtocolError


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reset(_Message):
    """Drop the current connection, open a new half, answer with `Hello`."""

    type: Literal["reset"] = "reset"
    session: str


class Connect(_Message):
    """Connect to this topology, answer with `Connected`."""

    type: Literal["connect"] = "connect"
    session: str
    publishers: list[str]
    """Every trainer rank, in rank order."""
    senders: dict[str, dict[str, Any]]
    receivers: dict[str, dict[str, Any]]
    deadline_s: float


class Open(_Message):
    """A version is offered; check its manifest, answer with `Accepted` or `Failed`."""

    type: Literal["open"] = "open"
    session: str
    version: int
    manifest: dict[str, Any]
    deadline_s: float


class Go(_Message):
    """Every receiver accepted: stream."""

    type: Literal["go"] = "go"
    session: str
    version: int
    deadline_s: float


class Committed(_Message):
    """Every replica serves the version."""

    type: Literal["committed"] = "committed"
    session: str
    version: int


class Abort(_Message):
    """Give the version up; `error` is the reason as `WeightlaneError.to_wire`."""

    type: Literal["abort"] = "abort"
    session: str
    version: int
    error: dict[str, str]


class Stop(_Message):
    """End the participant's control thread."""

    type: Literal["stop"] = "stop"


class Hello(_Message):
    """A participant is there; `address` is empty for a publisher that only holds shards."""

    type: Literal["hello"] = "hello"
    name: str
    session: str
    address: dict[str, Any]


class Connected(_Message):
    """A participant's transport is up."""

    type: Literal["connected"] = "connected"
    name: str
    session: str


class Offer(_Message):
    """A version is snapshot and ready to stream."""

    type: Literal["offer"] = "offer"
    name: str
    session: str
    version: int
    manifest: dict[str, Any]


class Accepted(_Message):
    """The manifest fits and there is room to stage it."""

    type: Literal["accepted"] = "accepted"
    name: str
    session: str
    version: int


class Sent(_Message):
    """A publisher has sent everything it had to."""

    type: Literal["sent"] = "sent"
    name: str
    session: str
    version: int
    nbytes: int
    seconds: float


class Staged(_Message):
    """Every byte arrived and every checksum holds."""

    type: Literal["staged"] = "staged"
    name: str
    session: str
    version: int
    nbytes: int
    seconds: float


class Failed(_Message):
    """A participant gave up; `version` is -1 when no version was under way."""

    type: Literal["failed"] = "failed"
    name: str
    session: str
    version: int
    error: dict[str, str]


Message = Annotated[
    Reset
    | Connect
    | Open
    | Go
    | Committed
    | Abort
    | Stop
    | Hello
    | Connected
    | Offer
    | Accepted
    | Sent
    | Staged
    | Failed,
    Field(discriminator="type"),
]
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Message)


def encode(message: Message) -> bytes:
    """JSON."""
    return message.model_dump_json().encode()


def decode(data: bytes) -> Message:
    """Parse a message; `ProtocolError` for anything that is not one."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise ProtocolError(
            f"not a valid control message: {error.errors()[0]['msg']}.", part="control messages"
        ) from None
