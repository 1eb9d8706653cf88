"""Names and small JSON files of the filesystem engine, in the layout that the `engine` module shows.

Any process that can reach the directory may have written the parsed names and files. So each is validated before it becomes part
of a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...contract.bucket import Bucket
from ...contract.engine import Topology
from ...contract.storing import bucket_file_name
from ...errors import ProtocolError

SESSION = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
SENDER = re.compile(r"sender-(0|[1-9]\d{0,5})")
VERSION = re.compile(r"v(0|[1-9]\d{0,17})")
DOCUMENT = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,100}")
COMMITTED = "COMMITTED"
"""File that marks a version directory that is complete and has served. It is for people; readers use `latest_name`."""
SENDER_FILE = "sender.json"
"""File with the identity of the process that writes to a sender's directory."""


class CommittedVersion(BaseModel):
    """A version that serves or has served, and its directory relative to the engine's path."""

    model_config = ConfigDict(frozen=True, strict=True)

    version: Annotated[int, Field(ge=0)]
    directory: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,99}/sender-\d{1,6}/v\d{1,18}$")]

    @property
    def sender_directory(self) -> str:
        """Directory of the sender that wrote the version."""
        return self.directory.rpartition("/")[0]


class _LatestOnDisk(CommittedVersion):
    committed: list[CommittedVersion]


class _SenderOnDisk(BaseModel):
    model_config = ConfigDict(strict=True)

    process: dict[str, Any]
    oldest: Annotated[int, Field(ge=0)]


def sender_directory(topology: Topology, sender: str, part: str) -> str:
    """Relative directory of a sender: its place in the topology, since its name may have any characters.

    Raises `ProtocolError` for a bad name of the session, which a peer has chosen.
    """
    if not SESSION.fullmatch(topology.session):
        raise ProtocolError(f"{topology.session!r} is not a session name.", part=part)
    try:
        place = list(topology.senders).index(sender)
    except ValueError:
        raise ProtocolError(f"{sender!r} is not a sender of the topology.", part=part) from None
    return f"{topology.session}/sender-{place}"


def version_directory(directory: str, version: int) -> str:
    """Relative directory of a version of the sender that writes to `directory`."""
    return f"{directory}/v{int(version)}"


def payload_name(bucket: Bucket) -> str:
    """Name of the file that has the bucket's bytes."""
    return bucket_file_name(int(bucket.part.first if bucket.part else bucket.index))


def latest_name(directory: str) -> str:
    """Name of the file that lists the committed versions of all senders whose place in the topology is that of `directory`."""
    place = directory.rpartition("-")[2]
    return "latest.json" if place == "0" else f"latest-{place}.json"


def latest_text(committed: Sequence[CommittedVersion]) -> str:
    """Text of the file `latest_name`: the newest version, and all that are kept, newest first."""
    listed = [entry.model_dump() for entry in committed]
    return json.dumps({**listed[0], "committed": listed}, indent=1) + "\n"


def parse_latest(text: str, path: str, part: str) -> list[CommittedVersion]:
    """Parse the output of `latest_text`. Raises `ProtocolError` for any other text."""
    try:
        committed = _LatestOnDisk.model_validate_json(text).committed
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ProtocolError(f"{path} does not list versions: {where}: {first['msg']}.", part=part) from None
    if not committed:
        raise ProtocolError(f"{path} lists no version.", part=part)
    return committed


def sender_text(process: Mapping[str, Any], oldest: int) -> str:
    """Text of `SENDER_FILE`: the identity of the sender's process, and the oldest version that it has not removed."""
    return json.dumps({"process": dict(process), "oldest": oldest})


def parse_sender(text: str) -> tuple[dict[str, Any], int]:
    """Parse the output of `sender_text`. Any other text counts as an unknown process that has removed nothing."""
    try:
        found = _SenderOnDisk.model_validate_json(text)
    except ValidationError:
        return {}, 0
    return found.process, found.oldest
