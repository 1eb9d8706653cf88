"""Names and small JSON files of the filesystem engine; `filesystem` shows where they lie.

Everything read here may have been written by anybody who can reach the directory: it is validated, and never becomes a path
unchecked.
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
"""Marks a version directory that is complete and has served. For people; readers go by `latest_name`."""
SENDER_FILE = "sender.json"


class CommittedVersion(BaseModel):
    """A version that serves or has served, and the directory it lies in, relative to the engine's path."""

    model_config = ConfigDict(frozen=True, strict=True)

    version: Annotated[int, Field(ge=0)]
    directory: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,99}/sender-\d{1,6}/v\d{1,18}$")]

    @property
    def sender_directory(self) -> str:
        """Of the sender that wrote it."""
        return self.directory.rpartition("/")[0]


class _LatestOnDisk(CommittedVersion):
    committed: list[CommittedVersion]


class _SenderOnDisk(BaseModel):
    model_config = ConfigDict(strict=True)

    process: dict[str, Any]
    oldest: Annotated[int, Field(ge=0)]


def checked_session(topology: Topology, part: str) -> str:
    """The session's name, which comes from a peer and becomes a directory."""
    if not SESSION.fullmatch(topology.session):
        raise ProtocolError(f"{topology.session!r} is not a session name.", part=part)
    return topology.session


def sender_directory(topology: Topology, sender: str, part: str) -> str:
    """Relative directory of a sender. Its name may hold anything, so its place in the topology is used."""
    session = checked_session(topology, part)
    try:
        place = list(topology.senders).index(sender)
    except ValueError:
        raise ProtocolError(f"{sender!r} is not a sender of the topology.", part=part) from None
    return f"{session}/sender-{place}"


def version_directory(directory: str, version: int) -> str:
    """Relative directory of a version of the sender that writes to `directory`."""
    return f"{directory}/v{int(version)}"


def payload_name(bucket: Bucket) -> str:
    """File that a bucket is in."""
    return bucket_file_name(int(bucket.part.first if bucket.part else bucket.index))


def latest_name(directory: str) -> str:
    """File that names the newest committed version of the senders that have the place of `directory` in their topology."""
    place = directory.rpartition("-")[2]
    return "latest.json" if place == "0" else f"latest-{place}.json"


def latest_text(committed: Sequence[CommittedVersion]) -> str:
    """Contents of that file: the newest version, and all that are kept, newest first."""
    listed = [entry.model_dump() for entry in committed]
    return json.dumps({**listed[0], "committed": listed}, indent=1) + "\n"


def parse_latest(text: str, path: str, part: str) -> list[CommittedVersion]:
    """Undo `latest_text`; `ProtocolError` for anything else."""
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
    """Contents of `SENDER_FILE`: which process writes here, and which of its versions is the oldest that is still there."""
    return json.dumps({"process": dict(process), "oldest": oldest})


def parse_sender(text: str) -> tuple[dict[str, Any], int]:
    """Undo `sender_text`. What is not of that form was written by nobody, and removed nothing."""
    try:
        found = _SenderOnDisk.model_validate_json(text)
    except ValidationError:
        return {}, 0
    return found.process, found.oldest
