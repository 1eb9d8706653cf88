"""Kinds of the control plane's frames: the members' requests to the hub, and the hub's frames to members."""

from __future__ import annotations

from enum import IntEnum

COORDINATOR = "coordinator"
"""Name of the coordinator's inbox. Only this inbox keeps messages that arrive before it is read: trainers may start earlier."""


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
    STORE = 8
    """[member] Request the port of the torch store. The reply is `VALUE`."""
    MESSAGE = 9
    """[hub] The payload was posted to the inbox."""
    VALUE = 10
    """[hub] The reply to the request of this number."""
    OVER = 11
    """[hub] The request of this number has failed; the payload is the reason."""
