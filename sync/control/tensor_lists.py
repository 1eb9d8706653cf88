"""Lists of tensors by reference: a manifest that names no transfer plan lists all of them, most often the same for every version.

Rank 0 puts the list into the session's mailbox, under its digest, and offers versions with the digest in place of the list.
Whoever does not know it yet looks it up there.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from weightlane.ckpt_engines import Deadline, ProtocolError

from ..plan.supply import PlanMailbox

_PART = "manifest"


def scope_of(session: str) -> str:
    """The mailbox in which a session's lists are."""
    return f"tensors/{session}"


class TensorLists:
    """The newest list of one participant."""

    def __init__(self) -> None:
        self._session = self._digest = ""
        self._tensors: list[Any] = []

    def referred_to(self, plain: dict[str, Any], board: PlanMailbox, session: str) -> dict[str, Any]:
        """[rank 0] A manifest as plain data, with its list replaced by the digest under which it is on the session's `board`."""
        tensors = plain["tensors"]
        if not tensors:
            return plain
        if tensors is not self._tensors:
            self._digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
            self._tensors, self._session = tensors, ""
        if session != self._session:
            board.put(self._digest, tensors)
            self._session = session
        return plain | {"tensors": self._digest}

    def looked_up(self, plain: dict[str, Any], board: PlanMailbox, deadline: Deadline) -> dict[str, Any]:
        """[rollout ranks] The inverse. Raises `ProtocolError`, or as `Mailbox.get`."""
        digest = plain.get("tensors")
        if not isinstance(digest, str):
            return plain
        if digest != self._digest:
            tensors = board.get(digest, deadline)
            if hashlib.sha256(json.dumps(tensors).encode()).hexdigest() != digest:
                raise ProtocolError("the list of tensors is not the one that the manifest refers to.", part=_PART)
            self._tensors, self._digest = tensors, digest
        return plain | {"tensors": self._tensors}
