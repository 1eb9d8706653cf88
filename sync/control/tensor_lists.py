"""`TensorLists`: sends a manifest's list of tensors by reference, since most versions have the same list.

Rank 0 puts the list into the session's mailbox, under its digest, and offers versions with the digest instead of the list.
Rollout ranks that do not have the list yet read it there.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from weightlane.ckpt_engines import Deadline, ProtocolError

from .mailbox import Mailbox

_PART = "manifest"


def scope_of(session: str) -> str:
    """The scope of the mailbox that holds a session's lists."""
    return f"tensors/{session}"


class TensorLists:
    """The newest list of tensors that one participant has sent or read."""

    def __init__(self) -> None:
        self._session = self._digest = ""
        self._tensors: list[Any] = []

    def referred_to(self, plain: dict[str, Any], mailbox: Mailbox, session: str) -> dict[str, Any]:
        """[rank 0] Put the tensor list of the manifest `plain` into the session's `mailbox`. Returns `plain` with the digest."""
        tensors = plain["tensors"]
        if not tensors:
            return plain
        if tensors is not self._tensors:
            self._digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
            self._tensors, self._session = tensors, ""
        if session != self._session:
            mailbox.put(self._digest, tensors)
            self._session = session
        return plain | {"tensors": self._digest}

    def looked_up(self, plain: dict[str, Any], mailbox: Mailbox, deadline: Deadline) -> dict[str, Any]:
        """[rollout ranks] The inverse of `referred_to`. Raises `ProtocolError`, or the errors of `Mailbox.get`.

        Waits only for an answer of the hub, never for another participant, because rank 0 puts the list before it offers the
        version, over the same connection. So the control thread may call it.
        """
        digest = plain.get("tensors")
        if not isinstance(digest, str):
            return plain
        if digest != self._digest:
            tensors = mailbox.get(digest, deadline)
            if hashlib.sha256(json.dumps(tensors).encode()).hexdigest() != digest:
                raise ProtocolError("the list of tensors is not the one that the manifest refers to.", part=_PART)
            self._tensors, self._digest = tensors, digest
        return plain | {"tensors": self._tensors}
