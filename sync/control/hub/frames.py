"""Kinds of the control plane's frames: what members ask of the hub, and what it tells them."""

from __future__ import annotations

from enum import IntEnum

COORDINATOR = "coordinator"
"""Name of the coordinator's inbox. It alone keeps messages that arrive before it is read: trainers may start earlier."""


class Kind(IntEnum):
    """The meaning of a frame. Its name is an inbox, or a scope, to which a line feed and a key may be appended."""

    LISTEN = 1
    """[member] It reads the inbox."""
    POST = 2
    """[member] Hand the payload to the reader of the inbox."""
    PUT = 3
    """[member] Keep the payload under the key."""
    DELETE = 4
    """[member] Forget the key."""
    GET = 5
    """[member] `VALUE` when the key is there."""
    GATHER = 6
    """[member] `VALUE` with everything in the scope (see `gathered`) when as many keys are there as the payload says."""
    CANCEL = 7
    """[member] Do not answer an earlier question of the same name; the payload is a JSON list of its number and payload. `VALUE`,
    under the number of this frame, with the keys in the scope; no answer if that number is 0."""
    STORE = 8
    """[member] `VALUE` with the port of the torch store."""
    READ = 9
    """[member] Everything before the `MARK` of this number was read."""
    MESSAGE = 10
    """[hub] The payload was posted to the inbox."""
    MARK = 11
    """[hub] Answer with `READ` once everything before it in the inbox was read."""
    VALUE = 12
    """[hub] The answer to the question of this number."""
    OVER = 13
    """[hub] The question of this number gets no answer; the payload says why."""
