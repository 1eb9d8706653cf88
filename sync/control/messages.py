"""The control messages of a sync, as typed plain data.

    coordinator -> participant   Reset, Connect, Open (subscribers), Go (publishers), Committed, Abort, Stop
    participant -> coordinator   Joined, Hello, Connected, Offer (sending publisher), Accepted, Ready, Sent, Staged, Failed, Left
    whoever watches processes -> coordinator   Lost

All but the first and the last few name their session; whoever gets one of an older session drops it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from weightlane.ckpt_engines import ProtocolError

from .hub.plain_bytes import full_text, shortened


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineTraits(_Message):
    """What the coordinator must know of the engine that sends."""

    selective: bool
    """Some of the connected receivers can be sent to without the others."""
    elastic: bool
    """A receiver can connect without a new connection of the others."""
    persistent: bool
    """What was sent can be read again without the sender."""


class Joined(_Message):
    """A participant is there and reads the inbox named; one that comes again under its name takes the place of the old."""

    type: Literal["joined"] = "joined"
    name: str
    inbox: str


class Left(_Message):
    """A participant closes."""

    type: Literal["left"] = "left"
    name: str
    inbox: str


class Lost(_Message):
    """A process is gone; `replica` is empty when it was a trainer's."""

    type: Literal["lost"] = "lost"
    replica: str
    error: dict[str, str]


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
    needs: dict[str, str] = {}
    """What each receiver has said in `Hello.need`."""
    relays: bool = False
    """Whether all of them have said `Hello.relays`."""
    deadline_s: float


class Open(_Message):
    """A version is offered; check its manifest, answer with `Accepted` or `Failed`."""

    type: Literal["open"] = "open"
    session: str
    version: int
    manifest: dict[str, Any]
    deadline_s: float
    stall_s: float


class Go(_Message):
    """These receivers accepted: stream to them."""

    type: Literal["go"] = "go"
    session: str
    version: int
    receivers: list[str]
    codec: str
    """That of the offer which they accepted."""
    deadline_s: float
    stall_s: float


class Full(_Message):
    """Offer this version again, in full: somebody lacks what its delta applies to."""

    type: Literal["full"] = "full"
    session: str
    version: int


class Committed(_Message):
    """The version serves."""

    type: Literal["committed"] = "committed"
    session: str
    version: int


class Abort(_Message):
    """The version was given up, for everybody or for the replica this goes to; `error` is the reason in wire form."""

    type: Literal["abort"] = "abort"
    session: str
    version: int
    error: dict[str, str]
    disconnect: bool
    """Give the connection up as well."""


class Stop(_Message):
    """End the participant's control thread."""

    type: Literal["stop"] = "stop"


class Hello(_Message):
    """The answer to `Reset`; `address` is empty where it is not yet known through which connections shards will go."""

    type: Literal["hello"] = "hello"
    name: str
    session: str
    address: dict[str, Any]
    traits: EngineTraits | None = None
    """Of the engine; from rank 0's publisher only."""
    need: str = ""
    """Where a rollout rank has said what it needs; see `weightlane.sync.plan.session_plan`."""
    relays: bool = False
    """Whether a rollout rank can hand on what it gets."""


class Connected(_Message):
    """A participant's transport is up."""

    type: Literal["connected"] = "connected"
    name: str
    session: str
    plan: str = ""
    """Digest of the transfer plan it has made; empty where all goes through one stream."""
    relays: bool = False
    """Whether somebody hands on what it gets, by that plan: then a version goes to everybody in the session, or to nobody."""


class Offer(_Message):
    """A version is being snapshot; it can be streamed as far as it is."""

    type: Literal["offer"] = "offer"
    name: str
    session: str
    version: int
    manifest: dict[str, Any]
    reason: str = ""
    """Why it is sent as that codec."""


class Accepted(_Message):
    """The manifest fits and there is room for it."""

    type: Literal["accepted"] = "accepted"
    name: str
    session: str
    version: int
    in_place: bool = False
    """It is going to be written straight into the live weights; `Ready` follows."""


class Ready(_Message):
    """The first bucket of a version that is taken in place is there and verified: let the replica commit, for the others."""

    type: Literal["ready"] = "ready"
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
    error: tuple[int, float, float, float] | None = None
    """What quantising has done to a sample of its elements: the fields of `QuantisationReport`."""


class Staged(_Message):
    """Every byte arrived and every checksum holds; if it is taken in place, every byte was written, too."""

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
    """As bytes; see `weightlane.sync.control.hub.plain_bytes`."""
    return shortened(message.model_dump_json().encode())


def decode(data: bytes) -> Message:
    """Parse a message; `ProtocolError` for anything that is not one."""
    try:
        return _ADAPTER.validate_json(full_text(data, "a control message"))
    except ValidationError as error:
        raise ProtocolError(
            f"not a valid control message: {error.errors()[0]['msg']}.", part="control messages"
        ) from None
